"""DeepSeek's recipes, its checkpoints on meshes, and the bias that balances its experts."""

import contextlib
import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mesh_round_trip import load_and_save, loss_on
from pith_apps.convert import export_checkpoint, import_checkpoint
from pith_apps.parity import VARIATIONS, cut_sequences, parity_batch, parity_runs, parity_worker
from pith_apps.recipes.load import load_recipe
from pith_apps.recipes.released import deepseek_v2_lite, deepseek_v3, tiny_form
from pith_apps.trainer import build_trainer, step_gradients
from pith_engine.balance import update_balance_biases
from pith_engine.checkpoint import find_checkpoint, save_checkpoint
from pith_engine.contract import Batch, Role
from pith_engine.mesh import Mesh
from pith_engine.optim import AdamW, OptimizerConfig
from pith_models.build import ModelConfig, model_config_from_hf
from pith_models.hf import read_hf_config
from released_deepseek import V2_LITE, V3
from safetensors.torch import load_file
from tiny_run import one_word_tokenizer
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

SLOW_RECIPE = pytest.param("deepseek-v2-lite-tiny", marks=pytest.mark.slow)


def test_recipes_are_the_released_models():
    """Every field, RoPE included: weights of Hugging Face go into the recipe's run."""
    assert deepseek_v2_lite().model == model_config_from_hf(V2_LITE)
    assert deepseek_v3().model == model_config_from_hf(V3)
    assert deepseek_v3().balance.method == "bias"
    for tiny in (tiny_form(deepseek_v2_lite()), tiny_form(deepseek_v3())):
        yarn = tiny.model.rope_scaling
        assert yarn.original_max_position_embeddings < tiny.train.sequence_length


def parity(recipe: str, labels: tuple[str, ...], variations: tuple[str, ...]) -> tuple[bool, str]:
    """Runs in every worker: the verdict and what was printed."""
    runs, output = parity_runs(load_recipe(recipe), labels, "fp64", variations), io.StringIO()
    with contextlib.redirect_stdout(output):
        agree = parity_worker(runs, torch.device("cpu"), variations)
    return agree, output.getvalue()


@pytest.mark.parametrize(
    "variations", [pytest.param((), marks=pytest.mark.slow), VARIATIONS], ids=["plain", "all"]
)
@pytest.mark.parametrize("recipe", [SLOW_RECIPE, "deepseek-v3-tiny"])
def test_meshes_agree(recipe: str, variations: tuple[str, ...], gloo_pool):
    """The whole grid is the command's; here the axes that MLA and shared experts care about."""
    results = gloo_pool.run(parity, recipe, ("pp2-ep2", "cp2-ep2"), variations, timeout=180)
    assert [agree for agree, _ in results] == [True] * 4, results[0][1]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A V3 of four layers with biases that turn choices, bf16 but for these."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=80,
        moe_intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        q_lora_rank=28,
        kv_lora_rank=20,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=1,
        max_position_embeddings=64,
        rope_parameters={
            "rope_theta": 10_000.0,
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        initializer_range=0.1,
    )
    model = DeepseekV3ForCausalLM(config).to(torch.bfloat16)
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias = 0.1 * torch.randn(8)
    model.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def config_of(folder: Path) -> ModelConfig:
    return model_config_from_hf(read_hf_config(folder))


def test_bytes_survive_import_a_mesh_and_export(source: Path, tmp_path: Path, gloo_pool):
    config = config_of(source)
    imported = import_checkpoint(source, tmp_path / "imported", config)
    gloo_pool.run(load_and_save, "pp2-ep2", config, imported, tmp_path / "saved", timeout=180)
    saved = find_checkpoint(tmp_path / "saved")
    assert saved is not None
    tokenizer = one_word_tokenizer(tmp_path / "tokenizer")
    export_checkpoint(saved, tmp_path / "out", config, dtype=torch.bfloat16, companions=tokenizer)
    before, after = (load_file(f / "model.safetensors") for f in (source, tmp_path / "out"))
    assert before.keys() == after.keys()
    for key, value in before.items():
        wide = torch.float32 if "correction_bias" in key else torch.bfloat16
        assert value.dtype == after[key].dtype == wide
        assert torch.equal(value.view(torch.uint8), after[key].view(torch.uint8)), key


@pytest.mark.parametrize("label", ["ep2", "pp2-ep2", "cp2-ep2"])
def test_imported_weights_have_transformers_loss_on_a_mesh(
    label: str, source: Path, tmp_path: Path, gloo_pool
):
    """Biases that selected wrongly on any rank would send tokens to other experts."""
    config = config_of(source)
    imported = import_checkpoint(source, tmp_path / "imported", config)
    tokens = torch.randint(97, (8, 49), generator=torch.Generator().manual_seed(1))
    model = DeepseekV3ForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    batches = [
        Batch(tokens=row[:-1], targets=row[1:], positions=torch.arange(48), sequence_length=48)
        for row in tokens
    ]
    losses = gloo_pool.run(loss_on, label, config, imported, batches, timeout=180)
    found = [loss for loss in losses if loss == loss]
    assert len(found) == (2 if label == "ep2" else 4)
    assert found == pytest.approx([expected.item()] * len(found), rel=1e-6)


def test_the_bias_follows_the_load_and_is_exported(tmp_path: Path):
    """Two steps of one process: bias += rate * sign(mean - count), fp32 in a bf16 export."""
    config = tiny_form(deepseek_v3())
    mesh, rate = Mesh.single(), config.balance.bias_rate
    trainer = build_trainer(config, mesh, torch.device("cpu"))
    optimizer = AdamW(trainer.parameters, OptimizerConfig())
    expected = {layer: torch.zeros(8) for layer in (1, 2, 3)}
    whole = parity_batch(replace(config, train=replace(config.train, batch=8)), torch.device("cpu"))
    batches = [cut_sequences(whole, number, 1) for number in range(8)]
    for _ in range(2):
        step_gradients(trainer, batches)
        counts = trainer.pipeline.expert_counts
        assert counts.keys() == expected.keys()
        optimizer.step(1e-3)
        update_balance_biases(trainer.parameters, counts, rate)
        for layer, count in counts.items():
            expected[layer] += rate * torch.sign(count.double().mean() - count).float()
    biases = [p for p in trainer.parameters if p.role is Role.BALANCE_BIAS]
    assert [p.name for p in biases] == [f"layers.{layer}.router_bias" for layer in expected]
    for parameter, bias in zip(biases, expected.values(), strict=True):
        torch.testing.assert_close(parameter.shard, bias)
        assert bias.abs().max() > rate
    saved = save_checkpoint(tmp_path / "saved", 2, trainer.parameters, optimizer, {}, mesh)
    out, tokenizer = tmp_path / "out", one_word_tokenizer(tmp_path / "tokenizer")
    export_checkpoint(saved, out, config.model, dtype=torch.bfloat16, companions=tokenizer)
    exported = load_file(out / "model.safetensors")
    for layer, bias in expected.items():
        key = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        assert exported[key].dtype == torch.float32
        torch.testing.assert_close(exported[key], bias)

"""Dense Qwen3 against `transformers.Qwen3ForCausalLM`: logits, loss, gradients, files."""

import copy
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from pith_engine.balance import BalanceConfig
from pith_engine.mesh import Mesh, MeshConfig
from pith_engine.pipeline import Pipeline
from pith_engine.plain import plain_hidden
from pith_models.build import (
    build_chunks,
    canonical_tensors,
    forward_flops,
    model_config_from_hf,
    parameter_counts,
)
from pith_models.hf import HuggingFaceTensors, export_tensors, read_hf_config
from pith_models.qwen3_dense import Qwen3Config
from pith_ops.attention import AttentionBackend
from pith_ops.rms_norm import rms_norm
from pith_ops.rope import Yarn
from their_models import (
    LENGTH,
    Promote,
    load_ours,
    make_batch,
    our_gradients,
    randomise,
    run_theirs,
    their_gradients,
    worst,
)
from tiny_qwen3 import read_weights
from transformers import Qwen3Config as TheirConfig
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rope_theta": 10_000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS: dict[str, dict[str, object]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "one-group": {"num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 2},
    # Sequences of 64 tokens are four times the original length.
    "yarn": {"rope_scaling": YARN},
    "yarn-factor": {"rope_scaling": {**YARN, "attention_factor": 0.7, "beta_fast": 8.0}},
}
# The published config.json of Qwen3-0.6B, in the spelling of transformers 4.
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def make_theirs(variant: str, dtype: torch.dtype) -> Qwen3ForCausalLM:
    # A copy: transformers writes the base into the table of rope_scaling that it is given.
    fields = copy.deepcopy({**TINY, **VARIANTS[variant]})
    config = TheirConfig(**fields, attn_implementation="eager")
    model = Qwen3ForCausalLM(config).to(dtype)
    randomise(model)
    return model.eval()


@pytest.mark.parametrize(
    ("dtype", "logits_atol", "gradient_rtol"),
    [(torch.float64, 1e-10, 1e-10), (torch.float32, 1e-4, 1e-4)],
    ids=["fp64", "fp32"],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_every_gradient_agree_with_transformers(
    variant: str, dtype: torch.dtype, logits_atol: float, gradient_rtol: float, tmp_path: Path
):
    batch = make_batch(TINY["vocab_size"])
    if dtype is torch.float64:
        with Promote():
            theirs = make_theirs(variant, dtype)
            expected, expected_loss = run_theirs(theirs, batch)
    else:
        theirs = make_theirs(variant, dtype)
        expected, expected_loss = run_theirs(theirs, batch)
    theirs.save_pretrained(tmp_path)
    chunks, units = load_ours(tmp_path, dtype)

    *_, (hidden, routing) = plain_hidden(chunks, batch)
    assert routing is None
    logits, loss = chunks[-1].logits(hidden), chunks[-1].loss(hidden, batch)
    loss.backward()

    assert (logits - expected).abs().max() < logits_atol
    assert expected.abs().max() > 1, "logits so small that the tolerance would prove nothing"
    assert loss.item() == pytest.approx(expected_loss.item(), rel=gradient_rtol)
    gradients = their_gradients(theirs, model_config_from_hf(read_hf_config(tmp_path)))
    ours = our_gradients(units)
    assert ours.keys() == gradients.keys()
    for name, gradient in ours.items():
        assert gradient.isfinite().all() and gradient.abs().max() > 0, name
        assert worst(gradient, gradients[name]) < gradient_rtol, name


def test_yarn_changes_the_logits(tmp_path: Path):
    """What the comparison above would miss if both sides ignored the scaling."""
    logits = []
    for variant in ("untied", "yarn", "yarn-factor"):
        make_theirs(variant, torch.float64).save_pretrained(tmp_path / variant)
        chunks, _ = load_ours(tmp_path / variant, torch.float64)
        with torch.no_grad():
            *_, (hidden, _) = plain_hidden(chunks, make_batch(TINY["vocab_size"]))
            logits.append(chunks[-1].logits(hidden))
    assert min((a - b).abs().max() for a, b in pairwise(logits)) > 0.1


def test_bf16_rounds_as_transformers_does(tmp_path: Path):
    """The norm has the same bits; logits differ by less than bf16's own error against float64."""
    torch.manual_seed(0)
    x, weight = torch.randn(33, 64).bfloat16(), torch.randn(64).bfloat16()
    norm = Qwen3RMSNorm(64).bfloat16()
    norm.weight.data.copy_(weight)
    ours = rms_norm(x, weight, 1e-6)
    assert ours.dtype == torch.bfloat16 and torch.equal(ours, norm(x))

    batch = make_batch(TINY["vocab_size"])
    theirs = make_theirs("untied", torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    chunks, _ = load_ours(tmp_path, torch.bfloat16)
    exact, _ = load_ours(tmp_path, torch.float64)
    with torch.no_grad():
        *_, (hidden, _) = plain_hidden(chunks, batch)
        *_, (exact_hidden, _) = plain_hidden(exact, batch)
        logits, reference = chunks[-1].logits(hidden), exact[-1].logits(exact_hidden)
        expected = theirs(batch.tokens.view(-1, LENGTH)).logits.flatten(0, 1)
    assert logits.dtype == torch.bfloat16
    own_error = (expected.double() - reference).square().mean().sqrt()
    assert 0 < (logits.double() - reference).square().mean().sqrt() < 1.2 * own_error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("variant", ["untied", "tied", "yarn"])
def test_files_come_back_with_the_same_bytes(variant: str, dtype: torch.dtype, tmp_path: Path):
    make_theirs(variant, dtype).save_pretrained(tmp_path / "in", max_shard_size=60_000)
    config = model_config_from_hf(read_hf_config(tmp_path / "in"))
    layout = canonical_tensors(config)
    values = HuggingFaceTensors(tmp_path / "in", layout, torch.float32)
    ours = {tensor.name: values[tensor.name] for tensor in layout}
    export_tensors(ours, layout, config.to_hf(), tmp_path / "out", dtype=dtype)
    before, after = read_weights(tmp_path / "in"), read_weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert ("lm_head.weight" in after) == (variant != "tied")
    for key, value in before.items():
        assert value.dtype == after[key].dtype == dtype
        assert torch.equal(value.view(torch.uint8), after[key].view(torch.uint8)), key
    # And transformers itself opens the folder, with nothing missing and the same function.
    again, account = Qwen3ForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(account[name] for name in ("missing_keys", "unexpected_keys"))
    tokens = make_batch(TINY["vocab_size"]).tokens.view(-1, LENGTH)
    with torch.no_grad():
        first = Qwen3ForCausalLM.from_pretrained(tmp_path / "in")
        assert torch.equal(again(tokens).logits, first(tokens).logits)
    assert model_config_from_hf(read_hf_config(tmp_path / "out")) == config


@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_flag_and_the_tensors_must_agree(has_head: bool, is_tied: bool, tmp_path: Path):
    """A head beside a tied embedding must be a copy of it; one that is missing is an error."""
    source = make_theirs("untied" if has_head else "tied", torch.float32)
    source.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    changed = {**json.loads(path.read_text()), "tie_word_embeddings": is_tied}
    path.write_text(json.dumps(changed))
    config = model_config_from_hf(changed)
    layout = canonical_tensors(config)
    if is_tied != has_head:
        HuggingFaceTensors(tmp_path, layout, torch.float32)
        return
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        tensors = HuggingFaceTensors(tmp_path, layout, torch.float32)
        assert tensors["embedding"] is not None


def test_published_sizes():
    """0.6 B with a tied head, whose heads are wider than hidden size over heads."""
    config = model_config_from_hf(QWEN3_06B)
    assert isinstance(config, Qwen3Config) and config.head_dim == 128
    layer = 2 * 1024 * 2048 + 2 * 1024 * 1024 + 2 * 128 + 3 * 1024 * 3072 + 2 * 1024
    total = 151_936 * 1024 + 28 * layer + 1024
    counts = parameter_counts(config)
    assert counts.total == counts.active == total == 596_049_920
    chunks = build_chunks(
        config, Mesh.single(), (14, 14), attention_backend=AttentionBackend.REFERENCE
    )
    names = {id(p): p.numel() for chunk in chunks for p in chunk.parameters()}
    assert sum(names.values()) == total
    weights = total - 151_936 * 1024 - 28 * (2 * 128 + 2 * 1024) - 1024
    pairs = 28 * 2 * 2 * 16 * 128 * (64 + 1) / 2
    expected = 2 * weights + 2 * 151_936 * 1024 + pairs
    layers, head = forward_flops(config, 64)
    assert sum(layers) + head == pytest.approx(expected, rel=1e-12)
    assert (config.num_experts, config.num_experts_per_tok, config.is_sparse(0)) == (0, 0, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 8}, "num_experts = 8: unknown field"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers = [1]: unknown field"),
        ({"attention_bias": True}, "attention_bias = True: only False"),
        ({"use_sliding_window": True}, "use_sliding_window = True: only False"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"layer_types": 28}, "layer_types = 28: only ['full_attention', "),
        ({"layer_types": []}, "layer_types = []: only ['full_attention', "),
        ({"layer_types": ["full_attention"] * 27}, "layer_types = ['full_attention', "),
        ({"intermediate_size": None}, "intermediate_size: missing"),
        ({"head_dim": None}, "head_dim: missing"),
        ({"head_dim": 63}, "model.head_dim = 63: must be even"),
        ({"num_key_value_heads": 3}, "model.num_attention_heads = 16: must be a multiple of"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, "model.rope_scaling.factor = 0.5"),
        ({"rope_scaling": YARN, "rope_theta": 1}, "model.rope_theta = 1.0: YaRN needs more than 1"),
        ({"tie_word_embeddings": 1}, "model.tie_word_embeddings is 1, of type int"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        model_config_from_hf({**QWEN3_06B, **changes})


def test_config_fields_survive_both_spellings():
    config = model_config_from_hf(QWEN3_06B)
    for variant in (
        config,
        replace(config, tie_word_embeddings=False, head_dim=64),
        replace(config, rope_scaling=Yarn(factor=4.0, original_max_position_embeddings=32_768)),
    ):
        assert model_config_from_hf(variant.to_hf()) == variant
        theirs = TheirConfig(**variant.to_hf())
        assert theirs.rope_parameters["rope_theta"] == variant.rope_theta
        assert model_config_from_hf(theirs.to_diff_dict()) == variant
    # transformers' own default, not hidden size / heads = 64.
    fields = {name: value for name, value in QWEN3_06B.items() if name != "head_dim"}
    assert model_config_from_hf(fields).head_dim == TheirConfig().head_dim == 128


def test_a_dense_model_has_no_experts_to_spread():
    config = model_config_from_hf(QWEN3_06B)
    mesh = Mesh.plan(MeshConfig(ep=2), 0)
    with pytest.raises(ValueError, match=r"mesh\.ep = 2: the model has no experts; use mesh\.dp"):
        build_chunks(config, mesh, (14, 14), attention_backend=AttentionBackend.REFERENCE)


def test_a_step_without_any_expert(tmp_path: Path):
    """The pipeline's own losses: nothing balanced, no load, and gradients as plain autograd's."""
    make_theirs("tied", torch.float64).save_pretrained(tmp_path)
    batch = make_batch(TINY["vocab_size"])
    num_targets = 2 * int((batch.targets >= 0).sum())
    chunks, units = load_ours(tmp_path, torch.float64)
    for _ in range(2):
        *_, (hidden, _) = plain_hidden(chunks, batch)
        (chunks[-1].loss(hidden, batch) / num_targets).backward()
    expected = our_gradients(units)

    chunks, units = load_ours(tmp_path, torch.float64)
    pipeline = Pipeline(
        chunks,
        Mesh.single(),
        hidden_size=TINY["hidden_size"],
        dtype=torch.float64,
        device=torch.device("cpu"),
        balance=BalanceConfig(),
        recompute="attention+experts",
    )
    losses = pipeline.train_step([batch, batch], num_targets)
    assert (losses.balance, losses.z_loss, losses.max_load) == (0.0, 0.0, 0.0)
    assert (losses.dead_experts, losses.load_entropy) == (0, 0.0)
    assert pipeline.saved_counts() == {}
    found = our_gradients(units)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-15)

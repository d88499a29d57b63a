"""Hugging Face folder -> checkpoint -> any mesh -> checkpoint -> Hugging Face folder."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mesh_round_trip import build_on, load_and_save
from pith_apps.checks import changed_fields
from pith_apps.config import config_record
from pith_apps.convert import export_checkpoint, import_checkpoint
from pith_apps.recipes.demo import demo
from pith_engine.checkpoint import (
    find_checkpoint,
    read_manifest,
    read_tensor,
    save_checkpoint,
    tensor_names,
)
from pith_engine.contract import Batch, Role
from pith_engine.fsdp import sharded_parameters
from pith_engine.mesh import Mesh
from pith_engine.optim import AdamW, OptimizerConfig
from pith_engine.plain import plain_hidden
from pith_models.build import ModelConfig, model_config_from_hf
from pith_models.hf import held_folder, read_hf_config
from safetensors.torch import load_file, save_file
from tiny_qwen3 import assert_same_bytes, read_weights, save_tiny_qwen3
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_tiny_qwen3(tmp_path / "source")
    return tmp_path / "source"


def config_of(source: Path) -> ModelConfig:
    return model_config_from_hf(read_hf_config(source))


@pytest.mark.parametrize(
    ("label", "tied", "replicate"),
    [
        ("pp2-ep2", False, False),
        ("dp2-ep2", True, True),
        pytest.param("dp2-ep2", False, False, marks=pytest.mark.slow),
        pytest.param("ep4", False, False, marks=pytest.mark.slow),
        pytest.param("pp2-ep2", True, False, marks=pytest.mark.slow),
    ],
)
def test_bytes_survive_import_a_mesh_and_export(
    label: str, tied: bool, replicate: bool, tmp_path: Path, gloo_pool
):
    source = tmp_path / "source"
    save_tiny_qwen3(source, tied=tied)
    config = config_of(source)
    assert config.tie_word_embeddings == tied
    imported = import_checkpoint(source, tmp_path / "imported", config)
    assert ("head" in tensor_names(imported)) != tied
    arguments = (label, config, imported, tmp_path / "saved", replicate)
    gloo_pool.run(load_and_save, *arguments, timeout=180)
    saved = find_checkpoint(tmp_path / "saved")
    assert saved is not None
    export_checkpoint(saved, tmp_path / "out", config, dtype=torch.bfloat16, companions=source)
    assert_same_bytes(source, tmp_path / "out")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (source / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_exported_weights_give_our_logits_in_transformers(source: Path, tmp_path: Path):
    """Weights that were never anybody else's: ours, in fp32."""
    config = config_of(source)
    mesh = Mesh.single()
    chunks, units = build_on(mesh, config)
    parameters = sharded_parameters(units)
    with torch.no_grad():
        for parameter in parameters:
            if parameter.role is not Role.NORM:
                parameter.shard.mul_(5)
    saved = save_checkpoint(
        tmp_path / "saved", 1, parameters, AdamW(parameters, OptimizerConfig()), {}, mesh
    )
    export_checkpoint(saved, tmp_path / "out", config, dtype=torch.float32, companions=source)
    tokens = torch.randint(97, (2, 48), generator=torch.Generator().manual_seed(1))
    batch = Batch(
        tokens=tokens.flatten(),
        targets=tokens.flatten(),
        positions=torch.arange(48).repeat(2),
        sequence_length=48,
    )
    for unit in units:
        unit.gather()
    with torch.no_grad():
        hidden = [hidden for hidden, _ in plain_hidden(chunks, batch)][-1]
        ours = chunks[-1].logits(hidden)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(tokens).logits
    assert theirs.dtype == torch.float32
    assert (theirs.flatten(0, 1) - ours).abs().max() < 1e-4
    assert ours.abs().max() > 1


def test_tokenizer_folder_gives_the_end_of_text(source: Path, tmp_path: Path):
    """A run that started here has a tokenizer folder and no config.json to take ids from."""
    config = config_of(source)
    imported = import_checkpoint(source, tmp_path / "imported", config)
    tokenizer = tmp_path / "tokenizer"
    AutoTokenizer.from_pretrained(source).save_pretrained(tokenizer)
    assert not (tokenizer / "config.json").exists()
    out = tmp_path / "out"
    export_checkpoint(imported, out, config, dtype=torch.bfloat16, companions=tokenizer)
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 1
    assert AutoTokenizer.from_pretrained(out).eos_token == "</s>"
    assert AutoModelForCausalLM.from_pretrained(out).config.eos_token_id == 1


def test_another_tokenizer_than_the_run_had_is_refused(source: Path, tmp_path: Path):
    config = config_of(source)
    saved = import_checkpoint(source, tmp_path / "imported", config)
    out, other = tmp_path / "out", tmp_path / "other"
    other.mkdir()
    with pytest.raises(ValueError, match="other is no folder with a tokenizer"):
        export_checkpoint(saved, out, config, dtype=torch.bfloat16, companions=other)
    (other / "tokenizer.json").write_text((source / "tokenizer.json").read_text() + " ")
    with pytest.raises(ValueError, match=r"other is not the run's: set --data\.tokenizer"):
        export_checkpoint(saved, out, config, dtype=torch.bfloat16, companions=other)
    assert not out.exists()
    mask = os.umask(0o027)
    try:
        export_checkpoint(saved, out, config, dtype=torch.bfloat16, companions=source)
    finally:
        os.umask(mask)
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o640}


def test_import_says_what_became_of_every_key(source: Path, tmp_path: Path, capsys):
    import_checkpoint(source, tmp_path / "imported", config_of(source))
    keys = len(read_weights(source))
    assert (
        f"keys: {keys} loaded, 0 unexpected, 0 missing; dtype changes: {keys} keys bfloat16 -> "
        "float32" in capsys.readouterr().out
    )


def test_import_keeps_the_model_as_a_run_would(source: Path, tmp_path: Path):
    config = config_of(source)
    facts = read_manifest(import_checkpoint(source, tmp_path / "imported", config)).run
    recorded = config_record(replace(demo(), model=config))
    assert facts["config"] == {"model": recorded["model"]}
    assert changed_fields(facts["config"], recorded) == []


def test_import_into_another_model_is_refused(source: Path, tmp_path: Path):
    config = replace(config_of(source), num_experts_per_tok=4, norm_topk_prob=False)
    with pytest.raises(ValueError, match="another model") as error:
        import_checkpoint(source, tmp_path / "imported", config)
    assert "model.num_experts_per_tok: 2 -> 4" in str(error.value)
    assert "model.norm_topk_prob" in str(error.value)
    assert not (tmp_path / "imported").exists()


def test_tokenizer_beyond_the_vocabulary_is_refused(source: Path, tmp_path: Path):
    """One that is smaller, as the source's is, shrinks nothing."""
    config, tokenizer = config_of(source), (source / "tokenizer.json").read_text()
    (source / "tokenizer.json").unlink()  # else an export takes no other
    imported = import_checkpoint(source, tmp_path / "imported", config)
    (source / "tokenizer.json").write_text(tokenizer)
    small = tmp_path / "small"
    export_checkpoint(imported, small, config, dtype=torch.bfloat16, companions=source)
    assert read_weights(small)["lm_head.weight"].shape == (97, 64)
    assert json.loads((small / "config.json").read_text())["vocab_size"] == 97
    tokenizer = json.loads(tokenizer)
    tokenizer["model"]["vocab"]["last"] = 96
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    export_checkpoint(imported, tmp_path / "fits", config, dtype=torch.bfloat16, companions=source)
    tokenizer["model"]["vocab"]["last"] = 97
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = r"tokenizer\.json has ids up to 97, but model\.vocab_size is 97"
    with pytest.raises(ValueError, match=message):
        import_checkpoint(source, tmp_path / "again", config)
    with pytest.raises(ValueError, match=message):
        export_checkpoint(
            imported, tmp_path / "out", config, dtype=torch.bfloat16, companions=source
        )
    assert not (tmp_path / "again").exists() and not (tmp_path / "out").exists()


def test_fp32_goes_to_and_fro_without_a_changed_bit(source: Path, tmp_path: Path):
    """A source in fp32, whose values bf16 does not have."""
    config, theirs = config_of(source), read_weights(source)
    generator = torch.Generator().manual_seed(1)
    for path in source.glob("model*"):
        path.unlink()
    theirs = {key: torch.randn(t.shape, generator=generator) for key, t in theirs.items()}
    save_file(theirs, source / "model.safetensors")
    first = import_checkpoint(source, tmp_path / "first", config)
    export_checkpoint(first, tmp_path / "out", config, dtype=torch.float32, companions=source)
    out = read_weights(tmp_path / "out")
    assert out.keys() == theirs.keys()
    assert all(out[key].dtype == torch.float32 for key in out)
    assert all(torch.equal(out[key], theirs[key]) for key in out)
    second = import_checkpoint(tmp_path / "out", tmp_path / "second", config)
    assert tensor_names(first) == tensor_names(second)
    for name in tensor_names(first):
        key = f"model.{name}"
        assert torch.equal(read_tensor(first, key), read_tensor(second, key)), name


def test_damaged_source_leaves_nothing(source: Path, tmp_path: Path):
    path = sorted(source.glob("*.safetensors"))[1]
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match=f"{path.name} is damaged"):
        import_checkpoint(source, tmp_path / "imported", config_of(source))
    path.unlink()
    with pytest.raises(ValueError, match=f"lacks {path.name}, named by its index"):
        import_checkpoint(source, tmp_path / "imported", config_of(source))
    assert not (tmp_path / "imported").exists()


def test_a_value_that_is_not_finite_leaves_no_checkpoint(source: Path, tmp_path: Path):
    """It is met in the middle of writing: no traceback of the writer, no half checkpoint."""
    path = sorted(source.glob("*.safetensors"))[-1]
    tensors = load_file(path)
    name, tensor = next(iter(tensors.items()))
    tensor.view(-1)[0] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"^[a-z0-9_.]+ holds values that are not finite$"):
        import_checkpoint(source, tmp_path / "imported", config_of(source))
    assert list((tmp_path / "imported").iterdir()) == [], name


def test_import_holds_a_new_run_folder_too(source: Path, tmp_path: Path):
    """A run of that name that starts meanwhile would begin from initial weights."""
    with held_folder(tmp_path / "run"), pytest.raises(ValueError, match="run is in use by another"):
        import_checkpoint(source, tmp_path / "run" / "checkpoints", config_of(source))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_import_beside_a_checkpoint_is_refused(source: Path, tmp_path: Path):
    import_checkpoint(source, tmp_path / "imported", config_of(source))
    with pytest.raises(ValueError, match="step-00000000 would be resumed instead"):
        import_checkpoint(source, tmp_path / "imported", config_of(source))


def test_export_of_another_model_or_half_a_checkpoint_is_refused(source: Path, tmp_path: Path):
    config = config_of(source)
    imported = import_checkpoint(source, tmp_path / "imported", config)
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"missing layers\.3\.mlp_down_proj"):
        other = replace(config, mlp_only_layers=(1, 3))
        export_checkpoint(imported, out, other, dtype=torch.bfloat16, companions=source)
    (imported / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"incomplete: no manifest\.json"):
        export_checkpoint(imported, out, config, dtype=torch.bfloat16, companions=source)
    assert not out.exists()

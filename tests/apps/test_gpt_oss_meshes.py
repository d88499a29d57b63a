"""GPT-OSS on meshes: windows and sinks under context parallelism, biases of experts on their ranks.

Imports no transformers, which four workers would then import too.
"""

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from mesh_round_trip import load_and_save
from pith_apps.checks import violations
from pith_apps.convert import export_checkpoint, import_checkpoint
from pith_apps.parity import parity_runs, parity_worker
from pith_apps.plan import Machine
from pith_apps.recipes.released import gpt_oss_20b, gpt_oss_120b, tiny_form
from pith_engine.balance import BalanceConfig
from pith_engine.checkpoint import find_checkpoint
from pith_engine.context_parallel import context_attention
from pith_models.build import canonical_tensors, model_config_from_hf
from released_gpt_oss import GPT_OSS_20B, GPT_OSS_120B
from safetensors.torch import load_file, save_file
from tiny_run import one_word_tokenizer


def parity(labels: tuple[str, ...], variations: tuple[str, ...], broken: str) -> tuple[bool, str]:
    """Runs in every worker: the verdict and what was printed."""
    fault: Any = contextlib.nullcontext()
    if broken:

        def wrong(*operands: Any, **settings: Any) -> torch.Tensor:
            if operands[4].size > 1:
                kept = settings[broken]
                settings[broken] = kept.detach() if broken == "sinks" else None
            return context_attention(*operands, **settings)

        fault = patch("pith_models.gpt_oss.context_attention", wrong)
    output = io.StringIO()
    config = tiny_form(gpt_oss_20b())
    # With cp4 a block has 4 tokens, so that a window of 8 reaches over the block before it.
    config = replace(config, train=replace(config.train, sequence_length=32))
    runs = parity_runs(config, labels, "fp64", variations)
    with contextlib.redirect_stdout(output), fault:
        agree = parity_worker(runs, torch.device("cpu"), variations)
    return agree, output.getvalue()


@pytest.mark.parametrize(
    ("labels", "variations", "broken"),
    [
        (("cp4", "cp2-ep2"), (), ""),
        (
            ("pp2-ep2", "dp2-cp2"),
            ("packed", "padding", "aux", "tied", "recompute", "muon", "hsdp"),
            "",
        ),
        (("cp2",), (), "window"),
        (("cp2",), (), "sinks"),
    ],
    ids=["plain", "varied", "window-lost", "sinks-frozen"],
)
def test_meshes_agree_unless_a_window_or_the_sinks_gradient_is_lost(
    labels: tuple[str, ...], variations: tuple[str, ...], broken: str, gloo_pool: Any
):
    results = gloo_pool.run(parity, labels, variations, broken, timeout=240)
    text = results[0][1]
    agrees = [agree for agree, _ in results]  # a rank beyond the mesh has nothing to deny
    assert agrees[0] == (not broken) and (broken or all(agrees)), text
    assert broken != "sinks" or text.splitlines()[-2].endswith("sinks"), text


def test_bytes_survive_import_a_mesh_and_export(tmp_path: Path, gloo_pool: Any):
    config, source = tiny_form(gpt_oss_20b()).model, tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config.to_hf()))
    generator = torch.Generator().manual_seed(2)
    tensors = {
        key: torch.randn(shape, generator=generator).bfloat16()
        for tensor in canonical_tensors(config)
        for key, shape in tensor.stored().items()
    }
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    imported = import_checkpoint(source, tmp_path / "imported", config)
    gloo_pool.run(
        load_and_save, "pp2-ep2", config, imported, tmp_path / "saved", False, timeout=180
    )
    saved = find_checkpoint(tmp_path / "saved")
    assert saved is not None
    tokenizer = one_word_tokenizer(tmp_path / "tokenizer")
    export_checkpoint(saved, tmp_path / "out", config, dtype=torch.bfloat16, companions=tokenizer)
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == tensors.keys()
    for key, value in tensors.items():
        assert torch.equal(value.view(torch.int16), after[key].view(torch.int16)), key


def test_a_selection_bias_is_refused(tmp_path: Path):
    run = replace(
        tiny_form(gpt_oss_20b()), runs_folder=tmp_path, balance=BalanceConfig(method="bias")
    )
    (found,) = violations(run, Machine(world_size=2, processes_here=2, num_gpus=0))
    assert found.startswith("balance.method bias") and "no place for the bias" in found


def test_recipes_are_the_released_models_with_their_yarn():
    assert gpt_oss_20b().model == model_config_from_hf(GPT_OSS_20B)
    assert gpt_oss_120b().model == model_config_from_hf(GPT_OSS_120B)

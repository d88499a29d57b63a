"""Models without any expert, and several families in one configuration type."""

import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pith_apps.checks import changed_fields, violations
from pith_apps.cli import main
from pith_apps.config import RunConfig, config_record
from pith_apps.convert import import_checkpoint
from pith_apps.corpus import tokenize_files, train_tokenizer
from pith_apps.parity import FULL_GRID, PARITY_MESHES, parity_runs, vary, without_experts
from pith_apps.plan import Machine, describe_run
from pith_apps.recipes.load import load_recipe
from pith_apps.recipes.released import qwen3_8b, qwen3_30b_a3b, tiny_form
from pith_apps.run_log import read_metrics
from pith_engine.balance import BalanceConfig
from pith_engine.fsdp import ShardingConfig
from pith_engine.mesh import MeshConfig
from pith_engine.violations import type_violations
from pith_models.build import model_config_from_hf
from pith_models.hf import read_hf_config
from pith_ops.rope import Yarn
from tiny_qwen3 import save_tiny_qwen3
from transformers import AutoModelForCausalLM

RECIPE = """
from dataclasses import replace
from pathlib import Path
from pith_apps.config import DataConfig, RunConfig
from pith_apps.recipes.released import qwen3_8b, tiny_form
from pith_ops.rope import Yarn

def dense() -> RunConfig:
    tiny, root = tiny_form(qwen3_8b()), Path(__file__).parent
    yarn = Yarn(factor=2.0, original_max_position_embeddings=64)
    return replace(
        tiny,
        model=replace(tiny.model, vocab_size=300, tie_word_embeddings=True, rope_scaling=yarn),
        train=replace(tiny.train, dtype="fp64"),
        data=DataConfig(
            training=root / "corpus", held_out=root / "corpus", tokenizer=root / "tokenizer"
        ),
    )
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small corpus with a recipe beside it."""
    root = tmp_path_factory.mktemp("dense")
    words = [f"word{number}" for number in range(300)]
    (root / "text.txt").write_text(" ".join(np.random.default_rng(0).choice(words, 4000)))
    train_tokenizer([root / "text.txt"], root / "tokenizer", vocab_size=300)
    tokenize_files([root / "text.txt"], root / "tokenizer", root / "corpus")
    (root / "recipe.py").write_text(RECIPE)
    return root


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> RunConfig:
    """That recipe in one process."""
    loaded = load_recipe(str(folder / "recipe.py"))
    return replace(loaded, runs_folder=tmp_path / "runs", mesh=MeshConfig())


def machine(world_size: int = 1) -> Machine:
    return Machine(world_size=world_size, processes_here=world_size, num_gpus=0)


def run_pith(folder: Path, *arguments: str) -> str:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "pith_apps.cli", *arguments],
        cwd=folder,
        env={**kept, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps_of(folder: Path, name: str) -> list[dict]:
    return [record for record in read_metrics(folder / "runs" / name) if "loss" in record]


@pytest.fixture(scope="module")
def one(folder: Path) -> str:
    """What a run of four steps in one process, `one`, prints."""
    return run_pith(folder, "pretrain", "recipe.py", "--mesh.dp", "1", "--name", "one")


@pytest.mark.slow
def test_a_dense_run_trains_alike_in_one_process_and_on_a_pipeline(folder: Path, one: str):
    options = ("--mesh.pp", "2", "--mesh.dp", "1", "--train.recompute", "attention+experts")
    two = run_pith(folder, "pretrain", "recipe.py", "--name", "two", *options)
    assert "balance none: no experts" in one and "sharding: dense in 1 shard(s) over data\n" in one
    assert "2 process(es)" in two
    first, second = steps_of(folder, "one"), steps_of(folder, "two")
    assert [record["step"] for record in second] == [1, 2, 3, 4]
    for ours, theirs in zip(first, second, strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-12)
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-10)
        for name in ("balance", "max_load", "dead_experts", "load_entropy"):
            assert ours[name] is None and theirs[name] is None
    assert one.count("  balance n/a  max-load n/a  lr ") == 4 and "warning" not in one
    exported = folder / "runs" / "two" / "export"
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float64)
    assert model.config.model_type == "qwen3" and model.config.tie_word_embeddings


@pytest.mark.slow
def test_a_dense_run_resumes_on_another_mesh_and_is_evaluated(folder: Path, one: str):
    three = ("recipe.py", "--name", "three")
    alone = ("--mesh.dp", "1", "--train.steps", "2", "--lr.schedule", "constant")
    run_pith(folder, "pretrain", *three, *alone, "--lr.decay-steps", "None")
    resumed = run_pith(folder, "pretrain", *three, "--sharding.replicate-dense")
    assert "resumed at step 2 of 4" in resumed and "frequencies" not in resumed
    assert [record["step"] for record in steps_of(folder, "three")] == [1, 2, 3, 4]
    evaluated = run_pith(folder, "evaluate", *three, "--mesh.dp", "1")
    last = read_metrics(folder / "runs" / "three")[-1]["held_out_loss"]
    assert f"held-out loss {last:.6f} after step 4" in evaluated


@pytest.mark.parametrize(
    ("balance", "named"),
    [
        (BalanceConfig(method="bias"), "balance.method is 'bias'"),
        (BalanceConfig(method="global-batch"), "balance.method is 'global-batch'"),
        (BalanceConfig(coefficient=0.1), "balance.coefficient is 0.1"),
        (BalanceConfig(method="none", z_coefficient=1e-3), "balance.z_coefficient is 0.001"),
        (BalanceConfig(bias_rate=0.1), "balance.bias_rate is 0.1"),
    ],
)
def test_balancing_is_refused_where_there_is_nothing_to_balance(
    run: RunConfig, balance: BalanceConfig, named: str
):
    assert violations(run, machine()) == []
    assert violations(replace(run, balance=BalanceConfig(method="none")), machine()) == []
    (found,) = violations(replace(run, balance=balance), machine())
    assert found == f"{named}: the model has no experts; leave it out"


def test_meshes_and_replicas_of_experts_are_refused(run: RunConfig):
    (found,) = violations(replace(run, mesh=MeshConfig(ep=2)), machine(2))
    assert found == "mesh.ep = 2: the model has no experts; use mesh.dp"
    sharding = ShardingConfig(replicate_dense=True, replicate_experts=True)
    asked = replace(run, mesh=MeshConfig(dp=2), sharding=sharding)
    (found,) = violations(asked, machine(2))
    assert found == "sharding.replicate_experts is True: the model has no experts; leave it out"
    hybrid = replace(asked, sharding=ShardingConfig(replicate_dense=True))
    assert violations(hybrid, machine(2)) == []
    plan = describe_run(hybrid, machine(2), 10_000)
    assert "sharding: dense in 1 shard(s) over dense_shards, 2 replicas over dp\n" in plan


def test_parity_puts_dp_in_place_of_ep(capsys: pytest.CaptureFixture[str]):
    assert without_experts(PARITY_MESHES) == ("dp2", "dp4", "pp2", "pp2-dp2")
    full = without_experts(FULL_GRID)
    assert len(set(full)) == len(full) and not any("ep" in label for label in full)
    assert {"hsdp-dp4", "pp2-dp2-cp2", "cp4"} < set(full)
    runs = parity_runs(tiny_form(qwen3_8b()), full, "fp64")
    assert max(run.mesh.world_size for run in runs) == 8
    with pytest.raises(ValueError, match="--with aux: the model has no experts to balance"):
        vary(tiny_form(qwen3_8b()), ("packed", "aux"))
    assert main(["parity", "qwen3-8b-tiny", "--meshes", "dp2-ep2", "ep4"]) == 2
    error = capsys.readouterr().err
    assert error.count("the model has no experts; use mesh.dp") == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        # An option of another family is as unknown as a misspelt one.
        (["qwen3-8b-tiny", "--model.num-experts", "4"], "Unrecognized options"),
        (["qwen3-8b-tiny", "--model.rope-scaling.factor", "4"], "recipe qwen3-8b-tiny has no YaRN"),
        (["qwen3-30b-a3b-tiny", "--model.rope_scaling.factor=4"], "has no YaRN"),
        (["qwen3-8b-tiny", "--model.head-dim", "7"], "model.head_dim = 7: must be even"),
        (["qwen3-30b-a3b-tiny", "--model.num-experts", "7"], "does not divide the 7 experts"),
        (["recipe.py", "--model.rope-scaling.factor", "0.5"], "model.rope_scaling.factor = 0.5"),
        (["recipe.py", "--model.rope-scaling.facto", "2"], "--model.rope-scaling.factor FLOAT"),
    ],
)
def test_options_are_those_of_the_recipe_s_family(
    folder: Path, arguments: list[str], named: str, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.py").write_text(RECIPE)
    monkeypatch.setenv("COLUMNS", "200")
    try:
        code = main(["pretrain", *arguments])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert named in " ".join(capsys.readouterr().err.split())


def test_help_explains_the_family_of_the_recipe(folder: Path, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    texts = []
    for recipe in ("qwen3-30b-a3b-tiny", "qwen3-8b-tiny", "recipe.py"):
        with pytest.raises(SystemExit) as end:
            main(["pretrain", recipe, "--help"])
        assert not end.value.code
        texts.append(capsys.readouterr().out)
    assert all("--model.hidden-size INT" in text for text in texts)
    assert ["--model.num-experts INT" in text for text in texts] == [True, False, False]
    assert ["--model.rope-scaling.factor FLOAT" in text for text in texts] == [False, False, True]
    assert "Longest context over the original." in texts[2]


def test_types_are_those_of_one_member_of_the_union():
    @dataclass(frozen=True, kw_only=True)
    class Foreign:
        vocab_size: int

    recipe = tiny_form(qwen3_8b())
    yarn = Yarn(factor=2.0, original_max_position_embeddings=64)
    good = replace(recipe, model=replace(recipe.model, rope_scaling=yarn))
    assert type_violations(asdict(good), RunConfig, "") == []
    bad = replace(yarn, factor="2", truncate=1)
    model = replace(recipe.model, head_dim=True, rope_scaling=bad)
    assert type_violations(asdict(replace(recipe, model=model)), RunConfig, "") == [
        "model.rope_scaling.factor is '2', of type str: allowed is float",
        "model.rope_scaling.truncate is 1, of type int: allowed is bool",
        "model.head_dim is True, of type bool: allowed is int",
    ]
    foreign = asdict(replace(recipe, model=Foreign(vocab_size=3)))  # type: ignore
    (found,) = type_violations(foreign, RunConfig, "")
    assert found.startswith(
        "model is {'vocab_size': 3}, of type dict: allowed is Qwen3MoeConfig | "
    )
    assert "Qwen3Config" in found


def test_another_family_is_one_readable_line(tmp_path: Path):
    save_tiny_qwen3(tmp_path / "source")
    config, source = tiny_form(qwen3_8b()).model, tmp_path / "source"
    with pytest.raises(ValueError, match="another model") as error:
        import_checkpoint(source, tmp_path / "imported", config)
    lines = str(error.value).splitlines()[1:]
    assert lines == ["  - model.model_type: qwen3_moe -> qwen3 (folder -> recipe)"]
    theirs = model_config_from_hf(read_hf_config(source))
    before = config_record(replace(tiny_form(qwen3_30b_a3b()), model=theirs))
    changes = changed_fields(before, config_record(tiny_form(qwen3_8b())))
    assert [c for c in changes if c.startswith("model.")] == [
        "model.model_type: qwen3_moe -> qwen3"
    ]

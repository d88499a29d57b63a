"""`pith parity` as a command: exit code 0 when meshes agree, 1 when a factor is broken."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pith_apps.cli import main
from pith_apps.parity import FULL_GRID, VARIATIONS

RECIPE = """
from dataclasses import replace
from pith_apps.config import RunConfig
from pith_apps.recipes.demo import demo
from pith_engine.fsdp import Unit


def small() -> RunConfig:
    config = demo()
    train = replace(config.train, sequence_length=16, device="cpu", dtype="fp32")
    return replace(config, name="small", train=train)
"""
# Every rank loads the recipe, so every rank averages expert gradients over ep, which is wrong.
BREAK = """
_reduce = Unit.reduce

def _averaged(self):
    _reduce(self)
    for parameter in self.parameters:
        if parameter.role.is_expert:
            parameter.grad.div_(parameter.global_shape[0] // parameter.full.shape[0])

Unit.reduce = _averaged
"""


@pytest.mark.parametrize(
    ("source", "code", "verdict"),
    [
        pytest.param(RECIPE, 0, "PASS", marks=pytest.mark.slow),
        (RECIPE + BREAK, 1, "FAIL"),
    ],
)
def test_exit_code(tmp_path: Path, source: str, code: int, verdict: str) -> None:
    (tmp_path / "recipe.py").write_text(source)
    command = [sys.executable, "-m", "pith_apps.cli", "parity", "recipe.py", "--meshes", "ep2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1:] == [verdict], done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("ep2"))
    assert ("experts_" in row and "5.0e-01" in row) == (verdict == "FAIL")
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.py"]


@pytest.mark.slow
def test_the_full_grid_as_a_command(tmp_path: Path) -> None:
    """The mesh of eight processes too, with every variation."""
    (tmp_path / "recipe.py").write_text(RECIPE)
    variations = ",".join(VARIATIONS)
    command = [sys.executable, "-m", "pith_apps.cli", "parity", "recipe.py"]
    done = subprocess.run(
        [*command, "--grid", "full", "--with", variations],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if " bit-equal " in line]
    assert [row[0].removeprefix("hsdp-") for row in rows] == [
        label.removeprefix("hsdp-") for label in FULL_GRID
    ]
    assert all("agrees" in row for row in rows)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--train.sequence-length", "-5"], "train.sequence_length is -5"),
        (["--train.sequence-length", "1025"], "model.max_position_embeddings 1024"),
        (["--nproc", "2"], "2 processes run, the largest mesh needs 4"),
        (["--train.device", "cuda"], "this machine shows 0 GPU(s)"),
        (["--train.device", "cpu", "--train.attention", "cudnn"], "train.attention is 'cudnn'"),
        (["--mesh.ep", "2"], "--mesh.ep: set by --meshes, --dtype or --with"),
        (["--grid", "full", "--meshes", "ep2"], "--meshes beside --grid full: give one"),
        (["--with", "packed,cp"], "--with cp: allowed are packed, padding, aux"),
        (["--meshes", "hsdp-ep2"], "mesh 'hsdp-ep2': hsdp replicates over dp"),
        (["--meshes", "ep3"], "ep3: mesh.ep = 3"),
        (["--with", "padding", "--train.sequence-length", "1"], "no target is left"),
        (["--meshes", "cp2", "--train.sequence-length", "30"], "cp2: mesh.cp = 2"),
        (["--train.dtype=fp32"], "--train.dtype: set by"),
        (["--layers-per-chunk", "1", "3"], "--layers-per-chunk: set by"),
        (["--with", "aux", "--balance.coefficient", "0.1"], "--balance.coefficient: set by"),
        (["--with=recompute", "--train.recompute", "experts"], "--train.recompute: set by"),
        (["--with", "muon", "--optim.method", "adamw"], "--optim.method: set by"),
        (["--with", "tied", "--model.tie-word-embeddings"], "--model.tie-word-embeddings: set by"),
        (
            ["--lr.peak", "7", "--train.steps", "9"],
            "--lr.peak, --train.steps: parity runs one step",
        ),
        (["--runs-folder", "x"], "--runs-folder: parity runs one step"),
        (["--optim.eps", "1e-6"], "--optim.eps: parity runs one step"),
        (
            ["--balance.method", "bias", "--balance.bias-rate", "0.1"],
            "--balance.bias-rate: parity runs one step",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_ranks_start(options, named, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["parity", "demo", *options]) == 2
    assert named in capsys.readouterr().err

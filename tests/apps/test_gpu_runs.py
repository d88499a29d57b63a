"""The demo on one and two GPUs over NCCL: the mesh must not change the losses."""

import json
import os
import subprocess
import sys

import pytest
import torch

STEPS = 6
NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs needed")


def run_demo(folder, name, *options, gpus="0,1", num_steps=STEPS):
    """Losses and gradient norms of a short run in its own processes."""
    command = [sys.executable, "-m", "pith_apps.cli", "pretrain", "demo", "--name", name]
    command += ["--runs-folder", str(folder), "--train.steps", str(num_steps), *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    steps = [record for record in records if "loss" in record]
    assert len(steps) == num_steps
    return [(record["loss"], record["grad_norm"]) for record in steps]


@pytest.mark.gpus2
@NEEDS_TWO
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_ring_of_two_gpus_gives_the_losses_of_one(tmp_path, dtype):
    """In bf16 over twenty steps; its gradient norm jumps at single steps with one GPU too."""
    num_steps = STEPS if dtype == "fp32" else 20
    options = ["--mesh.pp", "1", "--mesh.ep", "1", "--train.dtype", dtype]
    options += ["--balance.method", "none"]
    one = run_demo(tmp_path, "one", *options, gpus="0", num_steps=num_steps)
    two = run_demo(tmp_path, "cp2", *options, "--mesh.cp", "2", num_steps=num_steps)
    for found, expected in zip(two, one, strict=True):
        if dtype == "fp32":
            assert found == pytest.approx(expected, rel=1e-4)
        else:
            assert found[0] == pytest.approx(expected[0], rel=5e-3)


def run_parity(folder, recipe, variations, *meshes):
    """Exit code and last line of `pith parity`, which names the verdict; what it said."""
    command = [sys.executable, "-m", "pith_apps.cli", "parity", recipe, "--train.device", "cuda"]
    command += ["--with", variations, "--meshes", *meshes]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    said = done.stdout + done.stderr
    return done.returncode, done.stdout.splitlines()[-1:], said


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU needed")
@pytest.mark.parametrize(
    ("recipe", "variations"),
    [
        ("demo", "packed,padding,aux,tied,recompute,muon"),
        ("qwen3-30b-a3b-tiny", "packed,aux,muon"),
        ("deepseek-v2-lite-tiny", "packed,aux,recompute"),
        ("deepseek-v3-tiny", "packed,padding,aux"),
        ("gpt-oss-20b-tiny", "packed,aux,recompute"),
        ("qwen3-8b-tiny", "packed,tied,recompute,muon"),
    ],
)
def test_one_gpu_passes_parity(tmp_path, recipe, variations):
    """The schedule on its streams against plain autograd, in float64."""
    code, last, said = run_parity(tmp_path, recipe, variations, "single")
    assert (code, last) == (0, ["PASS"]), said


@pytest.mark.gpus2
@NEEDS_TWO
@pytest.mark.parametrize(
    ("recipe", "meshes", "variations"),
    [
        ("qwen3-30b-a3b-tiny", ("cp2", "ep2", "pp2", "dp2"), "packed,aux,recompute,muon"),
        ("qwen3-30b-a3b-tiny", ("dp2", "hsdp-dp2"), "tied,muon,hsdp"),
        ("deepseek-v2-lite-tiny", ("cp2", "ep2", "pp2"), "packed,aux,muon"),
        ("gpt-oss-20b-tiny", ("cp2", "ep2", "pp2"), "packed,aux,muon"),
        ("qwen3-8b-tiny", ("cp2", "pp2", "dp2"), "packed,tied,muon"),
    ],
)
def test_meshes_of_two_gpus_pass_parity(tmp_path, recipe, meshes, variations):
    """NCCL moves the rings, halos, shards, replicas and Muon's matrices of float64 runs."""
    code, last, said = run_parity(tmp_path, recipe, variations, *meshes)
    assert (code, last) == (0, ["PASS"]), said


@pytest.mark.gpus2
@NEEDS_TWO
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-4), ("bf16", 2e-2)])
def test_two_gpus_give_the_losses_of_one(tmp_path, dtype, tolerance):
    single = ["--mesh.pp", "1", "--mesh.ep", "1", "--train.dtype", dtype]
    one = run_demo(tmp_path, "one", *single, gpus="0")
    assert one[0][0] == pytest.approx(8.34, abs=0.05), "ln 4096 before the first update"
    for name, sizes in {"ep2": (1, 2), "pp2": (2, 1)}.items():
        pp, ep = map(str, sizes)
        mesh = ["--mesh.pp", pp, "--mesh.ep", ep, "--train.dtype", dtype]
        for found, expected in zip(run_demo(tmp_path, name, *mesh), one, strict=True):
            assert found == pytest.approx(expected, rel=tolerance)

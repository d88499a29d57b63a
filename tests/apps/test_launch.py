"""Starting ranks, and ending all of them when one fails, on an interrupt, or with the launcher."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pith_apps.launch import find_machine, is_rank

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
    "SLURM_STEP_NODELIST": "gpu[03-06]",
    "SLURM_JOB_ID": "77",
}

# Every rank writes its process id when it reads the recipe; then rank 1 fails or all wait.
RECIPE = """
import os, time
from pathlib import Path
from pith_apps.config import RunConfig
from pith_apps.recipes.released import qwen3_30b_a3b, tiny_form

def waiting() -> RunConfig:
    rank = os.environ.get("RANK")
    if rank is not None:
        Path(f"rank{rank}").write_text(str(os.getpid()))
        while not (Path("rank0").exists() and Path("rank1").exists()):
            time.sleep(0.05)
        if "FAIL" in os.environ and rank == "1":
            raise RuntimeError("rank one breaks")
        if "WAIT" in os.environ:
            time.sleep(300)
    return tiny_form(qwen3_30b_a3b())
"""


def test_a_group_is_found_in_the_environment(monkeypatch):
    assert not is_rank({})
    assert is_rank(TORCHRUN)
    assert is_rank(SRUN)
    # An interactive shell inside a job is one task: there the command launches.
    assert not is_rank({**SRUN, "SLURM_STEP_NUM_TASKS": "1"})
    alone = find_machine(2, {})
    assert (alone.world_size, alone.processes_here) == (2, 2)
    node = find_machine(2, {**TORCHRUN, "LOCAL_WORLD_SIZE": "4"})
    assert (node.world_size, node.processes_here) == (8, 4)
    slurm = find_machine(2, SRUN)
    assert (slurm.world_size, slurm.processes_here) == (8, 2)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert find_machine(2, SRUN).num_gpus == 1
    assert find_machine(2, {**SRUN, "SLURM_GPUS_PER_TASK": "1"}).num_gpus == 2


def start(folder: Path, **environment: str) -> subprocess.Popen:
    """Start two ranks through the command line."""
    (folder / "waiting.py").write_text(RECIPE)
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, "-m", "pith_apps.cli", "pretrain", "waiting.py"],
        cwd=folder,
        env={**kept, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_ranks(folder: Path, process: subprocess.Popen) -> list[int]:
    """Process ids of both ranks once they run."""
    deadline = time.monotonic() + 120
    while not all((folder / f"rank{r}").exists() for r in (0, 1)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.1)
    time.sleep(0.2)
    return [int((folder / f"rank{r}").read_text()) for r in (0, 1)]


def assert_gone(pids: list[int], within: float) -> None:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not any(is_running(pid) for pid in pids):
            return
        time.sleep(0.1)
    raise AssertionError(f"still running: {[pid for pid in pids if is_running(pid)]}")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")


def test_a_failing_rank_ends_the_job_and_is_named(tmp_path):
    process = start(tmp_path, FAIL="1", WAIT="1")
    pids = wait_for_ranks(tmp_path, process)
    began = time.monotonic()
    _, error = process.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert process.returncode == 1
    assert "rank one breaks" in error
    # The recipe raises, which a rank refuses like any bad input.
    assert "pith: rank 1 was the first to end, with exit code 2" in error
    assert_gone(pids, within=5)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupt_ends_every_rank(tmp_path, number):
    process = start(tmp_path, WAIT="1")
    pids = wait_for_ranks(tmp_path, process)
    process.send_signal(number)
    assert process.stderr is not None
    error = ""
    while "pith: stopped" not in error and (line := process.stderr.readline()):
        error += line
    process.send_signal(number)  # an impatient user's second Ctrl-C
    error += process.communicate(timeout=30)[1]
    assert process.returncode == 128 + number
    assert error.splitlines()[-1].startswith(
        f"pith: stopped by {number.name}; the same command resumes at the newest complete"
    )
    assert "Traceback" not in error
    assert_gone(pids, within=5)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_killed_launcher_takes_its_ranks_along(tmp_path):
    process = start(tmp_path, WAIT="1")
    pids = wait_for_ranks(tmp_path, process)
    process.kill()
    process.communicate(timeout=30)
    assert_gone(pids, within=10)

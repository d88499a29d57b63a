import os
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
from pith_engine.mesh import Mesh, MeshConfig
from pith_engine.runtime import (
    LaunchInfo,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    connect_mesh,
    exchange,
    gather_objects,
    local_gpus,
    read_launch,
    reduce_scatter,
    start_process_group,
)

TIMEOUT = timedelta(seconds=30)


def reductions():
    mesh = Mesh.create(MeshConfig(dp=4), TIMEOUT)
    rank, axis = mesh.rank, mesh.data
    connect_mesh(mesh, torch.device("cpu"))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        inputs = [torch.randn(12, generator=torch.Generator().manual_seed(r)) for r in range(4)]
        inputs = [value.to(dtype) for value in inputs]
        output = torch.full((3,), torch.nan, dtype=dtype)
        reduce_scatter(output, inputs[rank], axis)
        in_rank_order = inputs[0] + inputs[1] + inputs[2] + inputs[3]
        assert torch.equal(output, in_rank_order[3 * rank : 3 * rank + 3])
        gathered = torch.full((48,), torch.nan, dtype=dtype)
        all_gather(gathered, inputs[rank], axis)
        assert torch.equal(gathered, torch.cat(inputs))
        largest = all_reduce(inputs[rank].clone(), axis, "max")
        assert torch.equal(largest, torch.stack(inputs).max(0).values)
    empty = torch.empty(0)
    reduce_scatter(empty, torch.empty(0), axis)
    all_gather(empty, torch.empty(0), axis)
    count = all_reduce(torch.tensor(2**53 + rank), axis)
    assert count.item() == 4 * 2**53 + 6
    barrier(axis)
    return gather_objects({"rank": rank}, axis)


@pytest.mark.core
def test_reductions_are_exact_and_in_rank_order(gloo_pool):
    assert gloo_pool.run(reductions) == [[{"rank": rank} for rank in range(4)]] * 4


SIZES = [
    [[0, 3, 1, 0], [2, 0, 0, 5], [0, 0, 0, 0], [1, 0, 4, 2]],
    [[0] * 4] * 4,
    [[0, 0, 7, 0]] * 4,
    [[2] * 4] * 4,
]


def sent_blocks(sizes, dtype):
    """What rank a sends to rank b, at [a][b]."""
    return [
        [torch.full((n, 5), 100 * a + 10 * b, dtype=dtype) for b, n in enumerate(row)]
        for a, row in enumerate(sizes)
    ]


def all_to_alls(dtype, contiguous):
    """What arrives here, for each of `SIZES` over the communicators of forward and backward."""
    mesh, arrived = Mesh.create(MeshConfig(ep=4), TIMEOUT), []
    for sizes in SIZES:
        for axis in (mesh.ep, mesh.ep_backward):
            send, receive = sizes[mesh.rank], [row[mesh.rank] for row in sizes]
            rows = torch.cat(sent_blocks(sizes, dtype)[mesh.rank])
            if not contiguous:
                rows = rows.t().contiguous().t()
            output = torch.full((sum(receive), 5), 77, dtype=dtype)
            all_to_all(output, rows, receive, send, axis)
            arrived.append(output)
    return arrived


@pytest.mark.core
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_all_to_all_with_uneven_and_empty_blocks(gloo_pool, dtype, contiguous):
    for rank, arrived in enumerate(gloo_pool.run(all_to_alls, dtype, contiguous)):
        expected = [torch.cat([row[rank] for row in sent_blocks(s, dtype)]) for s in SIZES]
        assert len(arrived) == 2 * len(SIZES)
        for number, output in enumerate(arrived):
            assert torch.equal(output, expected[number // 2])


def exchanges():
    """What came of three tensors exchanged at once, and one value that went one way only."""
    mesh = Mesh.create(MeshConfig(pp=2, dp=2), TIMEOUT)
    peer = 1 - mesh.pp.rank
    sent = [torch.full((4, 3), 10.0 * mesh.rank + i, dtype=torch.bfloat16) for i in range(3)]
    received = [torch.full((4, 3), torch.nan, dtype=torch.bfloat16) for _ in range(3)]
    both = exchange([(t, peer) for t in sent], [(t, peer) for t in received], mesh.pp)
    both.wait_receives()
    both.wait_receives()
    both.wait_sends()
    # One way only, then the other, without a peer's exchange in between.
    value = torch.full((2,), float(mesh.rank))
    if mesh.pp.rank == 0:
        exchange([(value, 1)], [], mesh.pp).wait_sends()
    else:
        exchange([], [(value, 0)], mesh.pp).wait_receives()
    exchange([], [], mesh.pp).wait_sends()
    return received, value


@pytest.mark.core
def test_exchanges_match_in_order(gloo_pool):
    """Ranks 0 and 2, 1 and 3 are neighbours on pp; the lower one sends the single value."""
    for rank, (received, value) in enumerate(gloo_pool.run(exchanges)):
        other = (rank + 2) % 4
        for number, tensor in enumerate(received):
            assert torch.equal(tensor, torch.full_like(tensor, 10.0 * other + number))
        assert value.tolist() == [rank % 2] * 2


def test_one_rank_needs_no_group():
    axis = Mesh.single().ep
    value = torch.arange(6.0).view(3, 2)
    output = torch.full((3, 2), torch.nan)
    all_to_all(output, value, [3], [3], axis)
    assert torch.equal(output, value)
    output.fill_(torch.nan)
    all_gather(output, value.view(-1), axis)
    assert torch.equal(output, value)
    output.fill_(torch.nan)
    reduce_scatter(output, value.view(-1), axis)
    assert torch.equal(output, value)
    assert all_reduce(value, axis) is value
    assert gather_objects(3, axis) == [3]
    barrier(axis)


def test_a_planned_mesh_has_no_collectives():
    axis = Mesh.plan(MeshConfig(ep=2), 1).ep_backward
    with pytest.raises(RuntimeError, match="axis ep_backward of 2 ranks"):
        all_reduce(torch.zeros(1), axis)
    with pytest.raises(RuntimeError, match="sizes alone"):
        exchange([(torch.zeros(1), 0)], [], axis)


def test_launchers():
    torchrun = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "node7",
        "MASTER_PORT": "29500",
    }
    assert read_launch(torchrun) == LaunchInfo(
        rank=5, world_size=8, local_rank=1, ranks_per_node=4, init_method="env://"
    )
    slurm = {
        "SLURM_JOB_ID": "1234567",
        "SLURM_STEP_ID": "3",
        "SLURM_PROCID": "9",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_TASKS": "16",
        "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
        "SLURM_STEP_NODELIST": "gpu-[003-004],login",
    }
    assert read_launch(slurm) == LaunchInfo(
        rank=9,
        world_size=16,
        local_rank=1,
        ranks_per_node=8,
        init_method="tcp://gpu-003:21075",
    )
    for name, value, is_own in [
        ("SLURM_GPUS_PER_TASK", "1", True),
        ("SLURM_NTASKS_PER_GPU", "1", True),
        ("SLURM_GPU_BIND", "verbose,single:1", True),
        ("SLURM_GPUS_PER_TASK", "2", False),
        ("SLURM_NTASKS_PER_GPU", "2", False),
        ("SLURM_GPU_BIND", "single:10", False),
    ]:
        assert read_launch(slurm | {name: value}).has_own_gpu == is_own, (name, value)
    lists = {"a1": "a1", "a[7]": "a7", "a,b": "a", "n[01,3-4]-x": "n01"}
    for nodes, host in lists.items():
        found = read_launch(slurm | {"SLURM_STEP_NODELIST": nodes}).init_method
        assert found and found.startswith(f"tcp://{host}"), nodes
    next_step = read_launch(slurm | {"SLURM_STEP_ID": "4"})
    assert next_step.init_method != read_launch(slurm).init_method
    batch_script = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "16"}
    assert read_launch(batch_script) == LaunchInfo() == read_launch({})
    with pytest.raises(ValueError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"):
        read_launch({"RANK": "0"})


@pytest.mark.parametrize(
    ("has_own_gpu", "seen", "usable"), [(True, 1, 4), (False, 1, 1), (True, 4, 4), (True, 0, 0)]
)
def test_gpus_of_a_machine(monkeypatch, has_own_gpu, seen, usable):
    monkeypatch.setattr("torch.cuda.device_count", lambda: seen)
    launch = LaunchInfo(world_size=4, ranks_per_node=4, has_own_gpu=has_own_gpu)
    assert local_gpus(launch) == usable


@pytest.mark.parametrize(
    ("own", "seen", "index"), [("1", 1, 0), ("1", 4, 3), ("4", 4, 3), ("4", 1, None)]
)
def test_the_device_of_a_slurm_task(monkeypatch, own, seen, index):
    """Task 3 of a node uses GPU 0 where it sees its own alone, else GPU 3, if there is one."""
    variables = {
        "SLURM_JOB_ID": "1",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "3",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "4",
        "SLURM_STEP_NODELIST": "a",
        "SLURM_GPUS_PER_TASK": own,
    }
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.device_count", lambda: seen)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: None)
    if index is None:
        with pytest.raises(ValueError, match="process 3 on this machine has no GPU: 1 found"):
            start_process_group("cuda", TIMEOUT)
    else:
        assert start_process_group("cuda", TIMEOUT) == torch.device("cuda", index)


JOB = """
import os, sys, threading, time
from datetime import timedelta
import torch
from pith_engine.mesh import Mesh, MeshConfig
from pith_engine.runtime import (
    all_reduce, fail_fast, read_launch, start_process_group, stop_process_group
)

def background():
    raise KeyError("a logging thread died")

def train():
    rank = read_launch(os.environ).rank
    with fail_fast(rank):
        device = start_process_group("cpu", timedelta(seconds=100))
        mesh = Mesh.create(MeshConfig(dp=3), timedelta(seconds=100))
        thread = threading.Thread(target=background)
        thread.start()
        thread.join()
        all_reduce(torch.zeros(1), mesh.data)
        print(f"rank {rank} of {mesh.world.size} goes on on {device}")
        if rank == 1:
            raise ArithmeticError("the cause")
        for _ in range(3):
            all_reduce(torch.zeros(1), mesh.data)
        stop_process_group()

pids = {}
for rank in range(3):
    pid = os.fork()
    if pid == 0:
        os.environ["RANK"] = str(rank)
        log = os.open(f"{sys.argv[1]}/{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        train()
        os._exit(0)
    pids[pid] = rank
for _ in range(3):
    pid, status = os.wait()
    print(pids[pid], os.waitstatus_to_exitcode(status), time.monotonic())
"""


def test_a_rank_that_raises_ends_the_job_and_a_thread_does_not(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environ = os.environ | {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    output = subprocess.run(
        [sys.executable, "-c", JOB, str(tmp_path)],
        env=environ,
        text=True,
        check=True,
        timeout=170,
        stdout=subprocess.PIPE,
    ).stdout
    ends = [line.split() for line in output.splitlines()]
    assert [code for _, code, _ in ends] == ["1"] * 3
    assert ends[0][0] == "1"  # the rank that raised is the first to go
    assert float(ends[2][2]) - float(ends[0][2]) < 10
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(3)]
    for rank, log in enumerate(logs):
        assert "a logging thread died" in log
        assert f"rank {rank} of 3 goes on on cpu\n" in log
        assert f"[rank {rank}] Traceback" in log
    assert logs[1].splitlines()[-1] == "[rank 1] ArithmeticError: the cause"
    assert "the cause" not in logs[0] + logs[2]


def test_an_interrupted_rank_says_so_in_one_line():
    script = "from pith_engine.runtime import fail_fast\nwith fail_fast(2): raise KeyboardInterrupt"
    ended = subprocess.run(
        [sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, timeout=170
    )
    assert (ended.returncode, ended.stderr) == (130, "[rank 2] interrupted\n")


BROKEN_PIPE = """
import os, sys
from pith_engine.runtime import fail_fast
read, write = os.pipe()
os.close(read)
os.dup2(write, 1)
sys.stdout = open(1, "w")
try:
    with fail_fast(2):
        print("nobody reads this")
        raise ArithmeticError("the cause")
finally:
    print("went on", file=sys.stderr)
"""


def test_a_rank_ends_at_once_though_nobody_reads_its_output():
    ended = subprocess.run(
        [sys.executable, "-c", BROKEN_PIPE], stderr=subprocess.PIPE, text=True, timeout=170
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "[rank 2] ArithmeticError: the cause"

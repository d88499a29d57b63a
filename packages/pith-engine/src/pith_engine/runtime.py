"""Processes: joining the group, failing together, and the only wrappers of collectives.

On GPUs the group is `cpu:gloo,cuda:nccl`: objects and barriers never touch a GPU stream. A
collective on an `Axis` of one rank is the identity.

A rank that raises in its main thread prints the place and its traceback and exits at once, without
exit handlers: its peers see a closed connection and follow, so the first traceback is the cause.
"""

import os
import sys
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, distributed

from pith_engine.mesh import Axis, Mesh


@dataclass(frozen=True, kw_only=True)
class LaunchInfo:
    """What the launcher says."""

    rank: int = 0
    """Of this process."""
    world_size: int = 1
    """Processes in all."""
    local_rank: int = 0
    """Rank on this machine."""
    ranks_per_node: int = 1
    """Processes on it."""
    has_own_gpu: bool = False
    """Each process is shown one GPU."""
    init_method: str | None = None
    """URL where peers meet, if any."""


def read_launch(environ: Mapping[str, str]) -> LaunchInfo:
    """Read torchrun's variables, else those of a SLURM step (`srun`); without any, one process."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if missing := [name for name in names if name not in environ]:
            raise ValueError(f"environment: {', '.join(missing)} not set; start with torchrun")
        return LaunchInfo(
            rank=int(environ["RANK"]),
            world_size=int(environ["WORLD_SIZE"]),
            local_rank=int(environ.get("LOCAL_RANK", environ["RANK"])),
            ranks_per_node=int(environ.get("LOCAL_WORLD_SIZE", environ["WORLD_SIZE"])),
            init_method="env://",
        )
    if int(environ.get("SLURM_STEP_NUM_TASKS", "1")) <= 1:
        return LaunchInfo()
    # Steps that share a node must not meet; outgoing connections use ports from 32768.
    step = 16 * int(environ["SLURM_JOB_ID"]) + int(environ.get("SLURM_STEP_ID", "0"))
    # The first host of a compressed list: `node[003-005,007],login` -> `node003`.
    name, _, rest = environ["SLURM_STEP_NODELIST"].split(",")[0].partition("[")
    host = name + rest.rstrip("]").split("-")[0]
    per_task = environ.get("SLURM_GPUS_PER_TASK"), environ.get("SLURM_NTASKS_PER_GPU")
    bound = environ.get("SLURM_GPU_BIND", "").endswith(("single:1", "per_task:1"))
    return LaunchInfo(
        rank=int(environ["SLURM_PROCID"]),
        world_size=int(environ["SLURM_STEP_NUM_TASKS"]),
        local_rank=int(environ["SLURM_LOCALID"]),
        ranks_per_node=int(environ["SLURM_STEP_TASKS_PER_NODE"].split("(")[0].split(",")[0]),
        has_own_gpu="1" in per_task or bound,
        init_method=f"tcp://{host}:{20000 + step % 12000}",
    )


def local_gpus(launch: LaunchInfo) -> int:
    """GPUs of this machine's processes together."""
    seen = torch.cuda.device_count()
    return launch.ranks_per_node if launch.has_own_gpu and seen == 1 else seen


def start_process_group(device_type: str, timeout: timedelta) -> torch.device:
    """Join the default group; returns this process's device."""
    launch, device = read_launch(os.environ), torch.device("cpu")
    if device_type == "cuda":
        if launch.local_rank >= (found := local_gpus(launch)):
            raise ValueError(
                f"process {launch.local_rank} on this machine has no GPU: {found} found; "
                f"start at most {found} processes a machine"
            )
        device = torch.device("cuda", launch.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
        init_method=launch.init_method,
        store=distributed.HashStore() if launch.init_method is None else None,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
    )
    return device


def stop_process_group() -> None:
    """Leave all groups, if any."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def connect_mesh(mesh: Mesh, device: torch.device) -> None:
    """Use every communicator once.

    NCCL connects two ranks at their first transfer in each direction, and the host blocks until
    both ask for it: a deadlock where one first waits for another transfer, as in a step.
    """
    axes = (mesh.pp, mesh.dp, mesh.cp, mesh.ep, mesh.ep_backward, mesh.data, mesh.expert_data)
    for axis in (*axes, mesh.dense_shards, mesh.world):
        all_reduce(torch.ones(1, device=device), axis)
    for axis in (mesh.ep, mesh.ep_backward):
        ones = torch.ones(axis.size, device=device)
        all_to_all(torch.empty_like(ones), ones, [1] * axis.size, [1] * axis.size, axis)
    for axis, reach in ((mesh.pp, 1), (mesh.cp, mesh.cp.size)):
        peers = [r for r in range(axis.size) if 0 < abs(r - axis.rank) <= reach]
        sends, receives = ([(torch.zeros(1, device=device), r) for r in peers] for _ in range(2))
        exchange(sends, receives, axis).wait_sends()


@contextmanager
def fail_fast(rank: int) -> Generator[None, None, None]:
    """Exit with code 1 (130 for Ctrl-C) when the body raises."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        by_user = isinstance(error, KeyboardInterrupt)
        lines = ["interrupted"] if by_user else _report(error).splitlines()
        try:
            # One write: lines of ranks that fail together do not mix.
            sys.stderr.write("".join(f"[rank {rank}] {line}\n" for line in lines))
            sys.stderr.flush()
            sys.stdout.flush()  # Raises when the reader of a pipe has gone.
        finally:
            os._exit(130 if by_user else 1)


def _report(error: BaseException) -> str:
    """The place in one line (no `pith_ops`: its callers chose the operands), then the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if frame.name != "__torch_function__"]
    ours = [frame for frame in frames if Path(frame.filename).parent.name.startswith("pith_")]
    callers = [frame for frame in ours if Path(frame.filename).parent.name != "pith_ops"]
    place = (callers or ours or frames)[-1]
    where = f"{place.filename}:{place.lineno} in {place.name}: {place.line}\n"
    return where + "".join(traceback.format_exception(error))


def all_reduce(tensor: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor:
    """Reduce a contiguous tensor in place; returns it."""
    if axis.size > 1:
        operation = distributed.ReduceOp.SUM if op == "sum" else distributed.ReduceOp.MAX
        distributed.all_reduce(tensor, operation, group=_group(axis))
    return tensor


def all_gather(output: Tensor, input: Tensor, axis: Axis) -> None:
    """Concatenate every rank's `input [n]` into `output [size * n]` in axis order."""
    if axis.size == 1:
        output.copy_(input.view_as(output))
    else:
        distributed.all_gather_into_tensor(output, input, group=_group(axis))


def reduce_scatter(output: Tensor, input: Tensor, axis: Axis) -> None:
    """Sum `input [size * n]` over the axis; rank r keeps block r as `output [n]`."""
    if axis.size == 1:
        output.copy_(input.view_as(output))
    elif input.is_cuda:
        distributed.reduce_scatter_tensor(output, input, group=_group(axis))
    else:
        # In rank order: a sum must not depend on which peer answers first.
        blocks = torch.empty_like(input)
        distributed.all_to_all_single(blocks, input, group=_group(axis))
        first, *others = blocks.view(axis.size, -1).unbind()
        flat = output.view(-1).copy_(first)
        for block in others:
            flat.add_(block)


def all_to_all(
    output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], axis: Axis
) -> None:
    """Exchange consecutive blocks of rows, sizes from 0; `output` is contiguous."""
    if axis.size == 1:
        output.copy_(input)
    else:
        sizes = output_sizes, input_sizes
        distributed.all_to_all_single(output, input.contiguous(), *sizes, group=_group(axis))


@dataclass(eq=False)
class Exchange:
    """Transfers under way."""

    _receives: list[distributed.Work]
    _sends: list[distributed.Work]
    _tensors: list[Tensor]

    def wait_receives(self) -> None:
        """Wait for received data: the host on gloo, the current stream on NCCL."""
        for work in self._receives:
            work.wait()
        self._receives = []

    def wait_sends(self) -> None:
        """Wait for everything; the sent tensors may be written again."""
        self.wait_receives()
        for work in self._sends:
            work.wait()
        self._sends, self._tensors = [], []


def exchange(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: Axis
) -> Exchange:
    """Start transfers `(contiguous tensor, axis rank)` as one batch, which no order blocks."""
    ops = [
        distributed.P2POp(operation, tensor, axis.ranks[rank], _group(axis))
        for operation, transfers in ((distributed.irecv, receives), (distributed.isend, sends))
        for tensor, rank in transfers
    ]
    works = distributed.batch_isend_irecv(ops) if ops else []
    # NCCL gives one handle for the whole batch; it counts as a receive if there is any.
    return Exchange(works[: len(receives)], works[len(receives) :], [op.tensor for op in ops])


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Every rank's picklable value, in axis order."""
    values = [value] * axis.size
    if axis.size > 1:
        distributed.all_gather_object(values, value, group=_group(axis))
    return values


def barrier(axis: Axis) -> None:
    """Wait on the host until every rank is here."""
    all_reduce(torch.zeros(1), axis)


def _group(axis: Axis) -> distributed.ProcessGroup:
    if axis.group is None:
        fault = f"of {axis.size} ranks is of sizes alone, without a group: use Mesh.create"
        raise RuntimeError(f"axis {axis.name} {fault}")
    return axis.group

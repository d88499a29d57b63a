"""The mesh: which rank does what, as one frozen object that is passed to constructors.

Ranks are numbered with the axes (pp, dp, cp, ep) from outer to inner,

    rank = ((pp * DP + dp) * CP + cp) * EP + ep

so ep neighbours, who exchange most, are adjacent. torch's DeviceMesh needs a process group and has
no second communicator of the same ranks. The trap: torch creates groups collectively, so every rank
of the *default* group must call `Mesh.create`, those beyond the mesh too.
"""

import re
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import product
from math import prod

from torch import distributed

from pith_engine.violations import raise_violations

AXIS_NAMES = ("pp", "dp", "cp", "ep")


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many ranks each axis has."""

    pp: int = 1
    """Pipeline stages, of two chunks of the model each."""
    dp: int = 1
    """Data-parallel ranks, which shard parameters unless `sharding` replicates them."""
    cp: int = 1
    """Ranks that share one sequence."""
    ep: int = 1
    """Ranks that share a layer's experts and read different data."""

    def violations(self) -> list[str]:
        """A line for each axis without ranks."""
        sizes = self.sizes.items()
        return [f"mesh.{name} = {n}: an axis has at least 1 rank" for name, n in sizes if n < 1]

    @property
    def sizes(self) -> dict[str, int]:
        """By name, from outer to inner."""
        return asdict(self)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return prod(self.sizes.values())

    @property
    def num_batch_ranks(self) -> int:
        """Ranks that read different data: dp x ep."""
        return self.dp * self.ep

    @property
    def label(self) -> str:
        """Axes of several ranks, as in `pp2-ep2`, or `single`."""
        return "-".join(f"{n}{s}" for n, s in self.sizes.items() if s > 1) or "single"


def parse_mesh(label: str) -> MeshConfig:
    """Read a `MeshConfig.label`, axes in any order."""
    parts = [] if label == "single" else label.split("-")
    sizes = {p[:2]: int(p[2:]) for p in parts if re.fullmatch(r"(pp|dp|cp|ep)[1-9][0-9]*", p)}
    if len(sizes) < len(parts):
        raise ValueError(f"mesh {label!r}: expected axes pp, dp, cp, ep with sizes, as in pp2-ep2")
    return MeshConfig(**sizes)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Ranks that differ in one or several axes alone."""

    name: str
    """Such as `ep`."""
    size: int
    """Number of ranks."""
    rank: int
    """This one's place."""
    ranks: tuple[int, ...]
    """Global ranks, in axis order."""
    group: distributed.ProcessGroup | None
    """None for one rank, or a mesh of sizes alone."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """A rank's axes; `_MEMBERS` says what they carry."""

    config: MeshConfig
    """The sizes."""
    rank: int
    """This rank, in the mesh and globally."""
    pp: Axis
    """Pipeline stages."""
    dp: Axis
    """Data-parallel."""
    cp: Axis
    """Of one sequence."""
    ep: Axis
    """Of a layer's experts."""
    ep_backward: Axis
    """A second communicator: no backward queues behind a forward."""
    data: Axis
    """dp x cp x ep."""
    expert_data: Axis
    """dp x cp: ep has split experts already."""
    dense_shards: Axis
    """cp x ep."""
    world: Axis
    """All ranks of the mesh."""

    @classmethod
    def single(cls) -> "Mesh":
        """Of one process."""
        return cls.plan(MeshConfig(), 0)

    @classmethod
    def plan(cls, config: MeshConfig, rank: int, groups: dict | None = None) -> "Mesh":
        """A rank's; without `groups` by (whether the backward's own, ranks) it only plans."""
        raise_violations(config.violations(), "mesh")
        if not 0 <= rank < config.world_size:
            raise ValueError(f"rank {rank} of mesh {config.label}: 0 to {config.world_size - 1}")
        axes = {}
        for name in _MEMBERS:
            ranks = _ranks_of(name, config, rank)
            group = (groups or {}).get((name == "ep_backward", ranks))
            size, position = len(ranks), ranks.index(rank)
            axes[name] = Axis(name=name, size=size, rank=position, ranks=ranks, group=group)
        return cls(config=config, rank=rank, **axes)

    @classmethod
    def create(cls, config: MeshConfig, timeout: timedelta) -> "Mesh | None":
        """Create groups, one for axes of the same ranks; None on ranks beyond the mesh."""
        raise_violations(config.violations(), "mesh")
        if (running := distributed.get_world_size()) < config.world_size:
            needed = f"mesh {config.label} needs {config.world_size} processes"
            raise ValueError(f"{needed}, {running} are running")
        groups = {}
        for name, rank in product(_MEMBERS, range(config.world_size)):
            ranks = _ranks_of(name, config, rank)
            key = name == "ep_backward", ranks
            if len(ranks) > 1 and key not in groups:
                groups[key] = distributed.new_group(list(ranks), timeout=timeout)
        rank = distributed.get_rank()
        return cls.plan(config, rank, groups) if rank < config.world_size else None

    @property
    def batch_rank(self) -> int:
        """This rank's share of the data."""
        return self.dp.rank * self.ep.size + self.ep.rank


def describe_mesh(config: MeshConfig, ranks_per_node: int) -> str:
    """A table of the axes."""
    lines = [f"{'axis':<12} {'size':>5} {'stride':>7}  {'crosses nodes':<14} carries"]
    for name, (_, purpose) in _MEMBERS.items():
        if name == "ep_backward":
            continue
        groups = [_ranks_of(name, config, rank) for rank in range(config.world_size)]
        crosses = any(len({r // ranks_per_node for r in ranks}) > 1 for ranks in groups)
        size, answer = len(groups[0]), "yes" if crosses else "no"
        stride = groups[0][1] - groups[0][0] if size > 1 else "-"
        lines.append(f"{name:<12} {size:>5} {stride:>7}  {answer:<14} {purpose}")
    return "\n".join(lines)


def mesh_violations(
    config: MeshConfig,
    world_size: int,
    num_experts: int,
    num_layers: int,
    num_micro_batches: int,
    sequence_length: int,
) -> list[str]:
    """What keeps a mesh from training a model on `world_size` processes, a line each.

    `num_experts` a layer (0: dense), `num_micro_batches` a global step.
    """
    wrong, facts = [], (num_experts, num_layers, num_micro_batches, sequence_length)
    if config.world_size != world_size:
        sizes = " x ".join(f"{name} {size}" for name, size in config.sizes.items())
        fitting = ", ".join(mesh.label for mesh in feasible_meshes(world_size, *facts)) or "none"
        wrong.append(
            f"mesh: {sizes} = {config.world_size} processes, but {world_size} run; meshes that fit "
            f"{world_size}: {fitting}"
        )
    num_blocks = 2 * config.cp if config.cp > 1 else 1
    if rest := sequence_length % num_blocks:
        below = sequence_length - rest
        valid = f"{below}, {below + num_blocks}" if below else num_blocks
        wrong.append(
            f"mesh.cp = {config.cp} cuts a sequence into 2 x cp = {num_blocks} blocks, no divisor "
            f"of train.sequence_length {sequence_length}; nearest valid lengths: {valid}"
        )
    wrong += expert_violations(num_experts, config.ep)
    if num_layers < (num_chunks := 2 * config.pp):
        wrong.append(
            f"mesh.pp = {config.pp} cuts {num_layers} layers into {num_chunks} chunks; at most "
            f"{num_layers // 2}"
        )
    step = config.num_batch_ranks
    least = num_chunks * step
    nearest = max(least, -(-num_micro_batches // step) * step)
    if num_micro_batches != nearest:
        wrong.append(
            f"train.batch / train.micro_batch = {num_micro_batches}: allowed are multiples of dp x "
            f"ep = {step} from {least} (2 x pp x dp x ep); set --train.batch {nearest}, times "
            "train.micro_batch"
        )
    return wrong


def feasible_meshes(
    world_size: int, num_experts: int, num_layers: int, num_micro_batches: int, sequence_length: int
) -> list[MeshConfig]:
    """All meshes that can train the model."""
    facts = world_size, num_experts, num_layers, num_micro_batches, sequence_length
    sizes = product(_divisors(world_size), repeat=4)
    meshes = [MeshConfig(pp=pp, dp=dp, cp=cp, ep=ep) for pp, cp, ep, dp in sizes]
    return [m for m in meshes if m.world_size == world_size and not mesh_violations(m, *facts)]


def expert_violations(num_experts: int, ep: int) -> list[str]:
    """A line unless ep can share a layer's experts."""
    if num_experts == 0 and ep > 1:
        return [f"mesh.ep = {ep}: the model has no experts; use mesh.dp"]
    if num_experts % ep == 0:
        return []
    valid = ", ".join(map(str, _divisors(num_experts)))
    return [f"mesh.ep = {ep} does not divide the {num_experts} experts of a layer; valid: {valid}"]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


_MEMBERS: dict[str, tuple[tuple[str, ...], str]] = {
    "pp": (("pp",), "hidden states and their gradients between chunks"),
    "dp": (("dp",), "gradients of replicated parameters, once a step"),
    "cp": (("cp",), "keys and values of a shared sequence; shards of replicated experts"),
    "ep": (("ep",), "tokens to their experts and back"),
    "ep_backward": (("ep",), "gradients of the same"),
    "data": (("dp", "cp", "ep"), "counts; dense parameters and gradients unless replicated"),
    "expert_data": (("dp", "cp"), "expert parameters and gradients unless replicated"),
    "dense_shards": (("cp", "ep"), "replicated dense parameters and gradients, once a step"),
    "world": (AXIS_NAMES, "norms, counts, messages"),
}
"""Name -> the axes that it spans, and what it carries."""


def _ranks_of(name: str, config: MeshConfig, rank: int) -> tuple[int, ...]:
    """Ranks that differ from `rank` in the axes of `name` alone."""
    ranks, stride = [rank], config.world_size
    for axis, size in config.sizes.items():
        stride //= size
        if axis in _MEMBERS[name][0]:
            ranks = [r + (i - r // stride % size) * stride for r in ranks for i in range(size)]
    return tuple(ranks)

"""The mesh: which rank does what, as one frozen object that is passed to constructors.

Ranks are numbered with the axes (pp, dp, cp, ep) from outer to inner:

    rank = ((pp * DP + dp) * CP + cp) * EP + ep

so ep neighbours are adjacent (they exchange most bytes, and stay inside a node) and pipeline stages
are farthest apart (they exchange least). EP ranks read different data: for everything but experts
they are data-parallel. CP ranks share a sequence. Beside the four axes a mesh holds those that
parameters and counts use:

    data         dp x cp x ep   shards of dense parameters, token counts
    expert_data  dp x cp        shards of experts, which ep has split already
    ep_backward  same ranks as ep, a second communicator: a backward's all-to-alls do not queue
                 behind a forward's
    world        all ranks of the mesh

torch's DeviceMesh does not serve here: it cannot be made without a process group, gives no second
communicator over the same ranks, and takes no timeout. The trap: every rank of the *default* group
must call `Mesh.create`, those beyond the mesh too, because torch creates groups collectively.
"""

import re
from dataclasses import dataclass
from datetime import timedelta
from itertools import product

from torch import distributed

AXIS_NAMES = ("pp", "dp", "cp", "ep")

GroupKey = tuple[bool, tuple[int, ...]]
"""Which communicator: whether it is the backward's own, and its ranks."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many ranks each axis has; their product is the number of processes."""

    pp: int = 1
    """Pipeline stages; the model is cut into twice as many chunks."""
    dp: int = 1
    """Data-parallel replicas, over which parameters, experts included, are sharded."""
    cp: int = 1
    """Ranks that share one sequence."""
    ep: int = 1
    """Ranks that share the experts of a layer and are data-parallel for everything else."""

    def __post_init__(self):
        wrong = [f"mesh.{n} = {s}" for n, s in zip(AXIS_NAMES, self.sizes, strict=True) if s < 1]
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: an axis has at least 1 rank")

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Sizes in the order (pp, dp, cp, ep)."""
        return self.pp, self.dp, self.cp, self.ep

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.pp * self.dp * self.cp * self.ep

    @property
    def num_batch_ranks(self) -> int:
        """Ranks that read different data: dp x ep."""
        return self.dp * self.ep

    @property
    def label(self) -> str:
        """Short form without axes of size 1, such as `pp2-ep2`; `single` for one rank."""
        parts = [f"{n}{s}" for n, s in zip(AXIS_NAMES, self.sizes, strict=True) if s > 1]
        return "-".join(parts) or "single"


def parse_mesh(label: str) -> MeshConfig:
    """Read the short form `pp2-ep2` (axes in any order, each at most once) or `single`.

    Raises:
        ValueError: the label is anything else.
    """
    found = re.findall(r"(pp|dp|cp|ep)([1-9][0-9]*)(?:-|$)", label)
    sizes = {name: int(size) for name, size in found}
    if label != "single" and (
        len(sizes) != len(found) or "-".join(n + s for n, s in found) != label or not found
    ):
        raise ValueError(f"mesh {label!r}: expected axes pp, dp, cp, ep with sizes, as in pp2-ep2")
    return MeshConfig(**sizes)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis as one rank sees it: the ranks that differ from it in this axis alone."""

    name: str
    """Name for messages, such as `ep`."""
    size: int
    """Number of ranks."""
    rank: int
    """This rank's position among them."""
    ranks: tuple[int, ...]
    """Their ranks in the default process group, in axis order."""
    group: distributed.ProcessGroup | None
    """The communicator; None for one rank, or for a mesh made from sizes alone."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """All axes of one rank. Made by `single`, `plan` or `create`."""

    config: MeshConfig
    """The sizes."""
    rank: int
    """This rank in the mesh, which is its rank in the default process group."""
    pp: Axis
    """Pipeline stages."""
    dp: Axis
    """Data-parallel replicas."""
    cp: Axis
    """Ranks that share a sequence."""
    ep: Axis
    """Ranks that share a layer's experts; carries the forward's all-to-alls."""
    ep_backward: Axis
    """The same ranks as `ep` with a communicator of their own for the backward's all-to-alls."""
    data: Axis
    """dp x cp x ep: shards of dense parameters, counts of tokens."""
    expert_data: Axis
    """dp x cp: shards of experts."""
    world: Axis
    """All ranks of the mesh."""

    @classmethod
    def single(cls) -> "Mesh":
        """The mesh of one process; needs no process group."""
        return cls.plan(MeshConfig(), 0)

    @classmethod
    def plan(cls, config: MeshConfig, rank: int) -> "Mesh":
        """A mesh without groups, for models on the meta device and for planning.

        Raises:
            ValueError: `rank` lies outside the mesh.
        """
        if not 0 <= rank < config.world_size:
            raise ValueError(f"rank {rank} of mesh {config.label}: 0 to {config.world_size - 1}")
        return cls(config=config, rank=rank, **_axes(config, rank, {}))

    @classmethod
    def create(cls, config: MeshConfig, timeout: timedelta) -> "Mesh | None":
        """Create the groups over the first `config.world_size` ranks of the default group.

        Every rank of the default process group must call it. Axes with the same ranks share a
        communicator, `ep_backward` excepted.

        Args:
            config: sizes of the axes.
            timeout: after which a collective on any of the groups fails.

        Returns:
            The mesh, or None on ranks beyond it.

        Raises:
            ValueError: the default group has fewer ranks than the mesh.
        """
        available = distributed.get_world_size()
        if available < config.world_size:
            raise ValueError(
                f"mesh {config.label} needs {config.world_size} processes, {available} are running"
            )
        groups: dict[GroupKey, distributed.ProcessGroup | None] = {}
        for name in _MEMBERS:
            for rank in range(config.world_size):
                key = _group_key(name, _ranks_of(name, config, rank))
                if len(key[1]) > 1 and key not in groups:
                    group = distributed.new_group(list(key[1]), timeout=timeout)
                    # Ranks outside the group get a number.
                    groups[key] = group if isinstance(group, distributed.ProcessGroup) else None
        rank = distributed.get_rank()
        if rank >= config.world_size:
            return None
        return cls(config=config, rank=rank, **_axes(config, rank, groups))

    @property
    def batch_rank(self) -> int:
        """Which share of the data this rank reads, over (dp, ep)."""
        return self.dp.rank * self.ep.size + self.ep.rank

    @property
    def num_batch_ranks(self) -> int:
        """Number of such shares."""
        return self.config.num_batch_ranks


def describe_mesh(config: MeshConfig, ranks_per_node: int) -> str:
    """A table of axes: size, stride between neighbours, whether it crosses nodes, what it carries.

    Args:
        config: sizes of the axes.
        ranks_per_node: processes on one machine; node of rank r is `r // ranks_per_node`.
    """
    lines = [f"{'axis':<12} {'size':>5} {'stride':>7}  {'crosses nodes':<14} carries"]
    for name, (_, purpose) in _MEMBERS.items():
        if name == "ep_backward":
            continue
        groups = [_ranks_of(name, config, rank) for rank in range(config.world_size)]
        crosses = any(len({r // ranks_per_node for r in ranks}) > 1 for ranks in groups)
        stride = str(groups[0][1] - groups[0][0]) if len(groups[0]) > 1 else "-"
        answer = "yes" if crosses else "no"
        lines.append(f"{name:<12} {len(groups[0]):>5} {stride:>7}  {answer:<14} {purpose}")
    return "\n".join(lines)


def mesh_violations(
    config: MeshConfig,
    *,
    world_size: int,
    num_experts: int,
    num_layers: int,
    num_micro_batches: int,
) -> list[str]:
    """Everything that keeps this mesh from training this model, with values that would do.

    Args:
        config: sizes of the axes.
        world_size: processes that run.
        num_experts: experts of a layer; 0 for a dense model.
        num_layers: decoder layers.
        num_micro_batches: micro-batches of a step over all ranks.

    Returns:
        One line a violation, empty when the mesh fits.
    """
    wrong = []
    if config.world_size != world_size:
        product_text = " x ".join(f"{n} {s}" for n, s in zip(AXIS_NAMES, config.sizes, strict=True))
        fits = feasible_meshes(
            world_size,
            num_experts=num_experts,
            num_layers=num_layers,
            num_micro_batches=num_micro_batches,
        )
        names = ", ".join(mesh.label for mesh in fits) or "none"
        wrong.append(
            f"mesh: {product_text} = {config.world_size} processes, but {world_size} run; "
            f"meshes that fit {world_size}: {names}"
        )
    return wrong + _model_violations(config, num_experts, num_layers, num_micro_batches)


def feasible_meshes(
    world_size: int, *, num_experts: int, num_layers: int, num_micro_batches: int
) -> list[MeshConfig]:
    """All meshes of `world_size` processes that can train the model; arguments as above."""
    sizes = [n for n in range(1, world_size + 1) if world_size % n == 0]
    meshes = [
        MeshConfig(pp=pp, dp=world_size // (pp * ep), ep=ep)
        for pp, ep in product(sizes, sizes)
        if world_size % (pp * ep) == 0
    ]
    return [
        mesh
        for mesh in meshes
        if not _model_violations(mesh, num_experts, num_layers, num_micro_batches)
    ]


def _model_violations(
    config: MeshConfig, num_experts: int, num_layers: int, num_micro_batches: int
) -> list[str]:
    wrong = []
    if config.cp > 1:
        wrong.append(f"mesh.cp = {config.cp}: sequences are not shared between ranks; use 1")
    if num_experts == 0 and config.ep > 1:
        wrong.append(f"mesh.ep = {config.ep}: the model has no experts; use 1")
    if num_experts % config.ep:
        valid = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)
        wrong.append(
            f"mesh.ep = {config.ep} does not divide the {num_experts} experts of a layer; "
            f"valid: {valid}"
        )
    if num_layers < 2 * config.pp:
        wrong.append(
            f"mesh.pp = {config.pp} cuts the model into {2 * config.pp} chunks, but it has "
            f"{num_layers} layers; at most {num_layers // 2}"
        )
    step = config.num_batch_ranks
    per_rank, rest = divmod(num_micro_batches, step)
    if rest or per_rank < 2 * config.pp:
        least = 2 * config.pp * step
        wrong.append(
            f"{num_micro_batches} micro-batches a step over dp {config.dp} x ep {config.ep}: "
            f"a multiple of {step} that is at least {least} "
            f"(2 x pp = {2 * config.pp} on each of {step} ranks)"
        )
    return wrong


_MEMBERS: dict[str, tuple[tuple[str, ...], str]] = {
    "pp": (("pp",), "hidden states and their gradients between chunks"),
    "dp": (("dp",), "replicas of the data"),
    "cp": (("cp",), "keys and values of a shared sequence"),
    "ep": (("ep",), "tokens to their experts and back"),
    "ep_backward": (("ep",), "gradients of the same"),
    "data": (("dp", "cp", "ep"), "dense parameters and gradients, once a step"),
    "expert_data": (("dp", "cp"), "expert parameters and gradients, once a step"),
    "world": (("pp", "dp", "cp", "ep"), "norms, counts, messages"),
}


def _axes(
    config: MeshConfig,
    rank: int,
    groups: dict[GroupKey, distributed.ProcessGroup | None],
) -> dict[str, Axis]:
    axes = {}
    for name in _MEMBERS:
        ranks = _ranks_of(name, config, rank)
        axes[name] = Axis(
            name=name,
            size=len(ranks),
            rank=ranks.index(rank),
            ranks=ranks,
            group=groups.get(_group_key(name, ranks)),
        )
    return axes


def _group_key(name: str, ranks: tuple[int, ...]) -> GroupKey:
    return name == "ep_backward", ranks


def _ranks_of(name: str, config: MeshConfig, rank: int) -> tuple[int, ...]:
    """Ranks that agree with `rank` in every axis that `name` does not span."""
    spanned = _MEMBERS[name][0]
    coordinates, rest = [], rank
    for size in reversed(config.sizes):
        rest, coordinate = divmod(rest, size)
        coordinates.insert(0, coordinate)
    choices = [
        range(size) if axis in spanned else (coordinate,)
        for axis, size, coordinate in zip(AXIS_NAMES, config.sizes, coordinates, strict=True)
    ]
    _, dp_size, cp_size, ep_size = config.sizes
    return tuple(
        ((pp * dp_size + dp) * cp_size + cp) * ep_size + ep for pp, dp, cp, ep in product(*choices)
    )

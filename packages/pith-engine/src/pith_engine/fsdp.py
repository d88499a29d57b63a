"""Fully sharded data parallelism: parameters in units that gather and reduce when they are told to.

A unit (embedding, head with the final norm, each layer's dense part, each layer's experts) owns

    shards      master dtype: this rank's block of every parameter
    full        what layers read: compute dtype, or master dtype where the role says
    full_grads  master dtype: `parameter.grad` is a view of it, and autograd and the deferred
                weight gradients add straight into it
    grads       master dtype: the reduced gradient of `shards`

A step is `gather()` (full <- all ranks' shards, full_grads <- 0), any number of backward passes,
`reduce()` (grads <- sum over ranks of full_grads). Sums, never averages: each loss is divided by
the global token count at its source.

Dense parameters are sharded over `mesh.data`, experts over `mesh.expert_data` after ep has split
them. Replicated over dp instead (HSDP, `ShardingConfig`), gathers stay within a replica, and

    grads = sum over dp of (sum over the shard axis of full_grads):  reduce-scatter, then all-reduce

has the same bits on every replica, so the replicas' weights never part. A block is what
`torch.chunk` gives along dim 0, or along the last dim when dim 0 has fewer rows than ranks: 6 rows
on 4 ranks are 2, 2, 2, 0. One collective moves a whole unit; its buffer has one row a rank, in
which a parameter has the columns that its largest block needs.

torch's `fully_shard` does not serve: driven by hand it needs private members, it cannot sum on
gloo, and it loses weight gradients that arrive after its hooks ran. The trap: `parameter.grad` must
stay the view it is (no `zero_grad`); `reduce` checks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod

import torch
from torch import Tensor, nn

from pith_engine.contract import DeclaredParameter, ModelChunk, Role
from pith_engine.mesh import Axis, Mesh
from pith_engine.runtime import all_gather, all_reduce, reduce_scatter

ALIGNMENT = 64
"""Elements to which blocks are padded, so that every view starts on a boundary of 128 bytes."""


@dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """What is replicated over dp instead of sharded (HSDP): more memory, shorter gathers."""

    replicate_dense: bool = False
    """Shard all but experts over cp x ep only; every dp rank holds a replica."""
    replicate_experts: bool = False
    """Shard experts, which ep has split, over cp only; every dp rank holds a replica."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedParameter:
    """One stored parameter: this rank's block of it, and the whole that layers read."""

    name: str
    """Stored name, unique over the whole model: `layers.3.experts.gate_up`."""
    role: Role
    """What it is."""
    std: float | None
    """Standard deviation of its initial values; None for a constant."""
    parts: tuple[str, ...]
    """Last name components of its canonical tensors, along the last dim but one."""
    global_shape: tuple[int, ...]
    """Shape over the whole mesh: for experts dim 0 counts those of all ep ranks."""
    offsets: tuple[int, ...]
    """Where this rank's block starts in `global_shape`."""
    replicas: Axis
    """The ranks that hold this same block; one rank unless it is replicated."""
    axis: Axis
    """The ranks that hold the blocks of `full`."""
    dim: int
    """The dim along which `full` is cut into them."""
    full: nn.Parameter = field(repr=False)
    """The gathered parameter; `full.grad` is a view of the unit's gradient buffer."""
    shard: Tensor = field(repr=False)
    """This rank's block in the master dtype; may be empty."""
    grad: Tensor = field(repr=False)
    """The block's gradient in the master dtype, valid after `Unit.reduce`."""


@dataclass(frozen=True, kw_only=True)
class CanonicalBlock:
    """The part of one canonical tensor that this rank holds."""

    name: str
    """Canonical name: the stored one, or with its last component replaced by the part's."""
    tensor: Tensor
    """A view of the block; may be empty."""
    global_shape: tuple[int, ...]
    """Shape of the canonical tensor over the whole mesh."""
    offsets: tuple[int, ...]
    """Where the block starts in it."""


class Unit:
    """Parameters, all experts or none, that are gathered and reduced together.

    `parameters` has those of one gathered dtype next to each other.
    """

    def __init__(
        self,
        name: str,
        declared: dict[str, DeclaredParameter],
        mesh: Mesh,
        *,
        sharding: ShardingConfig = ShardingConfig(),
        compute_dtype: torch.dtype,
        device: torch.device,
    ):
        """Allocate the buffers of `declared` by stored name; NaN until the first `gather`.

        The master dtype is fp32, or float64 when `compute_dtype` is.
        """
        self.name = name
        master = torch.float64 if compute_dtype == torch.float64 else torch.float32
        is_expert = any(declaration.role.is_expert for declaration in declared.values())
        self._axis, self._replicas = shard_axes(mesh, sharding, is_expert=is_expert)
        order = sorted(declared, key=lambda n: declared[n].role.keeps_fp32)
        self._slots: list[_Slot] = []
        column = grad_start = 0
        for stored in order:
            dtype = master if declared[stored].role.keeps_fp32 else compute_dtype
            shape = tuple(declared[stored].shape)
            slot = _Slot(shape, self._axis, column, grad_start, dtype, device)
            self._slots.append(slot)
            column += _aligned(slot.width)
            grad_start += _aligned(slot.padded)
        self._shards = torch.zeros(column, dtype=master, device=device)
        self._full_grads = torch.zeros(grad_start, dtype=master, device=device)
        # A single rank's gradient is whole already: the blocks are the full buffer itself.
        alone = self._axis.size == self._replicas.size == 1
        self._grads = self._full_grads if alone else torch.zeros_like(self._shards)
        self.parameters: list[ShardedParameter] = []
        for stored, slot in zip(order, self._slots, strict=True):
            declaration = declared[stored]
            full = nn.Parameter(slot.whole(slot.buffer))
            full.grad_dtype = master
            full.grad = slot.whole(self._full_grads[slot.grad_start :])
            full.requires_grad_(declaration.role.is_trained)
            grad_column = slot.grad_start if alone else slot.column
            offsets, global_shape = [0] * len(slot.shape), list(slot.shape)
            offsets[slot.dim] = slot.bounds[self._axis.rank][0]
            if declaration.role.is_expert:
                offsets[0] += mesh.ep.rank * slot.shape[0]
                global_shape[0] *= mesh.ep.size
            self.parameters.append(
                ShardedParameter(
                    name=stored,
                    role=declaration.role,
                    std=declaration.std,
                    parts=declaration.parts,
                    global_shape=tuple(global_shape),
                    offsets=tuple(offsets),
                    replicas=self._replicas,
                    axis=self._axis,
                    dim=slot.dim,
                    full=full,
                    shard=slot.block(self._shards[slot.column :]),
                    grad=slot.block(self._grads[grad_column:]),
                )
            )

    @torch.no_grad()
    def gather(self) -> None:
        """Open a step: copy all ranks' shards into the full parameters, zero the gradients."""
        self._full_grads.zero_()
        if self._axis.size == 1:
            for parameter in self.parameters:
                parameter.full.copy_(parameter.shard)
            return
        for dtype, slots in groupby(self._slots, key=lambda slot: slot.buffer.dtype):
            bucket = list(slots)
            start, stop = bucket[0].column, bucket[-1].column + _aligned(bucket[-1].width)
            own = self._shards[start:stop].to(dtype)
            gathered = own.new_empty(self._axis.size * (stop - start))
            all_gather(gathered, own, self._axis)
            rows = gathered.view(self._axis.size, -1)
            for slot in bucket:
                column = slot.column - start
                slot.unpack(rows[:, column : column + slot.width])

    @torch.no_grad()
    def reduce(self) -> None:
        """Close a step: `grad` of every parameter becomes the sum over shard and replica axis."""
        for slot, parameter in zip(self._slots, self.parameters, strict=True):
            grad, start = parameter.full.grad, self._full_grads[slot.grad_start :]
            if grad is None or grad.data_ptr() != start.data_ptr():
                raise RuntimeError(
                    f"{parameter.name}.grad was replaced; its unit owns it (no zero_grad)"
                )
        if self._grads is self._full_grads:
            return
        packed = self._shards.new_zeros(self._axis.size, self._shards.numel())
        for slot in self._slots:
            columns = packed[:, slot.column : slot.column + slot.width]
            slot.pack(self._full_grads[slot.grad_start :], columns)
        reduce_scatter(self._grads, packed.view(-1), self._axis)
        all_reduce(self._grads, self._replicas)


def shard_axes(mesh: Mesh, sharding: ShardingConfig, *, is_expert: bool) -> tuple[Axis, Axis]:
    """The axis over which parameters are sharded, and the one over which they are replicated."""
    if sharding.replicate_experts if is_expert else sharding.replicate_dense:
        return (mesh.cp if is_expert else mesh.dense_shards), mesh.dp
    none = Axis(name="no replicas", size=1, rank=0, ranks=(mesh.rank,), group=None)
    return (mesh.expert_data if is_expert else mesh.data), none


def shard_chunks(
    chunks: list[ModelChunk],
    mesh: Mesh,
    *,
    sharding: ShardingConfig = ShardingConfig(),
    compute_dtype: torch.dtype,
    device: torch.device,
) -> list[Unit]:
    """Replace the declared parameters of this rank's chunks by real ones, owned by units.

    Units are `embedding`, `head`, and for each layer `layers.N` and `layers.N.experts`, in the
    order of registration. A parameter that is registered several times, in one chunk or in two
    (tied embeddings), stays one under its first name, and its gradient sums all uses. On the device
    `meta` nothing is allocated.

    Raises:
        ValueError: a parameter was not declared.
    """
    members: dict[str, dict[str, DeclaredParameter]] = {}
    uses: dict[DeclaredParameter, list[tuple[nn.Module, str]]] = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters(remove_duplicate=False):
            if not isinstance(parameter, DeclaredParameter):
                raise ValueError(f"parameter {name}: every parameter comes from declare()")
            if parameter not in uses:
                declared = members.setdefault(_unit_name(name, parameter.role), {})
                assert name not in declared, f"two parameters are called {name}"
                declared[name] = parameter
            module, _, attribute = name.rpartition(".")
            uses.setdefault(parameter, []).append((chunk.get_submodule(module), attribute))
    units = []
    for unit_name, declared in members.items():
        unit = Unit(
            unit_name,
            declared,
            mesh,
            sharding=sharding,
            compute_dtype=compute_dtype,
            device=device,
        )
        units.append(unit)
        for sharded in unit.parameters:
            for module, attribute in uses[declared[sharded.name]]:
                module.register_parameter(attribute, sharded.full)
    return units


def sharded_parameters(units: list[Unit]) -> list[ShardedParameter]:
    """All parameters of the units, in order."""
    return [parameter for unit in units for parameter in unit.parameters]


def canonical_blocks(parameter: ShardedParameter, tensor: Tensor) -> Iterator[CanonicalBlock]:
    """Cut a tensor shaped like the shard (value, gradient, moment) into canonical tensors.

    A part is an equal share of the last dim but one; a block that lies in other parts only gives
    an empty one.
    """
    if not parameter.parts:
        yield CanonicalBlock(
            name=parameter.name,
            tensor=tensor,
            global_shape=parameter.global_shape,
            offsets=parameter.offsets,
        )
        return
    *_, num_rows, _ = parameter.global_shape
    rows = num_rows // len(parameter.parts)
    assert rows * len(parameter.parts) == num_rows, f"{parameter.name}: parts of equal size"
    start = parameter.offsets[-2]
    for index, part in enumerate(parameter.parts):
        first = min(max(start, index * rows), (index + 1) * rows)
        last = max(first, min(start + tensor.shape[-2], (index + 1) * rows))
        begin = first - start if last > first else 0
        global_shape, offsets = list(parameter.global_shape), list(parameter.offsets)
        global_shape[-2], offsets[-2] = rows, first - index * rows
        yield CanonicalBlock(
            name=".".join([*parameter.name.split(".")[:-1], part]),
            tensor=tensor.narrow(-2, begin, last - first),
            global_shape=tuple(global_shape),
            offsets=tuple(offsets),
        )


def blocks_of_rank(parameter: ShardedParameter, rank: int) -> Iterator[CanonicalBlock]:
    """The canonical blocks that a rank of the parameter's axis holds, on the meta device."""
    axis, dim, shape = parameter.axis, parameter.dim, list(parameter.full.shape)
    own_start, _ = chunk_bounds(shape[dim], axis.size, axis.rank)
    start, stop = chunk_bounds(shape[dim], axis.size, rank)
    offsets = list(parameter.offsets)
    offsets[dim] += start - own_start
    shape[dim] = stop - start
    there = replace(parameter, offsets=tuple(offsets))
    return canonical_blocks(there, torch.empty(shape, device="meta"))


def cut_block(whole: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    """The block of a whole tensor with this shape, maybe empty, from these offsets: a view."""
    for dim, (start, size) in enumerate(zip(offsets, shape, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), size)
    return whole


def chunk_bounds(size: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Start and stop of a rank's share of `size` rows, as `torch.chunk` cuts; may be empty."""
    share = -(-size // num_ranks)
    return min(rank * share, size), min((rank + 1) * share, size)


class _Slot:
    """Where one parameter lies in its unit's buffers.

    In a row of the communication buffer it has `width` columns from `column` on, a rank's block at
    their start. Split along dim 0, the rows' columns one after the other are the whole tensor, so
    full buffers (`buffer` for the parameter) have room for `padded` elements.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        axis: Axis,
        column: int,
        grad_start: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.shape, self.column, self.grad_start = shape, column, grad_start
        self.dim = 0 if shape[0] >= axis.size else len(shape) - 1
        self.bounds = [chunk_bounds(shape[self.dim], axis.size, r) for r in range(axis.size)]
        self._rank = axis.rank
        self.width = prod(self._block_shape(0))
        self.padded = self.width * axis.size
        self.buffer = torch.full((self.padded,), torch.nan, dtype=dtype, device=device)

    def whole(self, buffer: Tensor) -> Tensor:
        """The parameter as a view of the start of a full buffer."""
        return buffer[: prod(self.shape)].view(self.shape)

    def block(self, row: Tensor) -> Tensor:
        """This rank's block as a view of the start of its columns."""
        shape = self._block_shape(self._rank)
        return row[: prod(shape)].view(shape)

    def unpack(self, columns: Tensor) -> None:
        """Full parameter <- gathered columns `[ranks, width]`."""
        if self.dim == 0:
            self.buffer.view(columns.shape).copy_(columns)
            return
        shapes = [self._block_shape(rank) for rank in range(len(self.bounds))]
        blocks = [row[: prod(s)].view(s) for row, s in zip(columns, shapes, strict=True)]
        torch.cat(blocks, dim=self.dim, out=self.whole(self.buffer))

    def pack(self, buffer: Tensor, columns: Tensor) -> None:
        """Columns `[ranks, width]`, zero before <- full gradient buffer."""
        if self.dim == 0:
            columns.copy_(buffer[: self.padded].view(columns.shape))
            return
        whole = self.whole(buffer)
        for row, (start, stop) in zip(columns, self.bounds, strict=True):
            block = whole.narrow(self.dim, start, stop - start)
            row[: block.numel()].view(block.shape).copy_(block)

    def _block_shape(self, rank: int) -> tuple[int, ...]:
        shape = list(self.shape)
        start, stop = self.bounds[rank]
        shape[self.dim] = stop - start
        return tuple(shape)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _unit_name(name: str, role: Role) -> str:
    if not name.startswith("layers."):
        return "embedding" if role is Role.EMBEDDING else "head"
    layer = ".".join(name.split(".")[:2])
    return f"{layer}.experts" if role.is_expert else layer

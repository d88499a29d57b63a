"""Fully sharded data parallelism: units of parameters that gather and reduce when told to.

A unit (embedding, head with the final norm, a layer's dense part, a layer's experts) owns

    shards      this rank's block of every parameter
    full        what layers read, in compute dtype unless `Role.keeps_fp32`
    full_grads  what autograd and deferred weight gradients add into
    grads       the gradient of `shards`

    gather()    full <- all ranks' shards, full_grads <- 0
    reduce()    grads <- sum over ranks of full_grads, then over replicas (HSDP)

A gather is a collective a dtype, a reduce one, or two with replicas. All but `full` are in master
dtype (`accumulation_dtype`). A block is what `torch.chunk` gives along dim 0 (6 rows on 4 ranks are
2, 2, 2, 0), or along the last dim when dim 0 has fewer rows than ranks.

torch's `fully_shard` is driven by private members, cannot sum on gloo, and loses late weight
gradients. The trap: `parameter.grad` must stay a view of `full_grads` (no `zero_grad`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import prod

import torch
from pith_ops.device import accumulation_dtype
from torch import Tensor, nn

from pith_engine.contract import DeclaredParameter, ModelChunk, Role
from pith_engine.mesh import Axis, Mesh
from pith_engine.runtime import all_gather, all_reduce, reduce_scatter

ALIGNMENT = 64
"""Elements to which views are aligned: 128 bytes in bf16."""


@dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """What is replicated over dp (HSDP): more memory, shorter gathers."""

    replicate_dense: bool = False
    """Shard all but experts over cp x ep only."""
    replicate_experts: bool = False
    """Shard experts over cp only."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ShardedParameter:
    """A stored parameter."""

    name: str
    """Such as `layers.3.experts.gate_up`, unique."""
    role: Role
    """What it is."""
    std: float | None
    """As in `DeclaredParameter`."""
    parts: tuple[str, ...]
    """As in `DeclaredParameter`."""
    global_shape: tuple[int, ...]
    """Over the mesh, ep included."""
    offsets: tuple[int, ...]
    """Where the block starts in it."""
    replicas: Axis
    """Ranks with the same block."""
    axis: Axis
    """Ranks with the blocks of the whole."""
    full: nn.Parameter
    """What layers read."""
    shard: Tensor
    """The block, maybe empty."""
    grad: Tensor
    """Its gradient after `Unit.reduce`."""


@dataclass(frozen=True, kw_only=True)
class CanonicalBlock:
    """A rank's part of a canonical tensor."""

    name: str
    """The stored one's, its last component replaced by a part's."""
    tensor: Tensor
    """A view, maybe empty."""
    global_shape: tuple[int, ...]
    """Of the canonical tensor."""
    offsets: tuple[int, ...]
    """Where the block starts in it."""


class Unit:
    """Parameters, all experts' or none, that move together."""

    def __init__(
        self,
        name: str,
        declared: dict[str, DeclaredParameter],
        mesh: Mesh,
        compute_dtype: torch.dtype,
        device: torch.device,
        sharding: ShardingConfig = ShardingConfig(),
    ):
        self.name, master = name, accumulation_dtype(compute_dtype)
        is_expert = any(declaration.role.is_expert for declaration in declared.values())
        self._axis, self._replicas = shard_axes(mesh, sharding, is_expert=is_expert)
        order = sorted(declared.items(), key=lambda item: item[1].role.keeps_fp32)  # by dtype
        self._slots: list[_Slot] = []
        column = 0
        for _, declaration in order:
            dtype = master if declaration.role.keeps_fp32 else compute_dtype
            empty = torch.empty(0, dtype=dtype, device=device)
            self._slots.append(_Slot(tuple(declaration.shape), self._axis, column, empty))
            column = self._slots[-1].stop
        self._shards = torch.zeros(column, dtype=master, device=device)
        self._full_grads = torch.zeros(column * self._axis.size, dtype=master, device=device)
        alone = self._axis.size == self._replicas.size == 1
        self._grads = self._full_grads if alone else torch.zeros_like(self._shards)
        self.parameters: list[ShardedParameter] = []
        for (stored, declaration), slot in zip(order, self._slots, strict=True):
            role, shape = declaration.role, slot.shape
            full = nn.Parameter(slot.whole(slot.buffer), requires_grad=role.is_trained)
            full.grad_dtype = master
            full.grad = slot.whole(self._full_grads[slot.grad_start :])
            offsets, global_shape = [0] * len(shape), list(shape)
            offsets[slot.dim] = slot.bounds[self._axis.rank][0]
            if role.is_expert:
                offsets[0] += mesh.ep.rank * shape[0]
                global_shape[0] *= mesh.ep.size
            self.parameters.append(
                ShardedParameter(
                    name=stored,
                    role=role,
                    std=declaration.std,
                    parts=declaration.parts,
                    global_shape=tuple(global_shape),
                    offsets=tuple(offsets),
                    replicas=self._replicas,
                    axis=self._axis,
                    full=full,
                    shard=slot.block(self._shards),
                    grad=slot.block(self._grads),
                )
            )

    @torch.no_grad()
    def gather(self) -> None:
        """Open a step."""
        self._full_grads.zero_()
        if self._axis.size == 1:
            for parameter in self.parameters:
                parameter.full.copy_(parameter.shard)
            return
        for dtype, slots in groupby(self._slots, key=lambda slot: slot.buffer.dtype):
            bucket = list(slots)
            start = bucket[0].column
            own = self._shards[start : bucket[-1].stop].to(dtype)
            gathered = own.new_empty(self._axis.size * own.numel())
            all_gather(gathered, own, self._axis)
            rows = gathered.view(self._axis.size, -1)
            for slot in bucket:
                for block, columns in slot.views(slot.buffer, rows[:, slot.column - start :]):
                    block.copy_(columns)

    @torch.no_grad()
    def reduce(self) -> None:
        """Close a step."""
        for slot, parameter in zip(self._slots, self.parameters, strict=True):
            grad, start = parameter.full.grad, self._full_grads[slot.grad_start :]
            if grad is None or grad.data_ptr() != start.data_ptr():
                raise RuntimeError(f"{parameter.name}.grad was replaced: do not use zero_grad")
        if self._grads is self._full_grads:
            return
        packed = self._shards.new_zeros(self._axis.size, self._shards.numel())
        for slot in self._slots:
            full_grad = self._full_grads[slot.grad_start :]
            for block, columns in slot.views(full_grad, packed[:, slot.column :]):
                columns.copy_(block)
        reduce_scatter(self._grads, packed.view(-1), self._axis)
        all_reduce(self._grads, self._replicas)


def shard_axes(mesh: Mesh, sharding: ShardingConfig, *, is_expert: bool) -> tuple[Axis, Axis]:
    """Axes of shards and of replicas."""
    whole, part = (mesh.expert_data, mesh.cp) if is_expert else (mesh.data, mesh.dense_shards)
    if sharding.replicate_experts if is_expert else sharding.replicate_dense:
        return part, mesh.dp
    return whole, Axis(name="no replicas", size=1, rank=0, ranks=(mesh.rank,), group=None)


def shard_chunks(
    chunks: list[ModelChunk],
    mesh: Mesh,
    *,
    sharding: ShardingConfig = ShardingConfig(),
    compute_dtype: torch.dtype,
    device: torch.device,
) -> list[Unit]:
    """Replace declared parameters by those of units.

    One of several names (tied embeddings) has its first; its gradient sums all uses.
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
        units.append(Unit(unit_name, declared, mesh, compute_dtype, device, sharding))
        for sharded in units[-1].parameters:
            for module, attribute in uses[declared[sharded.name]]:
                module.register_parameter(attribute, sharded.full)
    return units


def sharded_parameters(units: list[Unit]) -> list[ShardedParameter]:
    """Of all units, in order."""
    return [parameter for unit in units for parameter in unit.parameters]


def canonical_blocks(parameter: ShardedParameter, tensor: Tensor) -> Iterator[CanonicalBlock]:
    """Cut a tensor like the shard into canonical blocks, equal shares of dim -2."""
    *prefix, last = parameter.name.split(".")
    parts, shape, offsets = parameter.parts or (last,), parameter.global_shape, parameter.offsets
    dim = max(len(shape) - 2, 0)
    rows = shape[dim] // len(parts)
    assert rows * len(parts) == shape[dim], f"{parameter.name}: parts of equal size"
    for index, part in enumerate(parts):
        begin = index * rows - offsets[dim]  # of the part, in rows of the tensor
        first, stop = (min(max(end, 0), tensor.shape[dim]) for end in (begin, begin + rows))
        yield CanonicalBlock(
            name=".".join([*prefix, part]),
            tensor=tensor.narrow(dim, first, stop - first),
            global_shape=(*shape[:dim], rows, *shape[dim + 1 :]),
            offsets=(*offsets[:dim], min(max(-begin, 0), rows), *offsets[dim + 1 :]),
        )


def cut_block(whole: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    """A view of a block, maybe empty."""
    for dim, (start, size) in enumerate(zip(offsets, shape, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), size)
    return whole


class _Slot:
    """Where one parameter lies in its unit's buffers.

    The communication buffer has a row a rank, with `width` columns for it. Split along dim 0, they
    are the whole tensor row by row, so full buffers have as many elements.
    """

    def __init__(self, shape: tuple[int, ...], axis: Axis, column: int, empty: Tensor):
        self.shape, self.column, self.grad_start = shape, column, column * axis.size
        self.dim = 0 if shape[0] >= axis.size else len(shape) - 1
        size, before, after = shape[self.dim], shape[: self.dim], shape[self.dim + 1 :]
        share = -(-size // axis.size)
        ends = [min(r * share, size) for r in range(axis.size + 1)]
        self.bounds = list(pairwise(ends))
        self.block_shape = (*before, ends[axis.rank + 1] - ends[axis.rank], *after)
        self.width = share * prod(before + after)
        self.stop = column + -(-self.width // ALIGNMENT) * ALIGNMENT
        self.buffer = empty.new_full((axis.size * self.width,), torch.nan)

    def whole(self, buffer: Tensor) -> Tensor:
        return buffer[: prod(self.shape)].view(self.shape)

    def block(self, row: Tensor) -> Tensor:
        return row[self.column :][: prod(self.block_shape)].view(self.block_shape)

    def views(self, buffer: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Equal parts of a full buffer and `rows [ranks, from column on]`."""
        columns = rows[:, : self.width]
        if self.dim == 0:
            yield buffer[: columns.numel()].view(columns.shape), columns
            return
        for row, (start, stop) in zip(columns, self.bounds, strict=True):
            block = self.whole(buffer).narrow(self.dim, start, stop - start)
            yield block, row[: block.numel()].view(block.shape)


def _unit_name(name: str, role: Role) -> str:
    if not name.startswith("layers."):
        return "embedding" if role is Role.EMBEDDING else "head"
    layer = ".".join(name.split(".")[:2])
    return f"{layer}.experts" if role.is_expert else layer

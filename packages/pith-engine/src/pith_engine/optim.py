"""Optimizers on this rank's shards: AdamW, and Muon for matrices with AdamW for the rest.

AdamW (Loshchilov and Hutter, arXiv 1711.05101), where weight decay wd acts if `Role.is_decayed`:

    m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g^2
    w <- w - lr * wd * w - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

It is elementwise: a mesh changes nothing. torch's class has no moments before its first step, which
checkpoints need: its kernel is called here.

Muon (Jordan, kellerjordan.github.io/posts/muon), for a matrix w [R, C] and mu = `momentum`:

    m <- mu m + (1 - mu) g          u = (1 - mu) g + mu m                            (Nesterov)
    x <- u / |u|,  then 5 times  x <- a x + (b s + c s^2) x  with  s = x x^T    (Newton-Schulz)
    w <- w - lr * wd * w - lr * 0.2 * sqrt(max(R, C)) * x               (arXiv 2502.16982, eq. 4)

The scale gives x the RMS of AdamW's updates: learning rate and decay carry over. x has the dtype of
compute (bf16 in torch.optim.Muon). Matrices are canonical, every expert apart. Whole ones are
updated in place; one spread over an axis has an owner:

    1. every rank: u of its pieces   --all-to-all-->   owners
    2. owners: x, of matrices of one shape together
    3. x   --all-to-all-->   every rank: its pieces of w

one chunk of matrices at a time, to bound memory. The trap: collectives must match on all ranks, so
chunks and owners follow from shapes alone, and empty pieces take part.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from math import inf, prod, sqrt
from typing import Literal

import torch
from pith_ops.device import accumulation_dtype
from torch import Tensor
from torch.optim.adamw import adamw

from pith_engine.fsdp import ShardedParameter, canonical_blocks, cut_block
from pith_engine.mesh import Axis, Mesh
from pith_engine.runtime import all_to_all, gather_objects
from pith_engine.violations import raise_violations

DEFAULT_MOMENTUM = 0.95
"""As in torch.optim.Muon."""
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""The quintic's coefficients (Jordan)."""
NUM_ITERATIONS = 5
SMALLEST_NORM = 1e-7
"""Least divisor of u (Jordan)."""
UPDATE_RMS = 0.2
"""Of AdamW in training (arXiv 2502.16982, section 2.2)."""
CHUNK_ELEMENTS = 2**25
"""That a rank owns at a time: 64 MiB in bf16, enough to hide launches."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Which optimizer, and its constants."""

    method: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for matrices, AdamW for embedding, head, router, norms and biases."""
    momentum: float | None = None
    """From 0 to below 1 (default 0.95); muon only."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of the two moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices, multiplied by the learning rate."""

    def violations(self) -> list[str]:
        """What is out of range, a line each."""
        method, momentum, betas, decay = self.method, self.momentum, self.betas, self.weight_decay
        fix = "set --optim.momentum None or use optim.method muon"
        is_unread = method == "adamw" and momentum is not None
        is_sound = {
            f"method = {method!r}: adamw or muon": method in ("adamw", "muon"),
            f"momentum = {momentum}: from 0 to below 1": momentum is None or 0 <= momentum < 1,
            f"momentum = {momentum} but AdamW has betas; {fix}": not is_unread,
            f"betas = {betas}: each from 0 to below 1": all(0 <= beta < 1 for beta in betas),
            f"eps = {self.eps}: above 0 and finite": 0 < self.eps < inf,
            f"weight_decay = {decay}: 0 or more and finite": 0 <= decay < inf,
        }
        return [f"optim.{fault}" for fault, sound in is_sound.items() if not sound]


def describe_groups(groups: dict[str, list[ShardedParameter]], mesh: Mesh) -> str:
    """A table of what each method updates; all ranks call it. Gate and up are two tensors."""
    counts = Counter[tuple[str, str]]()
    for method, members in groups.items():
        for p in members:
            row = f"{method:<10} {p.role.value:<14}"
            counts[row, "tensors"] += max(1, len(p.parts))
            counts[row, "elements"] += prod(p.global_shape)
    counts = sum(gather_objects(counts, mesh.pp), Counter())
    lines = [f"{'optimizer':<10} {'role':<14} {'tensors':>8} {'elements':>16}"]
    for row in sorted({row for row, _ in counts}):
        lines.append(f"{row} {counts[row, 'tensors']:>8} {counts[row, 'elements']:>16,}")
    return "\n".join(lines)


class AdamW:
    """One rank's optimizer; a resumed run sets `num_steps`, the updates so far.

    `groups`: method -> what it trains. `moments`: stored name -> live tensors like the shard.
    """

    def __init__(self, parameters: Sequence[ShardedParameter], config: OptimizerConfig):
        raise_violations(config.violations(), "optimizer")
        self.num_steps = 0
        self._config = config
        self.groups = {"adamw": [p for p in parameters if p.role.is_trained]}
        self.moments = _zeros(self.groups["adamw"], "exp_avg", "exp_avg_sq")

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update all shards."""
        held = [p for p in self.groups["adamw"] if p.shard.numel()]
        for decayed in (True, False):
            members = [p for p in held if p.role.is_decayed == decayed]
            if not members:
                continue
            device = members[0].shard.device
            # The kernel adds one to the count of steps first.
            counts = torch.full((len(members),), float(self.num_steps), device=device)
            adamw(
                [p.shard for p in members],
                [p.grad for p in members],
                [self.moments[p.name]["exp_avg"] for p in members],
                [self.moments[p.name]["exp_avg_sq"] for p in members],
                [],
                list(counts.unbind()),
                fused=True,
                amsgrad=False,
                beta1=self._config.betas[0],
                beta2=self._config.betas[1],
                lr=lr,
                weight_decay=self._config.weight_decay if decayed else 0.0,
                eps=self._config.eps,
                maximize=False,
            )
        self.num_steps += 1


@dataclass(frozen=True, eq=False)
class _Piece:
    """A rank's part of a matrix, maybe empty, or whole matrices."""

    shard: Tensor
    grad: Tensor
    momentum: Tensor
    shape: tuple[int, ...]
    """[R, C] of the whole."""
    places: list[tuple[tuple[int, ...], tuple[int, ...]]]
    """Offsets and shape of each rank's piece; none for whole matrices."""

    def direction(self, mu: float) -> Tensor:
        """u; updates the momentum."""
        self.momentum.lerp_(self.grad, 1 - mu)
        return self.grad.lerp(self.momentum, mu)

    def update(self, x: Tensor, lr: float, weight_decay: float) -> None:
        scale = UPDATE_RMS * sqrt(max(self.shape))
        self.shard.mul_(1 - lr * weight_decay).add_(x, alpha=-lr * scale)


class Muon:
    """Muon where `Role.uses_muon`, AdamW for the others; all ranks make it together.

    `groups`, `moments` and `num_steps` are as in `AdamW`.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        config: OptimizerConfig,
        *,
        chunk_elements: int = CHUNK_ELEMENTS,
    ):
        self.num_steps = 0
        matrices = [p for p in parameters if p.role.uses_muon]
        self._rest = AdamW([p for p in parameters if not p.role.uses_muon], config)
        self._momentum = DEFAULT_MOMENTUM if config.momentum is None else config.momentum
        self._weight_decay = config.weight_decay
        self.groups = {"muon": matrices, **self._rest.groups}
        self.moments = {**_zeros(matrices, "momentum"), **self._rest.moments}
        assert len(self.moments) == sum(map(len, self.groups.values())), "two with one name"
        # One for all: no role of Muon keeps the master dtype.
        self._dtype = matrices[0].full.dtype if matrices else torch.float32
        self._local: list[_Piece] = []
        spread: dict[Axis, list[_Piece]] = {}
        for parameter in matrices:
            momentum = self.moments[parameter.name]["momentum"]
            for piece in _pieces(parameter, momentum, chunk_elements):
                if piece.places:
                    spread.setdefault(parameter.axis, []).append(piece)
                elif piece.shard.numel():
                    self._local.append(piece)
        self._chunks = [
            (axis, owned_by)
            for axis, pieces in spread.items()
            for owned_by in _assign(pieces, axis.size, chunk_elements)
        ]
        owned = [*self._local, *(p for _, owned_by in self._chunks for p in chain(*owned_by))]
        num_held = sum(parameter.shard.numel() for parameter in matrices)
        assert sum(p.shard.numel() for p in owned) == num_held, "each element in one matrix"

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update all shards, on all ranks."""
        self._rest.num_steps = self.num_steps
        self._rest.step(lr)
        self.num_steps += 1
        for piece in self._local:
            x = orthogonalise(piece.direction(self._momentum).to(self._dtype))
            piece.update(x, lr, self._weight_decay)
        for axis, owned_by in self._chunks:
            self._step_spread(axis, owned_by, lr)

    def _step_spread(self, axis: Axis, owned_by: list[list[_Piece]], lr: float) -> None:
        """One chunk; an owner's matrices of a shape follow each other."""
        held = [piece for owned in owned_by for piece in owned]
        mine, ranks = owned_by[axis.rank], range(axis.size)
        sent_sizes = [sum(piece.shard.numel() for piece in owned) for owned in owned_by]
        received_sizes = [sum(prod(piece.places[rank][1]) for piece in mine) for rank in ranks]
        # 1. u, sorted by owner; it arrives sorted by holder.
        sent = torch.empty(sum(sent_sizes), dtype=self._dtype, device=held[0].shard.device)
        received = sent.new_empty(sum(received_sizes))
        outgoing = _views(sent, [piece.shard for piece in held])
        for piece, view in zip(held, outgoing, strict=True):
            view.copy_(piece.direction(self._momentum))
        all_to_all(received, sent, received_sizes, sent_sizes, axis)
        # 2. x; blocks are views of whole matrices, in the order of arrival.
        shapes = groupby(piece.shape for piece in mine)
        stacks = [sent.new_empty(len(list(group)), *shape) for shape, group in shapes]
        wholes = [whole for stack in stacks for whole in stack]
        blocks = [
            cut_block(whole, *piece.places[rank])
            for rank in ranks
            for piece, whole in zip(mine, wholes, strict=True)
        ]
        incoming = _views(received, blocks)
        for block, view in zip(blocks, incoming, strict=True):
            block.copy_(view)
        for stack in stacks:
            stack.copy_(orthogonalise(stack))
        # 3.
        for block, view in zip(blocks, incoming, strict=True):
            view.copy_(block)
        all_to_all(sent, received, sent_sizes, received_sizes, axis)
        for piece, view in zip(held, outgoing, strict=True):
            piece.update(view, lr, self._weight_decay)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Newton-Schulz on `[n, R, C]`: singular values become about 0.7 to 1.2."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    # Not `vector_norm`, which is inexact on a CPU (see `global_norm`).
    norm = x.square().sum((-2, -1), keepdim=True, dtype=accumulation_dtype(x.dtype)).sqrt()
    x = x / norm.clamp(min=SMALLEST_NORM).to(x.dtype)
    for _ in range(NUM_ITERATIONS):
        s = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(s, s, s, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _zeros(parameters: list[ShardedParameter], *names: str) -> dict[str, dict[str, Tensor]]:
    moments = {p.name: {name: torch.zeros_like(p.shard) for name in names} for p in parameters}
    assert len(moments) == len(parameters), "two parameters have one name"
    return moments


def _views(buffer: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    parts = buffer.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _pieces(parameter: ShardedParameter, momentum: Tensor, chunk_elements: int) -> Iterator[_Piece]:
    """Stacks of whole matrices to `chunk_elements`, pieces of spread ones."""
    assert parameter.shard.dim() in (2, 3), f"{parameter.name}: a matrix or a stack of matrices"
    tensors = parameter.shard, parameter.grad, momentum
    for blocks in zip(*(canonical_blocks(parameter, tensor) for tensor in tensors), strict=True):
        shape, parts = blocks[0].global_shape[-2:], [block.tensor for block in blocks]
        own = blocks[0].offsets[-2:], tuple(parts[0].shape[-2:])
        places = gather_objects(own, parameter.axis)
        parts = [part if part.dim() == 3 else part[None] for part in parts]
        if all(held == shape or 0 in held for _, held in places):
            places = []
            parts = [part.split(max(1, chunk_elements // prod(shape))) for part in parts]
        for shard, grad, moment in zip(*parts, strict=True):
            yield _Piece(shard=shard, grad=grad, momentum=moment, shape=shape, places=places)


def _assign(pieces: list[_Piece], num_ranks: int, chunk_elements: int) -> list[list[list[_Piece]]]:
    """Chunks of owners: the dearest matrix first, to the rank with least work."""
    chunks: list[list[list[_Piece]]] = []
    costs, sizes = [0] * num_ranks, [0] * num_ranks
    for piece in sorted(pieces, key=lambda m: (-prod(m.shape) * min(m.shape), m.shape)):
        size, owner = prod(piece.shape), costs.index(min(costs))
        if not chunks or (sizes[owner] and sizes[owner] + size > chunk_elements):
            chunks.append([[] for _ in range(num_ranks)])
            costs, sizes, owner = [0] * num_ranks, [0] * num_ranks, 0
        chunks[-1][owner].append(piece)
        costs[owner] += size * min(piece.shape)
        sizes[owner] += size
    return chunks

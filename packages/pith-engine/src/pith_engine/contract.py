"""What a model must offer to the engine, whichever model it is.

The engine owns dispatch, combine and everything that touches a routing weight. A dense layer has no
routing, and its `experts` gets `groups=None`. `attention` also computes shared experts, folded into
`residual`.

T tokens of a micro-batch on a rank, P (token, expert) pairs received, D documents; H hidden size, K
top-k, N router pool.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from pith_ops.grouped_linear import Groups
from pith_ops.linear import WeightGradQueue
from torch import Tensor, nn

IGNORED_TARGET = -100


class Role(Enum):
    """What a parameter is: dtype, optimizer, decay, initial value, sharding follow."""

    MATRIX = "matrix"
    EXPERT_MATRIX = "expert matrix"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    ROUTER = "router"
    BIAS = "bias"
    EXPERT_BIAS = "expert bias"
    SINK = "sink"
    CONV = "conv"
    BALANCE_BIAS = "balance bias"
    """Added to a router's scores for the choice alone."""

    @property
    def is_expert(self) -> bool:
        """Whether dim 0 counts experts, sharded over ep."""
        return self in (Role.EXPERT_MATRIX, Role.EXPERT_BIAS)

    @property
    def is_decayed(self) -> bool:
        """Whether weight decay applies."""
        return self.is_trained and self not in (Role.NORM, Role.BIAS, Role.EXPERT_BIAS, Role.SINK)

    @property
    def uses_muon(self) -> bool:
        """Whether it maps hidden to hidden states, as Muon needs."""
        return self in (Role.MATRIX, Role.EXPERT_MATRIX)

    @property
    def keeps_fp32(self) -> bool:
        """Whether the gathered copy stays in the master dtype."""
        return self in (Role.ROUTER, Role.SINK, Role.BIAS, Role.EXPERT_BIAS, Role.BALANCE_BIAS)

    @property
    def is_trained(self) -> bool:
        """Whether the optimizer moves it."""
        return self is not Role.BALANCE_BIAS


class DeclaredParameter(nn.Parameter):
    """A parameter on the meta device, until a unit replaces it.

    `std` is that of the initial normal values, None for a constant (1 for norms, else 0). `parts`
    names canonical tensors of equal size stored one after the other along the last dim but one,
    such as `("gate_proj", "up_proj")` in `[E, 2 * I, H]`; empty if the stored one is canonical.
    """

    role: Role
    std: float | None
    parts: tuple[str, ...]


def declare(
    shape: tuple[int, ...], role: Role, *, std: float | None = None, parts: tuple[str, ...] = ()
) -> DeclaredParameter:
    """Declare a parameter by its shape before data-parallel sharding; experts `[E / ep, ...]`."""
    parameter = DeclaredParameter(torch.empty(shape, device="meta"))
    parameter.role, parameter.std, parameter.parts = role, std, parts
    return parameter


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch, or a rank's part of every sequence (`shard_batch`)."""

    tokens: Tensor
    """`[T]` int64 ids."""
    targets: Tensor
    """`[T]` int64, the id after each token; `IGNORED_TARGET` where no loss is taken."""
    positions: Tensor
    """`[T]` int64, from 0 in each sequence or document."""
    sequence_length: int
    """Tokens of a sequence on this rank."""
    documents: Tensor | None = None
    """`[D + 1]` int32 offsets of packed documents in the `T * cp` tokens of the whole; None: a
    document a sequence."""

    @property
    def num_sequences(self) -> int:
        """Of which this rank has tokens."""
        return self.tokens.numel() // self.sequence_length

    @property
    def counted(self) -> Tensor:
        """`[T]` bool, where a loss is taken."""
        return self.targets != IGNORED_TARGET


@dataclass(frozen=True, kw_only=True)
class Routing:
    """A router's decisions."""

    expert_ids: Tensor
    """`[T, K]` int32, -1 for "sent nowhere"."""
    weights: Tensor
    """`[T, K]` in fp32 (float64 when the model is), differentiable; 0 where the id is -1."""
    scores: Tensor
    """`[T, N]` normalised over the router's own pool, differentiable."""
    chosen: Tensor
    """`[T, K]` int32 in the router's own pool; `expert_ids` where that is the experts."""
    logits: Tensor
    """`[T, N]` of the scores, differentiable."""


class DecoderLayer(Protocol):
    """What the engine calls of a layer."""

    num_local_experts: int
    """Experts held on this rank; 0 for a dense layer."""

    def attention(
        self, hidden: Tensor, batch: Batch, chosen: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Routing | None]:
        """`[T, H]` -> tokens for the experts `[T, H]`, residual `[T, H]`, routing.

        A recomputation routes to `chosen`, the `Routing.chosen` of the first run.
        """
        ...

    def experts(
        self, tokens: Tensor, groups: Groups | None, weight_grads: WeightGradQueue | None
    ) -> Tensor:
        """Rows in expert order `[P, H]`, dense `[T, H]` -> as many unweighted outputs."""
        ...

    def aggregate(self, combined: Tensor, residual: Tensor) -> Tensor:
        """Weighted expert sums and residual -> hidden, each `[T, H]`."""
        ...


class ModelChunk(nn.Module):
    """Consecutive layers, the embedding if first, the head if last."""

    def __init__(self, *, is_last: bool):
        super().__init__()
        self.is_last = is_last
        self.layers = nn.ModuleDict()

    def decoder_layers(self) -> dict[int, DecoderLayer]:
        """Global number -> layer, in order."""
        return {int(n): layer for n, layer in self.layers.items()}  # type: ignore[misc]

    def embed(self, batch: Batch) -> Tensor:
        """First chunk: token ids `[T]` -> hidden `[T, H]` in the compute dtype."""
        raise NotImplementedError

    def loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Last chunk: the sum of token losses, in fp32 or wider, without full logits."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Last chunk: `[T, H]` -> `[T, V]`, for comparisons."""
        raise NotImplementedError

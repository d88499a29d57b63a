"""Load balancing of experts: the `sequence` auxiliary loss, and the expert load that a run shows.

The sequence-wise loss of DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20) is, for one sequence of
n counted tokens, N experts in the router's pool and top-k of K,

    f_i = N / (K n) * #{tokens that chose i}      P_i = 1/n * sum over tokens of score_i
    L   = sum over i of f_i * P_i

which is 1 when the load is even. The gradient of a step is that of
`coefficient * sum over layers and sequences of (n / global count) * L`; a token counts when its
target is not ignored. Only the scores carry a gradient.

The trap: the value must not depend on how sequences fall into micro-batches, so nothing here takes
a mean: `sequence_balance` returns `sum of n * L`, and the caller divides by the global count, as it
does for the token losses.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pith_engine.contract import IGNORED_TARGET, Batch, Routing
from pith_engine.mesh import Mesh
from pith_engine.runtime import all_reduce


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """How experts are kept evenly loaded."""

    method: Literal["none", "sequence"] = "sequence"
    """`sequence`: auxiliary loss over each sequence; `none`: no balancing."""
    coefficient: float = 1e-3
    """Weight of the auxiliary loss beside the token loss (at least 0); `none` does not read it."""

    def violations(self) -> list[str]:
        """What is out of range, a line each."""
        found = []
        if self.method not in ("none", "sequence"):
            found.append(f"balance.method is {self.method!r}: use 'none' or 'sequence'")
        if not 0 <= self.coefficient < float("inf"):
            found.append(f"balance.coefficient is {self.coefficient}: use a number >= 0")
        return found


def sequence_balance(routing: Routing, batch: Batch) -> Tensor:
    """Sum over a micro-batch's sequences of (counted tokens) * (sequence loss): a scalar in the
    dtype of `routing.scores`."""
    num_sequences, pool = batch.num_sequences, routing.scores.shape[1]
    counted = (batch.targets != IGNORED_TARGET).view(num_sequences, -1)
    num_counted = counted.sum(1)
    scores = routing.scores.view(num_sequences, -1, pool)
    score_sums = (scores * counted[:, :, None]).sum(1)
    choices = _choice_counts(routing.chosen, counted, pool)
    top_k = routing.chosen.shape[1]
    per_sequence = (choices * score_sums).sum(1) * pool / (top_k * num_counted.clamp(min=1))
    return per_sequence.sum()


def expert_counts(routing: Routing, batch: Batch) -> Tensor:
    """`[N]` int64: how often each member of the router's pool was chosen by a counted token."""
    counted = (batch.targets != IGNORED_TARGET)[None]
    return _choice_counts(routing.chosen, counted, routing.scores.shape[1])[0]


def max_load(counts: Tensor, mesh: Mesh) -> float:
    """Largest load of an expert over the mean of its layer, over the whole model and step.

    `counts` `[MoE layers here, N]` int64 are this rank's choices. Every rank of the mesh calls it:
    counts are summed over `data`, the maximum is taken over `pp`. 1.0 is even; 0.0 without MoE
    layers or counted tokens.
    """
    totals = counts.clone()
    all_reduce(totals, mesh.data)
    means = totals.double().mean(1).clamp(min=1e-300)
    loads = totals.max(1).values / means if len(totals) else means
    worst = torch.cat([loads, loads.new_zeros(1)]).max()
    all_reduce(worst, mesh.pp, op="max")
    return worst.item()


def _choice_counts(chosen: Tensor, counted: Tensor, pool: int) -> Tensor:
    """`[B, N]` int64 counts of the ids in `chosen` `[T, K]` (-1: none) where `counted` `[B, S]`."""
    num_sequences, length = counted.shape
    ids = chosen.view(num_sequences, length, -1)
    valid = counted[:, :, None] & (ids >= 0)
    flat_ids = ids.clamp(min=0).view(num_sequences, -1).long()
    counts = torch.zeros(num_sequences, pool, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add(1, flat_ids, valid.view(num_sequences, -1).long())

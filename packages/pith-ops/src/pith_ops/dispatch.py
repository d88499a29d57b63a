"""Index maths of expert dispatch: which rows go where, and the sums on the way back.

R ranks share E experts, `E_local = E / R` each, in order. T tokens of this rank choose K experts
each (`ids [T, K]` int32, -1: sent nowhere). The way of one micro-batch:

    sender    count_dispatch    rows and pairs for every rank, in a first, small all-to-all
              plan_dispatch     a token goes once to each rank with one of its experts (N rows),
                                its routing weights beside it
    receiver  plan_experts      M rows received -> P (row, expert) pairs sorted by expert
              weighted_partial_sums   outputs of the pairs [P, H] -> [M, H], one per row received
    sender    sum_rows          [N, H] returned -> [T, H]

The gradient, sent as the tokens were, meets `weighted_partial_sums_backward`, the experts,
`sum_rows` over pairs, and at home `sum_rows` for tokens and weights.

Sums run in the accumulation dtype in ascending order (experts, then ranks) and are rounded once.
The host never waits: the caller passes the sizes. The trap: "absent" is -1, a valid index; such
rows are masked, never multiplied by 0, since 0 times NaN is NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pith_ops.device import accumulation_dtype
from pith_ops.grouped_linear import Groups


@dataclass(frozen=True, eq=False, kw_only=True)
class DispatchPlan:
    """What this rank sends: N rows by rank, then token; int32."""

    send_tokens: Tensor
    """`[N]`."""
    send_ids: Tensor
    """`[N, K]`, local to the receiver, -1 for slots held elsewhere."""
    token_rows: Tensor
    """`[T, min(R, K)]`, rows of each token by ascending rank, then -1."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertPlan:
    """How M received rows spread into P pairs by expert, then row; int32."""

    pair_rows: Tensor
    """`[P]`."""
    pair_slots: Tensor
    """`[P]`, in 0..K-1."""
    row_pairs: Tensor
    """`[M, K]`, pairs of each row by ascending expert, then -1."""
    groups: Groups
    """Pairs of the local experts."""


def count_dispatch(ids: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """`[R, 1 + E_local]` int64: rows to each rank, pairs per expert there; R must divide E."""
    rows = _needed_ranks(ids, num_experts, num_ranks).sum(0)
    # Not bincount: on CUDA the host would wait for the largest id.
    pairs = ids.new_zeros(num_experts + 1, dtype=torch.int64)
    experts = torch.where(ids < 0, num_experts, ids).flatten().long()
    pairs.scatter_add_(0, experts, torch.ones_like(experts))
    return torch.cat([rows[:, None], pairs[:num_experts].view(num_ranks, -1)], 1)


def plan_dispatch(ids: Tensor, num_experts: int, num_ranks: int, num_rows: int) -> DispatchPlan:
    """The sender's side; `num_rows` is N, the sum of column 0 of the counts."""
    needed = _needed_ranks(ids, num_experts, num_ranks).t()
    num_tokens, local = max(len(ids), 1), num_experts // num_ranks
    # Rank-major count: row n is where it first reaches n + 1.
    reached = needed.flatten().cumsum(0, dtype=torch.int32)
    token_rows = torch.where(needed, reached.view_as(needed) - 1, num_rows).t()
    rows = torch.arange(1, num_rows + 1, dtype=torch.int32, device=ids.device)
    places = torch.searchsorted(reached, rows, out_int32=True)
    send_tokens, ranks = places % num_tokens, places // num_tokens
    send_ids = ids[send_tokens] - (ranks * local)[:, None]
    return DispatchPlan(
        send_tokens=send_tokens,
        send_ids=torch.where((send_ids >= 0) & (send_ids < local), send_ids, -1),
        token_rows=_ascending(token_rows, num_rows)[:, : ids.shape[1]],
    )


def plan_experts(received_ids: Tensor, sizes: Sequence[int]) -> ExpertPlan:
    """The receiver's side; ValueError if `sizes`, pairs of each local expert, exceed the ids."""
    num_slots = received_ids.shape[1]
    if sum(sizes) > received_ids.numel():
        raise ValueError(
            f"sizes: {list(sizes)} exceed {received_ids.numel()} slots; sum the counts received"
        )
    groups = Groups.from_sizes(sizes, received_ids.device)
    absent = received_ids < 0
    experts = received_ids.masked_fill(absent, len(sizes)).flatten()
    # Stable: rows ascend within an expert.
    order = experts.argsort(stable=True)
    positions = torch.empty_like(experts)
    positions[order] = torch.arange(len(order), dtype=experts.dtype, device=experts.device)
    pairs = order[: groups.total].to(torch.int32)
    row_pairs = positions.view_as(received_ids).masked_fill(absent, len(order))
    return ExpertPlan(
        pair_rows=pairs // num_slots,
        pair_slots=pairs % num_slots,
        row_pairs=_ascending(row_pairs, len(order)),
        groups=groups,
    )


def weighted_partial_sums(outputs: Tensor, received_weights: Tensor, plan: ExpertPlan) -> Tensor:
    """`sum over experts here of w_e y_e`; weights `[M, K]`, fp32 or wider."""
    weights = received_weights[plan.pair_rows, plan.pair_slots]
    return sum_rows(outputs, plan.row_pairs, weights)


def weighted_partial_sums_backward(
    grad: Tensor, outputs: Tensor, received_weights: Tensor, plan: ExpertPlan
) -> tuple[Tensor, Tensor]:
    """`grad [M, H]` -> `w_e dy` `[P, H]`, `dy . y_e` `[M, K]`, 0 where held elsewhere."""
    slots = plan.pair_rows, plan.pair_slots
    pair_grads = grad[plan.pair_rows].to(accumulation_dtype(outputs.dtype))
    grad_weights = torch.zeros_like(received_weights, dtype=pair_grads.dtype)
    grad_weights[slots] = (pair_grads * outputs).sum(1)
    pair_grads *= received_weights[slots][:, None]
    return pair_grads.to(outputs.dtype), grad_weights


def sum_rows(source: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
    """`[A, H]`: the sum over j of `weights[p] source[p]` where `p = positions[i, j]` is not -1.

    Positions are a plan's `token_rows` or `row_pairs`.
    """
    dtype = accumulation_dtype(source.dtype)
    total = source.new_zeros(len(positions), source.shape[1], dtype=dtype)
    for column in positions.unbind(1) if len(source) else ():
        index, absent = column.clamp(min=0), (column < 0)[:, None]
        rows = source.index_select(0, index).to(dtype)
        if weights is not None:
            rows *= weights.index_select(0, index)[:, None]
        total += rows.masked_fill_(absent, 0)
    return total.to(source.dtype)


def _needed_ranks(ids: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """`[T, R]` bool."""
    if num_ranks < 1 or num_experts % num_ranks:
        raise ValueError(f"num_ranks: {num_ranks}; use a divisor of the {num_experts} experts")
    ranks = torch.where(ids < 0, num_ranks, ids // (num_experts // num_ranks))
    needed = ids.new_zeros(len(ids), num_ranks + 1, dtype=torch.bool)
    return needed.scatter_(1, ranks.long(), True)[:, :num_ranks]


def _ascending(positions: Tensor, end: int) -> Tensor:
    """Rows of `[A, B]` sorted, -1 in place of `end` and more."""
    positions = positions.sort(1).values
    return positions.masked_fill(positions >= end, -1)

"""Index maths of expert dispatch: which rows go where, and the sums on the way back.

Words: R ranks share E experts, `E_local = E / R` each, in order. T tokens of this rank choose K
experts each (`ids [T, K]`, -1 is "sent nowhere"). The way of one micro-batch:

    sender    count_dispatch    rows and pairs for every rank: a first, small all-to-all
              plan_dispatch     a token goes once to every rank holding one of its experts (N rows)
              send_weights      the routing weights travel beside it
    receiver  plan_experts      M rows received -> P (row, expert) pairs sorted by expert
              gather_rows       [M, H] -> [P, H], then the experts run on [P, H]
              weighted_partial_sums   [P, H] -> [M, H], one partial sum per row received
    sender    sum_ranks         [N, H] returned -> [T, H]

The gradient, sent as the tokens were, meets `weighted_partial_sums_backward`, the experts' dgrad,
`sum_pairs`, and `sum_ranks` with `sum_rank_weights` at home. Sending a token once per rank, not per
expert, needs 5.3 rows per token instead of 8 for top-8 of 128 experts on 8 ranks.

Every sum runs in the accumulation dtype in a fixed order (experts, then ranks ascending) and is
rounded once: two runs agree bit for bit. The host never waits: the caller passes the sizes that
depend on the data, known from the all-to-all of the counts.

The trap: "absent" is -1, a valid Python index. Absent rows are masked, never multiplied by 0, since
0 times an uninitialised NaN is NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pith_ops.device import accumulation_dtype
from pith_ops.grouped_linear import Groups


@dataclass(frozen=True, eq=False, kw_only=True)
class DispatchPlan:
    """What this rank sends: N rows by destination rank, then by token."""

    send_tokens: Tensor
    """`[N]` int32, token of each row."""
    send_ids: Tensor
    """`[N, K]` int32, expert ids local to the destination, -1 for slots held elsewhere."""
    token_rows: Tensor
    """`[T, R]` int32, row of token t for rank r, -1 if it is not sent there."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertPlan:
    """How M received rows spread into P pairs sorted by expert, then by row."""

    pair_rows: Tensor
    """`[P]` int32, received row of each pair."""
    pair_slots: Tensor
    """`[P]` int32, the k in 0..K-1 of each pair."""
    row_pairs: Tensor
    """`[M, K]` int32, the pairs of each row in ascending expert order, then -1."""
    groups: Groups
    """Pairs of each local expert; P rows together."""


def count_dispatch(ids: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """`ids [T, K]` -> `[R, 1 + E_local]` int64: rows to each rank, then pairs per expert there.

    A ValueError unless R divides E.
    """
    rows = _needed_ranks(ids, num_experts, num_ranks).sum(0)
    # Not bincount: on CUDA it makes the host wait for the largest id.
    pairs = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    experts = torch.where(ids < 0, num_experts, ids).flatten().long()
    pairs.scatter_add_(0, experts, torch.ones_like(experts))
    return torch.cat([rows[:, None], pairs[:num_experts].view(num_ranks, -1)], 1)


def plan_dispatch(ids: Tensor, num_experts: int, num_ranks: int, num_rows: int) -> DispatchPlan:
    """The sender's side of `ids [T, K]` int32; `num_rows` sums column 0 of the counts."""
    needed = _needed_ranks(ids, num_experts, num_ranks).t()
    num_tokens, local = ids.shape[0], num_experts // num_ranks
    # Rank-major running count: row n is where it first reaches n + 1.
    reached = needed.flatten().cumsum(0, dtype=torch.int32)
    token_rows = torch.where(needed, reached.view_as(needed) - 1, -1).t()
    rows = torch.arange(1, num_rows + 1, dtype=torch.int32, device=ids.device)
    places = torch.searchsorted(reached, rows, out_int32=True)
    send_tokens, ranks = places % max(num_tokens, 1), places // max(num_tokens, 1)
    send_ids = ids[send_tokens] - (ranks * local)[:, None]
    return DispatchPlan(
        send_tokens=send_tokens,
        send_ids=torch.where((send_ids >= 0) & (send_ids < local), send_ids, -1),
        token_rows=token_rows.contiguous(),
    )


def send_weights(plan: DispatchPlan, weights: Tensor) -> Tensor:
    """Routing weights `[T, K]` -> weights of the rows sent `[N, K]`, 0 where the id is -1."""
    return weights[plan.send_tokens].masked_fill(plan.send_ids < 0, 0)


def plan_experts(received_ids: Tensor, num_local_experts: int, sizes: Sequence[int]) -> ExpertPlan:
    """The receiver's side of `received_ids [M, K]` int32, local, -1 for slots held elsewhere.

    `sizes` are the received pair counts of each local expert summed over senders, on the host; a
    ValueError if they cannot be.
    """
    num_slots = received_ids.shape[1]
    if len(sizes) != num_local_experts or sum(sizes) > received_ids.numel():
        raise ValueError(
            f"sizes: {list(sizes)} does not fit {num_local_experts} local experts and "
            f"{received_ids.numel()} slots; pass the received pair counts summed over senders"
        )
    groups = Groups.from_sizes(sizes, received_ids.device)
    absent = received_ids < 0
    experts = torch.where(absent, num_local_experts, received_ids).flatten()
    # Slots are numbered row by row: a stable sort leaves rows ascending within an expert.
    order = experts.argsort(stable=True)
    positions = torch.empty_like(experts)
    positions[order] = torch.arange(len(order), dtype=experts.dtype, device=experts.device)
    pairs = order[: groups.total].to(torch.int32)
    row_pairs = positions.view_as(received_ids).masked_fill(absent, -1)
    return ExpertPlan(
        pair_rows=pairs // num_slots,
        pair_slots=pairs % num_slots,
        row_pairs=_present_first(row_pairs),
        groups=groups,
    )


def gather_rows(rows: Tensor, plan: ExpertPlan) -> Tensor:
    """Rows `[M, H]` -> rows in expert order `[P, H]`; its backward is `sum_pairs`."""
    return rows[plan.pair_rows]


def sum_pairs(grad_pairs: Tensor, plan: ExpertPlan) -> Tensor:
    """Backward of `gather_rows`: `[P, H]` -> `[M, H]`."""
    return _sum_rows(grad_pairs, plan.row_pairs).to(grad_pairs.dtype)


def weighted_partial_sums(outputs: Tensor, received_weights: Tensor, plan: ExpertPlan) -> Tensor:
    """This rank's share of every row, `sum over its experts of w_e y_e`: `[P, H]` -> `[M, H]`.

    `received_weights [M, K]` are in the accumulation dtype.
    """
    weights = received_weights[plan.pair_rows, plan.pair_slots]
    return _sum_rows(outputs, plan.row_pairs, weights).to(outputs.dtype)


def weighted_partial_sums_backward(
    grad: Tensor, outputs: Tensor, received_weights: Tensor, plan: ExpertPlan
) -> tuple[Tensor, Tensor]:
    """`grad [M, H]` -> `w_e dy` `[P, H]` in the dtype of `outputs`, and `dy . y_e` `[M, K]`.

    The latter is in the accumulation dtype, 0 in slots held elsewhere.
    """
    dtype = accumulation_dtype(outputs.dtype)
    pair_grads = grad[plan.pair_rows].to(dtype)
    grad_weights = torch.zeros(received_weights.shape, dtype=dtype, device=grad.device)
    grad_weights[plan.pair_rows, plan.pair_slots] = (pair_grads * outputs).sum(1)
    pair_grads *= received_weights[plan.pair_rows, plan.pair_slots][:, None]
    return pair_grads.to(outputs.dtype), grad_weights


def sum_ranks(returned: Tensor, plan: DispatchPlan) -> Tensor:
    """Rows as they were sent `[N, H]` -> `[T, H]`, zero for tokens sent nowhere.

    Adds partial sums, and in the backward of sending the gradients of a token's rows.
    """
    # Rows of a token ascend with the rank; it has at most K of them however large R is.
    rows = _present_first(plan.token_rows)[:, : plan.send_ids.shape[1]]
    return _sum_rows(returned, rows).to(returned.dtype)


def sum_rank_weights(grad_weights_rows: Tensor, plan: DispatchPlan) -> Tensor:
    """Backward of `send_weights`: `[N, K]` -> `[T, K]`, 0 for id -1."""
    return sum_ranks(grad_weights_rows.masked_fill(plan.send_ids < 0, 0), plan)


def _needed_ranks(ids: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """`[T, K]` -> `[T, R]` bool: whether rank r holds one of token t's experts."""
    if num_ranks < 1 or num_experts % num_ranks:
        divisors = [r for r in range(1, num_experts + 1) if num_experts % r == 0]
        raise ValueError(
            f"num_ranks: {num_ranks} does not divide {num_experts} experts; use one of {divisors}"
        )
    ranks = torch.where(ids < 0, num_ranks, ids // (num_experts // num_ranks))
    needed = torch.zeros(ids.shape[0], num_ranks + 1, dtype=torch.bool, device=ids.device)
    return needed.scatter_(1, ranks.long(), True)[:, :num_ranks]


def _present_first(positions: Tensor) -> Tensor:
    """Each row of `[A, B]` int32 ascending, the -1 entries behind."""
    last = torch.iinfo(positions.dtype).max
    ascending = positions.masked_fill(positions < 0, last).sort(1).values
    return ascending.masked_fill(ascending == last, -1)


def _sum_rows(source: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
    """`sum over j of weights[p] source[p], p = positions[i, j]`, j ascending, absent p skipped.

    `source [S, H]`, `positions [A, B]`, `weights [S]` -> `[A, H]` in the accumulation dtype.
    """
    dtype = accumulation_dtype(source.dtype)
    total = torch.zeros(positions.shape[0], source.shape[1], dtype=dtype, device=source.device)
    if source.shape[0] == 0:
        return total
    for column in positions.unbind(1):
        index, absent = column.clamp(min=0), (column < 0)[:, None]
        rows = source.index_select(0, index).to(dtype)
        if weights is not None:
            rows *= weights.index_select(0, index)[:, None]
        total += rows.masked_fill_(absent, 0)
    return total

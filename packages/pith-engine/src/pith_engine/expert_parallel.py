"""Expert parallelism: how tokens reach the ranks of their experts and come back.

A token travels once to each rank with any of its experts, beside their ids and weights; that rank
returns one weighted sum of their outputs (DeepSeek-V3, arXiv 2412.19437, section 3.2.2, without the
node limit). With the index maths of `pith_ops.dispatch`:

    forward    pack_tokens -> exchange_rows -> experts -> weighted_partial_sums
               -> exchange_rows -> sum_rows
    backward   pack_tokens -> exchange_rows -> weighted_partial_sums_backward -> experts' dgrad
               -> sum_rows -> exchange_rows -> sum_rows

None of this is an autograd function: `stages.py` chooses the order and the streams.

T tokens here, H hidden size, K top-k, R ranks of the axis, N rows sent by this rank, M received.
"""

from dataclasses import dataclass

import torch
from pith_ops.dispatch import DispatchPlan, ExpertPlan, count_dispatch, plan_dispatch, plan_experts
from torch import Tensor

from pith_engine.contract import Routing
from pith_engine.mesh import Axis
from pith_engine.runtime import all_to_all


@dataclass(frozen=True, kw_only=True)
class Route:
    """Where a layer's tokens go."""

    plan: DispatchPlan
    """The sender's index maths."""
    sent: list[int]
    """Rows to each rank, `[R]`."""
    received: list[int]
    """Rows from each rank, `[R]`."""
    expert_sizes: list[int]
    """(Row, expert) pairs received for each local expert."""


Arrival = tuple[Tensor, ExpertPlan]
"""Weights of received rows `[M, K]` and their order by expert."""


def route_tokens(routing: Routing, num_local_experts: int, axis: Axis) -> Route:
    """Plan a layer's dispatch and exchange the counts: its one host sync."""
    num_experts = num_local_experts * axis.size
    counts = count_dispatch(routing.expert_ids, num_experts, axis.size)
    received_counts = torch.empty_like(counts)
    ones = [1] * axis.size
    all_to_all(received_counts, counts, ones, ones, axis)
    sent, received = torch.stack([counts, received_counts]).mT.tolist()
    return Route(
        plan=plan_dispatch(routing.expert_ids, num_experts, axis.size, sum(sent[0])),
        sent=sent[0],
        received=received[0],
        expert_sizes=[sum(sizes) for sizes in received[1:]],
    )


def pack_tokens(tokens: Tensor, route: Route) -> Tensor:
    """Tokens, or gradients of combined ones, `[T, H]` -> rows in send order `[N, H]`."""
    return tokens.detach()[route.plan.send_tokens]


def pack_metadata(routing: Routing, route: Route) -> Tensor:
    """`[N, 2 * K]` in the weights' dtype: ids local to the destination, then routing weights."""
    weights = routing.weights.detach()[route.plan.send_tokens]
    return torch.cat([route.plan.send_ids.to(weights.dtype), weights], dim=1)


def open_metadata(metadata: Tensor, route: Route) -> Arrival:
    """Plan the expert order of received metadata `[M, 2 * K]`; ids are exact below 2**24.

    Copied: what was received may be dropped once the experts are launched.
    """
    ids, weights = metadata.chunk(2, dim=1)
    return weights.clone(), plan_experts(ids.to(torch.int32), route.expert_sizes)


def exchange_rows(rows: Tensor, route: Route, axis: Axis, *, back: bool) -> Tensor:
    """Rows in send order -> as received, or `back`."""
    if axis.size == 1:
        return rows
    sent, received = (route.received, route.sent) if back else (route.sent, route.received)
    output = rows.new_empty(sum(received), *rows.shape[1:])
    all_to_all(output, rows, received, sent, axis)
    return output

"""Expert parallelism: how tokens reach the ranks of their experts and come back.

A layer's experts are spread over the ep axis. A token travels once to each rank that holds at least
one of its experts, together with its expert ids and routing weights; that rank multiplies the
experts' outputs by the weights and returns one partial sum. Forward and backward therefore move
the same number of rows, `send_rows` out and back (techniques: DeepSeek-V3, arXiv 2412.19437,
section 3.2.2, without the node limit).

    forward    pack_tokens -> exchange_rows -> sort_rows -> experts -> weigh_outputs
               -> return_rows -> merge_returned
    backward   pack_tokens   -> exchange_rows -> weigh_outputs_backward -> experts' dgrad
               -> unsort_gradient -> return_rows -> merge_gradients

The functions named *_rows hold the all-to-alls and nothing else, so that they can run on a
communication stream; everything else is computation. None is an autograd function: split sizes
live in a `Route`, and the stages (stages.py) call forward and backward in the order they want.

The index maths is in `pith_ops.dispatch`. Words: T tokens here, H hidden size, K top-k, R ranks of
the axis, N rows sent by this rank, M rows received, P (row, expert) pairs received.
"""

from dataclasses import dataclass

import torch
from pith_ops.dispatch import (
    DispatchPlan,
    ExpertPlan,
    count_dispatch,
    gather_rows,
    plan_dispatch,
    plan_experts,
    send_weights,
    sum_pairs,
    sum_rank_weights,
    sum_ranks,
    weighted_partial_sums,
    weighted_partial_sums_backward,
)
from torch import Tensor

from pith_engine.contract import Routing
from pith_engine.mesh import Axis
from pith_engine.runtime import all_to_all


@dataclass(frozen=True, kw_only=True)
class Route:
    """Where the tokens of one layer and micro-batch go: kept from the forward for the backward."""

    plan: DispatchPlan
    """The sender's index maths."""
    metadata: Tensor
    """`[N, 2 * K]`: ids local to the destination, then weights, in the weights' dtype."""
    sent: list[int]
    """Rows sent to each rank, `[R]`."""
    received: list[int]
    """Rows received from each rank, `[R]`."""
    expert_sizes: list[int]
    """Pairs received for each local expert."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """The receiver's side of a `Route`: how received rows map to expert order."""

    weights: Tensor
    """`[M, K]` routing weights of the received rows, 0 where the slot is not ours."""
    plan: ExpertPlan
    """The receiver's index maths."""


def route_tokens(routing: Routing, num_local_experts: int, axis: Axis) -> Route:
    """Plan the dispatch of one layer and exchange the counts: the one host sync of a layer."""
    num_experts = num_local_experts * axis.size
    counts = count_dispatch(routing.expert_ids, num_experts, axis.size)
    received_counts = torch.empty_like(counts)
    ones = [1] * axis.size
    all_to_all(received_counts, counts, ones, ones, axis)
    sent, received = torch.stack([counts, received_counts]).tolist()
    num_rows = sum(row[0] for row in sent)
    plan = plan_dispatch(routing.expert_ids, num_experts, axis.size, num_rows)
    weights = send_weights(plan, routing.weights.detach())
    return Route(
        plan=plan,
        metadata=torch.cat([plan.send_ids.to(weights.dtype), weights], dim=1),
        sent=[row[0] for row in sent],
        received=[row[0] for row in received],
        expert_sizes=[sum(column) for column in zip(*(row[1:] for row in received), strict=True)],
    )


def pack_tokens(tokens: Tensor, route: Route) -> Tensor:
    """Tokens (or gradients of combined tokens) `[T, H]` -> rows in send order `[N, H]`."""
    return tokens.detach()[route.plan.send_tokens]


def exchange_rows(rows: Tensor, route: Route, axis: Axis) -> Tensor:
    """All-to-all towards the experts: rows `[N, ...]` in send order -> received rows `[M, ...]`."""
    if axis.size == 1:
        return rows
    received = rows.new_empty(sum(route.received), *rows.shape[1:])
    all_to_all(received, rows, route.received, route.sent, axis)
    return received


def return_rows(rows: Tensor, route: Route, axis: Axis) -> Tensor:
    """All-to-all back to the tokens: received rows `[M, ...]` -> rows in send order `[N, ...]`."""
    if axis.size == 1:
        return rows
    returned = rows.new_empty(sum(route.sent), *rows.shape[1:])
    all_to_all(returned, rows, route.sent, route.received, axis)
    return returned


def open_metadata(metadata: Tensor, route: Route) -> Arrival:
    """Split received metadata `[M, 2 * K]` into ids and weights and plan the expert order.

    Ids travel in the weights' dtype, which holds every id below 2**24 exactly. Both are copied:
    what communication received may be dropped as soon as the experts are launched.
    """
    ids, weights = metadata.chunk(2, dim=1)
    plan = plan_experts(ids.to(torch.int32), len(route.expert_sizes), route.expert_sizes)
    return Arrival(weights=weights.clone(), plan=plan)


def sort_rows(received: Tensor, arrival: Arrival) -> Tensor:
    """Received rows `[M, H]` -> rows in expert order `[P, H]`."""
    return gather_rows(received, arrival.plan)


def weigh_outputs(outputs: Tensor, arrival: Arrival) -> Tensor:
    """Expert outputs `[P, H]` -> one weighted partial sum per received row `[M, H]`."""
    return weighted_partial_sums(outputs.detach(), arrival.weights, arrival.plan)


def merge_returned(returned: Tensor, route: Route) -> Tensor:
    """Partial sums in send order `[N, H]` -> combined tokens `[T, H]`, ranks ascending."""
    return sum_ranks(returned, route.plan)


def weigh_outputs_backward(
    gradient: Tensor, outputs: Tensor, arrival: Arrival
) -> tuple[Tensor, Tensor]:
    """Backward of `weigh_outputs`.

    Args:
        gradient: `[M, H]` gradient of the partial sums.
        outputs: `[P, H]` the unweighted expert outputs of the forward.
        arrival: the receiver's side of the route.

    Returns:
        Gradient of the outputs `[P, H]`, and of the weights `[M, K]` (their dot product with the
        unweighted outputs).
    """
    return weighted_partial_sums_backward(gradient, outputs.detach(), arrival.weights, arrival.plan)


def unsort_gradient(gradient: Tensor, arrival: Arrival) -> Tensor:
    """Backward of `sort_rows`: gradient in expert order `[P, H]` -> per received row `[M, H]`."""
    return sum_pairs(gradient, arrival.plan)


def merge_gradients(rows: Tensor, weights: Tensor, route: Route) -> tuple[Tensor, Tensor]:
    """Returned gradients of rows `[N, H]` and weights `[N, K]` -> of tokens `[T, H]`, `[T, K]`."""
    return sum_ranks(rows, route.plan), sum_rank_weights(weights, route.plan)

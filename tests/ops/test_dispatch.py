"""Dispatch over R ranks simulated in one process: rows are exchanged by slicing lists."""

from bisect import bisect_right

import pytest
import torch
from pith_ops.dispatch import (
    DispatchPlan,
    count_dispatch,
    plan_dispatch,
    plan_experts,
    sum_rows,
    weighted_partial_sums,
    weighted_partial_sums_backward,
)
from torch import Tensor

E, K, H = 8, 3, 5


def random_ids(num_tokens: int, num_experts: int = E, top_k: int = K, drop: float = 0.2) -> Tensor:
    ids = torch.rand(num_tokens, num_experts).argsort(1)[:, :top_k].to(torch.int32)
    return ids.masked_fill(torch.rand(num_tokens, top_k) < drop, -1)


def make_plan(ids: Tensor, num_experts: int, num_ranks: int) -> DispatchPlan:
    num_rows = int(count_dispatch(ids, num_experts, num_ranks)[:, 0].sum())
    return plan_dispatch(ids, num_experts, num_ranks, num_rows)


def exchange(rows: list[Tensor], counts: Tensor) -> list[Tensor]:
    """All-to-all: `rows[s]` holds `counts[s, r]` rows for rank r; sender order on arrival."""
    parts = [row.split(counts[s].tolist()) for s, row in enumerate(rows)]
    return [torch.cat([part[r] for part in parts]) for r in range(len(rows))]


class Simulation:
    """R ranks, each with its tokens, through dispatch and back with expert function `experts`."""

    def __init__(self, ids: list[Tensor], num_experts: int = E):
        num_ranks = len(ids)
        self.plans = [make_plan(i, num_experts, num_ranks) for i in ids]
        counts = torch.stack([count_dispatch(i, num_experts, num_ranks) for i in ids])
        self.rows, pairs = counts[:, :, 0], counts[:, :, 1:].sum(0)
        received = exchange([p.send_ids for p in self.plans], self.rows)
        self.experts = [plan_experts(i, p.tolist()) for i, p in zip(received, pairs, strict=True)]

    def send(self, tokens: list[Tensor]) -> list[Tensor]:
        rows = [t[p.send_tokens] for t, p in zip(tokens, self.plans, strict=True)]
        return exchange(rows, self.rows)

    def give_back(self, rows: list[Tensor]) -> list[Tensor]:
        return exchange(rows, self.rows.t())

    def forward(self, tokens: list[Tensor], weights: list[Tensor], function) -> list[Tensor]:
        received = self.send(tokens)
        sent = [w[p.send_tokens] for p, w in zip(self.plans, weights, strict=True)]
        self.weights = exchange(sent, self.rows)
        self.outputs, partial = [], []
        for rank, plan in enumerate(self.experts):
            pairs = received[rank][plan.pair_rows]
            self.outputs.append(function(rank, pairs, plan))
            partial.append(weighted_partial_sums(self.outputs[-1], self.weights[rank], plan))
        returned = self.give_back(partial)
        return [sum_rows(r, p.token_rows) for r, p in zip(returned, self.plans, strict=True)]

    def backward(self, grads: list[Tensor], dgrad) -> tuple[list[Tensor], list[Tensor]]:
        received = self.send(grads)
        row_grads, weight_grads = [], []
        for rank, plan in enumerate(self.experts):
            grad_outputs, grad_weights = weighted_partial_sums_backward(
                received[rank], self.outputs[rank], self.weights[rank], plan
            )
            row_grads.append(sum_rows(dgrad(rank, grad_outputs, plan), plan.row_pairs))
            weight_grads.append(grad_weights)
        rows, weights = self.give_back(row_grads), self.give_back(weight_grads)
        return (
            [sum_rows(r, p.token_rows) for r, p in zip(rows, self.plans, strict=True)],
            [sum_rows(w, p.token_rows) for w, p in zip(weights, self.plans, strict=True)],
        )


def scale_by_expert(rank: int, pairs: Tensor, plan) -> Tensor:
    """Expert e multiplies by e + 1; linear and symmetric, so it is its own dgrad."""
    local = len(plan.groups.sizes)
    factors = torch.arange(local) + rank * local + 1
    return pairs * factors.repeat_interleave(torch.tensor(plan.groups.sizes))[:, None]


def dense_sum(tokens: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """`sum_k w (e + 1) x` over the slots that have an expert, written without any dispatch."""
    factors = torch.where(ids >= 0, (ids + 1) * weights, 0)
    return factors.sum(1, keepdim=True) * tokens


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_every_pair_reaches_its_expert_and_comes_back(num_ranks):
    torch.manual_seed(num_ranks)
    ids = [random_ids(7 + 2 * r) for r in range(num_ranks)]
    tokens = [torch.randn(len(i), H, dtype=torch.float64, requires_grad=True) for i in ids]
    weights = [torch.rand(len(i), K, dtype=torch.float64, requires_grad=True) for i in ids]
    expected = [dense_sum(t, w, i) for t, w, i in zip(tokens, weights, ids, strict=True)]
    upstream = [torch.randn_like(e) for e in expected]
    torch.autograd.backward(expected, upstream)

    simulation = Simulation(ids)
    with torch.no_grad():
        result = simulation.forward(tokens, weights, scale_by_expert)
        grad_tokens, grad_weights = simulation.backward(upstream, scale_by_expert)
    pairs = sum(int((i >= 0).sum()) for i in ids)
    assert sum(e.groups.total for e in simulation.experts) == pairs
    for actual, wanted in [
        *zip(result, expected, strict=True),
        *zip(grad_tokens, [t.grad for t in tokens], strict=True),
        *zip(grad_weights, [w.grad for w in weights], strict=True),
    ]:
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-13)


def test_plan_on_a_hand_written_case():
    # 3 tokens, 4 experts on 2 ranks: token 0 -> {3, 0}, token 1 -> nowhere, token 2 -> {1, 0}.
    ids = torch.tensor([[3, 0], [-1, -1], [1, 0]], dtype=torch.int32)
    assert count_dispatch(ids, 4, 2).tolist() == [[2, 2, 1], [1, 0, 1]]
    plan = plan_dispatch(ids, 4, 2, num_rows=3)
    assert plan.send_tokens.tolist() == [0, 2, 0]
    assert plan.send_ids.tolist() == [[-1, 0], [1, 0], [1, -1]]
    assert plan.token_rows.tolist() == [[0, 2], [-1, -1], [1, -1]]

    first = plan_experts(plan.send_ids[:2], [2, 1])
    assert first.pair_rows.tolist() == [0, 1, 1]
    assert first.pair_slots.tolist() == [1, 1, 0]
    assert first.row_pairs.tolist() == [[0, -1], [1, 2]]
    assert first.groups.sizes == (2, 1)
    assert first.groups.offsets.tolist() == [2, 3]
    assert first.pair_rows.dtype == first.row_pairs.dtype == plan.send_ids.dtype == torch.int32


def test_a_token_goes_once_to_each_rank():
    torch.manual_seed(0)
    ids = random_ids(200, num_experts=16, top_k=6, drop=0)
    plan = make_plan(ids, 16, 4)
    ranks = [sorted({e // 4 for e in row}) for row in ids.tolist()]
    starts = count_dispatch(ids, 16, 4)[:, 0].cumsum(0).tolist()
    rows = [[row for row in token if row >= 0] for token in plan.token_rows.tolist()]
    assert [[bisect_right(starts, row) for row in token] for token in rows] == ranks
    for rank, (start, end) in enumerate(zip([0, *starts], starts, strict=False)):
        tokens = plan.send_tokens[start:end].tolist()
        assert tokens == [t for t in range(200) if rank in ranks[t]]


def test_a_rank_that_receives_nothing():
    torch.manual_seed(1)
    ids = [random_ids(5, num_experts=4), random_ids(6, num_experts=4)]
    simulation = Simulation(ids)  # experts 4..7 live on rank 1
    assert simulation.experts[1].groups.sizes == (0, 0, 0, 0)
    tokens, weights = [torch.randn(5, H), torch.randn(6, H)], [torch.rand(5, K), torch.rand(6, K)]
    result = simulation.forward(tokens, weights, scale_by_expert)
    for actual, *case in zip(result, tokens, weights, ids, strict=True):
        torch.testing.assert_close(actual, dense_sum(*case))
    grad_tokens, grad_weights = simulation.backward(tokens, scale_by_expert)
    assert all(g.isfinite().all() for g in [*grad_tokens, *grad_weights])


@pytest.mark.parametrize("num_tokens", [0, 4])
def test_a_rank_that_sends_nothing(num_tokens):
    torch.manual_seed(2)
    ids = [torch.full((num_tokens, K), -1, dtype=torch.int32), random_ids(6)]
    tokens = [torch.randn(num_tokens, H), torch.randn(6, H)]
    weights = [torch.rand(num_tokens, K), torch.rand(6, K)]
    simulation = Simulation(ids)
    assert len(simulation.plans[0].send_tokens) == 0
    result = simulation.forward(tokens, weights, scale_by_expert)
    assert torch.equal(result[0], torch.zeros(num_tokens, H))
    torch.testing.assert_close(result[1], dense_sum(tokens[1], weights[1], ids[1]))
    grad_tokens, grad_weights = simulation.backward(tokens, scale_by_expert)
    assert torch.equal(grad_tokens[0], torch.zeros(num_tokens, H))
    assert torch.equal(grad_weights[0], torch.zeros(num_tokens, K))


def test_nothing_at_all():
    ids = [torch.full((n, K), -1, dtype=torch.int32) for n in (0, 3)]
    simulation = Simulation(ids)
    tokens, weights = [torch.randn(n, H) for n in (0, 3)], [torch.rand(n, K) for n in (0, 3)]
    result = simulation.forward(tokens, weights, scale_by_expert)
    assert [r.tolist() for r in result] == [[], torch.zeros(3, H).tolist()]
    grad_tokens, _ = simulation.backward(tokens, scale_by_expert)
    assert [g.shape for g in grad_tokens] == [(0, H), (3, H)]


def test_nan_in_rows_that_belong_to_nothing_stays_out():
    """Unselected slots carry NaN weights, tokens sent nowhere are NaN, outputs have a NaN tail."""
    torch.manual_seed(3)
    ids = [random_ids(9, drop=0.5), random_ids(4, drop=0.5)]
    for i in ids:
        i[1] = -1
    clean_tokens, clean_weights = [torch.randn(len(i), H) for i in ids], [torch.rand(9, K)]
    clean_weights.append(torch.rand(4, K))
    dirty_tokens = [
        t.masked_fill((i < 0).all(1, keepdim=True), torch.nan)
        for t, i in zip(clean_tokens, ids, strict=True)
    ]
    dirty_weights = [
        w.masked_fill(i < 0, torch.nan) for w, i in zip(clean_weights, ids, strict=True)
    ]
    upstream = [torch.randn(len(i), H) for i in ids]

    def with_nan_tail(rank, pairs, plan):
        return torch.cat([scale_by_expert(rank, pairs, plan), torch.full((3, H), torch.nan)])

    def cut_tail(rank, pairs, plan):
        return scale_by_expert(rank, pairs[: plan.groups.total], plan)

    runs = []
    for tokens, weights, function in [
        (clean_tokens, clean_weights, scale_by_expert),
        (dirty_tokens, dirty_weights, with_nan_tail),
    ]:
        simulation = Simulation(ids)
        result = simulation.forward(tokens, weights, function)
        simulation.outputs = [
            o[: p.groups.total] for o, p in zip(simulation.outputs, simulation.experts, strict=True)
        ]
        runs.append(
            [*result, *(g for part in simulation.backward(upstream, cut_tail) for g in part)]
        )
    for clean, dirty in zip(*runs, strict=True):
        assert torch.equal(clean, dirty)
        assert dirty.isfinite().all()


def test_an_absent_pair_is_skipped_not_multiplied_by_zero():
    """Row 0 of the source is what a masked index points at; its NaN belongs to one row alone."""
    plan = plan_experts(torch.tensor([[0, -1], [-1, 1]], dtype=torch.int32), [1, 1])
    values = torch.tensor([[torch.nan], [2.0]])
    for sums in [
        weighted_partial_sums(values, torch.ones(2, 2), plan),
        sum_rows(values, plan.row_pairs),
    ]:
        assert sums[0].isnan()
        assert sums[1] == 2
    plan = make_plan(torch.tensor([[0, -1], [-1, -1], [1, -1]], dtype=torch.int32), 2, 2)
    sums = sum_rows(values, plan.token_rows).flatten()
    assert sums[0].isnan()
    assert sums[1:].tolist() == [0, 2]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_bf16_sums_round_once_per_rank_and_repeat_bit_for_bit(num_ranks):
    torch.manual_seed(4)
    top_k, width = 6, 64
    ids = [random_ids(50, top_k=top_k, drop=0) for _ in range(num_ranks)]
    tokens = [torch.randn(50, width).bfloat16() for _ in ids]
    weights = [torch.rand(50, top_k).softmax(1) for _ in ids]
    # All experts are the same function and the weights sum to one: the layer is the dense function.
    same = lambda rank, pairs, plan: pairs * 3  # noqa: E731
    first = Simulation(ids).forward(tokens, weights, same)
    again = Simulation(ids).forward(tokens, weights, same)
    for actual, repeat, token in zip(first, again, tokens, strict=True):
        assert actual.dtype == torch.bfloat16
        assert torch.equal(actual, repeat)
        dense = (token * 3).double()
        error = (actual.double() - dense).norm() / dense.norm()
        assert error < 3e-3
    if num_ranks == 1:  # one rounding only: equal to the float64 sum rounded to bf16
        assert torch.equal(first[0], (tokens[0] * 3))


def test_sums_are_taken_in_fp32():
    """256 + 1 + 1 is 256 when every addition rounds to bf16, and 258 when only the sum does."""
    ids = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    plan = plan_experts(ids, [1, 1, 1])
    values = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()
    assert weighted_partial_sums(values, torch.ones(1, 3), plan).item() == 258
    assert sum_rows(values, plan.row_pairs).item() == 258
    assert sum_rows(values, plan_dispatch(ids, 3, 3, 3).token_rows).item() == 258


def test_fp32_weights_are_not_rounded_to_bf16():
    plan = plan_experts(torch.zeros(1, 1, dtype=torch.int32), [1])
    value, weight = torch.tensor([[3.0]]).bfloat16(), torch.tensor([[1 / 3]])
    assert weighted_partial_sums(value, weight, plan).item() == 1.0
    _, grad_weight = weighted_partial_sums_backward(value, value * 7, weight, plan)
    assert grad_weight.dtype == torch.float32
    assert grad_weight.item() == 63.0


def test_the_order_of_the_sum_is_by_expert_not_by_slot():
    """(1e8 + -1e8) + 1 = 1 in fp32, any other order gives 0."""
    ids = torch.tensor([[2, 0, 1], [1, 2, 0]], dtype=torch.int32)
    plan = plan_experts(ids, [2, 2, 2])
    outputs = torch.tensor([1e8, 1e8, -1e8, -1e8, 1, 1])[:, None]
    sums = weighted_partial_sums(outputs, torch.ones(2, 3), plan)
    assert sums.flatten().tolist() == [1, 1]


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(6, 4), (8, 3), (8, 16), (8, 0)])
def test_experts_that_ranks_do_not_divide_are_refused(num_experts, num_ranks):
    ids = torch.zeros(2, 1, dtype=torch.int32)
    message = f"num_ranks: {num_ranks}; use a divisor of the {num_experts} experts"
    with pytest.raises(ValueError, match=message):
        count_dispatch(ids, num_experts, num_ranks)
    with pytest.raises(ValueError, match=message):
        plan_dispatch(ids, num_experts, num_ranks, 2)


def test_sizes_that_do_not_fit_are_refused():
    ids = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="2 slots"):
        plan_experts(ids, [2, 1])


def test_more_ranks_than_bits_of_an_integer():
    torch.manual_seed(5)
    ids = random_ids(40, num_experts=256, top_k=8, drop=0)
    plan = make_plan(ids, 256, 128)
    returned = torch.randn(len(plan.send_tokens), H, dtype=torch.float64)
    expected = torch.zeros(40, H, dtype=torch.float64).index_add(0, plan.send_tokens, returned)
    torch.testing.assert_close(
        sum_rows(returned, plan.token_rows), expected, rtol=1e-12, atol=1e-13
    )


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_cuda_equals_cpu_without_waiting_for_the_device(num_ranks):
    torch.manual_seed(6)
    ids = random_ids(300, drop=0.3)
    tokens, weights = torch.randn(300, H), torch.rand(300, K)
    counts = count_dispatch(ids, E, num_ranks).tolist()

    def run(ids: Tensor, tokens: Tensor, weights: Tensor) -> list[Tensor]:
        results = [count_dispatch(ids, E, num_ranks)]
        plan = plan_dispatch(ids, E, num_ranks, sum(row[0] for row in counts))
        rows, row_weights = tokens[plan.send_tokens], weights[plan.send_tokens]
        partial, start = [], 0
        for size, *pairs in counts:
            here = slice(start, start + size)
            experts = plan_experts(plan.send_ids[here], pairs)
            outputs = rows[here][experts.pair_rows]
            partial.append(weighted_partial_sums(outputs, row_weights[here], experts))
            gradients = weighted_partial_sums_backward(
                rows[here], outputs, row_weights[here], experts
            )
            results += [*gradients, sum_rows(gradients[0], experts.row_pairs), experts.row_pairs]
            start += size
        results.append(sum_rows(torch.cat(partial), plan.token_rows))
        results.append(sum_rows(row_weights, plan.token_rows))
        return results

    expected = run(ids, tokens, weights)
    on_device = ids.cuda(), tokens.cuda(), weights.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = run(*on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b)

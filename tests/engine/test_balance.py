"""The sequence balance loss against a loop over the formula, and the load that a run shows."""

import pytest
import torch
from pith_engine.balance import BalanceConfig, expert_counts, max_load, sequence_balance
from pith_engine.contract import IGNORED_TARGET, Batch, Routing
from pith_engine.mesh import Mesh


def make_routing(tokens, pool, top_k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, pool, generator=generator, dtype=torch.float64)
    scores = logits.softmax(-1).requires_grad_()
    weights, ids = scores.topk(top_k)
    return Routing(expert_ids=ids.int(), weights=weights, scores=scores, chosen=ids.int())


def make_batch(targets, length):
    return Batch(
        tokens=torch.zeros_like(targets),
        targets=targets,
        positions=torch.arange(length).repeat(len(targets) // length),
        sequence_length=length,
    )


def loop_balance(routing, batch):
    """The formula of the file's docstring, one sequence, expert and token at a time."""
    total = torch.zeros((), dtype=torch.float64)
    length, (_, pool), top_k = batch.sequence_length, routing.scores.shape, routing.chosen.shape[1]
    for start in range(0, len(batch.targets), length):
        rows = [t for t in range(start, start + length) if batch.targets[t] != IGNORED_TARGET]
        if not rows:
            continue
        n = len(rows)
        loss = torch.zeros((), dtype=torch.float64)
        for i in range(pool):
            chosen = sum(1 for t in rows for k in range(top_k) if routing.chosen[t, k] == i)
            loss = loss + pool / (top_k * n) * chosen * sum(routing.scores[t, i] for t in rows) / n
        total = total + n * loss
    return total


def test_value_and_gradient_equal_the_formula_with_ignored_targets():
    routing = make_routing(15, 5, 2)
    targets = torch.arange(15)
    targets[[0, 7, 8]] = IGNORED_TARGET
    targets[10:] = IGNORED_TARGET
    batch = make_batch(targets, 5)
    value = sequence_balance(routing, batch)
    expected = loop_balance(routing, batch)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(value, routing.scores)
    (expected_gradient,) = torch.autograd.grad(expected, routing.scores)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=0)


def test_even_load_is_one_and_collapse_is_pool_over_k_times_score():
    scores = torch.full((8, 4), 0.25, dtype=torch.float64)
    even = torch.tensor([[0, 1], [2, 3]] * 4, dtype=torch.int32)
    batch = make_batch(torch.zeros(8, dtype=torch.long), 4)
    routing = Routing(expert_ids=even, weights=scores[:, :2], scores=scores, chosen=even)
    assert sequence_balance(routing, batch).item() == pytest.approx(8.0, rel=1e-12)
    # Raw probabilities enter, not a second softmax of them: (.7, .1, .1, .1), top-1 gives 4 * .7.
    collapsed = torch.tensor([[0.7, 0.1, 0.1, 0.1]] * 4, dtype=torch.float64)
    zeros = torch.zeros(4, 1, dtype=torch.int32)
    routing = Routing(expert_ids=zeros, weights=collapsed[:, :1], scores=collapsed, chosen=zeros)
    batch = make_batch(torch.zeros(4, dtype=torch.long), 4)
    assert (sequence_balance(routing, batch) / 4).item() == pytest.approx(2.8, rel=1e-12)


def test_value_does_not_depend_on_how_sequences_fall_into_micro_batches():
    routing, targets = make_routing(12, 4, 2), torch.arange(12)
    whole = sequence_balance(routing, make_batch(targets, 4))
    parts = [
        sequence_balance(
            Routing(
                expert_ids=routing.expert_ids[s : s + 4],
                weights=routing.weights[s : s + 4],
                scores=routing.scores[s : s + 4],
                chosen=routing.chosen[s : s + 4],
            ),
            make_batch(targets[s : s + 4], 4),
        )
        for s in (0, 4, 8)
    ]
    torch.testing.assert_close(whole, sum(parts), rtol=1e-12, atol=0)


def test_counts_leave_out_ignored_tokens_and_unsent_choices():
    chosen = torch.tensor([[0, 2], [1, -1], [2, 0], [3, 1]], dtype=torch.int32)
    targets = torch.tensor([5, 5, 5, IGNORED_TARGET])
    scores = torch.full((4, 4), 0.25)
    routing = Routing(expert_ids=chosen, weights=scores[:, :2], scores=scores, chosen=chosen)
    assert expert_counts(routing, make_batch(targets, 2)).tolist() == [2, 1, 2, 0]


def test_max_load_is_the_worst_layer():
    counts = torch.tensor([[4, 4, 4, 4], [10, 2, 2, 2]])
    assert max_load(counts, Mesh.single()) == 2.5
    assert max_load(counts[:0], Mesh.single()) == 0.0


@pytest.mark.parametrize("bad", [{"method": "magic"}, {"coefficient": -1.0}])
def test_bad_configuration_names_the_field(bad):
    (line,) = BalanceConfig(**bad).violations()
    assert line.startswith(f"balance.{next(iter(bad))} is ")

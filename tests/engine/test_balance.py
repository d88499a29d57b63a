"""Balance losses against a loop over the formula, the bias, and the load that a run shows."""

from datetime import timedelta
from math import log
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pith_engine.balance import (
    BalanceConfig,
    auxiliary_losses,
    balance_loss,
    count_choices,
    layer_loads,
    load_factors,
    router_z_loss,
    update_balance_biases,
)
from pith_engine.contract import IGNORED_TARGET, Batch, Routing
from pith_engine.fsdp import shard_chunks, sharded_parameters
from pith_engine.mesh import Mesh, parse_mesh
from pith_engine.runtime import gather_objects
from toy_model import plain_balance, toy_chunks

LOSS_METHODS = ("micro-batch", "sequence", "global-batch")
PREVIOUS = torch.tensor([7, 0, 3, 1, 9])
CPU = torch.device("cpu")


def make_routing(tokens, pool, top_k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(tokens, pool, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    scores = logits.softmax(-1)
    weights, ids = scores.topk(top_k)
    return Routing(
        expert_ids=ids.int(), weights=weights, scores=scores, chosen=ids.int(), logits=logits
    )


def fixed_routing(ids, scores):
    """A routing of given ids and scores; the logits are unused."""
    weights = scores[:, : ids.shape[1]]
    return Routing(expert_ids=ids, weights=weights, scores=scores, chosen=ids, logits=scores)


def make_batch(targets, length):
    return Batch(
        tokens=torch.zeros_like(targets),
        targets=targets,
        positions=torch.arange(length).repeat(len(targets) // length),
        sequence_length=length,
    )


def rows_of(routing, rows):
    """The routing of some tokens."""
    names = ("expert_ids", "weights", "scores", "chosen", "logits")
    return Routing(**{name: vars(routing)[name][rows] for name in names})


def uneven_targets():
    """Three sequences of five: one without a target, one with a padded end."""
    targets = torch.arange(15)
    targets[[0, 7, 8, 9]] = IGNORED_TARGET
    targets[10:] = IGNORED_TARGET
    return targets


def loop_loss(method, routing, batch, previous):
    """The formula of the file's docstring, one set, expert and token at a time."""
    length, (num_tokens, pool) = batch.sequence_length, routing.scores.shape
    size = length if method == "sequence" else num_tokens
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, num_tokens, size):
        rows = [t for t in range(start, start + size) if batch.targets[t] != IGNORED_TARGET]
        if not rows:
            continue
        chosen = [int(e) for t in rows for e in routing.chosen[t] if e >= 0]
        loss = torch.zeros((), dtype=torch.float64)
        for i in range(pool):
            frequency = chosen.count(i) / len(chosen)
            if method == "global-batch":
                frequency = int(previous[i]) / int(previous.sum())
            loss = loss + pool * frequency * sum(routing.scores[t, i] for t in rows) / len(rows)
        total = total + len(rows) * loss
    return total


@pytest.mark.parametrize("method", LOSS_METHODS)
def test_value_and_gradient_equal_the_formula_with_ignored_targets(method):
    routing, batch = make_routing(15, 5, 2), make_batch(uneven_targets(), 5)
    routing.chosen[3, 1] = -1
    value = plain_balance(method, routing, batch, PREVIOUS)
    expected = loop_loss(method, routing, batch, PREVIOUS)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(value, routing.scores, retain_graph=True)
    (expected_gradient,) = torch.autograd.grad(expected, routing.scores, allow_unused=True)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-16)
    assert (gradient[uneven_targets() == IGNORED_TARGET] == 0).all()


@pytest.mark.parametrize("method", LOSS_METHODS)
def test_even_load_is_one_and_collapse_is_pool_times_score(method):
    batch = make_batch(torch.zeros(8, dtype=torch.long), 4)
    even = torch.tensor([[0, 1], [2, 3]] * 4, dtype=torch.int32)
    scores = torch.full((8, 4), 0.25, dtype=torch.float64)
    value = plain_balance(method, fixed_routing(even, scores), batch, torch.full((4,), 3))
    assert value.item() == pytest.approx(8.0, rel=1e-12)
    # Raw probabilities enter, not a second softmax of them: (.7, .1, .1, .1), top-1 gives 4 * .7.
    collapsed = torch.tensor([[0.7, 0.1, 0.1, 0.1]] * 4, dtype=torch.float64)
    routing = fixed_routing(torch.zeros(4, 1, dtype=torch.int32), collapsed)
    batch = make_batch(torch.zeros(4, dtype=torch.long), 4)
    value = plain_balance(method, routing, batch, torch.tensor([9, 0, 0, 0]))
    assert (value / 4).item() == pytest.approx(2.8, rel=1e-12)


def test_an_even_load_is_one_for_every_top_k():
    batch = make_batch(torch.zeros(6, dtype=torch.long), 6)
    scores = torch.full((6, 6), 1 / 6, dtype=torch.float64)
    for top_k in (1, 2, 3, 6):
        ids = (torch.arange(6)[:, None] + torch.arange(top_k)).int() % 6
        value = plain_balance("sequence", fixed_routing(ids, scores), batch)
        assert value.item() == pytest.approx(6.0, rel=1e-12), top_k


def test_global_batch_starts_from_an_even_load():
    routing, batch = make_routing(15, 5, 2), make_batch(uneven_targets(), 5)
    value = plain_balance("global-batch", routing, batch)
    # The scores of a token add up to one, and every factor is one.
    assert value.item() == pytest.approx(6.0, rel=1e-12)


@pytest.mark.parametrize("method", ["sequence", "global-batch"])
def test_value_does_not_depend_on_how_sequences_fall_into_micro_batches(method):
    routing, targets = make_routing(12, 5, 2), torch.arange(12)
    targets[[1, 2, 9]] = IGNORED_TARGET
    whole = plain_balance(method, routing, make_batch(targets, 4), PREVIOUS)
    parts = [
        plain_balance(
            method,
            rows_of(routing, slice(s, s + 4)),
            make_batch(targets[s : s + 4], 4),
            PREVIOUS,
        )
        for s in (0, 4, 8)
    ]
    torch.testing.assert_close(whole, sum(parts), rtol=1e-12, atol=0)


def test_micro_batch_of_one_sequence_is_sequence_and_of_more_is_not():
    routing, targets = make_routing(12, 5, 2), torch.arange(12)
    one = rows_of(routing, slice(0, 4)), make_batch(targets[:4], 4)
    assert torch.equal(plain_balance("micro-batch", *one), plain_balance("sequence", *one))
    three = routing, make_batch(targets, 4)
    together, apart = plain_balance("micro-batch", *three), plain_balance("sequence", *three)
    assert abs(together - apart) > 0.01 * apart


@pytest.mark.parametrize("method", ["micro-batch", "global-batch"])
def test_padding_is_left_out(method):
    """As if the padded tokens were not there; their scores get no gradient."""
    routing, targets = make_routing(15, 5, 2), uneven_targets()
    rows = torch.where(targets != IGNORED_TARGET)[0]
    config = BalanceConfig(method=method, coefficient=0.3, z_coefficient=0.2)
    gradients = []
    for part, some in ((routing, targets), (rows_of(routing, rows), targets[rows])):
        batch = make_batch(some, len(some))
        counts = count_choices(part, batch, method)
        factors = load_factors(method, counts, PREVIOUS, Mesh.single().cp)
        root, values = auxiliary_losses(config, part, batch, factors)
        gradients.append(torch.autograd.grad(root, routing.logits, retain_graph=True)[0])
        gradients.append(values)
    torch.testing.assert_close(gradients[:2], gradients[2:], rtol=1e-12, atol=1e-17)
    assert (gradients[0][targets == IGNORED_TARGET] == 0).all()
    assert (gradients[0][rows].abs().sum(1) > 0).all()


def test_z_loss_is_the_formula_and_joins_the_root():
    routing, batch = make_routing(15, 5, 2), make_batch(uneven_targets(), 5)
    rows = torch.where(batch.targets != IGNORED_TARGET)[0]
    expected = sum(torch.log(torch.exp(routing.logits[t]).sum()) ** 2 for t in rows)
    torch.testing.assert_close(router_z_loss(routing, batch), expected, rtol=1e-12, atol=0)
    counts = count_choices(routing, batch, "sequence")
    factors = load_factors("sequence", counts, None, Mesh.single().cp)
    config = BalanceConfig(coefficient=0.3, z_coefficient=0.05)
    root, values = auxiliary_losses(config, routing, batch, factors)
    balance = loop_loss("sequence", routing, batch, None)
    torch.testing.assert_close(root, 0.3 * balance + 0.05 * expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        values, torch.stack([balance, expected]).detach(), rtol=1e-12, atol=0
    )
    (gradient,) = torch.autograd.grad(root, routing.logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(0.3 * balance + 0.05 * expected, routing.logits)
    torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-16)


@pytest.mark.parametrize("method", ["none", "bias"])
def test_methods_without_a_loss_add_the_z_loss_or_nothing(method):
    routing, batch = make_routing(15, 5, 2), make_batch(uneven_targets(), 5)
    assert load_factors(method, PREVIOUS[None], PREVIOUS, Mesh.single().cp) is None
    root, values = auxiliary_losses(BalanceConfig(method=method), routing, batch, None)
    assert root is None
    assert values.tolist() == [0, 0]
    config = BalanceConfig(method=method, z_coefficient=0.5)
    root, values = auxiliary_losses(config, routing, batch, None)
    torch.testing.assert_close(root, 0.5 * router_z_loss(routing, batch), rtol=1e-15, atol=0)
    assert values.tolist() == [0, router_z_loss(routing, batch).item()]


def shared_sequences(method, num_sequences):
    """In a worker: losses and gradients of sequences that two or four ranks share."""
    results = {}
    for label in ("cp2", "cp4", "dp2-cp2"):
        mesh = Mesh.create(parse_mesh(label), timedelta(seconds=30))
        if mesh is None:
            continue
        length, cp = 8, mesh.cp.size
        routing = make_routing(num_sequences * length, 5, 2)
        targets = torch.arange(num_sequences * length)
        targets[[0, 3, 4, 9]] = IGNORED_TARGET
        # Rank r holds the tokens 2 r, 2 r + 1 of every eight with cp4, four with cp2.
        places = torch.arange(num_sequences * length).view(num_sequences, cp, -1)
        rows = places[:, mesh.cp.rank].reshape(-1)
        part, batch = rows_of(routing, rows), make_batch(targets[rows], length // cp)
        reduced = []
        original = dist.all_reduce

        def counted(tensor, *args, reduced=reduced, original=original, **settings):
            reduced.append(tensor)
            return original(tensor, *args, **settings)

        counts = count_choices(part, batch, method)
        before = counts.clone()
        with patch.object(dist, "all_reduce", counted):
            factors = load_factors(method, counts, PREVIOUS, mesh.cp)
        assert torch.equal(counts, before), "the rank's own counts are those of the metrics"
        loss = balance_loss(part, batch, factors)
        (gradient,) = torch.autograd.grad(loss, routing.scores)
        parts = gather_objects((loss.item(), gradient), mesh.cp)
        facts = [(t.dtype, tuple(t.shape)) for t in reduced]
        results[label] = sum(p[0] for p in parts), sum(p[1] for p in parts), facts
    return results


@pytest.mark.parametrize("method", LOSS_METHODS)
def test_ranks_that_share_sequences_give_what_one_process_gives(gloo_pool, method):
    num_sequences = 3
    routing = make_routing(num_sequences * 8, 5, 2)
    targets = torch.arange(num_sequences * 8)
    targets[[0, 3, 4, 9]] = IGNORED_TARGET
    expected = plain_balance(method, routing, make_batch(targets, 8), PREVIOUS)
    (gradient,) = torch.autograd.grad(expected, routing.scores)
    rows = num_sequences if method == "sequence" else 1
    # One integer all-reduce a layer and micro-batch, and none where the frequencies are known.
    reduced = [] if method == "global-batch" else [(torch.int64, (rows, 5))]
    for results in gloo_pool.run(shared_sequences, method, num_sequences):
        for loss, found, facts in results.values():
            assert loss == pytest.approx(expected.item(), rel=1e-12)
            torch.testing.assert_close(found, gradient, rtol=1e-12, atol=0)
            assert facts == reduced


def test_one_rank_asks_for_no_collective():
    with patch.object(dist, "all_reduce") as asked:
        for method in LOSS_METHODS:
            factors = load_factors(method, PREVIOUS[None], PREVIOUS, Mesh.single().cp)
            shares = PREVIOUS[None].double() / PREVIOUS.sum()
            torch.testing.assert_close(factors, shares * len(PREVIOUS), rtol=1e-15, atol=0)
    assert asked.call_count == 0


def test_counts_leave_out_ignored_tokens_and_unsent_choices():
    chosen = torch.tensor([[0, 2], [1, -1], [2, 0], [3, 1]], dtype=torch.int32)
    targets = torch.tensor([5, 5, 5, IGNORED_TARGET])
    routing, batch = fixed_routing(chosen, torch.full((4, 4), 0.25)), make_batch(targets, 2)
    assert count_choices(routing, batch, "sequence").tolist() == [[1, 1, 1, 0], [1, 0, 1, 0]]
    for method in ("none", "bias", "micro-batch", "global-batch"):
        assert count_choices(routing, batch, method).tolist() == [[2, 1, 2, 0]]


def test_loads_by_hand():
    counts = torch.tensor([[4, 4, 4, 4], [8, 8, 0, 0], [16, 0, 0, 0], [10, 2, 2, 2], [0, 0, 0, 0]])
    loads = layer_loads(counts)
    entropy = -(0.625 * log(0.625) + 3 * 0.125 * log(0.125)) / log(4)
    expected = [[1, 0, 1], [2, 2, 0.5], [4, 3, 0], [2.5, 0, entropy], [0, 4, 0]]
    torch.testing.assert_close(loads, torch.tensor(expected, dtype=torch.float64))
    assert layer_loads(counts[:0]).shape == (0, 3)
    assert layer_loads(torch.tensor([[7]])).tolist() == [[1, 0, 1]]


def biased_parameters(mesh):
    """Three layers, of which the second alone has a bias."""
    units = shard_chunks(
        toy_chunks((2, 1), mesh, biased=(1,)), mesh, compute_dtype=torch.float32, device=CPU
    )
    return units, sharded_parameters(units)


def test_bias_moves_against_the_load_without_centring():
    """[6, 2, 0, 0] around the mean 2; a layer without a bias does not stop the next one."""
    _, parameters = biased_parameters(Mesh.single())
    before = {p.name: p.shard.clone() for p in parameters}
    counts = {0: torch.tensor([8, 0, 0, 0]), 1: torch.tensor([6, 2, 0, 0])}
    counts[2] = counts[0]
    update_balance_biases(parameters, counts, 1e-3)
    bias = next(p for p in parameters if p.name == "layers.1.router_bias").shard
    assert torch.equal(bias, torch.tensor([-1e-3, 0, 1e-3, 1e-3]))
    update_balance_biases(parameters, counts, 1e-3)
    assert torch.equal(bias, torch.tensor([-2e-3, 0, 2e-3, 2e-3]))
    for parameter in parameters:
        if parameter.name != "layers.1.router_bias":
            assert torch.equal(parameter.shard, before[parameter.name])


def test_bias_of_an_expert_with_exactly_the_mean_stays():
    """Counts that no float holds: the comparison is one of integers."""
    _, parameters = biased_parameters(Mesh.single())
    large = 2**60 // 3
    update_balance_biases(parameters, {1: torch.tensor([large, large - 1, large + 1, large])}, 0.5)
    bias = next(p for p in parameters if p.name == "layers.1.router_bias").shard
    assert bias.tolist() == [0, 0.5, -0.5, 0]


@pytest.mark.parametrize(
    "bad",
    [
        {"method": "magic"},
        {"coefficient": -1.0},
        {"coefficient": float("nan")},
        {"z_coefficient": -1.0},
        {"bias_rate": 0.0},
    ],
)
def test_bad_configuration_names_the_field(bad):
    ((name, value),) = bad.items()
    (found,) = BalanceConfig(**bad).violations()
    assert found.startswith(f"balance.{name} is {value!r}: allowed are")
    assert BalanceConfig().violations() == []

import math

import pytest
import torch
from pith_ops.routing import (
    ExpertGroups,
    router_logits,
    score_topk,
    topk_softmax,
)


@pytest.mark.parametrize(
    ("normalise", "expected"), [(False, [0.643914, 0.236883]), (True, [0.731059, 0.268941])]
)
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_weights_of_a_known_case(normalise, expected, order):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])[order][None]
    ids, weights, scores = score_topk(logits, 2, normalise)
    assert ids.tolist() == [[order.index(0), order.index(1)]]
    assert ids.dtype == torch.int32
    torch.testing.assert_close(weights, torch.tensor([expected]), rtol=0, atol=6e-7)
    torch.testing.assert_close(scores, logits.softmax(1))


def test_ties_go_to_the_lower_id():
    torch.manual_seed(0)
    logits = torch.randint(0, 3, (500, 16)).float()
    ids, _, _ = score_topk(logits, 5, True)
    expected = [
        sorted(range(16), key=lambda e, row=row: (-row[e], e))[:5] for row in logits.tolist()
    ]
    assert ids.tolist() == expected
    assert torch.equal(
        score_topk(torch.zeros(3, 16), 4, False)[0], ids.new_tensor([[0, 1, 2, 3]] * 3)
    )


def test_a_bias_chooses_and_weighs_nothing():
    """Scores (.644, .237, .087, .032) plus (-.6, 0, 0, .3) are (.044, .237, .087, .332)."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    bias = torch.tensor([-0.6, 0.0, 0.0, 0.3], requires_grad=True)
    ids, weights, scores = score_topk(logits, 2, False, bias=bias)
    assert ids.tolist() == [[3, 1]]
    assert torch.equal(scores, logits.softmax(1))
    assert torch.equal(weights, scores[:, [3, 1]])
    normalised = score_topk(logits, 2, True, bias=bias)[1]
    torch.testing.assert_close(normalised, weights / weights.sum(), rtol=1e-15, atol=0)
    normalised[0, 0].backward()
    assert bias.grad is None
    assert logits.grad.abs().max() > 0


def test_a_bias_of_zero_changes_nothing_and_ties_go_to_the_lower_id():
    torch.manual_seed(5)
    logits = torch.randn(200, 16)
    for one, other in zip(
        score_topk(logits, 5, True),
        score_topk(logits, 5, True, bias=torch.zeros(16)),
        strict=True,
    ):
        assert torch.equal(one, other)
    bias = torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert score_topk(torch.zeros(1, 4), 3, False, bias=bias)[0].tolist() == [[1, 3, 0]]


def test_equal_rounded_scores_keep_the_order_of_their_logits():
    """Scores of -200 and -150 are both 0 in fp32; the larger logit still comes first."""
    ids, weights, _ = score_topk(torch.tensor([[-200.0, 0.0, -150.0]]), 3, False)
    assert ids.tolist() == [[1, 2, 0]]
    assert weights.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("normalise", [False, True])
def test_gradients_of_weights_and_scores(normalise):
    torch.manual_seed(1)
    logits = torch.randn(6, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: score_topk(z, 3, normalise)[1:], logits)


@pytest.mark.parametrize("normalise", [False, True])
def test_a_repeated_forward_and_backward_is_bit_identical(normalise):
    torch.manual_seed(2)
    values = torch.randint(0, 4, (64, 8)).float()
    upstream = torch.randn(64, 2)
    results = []
    for _ in range(2):
        logits = values.clone().requires_grad_()
        ids, weights, scores = score_topk(logits, 2, normalise)
        (weights * upstream).sum().backward()
        results.append((ids, weights, scores, logits.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_tokens_choose_the_experts_that_float64_chooses(autocast):
    torch.manual_seed(3)
    x = torch.randn(8192, 64).bfloat16().requires_grad_()
    weight = (torch.randn(32, 64) * 0.02).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = router_logits(x, weight)
        ids, weights, scores = score_topk(logits, 4, True)
    assert logits.dtype == weights.dtype == scores.dtype == torch.float32
    exact = (x.double() @ weight.double().t()).topk(4).indices
    same = (ids.sort(1).values == exact.sort(1).values).all(1)
    assert same.double().mean() >= 0.999
    upstream = torch.randn_like(weights)
    (weights * upstream).sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32

    leaf = weight.detach().double().requires_grad_()
    probabilities = (x.detach().double() @ leaf.t()).softmax(1).gather(1, ids.long())
    (probabilities / probabilities.sum(1, keepdim=True) * upstream).sum().backward()
    error = (weight.grad - leaf.grad).norm() / leaf.grad.norm()
    assert error < 1e-5


def test_float64_stays_float64():
    logits = router_logits(torch.randn(2, 3, dtype=torch.float64), torch.randn(4, 3))
    assert logits.dtype == torch.float64
    assert all(t.dtype == torch.float64 for t in score_topk(logits, 2, True)[1:])


def test_no_tokens():
    ids, weights, scores = score_topk(router_logits(torch.randn(0, 3), torch.randn(4, 3)), 2, True)
    assert (ids.shape, weights.shape, scores.shape) == ((0, 2), (0, 2), (0, 4))


@pytest.mark.parametrize("normalise", [False, True])
def test_chosen_ids_are_taken_as_they_are_and_weighted_as_before(normalise):
    torch.manual_seed(5)
    logits = torch.randint(0, 3, (64, 8)).float()
    first = score_topk(logits, 3, normalise)
    again = score_topk(logits, 3, normalise, chosen=first[0])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    others = torch.stack([torch.randperm(8)[:3] for _ in range(64)]).int()
    ids, weights, scores = score_topk(logits, 3, normalise, chosen=others)
    assert torch.equal(ids, others)
    picked = torch.stack([row[i] for row, i in zip(scores, others.long(), strict=True)])
    expected = picked / picked.sum(1, keepdim=True) if normalise else picked
    assert torch.equal(weights, expected)
    with pytest.raises(ValueError, match=r"chosen: \[64, 3\] is not \[64, 2\]"):
        score_topk(logits, 2, normalise, chosen=others)


@pytest.mark.parametrize("top_k", [0, 5])
def test_an_impossible_top_k_is_refused(top_k):
    with pytest.raises(ValueError, match=f"top_k: {top_k} is not between 1 and the 4 experts"):
        score_topk(torch.randn(2, 4), top_k, False)


@pytest.mark.gpu
def test_cuda_breaks_ties_as_the_cpu_does():
    torch.manual_seed(4)
    logits = torch.randint(0, 3, (4096, 128)).float()
    ids = score_topk(logits.cuda(), 8, True)[0]
    assert torch.equal(ids.cpu(), score_topk(logits, 8, True)[0])


def chosen_by_loop(scores, bias, top_k, groups):
    """Ids of one token, in plain Python: the best groups, then the best experts within them."""
    keys = [s + b for s, b in zip(scores, bias, strict=True)]
    experts = range(len(keys))
    if groups is not None:
        size = len(keys) // groups.num_groups
        totals = [
            sum(sorted(keys[g * size : (g + 1) * size], reverse=True)[: groups.best])
            for g in range(groups.num_groups)
        ]
        kept = sorted(range(groups.num_groups), key=lambda g: (-totals[g], g))[: groups.num_chosen]
        experts = [e for e in experts if e // size in kept]
    return sorted(experts, key=lambda e: (-keys[e], e))[:top_k]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "groups", [None, ExpertGroups(4, 2, 1), ExpertGroups(4, 2, 2), ExpertGroups(2, 1, 6)]
)
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("scaling", [1.0, 2.5])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_gates_equal_a_loop_in_float64(kind, scaling, normalise, groups, has_bias):
    torch.manual_seed(6)
    logits = torch.randn(100, 12, dtype=torch.float64)
    # All biased scores are negative.
    bias = torch.randn(12, dtype=torch.float64) * 0.2 - 3 if has_bias else None
    sigmoid = kind == "sigmoid"
    ids, weights, scores = score_topk(
        logits, 3, normalise, sigmoid=sigmoid, groups=groups, scaling=scaling, bias=bias
    )
    shift = [0.0] * 12 if bias is None else bias.tolist()
    for t, row in enumerate(logits.tolist()):
        if kind == "softmax":
            raw = [math.exp(z) / sum(map(math.exp, row)) for z in row]
        else:
            raw = [1 / (1 + math.exp(-z)) for z in row]
        wanted = chosen_by_loop(raw, shift, 3, groups)
        assert ids[t].tolist() == wanted
        total = sum(raw[e] for e in wanted) if normalise else 1.0
        exact = [raw[e] / total * scaling for e in wanted]
        assert weights[t].tolist() == pytest.approx(exact, rel=1e-13)
        assert scores[t].tolist() == pytest.approx([s / sum(raw) for s in raw], rel=1e-13)


@pytest.mark.parametrize("normalise", [False, True])
def test_experts_of_other_groups_are_out_of_the_choice(normalise):
    """Filled with 0 instead of -inf, experts 2 and 3 would win over scores of -.5."""
    logits = torch.tensor([[0.0, 0.0, -1.0, -1.0]])
    gates = score_topk(
        logits,
        2,
        normalise,
        sigmoid=True,
        groups=ExpertGroups(2, 1, 2),
        bias=torch.full((4,), -1.0),
    )
    assert gates[0].tolist() == [[0, 1]]
    assert gates[1].tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(("best", "expected"), [(1, 0), (2, 2)])
def test_a_group_counts_its_maximum_or_its_two_best(best, expected):
    logits = torch.tensor([[0.9, 0.1, 0.6, 0.6]], dtype=torch.float64).logit()
    for bias in (None, torch.zeros(4)):
        ids, _, _ = score_topk(
            logits, 1, False, sigmoid=True, groups=ExpertGroups(2, 1, best), bias=bias
        )
        assert ids.tolist() == [[expected]]


def test_scaling_is_independent_of_normalising():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    expected = {
        (False, False): [1.609786, 0.592207],
        (False, True): [1.827646, 0.672354],
        (True, False): [2.201993, 1.827646],
        (True, True): [1.366123, 1.133877],
    }
    for (sigmoid, normalise), weights in expected.items():
        got = score_topk(logits, 2, normalise, sigmoid=sigmoid, scaling=2.5)[1]
        torch.testing.assert_close(got, torch.tensor([weights]), rtol=0, atol=1e-6)


def test_ties_of_groups_and_experts_go_to_the_lower():
    ties = torch.zeros(3, 8)
    for bias in (None, torch.zeros(8)):
        ids, _, _ = score_topk(ties, 4, True, sigmoid=True, groups=ExpertGroups(4, 2, 2), bias=bias)
        assert ids.tolist() == [[0, 1, 2, 3]] * 3
    assert topk_softmax(ties, 3)[0].tolist() == [[0, 1, 2]] * 3
    # Sigmoids of 20 and 30 are both 1 in fp32.
    assert score_topk(torch.tensor([[20.0, 30.0]]), 1, False, sigmoid=True)[0].tolist() == [[1]]


def test_topk_softmax_equals_a_loop_in_float64():
    torch.manual_seed(7)
    logits = torch.randn(50, 9, dtype=torch.float64)
    ids, weights, scores = topk_softmax(logits, 4)
    assert ids.dtype == torch.int32
    for t, row in enumerate(logits.tolist()):
        wanted = chosen_by_loop(row, [0.0] * 9, 4, None)
        assert ids[t].tolist() == wanted
        total = sum(math.exp(row[e]) for e in wanted)
        assert weights[t].tolist() == pytest.approx(
            [math.exp(row[e]) / total for e in wanted], rel=1e-13
        )
    torch.testing.assert_close(scores, logits.softmax(1))
    # Where the sum of the chosen scores underflows, that of the chosen logits does not.
    low = torch.tensor([[200.0, 0.0, 1.0]])
    weights = topk_softmax(low, 2, chosen=torch.tensor([[1, 2]]))[1]
    torch.testing.assert_close(weights, torch.tensor([[0.268941, 0.731059]]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("normalise", [False, True])
def test_gradients_of_the_other_gates(normalise):
    torch.manual_seed(8)
    logits = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(8, dtype=torch.float64, requires_grad=True)
    groups = ExpertGroups(4, 2, 2)

    def grouped(z):
        return score_topk(z, 3, normalise, sigmoid=True, groups=groups, scaling=2.5, bias=bias)[1:]

    assert torch.autograd.gradcheck(grouped, logits)
    assert torch.autograd.gradcheck(lambda z: topk_softmax(z, 3)[1:], logits)
    sum(t.square().sum() for t in grouped(logits)).backward()
    assert bias.grad is None and logits.grad.isfinite().all()


def test_sigmoids_that_underflow_give_finite_weights_and_gradients():
    logits = torch.full((2, 4), -300.0, requires_grad=True)
    _, weights, scores = score_topk(logits, 2, True, sigmoid=True)
    (weights.sum() + scores.sum()).backward()
    assert all(t.isfinite().all() for t in (weights, scores, logits.grad))


def test_chosen_ids_of_the_other_gates():
    torch.manual_seed(9)
    logits, groups = torch.randn(20, 8), ExpertGroups(4, 2, 2)
    first = score_topk(logits, 3, True, sigmoid=True, groups=groups)
    again = score_topk(logits, 3, True, sigmoid=True, groups=groups, chosen=first[0])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    first = topk_softmax(logits, 3)
    again = topk_softmax(logits, 3, chosen=first[0])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for gate in (
        score_topk(logits[:0], 3, True, sigmoid=True, groups=groups),
        topk_softmax(logits[:0], 3),
    ):
        assert [t.shape for t in gate] == [(0, 3), (0, 3), (0, 8)]


def test_bf16_and_autocast_route_in_fp32_with_a_bias():
    torch.manual_seed(10)
    x, weight, bias = torch.randn(64, 16).bfloat16(), torch.randn(8, 16), torch.randn(8)
    bias.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = router_logits(x, weight, bias)
    assert logits.dtype == torch.float32
    exact = x.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(logits)
    logits.backward(upstream)
    torch.testing.assert_close(bias.grad, upstream.sum(0))
    for gate in (
        score_topk(logits.bfloat16(), 2, True, sigmoid=True),
        topk_softmax(logits.bfloat16(), 2),
    ):
        assert gate[1].dtype == gate[2].dtype == torch.float32


@pytest.mark.parametrize(
    ("groups", "top_k"),
    [
        (ExpertGroups(3, 1, 1), 1),
        (ExpertGroups(0, 1, 1), 1),
        (ExpertGroups(4, 0, 1), 1),
        (ExpertGroups(4, 5, 1), 1),
        (ExpertGroups(4, 2, 3), 1),
        (ExpertGroups(4, 2, 0), 1),
        (ExpertGroups(4, 2, 2), 5),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups, top_k):
    with pytest.raises(ValueError, match=r"groups: ExpertGroups\(.* does not fit 8 experts"):
        score_topk(torch.randn(2, 8), top_k, False, sigmoid=True, groups=groups)

import pytest
import torch
from pith_ops.routing import router_logits, softmax_topk


@pytest.mark.parametrize(
    ("normalise", "expected"), [(False, [0.643914, 0.236883]), (True, [0.731059, 0.268941])]
)
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_weights_of_a_known_case(normalise, expected, order):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])[order][None]
    ids, weights, scores = softmax_topk(logits, 2, normalise)
    assert ids.tolist() == [[order.index(0), order.index(1)]]
    assert ids.dtype == torch.int32
    torch.testing.assert_close(weights, torch.tensor([expected]), rtol=0, atol=6e-7)
    torch.testing.assert_close(scores, logits.softmax(1))


def test_ties_go_to_the_lower_id():
    torch.manual_seed(0)
    logits = torch.randint(0, 3, (500, 16)).float()
    ids, _, _ = softmax_topk(logits, 5, True)
    expected = [
        sorted(range(16), key=lambda e, row=row: (-row[e], e))[:5] for row in logits.tolist()
    ]
    assert ids.tolist() == expected
    assert torch.equal(
        softmax_topk(torch.zeros(3, 16), 4, False)[0], ids.new_tensor([[0, 1, 2, 3]] * 3)
    )


def test_a_bias_chooses_and_weighs_nothing():
    """Scores (.644, .237, .087, .032) plus (-.6, 0, 0, .3) are (.044, .237, .087, .332)."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    bias = torch.tensor([-0.6, 0.0, 0.0, 0.3], requires_grad=True)
    ids, weights, scores = softmax_topk(logits, 2, False, bias=bias)
    assert ids.tolist() == [[3, 1]]
    assert torch.equal(scores, logits.softmax(1))
    assert torch.equal(weights, scores[:, [3, 1]])
    normalised = softmax_topk(logits, 2, True, bias=bias)[1]
    torch.testing.assert_close(normalised, weights / weights.sum(), rtol=1e-15, atol=0)
    normalised[0, 0].backward()
    assert bias.grad is None
    assert logits.grad.abs().max() > 0


def test_a_bias_of_zero_changes_nothing_and_ties_go_to_the_lower_id():
    torch.manual_seed(5)
    logits = torch.randn(200, 16)
    for one, other in zip(
        softmax_topk(logits, 5, True),
        softmax_topk(logits, 5, True, bias=torch.zeros(16)),
        strict=True,
    ):
        assert torch.equal(one, other)
    bias = torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert softmax_topk(torch.zeros(1, 4), 3, False, bias=bias)[0].tolist() == [[1, 3, 0]]


def test_equal_rounded_scores_keep_the_order_of_their_logits():
    """Scores of -200 and -150 are both 0 in fp32; the larger logit still comes first."""
    ids, weights, _ = softmax_topk(torch.tensor([[-200.0, 0.0, -150.0]]), 3, False)
    assert ids.tolist() == [[1, 2, 0]]
    assert weights.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("normalise", [False, True])
def test_gradients_of_weights_and_scores(normalise):
    torch.manual_seed(1)
    logits = torch.randn(6, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: softmax_topk(z, 3, normalise)[1:], logits)


@pytest.mark.parametrize("normalise", [False, True])
def test_a_repeated_forward_and_backward_is_bit_identical(normalise):
    torch.manual_seed(2)
    values = torch.randint(0, 4, (64, 8)).float()
    upstream = torch.randn(64, 2)
    results = []
    for _ in range(2):
        logits = values.clone().requires_grad_()
        ids, weights, scores = softmax_topk(logits, 2, normalise)
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
        ids, weights, scores = softmax_topk(logits, 4, True)
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
    assert all(t.dtype == torch.float64 for t in softmax_topk(logits, 2, True)[1:])


def test_no_tokens():
    ids, weights, scores = softmax_topk(
        router_logits(torch.randn(0, 3), torch.randn(4, 3)), 2, True
    )
    assert (ids.shape, weights.shape, scores.shape) == ((0, 2), (0, 2), (0, 4))


@pytest.mark.parametrize("normalise", [False, True])
def test_chosen_ids_are_taken_as_they_are_and_weighted_as_before(normalise):
    torch.manual_seed(5)
    logits = torch.randint(0, 3, (64, 8)).float()
    first = softmax_topk(logits, 3, normalise)
    again = softmax_topk(logits, 3, normalise, chosen=first[0])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    others = torch.stack([torch.randperm(8)[:3] for _ in range(64)]).int()
    ids, weights, scores = softmax_topk(logits, 3, normalise, chosen=others)
    assert torch.equal(ids, others)
    picked = torch.stack([row[i] for row, i in zip(scores, others.long(), strict=True)])
    expected = picked / picked.sum(1, keepdim=True) if normalise else picked
    assert torch.equal(weights, expected)
    with pytest.raises(ValueError, match=r"chosen: \[64, 3\] is not \[64, 2\]"):
        softmax_topk(logits, 2, normalise, chosen=others)


@pytest.mark.parametrize("top_k", [0, 5])
def test_an_impossible_top_k_is_refused(top_k):
    with pytest.raises(ValueError, match=f"top_k: {top_k} is not between 1 and the 4 experts"):
        softmax_topk(torch.randn(2, 4), top_k, False)


@pytest.mark.gpu
def test_cuda_breaks_ties_as_the_cpu_does():
    torch.manual_seed(4)
    logits = torch.randint(0, 3, (4096, 128)).float()
    ids = softmax_topk(logits.cuda(), 8, True)[0]
    assert torch.equal(ids.cpu(), softmax_topk(logits, 8, True)[0])

import pytest
import torch
from pith_ops.cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

T, H, V = 23, 6, 37


def operands(dtype: torch.dtype = torch.float64, ignored: float = 0.3) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    targets = torch.randint(0, V, (T,)).masked_fill(torch.rand(T) < ignored, -100)
    hidden = torch.randn(T, H, dtype=dtype).requires_grad_()
    weight = torch.randn(V, H, dtype=dtype).requires_grad_()
    return hidden, weight, targets


def oracle(hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor) -> list[Tensor]:
    """Loss and gradients by torch's cross-entropy over full logits in float64."""
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    loss = cross_entropy(hidden @ weight.t(), targets, ignore_index=-100, reduction="sum")
    loss.backward(upstream.double())
    return [loss.detach(), hidden.grad, weight.grad]


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("chunk_tokens", [1, 5, T - 1, T, T + 10])
def test_loss_and_gradients_in_float64(chunk_tokens):
    hidden, weight, targets = operands()
    upstream = torch.randn((), dtype=torch.float64)
    expected = oracle(hidden, weight, targets, upstream)
    loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens)
    loss.backward(upstream)
    assert loss.dtype == torch.float64
    for actual, wanted in zip([loss.detach(), hidden.grad, weight.grad], expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-13)
    reference = linear_cross_entropy_reference(hidden, weight, targets)
    torch.testing.assert_close(reference.detach(), expected[0])


@pytest.mark.parametrize(
    ("dtype", "loss_bound", "gradient_bound"),
    [(torch.float32, 1e-6, 1e-6), (torch.bfloat16, 1e-6, 5e-3)],
)
def test_lower_precision_accumulates_in_fp32(dtype, loss_bound, gradient_bound):
    hidden, weight, targets = operands(dtype)
    upstream = torch.tensor(0.37)
    expected = oracle(hidden, weight, targets, upstream)
    loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=7)
    loss.backward(upstream)
    assert loss.dtype == torch.float32
    assert (hidden.grad.dtype, weight.grad.dtype) == (dtype, dtype)
    assert relative(loss.detach(), expected[0]) < loss_bound
    assert relative(hidden.grad, expected[1]) < gradient_bound
    assert relative(weight.grad, expected[2]) < gradient_bound


def test_an_fp32_gradient_buffer_of_a_bf16_weight_receives_fp32_values():
    hidden, weight, targets = operands(torch.bfloat16)
    parameter = nn.Parameter(weight.detach())
    parameter.grad_dtype = torch.float32
    buffer = torch.zeros(V, H)
    parameter.grad = buffer
    linear_cross_entropy(hidden, parameter, targets).backward()
    assert parameter.grad is buffer
    assert not torch.equal(buffer, buffer.bfloat16().float())


def test_ignored_tokens_get_no_gradient():
    hidden, weight, targets = operands()
    linear_cross_entropy(hidden, weight, targets, chunk_tokens=4).backward()
    ignored = targets == -100
    assert 0 < ignored.sum() < T
    assert not hidden.grad[ignored].any()
    assert hidden.grad[~ignored].any(1).all()


def test_another_ignore_index():
    hidden, weight, targets = operands(ignored=0)
    targets[:10] = 3
    loss = linear_cross_entropy(hidden, weight, targets, ignore_index=3)
    expected = cross_entropy(hidden @ weight.t(), targets, ignore_index=3, reduction="sum")
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("num_tokens", [0, T])
def test_nothing_to_predict_is_zero_with_zero_gradients(num_tokens):
    hidden = torch.randn(num_tokens, H, requires_grad=True)
    weight = torch.randn(V, H, requires_grad=True)
    targets = torch.full((num_tokens,), -100)
    loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=5)
    loss.backward(torch.tensor(3.0))
    assert loss.item() == 0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, targets).item() == 0


def test_large_logits_do_not_overflow():
    hidden, weight, targets = operands(torch.float32)
    hidden.data *= 1e4
    expected = oracle(hidden, weight, targets, torch.tensor(1.0))
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    assert relative(loss.detach(), expected[0]) < 1e-6
    assert relative(hidden.grad, expected[1]) < 1e-6


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_operand_gets_no_gradient(frozen):
    hidden, weight, targets = operands()
    expected = oracle(hidden, weight, targets, torch.tensor(1.0))
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    linear_cross_entropy(hidden, weight, targets, chunk_tokens=9).backward()
    for name, tensor, wanted in [("hidden", hidden, expected[1]), ("weight", weight, expected[2])]:
        if name == frozen:
            assert tensor.grad is None
        else:
            torch.testing.assert_close(tensor.grad, wanted)


def test_losses_without_a_gradient():
    hidden, weight, targets = operands()
    expected = cross_entropy(hidden @ weight.t(), targets, ignore_index=-100, reduction="none")
    with torch.no_grad():
        tokens = zip(hidden.split(1), targets.split(1), strict=True)
        losses = torch.stack([linear_cross_entropy(h, weight, y) for h, y in tokens])
        total = linear_cross_entropy(hidden, weight, targets, chunk_tokens=4)
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(total, expected.sum().detach())
    assert not total.requires_grad
    assert not linear_cross_entropy(hidden.detach(), weight.detach(), targets).requires_grad


class LargestTensor(TorchFunctionMode):
    """Records the largest number of elements of any tensor that a call of torch returns."""

    numel = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_the_largest_tensor_of_the_reference_is_seen():
    hidden, weight, targets = operands()
    with LargestTensor() as largest:
        linear_cross_entropy_reference(hidden, weight, targets).backward()
    assert largest.numel == T * V


@pytest.mark.parametrize("grad", [True, False])
def test_no_tensor_is_larger_than_one_chunk_of_logits(grad):
    torch.manual_seed(1)
    tokens, vocabulary, chunk = 64, 512, 8
    hidden, weight = torch.randn(tokens, 4), torch.randn(vocabulary, 4)
    targets = torch.randint(0, vocabulary, (tokens,))
    with LargestTensor() as largest:
        loss = linear_cross_entropy(
            hidden.requires_grad_(grad), weight.requires_grad_(grad), targets, chunk_tokens=chunk
        )
        if grad:
            loss.backward()
    assert largest.numel == chunk * vocabulary


def test_the_backward_runs_once():
    hidden, weight, targets = operands()
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once"):
        loss.backward()


@pytest.mark.parametrize(
    ("hidden", "weight", "targets", "chunk_tokens", "message"),
    [
        ((4, 5), (7, 6), 4, 2, "same H"),
        ((2, 2, 5), (7, 5), 4, 2, r"\[T, H\]"),
        ((4, 5), (7, 5), 3, 2, "one per row"),
        ((4, 5), (7, 5), 4, 0, "at least 1"),
    ],
)
def test_operands_that_do_not_fit_are_refused(hidden, weight, targets, chunk_tokens, message):
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(
            torch.randn(hidden),
            torch.randn(weight),
            torch.zeros(targets, dtype=torch.int64),
            chunk_tokens=chunk_tokens,
        )


def test_mixed_dtypes_are_refused():
    hidden, weight, targets = operands()
    with pytest.raises(ValueError, match="must be equal"):
        linear_cross_entropy(hidden, weight.float(), targets)


@pytest.mark.gpu
def test_bf16_on_cuda_in_little_memory():
    torch.manual_seed(2)
    tokens, width, vocabulary, chunk = 4099, 256, 32_000, 512
    hidden = torch.randn(tokens, width).bfloat16()
    weight = (torch.randn(vocabulary, width) / 4).bfloat16()
    targets = torch.randint(0, vocabulary, (tokens,)).masked_fill(torch.rand(tokens) < 0.1, -100)
    upstream = torch.tensor(0.37)
    expected = oracle(hidden.cuda(), weight.cuda(), targets.cuda(), upstream.cuda())

    x, w = hidden.cuda().requires_grad_(), nn.Parameter(weight.cuda())
    w.grad_dtype = torch.float32
    w.grad = torch.zeros(vocabulary, width, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_cross_entropy(x, w, targets.cuda(), chunk_tokens=chunk)
    loss.backward(upstream.cuda())
    # fp32 and bf16 logits of a chunk, one mask of the next, dW; full logits would take 524 MB.
    assert (
        torch.cuda.max_memory_allocated() - before < 3 * chunk * vocabulary * 4 + 2 * w.numel() * 4
    )
    assert relative(loss.detach(), expected[0]) < 1e-6
    assert relative(x.grad, expected[1]) < 5e-3
    assert relative(w.grad, expected[2]) < 5e-3

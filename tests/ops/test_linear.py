"""Linear: torch's own result, with the weight gradient now or later."""

import pytest
import torch
from pith_ops.linear import WeightGradQueue, linear
from torch import nn


def operands(shape, out, dtype=torch.float64):
    x = torch.randn(*shape, dtype=dtype, requires_grad=True)
    weight = nn.Parameter(torch.randn(out, shape[-1], dtype=dtype))
    bias = nn.Parameter(torch.randn(out, dtype=dtype))
    return x, weight, bias, torch.randn(*shape[:-1], out, dtype=dtype)


@pytest.mark.parametrize("shape", [(5, 3), (0, 3), (2, 1, 7)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_deferred_gradients_equal_torchs(shape, with_bias):
    x, weight, bias, grad = operands(shape, 4)
    bias = bias if with_bias else None
    parameters = [p for p in (x, weight, bias) if p is not None]
    wanted = torch.autograd.grad(nn.functional.linear(x, weight, bias), parameters, grad)
    queue = WeightGradQueue()
    out = linear(x, weight, bias, queue)
    assert torch.equal(out, nn.functional.linear(x, weight, bias))
    out.backward(grad)
    assert weight.grad is None and len(queue) == 1
    queue.flush()
    assert len(queue) == 0
    for parameter, want in zip(parameters, wanted, strict=True):
        assert torch.allclose(parameter.grad, want, rtol=1e-13, atol=1e-13)


def test_deferred_gradients_add_up_in_a_preset_wider_buffer():
    x, weight, _, grad = operands((6, 8), 4, torch.bfloat16)
    weight.grad_dtype = torch.float32
    weight.grad = buffer = torch.ones(4, 8)
    queue = WeightGradQueue()
    for _ in range(2):
        linear(x, weight, weight_grads=queue).backward(grad)
    queue.flush()
    assert weight.grad is buffer
    wanted = 1 + 2 * grad.double().t() @ x.detach().double()
    assert torch.allclose(buffer.double(), wanted, rtol=2**-7, atol=2**-6)


def test_without_a_queue_autograd_does_it():
    x, weight, bias, grad = operands((5, 3), 4)
    linear(x, weight, bias).backward(grad)
    assert torch.allclose(weight.grad, grad.t() @ x.detach(), rtol=1e-13)


def test_nothing_is_pushed_for_what_needs_no_gradient():
    x, weight, _, grad = operands((5, 3), 4)
    queue = WeightGradQueue()
    linear(x, weight.detach(), weight_grads=queue).backward(grad)
    with torch.no_grad():
        linear(x, weight, weight_grads=queue)
    assert len(queue) == 0
    # The first layer's input needs none, its weight does.
    linear(x.detach(), weight, weight_grads=queue).backward(grad)
    queue.flush()
    assert torch.allclose(weight.grad, grad.t() @ x.detach(), rtol=1e-13)


def test_a_computed_weight_cannot_be_deferred():
    x, weight, _, _ = operands((5, 3), 4)
    with pytest.raises(ValueError, match=r"the weight \[4, 3\] is computed"):
        linear(x, weight * 2, weight_grads=WeightGradQueue())

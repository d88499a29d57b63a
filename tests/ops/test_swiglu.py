"""SwiGLU: values, gradients, what it keeps for the backward."""

import pytest
import torch
from pith_ops.swiglu import swiglu, swiglu_reference


@pytest.mark.parametrize("shape", [(5, 6), (1, 2), (0, 8), (2, 3, 14)])
def test_values_and_gradients_equal_a_formula_in_float64(shape):
    gate_up = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    out = swiglu(gate_up)
    gate, up = gate_up[..., : shape[-1] // 2], gate_up[..., shape[-1] // 2 :]
    wanted = gate / (1 + torch.exp(-gate)) * up
    grad = torch.randn_like(out)
    assert torch.allclose(out, wanted, rtol=1e-14, atol=0)
    (got,) = torch.autograd.grad(out, gate_up, grad)
    (want,) = torch.autograd.grad(wanted, gate_up, grad)
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reference_is_bit_equal_forward_and_backward(dtype):
    gate_up = (torch.randn(33, 50) * 4).to(dtype).requires_grad_()
    out, wanted = swiglu(gate_up), swiglu_reference(gate_up)
    assert torch.equal(out, wanted) and out.dtype == dtype
    grad = torch.randn(33, 25).to(dtype)
    (got,) = torch.autograd.grad(out, gate_up, grad)
    (want,) = torch.autograd.grad(wanted, gate_up, grad)
    assert torch.equal(got, want)


def test_only_the_input_is_kept():
    gate_up = torch.randn(4, 6, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu(gate_up)
    assert [t.data_ptr() for t in kept] == [gate_up.data_ptr()]


def test_strided_input_and_gradient():
    gate_up = torch.randn(8, 5, dtype=torch.float64).t().requires_grad_()
    grad = torch.randn(4, 5, dtype=torch.float64).t()
    (got,) = torch.autograd.grad(swiglu(gate_up), gate_up, grad)
    (want,) = torch.autograd.grad(swiglu_reference(gate_up), gate_up, grad)
    assert torch.equal(got, want)


def test_odd_width_is_refused():
    with pytest.raises(ValueError, match="last dim of gate_up is 7; it must be even"):
        swiglu(torch.zeros(2, 7))

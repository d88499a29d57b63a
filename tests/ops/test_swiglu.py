"""SwiGLU: values, gradients, what it keeps for the backward."""

import math

import pytest
import torch
from pith_ops.swiglu import (
    clamped_swiglu,
    clamped_swiglu_reference,
    swiglu,
    swiglu_reference,
)


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


def clamped_by_loop(gate_up, limit, alpha):
    """GPT-OSS's formula, value by value."""
    width = gate_up.shape[1] // 2
    rows = []
    for row in gate_up.tolist():
        gates = [min(z, limit) for z in row[:width]]
        ups = [min(max(z, -limit), limit) for z in row[width:]]
        rows.append(
            [(u + 1) * g / (1 + math.exp(-alpha * g)) for g, u in zip(gates, ups, strict=True)]
        )
    return torch.tensor(rows, dtype=torch.float64)


def test_clamped_values_equal_a_loop_in_float64():
    gate_up = torch.randn(9, 14, dtype=torch.float64) * 6
    assert (gate_up > 7).any() and (gate_up < -7).any()
    wanted = clamped_by_loop(gate_up, 7.0, 1.702)
    torch.testing.assert_close(
        clamped_swiglu(gate_up, limit=7.0, alpha=1.702), wanted, rtol=1e-13, atol=1e-13
    )


def test_gradcheck_of_clamped_swiglu_away_from_its_kinks():
    torch.manual_seed(0)
    gate_up = torch.randn(5, 12, dtype=torch.float64) * 3
    gate_up[(gate_up.abs() - 2).abs() < 0.01] = 1.0
    gate_up[0, :3] = torch.tensor([9.0, -9.0, 2.5])
    gate_up[0, 6:9] = torch.tensor([9.0, -9.0, -2.5])
    gate_up.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: clamped_swiglu(z, limit=2.0, alpha=1.702), gate_up)
    (got,) = torch.autograd.grad(clamped_swiglu(gate_up, limit=2.0, alpha=1.702).sum(), gate_up)
    gate, up = got.detach().chunk(2, dim=-1)
    # A gate is clamped from above only.
    assert (gate[0, :3] == 0).tolist() == [True, False, True]
    assert (up[0, :3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_clamped_reference_and_gradients(dtype):
    """Strided; forward values are bit-equal. A value at its limit gets no gradient."""
    torch.manual_seed(1)
    gate_up = (torch.randn(50, 33) * 4).to(dtype)
    gate_up[::7], gate_up[1::7] = 3.0, -3.0
    gate_up = gate_up.t().requires_grad_()
    out = clamped_swiglu(gate_up, limit=3.0, alpha=1.702)
    wanted = clamped_swiglu_reference(gate_up, limit=3.0, alpha=1.702)
    assert torch.equal(out, wanted) and out.dtype == dtype
    exact = clamped_by_loop(gate_up.detach().double(), 3.0, 1.702)
    step = {torch.bfloat16: 2**-8, torch.float32: 1e-6, torch.float64: 1e-13}[dtype]
    torch.testing.assert_close(out.double(), exact, rtol=step, atol=step * 1e-2)
    grad = torch.randn(25, 33).to(dtype).t()
    (got,) = torch.autograd.grad(out, gate_up, grad)
    wide = gate_up.detach().double().requires_grad_()
    reference = clamped_swiglu_reference(wide, limit=3.0, alpha=1.702)
    (want,) = torch.autograd.grad(reference, wide, grad.double())
    assert got.dtype == dtype
    gate, up = gate_up.detach().chunk(2, dim=-1)
    at_limit = torch.cat((gate == 3, up.abs() == 3), dim=-1)
    assert at_limit.sum() > 300 and not got[at_limit].any()
    got, want = got[~at_limit], want[~at_limit]
    assert want.norm() > 10
    torch.testing.assert_close(got.double(), want, rtol=step, atol=step * 1e-1)


def test_clamped_swiglu_keeps_its_input_only_and_refuses_an_odd_width():
    gate_up = torch.randn(4, 6, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        clamped_swiglu(gate_up, limit=7.0, alpha=1.702)
    assert [t.data_ptr() for t in kept] == [gate_up.data_ptr()]
    assert clamped_swiglu(gate_up[:0], limit=7.0, alpha=1.702).shape == (0, 3)
    with pytest.raises(ValueError, match="last dim of gate_up is 7; it must be even"):
        clamped_swiglu(torch.zeros(2, 7), limit=7.0, alpha=1.702)

"""RMS norm: against torch's, and bit by bit against the rounding of released models."""

import pytest
import torch
from pith_ops.rms_norm import rms_norm, rms_norm_reference
from torch import nn

TOLERANCES = {torch.float64: 1e-14, torch.float32: 1e-6}


def operands(shape, dtype, weight_dtype=None):
    x = (torch.randn(shape, dtype=torch.float64) * 3 + 1).to(dtype).requires_grad_()
    weight = torch.randn(shape[-1], dtype=torch.float64).to(weight_dtype or dtype).requires_grad_()
    return x, weight, torch.randn(shape, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (3, 11, 2, 33), (0, 8)])
def test_values_and_gradients_equal_torchs(shape, dtype):
    x, weight, grad = operands(shape, dtype)
    got = rms_norm(x, weight, 1e-2)
    wanted = nn.functional.rms_norm(x, shape[-1:], weight, 1e-2)
    gradients = zip(
        torch.autograd.grad(got, (x, weight), grad),
        torch.autograd.grad(wanted, (x, weight), grad),
        strict=True,
    )
    for a, b in ((got, wanted), *gradients):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert (a - b).norm() <= TOLERANCES[dtype] * max(b.norm().item(), 1.0)


def test_gradcheck():
    x, weight, _ = operands((4, 5), torch.float64)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, weight))


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_bf16_of_gpt_oss_rounds_the_product_once(weight_dtype):
    x, weight, grad = operands((64, 128), torch.bfloat16, weight_dtype)
    got = rms_norm(x, weight, 1e-5, rounds_once=True)
    wide = x.float()
    product = weight.float() * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5))
    assert got.dtype == torch.bfloat16 and torch.equal(got, product.bfloat16())
    assert torch.equal(got, rms_norm_reference(x, weight, 1e-5, rounds_once=True))
    assert not torch.equal(got, rms_norm(x, weight, 1e-5))
    wanted = torch.autograd.grad(product, (x, weight), grad.float())
    for a, b in zip(torch.autograd.grad(got, (x, weight), grad), wanted, strict=True):
        assert a.dtype == b.dtype and (a.double() - b.double()).norm() / b.double().norm() < 2**-8


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_bf16_rounds_before_the_weight_and_keeps_its_dtype(weight_dtype):
    x, weight, grad = operands((64, 128), torch.bfloat16, weight_dtype)
    got = rms_norm(x, weight, 1e-6)
    # Qwen3's norm: the normalised value goes back to bf16, then meets the weight.
    wide = x.float()
    rounded = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, (weight * rounded).to(torch.bfloat16))
    assert torch.equal(got, rms_norm_reference(x, weight, 1e-6))
    # The other order differs, so the line above is able to fail.
    late = (
        weight.float() * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    ).bfloat16()
    assert not torch.equal(got, late)
    grad_x, grad_weight = torch.autograd.grad(got, (x, weight), grad)
    assert grad_x.dtype == torch.bfloat16 and grad_weight.dtype == weight_dtype


def test_bf16_gradients_are_closer_to_float64_than_one_rounding_each():
    x, weight, grad = operands((333, 64), torch.bfloat16)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    wanted = torch.autograd.grad(rms_norm_reference(*wide, 1e-6), wide, grad.double())
    got = torch.autograd.grad(rms_norm(x, weight, 1e-6), (x, weight), grad)
    for a, b in zip(got, wanted, strict=True):
        assert (a.double() - b).norm() / b.norm() < 2**-8


def test_eps_counts_and_keeps_a_row_of_zeros_finite():
    zeros = torch.zeros(2, 8, requires_grad=True)
    out = rms_norm(zeros, torch.ones(8), 1e-6)
    out.backward(torch.ones(2, 8))
    assert torch.equal(out, zeros) and zeros.grad.isfinite().all()
    small = torch.full((1, 4), 1e-3, dtype=torch.float64)
    got = rms_norm(small, torch.ones(4, dtype=torch.float64), 3e-6)
    assert torch.allclose(got, torch.full_like(got, 0.5))


def test_frozen_weight_and_frozen_input():
    x, weight, grad = operands((5, 6), torch.float64)
    whole = torch.autograd.grad(rms_norm(x, weight, 1e-6), (x, weight), grad)
    (only_x,) = torch.autograd.grad(rms_norm(x, weight.detach(), 1e-6), x, grad)
    (only_weight,) = torch.autograd.grad(rms_norm(x.detach(), weight, 1e-6), weight, grad)
    assert torch.equal(only_x, whole[0]) and torch.equal(only_weight, whole[1])


def test_weight_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"weight has shape \[3\]; it must be \[4\]"):
        rms_norm(torch.zeros(2, 4), torch.zeros(3), 1e-6)

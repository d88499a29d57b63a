"""Root-mean-square norm (Zhang & Sennrich 2019, arXiv 1910.07467) with Hugging Face's rounding.

    rstd = 1 / sqrt(mean(x^2) + eps)      y = weight * (x * rstd)      over the last dim, size H

The trap: `x * rstd`, from the accumulation dtype, is rounded to x's dtype *before* it meets the
weight, as in the released models; in bf16 a third of torch's outputs differ in the last bit.

Plain autograd would keep three tensors of x's shape; kept here are x and rstd, one number per row.
With `n = x * rstd` and `g = weight * dy`:

    dx = rstd * (g - n * mean(g * n))        d_weight = sum over rows of dy * n
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pith_ops.device import accumulation_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x [..., H]` normalised, times `weight [H]`; x's shape and dtype."""
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight has shape {list(weight.shape)}; it must be {[x.shape[-1]]} as in x"
        )
    return _RmsNorm.apply(x, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same by plain autograd; forward values are bit-equal."""
    return _normalise(x, weight, eps)[0]


def _normalise(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.to(accumulation_dtype(x.dtype))
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * (wide * rstd).to(x.dtype)).to(x.dtype), rstd


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = _normalise(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        grad_x = grad_weight = None
        normalised, grad = x.to(rstd.dtype) * rstd, grad.to(rstd.dtype)
        if ctx.needs_input_grad[1]:
            rows = (grad * normalised.to(x.dtype)).flatten(0, -2)
            grad_weight = rows.sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            scaled = grad * weight
            mean = (scaled * normalised).mean(-1, keepdim=True)
            grad_x = ((scaled - normalised * mean) * rstd).to(x.dtype)
        return grad_x, grad_weight, None

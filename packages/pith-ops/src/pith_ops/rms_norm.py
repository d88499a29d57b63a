"""Root-mean-square norm (Zhang & Sennrich 2019, arXiv 1910.07467) with Hugging Face's rounding.

    rstd = 1 / sqrt(mean(x^2) + eps)      y = weight * (x * rstd)      over the last dim, size H

The trap: `x * rstd`, in the accumulation dtype, is rounded to x's dtype *before* it meets the
weight, as in most released models; in bf16 a third of torch's outputs differ in the last bit.
GPT-OSS rounds the product alone (`rounds_once`).

Plain autograd would keep three tensors of x's shape; here x and rstd are kept. With `n = x * rstd`,
`g = weight * dy`:

    dx = rstd * (g - n * mean(g * n))        d_weight = sum over rows of dy * n
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pith_ops.device import accumulation_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, rounds_once: bool = False) -> Tensor:
    """`x [..., H]` normalised, times `weight [H]`; x's shape and dtype."""
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight has shape {list(weight.shape)}; it must be {[x.shape[-1]]}"
        )
    return _RmsNorm.apply(x, weight, eps, rounds_once)


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, *, rounds_once: bool = False
) -> Tensor:
    """By plain autograd; forward values are bit-equal."""
    return _normalise(x, weight, eps, rounds_once)[0]


def _normalise(x: Tensor, weight: Tensor, eps: float, rounds_once: bool) -> tuple[Tensor, Tensor]:
    wide = x.to(accumulation_dtype(x.dtype))
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normalised = wide * rstd if rounds_once else (wide * rstd).to(x.dtype)
    return (weight * normalised).to(x.dtype), rstd


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, rounds_once: bool) -> Tensor:
        y, rstd = _normalise(x, weight, eps, rounds_once)
        ctx.save_for_backward(x, weight, rstd)
        ctx.rounds_once = rounds_once
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        normalised, grad = x.to(rstd.dtype) * rstd, grad.to(rstd.dtype)
        met = normalised if ctx.rounds_once else normalised.to(x.dtype)
        grad_weight = (grad * met).flatten(0, -2).sum(0).to(weight.dtype)
        scaled = grad * weight
        mean = (scaled * normalised).mean(-1, keepdim=True)
        grad_x = ((scaled - normalised * mean) * rstd).to(x.dtype)
        return grad_x, grad_weight, None, None

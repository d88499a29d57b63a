"""SwiGLU (Shazeer 2020, arXiv 2002.05202): `silu(gate) * up` with `silu(z) = z * sigmoid(z)`.

The backward computes `silu(gate)` once more, which plain autograd would keep:

    d_up = dy * silu(gate)        d_gate = dy * up * s * (1 + gate * (1 - s)),  s = sigmoid(gate)

The trap: `silu(gate)` is rounded before the product, so that bf16 outputs equal Hugging Face's.

GPT-OSS clamps and shifts, here in fp32 or wider, rounded once:

    g = min(gate, limit)    u = clamp(up, -limit, limit)    s = sigmoid(alpha * g)
    y = (u + 1) * g * s
    d_up = dy * g * s       d_gate = dy * (u + 1) * s * (1 + alpha * g * (1 - s)),   0 if clamped
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from pith_ops.device import accumulation_dtype


def swiglu(gate_up: Tensor) -> Tensor:
    """`gate_up [..., 2I]`, gate first, -> `[..., I]` in its dtype; a ValueError if odd."""
    return _SwiGLU.apply(gate_up)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """By plain autograd; forward values are bit-equal."""
    gate, up = _halves(gate_up)
    return silu(gate) * up


def clamped_swiglu(gate_up: Tensor, *, limit: float, alpha: float) -> Tensor:
    """GPT-OSS's, of the same shapes."""
    return _ClampedSwiGLU.apply(gate_up, limit, alpha)


def clamped_swiglu_reference(gate_up: Tensor, *, limit: float, alpha: float) -> Tensor:
    """By plain autograd; forward values are bit-equal."""
    gate, up = _halves(gate_up.to(accumulation_dtype(gate_up.dtype)))
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * (gate * (alpha * gate).sigmoid())).to(gate_up.dtype)


def _halves(gate_up: Tensor) -> tuple[Tensor, ...]:
    if gate_up.shape[-1] % 2:
        raise ValueError(f"swiglu: last dim of gate_up is {gate_up.shape[-1]}; it must be even")
    return gate_up.chunk(2, dim=-1)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return swiglu_reference(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        grad_gate_up = torch.empty_like(gate_up)
        (gate, up), (grad_gate, grad_up) = _halves(gate_up), _halves(grad_gate_up)
        torch.mul(grad, silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_gate_up


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, limit: float, alpha: float) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.limit, ctx.alpha = limit, alpha
        return clamped_swiglu_reference(gate_up, limit=limit, alpha=alpha)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gate_up,), limit, alpha = ctx.saved_tensors, ctx.limit, ctx.alpha
        gate, up = _halves(gate_up.to(accumulation_dtype(gate_up.dtype)))
        # A value at its limit counts as clamped; torch's clamp differs between versions.
        free_gate, free_up = gate < limit, up.abs() < limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        s = (alpha * gate).sigmoid()
        grad_gate = grad * (up + 1) * s * (1 + alpha * gate * (1 - s))
        grads = (grad_gate.where(free_gate, 0), (grad * gate * s).where(free_up, 0))
        return torch.cat(grads, dim=-1).to(gate_up.dtype), None, None

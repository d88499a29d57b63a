"""SwiGLU (Shazeer 2020, arXiv 2002.05202): `silu(gate) * up` with `silu(z) = z * sigmoid(z)`.

Plain autograd would keep `silu(gate)` besides `gate_up [..., 2I]`, half as much memory again on the
widest activations; here the backward computes it once more:

    d_up = dy * silu(gate)        d_gate = dy * up * s * (1 + gate * (1 - s)),  s = sigmoid(gate)

The trap: `silu(gate)` is rounded before the product, so that bf16 outputs equal Hugging Face's.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu


def swiglu(gate_up: Tensor) -> Tensor:
    """`gate_up [..., 2I]`, gate first, -> `[..., I]` in the same dtype."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"swiglu: last dim of gate_up is {gate_up.shape[-1]}; it must be even")
    return _SwiGLU.apply(gate_up)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """The same by plain autograd; forward values are bit-equal."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return swiglu_reference(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grad, silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_gate_up

"""Dense linear layer whose weight gradient can be left for later.

    y = x W^T + b        dx = dy W        dW = dy^T x        db = sum over rows of dy

Without a queue this is torch's own; with one, the backward pushes the facts of `dW` (why:
`weight_grad.py`). The trap: a computed weight (a cast, a slice) could not receive what comes later.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from pith_ops.weight_grad import WeightGradQueue


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    weight_grads: WeightGradQueue | None = None,
) -> Tensor:
    """`x [..., in]`, `weight [out, in]`, `bias [out]` -> `[..., out]`.

    With `weight_grads` a ValueError refuses a computed weight.
    """
    if weight_grads is None or not (weight.requires_grad and torch.is_grad_enabled()):
        return functional.linear(x, weight, bias)
    if not weight.is_leaf:
        raise ValueError(
            f"linear: the weight {list(weight.shape)} is computed: pass the parameter, or no queue"
        )
    return _DeferredLinear.apply(x, weight, bias, weight_grads)


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, queue: WeightGradQueue
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.queue = queue
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.queue.push(weight, x, grad)
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias, None

"""Dense linear layer, and weight gradients for later.

    y = x W^T + b        db = sum over rows of dy
    dx = dy W            the layer below waits for it
    dW = dy^T x          nobody waits for it before the step's reduction

Without a queue `linear` is torch's own. With one its backward, like that of `grouped_linear`,
returns `dx` and pushes the facts of `dW`: a zero-bubble pipeline runs them in its bubbles (Qi et
al., arXiv 2401.10241), an overlapped one under an all-to-all. The trap: autograd never sees these
gradients and fires no hooks; flush before reading `weight.grad`, which may be a preset fp32 buffer
of a bf16 weight. A computed weight (a cast, a slice) could not receive what comes later.
"""

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

if TYPE_CHECKING:
    from pith_ops.grouped_linear import Groups


class WeightGradQueue:
    """Deferred weight gradients, run first in, first out."""

    def __init__(self) -> None:
        self._entries: deque[tuple[Tensor, Tensor, Tensor, Groups | None]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def push(
        self, weight: Tensor, input: Tensor, grad_output: Tensor, groups: "Groups | None" = None
    ) -> None:
        """Defer an `add_weight_grad`; a ValueError refuses a weight that takes no gradient."""
        if not (weight.is_leaf and weight.requires_grad):
            kind = "frozen" if weight.is_leaf else "computed"
            raise ValueError(
                f"weight {list(weight.shape)}: {kind}, takes no gradient; pass weight_grads=None"
            )
        self._entries.append((weight, input.detach(), grad_output, groups))

    def flush(self) -> None:
        """Run every entry, oldest first, and free its operands."""
        while self._entries:
            add_weight_grad(*self._entries.popleft())


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


@torch.no_grad()
def add_weight_grad(
    weight: Tensor, input: Tensor, grad_output: Tensor, groups: "Groups | None" = None
) -> None:
    """Add the gradient of a dense or grouped weight to `weight.grad`; set it if absent."""
    gradient = weight_gradient(input, grad_output, groups)
    if weight.grad is None:
        weight.grad = gradient.to(weight.grad_dtype or weight.dtype)
    else:
        weight.grad.add_(gradient)


def weight_gradient(input: Tensor, grad_output: Tensor, groups: "Groups | None" = None) -> Tensor:
    """`dy^T x`: `[..., in]`, `[..., out]` -> `[out, in]`, or of each group -> `[G, out, in]`."""
    if groups is None:
        return grad_output.flatten(0, -2).t() @ input.flatten(0, -2)
    input, grad_output = input[: groups.total], grad_output[: groups.total]
    if input.is_cuda and input.dtype == torch.bfloat16 and groups.total > 0:
        return functional.grouped_mm(grad_output.t(), input, offs=groups.offsets)
    pairs = zip(input.split(groups.sizes), grad_output.split(groups.sizes), strict=True)
    return torch.stack([dy.t() @ x for x, dy in pairs])


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

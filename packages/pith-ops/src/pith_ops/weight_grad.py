"""Weight gradients for later: a queue that backward passes push to and a schedule drains.

    dgrad   dx = dy W          the layer below waits for it
    wgrad   dW = dy^T x        nobody waits for it before the step's reduction

With a queue the backward of `linear` or `grouped_linear` returns `dx` and pushes the facts of `dW`:
a zero-bubble pipeline runs them in its bubbles (Qi et al., arXiv 2401.10241), an overlapped one
under an all-to-all. The trap: autograd never sees these gradients and fires no hooks; flush before
reading `weight.grad`, which may be a preset fp32 buffer of a bf16 weight.
"""

from collections import deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

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


@torch.no_grad()
def add_weight_grad(
    weight: Tensor, input: Tensor, grad_output: Tensor, groups: "Groups | None" = None
) -> None:
    """Add the gradient of a dense or grouped weight to `weight.grad`; set it if absent."""
    if groups is None:
        gradient = dense_weight_grad(input, grad_output)
    else:
        gradient = grouped_weight_grad(input, grad_output, groups)
    if weight.grad is None:
        weight.grad = gradient.to(weight.grad_dtype or weight.dtype)
    else:
        weight.grad.add_(gradient)


def dense_weight_grad(input: Tensor, grad_output: Tensor) -> Tensor:
    """`dy^T x`: `[..., in]`, `[..., out]` -> `[out, in]`."""
    return grad_output.flatten(0, -2).t() @ input.flatten(0, -2)


def grouped_weight_grad(input: Tensor, grad_output: Tensor, groups: "Groups") -> Tensor:
    """`dy_g^T x_g`: `[P, in]`, `[P, out]` -> `[G, out, in]`."""
    input, grad_output = input[: groups.total], grad_output[: groups.total]
    if input.is_cuda and input.dtype == torch.bfloat16 and groups.total > 0:
        return grouped_mm(grad_output.t(), input, offs=groups.offsets)
    pairs = zip(input.split(groups.sizes), grad_output.split(groups.sizes), strict=True)
    return torch.stack([dy.t() @ x for x, dy in pairs])

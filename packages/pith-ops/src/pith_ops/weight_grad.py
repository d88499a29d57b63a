"""Weight gradients computed later: a queue that backward passes push to and a schedule drains.

For `y = x W^T` the backward has two halves of equal cost. Only one is on the critical path:

    dgrad   dx = dy W          the layer below waits for it
    wgrad   dW = dy^T x        nobody waits for it before the step's reduction

A `WeightGradQueue` handed to `linear` or `grouped_linear` splits the two: the backward returns
`dx`, pushes the facts of `dW` (an entry: the two operands and the parameter) and leaves `dW` to
whoever owns the queue. A zero-bubble pipeline runs the entries in its bubbles (Qi et al., "Zero
Bubble Pipeline Parallelism", arXiv 2401.10241); an overlapped one runs them under an all-to-all.

The price is memory: an entry keeps `x` and `dy` alive until it has run.

The trap: autograd never sees these gradients. They are added straight into `weight.grad`, which may
be a preset fp32 buffer while the weight is bf16, so whoever reads gradients must have drained the
queue (`len(queue) == 0`) before. Hooks on the parameter do not fire.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

if TYPE_CHECKING:
    from pith_ops.grouped_linear import Groups


class WeightGradKind(Enum):
    """Which product an entry stands for."""

    DENSE = "dense"
    GROUPED = "grouped"


@dataclass(frozen=True, kw_only=True)
class WeightGradEntry:
    """The facts of one deferred weight gradient."""

    kind: WeightGradKind
    """Dense: one product; grouped: one product per expert."""
    weight: Tensor
    """Leaf `[out, in]` (dense) or `[G, out, in]` (grouped) whose `.grad` receives the sum."""
    input: Tensor
    """`[..., in]` (dense) or `[P, in]` in group order (grouped), detached."""
    grad_output: Tensor
    """`[..., out]` (dense) or `[P, out]` (grouped)."""
    groups: "Groups | None" = None
    """Rows of each group; None for dense entries."""


class WeightGradQueue:
    """Deferred weight gradients, run first in, first out.

    One queue per unit of deferred work: a schedule that runs the weight gradients of one backward
    at a time gives every backward its own queue.
    """

    def __init__(self) -> None:
        self._entries: deque[WeightGradEntry] = deque()

    def __len__(self) -> int:
        """Number of entries not run yet."""
        return len(self._entries)

    def push(self, entry: WeightGradEntry) -> None:
        """Add an entry.

        Raises:
            ValueError: the entry's weight is not a leaf that requires a gradient.
        """
        if not (entry.weight.is_leaf and entry.weight.requires_grad):
            raise ValueError(
                "weight: a deferred weight gradient needs a leaf that requires a gradient, got "
                f"a {'frozen' if entry.weight.is_leaf else 'computed'} tensor of shape "
                f"{tuple(entry.weight.shape)}; pass weight_grads=None for it"
            )
        self._entries.append(entry)

    def run_oldest(self) -> None:
        """Run the oldest entry; its operands are free afterwards.

        Raises:
            RuntimeError: the queue is empty.
        """
        if not self._entries:
            raise RuntimeError("run_oldest: the weight gradient queue is empty; check len() first")
        add_weight_grad(self._entries.popleft())

    def flush(self) -> None:
        """Run every entry, oldest first."""
        while self._entries:
            self.run_oldest()


@torch.no_grad()
def add_weight_grad(entry: WeightGradEntry) -> None:
    """Compute one entry's gradient and add it into `entry.weight.grad`, setting it if absent.

    An existing `.grad` keeps its dtype and storage: the sum is taken in that dtype.
    """
    match entry.kind:
        case WeightGradKind.DENSE:
            gradient = dense_weight_grad(entry.input, entry.grad_output)
        case WeightGradKind.GROUPED:
            if entry.groups is None:
                raise ValueError("groups: a grouped entry needs its groups, got None")
            gradient = grouped_weight_grad(entry.input, entry.grad_output, entry.groups)
    weight = entry.weight
    if weight.grad is None:
        weight.grad = gradient.to(weight.grad_dtype or weight.dtype)
    else:
        weight.grad.add_(gradient)


def dense_weight_grad(input: Tensor, grad_output: Tensor) -> Tensor:
    """`dy^T x`: `[..., in]` and `[..., out]` -> `[out, in]`, summed over all leading dims."""
    return grad_output.flatten(0, -2).t() @ input.flatten(0, -2)


def grouped_weight_grad(input: Tensor, grad_output: Tensor, groups: "Groups") -> Tensor:
    """`dy_g^T x_g` of every group: `[P, in]`, `[P, out]` -> `[G, out, in]`.

    A group without rows gives zeros. Rows past the last group are never read.
    """
    input, grad_output = input[: groups.total], grad_output[: groups.total]
    if input.is_cuda and input.dtype == torch.bfloat16 and groups.total > 0:
        return grouped_mm(grad_output.t(), input, offs=groups.offsets)
    return grouped_weight_grad_reference(input, grad_output, groups)


def grouped_weight_grad_reference(input: Tensor, grad_output: Tensor, groups: "Groups") -> Tensor:
    """The same by one product per group; a product over zero rows is zero by definition."""
    products = input.new_empty(len(groups.sizes), grad_output.shape[1], input.shape[1])
    inputs, grads = input[: groups.total], grad_output[: groups.total]
    pairs = zip(inputs.split(groups.sizes), grads.split(groups.sizes), strict=True)
    for product, (x, dy) in zip(products, pairs, strict=True):
        torch.mm(dy.t(), x, out=product)
    return products

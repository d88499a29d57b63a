"""One linear layer per expert over rows sorted by expert: `y_p = W_g x_p` for p in group g.

Layout: P rows in group order, so group g holds rows `offsets[g - 1] : offsets[g]`; weights are
`[G, out, in]`. Forward, dgrad and wgrad are one grouped GEMM each:

    y  [P, out]     = x  [P, in]  . W^T     per group
    dx [P, in]      = dy [P, out] . W       per group
    dW [G, out, in] = dy^T . x              per group, zeros for a group without rows

On CUDA in bf16 each is one call of `torch.nn.functional.grouped_mm`, which reads the group ends
from device memory: no host copy. Everywhere else, and as reference, a loop over the groups uses the
host sizes; with the 4 to 128 local experts of a rank that is short enough.

The trap: a buffer may have more rows than the groups cover (padding, a receive buffer sized to an
upper bound). Such rows hold garbage, NaN included, and a grouped GEMM leaves their outputs
unwritten. Here they are cut off before any product and their outputs are zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm

from pith_ops.weight_grad import (
    WeightGradEntry,
    WeightGradKind,
    WeightGradQueue,
    grouped_weight_grad,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Groups:
    """How rows sorted by group divide into groups, known on the host and on the device."""

    sizes: tuple[int, ...]
    """Rows of each of the G groups, on the host."""
    offsets: Tensor
    """`[G]` int32 on the device: end row of each group (the cumulative sum of `sizes`)."""

    @property
    def total(self) -> int:
        """Rows covered by the groups."""
        return sum(self.sizes)

    @classmethod
    def from_sizes(cls, sizes: Sequence[int], device: torch.device | str) -> "Groups":
        """Groups of the given sizes, with their offsets on `device` (an asynchronous copy).

        Raises:
            ValueError: a size is negative.
        """
        if any(size < 0 for size in sizes):
            raise ValueError(f"sizes: {list(sizes)} has a negative group size; sizes count rows")
        offsets = torch.tensor(list(accumulate(sizes)), dtype=torch.int32)
        if torch.device(device).type == "cuda":
            # A copy from pageable memory would make the host wait for the device.
            offsets = offsets.pin_memory()
        return cls(sizes=tuple(sizes), offsets=offsets.to(device, non_blocking=True))


def grouped_linear(
    x: Tensor, weight: Tensor, groups: Groups, weight_grads: WeightGradQueue | None = None
) -> Tensor:
    """Apply group g's weight to group g's rows.

    Args:
        x: `[P, in]` rows in group order, P >= `groups.total`.
        weight: `[G, out, in]` of the same dtype.
        groups: the G groups; any of them may be empty.
        weight_grads: where to push the weight gradient; None leaves it to autograd.

    Returns:
        `[P, out]`; rows past the last group are zero.

    Raises:
        ValueError: shapes or dtypes do not fit, or bf16 on CUDA with sizes that
            `grouped_mm` cannot take.
    """
    _check_operands(x, weight, groups)
    return _GroupedLinear.apply(x, weight, groups, weight_grads)


def grouped_linear_reference(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """The same, differentiable by autograd, one product per group."""
    rows = x[: groups.total].split(groups.sizes)
    outputs = [r @ w.t() for r, w in zip(rows, weight, strict=True)]
    return torch.cat([*outputs, x.new_zeros(x.shape[0] - groups.total, weight.shape[1])])


class _GroupedLinear(torch.autograd.Function):
    """Forward and dgrad by `_grouped_product`, wgrad now or pushed to the queue."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, groups: Groups, weight_grads: WeightGradQueue | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups, ctx.weight_grads = groups, weight_grads
        return _grouped_product(x, weight.transpose(1, 2), groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        grad_output = grad_output.contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _grouped_product(grad_output, weight, ctx.groups)
        if ctx.needs_input_grad[1]:
            if ctx.weight_grads is None:
                grad_weight = grouped_weight_grad(x, grad_output, ctx.groups)
            else:
                ctx.weight_grads.push(
                    WeightGradEntry(
                        kind=WeightGradKind.GROUPED,
                        weight=weight,
                        input=x.detach(),
                        grad_output=grad_output,
                        groups=ctx.groups,
                    )
                )
        return grad_x, grad_weight, None, None


def _grouped_product(x: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """`x_g @ matrices[g]` per group: `[P, m]`, `[G, m, n]` -> `[P, n]`, zeros past the end."""
    total = groups.total
    if x.is_cuda and x.dtype == torch.bfloat16 and total > 0:
        product = grouped_mm(x[:total], matrices, offs=groups.offsets)
        if total == x.shape[0]:
            return product
        return torch.cat([product, product.new_zeros(x.shape[0] - total, product.shape[1])])
    product = x.new_zeros(x.shape[0], matrices.shape[2])
    rows = zip(x[:total].split(groups.sizes), product[:total].split(groups.sizes), strict=True)
    for matrix, (source, target) in zip(matrices, rows, strict=True):
        torch.mm(source, matrix, out=target)
    return product


def _check_operands(x: Tensor, weight: Tensor, groups: Groups) -> None:
    """Raise the ValueErrors of `grouped_linear`."""
    if weight.ndim != 3 or x.ndim != 2 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: expected [P, in] and "
            "[G, out, in] with the same `in`"
        )
    if len(groups.sizes) != weight.shape[0] or groups.total > x.shape[0]:
        raise ValueError(
            f"groups: {len(groups.sizes)} groups of {groups.total} rows together do not fit "
            f"{weight.shape[0]} weights and {x.shape[0]} rows"
        )
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype}, weight {weight.dtype}: cast one, they must be equal")
    if x.is_cuda and x.dtype == torch.bfloat16 and (weight.shape[1] % 8 or weight.shape[2] % 8):
        raise ValueError(
            f"weight {tuple(weight.shape)}: bf16 on CUDA needs `out` and `in` to be multiples of "
            "8 (rows aligned to 16 bytes); choose such sizes or compute in fp32"
        )

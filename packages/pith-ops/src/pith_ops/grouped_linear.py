"""One linear layer per expert over rows sorted by expert: `y_p = W_g x_p` for p in group g.

Group g holds rows `offsets[g - 1] : offsets[g]`. Forward, dgrad and wgrad are one GEMM each:

    y  [P, out]     = x  [P, in]  . W^T     per group
    dx [P, in]      = dy [P, out] . W       per group
    dW [G, out, in] = dy^T . x              per group, zeros for a group without rows

by `grouped_mm` on CUDA in bf16, by a loop elsewhere; a bias's gradient is summed in fp32 or wider.
The trap: rows past the last group (padding) may hold NaN, and `grouped_mm` leaves their outputs
unwritten; here they are zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm

from pith_ops.device import accumulation_dtype
from pith_ops.linear import WeightGradQueue, weight_gradient


@dataclass(frozen=True, eq=False, kw_only=True)
class Groups:
    """How sorted rows divide into G groups."""

    sizes: tuple[int, ...]
    """Rows of each group."""
    offsets: Tensor
    """`[G]` int32, where each ends."""

    @property
    def total(self) -> int:
        """Rows of all groups."""
        return sum(self.sizes)

    @classmethod
    def from_sizes(cls, sizes: Sequence[int], device: torch.device | str) -> "Groups":
        """A ValueError if a size is negative."""
        if any(size < 0 for size in sizes):
            raise ValueError(f"sizes: {list(sizes)} has a negative size")
        offsets = torch.tensor(list(accumulate(sizes)), dtype=torch.int32)
        if torch.device(device).type == "cuda":
            # From pageable memory the host would wait.
            offsets = offsets.pin_memory()
        return cls(sizes=tuple(sizes), offsets=offsets.to(device, non_blocking=True))


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    groups: Groups,
    weight_grads: WeightGradQueue | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`x [P, in]` in group order, P >= `groups.total`, `weight [G, out, in]` -> `[P, out]`.

    `weight_grads` takes the weight gradient, autograd that of `bias [G, out]`. A ValueError says
    what does not fit.
    """
    fit = weight.ndim == 3 and x.ndim == 2 and x.shape[1] == weight.shape[2]
    fit = fit and len(groups.sizes) == len(weight) and groups.total <= len(x)
    if not fit or x.dtype != weight.dtype:
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)} {weight.dtype}, "
            f"{len(groups.sizes)} groups of {groups.total} rows: expected [P, in], [G, out, in] "
            "with the same `in`, G groups of at most P rows; dtypes must be equal"
        )
    if x.is_cuda and x.dtype == torch.bfloat16 and (weight.shape[1] % 8 or weight.shape[2] % 8):
        raise ValueError(
            f"weight {tuple(weight.shape)}: bf16 on CUDA needs multiples of 8; else use fp32"
        )
    shape, dtypes = tuple(weight.shape[:2]), (torch.float32, x.dtype)
    if bias is not None and (bias.shape != shape or bias.dtype not in dtypes):
        raise ValueError(
            f"bias {tuple(bias.shape)} {bias.dtype}: expected [G, out] = {shape} in {dtypes}"
        )
    return _GroupedLinear.apply(x, weight, groups, weight_grads, bias)


def grouped_linear_reference(
    x: Tensor, weight: Tensor, groups: Groups, bias: Tensor | None = None
) -> Tensor:
    """The same by autograd."""
    rows = x[: groups.total].split(groups.sizes)
    outputs = [r @ w.t() for r, w in zip(rows, weight, strict=True)]
    if bias is not None:
        outputs = [(y + b).to(x.dtype) for y, b in zip(outputs, bias, strict=True)]
    return torch.cat([*outputs, x.new_zeros(x.shape[0] - groups.total, weight.shape[1])])


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        groups: Groups,
        weight_grads: WeightGradQueue | None,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups, ctx.weight_grads = groups, weight_grads
        y = _grouped_product(x, weight.transpose(1, 2), groups)
        if bias is not None:
            # In place: gathered rows would be as large as y.
            for rows, row in zip(y[: groups.total].split(groups.sizes), bias, strict=True):
                rows.add_(row)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        groups, grad = ctx.groups, grad.contiguous()
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = _grouped_product(grad, weight, groups)
        if ctx.needs_input_grad[1] and ctx.weight_grads is None:
            grad_weight = weight_gradient(x, grad, groups)
        elif ctx.needs_input_grad[1]:
            ctx.weight_grads.push(weight, x, grad, groups)
        if ctx.needs_input_grad[4]:
            rows, dtype = grad[: groups.total].split(groups.sizes), accumulation_dtype(grad.dtype)
            grad_bias = torch.stack([dy.sum(0, dtype=dtype) for dy in rows])
        return grad_x, grad_weight, None, None, grad_bias


def _grouped_product(x: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """`x_g @ matrices[g]` per group: `[P, m]`, `[G, m, n]` -> `[P, n]`."""
    total = groups.total
    if not x.is_cuda or x.dtype != torch.bfloat16 or total == 0:
        return grouped_linear_reference(x, matrices.transpose(1, 2), groups)
    product = grouped_mm(x[:total], matrices, offs=groups.offsets)
    if total == len(x):
        return product
    return torch.cat([product, product.new_zeros(len(x) - total, product.shape[1])])

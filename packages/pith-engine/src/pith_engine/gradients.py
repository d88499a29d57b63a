"""What stands between backward and optimizer: one token count, one norm, one check.

    count_targets    N = non-ignored targets of the global batch, by which every loss is divided
    global_norm      sqrt(sum over all elements of all gradients of g^2), replicas counted once
    clip_gradients   g <- g * min(1, max_norm / norm), the same factor everywhere

The trap: clipping passes a NaN on, and one NaN destroys every weight: `raise_if_not_finite` first.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from pith_engine.contract import Batch
from pith_engine.fsdp import ShardedParameter
from pith_engine.mesh import Mesh
from pith_engine.runtime import all_reduce, gather_objects


def count_targets(batches: Iterable[Batch], mesh: Mesh) -> int:
    """N, from this rank's micro-batches."""
    counts = [batch.counted.sum() for batch in batches]
    return int(all_reduce(torch.stack(counts).sum(), mesh.data))


def global_norm(parameters: Sequence[ShardedParameter], mesh: Mesh) -> Tensor:
    """A float64 scalar, equal on every rank."""
    gradients = [p.grad for p in parameters if p.replicas.rank == 0]
    squares = torch.zeros((), dtype=torch.float64, device=parameters[0].grad.device)
    if squares.is_cpu:
        # A CPU's fp32 norm is 1e-4 off for half a million elements (measured, torch 2.11, 2.15).
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
        squares = torch.stack([squares, *norms]).square().sum()
    elif gradients:
        squares = torch.nn.utils.get_total_norm(gradients).double().square()
    return all_reduce(squares, mesh.world).sqrt()


def clip_gradients(parameters: Sequence[ShardedParameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients in place; no host sync."""
    scale = (max_norm / norm).clamp(max=1.0)
    for parameter in parameters:
        parameter.grad.mul_(scale)


def raise_if_not_finite(
    parameters: Sequence[ShardedParameter], norm: Tensor, step: int, mesh: Mesh
) -> None:
    """FloatingPointError on every rank, naming the parameters, if the norm is NaN or infinite."""
    if not torch.isfinite(norm):
        where = _not_finite({p.name: p.grad for p in parameters}, mesh)
        where = where or "no parameter: the norm itself overflows"
        raise FloatingPointError(f"step {step}: gradient not finite in {where}; no update follows")


def raise_if_weights_not_finite(
    parameters: Sequence[ShardedParameter], step: int, mesh: Mesh
) -> None:
    """The same for weights before they are saved."""
    if where := _not_finite({p.name: p.shard for p in parameters}, mesh):
        raise FloatingPointError(f"step {step}: weights not finite in {where}; nothing is saved")


def _not_finite(tensors: dict[str, Tensor], mesh: Mesh) -> str:
    found = []
    for name, tensor in tensors.items():
        if bad := tensor.numel() - int(torch.isfinite(tensor).sum()):
            found.append(f"{name} on rank {mesh.rank} ({bad} elements)")
    found = [*chain(*gather_objects(found, mesh.world))]
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")


class NanFinder(TorchFunctionMode):
    """While active, the first operation that makes a NaN out of none raises a FloatingPointError.

    It sees Python's backward functions, not those inside autograd.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        had_nan = _has_nan([args, {**kwargs, "out": None}])
        made = function(*args, **kwargs)
        # Memory that is not written yet may hold anything.
        if "empty" not in repr(function) and not had_nan and _has_nan(made):
            name = resolve_name(function) or repr(function)
            raise FloatingPointError(f"{name} makes a NaN of operands without one")
        return made


def _has_nan(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() and bool(value.isnan().any())
    children = value.values() if isinstance(value, dict) else value
    return isinstance(value, (list, tuple, dict)) and any(_has_nan(child) for child in children)

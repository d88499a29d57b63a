"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), half-split layout.

Elements i and i + D/2 of a head (the paper pairs 2i and 2i + 1 instead) are rotated by the phase
`position * inv_freq[i]`:

    inv_freq[i] = theta ** (-2i / D)
    out[i]       = x[i] * cos - x[i + D/2] * sin
    out[i + D/2] = x[i + D/2] * cos + x[i] * sin

The trap: bf16 cannot represent all positions above 256, so phases and rotation are in fp32 or
wider, rounded once at the end.
"""

import torch
from torch import Tensor


def rope_frequencies(
    head_dim: int,
    theta: float,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """`inv_freq [head_dim / 2]`, radians per position, fp32 or float64."""
    if head_dim % 2:
        raise ValueError(f"rope_frequencies: head_dim {head_dim} must be even")
    exponents = torch.arange(0, head_dim, 2, device=device).to(dtype) / head_dim
    return 1.0 / theta**exponents


def rope_table(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine for `positions [T]`: `[T, D/2]` in the dtype of `inv_freq`."""
    phases = positions.to(inv_freq.dtype)[:, None] * inv_freq
    return phases.cos(), phases.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x [T, h, D]` by `cos, sin [T, D/2]`; autograd keeps the table only, never `x`."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)

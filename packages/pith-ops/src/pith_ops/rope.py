"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), half-split layout.

Pair i of a head's vector consists of elements i and i + D/2 (Hugging Face's "rotate half"; the
paper pairs neighbours 2i and 2i + 1 instead), and is rotated by the phase `position * inv_freq[i]`:

    inv_freq[i] = theta ** (-2i / D)
    out[i]       = x[i] * cos - x[i + D/2] * sin
    out[i + D/2] = x[i + D/2] * cos + x[i] * sin

The table is made once per micro-batch and shared by all layers; only half of it is stored since
both elements of a pair have the same phase. Positions are given, never assumed: packed documents
count from 0 in each. The trap: in bf16 a position above 256 is not representable, so phases, cosine
and sine and the rotation itself are in fp32 or wider, and the result is rounded once.
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
    """Inverse frequencies `theta ** (-2i / head_dim)`, `[head_dim / 2]`, radians per position.

    Args:
        head_dim: size of a head's vector, even.
        theta: base of the geometric series, 10,000 in the paper.
        dtype: fp32 (what released models were trained with) or float64.
        device: where the result lives.

    Raises:
        ValueError: `head_dim` is odd.
    """
    if head_dim % 2:
        raise ValueError(f"rope_frequencies: head_dim {head_dim} must be even")
    exponents = torch.arange(0, head_dim, 2, device=device).to(dtype) / head_dim
    return 1.0 / theta**exponents


def rope_table(
    positions: Tensor, inv_freq: Tensor, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's phases, each `[T, D/2]`.

    Args:
        positions: `[T]` integers.
        inv_freq: `[D/2]` from `rope_frequencies`; its dtype is that of the phases.
        dtype: fp32 or float64 for the result; that of `inv_freq` when None.
    """
    phases = positions.to(inv_freq.dtype)[:, None] * inv_freq
    return phases.cos().to(dtype), phases.sin().to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x [T, h, D]` by the table `cos, sin [T, D/2]`; same shape and dtype as `x`.

    Plain torch: its backward is the rotation by the opposite angle, which autograd finds and for
    which it keeps the table only, never `x`.
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)

"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), with YaRN for longer contexts.

Elements i and i + D/2 of a head, or 2i and 2i + 1 (interleaved: the paper, DeepSeek), are rotated
by the phase `position * inv_freq[i]`:

    inv_freq[i] = theta ** (-2i / D)
    out[i]       = x[i] * cos - x[i + D/2] * sin
    out[i + D/2] = x[i + D/2] * cos + x[i] * sin

YaRN (Peng et al. 2023, arXiv 2309.00071) divides frequencies of few turns in the original context
by `factor`; that of index i(r) makes r turns:

    i(r)     = D ln(original / (2 pi r)) / (2 ln theta)
    ramp     = clamp((i - i(beta_fast)) / (i(beta_slow) - i(beta_fast)), 0, 1)
    inv_freq = inv_freq * (1 - ramp) + inv_freq / factor * ramp

The traps: bf16 lacks some positions above 256: all is in fp32 or wider, rounded once; GPT-OSS does
not `truncate` i(beta_fast) and i(beta_slow).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """Fields named as by Hugging Face."""

    factor: float
    """Longest context over the original."""
    original_max_position_embeddings: int
    """In tokens."""
    beta_fast: float = 32.0
    """Turns from which frequencies are kept."""
    beta_slow: float = 1.0
    """Turns up to which they are divided."""
    mscale: float | None = None
    """DeepSeek's, in `table_scale`; None or 0: none."""
    mscale_all_dim: float | None = None
    """That in `softmax_scale`."""
    attention_factor: float | None = None
    """`table_scale`, if given."""
    truncate: bool = True
    """Whether the ramp spans whole indices."""

    def violations(self, path: str) -> list[str]:
        """What is out of range, a line each."""
        factor, slow, fast = self.factor, self.beta_slow, self.beta_fast
        length, scale = self.original_max_position_embeddings, self.attention_factor
        ramped, scaled = 0 < slow < fast < math.inf, scale is None or 0 < scale < math.inf
        mscales = self.mscale or 0, self.mscale_all_dim or 0
        # About one mscale alone DeepSeek's code and transformers disagree.
        paired = mscales == (0, 0) or 0 < min(mscales) <= max(mscales) < math.inf
        rules = (
            (1 <= factor < math.inf, f"factor = {factor}: must be finite and at least 1"),
            (length >= 1, f"original_max_position_embeddings = {length}: must be at least 1"),
            (ramped, f"beta_fast = {fast}: must be finite and above beta_slow = {slow} > 0"),
            (scaled, f"attention_factor = {scale}: must be positive and finite"),
            (paired, f"mscale, mscale_all_dim = {mscales}: must be both 0 or both in (0, inf)"),
        )
        return [f"{path}.{fault}" for holds, fault in rules if not holds]

    @property
    def table_scale(self) -> float:
        """That of `rope_table`."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def softmax_scale(self) -> float:
        """DeepSeek's factor of the softmax scale."""
        return self._magnitude(self.mscale_all_dim or 0.0) ** 2

    def _magnitude(self, coefficient: float) -> float:
        return 0.1 * coefficient * math.log(self.factor) + 1.0


def rope_frequencies(
    head_dim: int,
    theta: float,
    *,
    yarn: Yarn | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """`inv_freq [head_dim / 2]`, radians per position, fp32 or float64."""
    if head_dim % 2:
        raise ValueError(f"rope_frequencies: head_dim {head_dim} must be even")
    exponents = torch.arange(0, head_dim, 2, device=device).to(dtype) / head_dim
    powers = theta**exponents
    if yarn is None:
        return 1.0 / powers
    original = yarn.original_max_position_embeddings
    if theta <= 1:
        raise ValueError(f"rope_frequencies: theta {theta} must be above 1 for YaRN")
    low, high = (
        head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (yarn.beta_fast, yarn.beta_slow)
    )
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    # As in the released code.
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0
    indices = torch.arange(head_dim // 2, device=device).to(dtype)
    kept = 1 - ((indices - low) / (high - low)).clamp(0, 1)
    # In this order fp32 bits equal transformers'.
    return 1.0 / (yarn.factor * powers) * (1 - kept) + 1.0 / powers * kept


def rope_table(positions: Tensor, inv_freq: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """`scale` times cosine and sine for `positions [T]`: `[T, D/2]` in `inv_freq`'s dtype."""
    phases = positions.to(inv_freq.dtype)[:, None] * inv_freq
    return phases.cos() * scale, phases.sin() * scale


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate `x [T, h, D]` by `cos, sin [T, D/2]`; autograd never keeps `x`."""
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1))
    dim = -1 if interleaved else -2
    first, second = pairs.unbind(dim)
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim)
    return rotated.flatten(-2).to(x.dtype)

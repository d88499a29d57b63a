"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), with YaRN for longer contexts.

Elements i and i + D/2 of a head (half-split), or 2i and 2i + 1 (interleaved, as in the paper and
DeepSeek), are rotated by the phase `position * inv_freq[i]`:

    inv_freq[i] = theta ** (-2i / D)
    out[i]       = x[i] * cos - x[i + D/2] * sin
    out[i + D/2] = x[i + D/2] * cos + x[i] * sin

YaRN (Peng et al. 2023, arXiv 2309.00071) divides by `factor` the frequencies that turn less than
`beta_slow` times within the original context, keeps those that turn more than `beta_fast` times,
and blends between (r counts the turns, i(r) is the frequency that makes them):

    i(r)     = D ln(original / (2 pi r)) / (2 ln theta)
    ramp     = clamp((i - i(beta_fast)) / (i(beta_slow) - i(beta_fast)), 0, 1)
    inv_freq = inv_freq * (1 - ramp) + inv_freq / factor * ramp

The traps: bf16 cannot represent all positions above 256, so phases and rotation are in fp32 or
wider, rounded once at the end; `truncate` rounds i(beta_fast) down and i(beta_slow) up, which
GPT-OSS switches off.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN's parameters, under Hugging Face's names in `rope_scaling` or `rope_parameters`."""

    factor: float
    """Longest context over the original one."""
    original_max_position_embeddings: int
    """Tokens of the context before YaRN."""
    beta_fast: float = 32.0
    """Frequencies with more turns in the original context stay as they are."""
    beta_slow: float = 1.0
    """Frequencies with fewer turns are divided by `factor`."""
    mscale: float | None = None
    """DeepSeek's coefficient of ln(factor) in the table's scale; None or 0: none."""
    mscale_all_dim: float | None = None
    """DeepSeek's coefficient in the softmax scale, which the table's is divided by."""
    attention_factor: float | None = None
    """The table's scale, where it is given."""
    truncate: bool = True
    """Whether the ramp begins and ends at whole indices."""

    def violations(self, path: str) -> list[str]:
        """What is out of range, a line each, its field under `path`."""
        values = {
            "factor": (self.factor, 1),
            "original_max_position_embeddings": (self.original_max_position_embeddings, 1),
            "mscale": (self.mscale or 0, 0),
            "mscale_all_dim": (self.mscale_all_dim or 0, 0),
        }
        faults = [
            f"{path}.{name} = {value}: must be finite and at least {least}"
            for name, (value, least) in values.items()
            if not least <= value < math.inf
        ]
        if not 0 < self.beta_slow < self.beta_fast < math.inf:
            faults.append(
                f"{path}.beta_fast = {self.beta_fast}: must be finite and above "
                f"beta_slow = {self.beta_slow}, which must be above 0"
            )
        if self.attention_factor is not None and not 0 < self.attention_factor < math.inf:
            faults.append(
                f"{path}.attention_factor = {self.attention_factor}: must be finite and above 0"
            )
        if bool(self.mscale) != bool(self.mscale_all_dim):
            # DeepSeek's code and transformers read one without the other differently.
            faults.append(
                f"{path}.mscale = {self.mscale}: must be given if and only if mscale_all_dim = "
                f"{self.mscale_all_dim} is; for another scale of the table set attention_factor"
            )
        return faults

    @property
    def table_scale(self) -> float:
        """What cosine and sine are multiplied by: `rope_table`'s `scale`."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def softmax_scale(self) -> float:
        """What DeepSeek multiplies `head_dim ** -0.5` by; 1 without `mscale_all_dim`."""
        return self._magnitude(self.mscale_all_dim or 0.0) ** 2

    def _magnitude(self, coefficient: float) -> float:
        return 0.1 * coefficient * math.log(self.factor) + 1.0

    def _ramp(self, head_dim: int, theta: float) -> tuple[float, float]:
        """Indices where the blend begins and ends, clamped as released models' code does."""
        original = self.original_max_position_embeddings
        low, high = (
            head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        return low, high + 0.001 if low == high else high


def rope_frequencies(
    head_dim: int,
    theta: float,
    *,
    yarn: Yarn | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """`inv_freq [head_dim / 2]`, radians per position, fp32 or float64.

    A ValueError refuses an odd `head_dim`, and YaRN with a `theta` of 1 or less.
    """
    if head_dim % 2:
        raise ValueError(f"rope_frequencies: head_dim {head_dim} must be even")
    exponents = torch.arange(0, head_dim, 2, device=device).to(dtype) / head_dim
    powers = theta**exponents
    if yarn is None:
        return 1.0 / powers
    if theta <= 1:
        raise ValueError(f"rope_frequencies: theta {theta} must be above 1 for YaRN")
    low, high = yarn._ramp(head_dim, theta)
    indices = torch.arange(head_dim // 2, device=device).to(dtype)
    kept = 1 - ((indices - low) / (high - low)).clamp(0, 1)
    # In this order of operations fp32 values equal transformers' bit for bit.
    return 1.0 / (yarn.factor * powers) * (1 - kept) + 1.0 / powers * kept


def rope_table(positions: Tensor, inv_freq: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """`scale` times cosine and sine for `positions [T]`: `[T, D/2]` in the dtype of `inv_freq`."""
    phases = positions.to(inv_freq.dtype)[:, None] * inv_freq
    cos, sin = phases.cos(), phases.sin()
    return (cos, sin) if scale == 1 else (cos * scale, sin * scale)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate `x [T, h, D]` by `cos, sin [T, D/2]`; autograd keeps the table only, never `x`.

    The output is in the layout of the input: halves, or pairs (2i, 2i + 1) if `interleaved`.
    """
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1))
    dim = -1 if interleaved else -2
    first, second = pairs.unbind(dim)
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim)
    return rotated.flatten(-2).to(x.dtype)

"""The learning rate of a step: warmup, then constant, cosine or WSD.

With step t from 1, total steps S, warmup steps W, decay steps D and final ratio r, it is
`peak * factor`:

    warmup    t <= W        t / W
    constant  t >  W        1
    cosine    t >  W        r + (1 - r) * (1 + cos(pi * (t - W) / (S - W))) / 2   (arXiv 1608.03983)
    wsd       t >  S - D    1 - (1 - r) * (t - (S - D)) / D, and 1 before     (arXiv 2404.06395)

WSD (warmup, stable, decay) decays linearly (arXiv 2405.18392); its stable part ignores S, so a run
can be prolonged. Where warmup and decay meet, the smaller factor holds.
"""

from dataclasses import dataclass
from math import cos, isfinite, pi
from typing import Literal

from pith_engine.violations import raise_violations


@dataclass(frozen=True, kw_only=True)
class LearningRateConfig:
    """The learning rate of each step of a run."""

    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    """What follows the warmup."""
    peak: float
    """Rate at the end of the warmup."""
    warmup_steps: int = 0
    """Steps of linear warmup; the last of them runs at the peak."""
    final_ratio: float | None = None
    """Rate of the last step over the peak, 0 to 1 (default 0.1); cosine and wsd only."""
    decay_steps: int | None = None
    """Last steps of the run that decay; wsd only, which needs it."""

    def violations(self) -> list[str]:
        """What is out of range or of another schedule, a line each."""
        found, ratio, decay = [], self.final_ratio, self.decay_steps
        if self.schedule not in ("constant", "cosine", "wsd"):
            found.append(f"lr.schedule is {self.schedule!r}; allowed are constant, cosine, wsd")
        if not (isfinite(self.peak) and self.peak > 0):
            found.append(f"lr.peak is {self.peak}; allowed are finite rates above 0, e.g. 3e-4")
        if self.warmup_steps < 0:
            found.append(f"lr.warmup_steps is {self.warmup_steps}; allowed are 0 and more")
        if ratio is not None and not 0 <= ratio <= 1:
            found.append(f"lr.final_ratio is {ratio}; allowed are 0 to 1")
        if self.schedule == "constant" and ratio is not None:
            fix = "set --lr.final-ratio None or use cosine or wsd"
            found.append(f"lr.final_ratio is {ratio} but schedule constant never decays; {fix}")
        if self.schedule == "wsd" and (decay is None or decay < 1):
            found.append(f"lr.decay_steps is {decay}; schedule wsd needs 1 or more")
        if self.schedule != "wsd" and decay is not None:
            fix = "set --lr.decay-steps None or use wsd"
            found.append(f"lr.decay_steps is {decay} but only schedule wsd reads it; {fix}")
        return found


def learning_rate(config: LearningRateConfig, step: int, total_steps: int) -> float:
    """The rate of a step, from 1 to `total_steps`; a ValueError outside or for a wrong field."""
    raise_violations(config.violations(), "learning rate")
    if not 1 <= step <= total_steps:
        raise ValueError(f"step is {step}; allowed are 1 to total_steps {total_steps}")
    warmup = min(1.0, step / max(config.warmup_steps, 1))
    # A tenfold decay by default: Chinchilla, arXiv 2203.15556.
    final = 0.1 if config.final_ratio is None else config.final_ratio
    decay = 1.0
    if config.schedule == "cosine" and step > config.warmup_steps:
        progress = (step - config.warmup_steps) / (total_steps - config.warmup_steps)
        decay = final + (1 - final) * (1 + cos(pi * progress)) / 2
    if config.schedule == "wsd" and config.decay_steps is not None:
        decayed = max(0, step - (total_steps - config.decay_steps))
        decay = 1 - (1 - final) * decayed / config.decay_steps
    return config.peak * min(warmup, decay)


def reaches_peak(config: LearningRateConfig, total_steps: int) -> bool:
    """Whether warmup and decay leave a step for the peak rate."""
    return max(1, config.warmup_steps) + (config.decay_steps or 0) <= total_steps

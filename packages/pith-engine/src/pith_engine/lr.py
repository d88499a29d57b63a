"""The learning rate of a step: warmup, then constant, cosine or WSD (warmup, stable, decay).

With step t from 1, total steps S, warmup steps W, decay steps D and final ratio r, it is
`peak * factor`:

    warmup    t <= W        t / W
    constant  t >  W        1
    cosine    t >  W        r + (1 - r) * (1 + cos(pi * (t - W) / (S - W))) / 2   (arXiv 1608.03983)
    wsd       t >  S - D    1 - (1 - r) * (t - (S - D)) / D, and 1 before     (arXiv 2404.06395)

WSD's decay is linear (2405.18392); its stable part ignores S, so a run can be prolonged. The trap:
where warmup and decay meet, the smaller factor holds.
"""

from dataclasses import dataclass
from math import cos, inf, pi
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
    """Steps of linear warmup; the last runs at the peak."""
    final_ratio: float | None = None
    """Rate of the last step over the peak, 0 to 1 (default 0.1); cosine and wsd only."""
    decay_steps: int | None = None
    """Last steps, which decay; wsd only, which needs it."""

    def violations(self) -> list[str]:
        """What is out of range or of another schedule, a line each."""
        schedule, peak, warmup = self.schedule, self.peak, self.warmup_steps
        ratio, decay, allowed = self.final_ratio, self.decay_steps, ("constant", "cosine", "wsd")
        lacks_decay = schedule == "wsd" and (decay or 0) < 1
        is_sound = {
            f"schedule is {schedule!r}; allowed are {', '.join(allowed)}": schedule in allowed,
            f"peak is {peak}; allowed are finite rates above 0, e.g. 3e-4": 0 < peak < inf,
            f"warmup_steps is {warmup}; allowed are 0 and more": warmup >= 0,
            f"final_ratio is {ratio}; allowed are 0 to 1": ratio is None or 0 <= ratio <= 1,
            f"final_ratio is {ratio} but schedule constant never decays; set --lr.final-ratio None "
            "or use cosine or wsd": schedule != "constant" or ratio is None,
            f"decay_steps is {decay}; schedule wsd needs 1 or more": not lacks_decay,
            f"decay_steps is {decay} but only schedule wsd reads it; set --lr.decay-steps None or "
            "use wsd": schedule == "wsd" or decay is None,
        }
        return [f"lr.{fault}" for fault, sound in is_sound.items() if not sound]


def learning_rate(config: LearningRateConfig, step: int, total_steps: int) -> float:
    """The rate of a step from 1 to `total_steps`, else a ValueError."""
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
    if config.decay_steps is not None:
        decayed = max(0, step - total_steps + config.decay_steps)
        decay = 1 - (1 - final) * decayed / config.decay_steps
    return config.peak * min(warmup, decay)


def reaches_peak(config: LearningRateConfig, total_steps: int) -> bool:
    """Whether warmup and decay leave a step for the peak rate."""
    return max(1, config.warmup_steps) + (config.decay_steps or 0) <= total_steps

"""The learning rate: exact values at every corner, torch's own cosine, refusals by field."""

import pytest
import torch
from pith_engine.lr import LearningRateConfig, learning_rate, reaches_peak


def rates(config: LearningRateConfig, total: int) -> list[float]:
    return [learning_rate(config, step, total) for step in range(1, total + 1)]


def test_constant():
    config = LearningRateConfig(schedule="constant", peak=0.5)
    assert rates(config, 3) == [0.5] * 3
    config = LearningRateConfig(schedule="constant", peak=0.5, warmup_steps=4)
    assert rates(config, 6) == [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]


def test_cosine_by_hand():
    config = LearningRateConfig(schedule="cosine", peak=2.0, warmup_steps=2, final_ratio=0.5)
    # Progress 0, 1/4, 1/2, 3/4, 1 after the warmup: 2 * (0.5 + 0.25 * (1 + cos)).
    wanted = [1.0, 2.0, 1.853553390593274, 1.5, 1.146446609406726, 1.0]
    assert rates(config, 6) == pytest.approx(wanted, rel=1e-14)


def test_cosine_equals_torch():
    """The second half of torch's Hann window is the cosine from 1 to 0."""
    window = torch.signal.windows.hann(2 * 17 + 1, dtype=torch.float64)[18:]
    config = LearningRateConfig(peak=3e-3, final_ratio=0.0)
    expected = [3e-3 * factor for factor in window.tolist()]
    assert rates(config, 17) == pytest.approx(expected, rel=1e-12, abs=1e-16)


def test_wsd_by_hand():
    config = LearningRateConfig(
        schedule="wsd", peak=1.0, warmup_steps=2, decay_steps=4, final_ratio=0.0
    )
    assert rates(config, 10) == [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]


def test_wsd_stable_part_does_not_depend_on_the_length():
    config = LearningRateConfig(schedule="wsd", peak=1.0, warmup_steps=3, decay_steps=4)
    assert rates(config, 20)[:16] == rates(config, 40)[:16]


def test_last_step_is_the_final_ratio():
    for schedule, decay_steps in (("cosine", None), ("wsd", 5)):
        config = LearningRateConfig(
            schedule=schedule, peak=4.0, warmup_steps=3, decay_steps=decay_steps
        )
        assert learning_rate(config, 20, 20) == pytest.approx(0.4, rel=1e-14)
        assert learning_rate(config, 3, 20) == 4.0


def test_runs_shorter_than_warmup_and_decay():
    config = LearningRateConfig(schedule="cosine", peak=1.0, warmup_steps=10)
    assert rates(config, 4) == [0.1, 0.2, 0.3, 0.4]
    config = LearningRateConfig(
        schedule="wsd", peak=1.0, warmup_steps=4, decay_steps=4, final_ratio=0.0
    )
    assert rates(config, 4) == [0.25, 0.5, 0.25, 0.0]
    assert rates(LearningRateConfig(peak=1.0, warmup_steps=5), 5)[-1] == 1.0


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_a_run_too_short_for_its_peak_is_known(schedule):
    for warmup in range(4):
        for decay in range(1, 4) if schedule == "wsd" else [None]:
            config = LearningRateConfig(
                schedule=schedule, peak=1.0, warmup_steps=warmup, decay_steps=decay
            )
            for total in range(1, 9):
                # The cosine without warmup has left the peak at its first step.
                below = schedule == "cosine" and not warmup
                has_peak = below or max(rates(config, total)) == 1.0
                assert reaches_peak(config, total) == has_peak, (config, total)


@pytest.mark.parametrize("step", [0, -1, 11])
def test_steps_outside_the_run_are_refused(step):
    with pytest.raises(ValueError, match=f"step is {step}; allowed are 1 to total_steps 10"):
        learning_rate(LearningRateConfig(peak=1.0), step, 10)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"schedule": "linear"}, "schedule is 'linear'; allowed are constant, cosine, wsd"),
        ({"peak": 0.0}, "peak is 0.0"),
        ({"peak": -1e-3}, "peak is -0.001"),
        ({"peak": float("nan")}, "peak is nan"),
        ({"peak": float("inf")}, "peak is inf"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"final_ratio": 1.5}, "final_ratio is 1.5"),
        ({"final_ratio": float("nan")}, "final_ratio is nan"),
        ({"schedule": "constant", "final_ratio": 0.1}, "constant never decays"),
        ({"schedule": "wsd"}, "decay_steps is None; schedule wsd needs 1 or more"),
        ({"schedule": "wsd", "decay_steps": 0}, "decay_steps is 0"),
        ({"schedule": "cosine", "decay_steps": 5}, "only schedule wsd"),
    ],
)
def test_bad_fields_are_refused(fields, match):
    with pytest.raises(ValueError, match=match):
        learning_rate(LearningRateConfig(**{"peak": 1.0, **fields}), 1, 10)


def test_all_violations_come_at_once():
    found = LearningRateConfig(peak=0.0, warmup_steps=-2, decay_steps=3).violations()
    assert [line.split()[0] for line in found] == ["lr.peak", "lr.warmup_steps", "lr.decay_steps"]

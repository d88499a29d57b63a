"""Time limits of the test tiers: a tier that takes over 80% of its budget fails.

`--durations` (in `pyproject.toml`) prints the ten slowest tests, the candidates to shorten. Nothing
here imports torch or one of the packages: each layer's tests run with only that layer installed.
"""

import time

import pytest

BUDGET_SECONDS = {"cpu": 15 * 60, "slow": 30 * 60, "core": 4 * 60}
"""Wall-clock budgets on two cores; the whole of `.ci/run` stays under an hour."""
SHARE = 0.8

STARTED = pytest.StashKey[float]()


def tier(config: pytest.Config) -> str | None:
    """Which tier a `-m` expression selects, or None for hand-picked tests."""
    expression = config.option.markexpr
    if expression in ("slow", "core"):
        return expression
    return "cpu" if expression.startswith("not slow") else None


def pytest_configure(config: pytest.Config) -> None:
    """Start the clock before collection, whose imports are part of the tier's time."""
    config.stash[STARTED] = time.monotonic()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a green tier that used more than its share of the budget."""
    name = tier(session.config)
    seconds = time.monotonic() - session.config.stash[STARTED]
    if name and exitstatus == 0 and seconds > SHARE * BUDGET_SECONDS[name]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter) -> None:
    """Say how much of its budget the tier used."""
    config = terminalreporter.config
    if name := tier(config):
        seconds, budget = time.monotonic() - config.stash[STARTED], BUDGET_SECONDS[name]
        verdict = "too slow" if seconds > SHARE * budget else "fine"
        terminalreporter.write_line(
            f"tier {name}: {seconds:.0f} s of {budget} s, {verdict} (limit {SHARE:.0%})"
        )

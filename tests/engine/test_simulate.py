"""The simulator against bubbles known from the literature and against timelines by hand."""

import random
from dataclasses import replace

import pytest
from pith_engine.schedule import ActionKind, ScheduleTable, dualpipev, forward_only
from pith_engine.simulate import ScheduleCosts, Timeline, simulate, unit_schedule_costs


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8, 16])
def test_bubble_is_dualpipes(pp):
    """(pp - 1) (F&B + B - 3 W) of DeepSeek's table, with F = 1, B = 2, W = 1, F&B = 3."""
    for num_micro_batches in (2 * pp, 3 * pp + 1):
        timeline = simulate(dualpipev(pp, num_micro_batches), unit_schedule_costs(pp))
        work = 2 * 3 * num_micro_batches
        assert timeline.busy == (work,) * pp
        assert timeline.duration == work + (pp - 1) * (3 + 2 - 3)
        assert timeline.bubble_fraction == pytest.approx(1 - work / timeline.duration, abs=1e-12)
        assert max(timeline.peak_live) == 2 * pp + 1


@pytest.mark.parametrize("pp", [1, 2, 5, 16])
def test_forward_only_has_no_gap(pp):
    """Chunk c starts micro-batch m at c + 2 m: 2 n + 2 pp - 2 units in all, at pp = 1 just 2 n."""
    num_micro_batches = pp + 3
    timeline = simulate(forward_only(pp, num_micro_batches), unit_schedule_costs(pp))
    assert timeline.duration == 2 * num_micro_batches + 2 * pp - 2
    assert timeline.busy == (2 * num_micro_batches,) * pp
    table = forward_only(pp, num_micro_batches)
    for row, starts in zip(table, timeline.starts, strict=True):
        for slot, start in zip(row, starts, strict=True):
            assert start <= slot.actions[0].chunk + 2 * slot.actions[0].micro_batch


def test_two_ranks_by_hand():
    """Costs that differ by chunk, and the wait for a meeting."""
    costs = ScheduleCosts(
        forward=(1, 2, 3, 4),
        backward_input=(0,) * 4,
        weight=(0,) * 4,
        transfer=0.5,
    )
    timeline = simulate(forward_only(2, 1), costs)
    # Rank 0: F0 0-1; meets rank 1 at 1 -> 1.5; F1 1.5-3.5, F2 3.5-6.5; meets at 6.5 -> 7.
    assert timeline.starts == ((0, 7), (1.5, 3.5))
    assert timeline.ends == ((1, 11), (3.5, 6.5))
    assert timeline.duration == 11
    assert timeline.busy == (5, 5)
    assert timeline.bubble_fraction == 1 - 10 / 22


def test_overlap_and_split_costs():
    costs = ScheduleCosts(
        forward=(1, 10), backward_input=(100, 1000), weight=(0.25, 0.5), overlap=0.5
    )
    table = dualpipev(1, 2)
    durations = [costs.duration(slot) for slot in table[0]]
    assert durations == [1, 10, 1, 1000.5, 0.5 * (10 + 100.25), 1000.5, 100, 0.25]
    assert simulate(table, costs).duration == sum(durations)


def data_bound(table: ScheduleTable, costs: ScheduleCosts) -> float:
    """The end of a table if data travelled by itself: no order of any placement can undercut it."""
    ready: dict[tuple, float] = {}
    clocks = [0.0] * len(table)
    reached = [0] * len(table)
    last = 2 * len(table) - 1
    while any(k < len(row) for k, row in zip(reached, table, strict=True)):
        for rank, row in enumerate(table):
            while reached[rank] < len(row):
                parts = row[reached[rank]].actions
                needs = []
                for p in parts:
                    if p.kind is ActionKind.FORWARD and p.chunk > 0:
                        needs.append(("hidden", p.chunk - 1, p.micro_batch))
                    elif p.kind not in (ActionKind.FORWARD, ActionKind.WEIGHT) and p.chunk < last:
                        needs.append(("gradient", p.chunk + 1, p.micro_batch))
                if any(need not in ready for need in needs):
                    break
                start = max([clocks[rank], *(ready[need] for need in needs)])
                clocks[rank] = start + costs.duration(row[reached[rank]])
                for p in parts:
                    name = "hidden" if p.kind is ActionKind.FORWARD else "gradient"
                    if p.kind is not ActionKind.WEIGHT:
                        ready[name, p.chunk, p.micro_batch] = clocks[rank]
                reached[rank] += 1
    return max(clocks)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_transfers_cost_little_beyond_the_data(pp):
    """Meetings hold ranks up by at most 6%, whatever the costs; at unit costs not at all."""
    table = dualpipev(pp, 4 * pp)
    unit = unit_schedule_costs(pp)
    assert simulate(table, unit).duration == data_bound(table, unit)
    generator = random.Random(pp)
    for _ in range(10):
        costs = ScheduleCosts(
            forward=tuple(generator.uniform(0.9, 1.1) for _ in range(2 * pp)),
            backward_input=tuple(generator.uniform(1.0, 1.5) for _ in range(2 * pp)),
            weight=tuple(generator.uniform(0.6, 1.0) for _ in range(2 * pp)),
            overlap=generator.uniform(0.8, 1.0),
        )
        bound = data_bound(table, costs)
        assert bound - 1e-9 <= simulate(table, costs).duration <= 1.06 * bound


def test_overlap_hides_time():
    table = dualpipev(4, 16)
    slow, fast = (
        simulate(table, replace(unit_schedule_costs(4), overlap=overlap)) for overlap in (1.0, 0.8)
    )
    assert isinstance(slow, Timeline)
    assert fast.duration < 0.87 * slow.duration


def test_wrong_costs_are_refused():
    with pytest.raises(ValueError, match=r"costs hold \[4, 4, 4\] chunks; each needs 2 \* pp = 8"):
        simulate(dualpipev(4, 8), unit_schedule_costs(2))
    with pytest.raises(ValueError, match=r"costs hold \[2, 2, 1\] chunks"):
        simulate(forward_only(1, 1), replace(unit_schedule_costs(1), weight=(1,)))

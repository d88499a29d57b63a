"""Run a schedule table with given costs: when each slot runs, and the bubble.

The rules are the executor's (`schedule.py`), waits for late receives included. With one cost for
all chunks, DualPipeV's bubble is `(pp - 1) * (F&B + B - 3 W)` on every rank (DeepSeek DualPipe):
F&B an overlapped slot, B a full backward, W its weight part.
"""

from dataclasses import dataclass

from pith_engine.schedule import Action, ActionKind, ScheduleTable
from pith_engine.schedule_check import meetings, peak_live


@dataclass(frozen=True, kw_only=True)
class ScheduleCosts:
    """Durations in any unit; tuples hold a value for each of the `2 * pp` chunks."""

    forward: tuple[float, ...]
    """Of a forward."""
    backward_input: tuple[float, ...]
    """Of a backward without weight gradients."""
    weight: tuple[float, ...]
    """Of the weight gradients."""
    overlap: float = 1.0
    """An overlapped slot over the sum of its parts."""
    transfer: float = 0.0
    """Of an exchange, once all partners have started."""

    def __post_init__(self):
        if not len(self.forward) == len(self.backward_input) == len(self.weight):
            raise ValueError(
                f"forward, backward_input and weight have {len(self.forward)}, "
                f"{len(self.backward_input)} and {len(self.weight)} values; each needs 2 * pp"
            )

    def duration(self, action: Action) -> float:
        """How long one action runs."""
        total = 0.0
        for part in action.parts:
            if part.kind is ActionKind.FORWARD:
                total += self.forward[part.chunk]
            if part.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
                total += self.backward_input[part.chunk]
            if part.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT):
                total += self.weight[part.chunk]
        return total * self.overlap if action.kind is ActionKind.OVERLAP else total


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When every slot of a table runs, from time 0."""

    starts: tuple[tuple[float, ...], ...]
    """Of every slot, one row per rank."""
    ends: tuple[tuple[float, ...], ...]
    """As `starts`."""
    peak_live: tuple[int, ...]
    """Of each rank, as `schedule_check.peak_live` counts."""

    @property
    def duration(self) -> float:
        """From the first start to the last end."""
        return max(row[-1] for row in self.ends)

    @property
    def busy(self) -> tuple[float, ...]:
        """Of each rank."""
        rows = zip(self.starts, self.ends, strict=True)
        return tuple(sum(e - s for s, e in zip(*row, strict=True)) for row in rows)

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time without compute."""
        return 1 - sum(self.busy) / (len(self.ends) * self.duration)


def unit_schedule_costs(pp: int) -> ScheduleCosts:
    """The same cost for every chunk, in units of one forward."""
    ones = (1.0,) * (2 * pp)
    return ScheduleCosts(forward=ones, backward_input=ones, weight=ones)


def simulate(table: ScheduleTable, costs: ScheduleCosts) -> Timeline:
    """Run a table; ValueError for costs of other chunks or a deadlock."""
    if len(costs.forward) != 2 * len(table):
        raise ValueError(f"costs hold {len(costs.forward)} chunks; {len(table)} ranks have twice")
    starts: list[list[float]] = [[] for _ in table]
    ends: list[list[float]] = [[] for _ in table]
    # Start of every exchange so far; `meetings` orders them so that partners are known.
    begun = {(rank, 0): 0.0 for rank in range(len(table))}
    for meeting in meetings(table):
        rank, position = meeting.rank, meeting.position
        over = begun[rank, position]
        if meeting.partners:
            over = max(over, *(begun[partner] for partner in meeting.partners)) + costs.transfer
        if position == len(table[rank]):
            continue
        slot = table[rank][position]
        start = max(ends[rank][-1:], default=0.0)
        if slot.receives:
            start = max(start, over)
        starts[rank].append(start)
        ends[rank].append(start + costs.duration(slot.action))
        begun[rank, position + 1] = max(over, ends[rank][-1])
    return Timeline(
        starts=tuple(map(tuple, starts)),
        ends=tuple(map(tuple, ends)),
        peak_live=tuple(peak_live(row) for row in table),
    )

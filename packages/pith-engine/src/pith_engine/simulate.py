"""Run a schedule table with given costs: when each slot runs, and the bubble.

The rules are the executor's, with the strictest exchanges of any backend: one starts when the
rank's previous exchange and slot are over, and is over when all its partners have started. With one
cost for all chunks, DualPipeV's bubble is `(pp - 1) * (F&B + B - 3 W)` on every rank (DeepSeek
DualPipe): F&B an overlapped slot, B a full backward, W its weight part.
"""

from collections import defaultdict
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate, zip_longest

from pith_engine.schedule import ActionKind, ScheduleTable, Slot

Place = tuple[int, int]
"""Rank, and the slot before which it issues an exchange; one more for the last."""


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
    """Of overlapped actions, over the sum of both."""
    transfer: float = 0.0
    """Of an exchange, once all partners have started."""

    def duration(self, slot: Slot) -> float:
        """How long a slot's actions run."""
        costs = {
            ActionKind.FORWARD: (self.forward,),
            ActionKind.BACKWARD: (self.backward_input, self.weight),
            ActionKind.BACKWARD_INPUT: (self.backward_input,),
            ActionKind.WEIGHT: (self.weight,),
        }
        total = sum(cost[action.chunk] for action in slot.actions for cost in costs[action.kind])
        return total * self.overlap if len(slot.actions) > 1 else total


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When every slot of a table runs, from time 0; one row per rank."""

    starts: tuple[tuple[float, ...], ...]
    """Of every slot."""
    ends: tuple[tuple[float, ...], ...]
    """Of every slot."""
    peak_live: tuple[int, ...]
    """Most activations at once: each from its forward to its BACKWARD or WEIGHT."""

    @property
    def duration(self) -> float:
        """From the first start to the last end."""
        return max(row[-1] for row in self.ends)

    @property
    def busy(self) -> tuple[float, ...]:
        """Of each rank."""
        return tuple(sum(e) - sum(s) for s, e in zip(self.starts, self.ends, strict=True))

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time without compute."""
        return 1 - sum(self.busy) / (len(self.ends) * self.duration)


def unit_schedule_costs(pp: int) -> ScheduleCosts:
    """The same cost for every chunk, in units of one forward."""
    ones = (1.0,) * (2 * pp)
    return ScheduleCosts(forward=ones, backward_input=ones, weight=ones)


def simulate(table: ScheduleTable, costs: ScheduleCosts) -> Timeline:
    """A ValueError for costs of other chunks, transfers that do not match, or a deadlock."""
    counts = [len(cost) for cost in (costs.forward, costs.backward_input, costs.weight)]
    if counts != [2 * len(table)] * 3:
        raise ValueError(f"costs hold {counts} chunks; each needs 2 * pp = {2 * len(table)}")
    partners = meetings(table)
    after = {
        (rank, k): [(rank, k - 1), *partners[rank, k - 1]] if k else []
        for rank, row in enumerate(table)
        for k in range(len(row) + 1)
    }
    try:
        order = list(TopologicalSorter(after).static_order())
    except CycleError as error:
        cycle = " before ".join(f"rank {rank} at slot {k}" for rank, k in error.args[1])
        raise ValueError(f"deadlock, exchanges that must start in a circle: {cycle}") from None
    starts: list[list[float]] = [[] for _ in table]
    ends: list[list[float]] = [[] for _ in table]
    begun: dict[Place, float] = {}
    for rank, k in order:
        over = max((begun[place] for place in after[rank, k]), default=0.0)
        if k > 0:
            slot = table[rank][k - 1]
            over += costs.transfer if partners[rank, k - 1] else 0.0
            start = over if slot.receives else 0.0
            starts[rank].append(max([start, *ends[rank][-1:]]))
            ends[rank].append(starts[rank][-1] + costs.duration(slot))
            over = max(over, ends[rank][-1])
        begun[rank, k] = over
    changes = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.WEIGHT: -1}
    return Timeline(
        starts=tuple(map(tuple, starts)),
        ends=tuple(map(tuple, ends)),
        peak_live=tuple(
            max(accumulate(changes.get(action.kind, 0) for slot in row for action in slot.actions))
            for row in table
        ),
    )


def meetings(table: ScheduleTable) -> defaultdict[Place, list[Place]]:
    """Exchange -> those at the other ends of its transfers; ValueError if one has none."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank, row in enumerate(table):
        for k, slot in enumerate(row):
            for t in slot.sends:
                sent[rank, t.peer].append((k + 1, t.output))
            for t in slot.receives:
                received[t.peer, rank].append((k, t.output))
    partners: defaultdict[Place, list[Place]] = defaultdict(list)
    for source, target in sorted({*sent, *received}):
        for send, receive in zip_longest(sent[source, target], received[source, target]):
            if send is None or receive is None or send[1] != receive[1]:
                raise ValueError(
                    f"transfers from rank {source} to rank {target} do not match in order: "
                    f"(exchange, what) {send} is sent where {receive} is received"
                )
            partners[source, send[0]].append((target, receive[0]))
            partners[target, receive[0]].append((source, send[0]))
    return partners

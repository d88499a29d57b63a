"""Pipeline schedules as tables: what each rank computes and transfers, in order.

Rank r holds chunks r and `2 * pp - 1 - r` of `2 * pp`, a V: rank 0 embeds and takes the loss, and
the last rank passes on without a transfer. `dualpipev` is DeepSeek's DualPipeV
(https://github.com/deepseek-ai/DualPipe, from arXiv 2412.19437).

Before the actions of slot k a rank issues one batched exchange: the sends of slot k-1 and the
receives of slot k, for which they wait. One more follows the last slot.

The trap: a batched exchange is a meeting. NCCL runs a rank's batches one by one, each until all its
transfers are done, so crossing meetings, as of receives posted just before need, deadlock. A
receive stands before the first action that, at unit costs, starts no earlier than the sender is
done: no rank waits longer than for the data (`simulate.py`).
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from graphlib import TopologicalSorter
from itertools import count


class ActionKind(Enum):
    """BACKWARD has the weight gradients, BACKWARD_INPUT leaves them to WEIGHT."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward input"
    WEIGHT = "weight"


@dataclass(frozen=True, kw_only=True)
class Action:
    """One piece of compute."""

    kind: ActionKind
    """What it computes."""
    chunk: int
    """Where."""
    micro_batch: int
    """Of which."""


class TransferKind(Enum):
    """What travels, and the step from the chunk that makes it to its consumer."""

    HIDDEN = 1
    GRADIENT = -1


Output = tuple[TransferKind, int, int]
"""What travels: kind, consuming chunk, micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """An output on its way, as one of two ranks sees it."""

    output: Output
    """What travels."""
    peer: int
    """The pp rank at the other end."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """What runs at once, and the transfers around it, in order for each peer."""

    actions: tuple[Action, ...]
    """One, or a forward and a backward that overlap."""
    receives: tuple[Transfer, ...] = ()
    """Waited for before the actions."""
    sends: tuple[Transfer, ...] = ()
    """Issued before the next slot."""


ScheduleTable = tuple[tuple[Slot, ...], ...]
"""A row of slots for each rank of pp."""


def chunk_rank(chunk: int, pp: int) -> int:
    """The pp rank that holds a chunk."""
    return min(chunk, 2 * pp - 1 - chunk)


def needed_outputs(actions: Sequence[Action], pp: int) -> list[Output]:
    """What they take from neighbouring chunks."""
    return [output for output in _inputs(actions) if 0 <= output[1] - output[0].value < 2 * pp]


def made_outputs(actions: Sequence[Action], pp: int) -> list[Output]:
    """What they make for neighbouring chunks."""
    outputs = [(kind, chunk + kind.value, number) for kind, chunk, number in _inputs(actions)]
    return [output for output in outputs if 0 <= output[1] < 2 * pp]


def _inputs(actions: Sequence[Action]) -> list[Output]:
    hidden, gradient = TransferKind.HIDDEN, TransferKind.GRADIENT
    return [
        (hidden if a.kind is ActionKind.FORWARD else gradient, a.chunk, a.micro_batch)
        for a in actions
        if a.kind is not ActionKind.WEIGHT
    ]


@cache
def dualpipev(pp: int, num_micro_batches: int) -> ScheduleTable:
    """DualPipeV for `pp` ranks; ValueError below `2 * pp` micro-batches."""
    if pp < 1 or num_micro_batches < 2 * pp:
        raise ValueError(
            f"num_micro_batches is {num_micro_batches} with pp {pp}; DualPipeV needs pp >= 1 and "
            f"at least 2 * pp = {2 * pp}: use more micro-batches or a smaller pp"
        )
    return _with_transfers([_dualpipev_actions(pp, r, num_micro_batches) for r in range(pp)])


@cache
def forward_only(pp: int, num_micro_batches: int) -> ScheduleTable:
    """For evaluation: chunk c runs micro-batch m at time `c + 2 m`.

    A rank's chunks differ in parity: never both at once, nor idle after warm-up.
    """
    if pp < 1 or num_micro_batches < 1:
        raise ValueError(f"pp is {pp}, num_micro_batches {num_micro_batches}; both must be >= 1")
    times = sorted((c + 2 * m, c, m) for c in range(2 * pp) for m in range(num_micro_batches))
    rows: list[list[tuple[Action, ...]]] = [[] for _ in range(pp)]
    for _, c, m in times:
        action = Action(kind=ActionKind.FORWARD, chunk=c, micro_batch=m)
        rows[chunk_rank(c, pp)].append((action,))
    return _with_transfers(rows)


def _dualpipev_actions(pp: int, rank: int, num_micro_batches: int) -> list[tuple[Action, ...]]:
    """A rank's order; F0, B1 ...: its first and second chunk."""
    chunks = (rank, 2 * pp - 1 - rank)
    # w: of whatever was deferred first.
    (f0, f1), (b0, b1), (i0, i1), (w, _) = ([(kind, c) for c in chunks] for kind in ActionKind)
    to_turn = pp - 1 - rank  # ranks between this one and the turn of the V
    # 1. Fill the first chunks.
    steps: list[tuple[tuple[ActionKind, int], ...]] = [(f0,)] * (2 * to_turn)
    # 2. Fill both directions.
    steps += [(f0,), (f1,)] * (rank + 1)
    # 3. The first gradients, split to reach the previous rank early.
    steps += [(i1,), (w,), (f1,)] * to_turn
    # 4. Steady state. The last rank runs F0 alone, then the first B1 of all, for which every other
    #    rank waits.
    steady = len(steps)
    steps += [(f0, b1), (f1, b0)] * (num_micro_batches - 2 * pp + rank + 1)
    if to_turn == 0:
        steps[steady : steady + 1] = [(f0,), (b1,)]
    # 5. First chunks without forwards.
    steps += [(b1,), (f1, b0)] * to_turn
    # 6. Drain: B1 B0. The second half keeps weight gradients for the waits of 7.
    steps += ([(b1,), (b0,)] * (rank + 1))[: rank + 1] + ([(i1,), (i0,)] * (rank + 1))[rank + 1 :]
    # 7. Drain the first chunk, a kept W in each wait.
    steps += [(w,), (i0,)] * to_turn
    # 8. The weight gradients left.
    steps += [(w,)] * (rank + 1)
    numbers, deferred = defaultdict(count), deque[tuple[int, int]]()

    def numbered(kind: ActionKind, chunk: int) -> Action:
        if kind is ActionKind.WEIGHT:
            chunk, number = deferred.popleft()
        else:
            number = next(numbers[kind is ActionKind.FORWARD, chunk])
        if kind is ActionKind.BACKWARD_INPUT:
            deferred.append((chunk, number))
        return Action(kind=kind, chunk=chunk, micro_batch=number)

    return [tuple(numbered(*part) for part in step) for step in steps]


def _with_transfers(rows: Sequence[Sequence[tuple[Action, ...]]]) -> ScheduleTable:
    pp = len(rows)
    slots = {(rank, k): actions for rank, row in enumerate(rows) for k, actions in enumerate(row)}
    makers = {made: place for place, actions in slots.items() for made in made_outputs(actions, pp)}
    # Times at unit costs, if data took none.
    after = {
        (rank, k): [makers[need] for need in needed_outputs(a, pp)] + [(rank, k - 1)] * (k > 0)
        for (rank, k), a in slots.items()
    }
    starts = [[0] * len(row) for row in rows]
    ends: dict[tuple[int, int], int] = {}
    for rank, k in TopologicalSorter(after).static_order():
        starts[rank][k] = max((ends[place] for place in after[rank, k]), default=0)
        kinds = [action.kind for action in slots[rank, k]]
        # Input and weight gradients cost a forward each.
        ends[rank, k] = starts[rank][k] + len(kinds) + kinds.count(ActionKind.BACKWARD)
    receives, sends = defaultdict(list), defaultdict(list)
    for output, place in sorted(makers.items(), key=lambda made: (ends[made[1]], made[1])):
        source, target = place[0], chunk_rank(output[1], pp)
        if target != source:
            meets = bisect_left(starts[target], ends[place])
            sends[place].append(Transfer(output=output, peer=target))
            receives[target, meets].append(Transfer(output=output, peer=source))
    table: list[list[Slot]] = [[] for _ in rows]
    for place, actions in slots.items():
        slot = Slot(actions=actions, receives=(*receives[place],), sends=(*sends[place],))
        table[place[0]].append(slot)
    return tuple(map(tuple, table))

"""Pipeline schedules as tables: what each rank computes and transfers, in order.

Rank r holds chunks r and `2 * pp - 1 - r` of `2 * pp`, a V: rank 0 embeds and takes the loss, and
the last rank passes on without a transfer. `dualpipev` is DeepSeek's DualPipeV
(https://github.com/deepseek-ai/DualPipe, from arXiv 2412.19437).

Before the action of slot k a rank issues one batched exchange: the sends of slot k-1 and the
receives of slot k, for which the action waits. One more follows the last slot.

The trap: a batched exchange is a meeting. NCCL runs a rank's batches one by one, each until all its
transfers are done, so crossing meetings, as of receives posted just before need, deadlock. A
receive stands before the first action that, at unit costs, starts no earlier than the sender is
done: no rank waits longer than for the data (`simulate.py`).
"""

from bisect import bisect_left
from collections import defaultdict, deque
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from graphlib import TopologicalSorter
from itertools import count


class ActionKind(Enum):
    """BACKWARD has the weight gradients, BACKWARD_INPUT leaves them to WEIGHT."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward input"
    WEIGHT = "weight"
    OVERLAP = "overlap"


@dataclass(frozen=True, kw_only=True)
class Action:
    """One piece of compute."""

    kind: ActionKind
    chunk: int
    """Of an OVERLAP, the forward one."""
    micro_batch: int
    backward_chunk: int | None = None
    """OVERLAP only, as its micro-batch."""
    backward_micro_batch: int | None = None

    @cached_property
    def parts(self) -> tuple["Action", ...]:
        """Forward and backward of an OVERLAP; any other action alone."""
        if self.kind is not ActionKind.OVERLAP:
            return (self,)
        chunk, micro_batch = self.backward_chunk, self.backward_micro_batch
        if chunk is None or micro_batch is None:
            raise ValueError(f"{self} has no backward chunk and micro-batch; OVERLAP needs both")
        return (
            Action(kind=ActionKind.FORWARD, chunk=self.chunk, micro_batch=self.micro_batch),
            Action(kind=ActionKind.BACKWARD, chunk=chunk, micro_batch=micro_batch),
        )


class TransferKind(Enum):
    """A chunk's output, or the gradient of its input."""

    HIDDEN = "hidden"
    GRADIENT = "gradient"

    @property
    def step(self) -> int:
        """From the chunk that makes it to its consumer."""
        return 1 if self is TransferKind.HIDDEN else -1


Output = tuple[TransferKind, int, int]
"""What travels: kind, consuming chunk, micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """An output on its way, as one of two ranks sees it."""

    kind: TransferKind
    chunk: int
    """The chunk that consumes it."""
    micro_batch: int
    peer: int
    """The pp rank at the other end."""

    @property
    def output(self) -> Output:
        """What travels."""
        return self.kind, self.chunk, self.micro_batch


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One action and the transfers around it, in order for each peer."""

    action: Action
    receives: tuple[Transfer, ...] = ()
    """Issued before the action, which waits for them."""
    sends: tuple[Transfer, ...] = ()
    """Issued with the receives of the next slot."""


ScheduleTable = tuple[tuple[Slot, ...], ...]
"""A row of slots for each rank of pp."""


def chunk_rank(chunk: int, pp: int) -> int:
    """The pp rank that holds a chunk."""
    return min(chunk, 2 * pp - 1 - chunk)


def needed_outputs(action: Action, pp: int) -> list[Output]:
    """What it takes from neighbouring chunks."""
    return [output for output in _inputs(action) if 0 <= output[1] - output[0].step < 2 * pp]


def made_outputs(action: Action, pp: int) -> list[Output]:
    """What it makes for neighbouring chunks."""
    outputs = [(kind, chunk + kind.step, number) for kind, chunk, number in _inputs(action)]
    return [output for output in outputs if 0 <= output[1] < 2 * pp]


def _inputs(action: Action) -> list[Output]:
    hidden, gradient = TransferKind.HIDDEN, TransferKind.GRADIENT
    return [
        (hidden if part.kind is ActionKind.FORWARD else gradient, part.chunk, part.micro_batch)
        for part in action.parts
        if part.kind is not ActionKind.WEIGHT
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
    rows = []
    for rank in range(pp):
        chunks = (rank, 2 * pp - 1 - rank)
        times = sorted((c + 2 * m, c, m) for c in chunks for m in range(num_micro_batches))
        rows.append([Action(kind=ActionKind.FORWARD, chunk=c, micro_batch=m) for _, c, m in times])
    return _with_transfers(rows)


def _dualpipev_actions(pp: int, rank: int, num_micro_batches: int) -> list[Action]:
    """A rank's order; F0, B1 ...: its first and second chunk."""
    first, second = rank, 2 * pp - 1 - rank
    forward, backward = ActionKind.FORWARD, ActionKind.BACKWARD
    overlap, backward_input = ActionKind.OVERLAP, ActionKind.BACKWARD_INPUT
    weight = (ActionKind.WEIGHT, first)  # of whatever was deferred first
    to_turn = pp - 1 - rank  # ranks between this one and the turn of the V
    # 1. Fill the first chunks: F0.
    steps: list[tuple[ActionKind, int]] = [(forward, first)] * (2 * to_turn)
    # 2. Fill both directions: F0 F1.
    steps += [(forward, first), (forward, second)] * (rank + 1)
    # 3. The first gradients, split to reach the previous rank early: B1 W F1.
    steps += [(backward_input, second), weight, (forward, second)] * to_turn
    # 4. Steady state: F0 & B1, F1 & B0. The last rank runs F0 alone, then the first B1 of all, for
    #    which every other rank waits.
    steady = [(overlap, first), (overlap, second)] * (num_micro_batches - 2 * pp + rank + 1)
    if to_turn == 0:
        steady[:1] = [(forward, first), (backward, second)]
    steps += steady
    # 5. First chunks without forwards: B1, F1 & B0.
    steps += [(backward, second), (overlap, second)] * to_turn
    # 6. Drain: B1 B0. The second half keeps weight gradients for the waits of 7.
    for i in range(2 * (rank + 1)):
        steps.append((backward_input if i > rank else backward, first if i % 2 else second))
    # 7. Drain the first chunk, a kept W in each wait: W B0.
    steps += [weight, (backward_input, first)] * to_turn
    # 8. The weight gradients left: W.
    steps += [weight] * (rank + 1)
    return _numbered(steps, pp)


def _numbered(steps: list[tuple[ActionKind, int]], pp: int) -> list[Action]:
    forwards, backwards = defaultdict(count), defaultdict(count)
    deferred: deque[tuple[int, int]] = deque()
    actions = []
    for kind, chunk in steps:
        fields = {}
        match kind:
            case ActionKind.FORWARD:
                micro_batch = next(forwards[chunk])
            case ActionKind.OVERLAP:
                micro_batch, other = next(forwards[chunk]), 2 * pp - 1 - chunk
                fields = {"backward_chunk": other, "backward_micro_batch": next(backwards[other])}
            case ActionKind.WEIGHT:
                chunk, micro_batch = deferred.popleft()
            case _:
                micro_batch = next(backwards[chunk])
                if kind is ActionKind.BACKWARD_INPUT:
                    deferred.append((chunk, micro_batch))
        actions.append(Action(kind=kind, chunk=chunk, micro_batch=micro_batch, **fields))
    return actions


def _with_transfers(rows: list[list[Action]]) -> ScheduleTable:
    """Send every output at once; receive it where nobody waits."""
    pp = len(rows)
    actions = {(rank, k): action for rank, row in enumerate(rows) for k, action in enumerate(row)}
    makers = {made: place for place, a in actions.items() for made in made_outputs(a, pp)}
    # Times at unit costs, if data took none.
    after = {
        (rank, k): [makers[need] for need in needed_outputs(action, pp)] + [(rank, k - 1)] * (k > 0)
        for (rank, k), action in actions.items()
    }
    starts = [[0] * len(row) for row in rows]
    ends: dict[tuple[int, int], int] = {}
    for rank, k in TopologicalSorter(after).static_order():
        starts[rank][k] = max((ends[place] for place in after[rank, k]), default=0)
        kinds = [part.kind for part in rows[rank][k].parts]
        # Input and weight gradients cost a forward each.
        ends[rank, k] = starts[rank][k] + len(kinds) + kinds.count(ActionKind.BACKWARD)
    receives, sends = defaultdict(list), defaultdict(list)
    for output, place in sorted(makers.items(), key=lambda made: (ends[made[1]], made[1])):
        (kind, chunk, micro_batch), source = output, place[0]
        target = chunk_rank(chunk, pp)
        if target != source:
            meets = bisect_left(starts[target], ends[place])
            facts = {"kind": kind, "chunk": chunk, "micro_batch": micro_batch}
            sends[place].append(Transfer(**facts, peer=target))
            receives[target, meets].append(Transfer(**facts, peer=source))
    return tuple(
        tuple(
            Slot(action=action, receives=tuple(receives[rank, k]), sends=tuple(sends[rank, k]))
            for k, action in enumerate(row)
        )
        for rank, row in enumerate(rows)
    )

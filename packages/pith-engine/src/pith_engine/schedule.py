"""Pipeline schedules as tables of facts: what each rank computes and transfers, in which order.

The model is cut into `2 * pp` chunks placed in a V: rank r holds chunks r and `2 * pp - 1 - r`, so
rank 0 embeds and takes the loss, and the last rank passes from one chunk to the next without a
transfer. `dualpipev` is DeepSeek's DualPipeV (https://github.com/deepseek-ai/DualPipe, from
DualPipe in arXiv 2412.19437); `forward_only` serves evaluation. A table is a tuple with one row of
slots per rank; the executor, the checks, the simulator and the pictures read nothing else.

How a row is executed: before the action of slot k, one batched exchange is issued that holds the
sends of slot k-1 and the receives of slot k; the action waits for its receives. One more exchange
after the last slot carries its sends. A received tensor may be used in a later slot than the one
that receives it.

The one trap is that a batched exchange is a meeting. NCCL runs the batches of a rank one after the
other, each until all its transfers are done, so a send whose receive is posted late holds up
everything behind it, and crossing meetings deadlock: posting each receive just before it is needed
does. `_with_transfers` therefore places a receive before the first action that, at unit costs,
starts no earlier than the sender is done. No rank then waits for a meeting longer than for the data
itself, which `simulate.py` measures. `schedule_check.py` replays a table under these semantics.
"""

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property


class ActionKind(Enum):
    """What a rank does in one slot."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward input"
    WEIGHT = "weight"
    OVERLAP = "overlap"


@dataclass(frozen=True, kw_only=True)
class Action:
    """One piece of compute; chunks are numbered through the whole model, 0 .. 2 * pp - 1."""

    kind: ActionKind
    """What to run; BACKWARD includes its weight gradients, BACKWARD_INPUT leaves them to WEIGHT."""
    chunk: int
    """The chunk; for OVERLAP the one that runs forward."""
    micro_batch: int
    """The micro-batch; for OVERLAP the one that runs forward."""
    backward_chunk: int | None = None
    """The chunk that runs its full backward; OVERLAP only."""
    backward_micro_batch: int | None = None
    """The micro-batch that runs its full backward; OVERLAP only."""

    @cached_property
    def parts(self) -> tuple["Action", ...]:
        """The forward and the backward of an OVERLAP; any other action alone."""
        if self.kind is not ActionKind.OVERLAP:
            return (self,)
        if self.backward_chunk is None or self.backward_micro_batch is None:
            raise ValueError(f"{self} has no backward chunk and micro-batch; OVERLAP needs both")
        return (
            Action(kind=ActionKind.FORWARD, chunk=self.chunk, micro_batch=self.micro_batch),
            Action(
                kind=ActionKind.BACKWARD,
                chunk=self.backward_chunk,
                micro_batch=self.backward_micro_batch,
            ),
        )


class TransferKind(Enum):
    """What travels: the hidden states of a forward or their gradient."""

    HIDDEN = "hidden"
    GRADIENT = "gradient"


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One tensor on its way between two ranks, seen from one of them."""

    kind: TransferKind
    """What travels."""
    chunk: int
    """The chunk that consumes it."""
    micro_batch: int
    """The micro-batch it belongs to."""
    peer: int
    """The other rank of the pp axis: the destination of a send, the source of a receive."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One action with the transfers around it."""

    action: Action
    """What to compute."""
    receives: tuple[Transfer, ...] = ()
    """Receives issued before the action, which waits for them; in order for each peer."""
    sends: tuple[Transfer, ...] = ()
    """Sends issued together with the receives of the next slot; in order for each peer."""


ScheduleTable = tuple[tuple[Slot, ...], ...]
"""One row of slots per rank of the pp axis."""


UNIT_COSTS = {
    ActionKind.FORWARD: 1,
    ActionKind.BACKWARD: 2,
    ActionKind.BACKWARD_INPUT: 1,
    ActionKind.WEIGHT: 1,
    ActionKind.OVERLAP: 3,
}
"""Relative durations: input and weight gradients cost one forward's matrix products each."""


def chunk_rank(chunk: int, pp: int) -> int:
    """The rank of the pp axis that holds a chunk in the V placement."""
    return min(chunk, 2 * pp - 1 - chunk)


Output = tuple[TransferKind, int, int]
"""What an action makes for another: kind, the consuming chunk, micro-batch."""


def needed_output(part: Action, pp: int) -> Output | None:
    """What a plain action (never OVERLAP) takes from a neighbouring chunk; None at the ends."""
    match part.kind:
        case ActionKind.FORWARD if part.chunk > 0:
            return TransferKind.HIDDEN, part.chunk, part.micro_batch
        case ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT if part.chunk < 2 * pp - 1:
            return TransferKind.GRADIENT, part.chunk, part.micro_batch
        case _:
            return None


def made_output(part: Action, pp: int) -> Output | None:
    """What a plain action (never OVERLAP) makes for a neighbouring chunk; None at the ends."""
    match part.kind:
        case ActionKind.FORWARD if part.chunk < 2 * pp - 1:
            return TransferKind.HIDDEN, part.chunk + 1, part.micro_batch
        case ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT if part.chunk > 0:
            return TransferKind.GRADIENT, part.chunk - 1, part.micro_batch
        case _:
            return None


def output_source(output: Output, pp: int) -> int:
    """The rank of the pp axis that makes an output."""
    kind, chunk, _ = output
    return chunk_rank(chunk - 1 if kind is TransferKind.HIDDEN else chunk + 1, pp)


@cache
def dualpipev(pp: int, num_micro_batches: int) -> ScheduleTable:
    """DualPipeV for `pp` ranks, each holding two chunks.

    Args:
        pp: ranks of the pipeline; at 1 the two local chunks still overlap.
        num_micro_batches: micro-batches of a step, at least `2 * pp`.

    Raises:
        ValueError: too few micro-batches.
    """
    if pp < 1 or num_micro_batches < 2 * pp:
        raise ValueError(
            f"num_micro_batches is {num_micro_batches} with pp {pp}; DualPipeV needs pp >= 1 and "
            f"at least 2 * pp = {2 * pp} micro-batches: use more micro-batches or a smaller pp"
        )
    return _with_transfers([_dualpipev_actions(pp, r, num_micro_batches) for r in range(pp)])


@cache
def forward_only(pp: int, num_micro_batches: int) -> ScheduleTable:
    """Forwards alone, for evaluation; no activation is kept.

    Chunk c runs micro-batch m at time `c + 2 m`. The two chunks of a rank have different parity,
    so a rank is never asked for both at once and is busy without a gap between its warm-up and its
    drain.

    Args:
        pp: ranks of the pipeline.
        num_micro_batches: any number from 1.

    Raises:
        ValueError: fewer than one rank or micro-batch.
    """
    if pp < 1 or num_micro_batches < 1:
        raise ValueError(f"pp is {pp}, num_micro_batches {num_micro_batches}; both must be >= 1")
    rows = []
    for rank in range(pp):
        chunks = (rank, 2 * pp - 1 - rank)
        times = sorted((c + 2 * m, c, m) for c in chunks for m in range(num_micro_batches))
        rows.append(
            [Action(kind=ActionKind.FORWARD, chunk=c, micro_batch=m) for _, c, m in times],
        )
    return _with_transfers(rows)


def _dualpipev_actions(pp: int, rank: int, num_micro_batches: int) -> list[Action]:
    """The compute order of one rank; F0, B1 ... name the rank's first and second chunk."""
    row = _Row()
    first, second = rank, 2 * pp - 1 - rank
    to_turn = pp - 1 - rank  # ranks between this one and the turn of the V
    # 1. Fill the first chunks: F0.
    for _ in range(2 * to_turn):
        row.forward(first)
    # 2. Fill both directions: F0 F1.
    for _ in range(rank + 1):
        row.forward(first)
        row.forward(second)
    # 3. The first gradients: B1 split, so that the previous rank gets its gradient early.
    for _ in range(to_turn):
        row.backward(second, defer=True)
        row.weight()
        row.forward(second)
    # 4. Steady state: F0 & B1, F1 & B0. The last rank starts the first backward of all; it runs
    #    its F0 alone, since every other rank waits for that B1.
    for i in range(num_micro_batches - 2 * pp + rank + 1):
        if i == 0 and to_turn == 0:
            row.forward(first)
            row.backward(second)
        else:
            row.overlap(first, second)
        row.overlap(second, first)
    # 5. The first chunks have run out of forwards: B1, F1 & B0.
    for _ in range(to_turn):
        row.backward(second)
        row.overlap(second, first)
    # 6. Drain: B1 B0. Weight gradients of the second half are kept to fill the waits of 7.
    for i in range(2 * (rank + 1)):
        row.backward(first if i % 2 else second, defer=i >= rank + 1)
    # 7. Drain the first chunk, a kept weight gradient under each wait: W B0.
    for _ in range(to_turn):
        row.weight()
        row.backward(first, defer=True)
    # 8. The weight gradients left: W.
    for _ in range(rank + 1):
        row.weight()
    return row.actions


class _Row:
    """Actions of one rank under construction; numbers the micro-batches of each chunk from 0."""

    def __init__(self):
        self.actions: list[Action] = []
        self._num_forward: Counter[int] = Counter()
        self._num_backward: Counter[int] = Counter()
        self._deferred: deque[tuple[int, int]] = deque()

    def forward(self, chunk: int) -> None:
        self._append(ActionKind.FORWARD, chunk, self._num_forward[chunk])
        self._num_forward[chunk] += 1

    def backward(self, chunk: int, *, defer: bool = False) -> None:
        kind = ActionKind.BACKWARD_INPUT if defer else ActionKind.BACKWARD
        self._append(kind, chunk, self._num_backward[chunk])
        if defer:
            self._deferred.append((chunk, self._num_backward[chunk]))
        self._num_backward[chunk] += 1

    def weight(self) -> None:
        self._append(ActionKind.WEIGHT, *self._deferred.popleft())

    def overlap(self, chunk: int, backward_chunk: int) -> None:
        self.actions.append(
            Action(
                kind=ActionKind.OVERLAP,
                chunk=chunk,
                micro_batch=self._num_forward[chunk],
                backward_chunk=backward_chunk,
                backward_micro_batch=self._num_backward[backward_chunk],
            )
        )
        self._num_forward[chunk] += 1
        self._num_backward[backward_chunk] += 1

    def _append(self, kind: ActionKind, chunk: int, micro_batch: int) -> None:
        self.actions.append(Action(kind=kind, chunk=chunk, micro_batch=micro_batch))


def _with_transfers(rows: list[list[Action]]) -> ScheduleTable:
    """Send every output at once; receive it where `_unit_times` says that nobody waits."""
    pp = len(rows)
    starts, ends = _unit_times(rows)
    receives: list[list[list[Transfer]]] = [[[] for _ in row] for row in rows]
    sends: list[list[list[Transfer]]] = [[[] for _ in row] for row in rows]
    made = sorted(
        (ends[rank][slot], rank, slot, order, output)
        for rank, row in enumerate(rows)
        for slot, action in enumerate(row)
        for order, output in enumerate(made_output(part, pp) for part in action.parts)
        if output is not None
    )
    for end, source, slot, _, (kind, chunk, micro_batch) in made:
        target = chunk_rank(chunk, pp)
        if target == source:
            continue
        meets = bisect_left(starts[target], end)  # the first action that starts at `end` or later
        facts = {"kind": kind, "chunk": chunk, "micro_batch": micro_batch}
        sends[source][slot].append(Transfer(**facts, peer=target))
        receives[target][meets].append(Transfer(**facts, peer=source))
    return tuple(
        tuple(
            Slot(action=action, receives=tuple(receives[rank][k]), sends=tuple(sends[rank][k]))
            for k, action in enumerate(row)
        )
        for rank, row in enumerate(rows)
    )


def _unit_times(rows: list[list[Action]]) -> tuple[list[list[int]], list[list[int]]]:
    """Start and end of every action at `UNIT_COSTS` when data travels in no time."""
    pp = len(rows)
    ready: dict[Output, int] = {}
    starts: list[list[int]] = [[] for _ in rows]
    ends: list[list[int]] = [[] for _ in rows]
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            while len(starts[rank]) < len(row):
                action = row[len(starts[rank])]
                needs = [n for part in action.parts if (n := needed_output(part, pp)) is not None]
                if any(need not in ready for need in needs):
                    break
                start = max([ready[need] for need in needs] + ends[rank][-1:], default=0)
                starts[rank].append(start)
                ends[rank].append(start + UNIT_COSTS[action.kind])
                for part in action.parts:
                    if (output := made_output(part, pp)) is not None:
                        ready[output] = ends[rank][-1]
                progress = True
    return starts, ends

"""One micro-batch's forward interleaved with another's backward, as a list of facts.

A chunk of L layers has segments 0 .. L: segment l is one autograd graph, the aggregate of layer
l - 1 (l > 0) followed by the attention of layer l (l < L). It runs as

    forward   SEGMENT 0, DISPATCH 0, EXPERTS 0, COMBINE 0, SEGMENT 1, ..., SEGMENT L
    backward  SEGMENT L, COMBINE L-1, EXPERTS L-1, DISPATCH L-1, WEIGHT L-1, ..., SEGMENT 0

where the backward's COMBINE and DISPATCH move gradients along the reverse of the forward's, EXPERTS
takes the input gradient only and WEIGHT runs the weight gradients that EXPERTS deferred. With
recomputation, RECOMPUTE SEGMENT j+1 stands before 2, and RECOMPUTE EXPERTS j before 4, under 3.

Both sides share one compute stream; the all-to-alls of each side have a stream of their own.
Iteration i of `interleave` enqueues, with l = i and j = num_backward_layers - 1 - i:

    1. F COMBINE l-1     runs under 2
    2. B SEGMENT j+1
    3. B COMBINE j       runs under 4
    4. F SEGMENT l       waits for 1
    5. B EXPERTS j       waits for 3
    6. F DISPATCH l      runs under 5 and 8
    7. B DISPATCH j      runs under 8 and 9
    8. B WEIGHT j
    9. F EXPERTS l       waits for 6

1 stands before 2: behind the many launches of a segment it would start late and run exposed. 4 ends
with the host reading counts, and 5 is what the device does meanwhile. Every rank of an
expert-parallel group runs the same list, so collectives meet in one order.

The one trap is memory. A value dropped by the host goes back to the allocator's pool of the stream
it was made on, which may hand it out again before another stream has read it. So a value is freed
only where every later operation on its own stream is ordered after all its uses; across two lists
this holds because the first operation of a list on a communication stream waits for compute. Rows
of F DISPATCH that a pass keeps are dropped by RECOMPUTE EXPERTS, ordered before 6 by 4; were they
dropped in 5, 6 could overwrite them. `check_operations` proves that, the ordering and the
completeness of a list without a device.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Literal

Recompute = Literal["none", "experts", "attention+experts"]
"""Which stages keep their inputs only, and run again before their backward."""


class OperationKind(Enum):
    """What an operation does; its index is a segment's or a layer's number within the chunk."""

    FORWARD_SEGMENT = "forward segment"
    FORWARD_DISPATCH = "forward dispatch"
    FORWARD_EXPERTS = "forward experts"
    FORWARD_COMBINE = "forward combine"
    BACKWARD_SEGMENT = "backward segment"
    BACKWARD_COMBINE = "backward combine"
    BACKWARD_EXPERTS = "backward experts"
    BACKWARD_DISPATCH = "backward dispatch"
    BACKWARD_WEIGHT = "backward weight"
    RECOMPUTE_SEGMENT = "recompute segment"
    RECOMPUTE_EXPERTS = "recompute experts"

    @property
    def is_forward(self) -> bool:
        """Whether it belongs to the micro-batch that runs forward."""
        return self.value.startswith("forward")


class Stream(Enum):
    """Where an operation runs: operations of one stream run in the order of the list."""

    COMPUTE = "compute"
    FORWARD_COMM = "forward communication"
    BACKWARD_COMM = "backward communication"


Value = tuple[OperationKind, int]
"""The output of one operation, named by the kind and index of that operation."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One entry of a list that the executor runs in order."""

    kind: OperationKind
    """What it does."""
    index: int
    """Segment number (segments) or layer number (all others) within its chunk."""
    stream: Stream
    """Where it runs."""
    waits: tuple[int, ...]
    """Positions in the list, on other streams, that must be complete before it starts."""
    frees: tuple[Value, ...]
    """Outputs that the host drops right after it has enqueued this operation."""


READS = {
    OperationKind.FORWARD_SEGMENT: (
        (OperationKind.FORWARD_COMBINE, -1),
        (OperationKind.FORWARD_SEGMENT, -1),
    ),
    OperationKind.FORWARD_DISPATCH: ((OperationKind.FORWARD_SEGMENT, 0),),
    OperationKind.FORWARD_EXPERTS: ((OperationKind.FORWARD_DISPATCH, 0),),
    OperationKind.FORWARD_COMBINE: ((OperationKind.FORWARD_EXPERTS, 0),),
    OperationKind.BACKWARD_SEGMENT: (
        (OperationKind.BACKWARD_DISPATCH, 0),
        (OperationKind.BACKWARD_SEGMENT, 1),
        (OperationKind.RECOMPUTE_SEGMENT, 0),
    ),
    OperationKind.BACKWARD_COMBINE: ((OperationKind.BACKWARD_SEGMENT, 1),),
    OperationKind.BACKWARD_EXPERTS: (
        (OperationKind.BACKWARD_COMBINE, 0),
        (OperationKind.RECOMPUTE_EXPERTS, 0),
    ),
    OperationKind.BACKWARD_DISPATCH: ((OperationKind.BACKWARD_EXPERTS, 0),),
    OperationKind.BACKWARD_WEIGHT: ((OperationKind.BACKWARD_EXPERTS, 0),),
    OperationKind.RECOMPUTE_SEGMENT: (),
    OperationKind.RECOMPUTE_EXPERTS: (),
}
"""Outputs an operation reads, as kind and offset to its own index, first the one that is handed to
it; a side's first operation reads none, a recomputation what its pass has kept."""

COMMUNICATION_STREAMS = {
    OperationKind.FORWARD_DISPATCH: Stream.FORWARD_COMM,
    OperationKind.FORWARD_COMBINE: Stream.FORWARD_COMM,
    OperationKind.BACKWARD_DISPATCH: Stream.BACKWARD_COMM,
    OperationKind.BACKWARD_COMBINE: Stream.BACKWARD_COMM,
}
"""Streams of the all-to-alls; everything else computes."""


@cache
def interleave(
    num_forward_layers: int | None,
    num_backward_layers: int | None,
    *,
    defer_weights: bool = False,
    recompute: Recompute = "none",
) -> tuple[Operation, ...]:
    """List the operations of one forward, one backward, or both overlapped, in host order.

    None stands for no such side; with `defer_weights` the caller runs the weight gradients later;
    `recompute` is what the backward's pass was made with.
    The results, outputs of the forward's last segment and of the backward's segment 0, are never
    freed; every other output is freed exactly once.
    """
    order = list(_host_order(num_forward_layers, num_backward_layers, defer_weights, recompute))
    users = _users(order)
    waits: list[list[int]] = [[] for _ in order]
    frees: list[list[Value]] = [[] for _ in order]
    for place, (value, readers) in enumerate(users.items()):
        for reader in readers:
            if _stream(order[reader]) is not _stream(value):
                waits[reader].append(place)
        # Dropped by the first compute that is ordered after every use: a reader on the compute
        # stream itself, or the compute that waits for a reader on another stream.
        after = [r if _stream(order[r]) is Stream.COMPUTE else users[order[r]][0] for r in readers]
        if readers:
            frees[max(after)].append(value)
    return tuple(
        Operation(
            kind=value[0],
            index=value[1],
            stream=_stream(value),
            waits=tuple(waits[place]),
            frees=tuple(frees[place]),
        )
        for place, value in enumerate(order)
    )


def check_operations(
    operations: tuple[Operation, ...],
    num_forward_layers: int | None,
    num_backward_layers: int | None,
    *,
    defer_weights: bool = False,
    recompute: Recompute = "none",
) -> None:
    """Prove a list complete, ordered and free of use after free; arguments as in `interleave`.

    Raises:
        ValueError: an operation is missing, repeated or on the wrong stream; a wait points forward
            or to its own stream; an input may not be ready; a value is freed twice, never, before
            it is made, or while another stream may still read it.
    """
    values = [(operation.kind, operation.index) for operation in operations]
    expected = list(_host_order(num_forward_layers, num_backward_layers, defer_weights, recompute))
    if Counter(values) != Counter(expected):
        names = [_name(v) for v in {*values, *expected} if values.count(v) != expected.count(v)]
        raise ValueError(f"missing, repeated or foreign operations: {sorted(names)}")
    for operation, value in zip(operations, values, strict=True):
        if operation.stream is not _stream(value):
            raise ValueError(f"{_name(value)} must run on the {_stream(value).value} stream")
    clocks = _clocks(operations)
    users = _users(values)
    for place, (value, readers) in enumerate(users.items()):
        for reader in readers:
            if not _happens_before(operations, clocks, place, reader):
                raise ValueError(f"{_name(values[reader])} does not wait for {_name(value)}")
    _check_frees(operations, clocks, users)


def _host_order(
    num_forward: int | None, num_backward: int | None, defer_weights: bool, recompute: Recompute
) -> Iterator[Value]:
    """The numbered iteration of the file's docstring; a side that has ended emits nothing."""
    last_forward = -1 if num_forward is None else num_forward
    last_backward = -1 if num_backward is None else num_backward
    for i in range(max(last_forward, last_backward) + 1):
        j = last_backward - 1 - i
        if 0 < i <= last_forward:
            yield OperationKind.FORWARD_COMBINE, i - 1
        if 0 < i <= last_backward and recompute == "attention+experts":
            yield OperationKind.RECOMPUTE_SEGMENT, j + 1
        if i <= last_backward:
            yield OperationKind.BACKWARD_SEGMENT, j + 1
        if i < last_backward:
            yield OperationKind.BACKWARD_COMBINE, j
            if recompute != "none":
                yield OperationKind.RECOMPUTE_EXPERTS, j
        if i <= last_forward:
            yield OperationKind.FORWARD_SEGMENT, i
        if i < last_backward:
            yield OperationKind.BACKWARD_EXPERTS, j
        if i < last_forward:
            yield OperationKind.FORWARD_DISPATCH, i
        if i < last_backward:
            yield OperationKind.BACKWARD_DISPATCH, j
            if not defer_weights:
                yield OperationKind.BACKWARD_WEIGHT, j
        if i < last_forward:
            yield OperationKind.FORWARD_EXPERTS, i


def _users(order: list[Value]) -> dict[Value, list[int]]:
    """For each output, in the order of the list, the positions that read it."""
    users: dict[Value, list[int]] = {value: [] for value in order}
    for place, (kind, index) in enumerate(order):
        for source, offset in READS[kind]:
            if (source, index + offset) in users:
                users[source, index + offset].append(place)
    return users


def _stream(value: Value) -> Stream:
    return COMMUNICATION_STREAMS.get(value[0], Stream.COMPUTE)


def _clocks(operations: tuple[Operation, ...]) -> list[dict[Stream, int]]:
    """For each operation, the last position on each stream known complete when it completes."""
    clocks: list[dict[Stream, int]] = []
    last: dict[Stream, int] = {}
    for place, operation in enumerate(operations):
        before = [*operation.waits, *([last[operation.stream]] if operation.stream in last else [])]
        for wait in operation.waits:
            if not 0 <= wait < place or operations[wait].stream is operation.stream:
                raise ValueError(
                    f"operation {place} waits for position {wait}; allowed are earlier positions "
                    f"on other streams than {operation.stream.value}"
                )
        clock = {
            stream: max((clocks[source].get(stream, -1) for source in before), default=-1)
            for stream in Stream
        }
        clock[operation.stream] = last[operation.stream] = place
        clocks.append(clock)
    return clocks


def _happens_before(
    operations: tuple[Operation, ...], clocks: list[dict[Stream, int]], first: int, second: int
) -> bool:
    return first < second and clocks[second][operations[first].stream] >= first


def _check_frees(
    operations: tuple[Operation, ...],
    clocks: list[dict[Stream, int]],
    users: dict[Value, list[int]],
) -> None:
    freed = {value: place for place, o in enumerate(operations) for value in o.frees}
    wanted = {value for value, uses in users.items() if uses}
    if sum(len(operation.frees) for operation in operations) != len(wanted) or set(freed) != wanted:
        names = sorted(_name(value) for value in wanted ^ set(freed))
        raise ValueError(f"read values must be freed exactly once, no others: {names or 'twice'}")
    drops = [(value, place, users[value]) for value, place in freed.items()]
    # What an earlier list received and the pass has kept.
    drops += [
        ((OperationKind.FORWARD_DISPATCH, operation.index), place, [place])
        for place, operation in enumerate(operations)
        if operation.kind is OperationKind.RECOMPUTE_EXPERTS
    ]
    for value, place, uses in drops:
        if place < max(uses):
            raise ValueError(f"{_name(value)} is freed at position {place}, before its last use")
        stream = _stream(value)
        later = next(
            (p for p in range(place + 1, len(operations)) if operations[p].stream is stream), None
        )
        for use in uses:
            if later is not None and not _happens_before(operations, clocks, use, later):
                raise ValueError(
                    f"{_name(value)} is freed at position {place}, but position {later} may reuse "
                    f"its memory while position {use} still reads it"
                )


def _name(value: Value) -> str:
    return f"{value[0].value} {value[1]}"

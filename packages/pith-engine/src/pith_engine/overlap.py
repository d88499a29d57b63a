"""One micro-batch's forward interleaved with another's backward, as a list of facts.

A chunk of L layers has segments 0 .. L: segment l is one autograd graph, the aggregate of layer
l - 1 (l > 0) followed by the attention of layer l (l < L). The backward's COMBINE and DISPATCH
reverse the forward's, EXPERTS takes the input gradient and WEIGHT the weight gradients. Both sides
share one compute stream; the all-to-alls of each have their own. Iteration i of a list enqueues,
with l = i and j = num_backward_layers - 1 - i:

    1. F COMBINE l-1     runs under 2
    2. B SEGMENT j+1     after its recomputation, if any
    3. B COMBINE j       runs under 4, and under RECOMPUTE EXPERTS j
    4. F SEGMENT l       waits for 1
    5. B EXPERTS j       waits for 3
    6. F DISPATCH l      runs under 5 and 8
    7. B DISPATCH j      runs under 8 and 9
    8. B WEIGHT j
    9. F EXPERTS l       waits for 6

1 stands before 2: behind the many launches of a segment it would start late and run exposed. 4 ends
with the host reading counts, and 5 is what the device does meanwhile. All ranks of an ep axis run
one list, so collectives meet in one order.

The trap is memory: what the host drops goes back to the pool of the stream it was made on, which
may hand it out again before another stream has read it. So a value is freed only where every later
operation on its own stream is ordered after all its uses; across two lists this holds because the
first operation of a list on a communication stream waits for compute. Kept rows of F DISPATCH are
dropped by RECOMPUTE EXPERTS, before 4, for which 6 waits; dropped in 5, 6 could overwrite them.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import product
from typing import Literal

Recompute = Literal["none", "experts", "attention+experts"]
"""Which stages keep only their inputs, and run again before their backward."""


class OperationKind(Enum):
    """What an operation does; one iteration of a list enqueues them in this order."""

    FORWARD_COMBINE = "forward combine"
    RECOMPUTE_SEGMENT = "recompute segment"
    BACKWARD_SEGMENT = "backward segment"
    BACKWARD_COMBINE = "backward combine"
    RECOMPUTE_EXPERTS = "recompute experts"
    FORWARD_SEGMENT = "forward segment"
    BACKWARD_EXPERTS = "backward experts"
    FORWARD_DISPATCH = "forward dispatch"
    BACKWARD_DISPATCH = "backward dispatch"
    BACKWARD_WEIGHT = "backward weight"
    FORWARD_EXPERTS = "forward experts"

    @property
    def is_forward(self) -> bool:
        """Whether the micro-batch that runs forward owns it."""
        return self.value.startswith("forward")


class Stream(Enum):
    """Where an operation runs; those of one stream run in the order of the list."""

    COMPUTE = "compute"
    FORWARD_COMM = "forward communication"
    BACKWARD_COMM = "backward communication"


Value = tuple[OperationKind, int]
"""The output of one operation: its kind and index."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One entry of a list that the executor runs in order."""

    kind: OperationKind
    """What it does."""
    index: int
    """Segment or layer of the chunk."""
    stream: Stream
    """Where it runs."""
    waits: tuple[int, ...]
    """Earlier positions, on other streams, that must be complete."""
    frees: tuple[Value, ...]
    """Outputs that the host drops once it is enqueued."""

    @property
    def value(self) -> Value:
        """Its output."""
        return self.kind, self.index


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
}
"""Outputs an operation reads, the one handed to it first, as kind and offset to its own index; a
recomputation reads what its pass has kept."""

OFFSETS = {
    OperationKind.FORWARD_COMBINE: -1,
    OperationKind.RECOMPUTE_SEGMENT: 1,
    OperationKind.BACKWARD_SEGMENT: 1,
}
"""From l (forward) or j to an operation's index; 0 for all others."""


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
    `recompute` is that of the backward's pass. Every output that is read is freed once.
    """
    order = _host_order(num_forward_layers, num_backward_layers, defer_weights, recompute)
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
    """Prove a list complete, ordered and free of use after free, else raise a ValueError."""
    values = [operation.value for operation in operations]
    expected = _host_order(num_forward_layers, num_backward_layers, defer_weights, recompute)
    wrong = [_name(v) for v in {*values, *expected} if values.count(v) != expected.count(v)]
    if wrong:
        raise ValueError(f"missing, repeated or foreign operations: {sorted(wrong)}")
    for operation, value in zip(operations, values, strict=True):
        if operation.stream is not _stream(value):
            raise ValueError(f"{_name(value)} must run on the {_stream(value).value} stream")
    before = _before(operations)
    users = _users(values)
    for place, (value, readers) in enumerate(users.items()):
        for reader in readers:
            if place not in before[reader]:
                raise ValueError(f"{_name(values[reader])} does not wait for {_name(value)}")
    _check_frees(operations, before, users)


def _host_order(
    num_forward: int | None, num_backward: int | None, defer_weights: bool, recompute: Recompute
) -> list[Value]:
    forward, backward = (-1 if num is None else num for num in (num_forward, num_backward))
    left_out = {
        OperationKind.BACKWARD_WEIGHT: defer_weights,
        OperationKind.RECOMPUTE_EXPERTS: recompute == "none",
        OperationKind.RECOMPUTE_SEGMENT: recompute != "attention+experts",
    }
    order = []
    for i, kind in product(range(max(forward, backward) + 1), OperationKind):
        num_layers, index = (forward, i) if kind.is_forward else (backward, backward - 1 - i)
        index += OFFSETS.get(kind, 0)
        # The last segment has no layer, and is not recomputed.
        if kind in (OperationKind.FORWARD_SEGMENT, OperationKind.BACKWARD_SEGMENT):
            num_layers += 1
        if 0 <= index < num_layers and not left_out.get(kind, False):
            order.append((kind, index))
    return order


def _users(order: list[Value]) -> dict[Value, list[int]]:
    """For each output, in list order, the positions that read it."""
    users: dict[Value, list[int]] = {value: [] for value in order}
    for place, (kind, index) in enumerate(order):
        for source, offset in READS.get(kind, ()):
            if (source, index + offset) in users:
                users[source, index + offset].append(place)
    return users


def _stream(value: Value) -> Stream:
    match value[0]:
        case OperationKind.FORWARD_DISPATCH | OperationKind.FORWARD_COMBINE:
            return Stream.FORWARD_COMM
        case OperationKind.BACKWARD_DISPATCH | OperationKind.BACKWARD_COMBINE:
            return Stream.BACKWARD_COMM
        case _:
            return Stream.COMPUTE


def _before(operations: tuple[Operation, ...]) -> list[set[int]]:
    """For each operation, the positions known complete when it starts."""
    before: list[set[int]] = []
    last: dict[Stream, int] = {}
    for place, operation in enumerate(operations):
        stream = operation.stream
        for wait in operation.waits:
            if not 0 <= wait < place or operations[wait].stream is stream:
                raise ValueError(
                    f"operation {place} waits for position {wait}; allowed are earlier positions "
                    f"on other streams than {stream.value}"
                )
        direct = {*operation.waits, *([last[stream]] if stream in last else [])}
        before.append(direct.union(*(before[source] for source in direct)))
        last[stream] = place
    return before


def _check_frees(
    operations: tuple[Operation, ...], before: list[set[int]], users: dict[Value, list[int]]
) -> None:
    frees = [(value, place) for place, o in enumerate(operations) for value in o.frees]
    freed, wanted = dict(frees), {value for value, uses in users.items() if uses}
    if len(frees) != len(wanted) or set(freed) != wanted:
        names = sorted(_name(value) for value in wanted ^ set(freed))
        raise ValueError(f"read values must be freed exactly once, no others: {names or 'twice'}")
    drops = [(value, place, users[value]) for value, place in frees]
    # What an earlier list received and the pass has kept.
    drops += [
        ((OperationKind.FORWARD_DISPATCH, operation.index), place, [place])
        for place, operation in enumerate(operations)
        if operation.kind is OperationKind.RECOMPUTE_EXPERTS
    ]
    for value, place, uses in drops:
        if place < max(uses):
            raise ValueError(f"{_name(value)} is freed at position {place}, before its last use")
        stream, after = _stream(value), range(place + 1, len(operations))
        later = next((p for p in after if operations[p].stream is stream), None)
        for use in uses:
            if later is not None and use not in before[later]:
                raise ValueError(
                    f"{_name(value)} is freed at position {place}, but position {later} may reuse "
                    f"its memory while position {use} still reads it"
                )


def _name(value: Value) -> str:
    return f"{value[0].value} {value[1]}"

"""One micro-batch's forward interleaved with another's backward, as a list of facts.

A chunk of L layers has segments 0 .. L: segment l is the aggregate of layer l - 1 (l > 0) and the
attention of layer l (l < L). The backward's COMBINE and DISPATCH reverse the forward's. Both sides
share one compute stream; the all-to-alls of each have their own. Iteration i of a list enqueues,
with l = i and j = num_backward_layers - 1 - i:

    1. F COMBINE l-1     runs under 2
    2. B SEGMENT j+1     after its recomputation, if any
    3. B COMBINE j       runs under 4 and RECOMPUTE EXPERTS j
    4. F SEGMENT l       waits for 1
    5. B EXPERTS j       waits for 3
    6. F DISPATCH l      runs under 5 and 8
    7. B DISPATCH j      runs under 8 and 9
    8. B WEIGHT j
    9. F EXPERTS l       waits for 6

1 stands before 2: behind a segment's many launches it would start late and run exposed. 4 ends
with the host reading counts. All ranks of an ep axis run one list, so collectives meet in order.

The trap is memory: what the host drops goes back to the pool of the stream it was made on, which
may hand it out again before another stream has read it. So a value is freed only where every later
operation on its own stream is ordered after all its uses (a test proves it); across two lists,
because a list's first communication waits for compute. Kept rows of F DISPATCH are dropped by
RECOMPUTE EXPERTS, before 4, for which 6 waits; in 5, 6 could overwrite them.
"""

from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from itertools import product
from typing import Literal

Recompute = Literal["none", "experts", "attention+experts"]
"""Stages that keep only their inputs, and run again before their backward."""


class Stream(Enum):
    """Where operations run, each stream in the order of the list."""

    COMPUTE = auto()
    FORWARD_COMM = auto()
    BACKWARD_COMM = auto()


class OperationKind(Enum):
    """What an operation does, in the order of an iteration."""

    FORWARD_COMBINE = auto()
    RECOMPUTE_SEGMENT = auto()
    BACKWARD_SEGMENT = auto()
    BACKWARD_COMBINE = auto()
    RECOMPUTE_EXPERTS = auto()
    FORWARD_SEGMENT = auto()
    BACKWARD_EXPERTS = auto()
    FORWARD_DISPATCH = auto()
    BACKWARD_DISPATCH = auto()
    BACKWARD_WEIGHT = auto()
    FORWARD_EXPERTS = auto()

    @property
    def is_forward(self) -> bool:
        """Whether of the micro-batch that runs forward."""
        return self.name.startswith("FORWARD")

    @property
    def stream(self) -> Stream:
        """Where it runs."""
        if not self.name.endswith(("COMBINE", "DISPATCH")):
            return Stream.COMPUTE
        return Stream.FORWARD_COMM if self.is_forward else Stream.BACKWARD_COMM


Value = tuple[OperationKind, int]
"""An operation's output: its kind and index."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One entry of a list."""

    kind: OperationKind
    """What it does."""
    index: int
    """Segment or layer of the chunk."""
    waits: tuple[int, ...]
    """Earlier positions, on other streams."""
    frees: tuple[Value, ...]
    """Outputs that the host then drops."""

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
"""Outputs read, as kind and offset to the reader's index; the first is handed to it."""

OFFSETS = {
    OperationKind.FORWARD_COMBINE: -1,
    OperationKind.RECOMPUTE_SEGMENT: 1,
    OperationKind.BACKWARD_SEGMENT: 1,
}
"""From l or j to an operation's index, if not 0."""


@cache
def interleave(
    num_forward_layers: int | None,
    num_backward_layers: int | None,
    *,
    defer_weights: bool = False,
    recompute: Recompute = "none",
) -> tuple[Operation, ...]:
    """The operations of one forward, one backward, or both overlapped, in host order.

    None: no such side; `defer_weights`: the caller runs weight gradients later.
    """
    order = host_order(num_forward_layers, num_backward_layers, defer_weights, recompute)
    users = output_users(order)
    waits: list[list[int]] = [[] for _ in order]
    frees: list[list[Value]] = [[] for _ in order]
    for place, (value, readers) in enumerate(users.items()):
        for reader in readers:
            if order[reader][0].stream is not value[0].stream:
                waits[reader].append(place)
        # Dropped by the first compute after every use: a reader there, or what waits for a reader.
        stops = [r if order[r][0].stream is Stream.COMPUTE else users[order[r]][0] for r in readers]
        if stops:
            frees[max(stops)].append(value)
    return tuple(
        Operation(kind=kind, index=index, waits=(*earlier,), frees=(*values,))
        for (kind, index), earlier, values in zip(order, waits, frees, strict=True)
    )


def host_order(
    num_forward: int | None, num_backward: int | None, defer_weights: bool, recompute: Recompute
) -> list[Value]:
    """What `interleave` lists."""
    forward, backward = (-1 if num is None else num for num in (num_forward, num_backward))
    left_out = {
        OperationKind.BACKWARD_WEIGHT: defer_weights,
        OperationKind.RECOMPUTE_EXPERTS: recompute == "none",
        OperationKind.RECOMPUTE_SEGMENT: recompute != "attention+experts",
    }
    order = []
    for i, kind in product(range(max(forward, backward) + 1), OperationKind):
        num, index = (forward, i) if kind.is_forward else (backward, backward - 1 - i)
        index += OFFSETS.get(kind, 0)
        # The last segment has no layer, and is not recomputed.
        if kind in (OperationKind.FORWARD_SEGMENT, OperationKind.BACKWARD_SEGMENT):
            num += 1
        if 0 <= index < num and not left_out.get(kind):
            order.append((kind, index))
    return order


def output_users(order: list[Value]) -> dict[Value, list[int]]:
    """Output, in order -> the positions that read it."""
    users: dict[Value, list[int]] = {value: [] for value in order}
    for place, (kind, index) in enumerate(order):
        for source, offset in READS.get(kind, ()):
            users.get((source, index + offset), []).append(place)
    return users

"""Proofs about a schedule table, whoever made it, and the replay of its exchanges.

Exchanges are replayed under the strictest semantics any backend has: each is a meeting of its
partners.
"""

from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import zip_longest

from pith_engine.schedule import (
    ActionKind,
    Output,
    ScheduleTable,
    Slot,
    chunk_rank,
    made_outputs,
    needed_outputs,
)


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """One batched exchange of a rank, and those that it must meet."""

    rank: int
    """Who issues it."""
    position: int
    """Of the slot before which it is issued; the number of slots for the last."""
    partners: tuple[tuple[int, int], ...]
    """(rank, position) of the exchange at the other end of each of its transfers."""


def check_schedule(
    table: ScheduleTable, num_micro_batches: int, *, has_backward: bool = True
) -> None:
    """Prove that a table computes and transfers everything once, in order, without deadlock.

    And that no rank holds more than `2 * pp + 1` activations at once. Else a ValueError.
    """
    pp = len(table)
    for rank, row in enumerate(table):
        _check_compute(rank, row, pp, num_micro_batches, has_backward)
        _check_transfers(rank, row, pp)
        if has_backward and (live := peak_live(row)) > 2 * pp + 1:
            raise ValueError(f"rank {rank} holds {live} activations, at most {2 * pp + 1} fit")
    meetings(table)


def peak_live(row: tuple[Slot, ...]) -> int:
    """Most activations a rank holds at once: each from its forward to its BACKWARD or WEIGHT."""
    live = peak = 0
    for slot in row:
        kinds = [part.kind for part in slot.action.parts]
        live += kinds.count(ActionKind.FORWARD)
        peak = max(peak, live)
        live -= kinds.count(ActionKind.BACKWARD) + kinds.count(ActionKind.WEIGHT)
    return peak


def meetings(table: ScheduleTable) -> tuple[Meeting, ...]:
    """Every exchange of every rank, in an order in which they can complete.

    One starts when the rank's previous exchange and action are over, and is over when all its
    partners have started. A ValueError when sends and receives do not match, or on a deadlock.
    """
    partners = _partners(table)
    started = [0] * len(table)  # the exchange that each rank has reached
    order: list[Meeting] = []
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(table):
            while (position := started[rank]) <= len(row):
                others = partners[rank, position]
                if any(started[other] < place for other, place in others):
                    break
                order.append(Meeting(rank=rank, position=position, partners=tuple(others)))
                started[rank] += 1
                progress = True
    stuck = [
        f"rank {rank} before slot {position} waits for {partners[rank, position]}"
        for rank, position in enumerate(started)
        if position <= len(table[rank])
    ]
    if stuck:
        raise ValueError("deadlock, (rank, slot): " + "; ".join(stuck))
    return tuple(order)


def _check_compute(
    rank: int, row: tuple[Slot, ...], pp: int, num_micro_batches: int, has_backward: bool
) -> None:
    forwards, backwards = defaultdict(list), defaultdict(list)
    deferred = deque[tuple[int, int]]()
    for part in (part for slot in row for part in slot.action.parts):
        work = (part.chunk, part.micro_batch)
        match part.kind:
            case ActionKind.FORWARD:
                forwards[part.chunk].append(part.micro_batch)
            case ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT:
                if part.micro_batch not in forwards[part.chunk]:
                    raise ValueError(f"rank {rank}: backward of {work} before its forward")
                backwards[part.chunk].append(part.micro_batch)
                if part.kind is ActionKind.BACKWARD_INPUT:
                    deferred.append(work)
            case _:
                if not deferred or deferred.popleft() != work:
                    raise ValueError(
                        f"rank {rank}: weight of {work} is not the oldest deferred one"
                    )
    if deferred:
        raise ValueError(f"rank {rank}: deferred weights of {list(deferred)} are never run")
    for what, done, wanted in (
        ("forward", forwards, num_micro_batches),
        ("backward", backwards, num_micro_batches * has_backward),
    ):
        for chunk in sorted({rank, 2 * pp - 1 - rank, *done}):
            expected = range(wanted if chunk_rank(chunk, pp) == rank else 0)
            if done[chunk] != list(expected):
                raise ValueError(
                    f"rank {rank}: chunk {chunk} runs {what} of micro-batches {done[chunk]}; "
                    f"expected is each of {expected} once, ascending"
                )


def _check_transfers(rank: int, row: tuple[Slot, ...], pp: int) -> None:
    received, made, sent, used = set[Output](), set[Output](), set[Output](), set[Output]()
    for k, slot in enumerate(row):
        where = f"rank {rank}, slot {k}"
        for t in slot.receives:
            is_right_peer = output_source(t.output, pp) == t.peer != rank
            if t.output in received or not is_right_peer:
                raise ValueError(f"{where}: {t} is received twice, or not from the rank it is on")
            received.add(t.output)
        for need in needed_outputs(slot.action, pp):
            is_local = output_source(need, pp) == rank
            if need not in (made if is_local else received):
                what = "its local input" if is_local else "its input is received"
                raise ValueError(f"{where}: {slot.action} runs before {what}")
            if not is_local:
                used.add(need)
        made.update(made_outputs(slot.action, pp))
        for t in slot.sends:
            is_right_peer = chunk_rank(t.chunk, pp) == t.peer != rank
            if t.output not in made or t.output in sent or not is_right_peer:
                raise ValueError(f"{where}: {t} is sent twice, unmade or to the wrong rank")
            sent.add(t.output)
    unsent = {o for o in made if chunk_rank(o[1], pp) != rank} - sent
    if unsent or received != used:
        raise ValueError(f"rank {rank}: never sent {unsent}, never used {received - used}")


def output_source(output: Output, pp: int) -> int:
    """The pp rank that makes an output."""
    kind, chunk, _ = output
    return chunk_rank(chunk - kind.step, pp)


def _partners(table: ScheduleTable) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(rank, exchange) -> the exchanges at the other end of its transfers."""
    sent: defaultdict[tuple[int, int], list[tuple[int, Output]]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[tuple[int, Output]]] = defaultdict(list)
    for rank, row in enumerate(table):
        for k, slot in enumerate(row):
            for t in slot.sends:
                sent[rank, t.peer].append((k + 1, t.output))
            for t in slot.receives:
                received[t.peer, rank].append((k, t.output))
    partners: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
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

"""Proofs about a schedule table, whoever made it: everything runs and travels once, in order."""

from collections import defaultdict, deque

from pith_engine.schedule import (
    ActionKind,
    Output,
    ScheduleTable,
    Slot,
    chunk_rank,
    made_outputs,
    needed_outputs,
)
from pith_engine.simulate import simulate, unit_schedule_costs


def check_schedule(
    table: ScheduleTable, num_micro_batches: int, *, has_backward: bool = True
) -> None:
    """Prove this, no deadlock, and at most `2 * pp + 1` activations a rank; else a ValueError."""
    pp = len(table)
    for rank, row in enumerate(table):
        _check_compute(rank, row, pp, num_micro_batches, num_micro_batches * has_backward)
        _check_transfers(rank, row, pp)
    # Sends are right, and matched by receives: nothing else is received.
    for rank, live in enumerate(simulate(table, unit_schedule_costs(pp)).peak_live):
        if has_backward and live > 2 * pp + 1:
            raise ValueError(f"rank {rank} holds {live} activations, at most {2 * pp + 1} fit")


def _check_compute(
    rank: int, row: tuple[Slot, ...], pp: int, num_forwards: int, num_backwards: int
) -> None:
    for k, slot in enumerate(row):
        kinds = [action.kind for action in slot.actions]
        if len(kinds) != 1 and kinds != [ActionKind.FORWARD, ActionKind.BACKWARD]:
            raise ValueError(
                f"rank {rank}, slot {k} has {kinds}; allowed is one, or a forward and a backward"
            )
    wanted = {"forward": num_forwards, "backward": num_backwards}
    ran = defaultdict(list, {(what, chunk): [] for what in wanted for chunk in range(2 * pp)})
    deferred = deque[tuple[int, int]]()
    for action in (action for slot in row for action in slot.actions):
        work = (action.chunk, action.micro_batch)
        if action.kind is ActionKind.WEIGHT:
            if not deferred or deferred.popleft() != work:
                raise ValueError(f"rank {rank}: weight of {work} is not the oldest deferred one")
            continue
        what = "forward" if action.kind is ActionKind.FORWARD else "backward"
        if what == "backward" and action.micro_batch not in ran["forward", action.chunk]:
            raise ValueError(f"rank {rank}: backward of {work} before its forward")
        ran[what, action.chunk].append(action.micro_batch)
        if action.kind is ActionKind.BACKWARD_INPUT:
            deferred.append(work)
    if deferred:
        raise ValueError(f"rank {rank}: deferred weights of {list(deferred)} are never run")
    for (what, chunk), done in ran.items():
        expected = range(wanted[what] if chunk_rank(chunk, pp) == rank else 0)
        if done != list(expected):
            raise ValueError(
                f"rank {rank}: chunk {chunk} runs {what} of micro-batches {done}; "
                f"expected is each of {expected} once, ascending"
            )


def _check_transfers(rank: int, row: tuple[Slot, ...], pp: int) -> None:
    held: set[Output] = set()
    unsent: dict[Output, int] = {}
    for k, slot in enumerate(row):
        held.update(t.output for t in slot.receives)
        missing = [need for need in needed_outputs(slot.actions, pp) if need not in held]
        if missing:
            raise ValueError(
                f"rank {rank}, slot {k}: {slot.actions} run before their input is received, or "
                f"made here: {missing}"
            )
        for made in made_outputs(slot.actions, pp):
            target = chunk_rank(made[1], pp)
            if target == rank:
                held.add(made)
            else:
                unsent[made] = target
        for t in slot.sends:
            if unsent.pop(t.output, None) != t.peer:
                raise ValueError(
                    f"rank {rank}, slot {k}: {t} is sent twice, unmade or to the wrong rank"
                )
    if unsent:
        raise ValueError(f"rank {rank}: never sent {list(unsent)}")

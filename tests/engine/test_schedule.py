"""Schedule tables: equal to torch's DualPipeV, proved by the checks; wrong tables are refused."""

from collections import Counter
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from itertools import product
from types import SimpleNamespace

import pytest
from pith_engine.overlap import interleave
from pith_engine.schedule import (
    Action,
    ActionKind,
    ScheduleTable,
    Slot,
    Transfer,
    TransferKind,
    dualpipev,
    forward_only,
)
from pith_engine.schedule_check import check_schedule
from pith_engine.simulate import meetings, simulate, unit_schedule_costs
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

F, B, I, W = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.WEIGHT,
)
TORCH_NAMES = {
    "FORWARD": F,
    "FULL_BACKWARD": B,
    "BACKWARD_INPUT": I,
    "BACKWARD_WEIGHT": W,
}


def torch_row(pp: int, rank: int, num_micro_batches: int) -> list[tuple]:
    """Torch's compute order of one rank; the method needs these two numbers and no stages."""
    stand_in = SimpleNamespace(pp_group_size=pp, _n_microbatches=num_micro_batches)
    actions = ScheduleDualPipeV._calculate_single_rank_operations(stand_in, rank)
    return [
        tuple(
            (TORCH_NAMES[part.computation_type.name], part.stage_index, part.microbatch_index)
            for part in (action.sub_actions or (action,))
        )
        for action in actions
        if action is not None
    ]


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
def test_compute_order_equals_torch(pp):
    for num_micro_batches in (2 * pp, 2 * pp + 1, 3 * pp + 1, 4 * pp):
        table = dualpipev(pp, num_micro_batches)
        for rank, row in enumerate(table):
            ours = [tuple((a.kind, a.chunk, a.micro_batch) for a in slot.actions) for slot in row]
            assert ours == torch_row(pp, rank, num_micro_batches)


@pytest.mark.parametrize("pp", range(1, 17))
def test_every_table_is_proved(pp):
    counts = range(2 * pp, 2 * pp + 12) if pp < 4 else (2 * pp, 2 * pp + 1, 3 * pp)
    for num_micro_batches in counts:
        table = dualpipev(pp, num_micro_batches)
        check_schedule(table, num_micro_batches)
        peaks = simulate(table, unit_schedule_costs(pp)).peak_live
        assert set(peaks) <= {2 * pp, 2 * pp + 1}
        # NCCL: what an exchange sends goes to one rank and meets one exchange there, and so does
        # what it receives from a rank: batches never have to be split to match.
        assert all(len({t.peer for t in slot.sends}) <= 1 for row in table for slot in row)
        for partners in meetings(table).values():
            met = set(partners)
            assert all(sum(rank == peer for rank, _ in met) <= 2 for peer in range(pp))
    for num_micro_batches in (1, 2, pp, 2 * pp + 1):
        check_schedule(forward_only(pp, num_micro_batches), num_micro_batches, has_backward=False)


def test_one_rank_by_hand():
    expected = [
        Action(kind=F, chunk=0, micro_batch=0),
        Action(kind=F, chunk=1, micro_batch=0),
        Action(kind=F, chunk=0, micro_batch=1),
        Action(kind=B, chunk=1, micro_batch=0),
        (
            Action(kind=F, chunk=1, micro_batch=1),
            Action(kind=B, chunk=0, micro_batch=0),
        ),
        Action(kind=B, chunk=1, micro_batch=1),
        Action(kind=I, chunk=0, micro_batch=1),
        Action(kind=W, chunk=0, micro_batch=1),
    ]
    actions = [a if isinstance(a, tuple) else (a,) for a in expected]
    assert dualpipev(1, 2) == (tuple(Slot(actions=a) for a in actions),)


def test_two_ranks_evaluate_by_hand():
    hidden = TransferKind.HIDDEN
    to_1 = Transfer(output=(hidden, 1, 0), peer=1)
    to_3 = Transfer(output=(hidden, 3, 0), peer=0)
    assert forward_only(2, 1) == (
        (
            alone(Action(kind=F, chunk=0, micro_batch=0), sends=(to_1,)),
            alone(Action(kind=F, chunk=3, micro_batch=0), receives=(replace(to_3, peer=1),)),
        ),
        (
            alone(Action(kind=F, chunk=1, micro_batch=0), receives=(replace(to_1, peer=0),)),
            alone(Action(kind=F, chunk=2, micro_batch=0), sends=(to_3,)),
        ),
    )


def test_too_few_micro_batches_are_refused():
    with pytest.raises(ValueError, match=r"num_micro_batches is 7 with pp 4.*2 \* pp = 8"):
        dualpipev(4, 7)
    with pytest.raises(ValueError, match="pp is 0"):
        forward_only(0, 3)
    with pytest.raises(ValueError, match="num_micro_batches 0"):
        forward_only(1, 0)


@cache
def good(pp: int = 3) -> ScheduleTable:
    return dualpipev(pp, 2 * pp + 1)


def with_row(table: ScheduleTable, rank: int, row: list[Slot]) -> ScheduleTable:
    return (*table[:rank], tuple(row), *table[rank + 1 :])


def with_slot(table: ScheduleTable, rank: int, place: int, **changes) -> ScheduleTable:
    row = list(table[rank])
    row[place] = replace(row[place], **changes)
    return with_row(table, rank, row)


def assert_refused(table: ScheduleTable, match: str | None = None, pp: int = 3) -> None:
    with pytest.raises(ValueError, match=match):
        check_schedule(table, 2 * pp + 1)


def alone(action: Action, **transfers) -> Slot:
    return Slot(actions=(action,), **transfers)


def places(table: ScheduleTable):
    return [(rank, k, slot) for rank, row in enumerate(table) for k, slot in enumerate(row)]


def test_every_single_dropped_transfer_is_refused():
    table = good()
    for rank, k, slot in places(table):
        for t in slot.receives:
            rest = tuple(r for r in slot.receives if r != t)
            assert_refused(
                with_slot(table, rank, k, receives=rest), "before their input is received"
            )
        for t in slot.sends:
            rest = tuple(s for s in slot.sends if s != t)
            assert_refused(with_slot(table, rank, k, sends=rest), "never sent")


def test_every_doubled_or_misdirected_transfer_is_refused():
    table = good()
    for rank, k, slot in places(table):
        for t in slot.receives:
            assert_refused(
                with_slot(table, rank, k, receives=(*slot.receives, t)), "do not match in order"
            )
            wrong = tuple(replace(r, peer=rank) if r == t else r for r in slot.receives)
            assert_refused(with_slot(table, rank, k, receives=wrong), "do not match in order")
        for t in slot.sends:
            assert_refused(with_slot(table, rank, k, sends=(*slot.sends, t)), "sent twice")
            wrong = tuple(replace(s, peer=(t.peer + 1) % 3) if s == t else s for s in slot.sends)
            assert_refused(with_slot(table, rank, k, sends=wrong), "wrong rank")


def test_every_removed_or_doubled_action_is_refused():
    for pp in (1, 3):
        table = good(pp)
        for rank, k, slot in places(table):
            row = list(table[rank])
            assert_refused(with_row(table, rank, row[:k] + row[k + 1 :]), pp=pp)
            again = Slot(actions=slot.actions)
            assert_refused(with_row(table, rank, [*row[: k + 1], again, *row[k + 1 :]]), pp=pp)


def test_named_faults_of_compute():
    table = good()
    rank, k, _ = next(p for p in places(table) if p[2].actions[0].kind is W)
    row = list(table[rank])
    assert_refused(with_row(table, rank, row[:k] + row[k + 1 :]), "oldest deferred|never run")
    last = list(table[2])
    assert last[-1].actions[0].kind is W
    assert_refused(with_row(table, 2, last[:-1]), "never run")
    assert_refused(with_row(table, 2, [*last[:-2], last[-1], last[-2]]), "oldest deferred")
    first = table[0][0].actions[0]
    assert_refused(with_row(table, 0, [alone(first), *table[0]]), r"micro-batches \[0, 0, 1")
    foreign = alone(Action(kind=F, chunk=1, micro_batch=0))
    assert_refused(with_row(table, 0, [foreign, *table[0]]), "chunk 1 runs forward")
    beyond = alone(replace(first, micro_batch=7))
    assert_refused(with_row(table, 0, [*table[0], beyond]), r"5, 6, 7\]")
    early = alone(Action(kind=B, chunk=5, micro_batch=0))
    assert_refused(with_row(table, 0, [early, *table[0]]), "before its forward")
    for actions in ((), (first, first), (*early.actions, first), early.actions * 2):
        other = with_row(table, 0, [*table[0], Slot(actions=actions)])
        assert_refused(other, r"slot \d+ has .*one, or a forward and a backward")


def test_other_numbers_of_micro_batches_and_kinds_are_refused():
    with pytest.raises(ValueError, match=r"range\(0, 8\)"):
        check_schedule(good(), 8)
    with pytest.raises(ValueError, match="runs backward"):
        check_schedule(good(), 7, has_backward=False)
    with pytest.raises(ValueError, match="runs backward"):
        check_schedule(forward_only(3, 7), 7)


def execute(table: ScheduleTable) -> Counter:
    """Run a table with labels for tensors and one queue per pair of ranks; fail on a wrong one.

    Returns how often each (kind, chunk, micro-batch) ran.
    """
    last = 2 * len(table) - 1
    queues: dict[tuple[int, int], list[tuple]] = {}
    held: list[dict[tuple, tuple]] = [{} for _ in table]
    reached, done = [0] * len(table), Counter()
    while any(k < len(row) for k, row in zip(reached, table, strict=True)):
        before = list(reached)
        for rank, row in enumerate(table):
            if reached[rank] == len(row):
                continue
            slot = row[reached[rank]]
            needed = [t.peer for t in slot.receives]
            if any(len(queues.get((p, rank), [])) < needed.count(p) for p in needed):
                continue
            for t in slot.receives:
                label = queues[t.peer, rank].pop(0)
                assert label == t.output
                held[rank][label] = label
            for part in slot.actions:
                done[part.kind, part.chunk, part.micro_batch] += 1
                if part.kind is F:
                    if part.chunk > 0:
                        held[rank].pop((TransferKind.HIDDEN, part.chunk, part.micro_batch))
                    label = (TransferKind.HIDDEN, part.chunk + 1, part.micro_batch)
                    held[rank]["saved", part.chunk, part.micro_batch] = ()
                elif part.kind is W:
                    held[rank].pop(("deferred", part.chunk, part.micro_batch))
                    continue
                else:
                    held[rank].pop(("saved", part.chunk, part.micro_batch))
                    if part.chunk < last:
                        held[rank].pop((TransferKind.GRADIENT, part.chunk, part.micro_batch))
                    if part.kind is I:
                        held[rank]["deferred", part.chunk, part.micro_batch] = ()
                    label = (TransferKind.GRADIENT, part.chunk - 1, part.micro_batch)
                held[rank][label] = label
            for t in slot.sends:
                queues.setdefault((rank, t.peer), []).append(held[rank].pop(t.output))
            reached[rank] += 1
        assert reached != before, "nothing can run"
    assert not any(queues.values())
    return done


@pytest.mark.parametrize("pp", [1, 2, 3, 8])
def test_tables_execute(pp):
    """Each micro-batch goes once forward and once back through each chunk, weights included."""
    done = execute(dualpipev(pp, 2 * pp + 3))
    for place in product(range(2 * pp), range(2 * pp + 3)):
        forward, full, inputs, weights = (done[kind, *place] for kind in (F, B, I, W))
        assert (forward, full + inputs, weights) == (1, 1, inputs), place
    assert len(done) == done.total(), "nothing runs twice"


def test_swapped_neighbours_are_refused_or_harmless():
    """Swapped slots keep their transfers; what is accepted must still execute."""
    table = good()
    swaps = [(rank, k) for rank, row in enumerate(table) for k in range(len(row) - 1)]
    refused = 0
    for rank, k in swaps:
        row = list(table[rank])
        row[k], row[k + 1] = row[k + 1], row[k]
        swapped = with_row(table, rank, row)
        try:
            check_schedule(swapped, 7)
        except ValueError:
            refused += 1
        else:
            execute(swapped)
    assert len(swaps) // 2 < refused < len(swaps)


def test_swapped_micro_batches_are_refused():
    table = good()
    row = list(table[0])
    row[0], row[1] = (
        replace(row[0], actions=row[1].actions),
        replace(row[1], actions=row[0].actions),
    )
    assert_refused(with_row(table, 0, row), "ascending")


def test_local_turn_is_ordered():
    table = good(1)
    row = list(table[0])
    row[0], row[1] = row[1], row[0]
    assert_refused(
        with_row(table, 0, row),
        r"before their input is received, or made here: \[\(<TransferKind",
        pp=1,
    )


def test_transfers_out_of_order_are_refused():
    """Two receives from one rank in swapped order: complete, in time, but NCCL mixes them up."""
    table = good()
    rank, k, slot = next(
        p
        for p in places(table)
        if len(p[2].receives) == 2 and len({t.peer for t in p[2].receives}) == 1
    )
    assert_refused(with_slot(table, rank, k, receives=slot.receives[::-1]), "do not match in order")


def test_receives_posted_when_needed_deadlock():
    """The obvious placement: each receive right before its use. The replay must find the cycle."""
    pp, num_micro_batches = 3, 7
    rows = []
    for row in dualpipev(pp, num_micro_batches):
        waiting: dict[tuple, Transfer] = {}
        slots = []
        for slot in row:
            waiting.update({t.output: t for t in slot.receives})
            now = []
            for part in slot.actions:
                kind = TransferKind.HIDDEN if part.kind is F else TransferKind.GRADIENT
                if part.kind is not W:
                    now.append(waiting.pop((kind, part.chunk, part.micro_batch), None))
            slots.append(replace(slot, receives=tuple(t for t in now if t)))
        rows.append(tuple(slots))
    assert_refused(tuple(rows), "deadlock|do not match in order")


def test_crossing_meetings_deadlock():
    """Both ranks send before they post the receive that the other one waits for."""
    slots = [alone(Action(kind=W, chunk=0, micro_batch=0))] * 3
    to_1 = Transfer(output=(TransferKind.HIDDEN, 1, 0), peer=1)
    to_0 = Transfer(output=(TransferKind.GRADIENT, 0, 0), peer=0)
    from_0, from_1 = replace(to_1, peer=0), replace(to_0, peer=1)
    send_first = lambda send, receive: (  # noqa: E731
        replace(slots[0], sends=(send,)),
        slots[1],
        replace(slots[2], receives=(receive,)),
    )
    costs = unit_schedule_costs(2)
    with pytest.raises(ValueError, match=r"deadlock.*rank \d at slot 2 before rank \d at slot 2"):
        simulate((send_first(to_1, from_1), send_first(to_0, from_0)), costs)
    together = lambda send, receive: (  # noqa: E731
        replace(slots[0], sends=(send,)),
        replace(slots[1], receives=(receive,)),
        slots[2],
    )
    simulate((together(to_1, from_1), together(to_0, from_0)), costs)


def test_too_many_live_activations_are_refused():
    """All forwards, then all backwards: right in every other way."""
    num_micro_batches = 4
    actions = [
        Action(kind=F, chunk=chunk, micro_batch=m)
        for m in range(num_micro_batches)
        for chunk in (0, 1)
    ]
    actions += [
        Action(kind=B, chunk=chunk, micro_batch=m)
        for m in range(num_micro_batches)
        for chunk in (1, 0)
    ]
    table = (tuple(map(alone, actions)),)
    with pytest.raises(ValueError, match="holds 8 activations, at most 3"):
        check_schedule(table, num_micro_batches)


def facts(value) -> bool:
    """Whether a value consists of frozen dataclasses, tuples, enums and numbers only."""
    if is_dataclass(value) and not isinstance(value, type):
        frozen = type(value).__dataclass_params__.frozen
        return frozen and all(facts(getattr(value, field.name)) for field in fields(value))
    if type(value) is tuple:
        return all(facts(item) for item in value)
    return value is None or isinstance(value, Enum) or type(value) is int


@pytest.mark.parametrize(
    "table",
    [dualpipev(3, 7), forward_only(3, 4), interleave(3, 2)],
    ids=["train", "eval", "overlap"],
)
def test_tables_hold_facts_only(table):
    assert facts(table)


def test_the_guard_sees_a_callable():
    slot = good()[0][0]
    assert not facts(replace(slot, actions=len))
    assert not facts(replace(slot, receives=("dualpipev",)))
    assert not facts([slot])

"""The interleaved list: complete, ordered, free of use after free, and communication hidden."""

from dataclasses import replace
from itertools import product
from typing import get_args

import pytest
from overlap_check import check_operations
from pith_engine.overlap import Operation, OperationKind, Recompute, Stream, interleave

LENGTHS = [None, 0, 1, 2, 3, 4, 7, 12]
COMMUNICATIONS = (
    OperationKind.FORWARD_DISPATCH,
    OperationKind.FORWARD_COMBINE,
    OperationKind.BACKWARD_DISPATCH,
    OperationKind.BACKWARD_COMBINE,
)


def names(operations: tuple[Operation, ...]) -> list[tuple[str, int]]:
    return [(o.kind.name.lower().replace("_", " "), o.index) for o in operations]


@pytest.mark.parametrize("recompute", get_args(Recompute))
@pytest.mark.parametrize("defer_weights", [False, True])
def test_every_pair_of_lengths_is_accepted(defer_weights, recompute):
    recomputed = get_args(Recompute).index(recompute)
    for forward, backward in product(LENGTHS, LENGTHS):
        facts = {"defer_weights": defer_weights, "recompute": recompute}
        operations = interleave(forward, backward, **facts)
        check_operations(operations, forward, backward, **facts)
        sides = (0 if forward is None else 4 * forward + 1) + (
            0 if backward is None else (4 if defer_weights else 5) * backward + 1
        )
        assert len(operations) == sides + recomputed * (backward or 0)


def test_one_side_alone_runs_in_model_order():
    assert names(interleave(2, None)) == [
        ("forward segment", 0),
        ("forward dispatch", 0),
        ("forward experts", 0),
        ("forward combine", 0),
        ("forward segment", 1),
        ("forward dispatch", 1),
        ("forward experts", 1),
        ("forward combine", 1),
        ("forward segment", 2),
    ]
    assert names(interleave(None, 1)) == [
        ("backward segment", 1),
        ("backward combine", 0),
        ("backward experts", 0),
        ("backward dispatch", 0),
        ("backward weight", 0),
        ("backward segment", 0),
    ]
    assert names(interleave(None, 1, recompute="attention+experts")) == [
        ("backward segment", 1),
        ("backward combine", 0),
        ("recompute experts", 0),
        ("backward experts", 0),
        ("backward dispatch", 0),
        ("backward weight", 0),
        ("recompute segment", 0),
        ("backward segment", 0),
    ]
    assert names(interleave(0, None)) == [("forward segment", 0)]
    assert interleave(None, None) == ()


def test_sides_keep_their_own_order_when_overlapped():
    for forward, backward in product(LENGTHS[1:], LENGTHS[1:]):
        both = interleave(forward, backward)
        for prefix, alone in (
            ("forward", interleave(forward, None)),
            ("backward", interleave(None, backward)),
        ):
            assert [n for n in names(both) if n[0].startswith(prefix)] == names(alone)


@pytest.mark.parametrize("num_layers", [1, 2, 5, 12])
def test_every_all_to_all_runs_under_compute_of_the_other_side(num_layers):
    operations = interleave(num_layers, num_layers)
    for place, operation in enumerate(operations):
        if operation.kind not in COMMUNICATIONS:
            continue
        reader = next(p for p, o in enumerate(operations) if place in o.waits)
        between = [
            o
            for p, o in enumerate(operations)
            if max(operation.waits) < p < reader and o.kind.stream is Stream.COMPUTE
        ]
        side = operation.kind.name.split("_")[0]
        assert any(not o.kind.name.startswith(side) for o in between), (place, operation)


def test_forward_combine_is_launched_before_the_backward_segment():
    listed = names(interleave(4, 4))
    for layer in range(4):
        combine = listed.index(("forward combine", layer))
        assert listed[combine + 1][0] == "backward segment"


def test_streams():
    for operation in interleave(3, 2):
        communicates = operation.kind in COMMUNICATIONS
        assert (operation.kind.stream is not Stream.COMPUTE) == communicates
        if communicates:
            assert operation.kind.stream.name.split("_")[0] == operation.kind.name.split("_")[0]


def test_results_stay():
    freed = [value for operation in interleave(3, 3) for value in operation.frees]
    assert (OperationKind.FORWARD_SEGMENT, 3) not in freed
    assert (OperationKind.BACKWARD_SEGMENT, 0) not in freed


def test_lists_are_cached():
    assert interleave(3, 4) is interleave(3, 4)


def changed(place: int, **fields) -> tuple[Operation, ...]:
    operations = list(interleave(3, 3))
    operations[place] = replace(operations[place], **fields)
    return tuple(operations)


def assert_refused(
    operations: tuple[Operation, ...], match: str, recompute: Recompute = "none"
) -> None:
    with pytest.raises(ValueError, match=match):
        check_operations(operations, 3, 3, recompute=recompute)


def exchanged(operations: tuple[Operation, ...], place: int) -> tuple[Operation, ...]:
    """The list with neighbours `place` and `place + 1` exchanged, and all waits as they were."""
    new_place = {place: place + 1, place + 1: place}
    moved = [
        replace(o, waits=tuple(new_place.get(wait, wait) for wait in o.waits)) for o in operations
    ]
    moved[place], moved[place + 1] = moved[place + 1], moved[place]
    return tuple(moved)


def test_every_missing_wait_is_refused():
    good = interleave(3, 3)
    for place, operation in enumerate(good):
        for wait in operation.waits:
            rest = tuple(w for w in operation.waits if w != wait)
            assert_refused(changed(place, waits=rest), "does not wait|may reuse")


def test_every_missing_double_or_early_free_is_refused():
    good = interleave(3, 3)
    for place, operation in enumerate(good):
        for value in operation.frees:
            rest = tuple(f for f in operation.frees if f != value)
            assert_refused(changed(place, frees=rest), "freed exactly")
            assert_refused(
                changed(place, frees=(*operation.frees, value)), "freed exactly once.*twice"
            )
            moved = list(changed(place, frees=rest))
            moved[0] = replace(moved[0], frees=(*moved[0].frees, value))
            assert_refused(tuple(moved), "before its last use")


def test_memory_still_read_by_another_stream_is_not_reused():
    good = list(interleave(3, 3))
    listed = names(interleave(3, 3))
    value = (OperationKind.BACKWARD_EXPERTS, 2)
    late = listed.index(("backward segment", 2))
    weight = listed.index(("backward weight", 2))
    good[late] = replace(good[late], frees=tuple(f for f in good[late].frees if f != value))
    good[weight] = replace(good[weight], frees=(value,))
    assert_refused(tuple(good), "may reuse its memory")


def test_result_or_weight_freed_is_refused():
    good = interleave(3, 3)
    for kind, index in (
        (OperationKind.FORWARD_SEGMENT, 3),
        (OperationKind.BACKWARD_SEGMENT, 0),
        (OperationKind.BACKWARD_WEIGHT, 1),
    ):
        frees = (*good[-1].frees, (kind, index))
        assert_refused(changed(len(good) - 1, frees=frees), "freed exactly")


def test_kept_rows_dropped_where_the_next_dispatch_could_overwrite_them_are_refused():
    good = interleave(3, 3, recompute="experts")
    for layer in range(3):
        place = names(good).index(("recompute experts", layer))
        late = exchanged(good, place)
        assert names(late)[place][0] == "forward segment"
        assert_refused(late, f"forward dispatch {layer} .*may reuse its memory", "experts")
    alone = interleave(None, 3, recompute="attention+experts")
    place = names(alone).index(("recompute experts", 1))
    check_operations(exchanged(alone, place - 1), None, 3, recompute="attention+experts")


def test_a_backward_before_its_recomputation_is_refused():
    alone = interleave(None, 3, recompute="attention+experts")
    for kind, later in (
        ("recompute experts", "backward experts"),
        ("recompute segment", "backward segment"),
    ):
        place = names(alone).index((kind, 1))
        swapped = exchanged(alone, place)
        assert names(swapped)[place] == (later, 1)
        with pytest.raises(ValueError, match=f"{later} 1 does not wait for {kind} 1"):
            check_operations(swapped, None, 3, recompute="attention+experts")


def test_recomputation_that_was_not_asked_for_is_refused():
    assert_refused(interleave(3, 3, recompute="experts"), "missing, repeated or foreign")
    assert_refused(interleave(3, 3), "missing", "experts")
    assert_refused(interleave(3, 3, recompute="experts"), "missing", "attention+experts")


def test_missing_repeated_misplaced_operations_are_refused():
    good = interleave(3, 3)
    assert_refused(good[:-1], "missing")
    assert_refused((*good, replace(good[-1], waits=(), frees=())), "repeated")
    assert_refused(interleave(3, 2), "missing")
    assert_refused(interleave(3, 3, defer_weights=True), "missing")


def test_swapped_neighbours_on_one_stream_are_refused():
    good = interleave(3, 3)
    place = names(good).index(("backward weight", 2))
    experts = names(good).index(("backward experts", 2))
    swapped = list(good)
    swapped[place], swapped[experts] = good[experts], good[place]
    assert_refused(tuple(swapped), "does not wait|earlier positions")


def test_bad_waits_are_refused():
    assert_refused(changed(0, waits=(5,)), "earlier positions")
    assert_refused(changed(2, waits=(0,)), "other streams")

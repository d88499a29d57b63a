"""Proofs about a list of operations, whoever made it: complete, ordered, free of use after free."""

from pith_engine.overlap import (
    Operation,
    OperationKind,
    Recompute,
    Stream,
    Value,
    host_order,
    output_users,
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
    expected = host_order(num_forward_layers, num_backward_layers, defer_weights, recompute)
    wrong = [_name(v) for v in {*values, *expected} if values.count(v) != expected.count(v)]
    if wrong:
        raise ValueError(f"missing, repeated or foreign operations: {sorted(wrong)}")
    before = _before(operations)
    users = output_users(values)
    for place, (value, readers) in enumerate(users.items()):
        for reader in readers:
            if place not in before[reader]:
                raise ValueError(f"{_name(values[reader])} does not wait for {_name(value)}")
    _check_frees(operations, before, users)


def _before(operations: tuple[Operation, ...]) -> list[set[int]]:
    """For each operation, the positions known complete when it starts."""
    before: list[set[int]] = []
    last: dict[Stream, int] = {}
    for place, operation in enumerate(operations):
        stream = operation.kind.stream
        for wait in operation.waits:
            if not 0 <= wait < place or operations[wait].kind.stream is stream:
                raise ValueError(
                    f"operation {place} waits for position {wait}; allowed are earlier positions "
                    f"on other streams than {stream.name}"
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
        stream, after = value[0].stream, range(place + 1, len(operations))
        later = next((p for p in after if operations[p].kind.stream is stream), None)
        for use in uses:
            if later is not None and use not in before[later]:
                raise ValueError(
                    f"{_name(value)} is freed at position {place}, but position {later} may reuse "
                    f"its memory while position {use} still reads it"
                )


def _name(value: Value) -> str:
    return f"{value[0].name.lower().replace('_', ' ')} {value[1]}"

"""What is wrong with a configuration: lines, each beginning with the field's full path.

Its method `violations() -> list[str]` gives them (`optim.eps = -1.0: above 0 and finite`), and a
command those of the whole tree. The trap: a check in `__post_init__` would end alone, before that.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, is_dataclass
from difflib import get_close_matches
from itertools import chain
from math import inf
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def raise_violations(violations: Sequence[str], what: str) -> None:
    """One ValueError with a line for each, if there are any."""
    if violations:
        raise ValueError(f"{what}:" + "".join(f"\n  - {violation}" for violation in violations))


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """`did you mean 'x'? ` with the nearest of `allowed`, or nothing."""
    near = get_close_matches(word, list(allowed), n=1, cutoff=0.4)
    return f"did you mean {near[0]!r}? " if near else ""


def size_violations(config: Any, *, may_be_zero: Sequence[str] = ()) -> list[str]:
    """Integers below 1 and floats not above 0 and finite in a model's own fields."""
    found, types = [], {field.name: field.type for field in fields(config)}
    for name, value in asdict(config).items():
        least = 0 if name in may_be_zero else 1
        if types[name] is int and value < least:
            found.append(f"model.{name} = {value}: must be at least {least}")
        if types[name] is float and not 0 < value < inf:
            found.append(f"model.{name} = {value}: must be positive and finite")
    return found


def type_violations(values: Any, annotation: Any, path: str) -> list[str]:
    """Where `values`, a dataclass as `asdict` gives it, holds a value of another type.

    An int serves as a float, a bool not as a number. A union means its member of these fields.
    """
    is_union = get_origin(annotation) in (Union, UnionType)
    members = get_args(annotation) if is_union else (annotation,)
    for member in members:
        hints = get_type_hints(member) if is_dataclass(member) else {}
        if hints and isinstance(values, dict) and values.keys() == hints.keys():
            prefix = f"{path}." if path else ""
            found = (type_violations(values[name], hints[name], prefix + name) for name in values)
            return [*chain(*found)]
    if _has_type(values, annotation):
        return []
    names = [m.__name__ if isinstance(m, type) else str(m) for m in members]
    name = " | ".join(names).replace("NoneType", "None")
    return [f"{path} is {values!r}, of type {type(values).__name__}: allowed is {name}"]


def _has_type(value: Any, annotation: Any) -> bool:
    origin, members = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return any(not type_violations(value, member, "") for member in members)
    if origin is Literal:
        return any(type(value) is type(member) and value == member for member in members)
    if origin is tuple and isinstance(value, tuple):
        kinds = members[:1] * len(value) if members[-1] is ... else members
        return len(kinds) == len(value) and all(map(_has_type, value, kinds))
    if annotation in (int, float) and isinstance(value, bool):
        return False
    kind = (int, float) if annotation is float else origin or annotation
    return isinstance(value, kind)

"""Guard: what runs at a call site is found by reading it.

No registry, no lookup of code by a string, no alias, no re-export, no callable in a table, no
module state, one name for one thing.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum

from source_tree import (
    PACKAGES,
    SourceFile,
    dataclass_decorator,
    field_docstrings,
    functions,
    other_files,
    source_files,
    top_level_names,
)

LOOKUPS = {
    "getattr",
    "hasattr",
    "setattr",
    "delattr",
    "eval",
    "exec",
    "globals",
    "locals",
    "vars",
    "__import__",
    "import_module",
    "attrgetter",
    "methodcaller",
    "spec_from_file_location",
    "run_path",
    "run_module",
}

ALLOWED_LOOKUPS = {
    ("pith_apps.recipes.load", "run_path"): "RECIPE may be a Python file of the user's",
}
"""(module, function) -> why it may."""

PLAIN_OPERATORS = {"linear": "without a queue it is torch's own linear"}
"""Public functions with a fused path that need no reference of ours -> why."""

MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


CHANGES = {"append", "extend", "add", "update", "pop", "clear", "setdefault", "remove", "insert"}
"""Methods that change a container in place."""


def own_module(name: str) -> bool:
    """Whether a dotted name lies in one of the four packages."""
    return name.split(".")[0] in PACKAGES


def called_name(node: ast.Call) -> str:
    """Last component of what is called."""
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def test_nothing_is_looked_up_by_a_string():
    found = []
    for source in source_files():
        for node in ast.walk(source.tree):
            match node:
                case ast.Call() if called_name(node) in LOOKUPS:
                    name = called_name(node)
                case ast.Attribute(attr="__dict__" | "__subclasses__" as name):
                    pass
                case _:
                    continue
            if (source.module, name) not in ALLOWED_LOOKUPS:
                found.append(f"{source.name}:{node.lineno} uses {name}")
    assert not found, "\n".join(found)


def test_imports_have_no_aliases():
    found = []
    for source in (*source_files(), *other_files()):
        for node in ast.walk(source.tree):
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            for alias in node.names:
                whole = alias.name
                if isinstance(node, ast.ImportFrom):
                    whole = f"{node.module}.{alias.name}"
                ours = source.package in PACKAGES or own_module(whole)
                if alias.asname and ours:
                    found.append(f"{source.name}:{node.lineno} imports {whole} as {alias.asname}")
                if alias.name == "*":
                    found.append(f"{source.name}:{node.lineno} imports everything")
    assert not found, "\n".join(found)


def test_names_are_imported_from_where_they_are_defined():
    """No re-exports: `__init__.py` is empty but for a docstring, and nothing passes names on.

    That of `pith_ops` also refuses an old torch, before an operator's import of torch fails.
    """
    defined = {source.module: top_level_names(source.tree) for source in source_files()}
    found = []
    for source in source_files():
        if source.path.name == "__init__.py":
            body = [node for node in source.tree.body if not isinstance(node, ast.Expr)]
            if source.module == "pith_ops":
                own = [n for n in body if isinstance(n, ast.FunctionDef)]
                assert [function.name for function in own] == ["check_torch_version"]
                standard = ("importlib.metadata", "re")
                body = [
                    node
                    for node in body
                    if node not in own
                    and not (isinstance(node, ast.ImportFrom) and node.module in standard)
                ]
            if body:
                found.append(f"{source.name}: holds more than a docstring")
        if "__all__" in defined[source.module]:
            found.append(f"{source.name}: has __all__")
    for source in (*source_files(), *other_files()):
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.ImportFrom) or not own_module(node.module or ""):
                continue
            for alias in node.names:
                is_module = f"{node.module}.{alias.name}" in defined
                if not is_module and alias.name not in defined.get(node.module, {}):
                    found.append(
                        f"{source.name}:{node.lineno} {node.module} does not define {alias.name}"
                    )
    assert not found, "\n".join(found)


def test_public_names_are_unique():
    """One grep for a name finds that thing and its uses, nothing else."""
    places = defaultdict(list)
    for source in source_files():
        for name, node in top_level_names(source.tree).items():
            if not name.startswith("_") and name != "main":
                places[name].append(f"{source.name}:{node.lineno}")
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice, "\n".join(f"{name}: {', '.join(where)}" for name, where in twice.items())


def test_asserts_carry_a_message():
    """An assert states a bug of ours and says which; a user's mistake is a ValueError."""
    bare = [
        f"{source.name}:{node.lineno} {ast.unparse(node)}"
        for source in source_files()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Assert) and node.msg is None
    ]
    assert not bare, "\n".join(bare)


def test_tests_import_no_private_names():
    """`tests/` sees what a user sees. torch's schedule, an oracle of one test, is the exception."""
    found = []
    for source in other_files():
        if "ScheduleDualPipeV" in source.text and source.path.name != "test_guard_indirection.py":
            continue
        roots = set()
        for node in ast.walk(source.tree):
            match node:
                case ast.Import():
                    names = [alias.name for alias in node.names]
                case ast.ImportFrom():
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                case _:
                    continue
            roots.update((a.asname or a.name).split(".")[0] for a in node.names)
            for name in names:
                parts = [p for p in name.split(".") if p.startswith("_") and p != "__future__"]
                if parts:
                    found.append(f"{source.name}:{node.lineno} imports {name}")
        for node in ast.walk(source.tree):
            match node:
                case ast.Attribute(value=ast.Name(id=root), attr=attr) if root in roots:
                    allowed = attr == "_exit" or root == "ScheduleDualPipeV"  # os._exit is public
                    if re.match(r"_[a-z]", attr) and not allowed:
                        found.append(f"{source.name}:{node.lineno} reads {root}.{attr}")
    assert not found, "\n".join(found)


def table_literals(source: SourceFile) -> Iterator[tuple[ast.AST, list[ast.expr]]]:
    """Displays of values that could be a table: dict values, elements of lists and tuples."""
    for node in ast.walk(source.tree):
        match node:
            case ast.Dict():
                yield node, list(node.values)
            case ast.List() | ast.Set():
                yield node, list(node.elts)
            case ast.Tuple(ctx=ast.Load()):
                yield node, list(node.elts)


def test_tables_hold_no_callables():
    """The executor is a `match` whose arms are direct calls: no function waits in a container."""
    found = []
    for source in source_files():
        callables = {
            name
            for name, node in top_level_names(source.tree).items()
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom) and own_module(node.module or ""):
                # A class is a fact (isinstance tuples); a function starts in lower case.
                callables.update(a.name for a in node.names if a.name[0].islower())
        for node, elements in table_literals(source):
            for element in elements:
                inner = element.elts if isinstance(element, ast.Tuple) else [element]
                for value in inner:
                    is_callable = isinstance(value, ast.Lambda) or (
                        isinstance(value, ast.Name) and value.id in callables
                    )
                    if is_callable and not is_shadowed(source, value):
                        found.append(f"{source.name}:{node.lineno} holds {ast.unparse(value)}")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and dataclass_decorator(node):
                for item in node.body:
                    if isinstance(item, ast.AnnAssign) and "Callable" in ast.unparse(item):
                        found.append(f"{source.name}:{item.lineno} a field holds a callable")
    assert not found, "\n".join(found)


def is_shadowed(source: SourceFile, value: ast.expr) -> bool:
    """Whether the name is a local variable or argument of the function it is used in."""
    if not isinstance(value, ast.Name):
        return False
    for function in functions(source.tree):
        if function.lineno <= value.lineno <= (function.end_lineno or 0):
            arguments = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
            stored = {
                n.id
                for n in ast.walk(function)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
            if value.id in arguments | stored:
                return True
    return False


def leaves(value: object) -> Iterator[object]:
    """Every value inside nested tuples and dataclasses."""
    if isinstance(value, (tuple, list, frozenset)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        yield from leaves(tuple(value.items()))
    elif is_dataclass(value):
        for field in fields(value):
            yield from leaves(getattr(value, field.name))
    else:
        yield value


def test_schedule_and_overlap_are_facts():
    """The real tables, walked to their leaves: numbers, enums and None."""
    from pith_engine.overlap import interleave
    from pith_engine.schedule import dualpipev, forward_only

    for table in (dualpipev(3, 7), forward_only(2, 5), interleave(2, 3), interleave(1, None)):
        assert table
        kinds = {type(leaf) for leaf in leaves(table)}
        wrong = [k for k in kinds if not issubclass(k, (int, float, Enum, type(None)))]
        assert not wrong, f"a table holds {wrong}"


def test_modules_keep_no_state():
    """Module level holds constants: no `global`, and no container that something changes."""
    found = []
    for source in source_files():
        containers = set()
        for name, node in top_level_names(source.tree).items():
            value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
            if isinstance(value, MUTABLE) or (
                isinstance(value, ast.Call)
                and called_name(value) in ("dict", "list", "set", "defaultdict", "deque", "local")
            ):
                containers.add(name)
        for node in ast.walk(source.tree):
            match node:
                case ast.Global():
                    found.append(f"{source.name}:{node.lineno} global {', '.join(node.names)}")
                case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                    if name in containers:
                        found.append(f"{source.name}:{node.lineno} changes {name}")
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)):
                    if name in containers and method in CHANGES:
                        found.append(f"{source.name}:{node.lineno} changes {name}")
    assert not found, "\n".join(found)


def test_dataclasses_are_frozen_and_documented():
    found = []
    for source in source_files():
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.ClassDef) or not (decorator := dataclass_decorator(node)):
                continue
            where = f"{source.name}:{node.lineno} {node.name}"
            if "frozen=True" not in ast.unparse(decorator):
                if node.name.endswith("Config"):
                    found.append(f"{where} is not frozen")
                continue
            if node.name.endswith("Config") and "kw_only=True" not in ast.unparse(decorator):
                found.append(f"{where} is not keyword-only")
            if node.name.startswith("_"):
                continue
            bare = [name for name, text in field_docstrings(node).items() if not text]
            if bare:
                found.append(f"{where} has fields without a docstring: {bare}")
    assert not found, "\n".join(found)


def test_every_option_is_read():
    """An option that nothing reads would be accepted and ignored."""
    read = {
        node.attr
        for source in source_files()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    unread = [
        f"{source.name}:{node.lineno} {node.name}.{name}"
        for source in source_files()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Config", "Arguments"))
        for name in field_docstrings(node)
        if name not in read
    ]
    assert not unread, "\n".join(unread)


def test_modules_and_public_names_are_documented():
    """ruff asks for docstrings; this asks that a module's says more than its name."""
    for source in source_files():
        text = ast.get_docstring(source.tree) or ""
        least = 10 if source.path.name == "__init__.py" else 80
        assert len(text) >= least, f"{source.name}: its docstring should teach"
        assert "TODO" not in source.text, f"{source.name} has a TODO"


def test_every_fused_operator_has_a_reference():
    """A public function that calls an autograd.Function or a kernel has a plain twin beside it."""
    found = []
    for source in source_files():
        if source.package != "pith_ops":
            continue
        names = top_level_names(source.tree)
        fused = {
            name
            for name, node in names.items()
            if isinstance(node, ast.ClassDef)
            and any(ast.unparse(base).endswith("Function") for base in node.bases)
        }
        for name, node in names.items():
            if not isinstance(node, ast.FunctionDef) or name.startswith("_"):
                continue
            calls = {
                inner.value.id
                for inner in ast.walk(node)
                if isinstance(inner, ast.Attribute)
                and inner.attr == "apply"
                and isinstance(inner.value, ast.Name)
            }
            if calls & fused and f"{name}_reference" not in names and name not in PLAIN_OPERATORS:
                found.append(f"{source.name}:{node.lineno} {name} has no {name}_reference")
    assert not found, "\n".join(found)

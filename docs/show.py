"""Print definitions by name: where they stand, their code with line numbers, and their uses.

    python3 docs/show.py clip_gradients Mesh.create

Public names are unique over the four packages, so a name needs no file; a private one may be given
as `module.py:_name`. A method or a field is `Class.name`, a module's docstring is `module.py`, the
first lines of a class are `Class.`.
Needs nothing installed and writes nothing.
"""

import ast
import re
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_USES = 2


def main(names: list[str]) -> int:
    """Print every name; return 1 if one is unknown."""
    if not names:
        print(__doc__)
        return 1
    files = {path: path.read_text() for path in sorted(ROOT.glob("packages/*/src/**/*.py"))}
    trees = {path: ast.parse(text) for path, text in files.items()}
    places = {name: definitions(name, trees) for name in names}
    # A use inside another definition that is printed anyway needs no line of its own.
    printed = {(path, n) for found in places.values() for path, lines in found for n in lines}
    last = None
    for name, found in places.items():
        for path, lines in found:
            if path != last:
                print(path.relative_to(ROOT))
            last = path
            text = files[path].splitlines()
            print("\n".join(f"{number} {text[number - 1]}" for number in lines))
        if found and not name.endswith((".py", ".")):
            head = files[found[0][0]].splitlines()[found[0][1].start - 1].strip()
            show_uses(name.rpartition(":")[2], head, files, trees, printed)
    unknown = [name for name, found in places.items() if not found]
    if unknown:
        print(f"no such name: {', '.join(unknown)}")
    return 1 if unknown else 0


def definitions(name: str, trees: dict[Path, ast.Module]) -> list[tuple[Path, range]]:
    """Files and lines of a name's definitions, decorators included, or of a file's docstring."""
    module, _, symbol = name.rpartition(":")
    found = []
    for path, tree in trees.items():
        if module and path.name != module:
            continue
        for node in [tree.body[0]] if path.name == name else find(tree, symbol):
            decorators = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            last = node.end_lineno or first
            if name.endswith(".") and isinstance(node, ast.ClassDef):
                last = node.body[0].end_lineno or first
            found.append((path, range(first, last + 1)))
    return found


def find(tree: ast.Module, name: str) -> list[ast.stmt]:
    """Definitions of `name` or `Class.member` at the top level of a module."""
    first, _, member = name.partition(".")
    nodes = [node for node in tree.body if first in defined(node)]
    if not member:
        return nodes
    bodies = [node.body for node in nodes if isinstance(node, ast.ClassDef)]
    return [item for body in bodies for item in body if member in defined(item)]


def defined(node: ast.stmt) -> list[str]:
    """Names that a statement defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign():
            return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def use_pattern(name: str, head: str) -> re.Pattern[str]:
    """What a use of `name`, whose definition begins with the line `head`, looks like."""
    owner, _, word = name.rpartition(".")
    if not owner or word == "__init__":
        return re.compile(rf"(?<![\w.]){owner or word}\b")
    if head in ("@staticmethod", "@classmethod"):
        return re.compile(rf"\b{owner}\.{word}\(")
    is_called = head != "@property" and head.startswith(("def ", "@"))
    return re.compile(rf"\.{word}\(" if is_called else rf"\.{word}\b(?!\()")


def show_uses(
    name: str,
    head: str,
    files: dict[Path, str],
    trees: dict[Path, ast.Module],
    printed: set[tuple[Path, int]],
) -> None:
    """Print lines that use a name and are not printed; no definitions, imports, strings."""
    pattern = use_pattern(name, head)
    skipped = re.compile(r"^\s*(def|class|from|import) |^\s*\w+,?$")
    uses = []
    for path, text in files.items():
        found = [
            (number, line)
            for number, line in enumerate(text.splitlines(), 1)
            if pattern.search(line.partition("#")[0]) and not skipped.search(line)
        ]
        strings = string_lines(trees[path]) if found else set()
        uses += [
            f"used {path.relative_to(ROOT)}:{number}: {line.strip()}"
            for number, line in found
            if number not in strings and (path, number) not in printed
        ]
    # Another class may have a member of that name: `mesh.data` before `config.data`.
    owner, _, word = name.lower().rpartition(".")
    uses.sort(key=lambda line: f"{owner}.{word}" not in line)
    for line in uses[:MAX_USES]:
        print(line)
    if len(uses) > MAX_USES:
        print(f"and {len(uses) - MAX_USES} more")


def string_lines(tree: ast.Module) -> set[int]:
    """Lines of docstrings and of other expressions that are only a string."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


if __name__ == "__main__":
    # `show.py NAME | head` closes the pipe early.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))

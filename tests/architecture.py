"""Write the layers of `docs/architecture.md` from the sources, or check that they are up to date.

    python tests/architecture.py            exit 1 and a diff if the document is stale
    python tests/architecture.py --write    rewrite the part between the two markers

Everything else in the document is written by hand.
"""

import ast
import difflib
import sys

from source_tree import PACKAGES, ROOT, SourceFile, code_lines, source_files

DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- layers: written by tests/architecture.py -->"
END = "<!-- layers: end -->"


def main(arguments: list[str]) -> int:
    """Check or write; return the exit code."""
    text = DOCUMENT.read_text()
    updated = update(text)
    if "--write" in arguments:
        DOCUMENT.write_text(updated)
        return 0
    diff = difflib.unified_diff(text.splitlines(), updated.splitlines(), lineterm="", n=0)
    print("\n".join(diff))
    return 0 if text == updated else 1


def update(text: str) -> str:
    """The document with its layers as the sources are now."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{layers()}\n{END}{tail}"


def layers() -> str:
    """One table a package, highest layer first: what a module is for and how long it is."""
    parts = []
    for package in reversed(PACKAGES):
        sources = [s for s in source_files() if s.package == package]
        modules = [s for s in sources if s.path.name != "__init__.py"]
        (top,) = [s for s in sources if s.module == package]
        total = sum(code_lines(source) for source in sources)
        parts += [f"### {package}", "", summary(top), ""]
        parts += ["| module | lines | code | what it is |", "|---|---|---|---|"]
        for source in modules:
            name = source.path.relative_to(top.path.parent).as_posix()
            lines = source.text.count("\n")
            parts.append(f"| `{name}` | {lines} | {code_lines(source)} | {summary(source)} |")
        parts += [f"| all | | {total} | |", ""]
    return "\n".join(parts)


def summary(source: SourceFile) -> str:
    """First line of the module's docstring, as a table cell."""
    line = (ast.get_docstring(source.tree) or "").split("\n")[0]
    return line.replace("|", "\\|").rstrip(".")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What the guard tests read: sources and documents, parsed, never imported.

A guard states a policy of the project as a test. Everything here is a pure function of the files in
the checkout, so a guard runs without torch and names the file and the line it complains about.
"""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pith_ops", "pith_engine", "pith_models", "pith_apps")
"""Import names, lowest layer first: each may import those before it."""

NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One Python file of the checkout."""

    path: Path
    """Absolute path."""
    module: str
    """Dotted import name; the bare file name outside the packages."""
    text: str
    """Its contents."""
    tree: ast.Module
    """Its syntax tree."""

    @property
    def name(self) -> str:
        """Path from the root of the checkout."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def package(self) -> str:
        """Import name of the package it belongs to; the folder's name outside the packages."""
        return self.module.split(".")[0]


def distribution_folder(package: str) -> Path:
    """`pith_ops` -> the folder of its distribution."""
    return ROOT / "packages" / package.replace("_", "-")


def read_source(path: Path, module: str) -> SourceFile:
    """Parse one file."""
    text = path.read_text(encoding="utf-8")
    return SourceFile(path=path, module=module, text=text, tree=ast.parse(text, str(path)))


@functools.cache
def source_files() -> tuple[SourceFile, ...]:
    """Every Python file of the four packages."""
    files = []
    for package in PACKAGES:
        base = distribution_folder(package) / "src"
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            files.append(read_source(path, ".".join(parts).removesuffix(".__init__")))
    return tuple(files)


@functools.cache
def other_files() -> tuple[SourceFile, ...]:
    """Every Python file outside the packages: tests, skills, scripts of the documents."""
    folders = [ROOT / name for name in ("tests", "skills", "docs")]
    paths = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return tuple(read_source(path, path.stem) for path in paths)


def code_lines(source: SourceFile) -> int:
    """Lines that are not blank, not a comment and not part of a docstring.

    Every string that stands alone as a statement counts as a docstring: field docstrings too.
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(source.tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def is_benchmark(source: SourceFile) -> bool:
    """Whether the file belongs to the parts of pith_apps that no training run executes."""
    return source.module.startswith(("pith_apps.bench", "pith_apps.ate_bench"))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def top_level_names(tree: ast.Module) -> dict[str, ast.stmt]:
    """Names that a module defines itself (not those it imports) -> the defining statement."""
    names: dict[str, ast.stmt] = {}
    for node in tree.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names[node.name] = node
            case ast.Assign():
                for target in node.targets:
                    names.update((t.id, node) for t in ast.walk(target) if isinstance(t, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                names[name] = node
            case _ if type(node).__name__ == "TypeAlias":  # a statement since Python 3.12
                names[ast.unparse(node).split()[1]] = node
    return names


def class_members(node: ast.ClassDef) -> set[str]:
    """Methods, fields and constants of a class body, and attributes set on `self` in methods."""
    members = set()
    for item in node.body:
        match item:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                members.add(item.name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                members.add(name)
            case ast.Assign():
                members.update(t.id for t in item.targets if isinstance(t, ast.Name))
    for inner in ast.walk(node):
        match inner:
            case ast.Attribute(value=ast.Name(id="self"), attr=attr, ctx=ast.Store()):
                members.add(attr)
    return members


def dataclass_decorator(node: ast.ClassDef) -> ast.expr | None:
    """The `@dataclass` decorator of a class, if it has one."""
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(target, ast.Name) and target.id == "dataclass":
            return decorator
    return None


def field_docstrings(node: ast.ClassDef) -> dict[str, str | None]:
    """Annotated fields of a class -> the string that follows each, or None."""
    fields: dict[str, str | None] = {}
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            if ast.unparse(item.annotation).startswith("ClassVar"):
                continue
            match after:
                case ast.Expr(value=ast.Constant(value=str() as text)):
                    fields[item.target.id] = text
                case _:
                    fields[item.target.id] = None
    return fields


@dataclass(frozen=True, kw_only=True)
class Fence:
    """One fenced block of a Markdown file."""

    language: str
    """The info string after the opening fence, e.g. `bash`."""
    text: str
    """What stands between the fences."""
    line: int
    """Line number of the opening fence."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One Markdown file of the checkout."""

    path: Path
    """Absolute path."""
    prose: str
    """Its text with fenced blocks replaced by blank lines."""
    fences: tuple[Fence, ...]
    """Its fenced blocks."""

    @property
    def name(self) -> str:
        """Path from the root of the checkout."""
        return self.path.relative_to(ROOT).as_posix()

    def spans(self) -> Iterator[tuple[int, str]]:
        """Line number and text of every inline code span outside the fences."""
        for number, line in enumerate(self.prose.split("\n"), start=1):
            for match in re.finditer(r"`([^`]+)`", line):
                yield number, match.group(1)

    def links(self) -> Iterator[tuple[int, str]]:
        """Line number and target of every relative Markdown link."""
        for number, line in enumerate(self.prose.split("\n"), start=1):
            for match in re.finditer(r"\]\(([^)#\s]+)[^)]*\)", line):
                if "://" not in match.group(1):
                    yield number, match.group(1)


def read_document(path: Path) -> Document:
    """Split a Markdown file into prose and fenced blocks."""
    prose, fences, block, opened = [], [], [], 0
    language: str | None = None
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        is_fence = line.lstrip().startswith("```")
        if is_fence and language is None:
            language, block, opened = line.strip().removeprefix("```").strip(), [], number
        elif is_fence:
            text = "\n".join(block)
            fences.append(Fence(language=language or "", text=text, line=opened))
            language = None
        elif language is not None:
            block.append(line)
        prose.append("" if is_fence or language is not None else line)
    return Document(path=path, prose="\n".join(prose), fences=tuple(fences))


@functools.cache
def documents() -> tuple[Document, ...]:
    """Every Markdown file that belongs to the project."""
    paths = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "skills").rglob("*.md")]
    for package in PACKAGES:
        paths += distribution_folder(package).glob("*.md")
    return tuple(read_document(path) for path in sorted(paths))

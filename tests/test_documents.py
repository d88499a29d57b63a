"""Documents are true: what a Markdown file names exists, and what it says to run is run.

Checked in every Markdown file of the project:

1. A link or a path in backticks leads to a file.
2. `file.py:name` names something that file defines.
3. An identifier in backticks occurs in the code; an `--option` is one that the code declares.
4. Every line of a ```bash block is executed (slow), on `demo --train.steps 4` where the command
   differs only in that; every ```python block is executed (slow).

A block with another language (`text`, `console`) is not run: trees, output, and commands for
machines that a test does not have.
"""

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from source_tree import (
    PACKAGES,
    ROOT,
    class_members,
    distribution_folder,
    documents,
    other_files,
    source_files,
    top_level_names,
)

SUFFIXES = (".py", ".md", ".toml", ".yml", ".lock", ".jsonl", ".json", ".npy", ".png", ".txt")
WRITTEN_BY_RUNS = ("runs/", "checkpoints/", "export/", "log/", "tensorboard/", "step-")
"""Beginnings of paths that a run writes: they are not in the checkout."""

OTHERS_NAMES = {"fully_shard", "torch_dtype", "FileSystemWriter", "match", "parts"}
"""Identifiers that a document may mention and no file here defines."""

NOT_RUN = {
    r"^pip install uv$": "the environment of this test has it",
    r"^uv run pytest": "that command is what runs this test",
    r"^\.ci/run": "that script is what runs this test",
}
"""Commands that this test leaves out -> why."""


def folders(document: Path) -> list[Path]:
    """Where a path in a document may start."""
    sources = [distribution_folder(package) / "src" for package in PACKAGES]
    inner = [base / package for base, package in zip(sources, PACKAGES, strict=True)]
    return [ROOT, document.parent, ROOT / "packages", *sources, *inner, ROOT / "tests"]


def expand_braces(text: str) -> list[str]:
    """`a/{b,c}.py` -> `a/b.py`, `a/c.py`."""
    pieces = re.split(r"\{([^}]*)\}", text)
    choices = [p.split(",") if i % 2 else [p] for i, p in enumerate(pieces)]
    return ["".join(choice) for choice in product(*choices)]


def find_path(text: str, document: Path) -> list[Path]:
    """Files that a path in a document means; empty if there is none."""
    found: list[Path] = []
    for part in expand_braces(text.rstrip("/")):
        matches = [p for folder in folders(document) for p in sorted(folder.glob(part))]
        if not matches:
            return []
        found += matches
    return found


def is_path(text: str) -> bool:
    """Whether a code span looks like a path of the checkout."""
    if not re.fullmatch(r"[\w.*{},/-]+", text) or text.startswith(("--", "/")):
        return False
    return not text.startswith(WRITTEN_BY_RUNS) and ("/" in text or text.endswith(SUFFIXES))


@functools.cache
def written_file_names() -> set[str]:
    """Names of files as the code spells them: `metrics.jsonl`, `tokens.npy`."""
    pattern = re.compile(r"""["'/]([\w.-]+\.\w+)["']""")
    return {name for source in source_files() for name in pattern.findall(source.text)}


@functools.cache
def known_words() -> set[str]:
    """Every identifier of the code, the tests, the skills and the build files."""
    texts = [source.text for source in (*source_files(), *other_files())]
    texts += [path.read_text() for path in ROOT.glob("*.toml")]
    texts += [path.read_text() for path in ROOT.glob("packages/*/pyproject.toml")]
    texts += [path.read_text() for path in ROOT.glob(".github/workflows/*.yml")]
    return {word for text in texts for word in re.findall(r"\w+", text)}


@functools.cache
def symbols(path: Path) -> set[str]:
    """What a Python file defines: `name`, `Class` and `Class.member`."""
    (source,) = [s for s in (*source_files(), *other_files()) if s.path == path]
    names = top_level_names(source.tree)
    found = set(names)
    for name, node in names.items():
        if type(node).__name__ == "ClassDef":
            found |= {f"{name}.{member}" for member in class_members(node)}
    return found


def test_links_lead_somewhere():
    dead = [
        f"{document.name}:{line}: {target}"
        for document in documents()
        for line, target in document.links()
        if not (document.path.parent / target).exists()
    ]
    assert not dead, "\n".join(dead)


def test_paths_exist():
    missing = []
    for document in documents():
        for line, span in document.spans():
            path = span.partition(":")[0]
            if not is_path(path) or find_path(path, document.path):
                continue
            if "/" not in path and path in written_file_names():
                continue
            missing.append(f"{document.name}:{line}: {path}")
    assert not missing, "\n".join(missing)


def test_symbols_are_defined_where_the_text_says():
    wrong = []
    for document in documents():
        for line, span in document.spans():
            match = re.fullmatch(r"([\w./-]+\.py):([A-Za-z_][\w.]*)", span)
            if not match:
                continue
            paths = find_path(match.group(1), document.path)
            if not any(match.group(2) in symbols(path.resolve()) for path in paths):
                wrong.append(f"{document.name}:{line}: {span}")
    assert not wrong, "\n".join(wrong)


def test_identifiers_occur_in_the_code():
    unknown = []
    for document in documents():
        for line, span in document.spans():
            if not re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", span) or is_path(span):
                continue
            words = [w for w in span.removesuffix("()").split(".") if w]
            names = [w for w in words if "_" in w or re.search(r"[a-z][A-Z]", w) or "." in span]
            unknown += [
                f"{document.name}:{line}: {span}"
                for word in names
                if word not in known_words() | OTHERS_NAMES
            ]
    assert not unknown, "\n".join(unknown)


def test_the_map_names_what_can_be_shown():
    """Every name in the map of AGENTS.md is one that `docs/show.py` finds."""
    text = (ROOT / "AGENTS.md").read_text()
    section = text.partition("\n## Map")[2].partition("\n| more")[0]
    spans = re.findall(r"`([A-Za-z_][\w.]*(?::\w+)?(?: [A-Za-z_][\w.]*(?::\w+)?)*)`", section)
    names = [name for span in spans for name in span.split() if name not in OTHERS_NAMES]
    assert len(names) > 80
    done = subprocess.run(
        [sys.executable, "docs/show.py", *names], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout.splitlines()[-1]


def test_options_are_declared():
    unknown = []
    for document in documents():
        texts = [*document.spans(), *((f.line, f.text) for f in document.fences)]
        for line, text in texts:
            for option in re.findall(r"(?<![\w-])--([a-z][\w.-]*)", text):
                for part in option.rstrip(".").split("."):
                    field, words = part.replace("-", "_"), set(part.split("-"))
                    if field not in known_words() and words - known_words() - TOOL_OPTIONS:
                        unknown.append(f"{document.name}:{line}: --{option}")
    assert not unknown, "\n".join(unknown)


TOOL_OPTIONS = {"nnodes", "nproc", "per", "node", "rdzv", "backend", "endpoint", "ntasks"}
"""Words of options of uv and torchrun that documents use."""


def commands() -> Iterator[tuple[str, str]]:
    """Every distinct command of a ```bash block -> (where it stands, the command)."""
    seen = set()
    for document in documents():
        for fence in document.fences:
            if fence.language != "bash":
                continue
            lines = fence.text.replace("\\\n", " ").split("\n")
            for line in lines:
                for command in line.partition(" #")[0].split("&&"):
                    command = " ".join(command.split())
                    if command and not command.startswith("#") and command not in seen:
                        seen.add(command)
                        yield f"{document.name}:{fence.line}", command


def test_commands_are_of_known_kinds():
    """Only commands that the slow test knows how to run, or leaves out for a reason, are given."""
    odd = [
        f"{where}: {command}"
        for where, command in commands()
        if not any(re.search(pattern, command) for pattern in NOT_RUN)
        and not command.startswith(("uv run pith ", "uv run python ", "python3 "))
    ]
    assert not odd, "\n".join(odd)
    text = "\n".join(command for _, command in commands())
    assert "uv run pith pretrain demo" in text
    assert "uv run pytest" in text
    assert "uv run pytest" in (ROOT / ".ci" / "run").read_text()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the root of the checkout and takes what the commands write."""
    folder = tmp_path_factory.mktemp("checkout")
    for entry in ROOT.iterdir():
        if entry.name not in ("runs", ".venv", "dist"):
            (folder / entry.name).symlink_to(entry)
    return folder


def shortened(command: str) -> list[str]:
    """The arguments to run: this environment's program, four steps instead of a whole run.

    The full grid with short sequences: `test_parity_cli.py` has it as a command too.
    """
    words = command.removeprefix("uv run ").split()
    if words[0] in ("python", "python3", "pith"):
        words[0] = str(Path(sys.executable).parent / words[0])
    trains = "pretrain" in words or "validate-correctness" in command
    if trains and "--train.steps" not in words and "--help" not in words:
        words += ["--train.steps", "4"]
    if "full" in words:
        words += ["--train.sequence-length", "32"]
    return words


@pytest.mark.slow
@pytest.mark.parametrize("where, command", list(commands()))
def test_commands_run(where: str, command: str, checkout: Path):
    """In the documents' order and in one folder: later commands use what earlier ones made."""
    if any(re.search(pattern, command) for pattern in NOT_RUN):
        return
    done = subprocess.run(
        shortened(command), cwd=checkout, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{where}: {command}\n{done.stdout[-3_000:]}{done.stderr[-6_000:]}"


def examples() -> Iterator[tuple[str, str]]:
    """Every ```python block -> (where it stands, the code)."""
    for document in documents():
        for fence in document.fences:
            if fence.language == "python":
                yield f"{document.name}:{fence.line}", fence.text


@pytest.mark.slow
@pytest.mark.parametrize("where, code", list(examples()))
def test_examples_run(where: str, code: str, tmp_path: Path):
    environment = {**os.environ, "PYTHONWARNINGS": "error::DeprecationWarning:__main__"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{where}\n{done.stderr[-4_000:]}"


def test_architecture_is_not_stale():
    done = subprocess.run(
        [sys.executable, "tests/architecture.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, f"run python tests/architecture.py --write\n{done.stdout}"

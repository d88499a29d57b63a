"""Guard: the project stays small. A limit is met by removing complexity, not newlines."""

import pytest
from source_tree import (
    PACKAGES,
    code_lines,
    functions,
    is_benchmark,
    other_files,
    source_files,
)

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 100

CODE_LINES = {"pith_ops": 2_100, "pith_engine": 3_000, "pith_models": 1_800, "pith_apps": 2_600}
"""Code lines that a training run can execute, by package."""
ALL_CODE_LINES = 9_500
ALL_BYTES = 450_000
BENCHMARK_CODE_LINES = 2_200
"""pith_apps/bench and pith_apps/ate_bench together, on top of the above."""


def test_files_are_short():
    sizes = {s.name: s.text.count("\n") for s in (*source_files(), *other_files())}
    long = {name: size for name, size in sizes.items() if size > MAX_FILE_LINES}
    assert not long, f"files above {MAX_FILE_LINES} lines: {long}"


def test_functions_are_short():
    long = [
        f"{source.name}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for source in (*source_files(), *other_files())
        for node in functions(source.tree)
        if node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


def test_code_fits_the_budget(capsys: pytest.CaptureFixture[str]):
    lines = dict.fromkeys(PACKAGES, 0)
    size, benchmarks = 0, 0
    for source in source_files():
        if is_benchmark(source):
            benchmarks += code_lines(source)
        else:
            lines[source.package] += code_lines(source)
            size += len(source.text.encode())
    total = sum(lines.values())
    with capsys.disabled():
        parts = ", ".join(f"{name} {lines[name]}/{CODE_LINES[name]}" for name in PACKAGES)
        print(f"\ncode lines: {parts}, all {total}/{ALL_CODE_LINES}", end="")
        print(f", benchmarks {benchmarks}/{BENCHMARK_CODE_LINES}; {size:,}/{ALL_BYTES:,} bytes")
    over = {name: lines[name] for name in PACKAGES if lines[name] > CODE_LINES[name]}
    assert not over, f"packages over their budget of code lines {CODE_LINES}: {over}"
    assert total <= ALL_CODE_LINES
    assert size <= ALL_BYTES
    assert benchmarks <= BENCHMARK_CODE_LINES

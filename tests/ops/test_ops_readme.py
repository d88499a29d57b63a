"""The README of pith-ops: its install command works, its example runs, its table is true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pith_ops.attention import ATTENTION_TABLE, AttentionBackend
from pith_ops.device import DeviceColumn

ROOT = Path(__file__).parents[2]
README = (ROOT / "packages" / "pith-ops" / "README.md").read_text()


def block(language):
    return re.search(rf"```{language}\n(.*?)```", README, re.DOTALL).group(1)


def run_example(**arguments):
    done = subprocess.run(
        [sys.executable, "-c", block("python")], capture_output=True, text=True, **arguments
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_runs_and_has_ten_lines():
    assert len(block("python").split("\n\n")[-1].splitlines()) + 2 <= 10
    assert run_example() == "FLASH (1, 10, 4, 16) (1, 4, 10) True\n"


@pytest.mark.slow
def test_the_install_command_installs_it_alone(tmp_path):
    command = block("console").strip()
    assert command.startswith("pip install ")
    # Into a folder of its own and without torch, which is large and is here already.
    arguments = [*command.split(), "--no-deps", "--target", str(tmp_path), "--quiet"]
    subprocess.run(["uv", *arguments], cwd=ROOT, check=True)
    assert (tmp_path / "pith_ops" / "py.typed").is_file()
    assert [p.name for p in tmp_path.glob("pith_*") if p.suffix != ".dist-info"] == ["pith_ops"]
    probe = "import pith_ops.bench; print(pith_ops.bench.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.startswith(str(tmp_path)), done.stderr
    run_example(cwd=tmp_path)


def test_the_table_of_attention_backends_is_true():
    section = README.partition("## Attention backends")[2]
    cell = r"([^|]+) \|"
    rows = re.findall(rf"^\| `(\w+)` \|{f' {cell}' * 5}$", section, re.MULTILINE)
    written = {
        (AttentionBackend(name), column)
        for name, *cells, _, _ in rows
        for column, cell in zip(DeviceColumn, cells, strict=True)
        if cell == "yes"
    }
    everywhere = {(AttentionBackend.REFERENCE, column) for column in DeviceColumn}
    listed = {(row.backend, column) for row in ATTENTION_TABLE for column in row.columns}
    assert written == listed | everywhere
    repeats = {AttentionBackend(name): deterministic != "no" for name, *_, deterministic in rows}
    assert all(repeats[row.backend] == row.deterministic for row in ATTENTION_TABLE)
    assert "Never run on Blackwell" in section


def test_every_module_is_listed():
    folder = ROOT / "packages" / "pith-ops" / "src" / "pith_ops"
    modules = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    assert modules <= set(re.findall(r"`(\w+\.py)`", README))

"""Guard: imports go one way, versions of siblings fit, and every module imports anywhere."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from source_tree import (
    PACKAGES,
    ROOT,
    SourceFile,
    distribution_folder,
    is_benchmark,
    source_files,
)

BIN = Path(sys.executable).parent

PURE_PYTHON = {
    "pith_engine.violations",
    "pith_engine.schedule",
    "pith_engine.schedule_check",
    "pith_engine.simulate",
    "pith_engine.overlap",
    "pith_engine.partition",
}
"""Modules of facts that a test or a planner uses without a device: no torch."""

COLLECTIVES = {
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
}
"""Functions of torch.distributed that move data."""

HEAVY = ("transformers", "deep_gemm", "flash_attn", "transformer_engine", "vllm", "lm_eval")
"""Optional or test-only packages; `matplotlib` and others of pith_apps are imported when used."""


def imported_modules(source: SourceFile) -> dict[str, int]:
    """Dotted names that a file imports, inside functions too -> line number."""
    names: dict[str, int] = {}
    for node in ast.walk(source.tree):
        match node:
            case ast.Import():
                names.update((alias.name, node.lineno) for alias in node.names)
            case ast.ImportFrom(module=str() as module):
                names[module] = node.lineno
                names.update((f"{module}.{alias.name}", node.lineno) for alias in node.names)
    return names


def test_imports_go_one_way():
    done = subprocess.run([BIN / "lint-imports", "--no-cache"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


def test_imports_are_absolute():
    """`from pith_x.y import z` can be searched for; `from .y import z` cannot."""
    for source in (s for s in source_files()):
        for node in ast.walk(source.tree):
            relative = isinstance(node, ast.ImportFrom) and node.level > 0
            assert not relative, f"{source.name}:{node.lineno} imports relatively"


def test_operators_know_no_processes():
    for source in source_files():
        if source.package == "pith_ops":
            bad = [n for n in imported_modules(source) if n.startswith("torch.distributed")]
            assert not bad, f"{source.name} imports {bad}"
            assert "torch.distributed" not in source.text.replace("`torch.distributed`", "")


def test_schedules_and_costs_need_no_torch():
    modules = {source.module: source for source in source_files()}
    for name in sorted(PURE_PYTHON & modules.keys()):
        for imported in imported_modules(modules[name]):
            root = imported.split(".")[0]
            parent = imported.rpartition(".")[0]
            pure = root in sys.stdlib_module_names or {imported, parent} & PURE_PYTHON
            assert pure, f"{modules[name].name} imports {imported}"


def test_a_training_run_executes_no_benchmark():
    """They are counted apart, so nothing that is counted may need them."""
    benchmarks = {source.module for source in source_files() if is_benchmark(source)}
    for source in source_files():
        bad = benchmarks.intersection(imported_modules(source))
        # The command line has verbs for them, each importing its own.
        assert source.module in (*benchmarks, "pith_apps.cli") or not bad, f"{source.name}: {bad}"


def test_collectives_stand_in_one_file():
    """Every collective has one wrapper, so timeouts, order and gloo's gaps are handled once."""
    for source in source_files():
        if source.module == "pith_engine.runtime":
            continue
        for name, line in imported_modules(source).items():
            parent, _, last = name.rpartition(".")
            moves = parent.startswith("torch.distributed") and last in COLLECTIVES
            assert not moves, f"{source.name}:{line} imports {name}; use pith_engine.runtime"
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
                moves = ast.unparse(node.value) in ("distributed", "dist", "torch.distributed")
                assert not moves, f"{source.name}:{node.lineno} calls {ast.unparse(node)}"


def test_sibling_version_ranges_match_the_tree():
    """`workspace = true` ignores these ranges, so nothing else would notice a stale one."""
    projects = {}
    for package in PACKAGES:
        text = (distribution_folder(package) / "pyproject.toml").read_text()
        projects[package.replace("_", "-")] = tomllib.loads(text)["project"]
    for name, project in projects.items():
        assert project["requires-python"] == ">=3.11"
        requirements = [Requirement(text) for text in project["dependencies"]]
        for requirement in requirements:
            assert requirement.specifier, f"{name} takes any version of {requirement.name}"
            if requirement.name in projects:
                version = projects[requirement.name]["version"]
                assert requirement.specifier.contains(version), f"{name}: {requirement}"
        imported = {
            imported.split(".")[0].replace("_", "-")
            for source in source_files()
            if source.package == name.replace("-", "_")
            for imported in imported_modules(source)
        }
        siblings = (imported & projects.keys()) - {name}
        missing = siblings - {requirement.name for requirement in requirements}
        assert not missing, f"{name} imports {missing} and does not depend on them"


def test_lock_file_knows_every_requirement():
    """Read without asking an index: what the lock recorded equals what the files ask for."""
    locked = {p["name"]: p for p in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    for package in PACKAGES:
        file = tomllib.loads((distribution_folder(package) / "pyproject.toml").read_text())
        asked = [Requirement(text) for text in file["project"]["dependencies"]]
        for extra in file["project"].get("optional-dependencies", {}).values():
            asked += [Requirement(text) for text in extra]
        recorded = locked[file["project"]["name"]]["metadata"]["requires-dist"]
        siblings = {entry["name"] for entry in recorded if "editable" in entry}
        external = {(r.name, str(r.specifier)) for r in asked if r.name not in siblings}
        known = {(e["name"], e["specifier"]) for e in recorded if "specifier" in e}
        assert external == known, f"{package}: run `uv lock`"
        assert siblings <= {r.name for r in asked}


def test_changelogs_name_the_version():
    for package in PACKAGES:
        folder = distribution_folder(package)
        version = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"]
        assert f"\n## {version}" in (folder / "CHANGELOG.md").read_text(), package


def test_every_module_imports_without_a_gpu():
    """Without a GPU, without asking for one, and without any heavy or optional package."""
    modules = [source.module for source in source_files()]
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized(), 'an import asked for the GPU'\n"
        "assert not torch.distributed.is_initialized(), 'an import made a process group'\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert not heavy, f'imported at import time: {heavy}'\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4_000:]

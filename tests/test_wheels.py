"""The wheels of all four packages build, install together and bring a working `pith`."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from source_tree import PACKAGES, ROOT

UV = shutil.which("uv") or "uv"


def run_command(*command: str | Path, cwd: Path) -> str:
    """Run without what this test session's environment adds; return what it printed."""
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-4_000:]
    return done.stdout


@pytest.mark.slow
def test_wheels_build_and_install_together(tmp_path: Path):
    """Without the workspace's sources: what an index would serve."""
    wheels = tmp_path / "wheels"
    for package in PACKAGES:
        name = package.replace("_", "-")
        run_command(UV, "build", "--package", name, "--no-sources", "-o", wheels, cwd=ROOT)
        (wheel,) = wheels.glob(f"{package}-*.whl")
        names = zipfile.ZipFile(wheel).namelist()
        assert f"{package}/py.typed" in names
        stray = [n for n in names if not n.startswith((f"{package}/", f"{package}-"))]
        assert not stray, f"{wheel.name} holds {stray}"
        assert len(list(wheels.glob(f"{package}-*.tar.gz"))) == 1

    environment = tmp_path / "environment"
    run_command(UV, "venv", "--python", sys.executable, environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    files = sorted(wheels.glob("*.whl"))
    assert len(files) == len(PACKAGES)
    run_command(UV, "pip", "install", "--python", python, *files, cwd=tmp_path)
    run_command(UV, "pip", "check", "--python", python, cwd=tmp_path)

    usage = run_command(environment / "bin" / "pith", "--help", cwd=tmp_path)
    assert "pretrain" in usage
    where = run_command(python, "-c", "import pith_apps; print(pith_apps.__file__)", cwd=tmp_path)
    assert str(environment) in where

"""Guard: linter, formatter and type checker are clean, and no host or machine is named."""

import re
import subprocess
import sys
from pathlib import Path

from source_tree import PACKAGES, ROOT, distribution_folder

BIN = Path(sys.executable).parent


def run_tool(*command: str | Path) -> tuple[int, str]:
    """Run a tool in the root of the checkout: exit code, and what it printed."""
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout[-6_000:] + done.stderr[-3_000:]


def test_ruff_finds_nothing():
    code, output = run_tool(BIN / "ruff", "check", "--no-cache", ".")
    assert code == 0, output


def test_files_are_formatted():
    code, output = run_tool(BIN / "ruff", "format", "--check", "--no-cache", ".")
    assert code == 0, output


def test_types_check():
    code, output = run_tool(BIN / "pyrefly", "check", "--output-format=min-text", "--summary=none")
    assert code == 0, output


def test_packages_are_complete():
    for package in PACKAGES:
        folder = distribution_folder(package)
        for name in ("README.md", "AGENTS.md", "CHANGELOG.md", "pyproject.toml"):
            assert (folder / name).is_file(), f"{package} has no {name}"
        assert (folder / "src" / package / "py.typed").is_file()


def tracked_files() -> list[Path]:
    """Files that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"run the tests from a git checkout: {done.stderr}"
    return [ROOT / name for name in done.stdout.split("\n") if name]


ALLOWED_HOSTS = {"arxiv.org", "github.com", "keepachangelog.com", "semver.org", "apache.org"}
MACHINE_PATH = re.compile(r"(?<![\w.$}>/-])/(?:work|home|root|mnt|scratch|Users|opt)/\w")


def test_no_hosts_or_machine_paths():
    """Package indexes and folders of one machine are the user's settings, not the project's."""
    found = []
    for path in tracked_files():
        # Every lock file that uv writes records where it resolved from.
        if not path.is_file() or path.is_symlink() or path.name == "uv.lock":
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.split("\n"), start=1):
            hosts = set(re.findall(r"https?://(?:www\.)?([\w.-]+)", line)) - ALLOWED_HOSTS
            if hosts - {"127.0.0.1", "localhost"} or MACHINE_PATH.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)

"""Train the demo at two git revisions and compare every step's loss and gradient norm.

    python compare_revisions.py BASE [CANDIDATE] [--tolerance R] [options of pith pretrain demo]

Each revision is checked out into a temporary worktree and run from there with this interpreter;
`PYTHONPATH` puts the worktree's packages before the installed ones, which takes no installation and
is verified by asking where `pith_apps` came from. The last line is PASS or FAIL, the exit code 0
or 1.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FIGURES = ("loss", "grad_norm")
DEFAULTS = {"--train.steps": "20", "--train.device": "cpu", "--train.dtype": "fp32"}
"""Options of `pith pretrain demo` that are not given."""


class RevisionError(Exception):
    """A revision that does not exist or does not train."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One figure of one step in both runs."""

    step: int
    """Step number, from 1."""
    figure: str
    """`loss` or `grad_norm`."""
    base: float
    """Value at the base revision."""
    candidate: float
    """Value at the candidate revision."""

    @property
    def difference(self) -> float:
        """Relative difference; 0 only for equal bits, infinite if one is not a number."""
        if self.base == self.candidate:
            return 0.0
        relative = abs(self.base - self.candidate) / max(abs(self.base), abs(self.candidate))
        return relative if relative == relative else float("inf")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two revisions; return the exit code."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--tolerance", type=float, default=0.0, help="relative, default 0: bits")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], parents=[own])
    parser.add_argument("base", help="git revision that is right")
    parser.add_argument("candidate", nargs="?", help="git revision to judge; default: working tree")
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Revisions stand first: the 4 of `--train.steps 4` is none, which argparse cannot know.
    end = next((n for n, word in enumerate(words) if word.startswith("-")), len(words))
    if not end and not {"-h", "--help"} & {*words}:
        parser.error("give the revisions first, then options")
    found, overrides = own.parse_known_args(words[end:])
    options = parser.parse_args(words[:end] or words, found)
    given = {option.split("=")[0] for option in overrides}
    for name, value in DEFAULTS.items():
        overrides += [] if name in given else [name, value]
    # A terminated script still removes its worktree.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        base = resolve(options.base)
        candidate = resolve(options.candidate) if options.candidate else working_tree()
        runs = []
        for label, revision in (("base", base), ("candidate", candidate)):
            print(f"{label}: {describe(revision)}", flush=True)
            with worktree(revision) as folder:
                runs.append(train(folder, overrides))
        passed = report(runs[0], runs[1], options.tolerance)
    except RevisionError as error:
        print(error)
        passed = False
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


def git(*arguments: str) -> str:
    """Run git in the checkout that holds this script."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RevisionError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def resolve(revision: str) -> str:
    """The commit that a name, tag or id means."""
    return git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")


def working_tree() -> str:
    """A commit that holds HEAD and all uncommitted changes of tracked files."""
    return git("stash", "create") or resolve("HEAD")


def describe(revision: str) -> str:
    """Commit id and subject in one line."""
    return git("show", "--no-patch", "--format=%h %s", revision)


@contextmanager
def worktree(revision: str):
    """A temporary folder that holds one revision."""
    with tempfile.TemporaryDirectory(prefix="validate-") as parent:
        folder = Path(parent) / "checkout"
        git("worktree", "add", "--detach", "--quiet", str(folder), revision)
        try:
            yield folder
        finally:
            git("worktree", "remove", "--force", str(folder))


def train(folder: Path, overrides: list[str]) -> list[dict]:
    """Run `pith pretrain demo` with the packages of `folder`; return its metrics, step by step."""
    sources = sorted(str(path) for path in folder.glob("packages/*/src"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sources)}
    probe = subprocess.run(
        [sys.executable, "-c", "import pith_apps; print(pith_apps.__file__)"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if not probe.stdout.startswith(str(folder)):
        raise RevisionError(f"pith_apps comes from {probe.stdout.strip() or probe.stderr.strip()}")
    command = [sys.executable, "-m", "pith_apps.cli", "pretrain", "demo", *overrides]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        output = done.stdout[-2_000:] + done.stderr[-4_000:]
        raise RevisionError(f"pith pretrain demo ended with {done.returncode}:\n{output}")
    found = list(folder.glob("runs/*/metrics.jsonl"))
    if len(found) != 1:
        raise RevisionError(f"the run left {len(found)} files runs/*/metrics.jsonl, not 1")
    lines = found[0].read_text().splitlines()
    return steps_of([json.loads(line) for line in lines])


def steps_of(records: list[dict]) -> list[dict]:
    """The records of training steps, without evaluations and other lines."""
    return [record for record in records if all(name in record for name in FIGURES)]


def compare(base: list[dict], candidate: list[dict]) -> list[Comparison]:
    """Both figures of every step, in order.

    Raises:
        RevisionError: no steps, or not the same steps in both runs.
    """
    steps = [record["step"] for record in base]
    if not steps or steps != [record["step"] for record in candidate]:
        raise RevisionError(f"{len(base)} steps in the base, {len(candidate)} in the candidate")
    return [
        Comparison(step=step, figure=name, base=float(old[name]), candidate=float(new[name]))
        for step, old, new in zip(steps, base, candidate, strict=True)
        for name in FIGURES
    ]


def report(base: list[dict], candidate: list[dict], tolerance: float) -> bool:
    """Print the table; return whether every difference is within the tolerance."""
    comparisons = compare(base, candidate)
    print(f"{'step':>5}  {'figure':9}  {'base':>22}  {'candidate':>22}  difference")
    for item in comparisons:
        bad = "" if item.difference <= tolerance else "  <-- differs"
        print(
            f"{item.step:>5}  {item.figure:9}  {item.base:>22.17g}  {item.candidate:>22.17g}"
            f"  {item.difference:.1e}{bad}"
        )
    worst = max(item.difference for item in comparisons)
    print(f"largest relative difference {worst:.3g}, allowed {tolerance:g}")
    return worst <= tolerance


if __name__ == "__main__":
    sys.exit(main())

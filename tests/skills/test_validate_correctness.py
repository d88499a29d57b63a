"""skills/validate-correctness: equal revisions PASS, a wrong factor FAILs."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path("skills/validate-correctness/scripts/compare_revisions.py")
SMALL = ["--train.steps", "2", "--evaluation.sequences", "8", "--mesh.pp", "1", "--mesh.ep", "1"]
"""Options of a short run in one process; `tests/test_documents.py` runs the skill's own command."""


@pytest.fixture(scope="module")
def compare_revisions():
    """The script as a module."""
    specification = importlib.util.spec_from_file_location("compare_revisions", ROOT / SCRIPT)
    module = importlib.util.module_from_spec(specification)
    sys.modules["compare_revisions"] = module
    specification.loader.exec_module(module)
    return module


def step_record(step: int, loss: float, grad_norm: float) -> dict:
    return json.loads(json.dumps({"step": step, "loss": loss, "grad_norm": grad_norm}))


def test_skills_are_found_by_agents():
    """Through the folders that coding agents look into."""
    for folder in (".agents/skills", ".claude/skills"):
        for skill in (ROOT / "skills").iterdir():
            text = (ROOT / folder / skill.name / "SKILL.md").read_text()
            assert text.startswith(f"---\nname: {skill.name}\ndescription: ")
            for heading in ("Triggers", "Prerequisites", "Procedure", "Verdict"):
                assert f"\n## {heading}\n" in text


def test_equal_bits_pass_and_a_last_digit_fails(compare_revisions, capsys):
    base = [step_record(1, 8.3, 2.5), step_record(2, 8.1, 2.25)]
    assert compare_revisions.report(base, base, 0.0)
    other = [step_record(1, 8.3, 2.5), step_record(2, 8.100000000000001, 2.25)]
    assert not compare_revisions.report(base, other, 0.0)
    assert compare_revisions.report(base, other, 1e-12)
    assert "differs" in capsys.readouterr().out


def test_gradient_norm_counts_as_much_as_loss(compare_revisions):
    base, other = [step_record(1, 8.3, 2.5)], [step_record(1, 8.3, 2.6)]
    assert not compare_revisions.report(base, other, 1e-2)
    assert compare_revisions.report(base, other, 0.1)


def test_not_a_number_never_passes(compare_revisions):
    base, other = [step_record(1, 8.3, 2.5)], [step_record(1, float("nan"), 2.5)]
    assert not compare_revisions.report(base, other, 1.0)
    assert not compare_revisions.report(other, other, 1.0)


def test_runs_of_other_length_are_refused(compare_revisions):
    base = [step_record(1, 8.3, 2.5), step_record(2, 8.1, 2.2)]
    with pytest.raises(compare_revisions.RevisionError, match="2 steps in the base, 1"):
        compare_revisions.compare(base, base[:1])
    with pytest.raises(compare_revisions.RevisionError):
        compare_revisions.compare([], [])


def test_only_training_steps_are_compared(compare_revisions):
    records = [step_record(1, 8.3, 2.5), {"step": 1, "held_out_loss": 8.2}]
    assert compare_revisions.steps_of(records) == records[:1]


def test_unknown_revision_fails(compare_revisions, capsys):
    assert compare_revisions.main(["no-such-revision"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAIL"


def test_revisions_stand_before_options(compare_revisions, monkeypatch, tmp_path, capsys):
    """The value of an option is no candidate; what is not given is the CPU in fp32."""
    seen = []

    def train(folder: Path, overrides: list[str]) -> list[dict]:
        seen.append(overrides)
        return [step_record(1, 8.3, 2.5)]

    monkeypatch.setattr(compare_revisions, "train", train)
    options = ["--train.steps", "4", "--tolerance", "1e-5", "--train.dtype=fp64"]
    assert compare_revisions.main(["HEAD", "HEAD", *options]) == 0
    assert "allowed 1e-05" in capsys.readouterr().out
    expected = ["--train.steps", "4", "--train.dtype=fp64", "--train.device", "cpu"]
    assert seen == [expected, expected]
    for words in (options, ["--tolerance", "1e-5", "HEAD"]):
        with pytest.raises(SystemExit):
            compare_revisions.main(words)
        assert "give the revisions first" in capsys.readouterr().err


def test_a_run_of_another_name_is_found_and_none_is_a_failure(compare_revisions, tmp_path):
    """`--name x` may be among the options."""
    script = "import sys; from pathlib import Path; Path('runs/x').mkdir(parents=True)"
    script += "; Path('runs/x/metrics.jsonl').write_text('')"
    package = tmp_path / "packages/pith-apps/src/pith_apps"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "cli.py").write_text(script)
    assert compare_revisions.train(tmp_path, []) == []
    (package / "cli.py").write_text("")
    (tmp_path / "runs/x/metrics.jsonl").unlink()
    with pytest.raises(compare_revisions.RevisionError, match="left 0 files"):
        compare_revisions.train(tmp_path, [])


def run_git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)


def run_script(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script as the SKILL.md runs it, in the clone."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments, *SMALL],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_verdict_on_real_revisions(tmp_path: Path):
    """A commit that changes a comment passes; one that scales the residual fails."""
    clone = tmp_path / "clone"
    run_git(tmp_path, "clone", "--quiet", str(ROOT), str(clone))
    for name, value in (("user.name", "test"), ("user.email", "test@localhost")):
        run_git(clone, "config", name, value)
    # The working tree as it is now, not only what is committed.
    changed = subprocess.run(
        ["git", "diff", "HEAD", "--binary"], cwd=ROOT, check=True, capture_output=True
    ).stdout
    if changed:
        subprocess.run(["git", "apply"], cwd=clone, input=changed, check=True)
        run_git(clone, "commit", "--quiet", "-am", "Base")
    model = clone / "packages/pith-models/src/pith_models/qwen3_moe.py"
    text = model.read_text()
    right, wrong = "return residual + combined", "return residual + 1.01 * combined"
    assert right in text

    model.write_text("# A comment.\n" + text)
    passed = run_script(clone, "HEAD")
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert passed.stdout.splitlines()[-1] == "PASS"

    model.write_text(text.replace(right, wrong))
    run_git(clone, "commit", "--quiet", "-am", "A wrong factor")
    failed = run_script(clone, "HEAD~1", "HEAD")
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert failed.stdout.splitlines()[-1] == "FAIL"
    assert "differs" in failed.stdout
    assert not list((clone / ".git" / "worktrees").glob("*")), "a worktree is left behind"

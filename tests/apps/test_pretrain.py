"""Whole runs through the command line: what they leave, resuming, several launchers."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pith_apps.checks import changed_fields
from pith_apps.cli import main
from pith_apps.run_log import read_metrics

RECIPE = ["qwen3-30b-a3b-tiny", "--lr.schedule", "constant", "--lr.decay-steps", "None"]
RECIPE += ["--balance.method", "global-batch", "--balance.coefficient", "0.1"]
TINY = [*RECIPE, "--mesh.ep", "1", "--checkpoint.interval", "2"]
SIX = [*TINY, "--train.steps", "6"]
FOUR_RANKS = [*RECIPE, "--mesh.pp", "2", "--mesh.ep", "2"]
TWO_STAGES = [*RECIPE, "--mesh.pp", "2", "--mesh.ep", "1"]


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return {**kept, "OMP_NUM_THREADS": "1"}


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a command of `pith` in `folder`."""
    return subprocess.Popen(
        [sys.executable, "-m", "pith_apps.cli", *arguments],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pith(folder: Path, *arguments: str) -> str:
    """Run a command of `pith` to its end, return what it printed."""
    process = start(folder, *arguments)
    output, error = process.communicate(timeout=300)
    assert process.returncode == 0, output + error
    return output


def steps_of(folder: Path, name: str) -> list[tuple[float, ...]]:
    """Step, loss, gradient norm, learning rate and tokens seen of every step, all digits."""
    names = ("step", "loss", "grad_norm", "learning_rate", "tokens_seen")
    records = read_metrics(folder / "runs" / name)
    return [tuple(r[name] for name in names) for r in records if "loss" in r]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with one uninterrupted run of six steps, `whole`.

    It starts where an earlier start left a log and a checkpoint that was never completed.
    """
    folder = tmp_path_factory.mktemp("pretrain")
    run = folder / "runs" / "whole"
    (run / "log").mkdir(parents=True)
    (run / "log" / "rank_00000.log").write_text("an earlier start\n")
    (run / "checkpoints" / "step-00000003").mkdir(parents=True)
    output = pith(folder, "pretrain", *SIX, "--name", "whole")
    (folder / "whole.txt").write_text(output)
    return folder


def test_a_run_leaves_what_it_says(folder):
    run, output = folder / "runs" / "whole", (folder / "whole.txt").read_text()
    assert {path.name for path in run.iterdir()} == {
        "checkpoints",
        "config.json",
        "environment.json",
        "export",
        "lock",
        "log",
        "loss.png",
        "metrics.jsonl",
        "plan.txt",
    }
    assert "step 1 starts from initial weights" in output
    assert output.count("\nstep ") >= 6
    assert "-1.0000" not in output
    assert (run / "plan.txt").read_text() in output
    assert json.loads((run / "config.json").read_text())["train"]["steps"] == 6
    assert [step for step, *_ in steps_of(folder, "whole")] == [1, 2, 3, 4, 5, 6]
    held_out = [r["step"] for r in read_metrics(run) if "held_out_loss" in r]
    assert held_out == [0, 6]
    # The two newest complete ones stay (`checkpoint.keep`); what is not complete is not touched.
    checkpoints = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert checkpoints == ["step-00000003", "step-00000004", "step-00000006"]
    for place in ("metrics.jsonl", "loss.png", "checkpoints", "export"):
        assert (
            str(Path("runs") / "whole" / place)
            in output.splitlines()[-4:][
                ("metrics.jsonl", "loss.png", "checkpoints", "export").index(place)
            ]
        )


# Never gets past its fifth step.
HANGS = """
import time
from pith_apps.config import RunConfig
from pith_apps.recipes.released import qwen3_30b_a3b, tiny_form
from pith_engine.pipeline import Pipeline

_train_step, _calls = Pipeline.train_step, []

def _hangs(self, batches, num_targets):
    _calls.append(1)
    if len(_calls) == 6:
        time.sleep(600)
    return _train_step(self, batches, num_targets)

Pipeline.train_step = _hangs

def hangs() -> RunConfig:
    return tiny_form(qwen3_30b_a3b())
"""


@pytest.mark.slow
def test_a_killed_run_resumes_and_ends_alike(folder, monkeypatch, capsys):
    """While it lives, no other process writes to its folder: neither one rank nor a launcher."""
    (folder / "hangs.py").write_text(HANGS)
    process = start(folder, "pretrain", "hangs.py", *SIX[1:], "--name", "killed")
    deadline = time.monotonic() + 200
    while len(steps_of(folder, "killed")) < 5:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    monkeypatch.chdir(folder)
    before = sorted(Path("runs", "killed").rglob("*"))
    source = ["--source", "runs/whole/export"]
    importing = ["convert", "import", *SIX, *source]
    for command in (["pretrain", *SIX], ["pretrain", *FOUR_RANKS], importing):
        assert main([*command, "--name", "killed"]) == 2
        assert "runs/killed is in use by another process" in capsys.readouterr().err
    assert sorted(Path("runs", "killed").rglob("*")) == before
    process.send_signal(signal.SIGKILL)
    process.communicate()
    output = pith(folder, "pretrain", *SIX, "--name", "killed")
    # Step 5 was logged before the kill and is run again.
    assert "resumed at step 4 of 6" in output
    assert steps_of(folder, "killed") == steps_of(folder, "whole")
    assert [r for r in read_metrics(folder / "runs" / "killed") if "held_out_loss" in r] == [
        r for r in read_metrics(folder / "runs" / "whole") if "held_out_loss" in r
    ]


def test_what_decides_the_numbers_may_not_change_on_resume(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    command = ["pretrain", *SIX, "--name", "whole", "--train.seed", "1", "--train.batch", "16"]
    command += ["--model.rope-theta", "5000", "--optim.weight-decay", "0"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "model.rope_theta: 1000000.0 -> 5000.0" in error
    assert "train.seed: 0 -> 1" in error
    assert "train.batch: 8 -> 16" in error
    assert "weight_decay" not in error
    assert "--name" in error
    before = Path("runs", "whole", "config.json").read_text()
    assert main(["pretrain", *TINY, "--train.steps", "4", "--name", "whole"]) == 2
    fewer = "train.steps is 4: nothing is left to train, the run has 6 steps"
    assert fewer in capsys.readouterr().err
    assert Path("runs", "whole", "config.json").read_text() == before
    output = pith(folder, "pretrain", *SIX, "--name", "whole", "--optim.weight-decay", "0")
    assert "resumed at step 6 of 6" in output
    assert "changed since that checkpoint: optim.weight_decay: 0.1 -> 0.0" in output
    assert "nothing is left to train" in output


@pytest.mark.slow
def test_a_finished_run_without_a_held_out_record_still_ends_well(folder):
    run = shutil.copytree(folder / "runs" / "whole", folder / "runs" / "cut")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if "held_out_loss" not in line]
    assert len(kept) < len(lines)
    (run / "metrics.jsonl").write_text("".join(kept))
    shutil.rmtree(run / "export")
    output = pith(folder, "pretrain", *SIX, "--name", "cut")
    assert (run / "export" / "config.json").exists()
    assert output.endswith("\nHugging Face runs/cut/export\n") and "held-out loss" not in output


@pytest.mark.slow
def test_muon_says_what_it_updates_and_is_not_exchanged_for_adamw(folder, monkeypatch, capsys):
    command = ["pretrain", *TWO_STAGES, "--name", "muon", "--train.steps", "2"]
    output = pith(folder, *command, "--optim.method", "muon")
    rows = [line.split() for line in output.splitlines() if line.startswith(("adamw ", "muon "))]
    assert {(method, role) for method, role, *_ in rows} == {
        *(("adamw", role) for role in ("embedding", "head", "norm", "router")),
        *(("muon", role) for role in ("expert", "matrix")),
    }
    elements = sum(int(row[-1].replace(",", "")) for row in rows)
    assert f"parameters: {elements:,} in all" in output
    monkeypatch.chdir(folder)
    assert main(command) == 2
    assert "optim.method: muon -> adamw\n" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["convert", "export"], ["evaluate"]])
def test_the_model_must_be_that_of_the_checkpoint(folder, monkeypatch, capsys, verb):
    monkeypatch.chdir(folder)
    command = [*verb, *SIX, "--name", "whole", "--model.rope-theta", "5000"]
    assert main([*command, "--train.seed", "1"]) == 2
    error = capsys.readouterr().err
    assert "holds another model: model.rope_theta: 1000000.0 -> 5000.0\n" in error


def test_evaluate_needs_a_checkpoint_before_ranks_start(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", *FOUR_RANKS]) == 2
    assert "holds no complete checkpoint" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_evaluate_repeats_the_last_held_out_loss(folder):
    output = pith(folder, "evaluate", *SIX, "--name", "whole")
    (recorded,) = (
        record["held_out_loss"]
        for record in read_metrics(folder / "runs" / "whole")
        if record.get("step") == 6 and "held_out_loss" in record
    )
    assert f"held-out loss {recorded:.6f} after step 6" in output
    assert "warning: other data than" not in output
    standard = folder / "runs" / "standard-library"
    data = ["--data.no-standard-library", "--data.tokenizer", str(standard / "tokenizer")]
    for name in ("training", "held-out"):
        data += [f"--data.{name}", str(standard / "training")]
    output = pith(folder, "evaluate", *SIX, "--name", "whole", *data)
    warning = f"warning: other data than the run's: data.held_out: None -> {standard}"
    assert 0 <= output.find(warning) < output.find("\nheld-out loss")


@pytest.mark.slow
def test_frequencies_that_a_checkpoint_does_not_hold_are_missed(folder):
    """With them a run of `global-batch` balancing ends as `whole`: that is shown by `killed`."""
    run = folder / "runs" / "forgotten"
    shutil.copytree(folder / "runs" / "whole", run)
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    saved = run / "checkpoints" / "step-00000004" / "manifest.json"
    manifest = json.loads(saved.read_text())
    assert len(manifest["run"].pop("expert_counts")) > 1
    saved.write_text(json.dumps(manifest))
    output = pith(folder, "pretrain", *TINY, "--name", "forgotten", "--train.steps", "5")
    assert "resumed at step 4 of 5" in output
    assert "it holds no expert frequencies" in output
    assert "it holds no expert frequencies" not in (folder / "whole.txt").read_text()
    whole, found = steps_of(folder, "whole"), steps_of(folder, "forgotten")
    assert found[:4] == whole[:4]
    assert found[4] != whole[4]


# Rank 1 fails in the third step: by an exception of its own, or by a gradient that is not finite.
BROKEN = """
import os
from dataclasses import replace
from pith_apps.config import RunConfig
from pith_apps.recipes.released import qwen3_30b_a3b, tiny_form
from pith_engine.fsdp import Unit
from pith_engine.pipeline import Pipeline

_train_step, _calls = Pipeline.train_step, []

def _breaks(self, batches, num_targets):
    _calls.append(1)
    losses = _train_step(self, batches, num_targets)
    if os.environ.get("RANK") == "1" and len(_calls) == 3:
        if FAULT == "exception":
            raise RuntimeError("rank one breaks")
        self.chunks[0].layers["1"].experts_down_proj.grad[0, 0, 0] = float("nan")
    return losses

Pipeline.train_step = _breaks

def broken() -> RunConfig:
    tiny = tiny_form(qwen3_30b_a3b())
    return replace(tiny, name=FAULT, checkpoint=replace(tiny.checkpoint, interval=1))
"""


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        pytest.param("exception", "[rank 1] RuntimeError: rank one breaks", marks=pytest.mark.slow),
        ("nan", "step 3: gradient not finite in layers.1.experts_down_proj on rank 1 (1 elements)"),
    ],
)
def test_a_fault_in_one_rank_ends_the_job_before_the_update(folder, fault, named):
    (folder / "broken.py").write_text(f"FAULT = {fault!r}\n{BROKEN}")
    process = start(folder, "pretrain", "broken.py")
    _, error = process.communicate(timeout=300)
    assert process.returncode == 1, error
    assert named in error
    assert "was the first to end, with exit code 1" in error
    assert [step for step, *_ in steps_of(folder, fault)] == [1, 2]
    checkpoints = sorted((folder / "runs" / fault / "checkpoints").iterdir())
    assert [path.name for path in checkpoints] == ["step-00000001", "step-00000002"]


def same_batch(folder: Path) -> list[str]:
    """Options for one corpus of 8 samples, to train and to evaluate on: the first batch is all."""
    words = [f" {chr(97 + n * 7 % 26)}" for n in range(8 * 16)]
    (folder / "words.txt").write_text("".join(words))
    tokenizer = str(folder / "runs" / "standard-library" / "tokenizer")
    if not (folder / "words").exists():
        command = ["--inputs", "words.txt", "--tokenizer", tokenizer, "--output", "words"]
        assert "129 tokens" in pith(folder, "tokenize", *command)
    data = ["--data.no-standard-library", "--data.training", "words", "--data.held-out", "words"]
    return [*data, "--data.tokenizer", tokenizer, "--train.sequence-length", "16"]


@pytest.mark.slow
def test_a_run_starts_from_the_weights_of_another(folder):
    """The first training loss on pp2-ep2 is what `pith evaluate` says of the same batch."""
    options, export = same_batch(folder), "runs/whole/export"
    pith(folder, "convert", "import", *TINY, "--source", export, "--name", "imported")
    printed = pith(folder, "evaluate", *TINY, *options, "--name", "imported")
    expected = float(printed.partition("held-out loss ")[2].split()[0])
    assert "(128 tokens of words)" in printed
    checkpoint = "runs/whole/checkpoints/step-00000006"
    for name, source in (("checkpoint", checkpoint), ("hugging-face", export)):
        run = ["pretrain", *FOUR_RANKS, *options, "--name", name, "--start.from", source]
        output = pith(folder, *run, "--train.steps", "1")
        assert f"step 1 starts from the weights of {source}" in output
        assert steps_of(folder, name)[0][1] == pytest.approx(expected, abs=1e-5)
    assert "keys: 135 loaded, 0 unexpected, 0 missing; dtype changes: none" in output


@pytest.mark.slow
def test_a_run_does_not_start_from_another_tokenizer_or_half_a_model(folder, monkeypatch, capsys):
    """Both are refused before a rank starts; a checkpoint of the run goes first."""
    monkeypatch.chdir(folder)
    options = same_batch(folder)
    shutil.copytree("runs/whole/export", "theirs")
    other = Path("theirs/tokenizer.json")
    other.write_text(other.read_text() + " ")
    run = ["pretrain", *TINY, *options, "--name", "other", "--start.from", "theirs"]
    assert main(run) == 2
    assert "its tokenizer is not that of data.tokenizer" in capsys.readouterr().err
    assert main(["convert", "import", *TINY, "--source", "theirs", "--name", "theirs"]) == 0
    assert main(["pretrain", *TINY, *options, "--name", "theirs"]) == 2
    assert "the tokenizer of words is not the checkpoint's" in capsys.readouterr().err
    other.unlink()
    index = Path("theirs/model.safetensors")
    index.write_bytes(index.read_bytes()[:-8])
    assert main(run) == 2
    assert "model.safetensors is damaged" in capsys.readouterr().err
    assert not Path("runs/other").exists()
    pith(folder, "convert", "import", *TINY, "--source", "runs/whole/export", "--name", "other")
    output = pith(folder, *run, "--train.steps", "1")
    assert "start.from theirs is not read: the checkpoint goes first" in output
    assert "step 1 starts from the weights in runs/other/checkpoints, without moments" in output


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            ["runs/whole/export", "--model.num-experts", "4"],
            "model.num_experts: 8 -> 4 (folder -> recipe)",
        ),
        (["runs/nowhere"], "nor a complete checkpoint (step-*): no such folder"),
        (
            ["runs/whole/checkpoints"],
            "neither config.json nor a complete checkpoint (step-*): no manifest.json",
        ),
        (["runs/whole"], "'runs/whole': model_type = None: implemented are"),
        (
            ["runs/whole/checkpoints/step-00000006", "--model.num-experts-per-tok", "3"],
            "model.num_experts_per_tok: 2 -> 3",
        ),
    ],
)
def test_what_a_run_cannot_start_from(folder, monkeypatch, capsys, options, named):
    monkeypatch.chdir(folder)
    assert main(["pretrain", *TINY, "--name", "new", "--start.from", *options]) == 2
    error = capsys.readouterr().err
    assert f"start.from is '{options[0]}'" in error and named in error
    assert not (folder / "runs" / "new").exists()


@pytest.mark.slow
def test_weights_that_are_not_finite_are_never_saved(folder):
    """An update may overflow fp32 while its gradient is finite; the checkpoint before it stays."""
    run = ["pretrain", *TINY, "--name", "huge", "--checkpoint.keep", "1", "--train.steps"]
    pith(folder, *run, "2")
    process = start(folder, *run, "3", "--lr.peak", "1e39")
    _, error = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "step 3: weights not finite in embedding on rank 0" in error
    kept = [path.name for path in (folder / "runs" / "huge" / "checkpoints").iterdir()]
    assert kept == ["step-00000002"]
    assert "resumed at step 2" in pith(folder, *run, "3")


def test_changed_fields_names_paths_in_both_trees():
    old = {"a": 1, "b": {"c": 2, "d": [1]}, "gone": 0}
    new = {"a": 1, "b": {"c": 3, "d": [1, 2]}, "added": 0}
    assert changed_fields(old, new) == ["b.c: 2 -> 3", "b.d: [1] -> [1, 2]"]


@pytest.mark.slow
def test_two_launchers_give_the_losses_of_one(folder):
    output = pith(folder, "pretrain", *FOUR_RANKS, "--name", "one", "--train.steps", "3")
    assert "mesh pp2-ep2: 4 process(es) on 1 node(s)" in output
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "pith"),
        *("-m", "pith_apps.cli", "pretrain", *FOUR_RANKS, "--name", "two"),
        *("--train.steps", "3"),
    ]
    launchers = [
        subprocess.Popen(
            command,
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [launcher.communicate(timeout=300)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], "\n".join(outputs)
    assert steps_of(folder, "two") == steps_of(folder, "one")
    plan = (folder / "runs" / "two" / "plan.txt").read_text()
    assert "mesh pp2-ep2: 4 process(es) on 2 node(s)" in plan
    crosses = {line.split()[0]: line.split()[3] for line in plan.splitlines()[3:6]}
    assert crosses["pp"] == "yes"


@pytest.mark.slow
def test_a_run_resumes_on_another_mesh(folder):
    pith(folder, "pretrain", *TINY, "--name", "moved", "--train.steps=3")
    output = pith(folder, "pretrain", *FOUR_RANKS, "--name", "moved", "--train.steps=6")
    assert "resumed at step 3 of 6" in output
    assert "changed since that checkpoint: mesh.pp: 1 -> 2" in output
    whole, moved = steps_of(folder, "whole"), steps_of(folder, "moved")
    assert [step for step, *_ in moved] == [1, 2, 3, 4, 5, 6]
    for expected, found in zip(whole, moved, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)

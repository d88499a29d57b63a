"""The command line: help without weight, errors with the nearest match, exit codes."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from pith_apps.cli import main


def pith(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, outside any group."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", "pith_apps.cli", *arguments],
        cwd=cwd,
        env={**kept, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_help_and_tokenize_import_no_torch(tmp_path):
    script = (
        "import sys\n"
        "from pith_apps.cli import main\n"
        "assert main(['--help']) == 0\n"
        "try: main(['tokenize', '--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'triton', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for verb in ("tokenize", "pretrain", "evaluate", "convert", "parity"):
        assert f"pith {verb}" in done.stdout


def test_no_arguments_print_the_usage(capsys):
    assert main([]) == 2
    assert "pith pretrain RECIPE" in capsys.readouterr().err


def test_help_of_a_verb_needs_no_recipe(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{version('pith-apps')}\n"
    for verb in ("pretrain", "evaluate", "convert export", "convert import", "parity"):
        for flag in ("--help", "-h"):
            assert main([*verb.split(), flag]) == 0
            text = capsys.readouterr().out
            assert f"\n  pith {verb} RECIPE" in text
            assert "`pith VERB RECIPE --help`" in text
    assert main(["convert", "--help"]) == 0
    assert capsys.readouterr().out.count("  pith convert ") == 2
    assert main(["convert", "exprt", "--help"]) == 2


def test_an_interrupt_before_ranks_is_one_line(capsys, monkeypatch, tmp_path):
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pith_apps.recipes.load.load_recipe", interrupted)
    assert main(["pretrain", "demo"]) == 130
    assert capsys.readouterr().err == "pith pretrain: interrupted\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["pretain", "demo"], ["did you mean 'pretrain'?"]),
        (["pretrain", "dmeo"], ["did you mean 'demo'?"]),
        (["pretrain"], ["a recipe comes first", "pith pretrain demo"]),
        (["pretrain", "--train.steps", "4"], ["a recipe comes first"]),
        (["pretrain", "demo", "--train.stesp", "4"], ["--train.stesp", "--train.steps INT"]),
        (["pretrain", "demo", "--train.steps", "four"], ["--train.steps", "four"]),
        (["pretrain", "demo", "--train.device", "tpu"], ["--train.device", "cpu", "cuda"]),
        (["pretrain", "demo", "--mesh.ep", "0"], ["mesh.ep = 0"]),
        (["pretrain", "demo", "--lr.schedule", "constant"], ["set --lr.final-ratio None or"]),
        (
            ["pretrain", "demo", "--balance.method=none", "--balance.coefficient", "0.1"],
            ["--balance.coefficient: unread with balance.method none"],
        ),
        (
            ["pretrain", "demo", "--balance.bias-rate", "0.1"],
            ["--balance.bias-rate: unread with balance.method sequence"],
        ),
        (["parity", "demo", "--data.training", "x"], ["--data.training: parity runs one step"]),
        (
            ["pretrain", "demo", "--train.steps", "4", "--train.steps=5"],
            ["given more than once: --train.steps"],
        ),
        (
            ["pretrain", "demo", "--data.standard-library", "--data.no-standard_library"],
            ["given more than once: --data.standard-library"],
        ),
        (["tokenize", "--inputs", "x.txt"], ["--tokenizer", "--output"]),
        (["tokenize", "--inputs", "x", "--inputs", "y"], ["given more than once: --inputs"]),
    ],
)
def test_mistakes_are_refused_with_a_way_out(arguments, named, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    error = " ".join(capsys.readouterr().err.split())
    for text in named:
        assert text in error
    assert list(tmp_path.iterdir()) == []


BAD_OPTIONS = {
    "nproc": "0",
    "model.head-dim": "7",
    "mesh.ep": "0",
    "train.steps": "0",
    "optim.eps": "-1",
    "lr.peak": "0",
    "balance.coefficient": "-1",
    "evaluation.sequences": "0",
    "checkpoint.keep": "0",
}
"""One violation in every section whose values have a range."""


@pytest.mark.parametrize(
    "verb",
    [["pretrain"], ["evaluate"], ["parity"], ["convert", "export"], ["convert", "import"]],
    ids=" ".join,
)
def test_a_fault_in_every_section_is_one_refusal(verb, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    bad = {**BAD_OPTIONS}
    if verb == ["parity"]:
        # Parity names its meshes itself and reads nothing of the others.
        read = ("nproc", "model.head-dim", "balance.coefficient")
        bad = {name: BAD_OPTIONS[name] for name in read}
    given = [word for name, value in bad.items() for word in (f"--{name}", value)]
    source = ["--source", "x"] if verb[-1] == "import" else []
    assert main([*verb, "demo", *given, *source]) == 2
    error = capsys.readouterr().err
    for name in bad:
        assert f"  - {name.replace('-', '_')} " in error
    assert list(tmp_path.iterdir()) == []


def test_types_of_a_recipe_file_are_checked(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "typed.py").write_text(
        "from dataclasses import replace\n"
        "from pith_apps.config import RunConfig\n"
        "from pith_apps.recipes.demo import demo\n"
        "def typed() -> RunConfig:\n"
        "    run = demo()\n"
        "    train = replace(run.train, steps='4', device='tpu', max_grad_norm=1, batch=True)\n"
        "    mesh = replace(run.mesh, ep=2.0)\n"
        "    return replace(run, train=train, mesh=mesh, layers_per_chunk=[1, 3], lr=None)\n"
    )
    assert main(["pretrain", "typed.py"]) == 2
    error = capsys.readouterr().err
    for line in (
        "train.steps is '4', of type str: allowed is int",
        "train.device is 'tpu', of type str: allowed is typing.Literal['cpu', 'cuda']",
        "train.batch is True, of type bool: allowed is int",
        "mesh.ep is 2.0, of type float: allowed is int",
        "layers_per_chunk is [1, 3], of type list: allowed is tuple[int, ...] | None",
        "lr is None, of type NoneType: allowed is LearningRateConfig",
    ):
        assert f"  - {line}\n" in error
    assert error.count("  - ") == 6
    assert [path.name for path in tmp_path.iterdir()] == ["typed.py"]


def test_every_option_of_a_recipe_is_explained(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        main(["pretrain", "demo", "--help"])
    assert not end.value.code
    text = capsys.readouterr().out
    for option in ("--train.steps INT", "--mesh.ep INT", "--model.norm-topk-prob", "--lr.peak"):
        assert option in text
    assert "Optimizer updates of the whole run" in text


def test_a_run_that_cannot_work_starts_no_process_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", "demo", "--mesh.ep", "3", "--nproc", "4"]) == 2
    error = capsys.readouterr().err
    assert "mesh.ep = 3" in error
    assert "4 run" in error
    assert list(tmp_path.iterdir()) == []


def test_a_rank_of_a_wrong_world_refuses_alone(tmp_path, monkeypatch, capsys):
    """Under torchrun every rank says so at once, without meeting the others."""
    monkeypatch.chdir(tmp_path)
    found = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    assert main(["pretrain", "demo", "--train.device", "cpu"]) == 2
    assert "8 run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_command_ends_with_its_exit_code(tmp_path):
    done = pith("pretrain", "demo", "--train.micro-batch", "3", cwd=tmp_path)
    assert done.returncode == 2
    assert "train.batch is 8" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []

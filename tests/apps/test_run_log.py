"""The step line, `metrics.jsonl` and what a resumed run makes of them."""

import errno
import json
import math
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from pith_apps.config import LogConfig, RunConfig, config_record
from pith_apps.pretrain import load_warning
from pith_apps.run_log import (
    RunLog,
    StepRecord,
    peak_memory_bytes,
    read_metrics,
    write_run_facts,
)
from pith_engine.checkpoint import Manifest
from pith_engine.mesh import Mesh, MeshConfig
from pith_engine.pipeline import StepLosses
from pith_models.hf import held_folder
from tiny_run import tiny_run

CPU = torch.device("cpu")


def config_of(folder: Path, tensorboard: bool = False) -> RunConfig:
    """Ten steps of 2048 tokens."""
    run = tiny_run(num_layers=2, sequence_length=256)
    return replace(
        run,
        runs_folder=folder.parent,
        name=folder.name,
        train=replace(run.train, steps=10),
        log=LogConfig(tensorboard=tensorboard),
    )


def open_log(
    folder: Path,
    rank: int = 0,
    *,
    tensorboard: bool = False,
    resumed_step: int = 0,
    facts: dict | None = None,
) -> RunLog:
    """The log of a rank of four."""
    facts = facts or {}
    resumed = Manifest(step=resumed_step, has_optimizer=True, files={}, run=facts, versions={})
    mesh = Mesh.plan(MeshConfig(ep=4), rank)
    return RunLog(config_of(folder, tensorboard), mesh, CPU, resumed if resumed_step else None)


def log_step(log: RunLog, **changes: float) -> None:
    numbers: dict = {"loss": 2 / 3, "balance": 1.0312345678901234, "num_targets": 2000}
    numbers |= {"max_load": 1.5, "dead_experts": 3, "load_entropy": 0.96875}
    log.log_step(
        StepLosses(**{**numbers, **changes}),
        learning_rate=1e-3 / 3,
        grad_norm=math.pi,
        peak_memory=3 << 29,
    )


def split_record(record: dict) -> tuple[dict, StepRecord]:
    """The fields of `StepLosses`, and the others."""
    measured = {field.name: record.pop(field.name) for field in fields(StepLosses)}
    return measured, StepRecord(**record)


def test_step_line_and_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_log(tmp_path) as log:
        with log.elsewhere():
            time.sleep(0.2)
        time.sleep(0.1)
        log_step(log)
        log_step(log, num_targets=0, max_load=0.0, dead_experts=0, load_entropy=0.0)
        log_step(log, z_loss=5.25)
    lines = capsys.readouterr().out.splitlines()
    for part in [
        "step  1/10  ",
        "loss 0.6667",
        "balance 1.031  max-load",
        "max-load 1.50  dead 3  entropy 0.969",
        "lr 3.33e-04",
        "grad norm 3.142",
        " tok/s  ",
        " tok/s/process",
        "MFU n/a (CPU)",
        "mem 1.50 GiB",
        "ETA 0:00:0",
    ]:
        assert part in lines[0], part
    assert "  max-load n/a  lr " in lines[1]
    assert lines[1].endswith("skipped 1")
    assert "z " not in lines[0]
    assert "entropy 0.969  z 5.250  lr" in lines[2]

    measured, (first, second, _) = zip(*map(split_record, read_metrics(tmp_path)), strict=True)
    assert measured[0] == {
        "loss": 2 / 3,
        "balance": 1.0312345678901234,
        "z_loss": 0.0,
        "num_targets": 2000,
        "max_load": 1.5,
        "dead_experts": 3,
        "load_entropy": 0.96875,
    }
    assert first.grad_norm == math.pi
    assert 0.3 <= first.step_seconds < 1
    assert 0.2 <= first.seconds_elsewhere < first.step_seconds - 0.09
    assert first.tokens_per_second == pytest.approx(
        2048 / (first.step_seconds - first.seconds_elsewhere)
    )
    assert first.tokens_per_second_per_rank == first.tokens_per_second / 4
    assert first.eta_seconds == pytest.approx(9 * first.step_seconds)
    assert (second.step, second.tokens_seen, second.num_skipped_steps) == (2, 2000, 1)
    nulls = {name for name, value in measured[1].items() if value is None}
    assert nulls == {"balance", "max_load", "dead_experts", "load_entropy"}
    assert measured[2]["z_loss"] == 5.25
    assert second.eta_seconds == pytest.approx(8 * (first.step_seconds + second.step_seconds) / 2)


def test_mfu_is_of_all_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pith_apps.run_log.peak_flops", lambda device: 1e12)
    monkeypatch.setattr("pith_apps.run_log.training_flops", lambda config: 2e9)
    with open_log(tmp_path) as log:
        log_step(log)
    (record,) = read_metrics(tmp_path)
    assert record["mfu"] == pytest.approx(record["tokens_per_second"] * 2e9 / 4e12, rel=1e-12)
    measured, step = split_record(record)
    line = step.line(StepLosses(**measured), "cuda")
    assert f"MFU {100 * record['mfu']:.1f}%" in line
    assert "tok/s/GPU" in line


def test_only_rank_0_prints_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_log(tmp_path, rank=3) as log:
        log_step(log)
        log.log_held_out(2.0, 5)
        log.say("here\nand there")
    assert capsys.readouterr().out == ""
    assert [path.name for path in sorted(tmp_path.rglob("*.*"))] == ["rank_00003.log"]
    lines = (tmp_path / "log" / "rank_00003.log").read_text().splitlines()
    assert [line[20:] for line in lines] == ["here", "and there"]


def test_resume_appends_without_repeating_steps(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.log_held_out(8.0, 100)
        for step in range(1, 7):
            log_step(log, loss=float(step), num_targets=0 if step == 2 else 10)
            if step % 3 == 0:
                log.log_held_out(step / 7, 100)
    before = read_metrics(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # a kill in the middle of a line
    assert read_metrics(tmp_path) == before
    with open_log(tmp_path, resumed_step=3, facts={"tokens_seen": 20, "num_updates": 2}) as log:
        log_step(log, loss=40.0, num_targets=10)
    records = read_metrics(tmp_path)
    assert [record["step"] for record in records] == [0, 1, 2, 3, 3, 4]
    assert records[:5] == before[:5]
    assert records[4]["held_out_loss"] == 3 / 7
    assert (records[5]["loss"], records[5]["tokens_seen"]) == (40.0, 30)
    assert records[5]["num_skipped_steps"] == 1
    assert read_metrics(tmp_path / "nowhere") == []


def test_a_run_from_scratch_keeps_nothing(tmp_path: Path) -> None:
    """A run that died before its first checkpoint evaluates step 0 again."""
    for loss in (8.0, 7.0):
        with open_log(tmp_path) as log:
            log.log_held_out(loss, 100)
            log_step(log, num_targets=0)
    first, second = read_metrics(tmp_path)
    assert (first["step"], first["held_out_loss"]) == (0, 7.0)
    assert (second["step"], second["num_skipped_steps"]) == (1, 1)


def test_unwritable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        open_log(tmp_path / "file")


def test_run_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "s3cret")
    config = config_of(tmp_path / "run")
    write_run_facts(config, 4, "the plan")
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == config_record(config)
    assert (tmp_path / "run" / "plan.txt").read_text() == "the plan\n"
    text = (tmp_path / "run" / "environment.json").read_text()
    environment = json.loads(text)
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["world_size"] == 4
    assert "s3cret" not in text


def test_peak_memory_is_in_bytes() -> None:
    block = bytearray(64 << 20)
    peak = peak_memory_bytes(CPU)
    assert len(block) < peak < 64 << 30
    assert peak > 100 << 20


def test_tensorboard_holds_the_scalars_and_no_step_twice(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_log(tmp_path, tensorboard=True) as log:
        for step in range(1, 5):
            log_step(log, loss=float(step))
    time.sleep(1.1)  # event files are told apart by the second
    with open_log(tmp_path, tensorboard=True, resumed_step=2) as log:
        log_step(log, loss=30.0)
        log.log_held_out(0.5, 1)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [(e.step, e.value) for e in events.Scalars("held_out_loss")] == [(3, 0.5)]


def test_damaged_metrics_are_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged"):
        read_metrics(tmp_path)


HOLD = """
import pathlib, sys, time
from pith_models.hf import held_folder
with held_folder(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_run_folder_is_held_until_its_process_ends_however(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    refused = pytest.raises(ValueError, match="run is in use by another process")
    with refused, held_folder(tmp_path / "run"):
        pass
    holder.kill()
    holder.wait()
    for _ in range(2):
        with held_folder(tmp_path / "run"):
            pass


def test_a_file_system_without_locks_is_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("pith_models.hf.flock", no_locks)
    with pytest.warns(UserWarning, match="not protected"), held_folder(tmp_path):
        pass


def test_a_collapsed_router_is_warned_of_and_an_even_one_is_not():
    assert "one expert gets 75% of its layer's tokens" in load_warning(3.0, 2, 8)
    assert load_warning(1.9, 2, 8) == ""
    assert "one expert gets 100% of its layer's tokens" in load_warning(2.0, 2, 4)
    assert load_warning(1.0, 5, 8) == ""  # 62% of the tokens each is even
    assert load_warning(0.0, 0, 0) == ""

"""What a run leaves in its folder.

    config.json, environment.json, plan.txt    of the latest start
    metrics.jsonl        one JSON object a line, written by rank 0
    log/rank_00000.log   what a rank said, with times; rank 0 also prints it
    tensorboard/         when asked for
    lock                 held while a process writes to the folder

A line of `metrics.jsonl` has "loss" (a step) or "held_out_loss" (an evaluation after it). A resumed
run first cuts off what it will write again.

The trap: a GPU runs behind the host; only a number for `log_step` that is read after the launch of
the optimizer's kernels shows that the step is over.
"""

import json
import platform
import resource
import sys
import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, TextIO

import torch
from pith_engine.checkpoint import Manifest
from pith_engine.mesh import Mesh
from pith_engine.pipeline import StepLosses
from pith_ops.device import peak_flops

from pith_apps.config import RunConfig, config_record
from pith_apps.plan import training_flops

NEED_EXPERTS = ("balance", "max_load", "dead_experts", "load_entropy")
"""Fields of `StepLosses` that are null in a record of a dense model."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One training step, in `metrics.jsonl` beside its `StepLosses`."""

    step: int
    """From 1."""
    total_steps: int
    """Of the whole run."""
    learning_rate: float
    """Of the step."""
    grad_norm: float
    """Global, before clipping."""
    tokens_seen: int
    """Targets since the start of the run."""
    tokens_per_second: float
    """Over all ranks, without `seconds_elsewhere`."""
    tokens_per_second_per_rank: float
    """Or GPU."""
    mfu: float | None
    """Model FLOP/s over the peak of all GPUs, if known."""
    peak_memory: int
    """Bytes of the fullest rank: allocated (GPU) or resident (CPU)."""
    step_seconds: float
    """From the end of the step before."""
    seconds_elsewhere: float
    """Of them, evaluating and saving."""
    eta_seconds: float
    """Until the last step."""
    num_skipped_steps: int
    """So far, for want of targets."""

    def line(self, losses: StepLosses, device_type: str) -> str:
        """The step line of rank 0."""
        unit = "GPU" if device_type == "cuda" else "process"
        loads = "balance n/a  max-load n/a"
        if losses.max_load:
            loads = (
                f"balance {losses.balance:.3f}  max-load {losses.max_load:.2f}  "
                f"dead {losses.dead_experts}  entropy {losses.load_entropy:.3f}"
            )
        mfu = "n/a (CPU)" if unit == "process" else "n/a (GPU of unknown peak)"
        if self.mfu is not None:
            mfu = f"{self.mfu:.1%}"
        z_loss = f"  z {losses.z_loss:.3f}" if losses.z_loss else ""
        skipped = f"  skipped {self.num_skipped_steps}" if self.num_skipped_steps else ""
        return (
            f"step {self.step:>{len(str(self.total_steps))}}/{self.total_steps}  "
            f"loss {losses.loss:.4f}  {loads}{z_loss}  "
            f"lr {self.learning_rate:.2e}  grad norm {self.grad_norm:.3f}  "
            f"{self.tokens_per_second:,.0f} tok/s  "
            f"{self.tokens_per_second_per_rank:,.0f} tok/s/{unit}  MFU {mfu}  "
            f"mem {self.peak_memory / (1 << 30):.2f} GiB  {self.step_seconds:.3f} s  "
            f"ETA {timedelta(seconds=round(self.eta_seconds))}{skipped}"
        )


class RunLog:
    """A rank's log, for a `with`; rank 0 also prints and writes the metrics."""

    def __init__(
        self, config: RunConfig, mesh: Mesh, device: torch.device, resumed: Manifest | None
    ):
        """The first step starts now. ValueError if the folder cannot be written."""
        self.config, self.mesh, self.device, folder = config, mesh, device, config.run_folder
        self.flops_per_token = training_flops(config)
        self.step, facts = (resumed.step, resumed.run) if resumed else (0, {})
        self.tokens_seen: int = facts.get("tokens_seen", 0)
        self.num_skipped_steps: int = self.step - facts.get("num_updates", self.step)
        self.metrics: TextIO | None = None
        self.writer = None
        last_kept = self.step or -1  # a start from step 0 evaluates again
        try:
            (folder / "log").mkdir(parents=True, exist_ok=True)
            self.text = (folder / "log" / f"rank_{mesh.rank:05}.log").open("a", buffering=1)
            if mesh.rank == 0:
                kept = [record for record in read_metrics(folder) if record["step"] <= last_kept]
                temporary = folder / "metrics.jsonl.tmp"
                temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
                self.metrics = temporary.replace(folder / "metrics.jsonl").open("a", buffering=1)
        except OSError as error:
            raise ValueError(f"run folder {folder} cannot be written: {error}") from None
        if mesh.rank == 0 and config.log.tensorboard:  # `checks.py` asked whether it is there
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=last_kept + 1)
        self._recent = deque[float](maxlen=20)  # for the ETA
        self._elsewhere, self._last_end = 0.0, time.perf_counter()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exception: object) -> None:
        for file in (self.text, self.metrics, self.writer):
            if file is not None:
                file.close()

    def say(self, text: str) -> None:
        """Write lines to the log."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self.text.write("".join(f"{stamp} {line}\n" for line in text.splitlines()))
        if self.mesh.rank == 0:
            print(text, flush=True)

    def log_step(
        self, losses: StepLosses, *, learning_rate: float, grad_norm: float, peak_memory: int
    ) -> None:
        """End a step."""
        now, train = time.perf_counter(), self.config.train
        seconds, self._last_end = now - self._last_end, now
        elsewhere, self._elsewhere = self._elsewhere, 0.0
        self.step += 1
        self.tokens_seen += losses.num_targets
        self.num_skipped_steps += losses.num_targets == 0
        self._recent.append(seconds)
        if self.metrics is None:
            return
        rate = train.batch * train.sequence_length / (seconds - elsewhere)
        peak, num_ranks = peak_flops(self.device), self.mesh.world.size
        record = StepRecord(
            step=self.step,
            total_steps=train.steps,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            tokens_seen=self.tokens_seen,
            tokens_per_second=rate,
            tokens_per_second_per_rank=rate / num_ranks,
            mfu=rate * self.flops_per_token / (peak * num_ranks) if peak else None,
            peak_memory=peak_memory,
            step_seconds=seconds,
            seconds_elsewhere=elsewhere,
            eta_seconds=(train.steps - self.step) * sum(self._recent) / len(self._recent),
            num_skipped_steps=self.num_skipped_steps,
        )
        missing = () if losses.max_load else NEED_EXPERTS
        self._record({**asdict(record), **asdict(losses), **dict.fromkeys(missing)})
        self.say(record.line(losses, self.device.type))

    def log_held_out(self, loss: float, num_targets: int) -> None:
        """Record the held-out loss after this step, in nats a token."""
        if self.mesh.rank == 0:
            record = {"step": self.step, "held_out_loss": loss, "held_out_targets": num_targets}
            self._record(record)
            self.say(f"held-out loss {loss:.4f} after step {self.step} ({num_targets:,} tokens)")

    @contextmanager
    def elsewhere(self) -> Generator[None]:
        """Count time as `seconds_elsewhere` of the step that ends next."""
        start = time.perf_counter()
        yield
        self._elsewhere += time.perf_counter() - start

    def _record(self, record: dict[str, Any]) -> None:
        assert self.metrics is not None, "rank 0 records"
        self.metrics.write(json.dumps(record) + "\n")
        if self.writer is not None:
            for name, value in record.items():
                if isinstance(value, float):
                    self.writer.add_scalar(name, value, self.step)


def write_run_facts(config: RunConfig, world_size: int, plan: str) -> None:
    """Write what a start leaves; no environment variables, which may be credentials."""
    names = ("pith-apps", "numpy", "tokenizers", "safetensors", "triton")
    versions = {found.name: found.version for found in distributions() if found.name in names}
    environment = {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions | {"torch": torch.__version__},
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "world_size": world_size,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    folder = config.run_folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.txt").write_text(plan + "\n")
    for name, record in {
        "config.json": config_record(config),
        "environment.json": environment,
    }.items():
        (folder / name).write_text(json.dumps(record, indent=2) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records, without a half-written last line."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    try:
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def peak_memory_bytes(device: torch.device) -> int:
    """This process's, so far, as in `StepRecord`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""One run as one frozen dataclass tree.

A field's docstring is its `--help` text: an option is one field, here alone.

How a step is cut into micro-batches, with B = `train.batch`, b = `train.micro_batch`, R = dp * ep:

    B sequences = R batch ranks * N micro-batches a rank * b sequences,     N >= 2 * pp

The trap: a dataclass that checks itself reports one error alone; `checks.py` reports all.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import tyro
from pith_engine.balance import BalanceConfig
from pith_engine.fsdp import ShardingConfig
from pith_engine.lr import LearningRateConfig
from pith_engine.mesh import MeshConfig
from pith_engine.optim import OptimizerConfig
from pith_engine.overlap import Recompute
from pith_models.build import ModelConfig

Dtype = Literal["bf16", "fp32", "fp64"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which tokens a run reads."""

    standard_library: bool = False
    """Use this Python's standard library, tokenised once into RUNS_FOLDER/standard-library, instead
    of the three folders below."""
    training: Path | None = None
    """Corpus folder to train on, written by `pith tokenize`."""
    held_out: Path | None = None
    """Corpus folder to evaluate on, of the same tokenizer."""
    tokenizer: Path | None = None
    """Tokenizer folder of both corpora, copied to the export."""


@dataclass(frozen=True, kw_only=True)
class StartConfig:
    """What a run without a checkpoint starts from."""

    source: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """Hugging Face folder or checkpoint of the first weights (default: initial weights)."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Steps, their size and numbers."""

    steps: int
    """Optimizer updates of the whole run."""
    batch: int
    """Sequences of a step, over all ranks."""
    micro_batch: int = 1
    """Sequences of one forward on one rank."""
    sequence_length: int
    """Tokens of a sequence."""
    seed: int = 0
    """Seed of initial weights and data order."""
    dtype: Dtype = "bf16"
    """Compute dtype; weights, gradients and moments are kept in fp32 (fp64 with `fp64`)."""
    device: Literal["cpu", "cuda"] = "cuda"
    """`cpu` (gloo) or `cuda` (NCCL, one GPU a rank)."""
    attention: Literal["auto", "reference", "flash", "cudnn"] = "auto"
    """Attention backend; `auto` is the fastest here, and is printed."""
    recompute: Recompute = "none"
    """Stages that run again before backward: same gradients, less memory, more computing."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global L2 norm; `inf` never scales."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out loss."""

    interval: int = 100
    """Steps between evaluations; 0: only before the first and after the last step."""
    sequences: int = 64
    """Held-out sequences, always the same, spread over the corpus."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving; the newest complete one is resumed."""

    interval: int = 100
    """Steps between checkpoints; 0: after the last step only."""
    keep: int = 2
    """Newest complete checkpoints that stay, at least 1."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Beside the step lines and `metrics.jsonl`."""

    tensorboard: bool = False
    """Write TensorBoard events (needs the `tensorboard` extra)."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What decides a run."""

    name: str
    """Name of its folder under RUNS_FOLDER."""
    runs_folder: Path = Path("runs")
    """Holds run folders."""
    nproc: int | None = None
    """Processes to start here (default: the mesh's ranks), without torchrun or srun."""
    timeout: float = 600.0
    """Seconds that a rank waits in a collective until it fails."""
    model: ModelConfig
    """The architecture, under Hugging Face's field names."""
    mesh: MeshConfig
    """How ranks are arranged."""
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    """What is replicated over mesh.dp (HSDP)."""
    layers_per_chunk: tuple[int, ...] | None = None
    """Layers of each of the 2 * pp chunks, in order (default: balanced by cost)."""
    data: DataConfig = DataConfig()
    """The corpus."""
    start: StartConfig = StartConfig()
    """First weights."""
    train: TrainConfig
    """Steps and batches."""
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""
    lr: LearningRateConfig
    """The learning rate over the steps."""
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    """Expert load balancing."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out loss."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    log: LogConfig = LogConfig()
    """Logs."""

    @property
    def run_folder(self) -> Path:
        """All that this run writes."""
        return self.runs_folder / self.name

    @property
    def checkpoint_folder(self) -> Path:
        """Its checkpoints."""
        return self.run_folder / "checkpoints"

    @property
    def export_folder(self) -> Path:
        """A finished run's Hugging Face folder."""
        return self.run_folder / "export"

    @property
    def tokenizer_folder(self) -> Path:
        """That of an export, which needs no corpus; ValueError if there is none."""
        return self.data.tokenizer or self.folders.tokenizer

    @property
    def folders(self) -> "_DataFolders":
        """Corpora and tokenizer; ValueError if one is missing."""
        data, root = self.data, self.runs_folder / "standard-library"
        if data.standard_library:
            return _DataFolders(root / "training", root / "held_out", root / "tokenizer")
        if data.training and data.held_out and data.tokenizer:
            return _DataFolders(data.training, data.held_out, data.tokenizer)
        raise ValueError(
            "data.training, data.held_out and data.tokenizer: give all three folders, or "
            "--data.standard-library for a corpus that needs none"
        )

    @property
    def num_micro_batches(self) -> int:
        """Of a step, over all batch ranks."""
        return self.train.batch // self.train.micro_batch


class _DataFolders(NamedTuple):
    training: Path
    held_out: Path
    tokenizer: Path


def torch_dtype(name: Dtype) -> torch.dtype:
    """That of `train.dtype`."""
    return {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[name]


def config_record(config: RunConfig) -> dict[str, Any]:
    """The tree as JSON values, for `config.json` and manifests."""
    record = {**asdict(config), "model": model_record(config.model)}
    return json.loads(json.dumps(record, default=str))


def model_record(model: ModelConfig) -> dict[str, Any]:
    """A model's fields, and its family under `model_type`."""
    return {"model_type": model.to_hf()["model_type"], **asdict(model)}

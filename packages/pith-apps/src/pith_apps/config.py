"""One run as one frozen dataclass tree, and every reason why it cannot start.

A recipe is a Python function that returns a `RunConfig`; the command line overrides its fields
(`--train.steps 4`). The docstring under a field is its `--help` text, so an option is added by
adding one field here and nowhere else. The tree prints, saves to `config.json` and compares equal
when reloaded by the same recipe, because it holds plain values only.

How a step is cut into micro-batches, with B = `train.batch`, b = `train.micro_batch`, R = dp * ep:

    B sequences = R batch ranks * N micro-batches a rank * b sequences,     N >= 2 * pp

`violations` is a pure function of the configuration, the machine and the corpus' metadata. It
reports everything at once, before a process group is made or a file is written. The trap: a check
inside a dataclass' `__post_init__` reports alone, because the tree does not exist yet; whatever
relates two fields to one another therefore stands here.
"""

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from pith_engine.balance import BalanceConfig
from pith_engine.lr import LearningRateConfig
from pith_engine.mesh import MeshConfig, mesh_violations
from pith_engine.optim import AdamWConfig
from pith_models.build import ModelConfig
from pith_ops.attention import choose_attention_backend
from torch import device as Device

from pith_apps.corpus import Corpus, tokenizer_hash
from pith_apps.data import data_violations

STANDARD_LIBRARY_VOCABULARY = 4096
"""Entries of the tokenizer that `data.standard_library` trains."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which tokens a run reads."""

    standard_library: bool = False
    """Use the source code of this Python's standard library, tokenised at first use into
    RUNS_FOLDER/standard-library; the three folders below are then left out."""
    training: Path | None = None
    """Corpus folder to train on, written by `pith tokenize`."""
    held_out: Path | None = None
    """Corpus folder to evaluate on, of the same tokenizer."""
    tokenizer: Path | None = None
    """Tokenizer folder of both corpora; the export gets a copy of its files."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The size of a run and of its steps, and the numbers it computes with."""

    steps: int
    """Optimizer updates of the whole run, those before a resume included."""
    batch: int
    """Sequences a step over all ranks together."""
    micro_batch: int = 1
    """Sequences that one forward sees on one rank."""
    sequence_length: int
    """Tokens of a sequence."""
    seed: int = 0
    """Seed of the initial weights and of the data order."""
    dtype: Literal["bf16", "fp32", "fp64"] = "bf16"
    """Compute dtype; master weights, gradients and moments are fp32 (fp64 with `fp64`)."""
    device: Literal["cpu", "cuda"] = "cuda"
    """Where the ranks compute: `cpu` (gloo) or `cuda` (NCCL, one GPU a rank)."""
    attention: Literal["auto", "reference", "flash", "cudnn"] = "auto"
    """Attention backend; `auto` is the fastest for this device and dtype, and is printed."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global L2 norm; `inf` never scales."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out loss during training and by `pith evaluate`."""

    interval: int = 100
    """Steps between evaluations; 0 evaluates before the first and after the last step only."""
    sequences: int = 64
    """Held-out sequences of an evaluation, spread evenly over the corpus, always the same."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming; the newest complete checkpoint of the run folder is always resumed."""

    interval: int = 100
    """Steps between checkpoints; 0 saves after the last step only."""
    keep: int = 2
    """Newest complete checkpoints that stay; older ones are deleted. At least 1."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What a run writes beside the step lines and `metrics.jsonl`, which are always on."""

    tensorboard: bool = False
    """Also write TensorBoard events (needs the `tensorboard` extra)."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a run."""

    name: str
    """Name of the run: its folder under RUNS_FOLDER."""
    runs_folder: Path = Path("runs")
    """Where run folders stand."""
    nproc: int | None = None
    """Processes to start on this machine (default: the mesh's world size). Under torchrun or srun
    the command joins the processes it finds instead."""
    timeout: float = 600.0
    """Seconds after which a collective that a rank waits for fails, on every group."""
    model: ModelConfig
    """The architecture, with the field names of its Hugging Face configuration."""
    mesh: MeshConfig
    """How ranks are arranged."""
    layers_per_chunk: tuple[int, ...] | None = None
    """Layers of each of the 2 * pp chunks, in layer order (default: balanced by cost)."""
    data: DataConfig = DataConfig()
    """The corpus."""
    train: TrainConfig
    """Steps and batches."""
    optim: AdamWConfig = field(default_factory=AdamWConfig)
    """AdamW."""
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
        """The folder that holds everything this run writes."""
        return self.runs_folder / self.name

    @property
    def folders(self) -> "DataFolders":
        """Where the corpora and their tokenizer are.

        Raises:
            ValueError: one of them is not given.
        """
        data = self.data
        if data.standard_library:
            root = self.runs_folder / "standard-library"
            return DataFolders(
                root=root,
                training=root / "training",
                held_out=root / "held_out",
                tokenizer=root / "tokenizer",
            )
        if data.training is None or data.held_out is None or data.tokenizer is None:
            raise ValueError(
                "data.training, data.held_out and data.tokenizer: give all three folders, or "
                "--data.standard-library for a corpus that needs none"
            )
        return DataFolders(
            root=None, training=data.training, held_out=data.held_out, tokenizer=data.tokenizer
        )

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step over all batch ranks."""
        return self.train.batch // self.train.micro_batch


@dataclass(frozen=True, kw_only=True)
class DataFolders:
    """Where a run's tokens are."""

    root: Path | None
    """The folder of the standard library's corpora, None when the user gave the others."""
    training: Path
    """Corpus folder to train on."""
    held_out: Path
    """Corpus folder to evaluate on."""
    tokenizer: Path
    """Tokenizer folder of both."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a run finds to run on."""

    world_size: int
    """Processes of the run, all nodes together."""
    processes_here: int
    """Processes of the run on this node."""
    num_gpus: int
    """GPUs that this node shows."""


def compute_dtype(config: RunConfig) -> torch.dtype:
    """The torch dtype that `train.dtype` names."""
    match config.train.dtype:
        case "bf16":
            return torch.bfloat16
        case "fp32":
            return torch.float32
        case "fp64":
            return torch.float64


def check_run(config: RunConfig, machine: Machine) -> None:
    """Refuse a run that cannot work.

    Raises:
        ValueError: names every violation: field, value, what is allowed, the fix.
    """
    found = violations(config, machine)
    if found:
        lines = "".join(f"\n  - {violation}" for violation in found)
        raise ValueError(f"{len(found)} reason(s) why run {config.name!r} cannot start:{lines}")


def violations(config: RunConfig, machine: Machine) -> list[str]:
    """Everything that is wrong with running `config` on `machine`; empty when nothing is."""
    out_of_range = _range_violations(config)
    found = out_of_range + _place_violations(config, machine)
    if not out_of_range:
        found += mesh_violations(
            config.mesh,
            world_size=machine.world_size,
            num_experts=config.model.num_experts,
            num_layers=config.model.num_hidden_layers,
            num_micro_batches=config.num_micro_batches,
        )
        found += _model_violations(config) + _data_violations(config)
    return found


def config_record(config: RunConfig) -> dict[str, object]:
    """The tree as plain JSON values, for `config.json` and a checkpoint's manifest."""

    def plain(value: object) -> object:
        match value:
            case dict():
                return {key: plain(item) for key, item in value.items()}
            case tuple() | list():
                return [plain(item) for item in value]
            case Path():
                return str(value)
            case _:
                return value

    return {key: plain(value) for key, value in dataclasses.asdict(config).items()}


def _range_violations(config: RunConfig) -> list[str]:
    """Numbers that are out of range whatever the rest says."""
    at_least = [
        ("nproc", config.nproc, 1),
        ("train.steps", config.train.steps, 1),
        ("train.batch", config.train.batch, 1),
        ("train.micro_batch", config.train.micro_batch, 1),
        ("train.sequence_length", config.train.sequence_length, 1),
        ("train.seed", config.train.seed, 0),
        ("evaluation.interval", config.evaluation.interval, 0),
        ("evaluation.sequences", config.evaluation.sequences, 1),
        ("checkpoint.interval", config.checkpoint.interval, 0),
        ("checkpoint.keep", config.checkpoint.keep, 1),
    ]
    found = [
        f"{path} is {value}: allowed are whole numbers from {least}; set --{path} {least} or more"
        for path, value, least in at_least
        if value is not None and value < least
    ]
    for path, value in [
        ("timeout", config.timeout),
        ("train.max_grad_norm", config.train.max_grad_norm),
    ]:
        if not value > 0:
            found.append(f"{path} is {value}: allowed are numbers above 0; set --{path} 1")
    return found


def _place_violations(config: RunConfig, machine: Machine) -> list[str]:
    """A run folder that cannot be written, processes that have no device."""
    found = []
    if config.name in ("", ".", "..") or Path(config.name).name != config.name:
        found.append(
            f"name is {config.name!r}: allowed is the name of one folder; set --name my-run"
        )
    existing = config.run_folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        found.append(
            f"runs_folder is {str(config.runs_folder)!r}: {existing} is not a folder that this user"
            f" can write to; set --runs-folder to one that is"
        )
    if config.train.device == "cuda" and machine.processes_here > machine.num_gpus:
        found.append(
            f"train.device is 'cuda' with {machine.processes_here} processes here: this machine "
            f"shows {machine.num_gpus} GPU(s), one process each; "
            + (
                f"use a mesh of {machine.num_gpus} ranks or --train.device cpu"
                if machine.num_gpus
                else "set --train.device cpu --train.dtype fp32"
            )
        )
    return found


def _model_violations(config: RunConfig) -> list[str]:
    """Sizes that do not fit together, an attention backend that is not there."""
    model, num_chunks, batch = config.model, 2 * config.mesh.pp, config.train.batch
    found = []
    if batch % config.train.micro_batch:
        above = batch + config.train.micro_batch - batch % config.train.micro_batch
        found.append(
            f"train.batch is {batch}: allowed are multiples of train.micro_batch "
            f"{config.train.micro_batch}; set --train.batch {above}"
        )
    chosen = config.layers_per_chunk
    if chosen is not None and (
        len(chosen) != num_chunks or min(chosen) < 1 or sum(chosen) != model.num_hidden_layers
    ):
        found.append(
            f"layers_per_chunk is {chosen}: allowed are {num_chunks} numbers (2 * pp) from 1 that "
            f"add up to {model.num_hidden_layers} layers; leave it out to balance by cost"
        )
    if config.train.sequence_length > model.max_position_embeddings:
        found.append(
            f"train.sequence_length is {config.train.sequence_length}: the model has positions up "
            f"to model.max_position_embeddings {model.max_position_embeddings}"
        )
    try:
        choose_attention_backend(
            config.train.attention,
            Device(config.train.device),
            compute_dtype(config),
            model.head_dim,
            model.head_dim,
            packed=False,
        )
    except ValueError as error:
        found.append(f"train.attention is {config.train.attention!r}: {error}")
    return found


def _data_violations(config: RunConfig) -> list[str]:
    """Corpora that are missing, damaged, too short or of another tokenizer."""
    data, vocab_size = config.data, config.model.vocab_size
    found = []
    if data.standard_library and (data.training or data.held_out or data.tokenizer):
        found.append(
            "data.standard_library is True beside data.training, data.held_out or data.tokenizer: "
            "leave those out or add --data.no-standard-library"
        )
    if data.standard_library and vocab_size < STANDARD_LIBRARY_VOCABULARY:
        found.append(
            f"model.vocab_size is {vocab_size}: the standard library's tokenizer has "
            f"{STANDARD_LIBRARY_VOCABULARY} ids; set --model.vocab-size "
            f"{STANDARD_LIBRARY_VOCABULARY} or more"
        )
    try:
        for path, folder in [
            ("data.training", config.folders.training),
            ("data.held_out", config.folders.held_out),
        ]:
            if folder.exists() or not data.standard_library:
                found += _corpus_violations(config, path, folder)
    except ValueError as error:
        found.append(str(error))
    return found


def _corpus_violations(config: RunConfig, path: str, folder: Path) -> list[str]:
    """What is wrong with one corpus, seen from its metadata."""
    try:
        corpus = Corpus.open(folder, config.model.vocab_size)
        tokenizer = tokenizer_hash(config.folders.tokenizer)
    except (ValueError, OSError) as error:
        return [f"{path} is {str(folder)!r}: {error}"]
    meta, found = corpus.meta, []
    if meta.tokenizer_sha256 != tokenizer:
        found.append(
            f"{path} is {str(folder)!r}, tokenised with {meta.tokenizer_name!r}: data.tokenizer "
            f"{str(config.folders.tokenizer)!r} is another tokenizer; give the one it was made with"
        )
    if meta.vocab_size > config.model.vocab_size:
        found.append(
            f"model.vocab_size is {config.model.vocab_size}: the tokenizer of {path} has "
            f"{meta.vocab_size} ids; set --model.vocab-size {meta.vocab_size} or more"
        )
    if path == "data.held_out":
        faults = [] if meta.num_tokens > 1 else ["one token has no target: give more text"]
    else:
        train = config.train
        faults = data_violations(
            meta.num_tokens, train.sequence_length, train.micro_batch, config.num_micro_batches, 1
        )
    return found + [f"{path} is {str(folder)!r}: {fault}" for fault in faults]

"""Every reason why a run cannot start, found before anything is touched.

`violations` is a pure function of the configuration, the machine and what lies on disk (the corpus'
metadata, the newest checkpoint's manifest). It reports everything at once: field path, value, what
is allowed, a fix. No process group is made and no file is written before it returned nothing.

The trap: a check inside a dataclass' `__post_init__` reports alone, because the tree does not exist
yet; whatever relates two fields to one another therefore stands here.
"""

import os
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pith_engine.mesh import mesh_violations

from pith_apps.config import (
    STANDARD_LIBRARY_VOCABULARY,
    RunConfig,
    config_record,
)
from pith_apps.corpus import Corpus, tokenizer_hash
from pith_apps.data import num_samples, too_few_samples
from pith_apps.plan import Machine, chosen_attention

FIXED_FIELDS = (
    "model.",
    "train.seed:",
    "train.batch:",
    "train.sequence_length:",
)
"""Beginnings of the changes that a resumed run refuses."""


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """Two settings that do not go together; both are words of `_settings`."""

    option: str
    """What the run asks for, as the command line says it."""
    excludes: str
    """What it cannot be used with."""
    reason: str
    """Why, and what to use instead."""


CAPABILITIES = (
    Exclusion(
        option="balance.method bias",
        excludes="model_type qwen3_moe",
        reason="its Hugging Face format has no place for the bias; use global-batch or sequence",
    ),
)
"""Every pair that is refused by name: the documents' table, read by `step_violations`."""


def check_run(config: RunConfig, machine: Machine) -> None:
    """Refuse a run that cannot work.

    Raises:
        ValueError: names every violation.
    """
    found = violations(config, machine)
    if found:
        lines = "".join(f"\n  - {violation}" for violation in found)
        raise ValueError(f"{len(found)} reason(s) why run {config.name!r} cannot start:{lines}")


def violations(config: RunConfig, machine: Machine) -> list[str]:
    """Everything that is wrong with running `config` on `machine`; empty when nothing is."""
    found = step_violations(config, machine) + _place_violations(config)
    counts = (machine.world_size, config.train.batch, config.train.micro_batch)
    if min(counts) > 0:
        found += mesh_violations(
            config.mesh,
            world_size=machine.world_size,
            num_experts=config.model.num_experts,
            num_layers=config.model.num_hidden_layers,
            num_micro_batches=config.num_micro_batches,
        )
        found += _batch_violations(config)
    return found + _model_violations(config) + _data_violations(config)


def step_violations(config: RunConfig, machine: Machine) -> list[str]:
    """What keeps any step from being computed here, whatever the mesh and the data."""
    found = _range_violations(config) + _device_violations(config, machine)
    found += config.balance.violations()
    settings = _settings(config)
    found += [
        f"{row.option} with {row.excludes}: {row.reason}"
        for row in CAPABILITIES
        if settings[row.option] and settings[row.excludes]
    ]
    try:
        chosen_attention(config)
    except ValueError as error:
        found.append(f"train.attention is {config.train.attention!r}: {error}")
    return found


def check_resume(config: RunConfig) -> None:
    """Refuse to resume a run whose checkpoint was made with another model or other data.

    What decides the numbers must be the same: the model, the seed, and which tokens a step reads.
    Everything else (mesh, steps, learning rate, intervals) may change between starts.

    Raises:
        ValueError: names every field that differs.
    """
    newest = newest_checkpoint(config)
    if newest is None:
        return
    from pith_engine.checkpoint import read_manifest

    found = fixed_changes(config, newest, FIXED_FIELDS)
    folders, saved = config.folders, read_manifest(newest).run.get("corpus")
    if saved is not None and folders.training.exists():
        corpus = Corpus.open(folders.training, config.model.vocab_size)
        if corpus.meta.sha256 != saved:
            found.append(f"the corpus in {folders.training} is another one than was trained on")
    if found:
        lines = "".join(f"\n  - {change}" for change in found)
        raise ValueError(
            f"run {config.name!r} cannot resume {newest}:{lines}\n"
            "go back to the values of the checkpoint, or start another run with --name"
        )


def fixed_changes(config: RunConfig, checkpoint: Path, fixed: tuple[str, ...]) -> list[str]:
    """The changes since a checkpoint that begin with one of `fixed`."""
    from pith_engine.checkpoint import read_manifest

    changes = changed_fields(read_manifest(checkpoint).run.get("config", {}), config_record(config))
    return [change for change in changes if change.startswith(fixed)]


def newest_checkpoint(config: RunConfig) -> Path | None:
    """The newest complete checkpoint of the run, None without one; quiet about incomplete ones."""
    if not config.checkpoint_folder.is_dir():
        return None
    # Takes as long to import as torch itself, and the launcher of a new run does not need it.
    from pith_engine.checkpoint import find_checkpoint

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return find_checkpoint(config.checkpoint_folder)


def required_checkpoint(config: RunConfig) -> Path:
    """The newest complete checkpoint of the run.

    Raises:
        ValueError: there is none, or it holds another model than the configuration.
    """
    newest = newest_checkpoint(config)
    if newest is None:
        raise ValueError(
            f"{config.checkpoint_folder} holds no complete checkpoint: run `pith pretrain` first, "
            "or set --name and --runs-folder to those of a run that has one"
        )
    if changes := fixed_changes(config, newest, ("model.",)):
        raise ValueError(f"{newest} holds another model: {'; '.join(changes)}")
    return newest


def changed_fields(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """`path: old -> new` for every field of two `config_record` trees that differs."""
    found = []
    for name in sorted(old.keys() & new.keys()):
        before, after = old[name], new[name]
        if isinstance(before, dict) and isinstance(after, dict):
            found += changed_fields(before, after, f"{prefix}{name}.")
        elif before != after:
            found.append(f"{prefix}{name}: {before} -> {after}")
    return found


def _settings(config: RunConfig) -> dict[str, bool]:
    """Words of `CAPABILITIES`, and whether they hold for this run."""
    return {
        "balance.method bias": config.balance.method == "bias",
        "model_type qwen3_moe": config.model.to_hf()["model_type"] == "qwen3_moe",
    }


def _device_violations(config: RunConfig, machine: Machine) -> list[str]:
    """Processes that have no device of their own."""
    if config.train.device == "cpu" or machine.processes_here <= machine.num_gpus:
        return []
    fix = "set --train.device cpu --train.dtype fp32"
    if machine.num_gpus:
        fix = f"use a mesh of {machine.num_gpus} ranks or {fix}"
    return [
        f"train.device is 'cuda' with {machine.processes_here} processes here: this machine shows "
        f"{machine.num_gpus} GPU(s), one process each; {fix}"
    ]


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
        f"{path} is {value}: allowed are whole numbers from {least}; "
        f"set --{path.replace('_', '-')} {least} or more"
        for path, value, least in at_least
        if value is not None and value < least
    ]
    if config.train.seed >= 2**63:
        found.append(f"train.seed is {config.train.seed}: allowed are numbers below 2**63")
    if not 0 < config.timeout <= 1e9:
        found.append(
            f"timeout is {config.timeout}: allowed are seconds above 0 and up to 1e9; "
            "set --timeout 600"
        )
    if not config.train.max_grad_norm > 0:
        found.append(
            f"train.max_grad_norm is {config.train.max_grad_norm}: allowed are numbers above 0; "
            "set --train.max-grad-norm 1"
        )
    return found


def _place_violations(config: RunConfig) -> list[str]:
    """A run folder or a log that cannot be written."""
    found, name = [], config.name
    if name in ("", ".", "..") or Path(name).name != name or len(os.fsencode(name)) > 255:
        found.append(
            f"name is {name!r}: allowed is the name of one folder, up to 255 bytes; "
            "set --name my-run"
        )
        name = "."
    if config.log.tensorboard and find_spec("tensorboard") is None:
        found.append(
            "log.tensorboard is True, but TensorBoard is not installed: "
            "pip install 'pith-apps[tensorboard]'"
        )
    existing = (config.runs_folder / name).absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        found.append(
            f"runs_folder is {str(config.runs_folder)!r}: {existing} is not a folder that this user"
            f" can write to; set --runs-folder to one that is"
        )
    return found


def _batch_violations(config: RunConfig) -> list[str]:
    """A batch that its micro-batches do not divide."""
    batch, micro_batch = config.train.batch, config.train.micro_batch
    if batch % micro_batch == 0:
        return []
    return [
        f"train.batch is {batch}: allowed are multiples of train.micro_batch {micro_batch}; "
        f"set --train.batch {batch + micro_batch - batch % micro_batch}"
    ]


def _model_violations(config: RunConfig) -> list[str]:
    """Sizes that do not fit together."""
    model, num_chunks = config.model, 2 * config.mesh.pp
    found = []
    if (config.train.device, config.train.dtype) == ("cuda", "bf16"):
        # Rows of a grouped matrix product must start at multiples of 16 bytes.
        found += [
            f"model.{name} is {size}: allowed are multiples of 8 in bf16 on a GPU; "
            f"set --model.{name.replace('_', '-')} {size + 8 - size % 8}"
            for name, size in [
                ("hidden_size", model.hidden_size),
                ("moe_intermediate_size", model.moe_intermediate_size),
            ]
            if size % 8
        ]
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
    train = config.train
    if path == "data.held_out" and meta.num_tokens < 2:
        found.append(f"{path} is {str(folder)!r}: one token has no target; give more text")
    elif (
        path == "data.training"
        and train.sequence_length > 0
        and num_samples(meta.num_tokens, train.sequence_length) < train.batch
    ):
        fault = too_few_samples(meta.num_tokens, train.sequence_length, train.batch)
        found.append(f"{path} is {str(folder)!r}: {fault}")
    return found

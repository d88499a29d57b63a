"""Every reason why a run cannot start, found before anything is touched.

`violations` reports everything at once: field path, value, what is allowed, a fix. No process group
is made and no file is written before it returned nothing.

What is wrong with one field says the `violations` method of its dataclass, or `_range_violations`
for those of `config.py`; what relates several fields, or a field and the machine, stands here. The
trap: a relation between values that are out of range makes no sense (a remainder of zero), so it is
looked at only where `_sound` finds its fields in order.
"""

import os
import sys
import warnings
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pith_engine.balance import BalanceConfig
from pith_engine.mesh import mesh_violations
from pith_engine.partition import partition_violations
from pith_engine.violations import raise_violations
from pith_models.build import ModelConfig, model_config_from_hf
from pith_models.hf import read_hf_config

from pith_apps.config import STANDARD_LIBRARY_VOCABULARY, RunConfig, config_record, model_record
from pith_apps.corpus import Corpus, tokenizer_hash
from pith_apps.data import num_samples, too_few_samples
from pith_apps.plan import Machine, chosen_attention

FIXED_FIELDS = ("model.", "train.seed:", "train.batch:", "train.sequence_length:", "optim.method:")
"""Beginnings of the changes that a resumed run refuses."""

CAPABILITIES = (
    (
        "balance.method bias",
        "a model_type other than deepseek_v3",
        "its Hugging Face format has no place for the bias; use global-batch or sequence",
    ),
)
"""Two words of `settings` in `step_violations` that exclude each other, and why."""


def check_run(config: RunConfig, machine: Machine) -> None:
    """Refuse a run that cannot work; a ValueError names every violation."""
    found = violations(config, machine)
    raise_violations(found, f"{len(found)} reason(s) why run {config.name!r} cannot start")


def violations(config: RunConfig, machine: Machine) -> list[str]:
    """Everything that is wrong with running `config` on `machine`, a line each."""
    own = own_violations(config)
    found = step_violations(config, machine) + _place_violations(config, own)
    found += _mesh_violations(config, machine, own)
    batch, size = config.train.batch, config.train.micro_batch
    if _sound(own, "train.batch", "train.micro_batch") and batch % size:
        found.append(
            f"train.batch is {batch}: allowed are multiples of train.micro_batch {size}; "
            f"set --train.batch {batch + size - batch % size}"
        )
    if config.layers_per_chunk is not None and _sound(own, "mesh.pp", "model.num_hidden_layers"):
        layers = config.model.num_hidden_layers
        found += partition_violations(config.layers_per_chunk, config.mesh.pp, layers)
    return found + _start_violations(config) + _data_violations(config, own)


def step_violations(config: RunConfig, machine: Machine) -> list[str]:
    """What keeps any step from running here, whatever the mesh and the data."""
    own = own_violations(config)
    found = own + _model_violations(config, own)
    settings = {
        "balance.method bias": config.balance.method == "bias",
        "a model_type other than deepseek_v3": (
            config.model.to_hf()["model_type"] != "deepseek_v3"
        ),
    }
    found += [
        f"{option} with {other}: {reason}"
        for option, other, reason in CAPABILITIES
        if settings[option] and settings[other]
    ]
    if not config.model.num_experts:
        found += _dense_violations(config)
    if _sound(own, "nproc", "mesh"):
        found += _device_violations(config, machine)
    if _sound(own, "model"):
        try:
            chosen_attention(config)
        except ValueError as error:
            found.append(f"train.attention is {config.train.attention!r}: {error}")
    return found


def check_values(config: RunConfig) -> None:
    """Refuse fields that are wrong alone, for commands that run no step."""
    found = own_violations(config)
    raise_violations(found, f"{len(found)} reason(s) why {config.name!r} describes no run")


def own_violations(config: RunConfig) -> list[str]:
    """What is wrong with each field alone; a line begins with the field's path."""
    return [
        *_range_violations(config),
        *config.model.violations(),
        *config.mesh.violations(),
        *config.optim.violations(),
        *config.lr.violations(),
        *config.balance.violations(),
    ]


def _sound(own: list[str], *paths: str) -> bool:
    """Whether no line of `own_violations` is about these fields or a field of theirs."""
    prefixes = tuple(f"{path}." for path in paths)
    return not any(f"{line.split()[0]}.".startswith(prefixes) for line in own)


def check_resume(config: RunConfig) -> None:
    """Refuse to resume with another model, optimizer, seed or data; all else may change."""
    newest = newest_checkpoint(config)
    if newest is None:
        return
    from pith_engine.checkpoint import read_manifest

    found, manifest = fixed_changes(config, newest, FIXED_FIELDS), read_manifest(newest)
    if manifest.step > config.train.steps:
        found.append(
            f"train.steps is {config.train.steps}: nothing is left to train, the run has "
            f"{manifest.step} steps; set more"
        )
    folders, saved = config.folders, manifest.run.get("corpus")
    if saved is not None and folders.training.exists():
        corpus = Corpus.open(folders.training, config.model.vocab_size)
        if corpus.meta.sha256 != saved:
            found.append(f"the corpus in {folders.training} is another one than was trained on")
    raise_violations(
        found,
        f"run {config.name!r} cannot resume {newest}; go back to the values of the checkpoint, or "
        "start another run with --name",
    )


def fixed_changes(config: RunConfig, checkpoint: Path, fixed: tuple[str, ...]) -> list[str]:
    """The `changed_fields` since a checkpoint that begin with one of `fixed`."""
    from pith_engine.checkpoint import read_manifest

    changes = changed_fields(read_manifest(checkpoint).run.get("config", {}), config_record(config))
    return [change for change in changes if change.startswith(fixed)]


def newest_checkpoint(config: RunConfig) -> Path | None:
    """The newest complete checkpoint of the run, if any; quiet about incomplete ones."""
    if not config.checkpoint_folder.is_dir():
        return None
    # Takes as long to import as torch itself, and the launcher of a new run does not need it.
    from pith_engine.checkpoint import find_checkpoint

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return find_checkpoint(config.checkpoint_folder)


def required_checkpoint(config: RunConfig) -> Path:
    """The newest complete checkpoint; a ValueError if there is none or it is of another model."""
    newest = newest_checkpoint(config)
    if newest is None:
        raise ValueError(
            f"{config.checkpoint_folder} holds no complete checkpoint: run `pith pretrain` first, "
            "or set --name and --runs-folder to those of a run that has one"
        )
    if changes := fixed_changes(config, newest, ("model.",)):
        raise ValueError(f"{newest} holds another model: {'; '.join(changes)}")
    return newest


def hf_model_changes(source: Path, model: ModelConfig) -> list[str]:
    """Where the model of a Hugging Face folder differs, a line each; a ValueError without one."""
    theirs, ours = model_record(model_config_from_hf(read_hf_config(source))), model_record(model)
    is_family = theirs["model_type"] == ours["model_type"]
    return [
        f"model.{name} is {ours[name]}, {source} has {theirs[name]}"
        for name in (theirs if is_family else ("model_type",))
        if ours[name] != theirs[name]
    ]


def _start_violations(config: RunConfig) -> list[str]:
    """A `start.from` that is neither a Hugging Face folder nor a checkpoint of this model."""
    source = config.start.source
    if source is None:
        return []
    from pith_engine.checkpoint import checkpoint_fault

    try:
        if (source / "config.json").is_file():
            found = hf_model_changes(source, config.model)
        elif (fault := checkpoint_fault(source)) is None:
            found = fixed_changes(config, source, ("model.",))
        else:
            found = [f"a folder with a config.json, or a complete checkpoint, is needed: {fault}"]
    except ValueError as error:
        found = [str(error)]
    return [f"start.from is {str(source)!r}: {line}" for line in found]


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


def _dense_violations(config: RunConfig) -> list[str]:
    """Settings of experts that were asked for; `balance.method none` is true of a dense model."""
    default = asdict(BalanceConfig())
    found = [
        f"balance.{name} is {value!r}"
        for name, value in asdict(config.balance).items()
        if value not in (default[name], "none")
    ]
    if config.sharding.replicate_experts:
        found.append("sharding.replicate_experts is True")
    return [f"{setting}: the model has no experts; leave it out" for setting in found]


def _device_violations(config: RunConfig, machine: Machine) -> list[str]:
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
    train = config.train
    at_least = [
        ("nproc", config.nproc, 1),
        ("train.steps", train.steps, 1),
        ("train.batch", train.batch, 1),
        ("train.micro_batch", train.micro_batch, 1),
        ("train.sequence_length", train.sequence_length, 1),
        ("train.seed", train.seed, 0),
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
    if train.seed >= 2**63:
        found.append(f"train.seed is {train.seed}: allowed are numbers below 2**63")
    if not 0 < config.timeout <= 1e9:
        found.append(
            f"timeout is {config.timeout}: allowed are seconds above 0 and up to 1e9; "
            "set --timeout 600"
        )
    name = config.name
    if name in ("", ".", "..") or Path(name).name != name or len(os.fsencode(name)) > 255:
        found.append(
            f"name is {name!r}: allowed is the name of one folder, up to 255 bytes; "
            "set --name my-run"
        )
    if not train.max_grad_norm > 0:
        found.append(
            f"train.max_grad_norm is {train.max_grad_norm}: allowed are numbers above 0; "
            "set --train.max-grad-norm 1"
        )
    return found


def _place_violations(config: RunConfig, own: list[str]) -> list[str]:
    """A run folder or a log that cannot be written."""
    found = []
    if config.log.tensorboard and find_spec("tensorboard") is None:
        found.append(
            "log.tensorboard is True, but TensorBoard is not installed: "
            "pip install 'pith-apps[tensorboard]'"
        )
    folder = config.run_folder if _sound(own, "name") else config.runs_folder
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        found.append(
            f"runs_folder is {str(config.runs_folder)!r}: {existing} is not a folder that this user"
            f" can write to; set --runs-folder to one that is"
        )
    checkpoints = config.checkpoint_folder
    if _sound(own, "name") and os.path.lexists(checkpoints) and not checkpoints.is_dir():
        found.append(f"{checkpoints} is not a folder: remove it or set another --name")
    return found


def _mesh_violations(config: RunConfig, machine: Machine, own: list[str]) -> list[str]:
    train = ("train.batch", "train.micro_batch", "train.sequence_length")
    if not _sound(own, "nproc", "mesh", "model.num_experts", "model.num_hidden_layers", *train):
        return []
    found = mesh_violations(
        config.mesh,
        world_size=machine.world_size,
        num_experts=config.model.num_experts,
        num_layers=config.model.num_hidden_layers,
        num_micro_batches=config.num_micro_batches,
        sequence_length=config.train.sequence_length,
    )
    sharding = config.sharding
    kinds = [("dense", sharding.replicate_dense), ("experts", sharding.replicate_experts)]
    return found + [
        f"sharding.replicate_{kind} is True, but mesh.dp 1 has no replicas: allowed from 2; "
        f"set --sharding.no-replicate-{kind}"
        for kind, is_asked in kinds
        if is_asked and config.mesh.dp == 1
    ]


def _model_violations(config: RunConfig, own: list[str]) -> list[str]:
    model, length, found = config.model, config.train.sequence_length, []
    if (config.train.device, config.train.dtype) == ("cuda", "bf16"):
        # Rows of a grouped matrix product must start at multiples of 16 bytes.
        found += [
            f"model.{name} is {size}: allowed are multiples of 8 in bf16 on a GPU; "
            f"set --model.{name.replace('_', '-')} {size + 8 - size % 8}"
            for name, size in asdict(model).items()
            if name in model.aligned_sizes and size % 8 and _sound(own, f"model.{name}")
        ]
    sound = _sound(own, "model.max_position_embeddings", "train.sequence_length")
    if sound and length > model.max_position_embeddings:
        found.append(
            f"train.sequence_length is {length}: the model has positions up to "
            f"model.max_position_embeddings {model.max_position_embeddings}"
        )
    return found


def _data_violations(config: RunConfig, own: list[str]) -> list[str]:
    data, found = config.data, []
    vocab_size = config.model.vocab_size if _sound(own, "model.vocab_size") else sys.maxsize
    if data.standard_library and (data.training or data.held_out or data.tokenizer):
        found.append(
            "data.standard_library is True beside data.training, data.held_out or data.tokenizer: "
            "leave those out or add --data.no-standard-library"
        )
    try:
        folders = config.folders
    except ValueError as error:
        return [*found, str(error)]
    corpora = [("data.training", folders.training), ("data.held_out", folders.held_out)]
    if data.standard_library:
        corpora = [(path, folder) for path, folder in corpora if folder.exists()]
        # Once they exist, they say it themselves.
        if not corpora and vocab_size < STANDARD_LIBRARY_VOCABULARY:
            found.append(
                f"model.vocab_size is {vocab_size}: the standard library's tokenizer has "
                f"{STANDARD_LIBRARY_VOCABULARY} ids; set --model.vocab-size "
                f"{STANDARD_LIBRARY_VOCABULARY} or more"
            )
    tokenizer = None
    try:
        tokenizer = tokenizer_hash(folders.tokenizer) if corpora else None
    except ValueError as error:
        found.append(f"data.tokenizer is {str(folders.tokenizer)!r}: {error}")
    for path, folder in corpora:
        found += _corpus_violations(config, path, folder, vocab_size, tokenizer)
    return found


def _corpus_violations(
    config: RunConfig, path: str, folder: Path, vocab_size: int, tokenizer: str | None
) -> list[str]:
    here, found = f"{path} is {str(folder)!r}", []
    try:
        meta = Corpus.open(folder, vocab_size).meta
    except (ValueError, OSError) as error:
        return [f"{here}: {error}"]
    if tokenizer and meta.tokenizer_sha256 != tokenizer:
        found.append(
            f"{here}, tokenised with {meta.tokenizer_name!r}: data.tokenizer "
            f"{str(config.folders.tokenizer)!r} is another tokenizer; give the one it was made with"
        )
    if meta.vocab_size > vocab_size:
        found.append(
            f"model.vocab_size is {vocab_size}: the tokenizer of {path} has "
            f"{meta.vocab_size} ids; set --model.vocab-size {meta.vocab_size} or more"
        )
    batch, length = config.train.batch, config.train.sequence_length
    if path == "data.held_out":
        if meta.num_tokens < 2:
            found.append(f"{here}: one token has no target; give more text")
    elif length > 0 and num_samples(meta.num_tokens, length) < batch:
        found.append(f"{here}: {too_few_samples(meta.num_tokens, length, batch)}")
    return found

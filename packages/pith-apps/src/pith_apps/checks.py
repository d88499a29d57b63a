"""Every reason why a run cannot start, found before anything is touched.

A field is checked by its dataclass, those of `config.py` by `_range_violations`; relations stand
here. The trap: a relation of values out of range makes no sense (a remainder of zero), so `_sound`
comes before it.
"""

import os
import sys
import warnings
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from pith_engine.balance import BalanceConfig
from pith_engine.mesh import mesh_violations
from pith_engine.partition import partition_violations
from pith_engine.violations import raise_violations
from pith_models.build import ModelConfig, model_config_from_hf, open_hf, skipped_layer
from pith_models.hf import read_hf_config

from pith_apps.config import RunConfig, config_record, model_record
from pith_apps.corpus import STANDARD_LIBRARY_VOCABULARY, Corpus, tokenizer_hash
from pith_apps.data import too_few_samples
from pith_apps.plan import Machine, chosen_attention

FIXED_FIELDS = ("model.", "train.seed:", "train.batch:", "train.sequence_length:", "optim.method:")
"""How changes begin that a resumed run refuses."""

CAPABILITIES = (
    (
        "balance.method bias",
        "a model_type other than deepseek_v3",
        "its Hugging Face format has no place for the bias; use global-batch or sequence",
    ),
)
"""Two keys of `settings` in `step_violations` that exclude each other; why."""


def check_run(config: RunConfig, machine: Machine) -> None:
    """Refuse a run that cannot work: a ValueError with every violation."""
    found = violations(config, machine)
    raise_violations(found, f"{len(found)} reason(s) why run {config.name!r} cannot start")


def violations(config: RunConfig, machine: Machine) -> list[str]:
    """What is wrong with running `config` on `machine`, a line each."""
    found = step_violations(config, machine) + _place_violations(config)
    found += _mesh_violations(config, machine) + _start_violations(config)
    return found + _data_violations(config)


def step_violations(config: RunConfig, machine: Machine) -> list[str]:
    """What keeps any step from running here, whatever mesh and data."""
    found = own_violations(config) + _model_violations(config)
    settings = {
        "balance.method bias": config.balance.method == "bias",
        "a model_type other than deepseek_v3": skipped_layer(config.model) is None,
    }
    if not config.model.num_experts:
        found += _dense_violations(config)
    else:
        found += [
            f"{option} with {other}: {reason}"
            for option, other, reason in CAPABILITIES
            if settings[option] and settings[other]
        ]
    here, gpus = machine.processes_here, machine.num_gpus
    if _sound(config, "nproc", "mesh") and config.train.device == "cuda" and here > gpus:
        smaller = f"use a mesh of {gpus} ranks or " if gpus else ""
        found.append(
            f"train.device is 'cuda' with {here} processes here: this machine shows {gpus} GPU(s); "
            f"{smaller}set --train.device cpu --train.dtype fp32"
        )
    if _sound(config, "model"):
        try:
            chosen_attention(config)
        except ValueError as error:
            found.append(f"train.attention is {config.train.attention!r}: {error}")
    return found


def own_violations(config: RunConfig) -> list[str]:
    """What is wrong with single fields; lines begin with the path."""
    parts = config.model, config.mesh, config.optim, config.lr, config.balance
    return _range_violations(config) + [line for part in parts for line in part.violations()]


def _sound(config: RunConfig, *paths: str) -> bool:
    """Whether no line of `own_violations` is about these fields or theirs."""
    prefixes = tuple(f"{path}." for path in paths)
    return not any(f"{line.split()[0]}.".startswith(prefixes) for line in own_violations(config))


def check_resume(config: RunConfig) -> None:
    """Refuse to resume with another model, optimizer, seed or data; the rest may change."""
    if (newest := _newest_checkpoint(config)) is None:
        return
    path, step, run = newest
    found = fixed_changes(config, run, FIXED_FIELDS)
    if step > config.train.steps:
        found.append(
            f"train.steps is {config.train.steps}: nothing is left to train, the run has {step} "
            "steps; set more"
        )
    if (folder := config.folders.training).exists():
        meta = Corpus.open(folder, config.model.vocab_size).meta
        for what, now in ("corpus", meta.sha256), ("tokenizer", meta.tokenizer_sha256):
            if run.get(what, now) != now:
                found.append(f"the {what} of {folder} is not the checkpoint's")
    raise_violations(
        found, f"run {config.name!r} cannot resume {path}; go back to its values or set --name"
    )


def fixed_changes(config: RunConfig, run: dict[str, Any], fixed: tuple[str, ...]) -> list[str]:
    """`changed_fields` since a manifest's `run` that begin with one of `fixed`."""
    changes = changed_fields(run.get("config", {}), config_record(config))
    return [change for change in changes if change.startswith(fixed)]


def _newest_checkpoint(config: RunConfig) -> tuple[Path, int, dict[str, Any]] | None:
    """The run's newest complete checkpoint, its step and run facts, quiet about others."""
    if not config.checkpoint_folder.is_dir():
        return None
    # Imports as slowly as torch; a new run's launcher does not need it.
    from pith_engine.checkpoint import find_checkpoint, read_manifest

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = find_checkpoint(config.checkpoint_folder)
    if path is None:
        return None
    manifest = read_manifest(path)
    return path, manifest.step, manifest.run


def required_checkpoint(config: RunConfig) -> Path:
    """The newest complete checkpoint; ValueError if there is none or of another model."""
    if (newest := _newest_checkpoint(config)) is None:
        raise ValueError(
            f"{config.checkpoint_folder} holds no complete checkpoint: run `pith pretrain` first, "
            "or set --name and --runs-folder"
        )
    path, _, run = newest
    if changes := fixed_changes(config, run, ("model.",)):
        raise ValueError(f"{path} holds another model: {'; '.join(changes)}")
    return path


def hf_model_changes(source: Path, model: ModelConfig) -> list[str]:
    """`changed_fields` from a Hugging Face folder's model to `model`."""
    theirs = model_record(model_config_from_hf(read_hf_config(source)))
    changes = changed_fields({"model": theirs}, {"model": model_record(model)})
    return [f"{change} (folder -> recipe)" for change in changes]


def _start_violations(config: RunConfig) -> list[str]:
    source = config.start.source
    if source is None or _newest_checkpoint(config) is not None:
        return []
    from pith_engine.checkpoint import checkpoint_fault, read_manifest

    found, saved = [], None
    try:
        if (source / "config.json").is_file():
            found = hf_model_changes(source, config.model)
            if not found:  # else its keys would differ too
                open_hf(source, config.model, torch.float32)
            saved = tokenizer_hash(source) if (source / "tokenizer.json").is_file() else None
        elif fault := checkpoint_fault(source):
            found = [f"neither config.json nor a complete checkpoint (step-*): {fault}"]
        else:
            run = read_manifest(source).run
            found, saved = fixed_changes(config, run, ("model.",)), run.get("tokenizer")
        data = config.data
        folder = config.tokenizer_folder if data.standard_library else data.tokenizer
        if saved and folder and folder.is_dir() and tokenizer_hash(folder) != saved:
            found.append(f"its tokenizer is not that of data.tokenizer {str(folder)!r}")
    except (ValueError, OSError) as error:
        found.append(str(error))
    return [f"start.from is {str(source)!r}: {line}" for line in found]


def changed_fields(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """`path: old -> new` for all that differs in two `config_record` trees."""
    found, names = [], old.keys() & new.keys()
    if old.get("model_type") != new.get("model_type"):
        names = {"model_type"}  # other fields of another family say nothing
    for name in sorted(names):
        path, before, after = f"{prefix}{name}", old[name], new[name]
        if isinstance(before, dict) and isinstance(after, dict):
            found += changed_fields(before, after, f"{path}.")
        elif before != after:
            found.append(f"{path}: {before} -> {after}")
    return found


def _dense_violations(config: RunConfig) -> list[str]:
    """Settings of experts; `balance.method none` is true of a dense model."""
    default = asdict(BalanceConfig())
    found = [
        f"balance.{name} is {value!r}"
        for name, value in asdict(config.balance).items()
        if value not in (default[name], "none")
    ]
    if config.sharding.replicate_experts:
        found.append("sharding.replicate_experts is True")
    return [f"{setting}: the model has no experts; leave it out" for setting in found]


def _range_violations(config: RunConfig) -> list[str]:
    train, name, norm = config.train, config.name, config.train.max_grad_norm
    least = {
        "nproc": (config.nproc, 1),
        "train.steps": (train.steps, 1),
        "train.batch": (train.batch, 1),
        "train.micro_batch": (train.micro_batch, 1),
        "train.sequence_length": (train.sequence_length, 1),
        "train.seed": (train.seed, 0),
        "evaluation.interval": (config.evaluation.interval, 0),
        "evaluation.sequences": (config.evaluation.sequences, 1),
        "checkpoint.interval": (config.checkpoint.interval, 0),
        "checkpoint.keep": (config.checkpoint.keep, 1),
    }
    found = []
    for path, (value, low) in least.items():
        high = 10**8 if path == "train.steps" else 2**63  # step-99999999
        if value is not None and not low <= value < high:
            found.append(_refusal(path, value, f"whole numbers from {low}, below {high}", low))
    if not 0 < config.timeout <= 1e9:
        found.append(_refusal("timeout", config.timeout, "seconds above 0 and up to 1e9", 600))
    if (
        Path(name).name != name
        or name in ("", "..", "standard-library")
        or len(os.fsencode(name)) > 255
    ):
        found.append(_refusal("name", name, "names of one folder, up to 255 bytes", "my-run"))
    if not norm > 0:
        found.append(_refusal("train.max_grad_norm", norm, "numbers above 0", 1))
    return found


def _refusal(path: str, value: object, allowed: str, fix: object) -> str:
    option = path.replace("_", "-")
    return f"{path} is {value!r}: allowed are {allowed}; set --{option} {fix}"


def _place_violations(config: RunConfig) -> list[str]:
    found = []
    if config.log.tensorboard and find_spec("tensorboard") is None:
        found.append("log.tensorboard is True: run pip install 'pith-apps[tensorboard]'")
    folder = (config.run_folder if _sound(config, "name") else config.runs_folder).absolute()
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        found.append(
            f"runs_folder is {str(config.runs_folder)!r}: {existing} is no folder to write to; "
            "set --runs-folder to one"
        )
    checkpoints = config.checkpoint_folder
    if _sound(config, "name") and os.path.lexists(checkpoints) and not checkpoints.is_dir():
        found.append(f"{checkpoints} is not a folder: remove it or set another --name")
    return found


def fit_violations(config: RunConfig, world_size: int) -> list[str]:
    """Why so many processes cannot train the model on the mesh, whose fields are sound."""
    return mesh_violations(
        config.mesh,
        world_size=world_size,
        num_experts=config.model.num_experts,
        num_layers=config.model.num_hidden_layers,
        num_micro_batches=config.num_micro_batches,
        sequence_length=config.train.sequence_length,
    )


def _mesh_violations(config: RunConfig, machine: Machine) -> list[str]:
    found, batch, size = [], config.train.batch, config.train.micro_batch
    if _sound(config, "train.batch", "train.micro_batch") and batch % size:
        allowed = f"multiples of train.micro_batch {size}"
        found.append(_refusal("train.batch", batch, allowed, batch + size - batch % size))
    if config.layers_per_chunk is not None and _sound(config, "mesh.pp", "model.num_hidden_layers"):
        layers = config.model.num_hidden_layers
        found += partition_violations(config.layers_per_chunk, config.mesh.pp, layers)
    sizes = ("model.num_experts", "model.n_routed_experts", "model.num_hidden_layers")
    sizes += ("train.batch", "train.micro_batch", "train.sequence_length")
    if not _sound(config, "nproc", "mesh", *sizes):
        return found
    found += fit_violations(config, machine.world_size)
    return found + [
        f"sharding.{name} is True, but mesh.dp 1 has no replicas: allowed from 2; "
        f"set --sharding.no-{name.replace('_', '-')}"
        for name, is_asked in asdict(config.sharding).items()
        if is_asked and config.mesh.dp == 1
    ]


def _model_violations(config: RunConfig) -> list[str]:
    model, length, found = config.model, config.train.sequence_length, []
    if (config.train.device, config.train.dtype) == ("cuda", "bf16"):
        # Rows of a grouped matrix product must start at multiples of 16 bytes.
        found += [
            _refusal(f"model.{name}", size, "multiples of 8 in bf16 on a GPU", size + 8 - size % 8)
            for name, size in asdict(model).items()
            if name in model.aligned_sizes and size % 8 and _sound(config, f"model.{name}")
        ]
    sound = _sound(config, "model.max_position_embeddings", "train.sequence_length")
    if sound and length > (longest := model.max_position_embeddings):
        allowed = f"lengths up to model.max_position_embeddings {longest}"
        found.append(_refusal("train.sequence_length", length, allowed, longest))
    return found


def _data_violations(config: RunConfig) -> list[str]:
    data, found, sizes = config.data, [], dict[str, int]()
    vocab_size = config.model.vocab_size if _sound(config, "model.vocab_size") else sys.maxsize
    if data.standard_library and (data.training or data.held_out or data.tokenizer):
        found.append(
            "data.standard_library is True beside data.training, data.held_out or data.tokenizer: "
            "leave those out or add --data.no-standard-library"
        )
    try:
        folders = config.folders
    except ValueError as error:
        return [*found, str(error)]
    corpora = {"data.training": folders.training, "data.held_out": folders.held_out}
    if data.standard_library:
        corpora = {path: folder for path, folder in corpora.items() if folder.exists()}
        if not corpora:
            sizes["the standard library"] = STANDARD_LIBRARY_VOCABULARY
    tokenizer = None
    try:
        tokenizer = tokenizer_hash(folders.tokenizer) if corpora else None
    except ValueError as error:
        found.append(f"data.tokenizer is {str(folders.tokenizer)!r}: {error}")
    batch, length = config.train.batch, config.train.sequence_length
    for path, folder in corpora.items():
        here = f"{path} is {str(folder)!r}"
        try:
            meta = Corpus.open(folder, vocab_size).meta
        except (ValueError, OSError) as error:
            found.append(f"{here}: {error}")
            continue
        if tokenizer and meta.tokenizer_sha256 != tokenizer:
            found.append(
                f"{here}, tokenised with {meta.tokenizer_name!r}: data.tokenizer "
                f"{str(folders.tokenizer)!r} is another tokenizer; give its own"
            )
        sizes[path] = meta.vocab_size
        if path == "data.held_out":
            fault = "one token has no target; give more text" if meta.num_tokens < 2 else ""
        else:
            fault = length > 0 and too_few_samples(meta.num_tokens, length, batch)
        if fault:
            found.append(f"{here}: {fault}")
    return found + [
        _refusal("model.vocab_size", vocab_size, f"{size} or more, the ids of {path}", size)
        for path, size in sizes.items()
        if size > vocab_size
    ]

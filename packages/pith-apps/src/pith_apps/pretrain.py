"""Pretraining from the run's newest complete checkpoint, or from given or initial weights.

A step (`_train_step`):

    1. this rank's micro-batches, which depend on the step alone
    2. gradients: gather, DualPipeV over the micro-batches, reduce, global norm   (trainer.py)
    3. a norm that is not finite ends the run before anything is updated
    4. clip, learning rate of the step, AdamW or Muon on this rank's shards, `bias` balancing

Data position and learning rate follow from the step, so a resumed run takes the steps of an
uninterrupted one.

The trap: a complete checkpoint of step N implies that steps 1 to N are on record, so saving comes
last in a step, after evaluation.
"""

import time
from pathlib import Path

import torch
from pith_engine.balance import update_balance_biases
from pith_engine.checkpoint import (
    Manifest,
    find_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    read_manifest,
    save_checkpoint,
)
from pith_engine.fsdp import canonical_blocks
from pith_engine.gradients import (
    NanFinder,
    clip_gradients,
    raise_if_not_finite,
    raise_if_weights_not_finite,
)
from pith_engine.lr import learning_rate
from pith_engine.optim import AdamW, Muon, describe_groups
from pith_engine.pipeline import StepLosses
from pith_engine.runtime import all_reduce, gather_objects
from pith_models.build import open_hf

from pith_apps.checks import changed_fields
from pith_apps.config import RunConfig, config_record
from pith_apps.convert import export_newest
from pith_apps.corpus import Corpus, unigram_entropy
from pith_apps.data import TrainingData
from pith_apps.evaluate import held_out_loss
from pith_apps.plan import Machine, describe_run
from pith_apps.report import plot_losses
from pith_apps.run_log import RunLog, peak_memory_bytes, read_metrics, write_run_facts
from pith_apps.trainer import Trainer, joined_trainer, step_gradients


def pretrain(config: RunConfig, machine: Machine) -> int:
    """Train to the last step, on every rank, after `check_run`; returns the exit code."""
    with joined_trainer(config) as trainer:
        mesh = trainer.mesh
        corpus = Corpus.open(config.folders.training, config.model.vocab_size)
        plan = describe_run(config, machine, corpus.meta.num_tokens)
        if mesh.rank == 0:
            write_run_facts(config, machine.world_size, plan)
        kind = Muon if config.optim.method == "muon" else AdamW
        optimizer = kind(trainer.parameters, config.optim)
        resumed = _resume(trainer, optimizer)
        start = _resumed_lines(config, resumed) if resumed else _start(trainer)
        with RunLog(config, mesh, trainer.device, resumed) as log:
            log.say(f"{plan}\n{describe_groups(optimizer.groups, mesh)}\n{start}")
            _train(trainer, optimizer, corpus, log)
    if mesh.rank == 0:
        _finish(config)
    return 0


def _resume(trainer: Trainer, optimizer: AdamW | Muon) -> Manifest | None:
    """Load the newest complete checkpoint that rank 0 sees, if any."""
    mesh = trainer.mesh
    found = find_checkpoint(trainer.config.checkpoint_folder) if mesh.rank == 0 else None
    newest: Path | None = gather_objects(found, mesh.world)[0]
    if newest is None:
        return None
    state = optimizer if read_manifest(newest).has_optimizer else None
    manifest = load_checkpoint(newest, trainer.parameters, state, mesh)
    # Fewer than steps where some had no target.
    optimizer.num_steps = manifest.run.get("num_updates", optimizer.num_steps)
    trainer.pipeline.restore_counts(manifest.run.get("expert_counts", {}))
    return manifest


def _start(trainer: Trainer) -> str:
    """Load the weights of `start.from`, if given; say what step 1 starts from."""
    config, parameters = trainer.config, trainer.parameters
    source = config.start.source
    if source is None:
        folder = config.checkpoint_folder
        return f"no complete checkpoint in {folder}: step 1 starts from initial weights"
    if not (source / "config.json").is_file():
        manifest = load_checkpoint(source, parameters, None, trainer.mesh)
        return f"step 1 starts from the weights of {source}, saved after step {manifest.step}"
    tensors = open_hf(source, config.model, parameters[0].shard.dtype)
    for parameter in parameters:
        for block in canonical_blocks(parameter, parameter.shard):
            block.tensor.copy_(tensors.block(block.name, block.offsets, block.tensor.shape))
    raise_if_weights_not_finite(parameters, 0, trainer.mesh)
    return f"step 1 starts from the weights of {source}; {tensors.account}"


def _resumed_lines(config: RunConfig, resumed: Manifest) -> str:
    folder, steps, lines = config.checkpoint_folder, config.train.steps, []
    if config.start.source is not None:
        lines.append(f"start.from {config.start.source} is not read: the checkpoint goes first")
    if not resumed.has_optimizer:
        start = f"step {resumed.step + 1} starts from the weights in {folder}"
        return "\n".join([*lines, f"{start}, without moments"])
    changed = changed_fields(resumed.run.get("config", {}), config_record(config))
    lines.append(f"resumed at step {resumed.step} of {steps} from {folder}")
    lines += [f"changed since that checkpoint: {change}" for change in changed]
    if config.balance.method == "global-batch" and not resumed.run.get("expert_counts"):
        lines.append("it holds no expert frequencies: the next step is balanced as the first")
    if resumed.step == steps:
        lines.append("nothing is left to train; --train.steps prolongs the run")
    return "\n".join(lines)


def _train(trainer: Trainer, optimizer: AdamW | Muon, corpus: Corpus, log: RunLog) -> None:
    config, steps = trainer.config, trainer.config.train.steps
    data = TrainingData(
        corpus.tokens,
        trainer.mesh,
        config.train,
        vocab_size=config.model.vocab_size,
        device=trainer.device,
    )
    top_k, num_experts = config.model.num_experts_per_tok, config.model.num_experts
    if log.step == 0:
        _evaluate(trainer, log)
    for step in range(log.step + 1, steps + 1):
        losses = _train_step(trainer, optimizer, data, step, log)
        if _is_due(step, config.evaluation.interval, steps):
            if warning := load_warning(losses.max_load, top_k, num_experts):
                log.say(warning)
            _evaluate(trainer, log)
        if _is_due(step, config.checkpoint.interval, steps):
            _save(trainer, optimizer, corpus, log)


def _train_step(
    trainer: Trainer, optimizer: AdamW | Muon, data: TrainingData, step: int, log: RunLog
) -> StepLosses:
    """One optimizer update, or none when the global batch has no target."""
    config, parameters, mesh = trainer.config, trainer.parameters, trainer.mesh
    batches = data.micro_batches(step)
    losses, norm = step_gradients(trainer, batches)
    rate = learning_rate(config.lr, step, config.train.steps)
    try:
        raise_if_not_finite(parameters, norm, step, mesh)
    except FloatingPointError:
        with NanFinder():  # again, to end in the line at fault
            step_gradients(trainer, batches)
        raise
    if losses.num_targets:
        clip_gradients(parameters, norm, config.train.max_grad_norm)
        optimizer.step(rate)
        if config.balance.method == "bias":
            counts = trainer.pipeline.expert_counts
            update_balance_biases(parameters, counts, config.balance.bias_rate)
    device = trainer.device
    peak = torch.tensor(peak_memory_bytes(device), dtype=torch.int64, device=device)
    log.log_step(
        losses,
        learning_rate=rate,
        grad_norm=norm.item(),
        # Read last: its arrival from a GPU means that the optimizer's kernels are done.
        peak_memory=int(all_reduce(peak, mesh.world, op="max").item()),
    )
    return losses


def load_warning(max_load: float, top_k: int, num_experts: int) -> str:
    """A line where one expert gets most tokens of a layer, well above its even share."""
    share = max_load * top_k / max(num_experts, 1)
    if share <= 0.5 or max_load < 1.5:
        return ""
    return f"warning: one expert gets {share:.0%} of its layer's tokens; see --balance.method"


def _is_due(step: int, interval: int, last: int) -> bool:
    return step == last or (interval > 0 and step % interval == 0)


def _evaluate(trainer: Trainer, log: RunLog) -> None:
    with log.elsewhere():
        loss, num_targets = held_out_loss(trainer)
    log.log_held_out(loss, num_targets)


def _save(trainer: Trainer, optimizer: AdamW | Muon, corpus: Corpus, log: RunLog) -> None:
    start, config = time.perf_counter(), trainer.config
    raise_if_weights_not_finite(trainer.parameters, log.step, trainer.mesh)
    facts = {
        "config": config_record(config),
        "corpus": corpus.meta.sha256,
        "tokenizer": corpus.meta.tokenizer_sha256,
        "tokens_seen": log.tokens_seen,
        "num_updates": optimizer.num_steps,
        "expert_counts": trainer.pipeline.saved_counts(),
    }
    with log.elsewhere():
        folder = config.checkpoint_folder
        path = save_checkpoint(folder, log.step, trainer.parameters, optimizer, facts, trainer.mesh)
        if trainer.mesh.rank == 0:
            prune_checkpoints(folder, config.checkpoint.keep)
    if trainer.mesh.rank == 0:
        size = sum(record["size"] for record in read_manifest(path).files.values())
        seconds = time.perf_counter() - start
        log.say(f"saved {path}: {size / 1e6:,.1f} MB in {seconds:.2f} s")


def _finish(config: RunConfig) -> None:
    folder = config.run_folder
    held_out = Corpus.open(config.folders.held_out, config.model.vocab_size)
    plot_losses(folder, unigram_entropy=unigram_entropy(held_out.tokens))
    export_newest(config)
    losses = [(r["step"], r["held_out_loss"]) for r in read_metrics(folder) if "held_out_loss" in r]
    if losses:  # the records of a finished run may have been cut
        (start, first), (end, last) = losses[0], losses[-1]
        print(
            f"held-out loss {first:.4f} after step {start}, {last:.4f} after step {end}: "
            f"{last / first:.1%} of its first value"
        )
    folders = {"checkpoints": "checkpoints", "Hugging Face": "export"}
    for label, name in {"metrics": "metrics.jsonl", "losses": "loss.png", **folders}.items():
        print(f"{label:<12} {folder / name}", flush=True)

"""Pretraining from initial or given weights, or the newest complete checkpoint of the run folder.

A step (`_train_step`):

    1. this rank's micro-batches, which depend on the step alone
    2. gradients: gather, DualPipeV over the micro-batches, reduce, global norm   (trainer.py)
    3. a norm that is not finite ends the run before anything is updated
    4. clip, learning rate of the step, AdamW or Muon on this rank's shards, `bias` balancing

The same command again resumes: data position and learning rate follow from the checkpoint's step,
so the steps after it are those of an uninterrupted run.

The trap: evaluation and saving come after the update of their step, in this order, so a complete
checkpoint of step N implies that everything about steps 1 to N is on record.
"""

import os
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
from pith_engine.muon import Muon
from pith_engine.optim import AdamW, describe_groups
from pith_engine.runtime import all_reduce, broadcast_object, read_launch
from pith_models.build import canonical_tensors, skipped_layer
from pith_models.hf import HuggingFaceTensors

from pith_apps.checks import changed_fields, required_checkpoint
from pith_apps.config import RunConfig, config_record, torch_dtype
from pith_apps.convert import export_checkpoint
from pith_apps.corpus import Corpus, unigram_entropy
from pith_apps.data import TrainingData
from pith_apps.evaluate import held_out_loss
from pith_apps.plan import Machine, describe_run, training_flops
from pith_apps.report import plot_losses
from pith_apps.run_log import RunLog, peak_memory_bytes, read_metrics, write_run_facts
from pith_apps.trainer import Trainer, build_trainer, joined_mesh, step_gradients


def pretrain(config: RunConfig, machine: Machine) -> int:
    """Train to the last step; every rank calls it, after `check_run`. Returns the exit code."""
    with joined_mesh(config) as (mesh, device):
        corpus = Corpus.open(config.folders.training, config.model.vocab_size)
        plan = describe_run(config, machine, corpus.meta.num_tokens)
        if mesh.rank == 0:
            write_run_facts(config.run_folder, config_record(config), mesh.world.size)
            (config.run_folder / "plan.txt").write_text(plan + "\n")
        trainer = build_trainer(config, mesh, device)
        match config.optim.method:
            case "adamw":
                optimizer = AdamW(trainer.parameters, config.optim)
            case "muon":
                optimizer = Muon(trainer.parameters, config.optim)
        assignment = describe_groups(optimizer.groups(), mesh)
        resumed = _resume(config, trainer, optimizer)
        start = _resumed_lines(config, resumed) if resumed else _start(config, trainer)
        with RunLog(
            config.run_folder,
            rank=mesh.rank,
            world_size=mesh.world.size,
            device=device,
            total_steps=config.train.steps,
            flops_per_token=training_flops(config),
            resumed_step=resumed.step if resumed else 0,
            tokens_seen=resumed.run.get("tokens_seen", 0) if resumed else 0,
            tensorboard=config.log.tensorboard,
        ) as log:
            log.say(f"{plan}\n{assignment}\n{start}")
            _train(config, trainer, optimizer, corpus, log)
    if read_launch(os.environ).rank == 0:
        _finish(config)
    return 0


def _resume(config: RunConfig, trainer: Trainer, optimizer: AdamW | Muon) -> Manifest | None:
    """Load the newest complete checkpoint that rank 0 sees, if any."""
    mesh = trainer.mesh
    found = find_checkpoint(config.checkpoint_folder) if mesh.rank == 0 else None
    newest: Path | None = broadcast_object(found, mesh.world)
    if newest is None:
        return None
    manifest = read_manifest(newest)
    state = optimizer if manifest.has_optimizer else None
    load_checkpoint(newest, trainer.parameters, state, mesh)
    # Fewer than steps where some had no target.
    optimizer.num_steps = manifest.run.get("num_updates", optimizer.num_steps)
    trainer.pipeline.restore_counts(manifest.run.get("expert_counts", {}))
    return manifest


def _start(config: RunConfig, trainer: Trainer) -> str:
    """Load the weights of `start.from`, if given; return what step 1 starts from."""
    source = config.start.source
    if source is None:
        folder = config.checkpoint_folder
        return f"no complete checkpoint in {folder}: step 1 starts from initial weights"
    if not (source / "config.json").is_file():
        manifest = load_checkpoint(source, trainer.parameters, None, trainer.mesh)
        return f"step 1 starts from the weights of {source}, saved after step {manifest.step}"
    layout, dtype = canonical_tensors(config.model), trainer.parameters[0].shard.dtype
    tensors = HuggingFaceTensors(source, layout, dtype, skipped_layer(config.model))
    for parameter in trainer.parameters:
        for block in canonical_blocks(parameter, parameter.shard):
            block.tensor.copy_(tensors.block(block.name, block.offsets, block.tensor.shape))
    raise_if_weights_not_finite(trainer.parameters, 0, trainer.mesh)
    return f"step 1 starts from the weights of {source}; {tensors.account}"


def _resumed_lines(config: RunConfig, resumed: Manifest) -> str:
    folder, steps, lines = config.checkpoint_folder, config.train.steps, []
    if config.start.source is not None:
        lines.append(f"start.from {config.start.source} is not read: the checkpoint goes first")
    if not resumed.has_optimizer:
        line = f"step {resumed.step + 1} starts from the weights in {folder}, without moments"
        return "\n".join([*lines, line])
    changed = changed_fields(resumed.run.get("config", {}), config_record(config))
    lines.append(f"resumed at step {resumed.step} of {steps} from {folder}")
    lines += [f"changed since that checkpoint: {change}" for change in changed]
    if config.balance.method == "global-batch" and not resumed.run.get("expert_counts"):
        lines.append("it holds no expert frequencies: the next step is balanced as the first")
    if resumed.step == steps:
        lines.append("nothing is left to train; --train.steps prolongs the run")
    return "\n".join(lines)


def _train(
    config: RunConfig, trainer: Trainer, optimizer: AdamW | Muon, corpus: Corpus, log: RunLog
) -> None:
    data = TrainingData(
        corpus.tokens,
        trainer.mesh,
        config.train,
        vocab_size=config.model.vocab_size,
        device=trainer.device,
    )
    if log.step == 0:
        _evaluate(config, trainer, log)
    for step in range(log.step + 1, config.train.steps + 1):
        _train_step(config, trainer, optimizer, data, step, log)
        if _is_due(step, config.evaluation.interval, config.train.steps):
            _evaluate(config, trainer, log)
        if _is_due(step, config.checkpoint.interval, config.train.steps):
            _save(config, trainer, optimizer, corpus, log)


def _train_step(
    config: RunConfig,
    trainer: Trainer,
    optimizer: AdamW | Muon,
    data: TrainingData,
    step: int,
    log: RunLog,
) -> None:
    """One optimizer update, or none when the global batch has no target."""
    parameters, mesh, device = trainer.parameters, trainer.mesh, trainer.device
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
    peak = torch.tensor(peak_memory_bytes(device), dtype=torch.int64, device=device)
    log.log_step(
        losses,
        learning_rate=rate,
        grad_norm=norm.item(),
        num_tokens=config.train.batch * config.train.sequence_length,
        # Read last: its arrival from a GPU means that the optimizer's kernels are done.
        peak_memory=int(all_reduce(peak, mesh.world, op="max").item()),
    )
    model = config.model
    warning = load_warning(losses.max_load, model.num_experts_per_tok, model.num_experts)
    if warning and _is_due(step, config.evaluation.interval, config.train.steps):
        log.say(warning)


def load_warning(max_load: float, top_k: int, num_experts: int) -> str:
    """What to say of a layer in which one expert gets most tokens, well above its even share."""
    share = max_load * top_k / max(num_experts, 1)
    if share <= 0.5 or max_load < 1.5:
        return ""
    return f"warning: one expert gets {share:.0%} of its layer's tokens; see --balance.method"


def _is_due(step: int, interval: int, last: int) -> bool:
    """Whether what has this interval follows `step`, as after the last."""
    return step == last or (interval > 0 and step % interval == 0)


def _evaluate(config: RunConfig, trainer: Trainer, log: RunLog) -> None:
    with log.elsewhere():
        loss, num_targets = held_out_loss(trainer, config)
    log.log_held_out(loss, num_targets)


def _save(
    config: RunConfig, trainer: Trainer, optimizer: AdamW | Muon, corpus: Corpus, log: RunLog
) -> None:
    """Write the checkpoint of the latest step, delete those beyond `keep`."""
    start = time.perf_counter()
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
        path = save_checkpoint(
            config.checkpoint_folder, log.step, trainer.parameters, optimizer, facts, trainer.mesh
        )
        if trainer.mesh.rank == 0:
            prune_checkpoints(config.checkpoint_folder, config.checkpoint.keep)
    if trainer.mesh.rank == 0:
        size = sum(record.size for record in read_manifest(path).files.values())
        seconds = time.perf_counter() - start
        log.say(f"saved {path}: {size / 1e6:,.1f} MB in {seconds:.2f} s")


def _finish(config: RunConfig) -> None:
    """After the last step, on rank 0: draw the losses, export, say where everything is."""
    folder = config.run_folder
    held_out = Corpus.open(config.folders.held_out, config.model.vocab_size)
    plot_losses(folder, unigram_entropy=unigram_entropy(held_out.tokens))
    export_checkpoint(
        required_checkpoint(config),
        config.export_folder,
        config.model,
        dtype=torch_dtype(config.train.dtype),
        companions=config.tokenizer_folder,
        replace=True,
    )
    records = read_metrics(folder)
    losses = [(r["step"], r["held_out_loss"]) for r in records if "held_out_loss" in r]
    if losses:  # the records of a finished run may have been cut
        (start, first), (end, last) = losses[0], losses[-1]
        print(
            f"held-out loss {first:.4f} after step {start}, {last:.4f} after step {end}: "
            f"{last / first:.1%} of its first value"
        )
    print(
        f"metrics     {folder / 'metrics.jsonl'}\n"
        f"losses      {folder / 'loss.png'}\n"
        f"checkpoints {config.checkpoint_folder}\n"
        f"export      {config.export_folder} (Hugging Face)",
        flush=True,
    )

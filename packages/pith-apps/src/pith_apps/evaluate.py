"""Held-out loss, over sequences that are the same at every step on every mesh.

loss = (sum of token losses) / (number of targets)       in nats; exp(loss) is the perplexity
"""

from pith_engine.checkpoint import load_checkpoint
from pith_engine.gradients import count_targets

from pith_apps.checks import fixed_changes, required_checkpoint
from pith_apps.config import RunConfig
from pith_apps.corpus import Corpus
from pith_apps.data import held_out_batches
from pith_apps.trainer import Trainer, build_trainer, joined_mesh


def evaluate(config: RunConfig) -> int:
    """Print the held-out loss of the `required_checkpoint`; every rank of the run calls it."""
    newest = required_checkpoint(config)
    with joined_mesh(config) as (mesh, device):
        trainer = build_trainer(config, mesh, device)
        manifest = load_checkpoint(newest, trainer.parameters, None, mesh)
        loss, num_targets = held_out_loss(trainer, config)
        if mesh.rank == 0:
            print(
                f"held-out loss {loss:.6f} after step {manifest.step} ({num_targets:,} tokens of "
                f"{config.folders.held_out}), checkpoint {newest}"
            )
            if changes := fixed_changes(config, manifest.run, ("data.",)):
                print(f"note: not the data options of the run: {'; '.join(changes)}")
    return 0


def held_out_loss(trainer: Trainer, config: RunConfig) -> tuple[float, int]:
    """Mean loss in nats and number of held-out tokens; the same on every rank."""
    vocab_size = config.model.vocab_size
    calls = held_out_batches(
        Corpus.open(config.folders.held_out, vocab_size).tokens,
        trainer.mesh,
        config.train,
        vocab_size=vocab_size,
        device=trainer.device,
        max_samples=config.evaluation.sequences,
    )
    trainer.gather()
    total, num_targets = 0.0, 0
    for batches in calls:
        losses = trainer.pipeline.evaluate(batches, count_targets(batches, trainer.mesh))
        total += losses.loss * losses.num_targets
        num_targets += losses.num_targets
    return total / num_targets, num_targets

"""Held-out loss, over sequences that are the same at every step on every mesh.

loss = (sum of token losses) / (number of targets)       in nats; exp(loss) is the perplexity
"""

from pith_engine.checkpoint import load_checkpoint
from pith_engine.gradients import count_targets
from pith_engine.runtime import gather_objects

from pith_apps.checks import fixed_changes, required_checkpoint
from pith_apps.config import RunConfig
from pith_apps.corpus import Corpus
from pith_apps.data import held_out_batches
from pith_apps.trainer import Trainer, joined_trainer

_DATA = "data.", "evaluation.sequences", "train.sequence_length"


def evaluate(config: RunConfig) -> int:
    """Print the loss of rank 0's `required_checkpoint`; every rank calls it."""
    with joined_trainer(config) as trainer:
        newest = gather_objects(required_checkpoint(config), trainer.mesh.world)[0]
        manifest = load_checkpoint(newest, trainer.parameters, None, trainer.mesh)
        is_first = trainer.mesh.rank == 0
        if is_first and (changes := fixed_changes(config, manifest.run, _DATA)):
            print(f"warning: other data than the run's: {'; '.join(changes)}", flush=True)
        loss, num_targets = held_out_loss(trainer)
        if is_first:
            print(
                f"held-out loss {loss:.6f} after step {manifest.step} ({num_targets:,} tokens of "
                f"{config.folders.held_out}), checkpoint {newest}"
            )
    return 0


def held_out_loss(trainer: Trainer) -> tuple[float, int]:
    """Mean loss in nats, number of held-out tokens; the same on every rank."""
    config, mesh = trainer.config, trainer.mesh
    vocab_size = config.model.vocab_size
    calls = held_out_batches(
        Corpus.open(config.folders.held_out, vocab_size).tokens,
        mesh,
        config.train,
        vocab_size=vocab_size,
        device=trainer.device,
        max_samples=config.evaluation.sequences,
    )
    trainer.gather()
    steps = [trainer.pipeline.evaluate(b, count_targets(b, mesh)) for b in calls]
    num_targets = sum(step.num_targets for step in steps)
    return sum(step.loss * step.num_targets for step in steps) / num_targets, num_targets

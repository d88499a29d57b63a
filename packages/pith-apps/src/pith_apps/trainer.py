"""A run's model on one rank, and the gradients of a step.

    N      = targets of the global batch, counted once            count_targets
    W      <- all ranks' shards                                   unit.gather()
    losses, dW += d(token losses / N + balance loss)              pipeline.train_step
    G      <- sum over ranks of dW                                unit.reduce()
    norm   = L2 of G over the whole mesh                          global_norm

The trap: `unit.gather()`, of an evaluation too, zeroes the gradients: read them before the next.
"""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from pith_engine.contract import Batch
from pith_engine.fsdp import ShardedParameter, Unit, shard_chunks, sharded_parameters
from pith_engine.gradients import count_targets, global_norm
from pith_engine.init import initialise
from pith_engine.mesh import Mesh
from pith_engine.pipeline import Pipeline, StepLosses
from pith_engine.runtime import (
    barrier,
    connect_mesh,
    fail_fast,
    gather_objects,
    read_launch,
    start_process_group,
    stop_process_group,
)
from pith_models.build import build_chunks
from torch import Tensor

from pith_apps.config import RunConfig, torch_dtype
from pith_apps.corpus import Corpus, prepare_standard_library
from pith_apps.plan import chosen_attention, chosen_layers


@dataclass(frozen=True)
class Trainer:
    """One rank's share of a model."""

    config: RunConfig
    """The run."""
    mesh: Mesh
    """The ranks."""
    device: torch.device
    """Of this rank."""
    units: list[Unit]
    """Gathered and reduced together."""
    parameters: list[ShardedParameter]
    """Those of the units."""
    pipeline: Pipeline
    """Runs the chunks."""

    def gather(self) -> None:
        """Full parameters from all ranks' shards; gradients become zero."""
        for unit in self.units:
            unit.gather()


@contextmanager
def joined_group(config: RunConfig) -> Generator[torch.device]:
    """Be one of the run's processes for the body; one that raises ends at once, by name."""
    with fail_fast(read_launch(os.environ).rank):
        device = start_process_group(config.train.device, timedelta(seconds=config.timeout))
        yield device
        stop_process_group()


@contextmanager
def joined_trainer(config: RunConfig) -> Generator[Trainer]:
    """Be one rank of the run's mesh for the body, with the data in place."""
    with joined_group(config) as device:
        mesh = Mesh.create(config.mesh, timedelta(seconds=config.timeout))
        assert mesh is not None, "check_run refuses worlds that are larger than the mesh"
        connect_mesh(mesh, device)
        if config.data.standard_library:
            # A second look finds nothing to do where nodes share a file system.
            for rank in (mesh.rank, read_launch(os.environ).local_rank):
                if rank == 0:
                    prepare_standard_library(config.folders.training.parent)
                barrier(mesh.world)
        check_same_corpora(config, mesh)
        yield build_trainer(config, mesh, device)


def build_trainer(config: RunConfig, mesh: Mesh, device: torch.device) -> Trainer:
    """This rank's, with initial weights; only steps call collectives."""
    attention, dtype = chosen_attention(config), torch_dtype(config.train.dtype)
    chunks = build_chunks(config.model, mesh, chosen_layers(config), attention_backend=attention)
    units = shard_chunks(chunks, mesh, sharding=config.sharding, compute_dtype=dtype, device=device)
    parameters = sharded_parameters(units)
    initialise(parameters, config.train.seed)
    pipeline = Pipeline(
        chunks,
        mesh,
        hidden_size=config.model.hidden_size,
        dtype=dtype,
        device=device,
        balance=config.balance,
        recompute=config.train.recompute,
    )
    return Trainer(config, mesh, device, units, parameters, pipeline)


def check_same_corpora(config: RunConfig, mesh: Mesh) -> None:
    """ValueError for nodes that read different data; every rank calls it."""
    for folder in (config.folders.training, config.folders.held_out):
        digest = Corpus.open(folder, config.model.vocab_size).meta.sha256
        digests = gather_objects(digest, mesh.world)
        if others := [rank for rank, other in enumerate(digests) if other != digests[0]]:
            raise ValueError(
                f"{folder} on ranks {others} is another corpus than on rank 0; copy that one"
            )


def step_gradients(trainer: Trainer, batches: Sequence[Batch]) -> tuple[StepLosses, Tensor]:
    """Fill every `grad` from this rank's micro-batches of a step.

    Losses and norm (float64, before clipping) are the same on every rank.
    """
    num_targets = count_targets(batches, trainer.mesh)
    trainer.gather()
    losses = trainer.pipeline.train_step(batches, num_targets)
    for unit in trainer.units:
        unit.reduce()
    return losses, global_norm(trainer.parameters, trainer.mesh)

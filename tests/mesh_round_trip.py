"""Load a checkpoint on a mesh, save it again or take its loss: what a pool worker needs, no more.

Stands apart from the test that calls it because that test imports transformers, which four workers
would then import too.
"""

from datetime import timedelta
from pathlib import Path

import torch
from pith_engine.balance import BalanceConfig
from pith_engine.checkpoint import load_checkpoint, save_checkpoint
from pith_engine.context_parallel import shard_batch
from pith_engine.contract import IGNORED_TARGET, Batch, ModelChunk
from pith_engine.fsdp import ShardingConfig, Unit, shard_chunks, sharded_parameters
from pith_engine.init import initialise
from pith_engine.mesh import Mesh, parse_mesh
from pith_engine.optim import AdamW, OptimizerConfig
from pith_engine.pipeline import Pipeline
from pith_engine.runtime import connect_mesh
from pith_models.build import ModelConfig, build_chunks
from pith_ops.attention import AttentionBackend


def build_on(
    mesh: Mesh, config: ModelConfig, *, replicate: bool = False
) -> tuple[list[ModelChunk], list[Unit]]:
    """An fp32 model of four layers with values that no checkpoint holds."""
    layers = (2, 2) if mesh.pp.size == 1 else (1, 1, 1, 1)
    chunks = build_chunks(config, mesh, layers, attention_backend=AttentionBackend.REFERENCE)
    units = shard_chunks(
        chunks,
        mesh,
        sharding=ShardingConfig(replicate_dense=replicate, replicate_experts=replicate),
        compute_dtype=torch.float32,
        device=torch.device("cpu"),
    )
    initialise(sharded_parameters(units), seed=99)
    return chunks, units


def load_and_save(
    label: str, config: ModelConfig, checkpoint: Path, folder: Path, replicate: bool = False
) -> None:
    """On every rank of the mesh: load `checkpoint`, save it as step 3 of `folder`."""
    mesh = Mesh.create(parse_mesh(label), timedelta(seconds=60))
    assert mesh is not None
    parameters = sharded_parameters(build_on(mesh, config, replicate=replicate)[1])
    load_checkpoint(checkpoint, parameters, None, mesh)
    save_checkpoint(folder, 3, parameters, AdamW(parameters, OptimizerConfig()), {}, mesh)


def loss_on(label: str, config: ModelConfig, checkpoint: Path, batches: list[Batch]) -> float:
    """On every rank of the mesh: load `checkpoint`; the mean loss of the batches, one a sequence.

    The batches are spread over the ranks that share a batch, equally many on each.
    """
    mesh = Mesh.create(parse_mesh(label), timedelta(seconds=60))
    if mesh is None:
        return float("nan")
    connect_mesh(mesh, torch.device("cpu"))
    chunks, units = build_on(mesh, config)
    load_checkpoint(checkpoint, sharded_parameters(units), None, mesh)
    for unit in units:
        unit.gather()
    pipeline = Pipeline(
        chunks,
        mesh,
        hidden_size=config.hidden_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
        balance=BalanceConfig(method="none"),
    )
    num_targets = sum(int((batch.targets != IGNORED_TARGET).sum()) for batch in batches)
    own = batches[mesh.batch_rank :: mesh.config.num_batch_ranks]
    return pipeline.evaluate([shard_batch(batch, mesh.cp) for batch in own], num_targets).loss

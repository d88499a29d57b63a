"""Load a checkpoint on a mesh and save it again; what a pool worker needs of it and no more.

Stands apart from the test that calls it because that test imports transformers, which four workers
would then import too.
"""

from datetime import timedelta
from pathlib import Path

import torch
from pith_engine.checkpoint import load_checkpoint, save_checkpoint
from pith_engine.contract import ModelChunk
from pith_engine.fsdp import ShardingConfig, Unit, shard_chunks, sharded_parameters
from pith_engine.init import initialise
from pith_engine.mesh import Mesh, parse_mesh
from pith_engine.optim import AdamW, OptimizerConfig
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

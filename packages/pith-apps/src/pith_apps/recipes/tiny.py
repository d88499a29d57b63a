"""The tiny form of a recipe: its structure at sizes that train on a CPU in seconds."""

from dataclasses import replace

from pith_engine.mesh import MeshConfig
from pith_models.build import ModelConfig

from pith_apps.config import CheckpointConfig, DataConfig, EvaluationConfig, RunConfig


def tiny_form(full: RunConfig, model: ModelConfig) -> RunConfig:
    """Four steps of `model` on two processes, which share the experts where there are any."""
    train, lr = full.train, full.lr
    return replace(
        full,
        name=f"{full.name}-tiny",
        model=model,
        mesh=MeshConfig(ep=2) if model.num_experts else MeshConfig(dp=2),
        data=DataConfig(standard_library=True),
        train=replace(train, steps=4, batch=8, sequence_length=64, dtype="fp32", device="cpu"),
        lr=replace(lr, warmup_steps=1, decay_steps=2),
        evaluation=EvaluationConfig(interval=0, sequences=8),
        checkpoint=CheckpointConfig(interval=2),
    )

"""The tiny form of a recipe: its structure at sizes that train on a CPU in seconds."""

from dataclasses import replace
from typing import TypeVar

from pith_engine.mesh import MeshConfig
from pith_models.build import ModelConfig

from pith_apps.config import CheckpointConfig, DataConfig, EvaluationConfig, RunConfig

Model = TypeVar("Model", bound=ModelConfig)


def tiny_form(full: RunConfig, model: ModelConfig) -> RunConfig:
    """Four steps of `model` on two processes, which share the experts where there are any."""
    return replace(
        full,
        name=f"{full.name}-tiny",
        model=model,
        mesh=MeshConfig(ep=2) if model.num_experts else MeshConfig(dp=2),
        data=DataConfig(standard_library=True),
        train=replace(full.train, steps=4, batch=8, sequence_length=64, dtype="fp32", device="cpu"),
        lr=replace(full.lr, warmup_steps=1, decay_steps=2),
        evaluation=EvaluationConfig(interval=0, sequences=8),
        checkpoint=CheckpointConfig(interval=2),
    )


def tiny_sizes(model: Model) -> Model:
    """The model with the sizes that tiny forms share; a recipe cuts the others."""
    return replace(
        model,
        vocab_size=4096,
        hidden_size=64,
        num_hidden_layers=4,
        intermediate_size=192,
        max_position_embeddings=128,
    )

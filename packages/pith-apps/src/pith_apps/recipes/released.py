"""What the recipes of released models share: the large run, and how its tiny form is cut."""

from dataclasses import asdict, replace
from typing import Any

from pith_engine.lr import LearningRateConfig
from pith_engine.mesh import MeshConfig
from pith_models.build import ModelConfig

from pith_apps.config import CheckpointConfig, DataConfig, EvaluationConfig, RunConfig, TrainConfig

TINY_SIZES = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "intermediate_size": 192,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "sliding_window": 8,
    "max_position_embeddings": 128,
}
"""What `tiny_form` cuts larger sizes to."""


def large_run(
    name: str,
    model: ModelConfig,
    mesh: MeshConfig,
    *,
    steps: int = 10000,
    batch: int = 256,
    peak: float = 3e-4,
    warmup_steps: int = 200,
    decay_steps: int = 1000,
    held_out: int = 256,
) -> RunConfig:
    """Sequences of 4096 tokens, `held_out` of them to evaluate, with a WSD learning rate."""
    return RunConfig(
        name=name,
        model=model,
        mesh=mesh,
        train=TrainConfig(steps=steps, batch=batch, sequence_length=4096),
        lr=LearningRateConfig(
            schedule="wsd", peak=peak, warmup_steps=warmup_steps, decay_steps=decay_steps
        ),
        evaluation=EvaluationConfig(interval=500, sequences=held_out),
        checkpoint=CheckpointConfig(interval=500),
    )


def tiny_form(full: RunConfig) -> RunConfig:
    """The same structure at sizes that train on a CPU in seconds, by two processes.

    The sequences still pass a window and YaRN's original length.
    """
    model, yarn = full.model, full.model.rope_scaling
    sizes = asdict(model)
    cut: dict[str, Any] = {n: size for n, size in TINY_SIZES.items() if (sizes.get(n) or 0) > size}
    cut["rope_scaling"] = yarn and replace(yarn, original_max_position_embeddings=16)
    return replace(
        full,
        name=f"{full.name}-tiny",
        model=replace(model, **cut),
        mesh=MeshConfig(ep=2) if model.num_experts else MeshConfig(dp=2),
        data=DataConfig(standard_library=True),
        train=replace(full.train, steps=4, batch=8, sequence_length=64, dtype="fp32", device="cpu"),
        lr=replace(full.lr, warmup_steps=1, decay_steps=2),
        evaluation=EvaluationConfig(interval=0, sequences=8),
        checkpoint=CheckpointConfig(interval=2),
    )

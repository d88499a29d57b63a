"""`demo`: the whole system on whatever machine this is, in about two minutes.

A small Qwen3-MoE learns the source code of Python's standard library. A unigram model reaches 79%
of a uniform guess's loss, so a held-out loss below 75% of its first value shows use of context.
"""

import torch
from pith_engine.balance import BalanceConfig
from pith_engine.lr import LearningRateConfig
from pith_engine.mesh import MeshConfig
from pith_models.qwen3_moe import Qwen3MoeConfig

from pith_apps.config import CheckpointConfig, DataConfig, EvaluationConfig, RunConfig, TrainConfig


def demo() -> RunConfig:
    """Mesh, steps, device and dtype suit this machine's GPUs."""
    num_gpus = torch.cuda.device_count()
    return RunConfig(
        name="demo",
        model=demo_model(),
        mesh=demo_mesh(num_gpus),
        data=DataConfig(standard_library=True),
        train=TrainConfig(
            steps=200 if num_gpus else 100,
            batch=8,
            sequence_length=256,
            device="cuda" if num_gpus else "cpu",
            dtype="bf16" if num_gpus else "fp32",
        ),
        lr=LearningRateConfig(schedule="cosine", peak=3e-3, warmup_steps=10, final_ratio=0.1),
        # At 1e-3 one expert of a layer gets every token during the first tens of steps.
        balance=BalanceConfig(coefficient=1e-2),
        evaluation=EvaluationConfig(interval=50, sequences=64),
        checkpoint=CheckpointConfig(interval=25),
    )


def demo_mesh(num_gpus: int) -> MeshConfig:
    """Two GPUs share experts, four (and a CPU) run a pipeline of such pairs."""
    if num_gpus == 1:
        return MeshConfig()
    return MeshConfig(ep=2) if num_gpus in (2, 3) else MeshConfig(pp=2, ep=2)


def demo_model() -> Qwen3MoeConfig:
    """Four layers of eight experts, top-2: about 4 million parameters."""
    return Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        moe_intermediate_size=192,
        num_experts=8,
        num_experts_per_tok=2,
        rope_theta=10000.0,
        max_position_embeddings=1024,
    )

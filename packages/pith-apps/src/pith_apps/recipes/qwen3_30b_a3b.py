"""`qwen3-30b-a3b` and its tiny form.

Sizes: `config.json` of Qwen/Qwen3-30B-A3B-Base on Hugging Face (30.5 B parameters, 3.3 B active).
On each of eight GPUs AdamW's fp32 state takes 61 GB, gathered experts and fp32 gradients 22 GB.
"""

from dataclasses import replace

from pith_engine.lr import LearningRateConfig
from pith_engine.mesh import MeshConfig
from pith_models.qwen3_moe import Qwen3MoeConfig

from pith_apps.config import CheckpointConfig, EvaluationConfig, RunConfig, TrainConfig
from pith_apps.recipes.tiny import tiny_form, tiny_sizes

_MODEL = Qwen3MoeConfig(
    vocab_size=151936,
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    rope_theta=1000000.0,
    max_position_embeddings=32768,
)


def qwen3_30b_a3b() -> RunConfig:
    """Released sizes on eight GPUs."""
    return RunConfig(
        name="qwen3-30b-a3b",
        model=_MODEL,
        mesh=MeshConfig(ep=8),
        train=TrainConfig(steps=10000, batch=256, sequence_length=4096),
        lr=LearningRateConfig(schedule="wsd", peak=3e-4, warmup_steps=200, decay_steps=1000),
        evaluation=EvaluationConfig(interval=500, sequences=256),
        checkpoint=CheckpointConfig(interval=500),
    )


def qwen3_30b_a3b_tiny() -> RunConfig:
    """Trains on a CPU in seconds."""
    model = replace(
        tiny_sizes(_MODEL),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=2,
    )
    return tiny_form(qwen3_30b_a3b(), model)

"""`qwen3-235b-a22b` and its tiny form.

Sizes: `config.json` of Qwen/Qwen3-235B-A22B on Hugging Face (235 B parameters, 22 B active). On 64
GPUs AdamW's fp32 state takes 44 GB each, gathered weights and fp32 gradients 27 GB.
"""

from dataclasses import replace

from pith_engine.lr import LearningRateConfig
from pith_engine.mesh import MeshConfig
from pith_models.qwen3_moe import Qwen3MoeConfig

from pith_apps.config import CheckpointConfig, EvaluationConfig, RunConfig, TrainConfig
from pith_apps.recipes.tiny import tiny_form, tiny_sizes

_MODEL = Qwen3MoeConfig(
    vocab_size=151936,
    hidden_size=4096,
    num_hidden_layers=94,
    num_attention_heads=64,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    num_experts=128,
    num_experts_per_tok=8,
)


def qwen3_235b_a22b() -> RunConfig:
    """Released sizes on 64 GPUs."""
    return RunConfig(
        name="qwen3-235b-a22b",
        model=_MODEL,
        mesh=MeshConfig(pp=8, ep=8),
        train=TrainConfig(steps=10000, batch=1024, sequence_length=4096),
        lr=LearningRateConfig(schedule="wsd", peak=2e-4, warmup_steps=500, decay_steps=1000),
        evaluation=EvaluationConfig(interval=500, sequences=1024),
        checkpoint=CheckpointConfig(interval=500),
    )


def qwen3_235b_a22b_tiny() -> RunConfig:
    """16 query heads to a key head and a wide MLP as in the large one."""
    model = replace(
        tiny_sizes(_MODEL),
        num_attention_heads=16,
        num_key_value_heads=1,
        head_dim=8,
        moe_intermediate_size=24,
        num_experts=16,
        num_experts_per_tok=4,
    )
    return tiny_form(qwen3_235b_a22b(), model)

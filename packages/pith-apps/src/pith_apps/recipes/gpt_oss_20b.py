"""`gpt-oss-20b`: pretraining at the released sizes of gpt-oss-20b, and a tiny form of it.

Sizes and RoPE: `config.json` of openai/gpt-oss-20b on Hugging Face (20.9 B parameters, 3.6 B active
without the embedding). Batch and learning rate are those of `qwen3-30b-a3b`: none were published.
"""

from dataclasses import replace

from pith_engine.lr import LearningRateConfig
from pith_engine.mesh import MeshConfig
from pith_models.gpt_oss import GptOssConfig
from pith_ops.rope import Yarn

from pith_apps.config import CheckpointConfig, EvaluationConfig, RunConfig, TrainConfig
from pith_apps.recipes.tiny import tiny_form

GPT_OSS_20B = GptOssConfig(
    vocab_size=201088,
    hidden_size=2880,
    num_hidden_layers=24,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    intermediate_size=2880,
    num_experts=32,
    num_experts_per_tok=4,
    sliding_window=128,
    rope_scaling=Yarn(factor=32.0, original_max_position_embeddings=4096, truncate=False),
)
GPT_OSS_TINY = replace(
    GPT_OSS_20B,
    vocab_size=4096,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=64,
    num_experts=8,
    num_experts_per_tok=2,
    sliding_window=8,
    rope_scaling=Yarn(factor=32.0, original_max_position_embeddings=16, truncate=False),
    max_position_embeddings=512,
)
"""Sequences of 64 still pass the window and YaRN's original length."""


def gpt_oss_20b() -> RunConfig:
    """Released sizes on eight GPUs; give it `--data.training`, `.held-out` and `.tokenizer`."""
    return RunConfig(
        name="gpt-oss-20b",
        model=GPT_OSS_20B,
        mesh=MeshConfig(ep=8),
        train=TrainConfig(steps=10000, batch=256, micro_batch=1, sequence_length=4096),
        lr=LearningRateConfig(schedule="wsd", peak=3e-4, warmup_steps=200, decay_steps=1000),
        evaluation=EvaluationConfig(interval=500, sequences=256),
        checkpoint=CheckpointConfig(interval=500, keep=2),
    )


def gpt_oss_20b_tiny() -> RunConfig:
    """The same structure with every size cut down."""
    return tiny_form(gpt_oss_20b(), GPT_OSS_TINY)

"""`gpt-oss-20b` and its tiny form.

Sizes and RoPE: `config.json` of openai/gpt-oss-20b on Hugging Face (20.9 B parameters, 3.6 B active
without the embedding). Batch and learning rate are those of `qwen3-30b-a3b`: none were published.
"""

from dataclasses import replace

from pith_models.gpt_oss import GptOssConfig
from pith_ops.rope import Yarn

from pith_apps.config import RunConfig
from pith_apps.recipes.qwen3_30b_a3b import qwen3_30b_a3b
from pith_apps.recipes.tiny import tiny_form, tiny_sizes

_YARN = Yarn(factor=32.0, original_max_position_embeddings=4096, truncate=False)
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
    rope_scaling=_YARN,
)
GPT_OSS_TINY = replace(
    tiny_sizes(GPT_OSS_20B),
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=64,
    num_experts=8,
    num_experts_per_tok=2,
    sliding_window=8,
    rope_scaling=replace(_YARN, original_max_position_embeddings=16),
    max_position_embeddings=512,
)
"""Sequences of 64 still pass the window and YaRN's original length."""


def gpt_oss_20b() -> RunConfig:
    """Released sizes on eight GPUs."""
    return replace(qwen3_30b_a3b(), name="gpt-oss-20b", model=GPT_OSS_20B)


def gpt_oss_20b_tiny() -> RunConfig:
    """Trains on a CPU in seconds."""
    return tiny_form(gpt_oss_20b(), GPT_OSS_TINY)

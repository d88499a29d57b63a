"""`gpt-oss-20b`, `gpt-oss-120b`.

Sizes and RoPE: `config.json` of openai/gpt-oss-20b (20.9 B parameters, 3.6 B active without the
embedding) and openai/gpt-oss-120b (116.8 B, 5.1 B active) on Hugging Face. Batch and learning rate
are those of `qwen3-30b-a3b`: none were published.
"""

from dataclasses import replace

from pith_engine.mesh import MeshConfig
from pith_models.gpt_oss import GptOssConfig
from pith_ops.rope import Yarn

from pith_apps.config import RunConfig
from pith_apps.recipes.released import large_run

_20B = GptOssConfig(
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
_120B = replace(_20B, num_hidden_layers=36, num_experts=128)


def gpt_oss_20b() -> RunConfig:
    """Released sizes on eight GPUs."""
    return large_run("gpt-oss-20b", _20B, MeshConfig(ep=8))


def gpt_oss_120b() -> RunConfig:
    """Released sizes on 32 GPUs."""
    return large_run("gpt-oss-120b", _120B, MeshConfig(pp=4, ep=8))

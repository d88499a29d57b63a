"""`qwen3-8b`, which is dense, `qwen3-30b-a3b`, `qwen3-235b-a22b`.

Sizes: `config.json` of Qwen/Qwen3-8B-Base (8.2 B parameters), Qwen/Qwen3-30B-A3B-Base (30.5 B,
3.3 B active) and Qwen/Qwen3-235B-A22B (235 B, 22 B active) on Hugging Face. On each of 8, 8 and 64
GPUs AdamW's fp32 state takes 12, 61 and 44 GB, gathered weights and fp32 gradients 49, 22 and 27.
"""

from dataclasses import replace

from pith_engine.mesh import MeshConfig
from pith_models.qwen3_dense import Qwen3Config
from pith_models.qwen3_moe import Qwen3MoeConfig

from pith_apps.config import RunConfig
from pith_apps.recipes.released import large_run

_8B = Qwen3Config(
    vocab_size=151936,
    hidden_size=4096,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=12288,
    max_position_embeddings=32768,
)
_30B = Qwen3MoeConfig(
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
    max_position_embeddings=32768,
)
_235B = replace(
    _30B,
    hidden_size=4096,
    num_hidden_layers=94,
    num_attention_heads=64,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    max_position_embeddings=40960,
)


def qwen3_8b() -> RunConfig:
    """Released sizes on eight GPUs."""
    return large_run("qwen3-8b", _8B, MeshConfig(dp=8))


def qwen3_30b_a3b() -> RunConfig:
    """Released sizes on eight GPUs."""
    return large_run("qwen3-30b-a3b", _30B, MeshConfig(ep=8))


def qwen3_235b_a22b() -> RunConfig:
    """Released sizes on 64 GPUs."""
    mesh = MeshConfig(pp=8, ep=8)
    return large_run(
        "qwen3-235b-a22b", _235B, mesh, batch=1024, peak=2e-4, warmup_steps=500, held_out=1024
    )

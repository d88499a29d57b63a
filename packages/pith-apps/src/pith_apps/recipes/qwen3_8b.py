"""`qwen3-8b`, which is dense, and its tiny form; batch and learning rate of `qwen3-30b-a3b`.

Sizes: `config.json` of Qwen/Qwen3-8B-Base on Hugging Face (8.2 B parameters). On eight GPUs AdamW's
fp32 state takes 12 GB each, gathered weights and fp32 gradients 49 GB.
"""

from dataclasses import replace

from pith_engine.mesh import MeshConfig
from pith_models.qwen3_dense import Qwen3Config

from pith_apps.config import RunConfig
from pith_apps.recipes.qwen3_30b_a3b import qwen3_30b_a3b
from pith_apps.recipes.tiny import tiny_form, tiny_sizes

_MODEL = Qwen3Config(
    vocab_size=151936,
    hidden_size=4096,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=12288,
    max_position_embeddings=32768,
)


def qwen3_8b() -> RunConfig:
    """Released sizes on eight GPUs."""
    return replace(qwen3_30b_a3b(), name="qwen3-8b", model=_MODEL, mesh=MeshConfig(dp=8))


def qwen3_8b_tiny() -> RunConfig:
    """Four query heads to a key head as in the large one."""
    heads = replace(tiny_sizes(_MODEL), num_attention_heads=8, num_key_value_heads=2, head_dim=16)
    return tiny_form(qwen3_8b(), heads)

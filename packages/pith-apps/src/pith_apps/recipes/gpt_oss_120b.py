"""`gpt-oss-120b`, which is `gpt-oss-20b` with more layers and experts, and its tiny form.

Sizes: `config.json` of openai/gpt-oss-120b on Hugging Face (116.8 B parameters, 5.1 B active
without the embedding).
"""

from dataclasses import replace

from pith_engine.mesh import MeshConfig

from pith_apps.config import RunConfig
from pith_apps.recipes.gpt_oss_20b import GPT_OSS_20B, GPT_OSS_TINY, gpt_oss_20b
from pith_apps.recipes.tiny import tiny_form


def gpt_oss_120b() -> RunConfig:
    """Released sizes on 32 GPUs."""
    model = replace(GPT_OSS_20B, num_hidden_layers=36, num_experts=128)
    return replace(gpt_oss_20b(), name="gpt-oss-120b", model=model, mesh=MeshConfig(pp=4, ep=8))


def gpt_oss_120b_tiny() -> RunConfig:
    """The tiny form of `gpt-oss-20b` with more experts."""
    return tiny_form(gpt_oss_120b(), replace(GPT_OSS_TINY, num_experts=32, num_experts_per_tok=4))

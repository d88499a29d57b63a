"""`qwen3-8b`: pretraining at the released sizes of the dense Qwen3-8B, and a tiny form of it.

Sizes: `config.json` of Qwen/Qwen3-8B-Base on Hugging Face (8.2 B parameters). On eight GPUs AdamW's
fp32 state takes 12 GB each, gathered weights and fp32 gradients 49 GB.
"""

from dataclasses import replace

from pith_engine.lr import LearningRateConfig
from pith_engine.mesh import MeshConfig
from pith_models.qwen3_dense import Qwen3Config

from pith_apps.config import CheckpointConfig, EvaluationConfig, RunConfig, TrainConfig
from pith_apps.recipes.tiny import tiny_form

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
    """Released sizes on eight GPUs; give it `--data.training`, `.held-out` and `.tokenizer`."""
    return RunConfig(
        name="qwen3-8b",
        model=_MODEL,
        mesh=MeshConfig(dp=8),
        train=TrainConfig(steps=10000, batch=256, sequence_length=4096),
        lr=LearningRateConfig(schedule="wsd", peak=3e-4, warmup_steps=200, decay_steps=1000),
        evaluation=EvaluationConfig(interval=500, sequences=256),
        checkpoint=CheckpointConfig(interval=500),
    )


def qwen3_8b_tiny() -> RunConfig:
    """Four query heads to a key head as in the large one, for a CPU."""
    model = replace(
        _MODEL,
        vocab_size=4096,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=192,
        max_position_embeddings=128,
    )
    return tiny_form(qwen3_8b(), model)

"""`deepseek-v2-lite` and its tiny form.

Sizes and RoPE: `config.json` of deepseek-ai/DeepSeek-V2-Lite on Hugging Face (15.7 B parameters,
2.4 B active without the embedding). Batch and peak learning rate: arXiv 2405.04434, appendix B.
"""

from dataclasses import replace

from pith_engine.lr import LearningRateConfig
from pith_engine.mesh import MeshConfig
from pith_models.deepseek import DeepseekConfig
from pith_ops.rope import Yarn

from pith_apps.config import CheckpointConfig, EvaluationConfig, RunConfig, TrainConfig
from pith_apps.recipes.tiny import tiny_form, tiny_sizes

_YARN = Yarn(factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707)
_MODEL = DeepseekConfig(
    vocab_size=102400,
    hidden_size=2048,
    num_hidden_layers=27,
    num_attention_heads=16,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=10944,
    moe_intermediate_size=1408,
    first_k_dense_replace=1,
    n_routed_experts=64,
    n_shared_experts=2,
    num_experts_per_tok=6,
    topk_method="greedy",
    rope_scaling=_YARN,
)


def deepseek_v2_lite() -> RunConfig:
    """Released sizes on eight GPUs."""
    return RunConfig(
        name="deepseek-v2-lite",
        model=_MODEL,
        mesh=MeshConfig(ep=8),
        train=TrainConfig(steps=10000, batch=4608, sequence_length=4096),
        lr=LearningRateConfig(schedule="wsd", peak=4.2e-4, warmup_steps=2000, decay_steps=1000),
        evaluation=EvaluationConfig(interval=500, sequences=256),
        checkpoint=CheckpointConfig(interval=500),
    )


def deepseek_v2_lite_tiny() -> RunConfig:
    """Its sequences still pass YaRN's original length."""
    model = replace(
        tiny_sizes(_MODEL),
        num_attention_heads=4,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=24,
        moe_intermediate_size=48,
        n_routed_experts=8,
        num_experts_per_tok=2,
        rope_scaling=replace(_YARN, original_max_position_embeddings=16),
    )
    return tiny_form(deepseek_v2_lite(), model)

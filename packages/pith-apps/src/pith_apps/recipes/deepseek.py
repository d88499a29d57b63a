"""`deepseek-v2-lite`, `deepseek-v3`.

Sizes and RoPE: `config.json` of deepseek-ai/DeepSeek-V2-Lite (15.7 B parameters, 2.4 B active
without the embedding) and deepseek-ai/DeepSeek-V3 (671 B, 37 B active; without multi-token
prediction) on Hugging Face. V2-Lite's batch and peak learning rate: arXiv 2405.04434, appendix B;
V3's mesh, batch, peak and the bias's rate: arXiv 2412.19437, sections 3 and 4.2.
"""

from dataclasses import replace

from pith_engine.balance import BalanceConfig
from pith_engine.mesh import MeshConfig
from pith_models.deepseek import DeepseekConfig
from pith_ops.rope import Yarn

from pith_apps.config import EvaluationConfig, RunConfig
from pith_apps.recipes.released import large_run

_V2_LITE = DeepseekConfig(
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
    rope_scaling=Yarn(
        factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707
    ),
)
_V3 = DeepseekConfig(
    vocab_size=129280,
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    first_k_dense_replace=3,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    topk_method="noaux_tc",
    n_group=8,
    topk_group=4,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    rope_scaling=Yarn(
        factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0
    ),
)


def deepseek_v2_lite() -> RunConfig:
    """Released sizes on eight GPUs."""
    mesh = MeshConfig(ep=8)
    return large_run("deepseek-v2-lite", _V2_LITE, mesh, batch=4608, peak=4.2e-4, warmup_steps=2000)


def deepseek_v3() -> RunConfig:
    """Released sizes on 2048 GPUs."""
    run = large_run(
        "deepseek-v3",
        _V3,
        MeshConfig(pp=16, dp=2, ep=64),
        steps=235000,
        batch=15360,
        peak=2.2e-4,
        warmup_steps=2000,
        decay_steps=70000,
    )
    return replace(
        run,
        balance=BalanceConfig(method="bias", bias_rate=1e-3),
        evaluation=EvaluationConfig(interval=1000, sequences=4096),
    )

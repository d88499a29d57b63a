"""`deepseek-v3` and its tiny form.

Sizes and RoPE: `config.json` of deepseek-ai/DeepSeek-V3 on Hugging Face (671 B parameters, 37 B
active), without multi-token prediction. Mesh, batch, peak learning rate and the bias's rate:
arXiv 2412.19437, sections 3 and 4.2.
"""

from dataclasses import replace

from pith_engine.balance import BalanceConfig
from pith_engine.lr import LearningRateConfig
from pith_engine.mesh import MeshConfig
from pith_models.deepseek import DeepseekConfig
from pith_ops.rope import Yarn

from pith_apps.config import CheckpointConfig, EvaluationConfig, RunConfig, TrainConfig
from pith_apps.recipes.tiny import tiny_form, tiny_sizes

_YARN = Yarn(factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)
_MODEL = DeepseekConfig(
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
    rope_scaling=_YARN,
)


def deepseek_v3() -> RunConfig:
    """Released sizes on 2048 GPUs."""
    return RunConfig(
        name="deepseek-v3",
        model=_MODEL,
        mesh=MeshConfig(pp=16, dp=2, ep=64),
        train=TrainConfig(steps=235000, batch=15360, sequence_length=4096),
        lr=LearningRateConfig(schedule="wsd", peak=2.2e-4, warmup_steps=2000, decay_steps=70000),
        balance=BalanceConfig(method="bias", bias_rate=1e-3),
        evaluation=EvaluationConfig(interval=1000, sequences=4096),
        checkpoint=CheckpointConfig(interval=500),
    )


def deepseek_v3_tiny() -> RunConfig:
    """Its sequences still pass YaRN's original length."""
    model = replace(
        tiny_sizes(_MODEL),
        num_attention_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=24,
        moe_intermediate_size=48,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        rope_scaling=replace(_YARN, original_max_position_embeddings=16),
    )
    return tiny_form(deepseek_v3(), model)

"""Recipes of released models, and their tiny forms.

    recipe            config.json on Hugging Face         parameters  active   GPUs
    qwen3-8b          Qwen/Qwen3-8B-Base                       8.2 B   8.2 B      8
    qwen3-30b-a3b     Qwen/Qwen3-30B-A3B-Base                 30.5 B   3.3 B      8
    qwen3-235b-a22b   Qwen/Qwen3-235B-A22B                     235 B    22 B     64
    deepseek-v2-lite  deepseek-ai/DeepSeek-V2-Lite            15.7 B   2.4 B*     8
    deepseek-v3       deepseek-ai/DeepSeek-V3                  671 B    37 B   2048
    gpt-oss-20b       openai/gpt-oss-20b                      20.9 B   3.6 B*     8
    gpt-oss-120b      openai/gpt-oss-120b                    116.8 B   5.1 B*    32

    *  without the embedding

Sizes and RoPE are those of config.json, V3 without multi-token prediction. V2-Lite's batch and peak
learning rate: arXiv 2405.04434, appendix B; V3's mesh, batch, peak and the bias's rate: 2412.19437,
sections 3 and 4.2. For GPT-OSS none were published.
"""

from dataclasses import asdict, replace
from typing import Any

from pith_engine.balance import BalanceConfig
from pith_engine.lr import LearningRateConfig
from pith_engine.mesh import MeshConfig
from pith_models.build import ModelConfig
from pith_models.deepseek import DeepseekConfig
from pith_models.gpt_oss import GptOssConfig
from pith_models.qwen3_dense import Qwen3Config
from pith_models.qwen3_moe import Qwen3MoeConfig
from pith_ops.rope import Yarn

from pith_apps.config import CheckpointConfig, DataConfig, EvaluationConfig, RunConfig, TrainConfig
from pith_apps.recipes.demo import demo

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
_YARN = Yarn(factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707)
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
    rope_scaling=_YARN,
)
_V3 = replace(
    _V2_LITE,
    vocab_size=129280,
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=128,
    q_lora_rank=1536,
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
    rope_scaling=replace(_YARN, mscale=1.0, mscale_all_dim=1.0),
)
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

_TINY_SIZES = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "intermediate_size": 192,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "sliding_window": 8,
    "max_position_embeddings": 128,
}
"""What `tiny_form` cuts larger sizes to."""


def built_in_recipes() -> list[RunConfig]:
    """The demo, each model and its tiny form."""
    released = (
        qwen3_8b(),
        qwen3_30b_a3b(),
        qwen3_235b_a22b(),
        deepseek_v2_lite(),
        deepseek_v3(),
        gpt_oss_20b(),
        gpt_oss_120b(),
    )
    return [demo(), *(recipe for full in released for recipe in (full, tiny_form(full)))]


def qwen3_8b() -> RunConfig:
    """On eight GPUs."""
    return large_run("qwen3-8b", _8B, MeshConfig(dp=8))


def qwen3_30b_a3b() -> RunConfig:
    """On eight GPUs."""
    return large_run("qwen3-30b-a3b", _30B, MeshConfig(ep=8))


def qwen3_235b_a22b() -> RunConfig:
    """On 64 GPUs."""
    mesh = MeshConfig(pp=8, ep=8)
    return large_run(
        "qwen3-235b-a22b", _235B, mesh, batch=1024, peak=2e-4, warmup_steps=500, held_out=1024
    )


def deepseek_v2_lite() -> RunConfig:
    """On eight GPUs."""
    mesh = MeshConfig(ep=8)
    return large_run("deepseek-v2-lite", _V2_LITE, mesh, batch=4608, peak=4.2e-4, warmup_steps=2000)


def deepseek_v3() -> RunConfig:
    """On 2048 GPUs."""
    mesh = MeshConfig(pp=16, dp=2, ep=64)
    run = large_run("deepseek-v3", _V3, mesh, batch=15360, peak=2.2e-4, warmup_steps=2000)
    return replace(
        run,
        train=replace(run.train, steps=235000),
        lr=replace(run.lr, decay_steps=70000),
        balance=BalanceConfig(method="bias", bias_rate=1e-3),
        evaluation=EvaluationConfig(interval=1000, sequences=4096),
    )


def gpt_oss_20b() -> RunConfig:
    """On eight GPUs."""
    return large_run("gpt-oss-20b", _20B, MeshConfig(ep=8))


def gpt_oss_120b() -> RunConfig:
    """On 32 GPUs."""
    return large_run("gpt-oss-120b", _120B, MeshConfig(pp=4, ep=8))


def large_run(
    name: str,
    model: ModelConfig,
    mesh: MeshConfig,
    *,
    batch: int = 256,
    peak: float = 3e-4,
    warmup_steps: int = 200,
    held_out: int = 256,
) -> RunConfig:
    """10,000 steps of 4096-token sequences; `held_out` of them in an evaluation."""
    return RunConfig(
        name=name,
        model=model,
        mesh=mesh,
        train=TrainConfig(steps=10000, batch=batch, sequence_length=4096),
        lr=LearningRateConfig(
            schedule="wsd", peak=peak, warmup_steps=warmup_steps, decay_steps=1000
        ),
        evaluation=EvaluationConfig(interval=500, sequences=held_out),
        checkpoint=CheckpointConfig(interval=500),
    )


def tiny_form(full: RunConfig) -> RunConfig:
    """At sizes that two CPU processes train in seconds.

    The sequences still pass a window and YaRN's original length.
    """
    model, yarn = full.model, full.model.rope_scaling
    sizes = asdict(model)
    cut: dict[str, Any] = {n: size for n, size in _TINY_SIZES.items() if (sizes.get(n) or 0) > size}
    cut["rope_scaling"] = yarn and replace(yarn, original_max_position_embeddings=16)
    return replace(
        full,
        name=f"{full.name}-tiny",
        model=replace(model, **cut),
        mesh=MeshConfig(ep=2) if model.num_experts else MeshConfig(dp=2),
        data=DataConfig(standard_library=True),
        train=replace(full.train, steps=4, batch=8, sequence_length=64, dtype="fp32", device="cpu"),
        lr=replace(full.lr, warmup_steps=1, decay_steps=2),
        evaluation=EvaluationConfig(interval=0, sequences=8),
        checkpoint=CheckpointConfig(interval=2),
    )

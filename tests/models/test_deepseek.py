"""DeepSeek-V2 and V3 against transformers' own models: logits, gradients, files, counts.

transformers' V2 ignores `norm_topk_prob` and its router is V2's without a bias, so what it cannot
show (normalised V2 weights) is compared with a loop in float64.
"""

import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pith_engine.balance import update_balance_biases
from pith_engine.contract import Batch, ModelChunk, Role, Routing, plain_hidden
from pith_engine.mesh import Mesh
from pith_models.build import (
    build_chunks,
    canonical_tensors,
    forward_flops,
    model_config_from_hf,
    parameter_counts,
    skipped_keys,
)
from pith_models.deepseek import DeepseekConfig
from pith_models.hf import HuggingFaceTensors, export_tensors, read_hf_config
from pith_ops.attention import AttentionBackend
from pith_ops.rms_norm import rms_norm
from pith_ops.rope import Yarn
from safetensors.torch import load_file, save_file
from their_models import (
    LENGTH,
    Promote,
    load_ours,
    make_batch,
    our_gradients,
    randomise,
    run_theirs,
    their_gradients,
    worst,
)
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

YARN = {
    "rope_theta": 10_000.0,
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,  # a quarter of the tests' sequences
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "q_lora_rank": None,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 128,
    "rope_parameters": YARN,
}
V3 = {"model_type": "deepseek_v3", "n_group": 4, "topk_group": 2, "q_lora_rank": 28}
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "v2-lite": {"n_group": 1, "topk_group": 1},
    "v2": {**GROUPS, "q_lora_rank": 28, "num_experts_per_tok": 4},
    "v2-one-shared": {"n_shared_experts": 1, "first_k_dense_replace": 0, "num_hidden_layers": 2},
    "v2-no-shared": {"n_shared_experts": 0, "first_k_dense_replace": 2},
    "v2-tied": {"tie_word_embeddings": True, "rope_parameters": {**YARN, "rope_type": "default"}},
    "v3": V3,
    "v3-not-normalised": {**V3, "norm_topk_prob": False, "n_shared_experts": 1},
    "v3-full-query": {**V3, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "v3-no-yarn": {
        **V3,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "n_shared_experts": 0,
        "first_k_dense_replace": 0,
        "num_hidden_layers": 2,
    },
}
VARIANTS["v2-tied"]["rope_parameters"] = {"rope_theta": 5_000.0, "rope_type": "default"}


def make_theirs(variant: str, dtype: torch.dtype) -> nn.Module:
    """transformers' model with random weights, and biases that turn choices."""
    chosen: dict[str, Any] = {**TINY, **VARIANTS[variant]}
    is_v3 = chosen.pop("model_type", "") == "deepseek_v3"
    settings = {"attn_implementation": "eager", "experts_implementation": "eager"}
    if is_v3:
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**chosen, **settings)).to(dtype)
    else:
        model = DeepseekV2ForCausalLM(DeepseekV2Config(**chosen, **settings)).to(dtype)
    randomise(model)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape) - 0.5)
    return model.eval()


def save_theirs(model: Any, folder: Path) -> None:
    """As `save_pretrained`, without the empty matrices of an MLP of no shared experts."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if v.numel()}, path, {"format": "pt"})


def forward(chunks: list[ModelChunk], batch: Batch) -> tuple[Tensor, dict[int, Routing]]:
    """Logits, and the routing of every sparse layer."""
    outputs = list(plain_hidden(chunks, batch))
    routings = {n: routing for n, (_, routing) in enumerate(outputs) if routing is not None}
    return chunks[-1].logits(outputs[-1][0]), routings


@pytest.mark.parametrize(
    ("dtype", "logits_atol", "gradient_rtol"),
    [(torch.float64, 1e-10, 1e-8), (torch.float32, 1e-4, 1e-3)],
    ids=["fp64", "fp32"],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_every_gradient_agree_with_transformers(
    variant: str, dtype: torch.dtype, logits_atol: float, gradient_rtol: float, tmp_path: Path
):
    batch = make_batch(TINY["vocab_size"])
    with Promote() if dtype is torch.float64 else nullcontext():
        theirs = make_theirs(variant, dtype)
        expected, expected_loss = run_theirs(theirs, batch)
    save_theirs(theirs, tmp_path)
    config = model_config_from_hf(read_hf_config(tmp_path))
    chunks, units = load_ours(tmp_path, dtype)

    logits, routings = forward(chunks, batch)
    loss = chunks[-1].loss(list(plain_hidden(chunks, batch))[-1][0], batch)
    loss.backward()

    assert (logits - expected).abs().max() < logits_atol
    assert expected.abs().max() > 1, "logits so small that the tolerance would prove nothing"
    assert loss.item() == pytest.approx(expected_loss.item(), rel=gradient_rtol)
    assert routings.keys() == set(range(config.first_k_dense_replace, config.num_hidden_layers))
    for routing in routings.values():
        reached = routing.expert_ids.unique()
        assert len(reached) == config.num_experts, "an expert without a token has no gradient"
    actual, gradients = our_gradients(units), their_gradients(theirs, config)
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0, name
        assert worst(actual[name], gradient) < gradient_rtol, name
    assert actual.keys() == gradients.keys()
    for name, gradient in actual.items():
        experts = gradient.flatten(1).abs().amax(1) if "experts" in name else gradient.abs().max()
        assert gradient.isfinite().all() and (experts > 0).all(), name

"""GPT-OSS against transformers' own model and MXFP4 decoder, and its published sizes.

Sequences of 64 tokens pass the window of 8 and the 16 tokens of the context before YaRN.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pith_engine.contract import DeclaredParameter
from pith_engine.mesh import Mesh
from pith_engine.plain import plain_hidden
from pith_models.build import (
    build_chunks,
    canonical_tensors,
    forward_flops,
    model_config_from_hf,
    parameter_counts,
)
from pith_models.gpt_oss import GptOssConfig
from pith_models.hf import HuggingFaceTensors, export_tensors, read_hf_config
from pith_ops.attention import AttentionBackend
from pith_ops.rope import Yarn
from released_gpt_oss import GPT_OSS_20B, GPT_OSS_120B
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
from torch import Tensor
from transformers import GptOssConfig as TheirConfig
from transformers import GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
# 4 heads of 16 on a hidden size of 48; square experts.
TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "sliding_window": 8,
    "max_position_embeddings": 64,
    "rope_parameters": YARN,
}
VARIANTS: dict[str, dict[str, object]] = {
    "released": {},
    "not-square": {"intermediate_size": 24, "num_experts_per_tok": 3, "num_key_value_heads": 1},
    "layer-types": {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2},
    "tied": {
        "num_experts_per_tok": 3,
        "tie_word_embeddings": True,
        "swiglu_limit": 1.5,
        "swiglu_alpha": 1.2,
    },
    "plain-rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}


def make_theirs(fields: dict[str, object], dtype: torch.dtype) -> GptOssForCausalLM:
    """A model with sinks around 1, biases around 0 and experts that the clamp bites."""
    config = TheirConfig(
        **{**TINY, **fields}, attn_implementation="eager", experts_implementation="eager"
    )
    model = GptOssForCausalLM(config).to(dtype)
    randomise(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("experts.gate_up_proj", "embed_tokens.weight")):
                parameter.mul_(4)
            elif name.endswith("experts.down_proj"):
                parameter.mul_(0.2)
            elif name.endswith(".bias"):
                parameter.sub_(1)
    return model.eval()


@pytest.mark.parametrize(
    ("dtype", "logits_atol", "gradient_rtol"),
    [(torch.float64, 1e-10, 1e-10), (torch.float32, 1e-4, 1e-3)],
    ids=["fp64", "fp32"],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_every_gradient_agree_with_transformers(
    variant: str,
    dtype: torch.dtype,
    logits_atol: float,
    gradient_rtol: float,
    tmp_path: Path,
):
    batch, gate_ups = make_batch(TINY["vocab_size"]), []
    if dtype is torch.float64:
        with Promote():
            theirs = make_theirs(VARIANTS[variant], dtype)
            watch_experts(theirs, gate_ups)
            expected, expected_loss = run_theirs(theirs, batch)
    else:
        theirs = make_theirs(VARIANTS[variant], dtype)
        watch_experts(theirs, gate_ups)
        expected, expected_loss = run_theirs(theirs, batch)
    theirs.save_pretrained(tmp_path)
    chunks, units = load_ours(tmp_path, dtype)

    outputs = list(plain_hidden(chunks, batch))
    logits = chunks[-1].logits(outputs[-1][0])
    loss = chunks[-1].loss(outputs[-1][0], batch)
    loss.backward()

    assert (logits - expected).abs().max() < logits_atol
    assert expected.abs().max() > 1, "logits so small that the tolerance would prove nothing"
    assert loss.item() == pytest.approx(expected_loss.item(), rel=gradient_rtol)
    config = model_config_from_hf(read_hf_config(tmp_path))
    limit, gate_up = config.swiglu_limit, torch.cat(gate_ups)
    gate, up = gate_up[:, ::2], gate_up[:, 1::2]
    for beyond in (gate > limit, gate < -limit, up > limit, up < -limit):
        assert 0.01 < beyond.double().mean() < 0.5, "each bound shall bite, for some values"
    for _, routing in outputs:
        assert routing is not None and len(routing.expert_ids.unique()) == config.num_experts
    theirs_by_name, ours_by_name = their_gradients(theirs, config), our_gradients(units)
    assert ours_by_name.keys() == theirs_by_name.keys()
    for name, gradient in ours_by_name.items():
        assert worst(gradient, theirs_by_name[name]) < gradient_rtol, name
        assert gradient.isfinite().all() and gradient.abs().max() > 0, name
        if name.endswith("sinks"):
            assert (gradient != 0).all(), name


def watch_experts(model: GptOssForCausalLM, found: list[Tensor]) -> None:
    """Collect what the experts of every layer clamp."""
    for layer in model.model.layers:
        experts = layer.mlp.experts
        original = experts._apply_gate

        def watched(gate_up: Tensor, original: Any = original) -> Tensor:
            found.append(gate_up.detach())
            return original(gate_up)

        experts._apply_gate = watched


def test_bf16_stays_bf16_and_agrees_with_transformers(tmp_path: Path):
    """Norms bit for bit; logits to a few roundings."""
    theirs = make_theirs({"num_hidden_layers": 2}, torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    chunks, units = load_ours(tmp_path, torch.bfloat16)
    kept = {p.name for unit in units for p in unit.parameters if p.role.keeps_fp32}
    ends = {name.split(".")[-1].split("_")[-1] for name in kept}
    assert ends == {"bias", "router", "sinks"}
    batch = make_batch(TINY["vocab_size"])
    layer, hidden = chunks[0].decoder_layers()[0], chunks[0].embed(batch)
    tokens, residual, routing = layer.attention(hidden, batch)
    outputs = list(plain_hidden(chunks, batch))
    assert {x.dtype for x in (tokens, residual, outputs[-1][0])} == {torch.bfloat16}
    assert routing is not None and routing.weights.dtype == torch.float32
    with torch.no_grad():
        norms = theirs.model.layers[0].post_attention_layernorm, theirs.model.norm
        assert torch.equal(norms[0](residual), tokens)
        final = outputs[-1][0]
        assert torch.equal(theirs.lm_head(norms[1](final)), chunks[-1].logits(final))
        # In fp32, so that a token near a tie has the experts that ours, exact there, gives it.
        expected = theirs.float()(batch.tokens.view(-1, LENGTH)).logits.flatten(0, 1)
    difference = (chunks[-1].logits(final).float() - expected).abs().amax(1)
    assert (difference / expected.abs().max()).median() < 0.03
    chunks[-1].loss(final, batch).backward()
    assert all(g.isfinite().all() and g.abs().max() > 0 for g in our_gradients(units).values())


def test_packed_documents_equal_separate_sequences(tmp_path: Path):
    make_theirs({}, torch.float64).save_pretrained(tmp_path)
    chunks, _ = load_ours(tmp_path, torch.float64)
    separate = make_batch(TINY["vocab_size"])
    documents = torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32)
    packed = replace(separate, sequence_length=2 * LENGTH, documents=documents)
    with torch.no_grad():
        expected, actual = (list(plain_hidden(chunks, b))[-1][0] for b in (separate, packed))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip_keeps_every_key_and_byte(variant: str, dtype: torch.dtype, tmp_path: Path):
    source, out = tmp_path / "source", tmp_path / "out"
    model = make_theirs(VARIANTS[variant], dtype)
    model.save_pretrained(source)
    config = model_config_from_hf(read_hf_config(source))
    layout = canonical_tensors(config)
    tensors = HuggingFaceTensors(source, layout, torch.float32)
    assert "0 unexpected, 0 missing" in tensors.account
    export_tensors(tensors, layout, config.to_hf(), out, dtype=dtype)
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value.dtype == after[key].dtype == dtype, key
        assert torch.equal(value.view(torch.uint8), after[key].view(torch.uint8)), key
    # A model of theirs opens the export and is the one that was saved.
    again = GptOssForCausalLM.from_pretrained(out, dtype=dtype)
    same = again.state_dict()
    assert all(torch.equal(value, same[key]) for key, value in model.state_dict().items())
    assert model_config_from_hf(again.config.to_diff_dict()) == config


def test_files_interleave_gate_and_up_and_transpose_every_matrix(tmp_path: Path):
    """Which element of a file is which of ours, written out; the matrices are square."""
    theirs = make_theirs({}, torch.float32)
    theirs.save_pretrained(tmp_path)
    layout = canonical_tensors(model_config_from_hf(read_hf_config(tmp_path)))
    ours = HuggingFaceTensors(tmp_path, layout, torch.float32)
    experts = theirs.model.layers[1].mlp.experts
    shapes = [experts.down_proj.shape[1:], ours["layers.1.experts_gate_proj"].shape[1:]]
    assert shapes == [(48, 48), (48, 48)]
    for expert, row, column in ((0, 0, 1), (3, 7, 2), (7, 46, 47)):
        at = (expert, row, column)
        pairs = {
            "gate_proj": experts.gate_up_proj[expert, column, 2 * row],
            "up_proj": experts.gate_up_proj[expert, column, 2 * row + 1],
            "down_proj": experts.down_proj[expert, column, row],
        }
        for name, value in pairs.items():
            assert ours[f"layers.1.experts_{name}"][at] == value, name
        assert (
            ours["layers.1.experts_gate_bias"][at[:2]] == experts.gate_up_proj_bias[expert, 2 * row]
        )
        up_bias = experts.gate_up_proj_bias[expert, 2 * row + 1]
        assert ours["layers.1.experts_up_bias"][at[:2]] == up_bias


def save_mxfp4(folder: Path) -> dict[str, Tensor]:
    """A folder as released, with random codes and scales; the decoded tensors of theirs."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    model = make_theirs(sizes, torch.bfloat16)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    generator, decoded = torch.Generator().manual_seed(5), dict(tensors)
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(key).shape
        shape = (experts, rows, columns // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(110, 132, shape, generator=generator, dtype=torch.uint8)
        tensors[f"{key}_blocks"], tensors[f"{key}_scales"] = blocks, scales
        decoded[key] = convert_moe_packed_tensors(blocks, scales).contiguous()
        assert decoded[key].shape == (experts, columns, rows)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return decoded


def test_mxfp4_is_read_as_transformers_decodes_it_and_written_as_bf16(tmp_path: Path):
    source, out = tmp_path / "source", tmp_path / "out"
    decoded = save_mxfp4(source)
    fields = {**read_hf_config(source), "quantization_config": GPT_OSS_20B["quantization_config"]}
    config = model_config_from_hf(fields)
    layout = canonical_tensors(config)
    tensors = HuggingFaceTensors(source, layout, torch.float32)
    export_tensors(tensors, layout, config.to_hf(), out, dtype=torch.bfloat16)
    written = load_file(out / "model.safetensors")
    assert written.keys() == decoded.keys()
    for key, value in decoded.items():
        assert written[key].dtype == torch.bfloat16
        assert torch.equal(written[key].view(torch.int16), value.view(torch.int16)), key
    assert "quantization_config" not in read_hf_config(out)


@pytest.mark.parametrize("part", ["scales", "blocks"])
def test_mxfp4_without_one_of_its_parts_is_refused(part: str, tmp_path: Path):
    save_mxfp4(tmp_path)
    path, key = tmp_path / "model.safetensors", f"model.layers.1.mlp.experts.down_proj_{part}"
    tensors = load_file(path)
    del tensors[key]
    save_file(tensors, path, metadata={"format": "pt"})
    layout = canonical_tensors(model_config_from_hf(read_hf_config(tmp_path)))
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.experts\.down_proj"):
        HuggingFaceTensors(tmp_path, layout, torch.float32)


@pytest.mark.parametrize(
    ("fields", "total", "published"),
    [(GPT_OSS_20B, 20_914_757_184, 3.61e9), (GPT_OSS_120B, 116_829_156_672, 5.13e9)],
    ids=["20b", "120b"],
)
def test_released_models_have_their_published_sizes(fields: dict, total: int, published: float):
    config = model_config_from_hf(fields)
    layers, experts = config.num_hidden_layers, config.num_experts
    chunks = build_chunks(
        config, Mesh.single(), (layers // 2,) * 2, attention_backend=AttentionBackend.REFERENCE
    )
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    assert all(isinstance(p, DeclaredParameter) and p.is_meta for p in parameters)
    counts = parameter_counts(config)
    assert sum(p.numel() for p in parameters) == counts.total == total
    attention = 2880 * 4096 + 4096 + 2 * (2880 * 512 + 512) + 4096 * 2880 + 2880 + 64
    of_expert = 2880 * 5760 + 5760 + 2880 * 2880 + 2880
    layer = 2880 + attention + 2880 + 2880 * experts + experts + 4 * of_expert
    assert counts.active == 2 * 201_088 * 2880 + layers * layer + 2880
    # The model card counts the head as active, the embedding not.
    assert counts.active - 201_088 * 2880 == pytest.approx(published, abs=0.005e9)


def test_flops_of_a_layer_count_the_keys_that_its_window_shows():
    config, S = replace(model_config_from_hf(GPT_OSS_20B), sliding_window=128), 1000
    layers, _ = forward_flops(config, S)
    assert layers[0] == layers[2] and layers[1] == layers[23]
    for layer, window in ((0, 128), (1, S)):
        keys = sum(min(query + 1, window) for query in range(S)) / S
        weights = 2 * 2880 * 4096 + 2 * 2880 * 512 + 32 * 2880 + 4 * 3 * 2880 * 2880
        assert layers[layer] == pytest.approx(2 * weights + 4 * 64 * 64 * keys, rel=1e-12)
    short, whole = (replace(config, sliding_window=w) for w in (64, 4096))
    assert forward_flops(short, 64)[0][0] == forward_flops(whole, 64)[0][1]


def test_released_config_reads_and_survives_export():
    config = model_config_from_hf(GPT_OSS_20B)
    assert isinstance(config, GptOssConfig) and config.layer_types == ()
    assert [config.window(n) for n in range(4)] == [128, None, 128, None]
    assert config.sliding_window == 128
    assert config.rope_scaling == Yarn(
        factor=32.0, original_max_position_embeddings=4096, truncate=False
    )
    for written in (config.to_hf(), TheirConfig(**GPT_OSS_20B).to_diff_dict()):
        assert model_config_from_hf(written) == config
    theirs = TheirConfig(**config.to_hf())
    assert theirs.layer_types == GPT_OSS_20B["layer_types"]
    released = TheirConfig(**GPT_OSS_20B).rope_parameters
    assert theirs.rope_parameters == {**released, "type": "yarn"}
    odd = replace(config, num_hidden_layers=3, layer_types=("full_attention",) * 3)
    assert model_config_from_hf(odd.to_hf()) == odd
    assert not any(odd.window(n) for n in range(3))
    plain = replace(config, rope_scaling=None)
    assert model_config_from_hf(plain.to_hf()) == plain
    assert TheirConfig(**plain.to_hf()).rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": None}, "rope_scaling: missing"),
        ({"rope_scaling": {}}, "rope_scaling: missing"),
        ({"rope_scaling": "yarn"}, "rope_scaling = 'yarn': must be an object or null"),
        ({"initial_context_length": 8192}, "initial_context_length = 8192: only 4096"),
        ({"experts_per_token": 2}, "num_experts_per_tok, experts_per_token: one value needed"),
        ({"attention_bias": False}, "attention_bias = False: only True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': only silu"),
        ({"sliding_window": 0}, "model.sliding_window = 0: must be at least 1"),
        ({"sliding_window": None}, "sliding_window: missing"),
        ({"layer_types": ["full_attention"]}, "model.layer_types = ('full_attention',)"),
        ({"layer_types": ["chunked_attention"] * 24}, "model.layer_types"),
        ({"layer_types": "sliding"}, "model.layer_types is 'sliding', of type str"),
        ({"swiglu_limit": 0.0}, "model.swiglu_limit = 0.0: must be positive"),
        ({"num_local_experts": 3}, "model.num_experts_per_tok = 4: must be at most"),
        ({"num_key_value_heads": 7}, "model.num_attention_heads = 64: must be a multiple"),
        ({"head_dim": 63}, "model.head_dim = 63: must be even"),
        ({"norm_topk_prob": True}, "norm_topk_prob = True: unknown field"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        model_config_from_hf({**GPT_OSS_20B, **changes})

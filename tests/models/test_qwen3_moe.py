"""Qwen3-MoE against transformers' own model: logits, loss and every gradient.

The oracle is `transformers.Qwen3MoeForCausalLM`, with weights that went through its own
`save_pretrained` and our reader.
"""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from pith_engine.balance import BalanceConfig
from pith_engine.contract import Batch
from pith_engine.mesh import Mesh
from pith_engine.overlap import Recompute
from pith_engine.pipeline import Pipeline
from pith_engine.plain import plain_hidden
from pith_models.build import model_config_from_hf
from pith_models.hf import read_hf_config
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
from transformers import Qwen3MoeConfig as TheirConfig
from transformers import Qwen3MoeForCausalLM

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rope_theta": 10_000.0,
    "norm_topk_prob": True,
}
VARIANTS: dict[str, dict[str, object]] = {
    "normalised": {},
    "not-normalised": {"norm_topk_prob": False, "num_experts_per_tok": 3},
    "head-dim": {"head_dim": 32, "num_key_value_heads": 1},
    "mlp-only": {"mlp_only_layers": [1]},
    "tied": {"tie_word_embeddings": True},
    "sparse-step": {"decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3]},
}


def make_theirs(fields: dict[str, object], dtype: torch.dtype) -> Qwen3MoeForCausalLM:
    """A model with weights large enough that a wrong detail shows, norms off 1."""
    config = TheirConfig(
        **{**TINY, **fields}, attn_implementation="eager", experts_implementation="eager"
    )
    model = Qwen3MoeForCausalLM(config).to(dtype)
    randomise(model)
    return model.eval()


@pytest.mark.parametrize(
    ("dtype", "logits_atol", "gradient_rtol"),
    [(torch.float64, 1e-10, 1e-10), (torch.float32, 1e-4, 1e-4)],
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
    batch = make_batch(TINY["vocab_size"])
    with Promote() if dtype is torch.float64 else nullcontext():
        theirs = make_theirs(VARIANTS[variant], dtype)
        expected, expected_loss = run_theirs(theirs, batch)
    theirs.save_pretrained(tmp_path)
    chunks, units = load_ours(tmp_path, dtype)

    hidden = [hidden for hidden, _ in plain_hidden(chunks, batch)][-1]
    logits = chunks[-1].logits(hidden)
    loss = chunks[-1].loss(hidden, batch)
    loss.backward()

    assert (logits - expected).abs().max() < logits_atol
    assert expected.abs().max() > 1, "logits so small that the tolerance would prove nothing"
    assert loss.item() == pytest.approx(expected_loss.item(), rel=gradient_rtol)
    actual = our_gradients(units)
    gradients = their_gradients(theirs, model_config_from_hf(read_hf_config(tmp_path)))
    assert actual.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert worst(actual[name], gradient) < gradient_rtol, name


def test_packed_documents_do_not_see_each_other(tmp_path: Path):
    """Two documents packed in one sequence give the logits of two sequences, whatever the first."""
    make_theirs({}, torch.float64).save_pretrained(tmp_path)
    chunks, _ = load_ours(tmp_path, torch.float64)
    separate = make_batch(TINY["vocab_size"])
    tokens = separate.tokens.clone()
    tokens[:LENGTH] = tokens[:LENGTH].flip(0)
    packed = Batch(
        tokens=tokens,
        targets=separate.targets,
        positions=separate.positions,
        sequence_length=2 * LENGTH,
        documents=torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32),
    )
    with torch.no_grad():
        expected, actual = (list(plain_hidden(chunks, b))[-1][0] for b in (separate, packed))
    torch.testing.assert_close(actual[LENGTH:], expected[LENGTH:], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(actual[:LENGTH], expected[:LENGTH], atol=1e-3)


@pytest.mark.parametrize(
    ("fields", "dtype", "same_bits"),
    [
        ({"mlp_only_layers": [0, 1, 2]}, torch.float64, True),
        ({}, torch.bfloat16, True),
        # Sizes of expert groups change, and with them how a CPU's product adds.
        ({}, torch.float64, False),
    ],
    ids=["dense", "bf16", "experts"],
)
def test_a_document_has_the_same_logits_whatever_stands_before_it(
    tmp_path: Path, fields: dict[str, object], dtype: torch.dtype, same_bits: bool
):
    make_theirs(fields, torch.float64).save_pretrained(tmp_path)
    chunks, _ = load_ours(tmp_path, dtype)
    batch, first = make_batch(TINY["vocab_size"]), 13
    documents = torch.tensor([0, first, LENGTH, 2 * LENGTH], dtype=torch.int32)
    other = batch.tokens.clone()
    other[:first] = (other[:first] + 1) % TINY["vocab_size"]
    packed = [
        replace(batch, tokens=tokens, documents=documents) for tokens in (batch.tokens, other)
    ]
    with torch.no_grad():
        one, two = (chunks[-1].logits(list(plain_hidden(chunks, b))[-1][0]) for b in packed)
    assert not torch.allclose(one[:first], two[:first], atol=1e-2)
    if same_bits:
        assert torch.equal(one[first:], two[first:])
    else:
        torch.testing.assert_close(one[first:], two[first:], rtol=1e-12, atol=1e-12)


def pipeline_step(folder: Path, dtype: torch.dtype, recompute: Recompute) -> list[Tensor]:
    """Every gradient of a step of two micro-batches, all experts in ties of two; and its losses."""
    chunks, units = load_ours(folder, dtype)
    for name, parameter in (pair for chunk in chunks for pair in chunk.named_parameters()):
        if name.endswith("router"):
            parameter.detach()[1::2] = parameter.detach()[::2]
    pipeline = Pipeline(
        chunks,
        Mesh.single(),
        hidden_size=TINY["hidden_size"],
        dtype=dtype,
        device=torch.device("cpu"),
        balance=BalanceConfig(),
        recompute=recompute,
    )
    losses = pipeline.train_step([make_batch(TINY["vocab_size"])] * 2, 238)
    for unit in units:
        unit.reduce()
    gradients = [parameter.grad for unit in units for parameter in unit.parameters]
    return [*gradients, torch.tensor([losses.loss, losses.balance, losses.max_load])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_recomputation_changes_no_bit_with_tied_routers_and_a_dense_layer(
    dtype: torch.dtype, tmp_path: Path
):
    make_theirs({"mlp_only_layers": [1], "num_experts_per_tok": 3}, dtype).save_pretrained(tmp_path)
    expected, *others = (pipeline_step(tmp_path, dtype, r) for r in get_args(Recompute))
    assert all(gradient.abs().max() > 0 for gradient in expected)
    for found in others:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_router_takes_the_experts_that_it_is_handed(tmp_path: Path):
    make_theirs({}, torch.float64).save_pretrained(tmp_path)
    chunks, _ = load_ours(tmp_path, torch.float64)
    batch, layer = make_batch(TINY["vocab_size"]), chunks[0].decoder_layers()[0]
    hidden = chunks[0].embed(batch)
    first = layer.attention(hidden, batch)[2]
    others = (first.chosen + 1) % TINY["num_experts"]
    routing = layer.attention(hidden, batch, others)[2]
    assert torch.equal(routing.chosen, others) and torch.equal(routing.expert_ids, others)
    picked = first.scores.gather(1, others.long())
    assert torch.equal(routing.weights, picked / picked.sum(1, keepdim=True))

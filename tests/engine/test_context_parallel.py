"""Sharded attention against torch's SDPA with a dense mask, and where bytes go."""

from datetime import timedelta
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from pith_engine.context_parallel import context_attention, latent_attention, shard_batch
from pith_engine.contract import Batch
from pith_engine.mesh import Mesh, MeshConfig
from pith_engine.runtime import connect_mesh, exchange
from pith_ops.attention import AttentionBackend, merge_attention
from torch.nn.functional import scaled_dot_product_attention

REFERENCE, FLASH = AttentionBackend.REFERENCE, AttentionBackend.FLASH
TIMEOUT = timedelta(seconds=30)
CPU = torch.device("cpu")
SINKS = (0.3, -2.0, 1.7, 0.0)

# Two sequences of 48 tokens; blocks of 12 (cp2) or 6 (cp4). Documents of 1, 5, 13 and other odd
# lengths straddle blocks, halves of ranks and both; the last list has one that ends a sequence.
NUM_SEQUENCES, LENGTH = 2, 48
DOCUMENTS = (
    None,
    [0, 1, 6, 19, 24, 25, 48, 96],
    [0, 13, 26, 39, 44, 49, 62, 63, 76, 89, 96],
    [0, 5, 5, 43, 61, 96],
    list(range(97)),
)
WINDOWS = (None, 0, 1, 4, 7, 20, 1000)


def whole_batch(documents=None, num_sequences=NUM_SEQUENCES, length=LENGTH):
    tokens = torch.arange(num_sequences * length)
    return Batch(
        tokens=tokens,
        targets=tokens + 1,
        positions=tokens % length,
        sequence_length=length,
        documents=None if documents is None else torch.tensor(documents, dtype=torch.int32),
    )


def dense(query, key, value, scale, documents, window, sinks, *, sequences=NUM_SEQUENCES):
    """torch's own attention in float64: a mask over all pairs, a sink as a key without a value."""
    q, k, v = (
        x.double().unflatten(0, (sequences, -1)).transpose(1, 2) for x in (query, key, value)
    )
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    length = q.shape[2]
    places = torch.arange(length)
    behind = places[:, None] - places
    seen = ((behind >= 0) & (behind < (window or length))).expand(sequences, 1, -1, -1)
    if documents is not None:
        sizes = torch.tensor([b - a for a, b in pairwise(documents)])
        document = torch.arange(len(sizes)).repeat_interleave(sizes).view(sequences, 1, -1)
        seen = seen & (document[..., :, None] == document[..., None, :])
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        shape = (sequences, q.shape[1], length)
        bias = sinks.double()[None, :, None, None].expand(*shape, 1)
        mask = torch.cat([mask.expand(*shape, length), bias], -1)
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.transpose(1, 2).flatten(0, 1)


def draw(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def relative(got, wanted):
    """Of a result that is wholly finite. A lone key has gradient 0 up to rounding, hence the 1."""
    assert got.isfinite().all()
    return (got.double() - wanted.double()).norm().item() / max(1.0, wanted.double().norm().item())


def local(tensor, batch, cp):
    """This rank's rows of a tensor over all tokens of the whole batch."""
    return tensor.detach()[shard_batch(batch, cp).tokens]


def ring_cases(mesh_config, cases, dtype):
    """Largest relative difference from dense attention, over outputs and gradients of all cases."""
    mesh = Mesh.create(mesh_config, TIMEOUT)
    connect_mesh(mesh, CPU)
    cp, worst = mesh.cp, 0.0
    tokens = NUM_SEQUENCES * LENGTH
    for documents, window, sinks, backend in cases:
        batch = whole_batch(documents)
        inputs = [draw(tokens, heads, 6, seed=heads).to(dtype) for heads in (4, 2)]
        inputs.append(draw(tokens, 2, 6, seed=9).to(dtype))
        inputs = [x.requires_grad_() for x in inputs]
        grad = draw(tokens, 4, 6, seed=1).to(dtype)
        sink = None if sinks is None else torch.tensor(sinks, dtype=dtype).requires_grad_()
        everything = [*inputs, *([] if sink is None else [sink])]
        wanted = dense(*inputs, 0.4, documents, window, sink)
        wanted_grads = torch.autograd.grad(wanted, everything, grad.double())

        shards = [local(x, batch, cp).requires_grad_() for x in inputs]
        local_sink = None if sink is None else sink.detach().requires_grad_()
        out = context_attention(
            *shards,
            shard_batch(batch, cp),
            cp,
            scale=0.4,
            window=window,
            sinks=local_sink,
            backend=backend,
        )
        assert out.dtype == dtype
        leaves = [*shards, *([] if local_sink is None else [local_sink])]
        grads = torch.autograd.grad(out, leaves, local(grad, batch, cp))
        worst = max(worst, relative(out, local(wanted, batch, cp)))
        for got, want, leaf in zip(grads, wanted_grads, leaves, strict=True):
            assert got.dtype == leaf.dtype
            if leaf is local_sink:
                got = got.clone()
                torch.distributed.all_reduce(got, group=cp.group)
                worst = max(worst, relative(got, want))
            else:
                worst = max(worst, relative(got, local(want, batch, cp)))
    return worst


CASES = [(documents, window, None, FLASH) for documents in DOCUMENTS for window in WINDOWS]
SOME_CASES = [
    (documents, window, SINKS, backend)
    for documents in (None, DOCUMENTS[2], DOCUMENTS[4])
    for window in (None, 7, 20)
    for backend in (FLASH, REFERENCE)
]


@pytest.mark.core
@pytest.mark.parametrize("config", [MeshConfig(dp=2, cp=2), MeshConfig(cp=4)])
@pytest.mark.parametrize("cases", [CASES, SOME_CASES])
def test_sharded_attention_equals_dense_attention(gloo_pool, config, cases):
    worst = gloo_pool.run(ring_cases, config, cases, torch.float64)
    assert max(worst) < 1e-12


@pytest.mark.core
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
def test_sharded_attention_in_other_dtypes(gloo_pool, dtype, limit):
    assert max(gloo_pool.run(ring_cases, MeshConfig(cp=4), SOME_CASES, dtype)) < limit


def latent_cases(mesh_config, cases):
    """As `ring_cases`, for keys and values that are expanded from a latent."""
    mesh = Mesh.create(mesh_config, TIMEOUT)
    cp, worst = mesh.cp, 0.0
    tokens, heads, nope, rotary, value, rank = NUM_SEQUENCES * LENGTH, 4, 5, 2, 3, 8
    for documents, backend in cases:
        batch = whole_batch(documents)
        query = draw(tokens, heads, nope + rotary, seed=1)
        shapes = (tokens, rank), (tokens, rotary), (heads * (nope + value), rank)
        inputs = [query, *(draw(*shape, seed=2 + i) for i, shape in enumerate(shapes))]
        inputs = [x.requires_grad_() for x in inputs]
        query, latent, rotary_key, kv_b = inputs
        grad = draw(tokens, heads, value, seed=7)
        expanded = torch.einsum("tr,hdr->thd", latent, kv_b.view(heads, nope + value, rank))
        shared = rotary_key[:, None].expand(-1, heads, -1)
        key = torch.cat([expanded[..., :nope], shared], -1)
        wanted = dense(query, key, expanded[..., nope:], 0.4, documents, None, None)
        wanted_grads = torch.autograd.grad(wanted, inputs, grad)

        shards = [local(x, batch, cp).requires_grad_() for x in inputs[:3]]
        weight = kv_b.detach().requires_grad_()
        out = latent_attention(
            *shards, weight, shard_batch(batch, cp), cp, scale=0.4, backend=backend
        )
        *grads, dweight = torch.autograd.grad(out, [*shards, weight], local(grad, batch, cp))
        if cp.size > 1:
            torch.distributed.all_reduce(dweight, group=cp.group)
        worst = max(
            worst, relative(out, local(wanted, batch, cp)), relative(dweight, wanted_grads[3])
        )
        for got, want in zip(grads, wanted_grads, strict=False):
            worst = max(worst, relative(got, local(want, batch, cp)))
    return worst


@pytest.mark.core
@pytest.mark.parametrize("config", [MeshConfig(dp=4), MeshConfig(dp=2, cp=2), MeshConfig(cp=4)])
def test_latent_attention_equals_dense_attention_over_expanded_heads(gloo_pool, config):
    cases = [(documents, REFERENCE) for documents in DOCUMENTS]
    assert max(gloo_pool.run(latent_cases, config, cases)) < 1e-12


def travelled_bytes(backward):
    """Bytes that this rank sends in one latent attention of cp4, and in its backward."""
    cp = Mesh.create(MeshConfig(cp=4), TIMEOUT).cp
    batch = shard_batch(whole_batch(), cp)
    rows = batch.tokens.numel()
    sent = []

    def counted(sends, receives, axis):
        sent.extend(x.nbytes for x, _ in sends)
        return exchange(sends, receives, axis)

    inputs = (draw(rows, 4, 7, seed=0), draw(rows, 8, seed=1), draw(rows, 2, seed=2))
    inputs = [x.bfloat16().requires_grad_() for x in (*inputs, draw(32, 8, seed=3))]
    with patch("pith_engine.context_parallel.exchange", counted):
        out = latent_attention(*inputs, batch, cp, scale=0.4, backend=REFERENCE)
        if backward:
            sent.clear()
            out.backward(torch.ones_like(out))
    return sum(sent), rows


@pytest.mark.core
def test_only_the_latent_and_the_rotary_key_travel(gloo_pool):
    for sent, rows in gloo_pool.run(travelled_bytes, False):
        assert sent == 3 * rows * (8 + 2) * 2  # three hops in bf16
    for sent, rows in gloo_pool.run(travelled_bytes, True):
        assert sent == rows * (8 + 2) * (3 * 2 + 4 * 4)  # and four hops of gradients in fp32


def window_bytes():
    """Bytes that each rank of cp4 sends for a window of 4: three keys and values a block."""
    cp = Mesh.create(MeshConfig(cp=4), TIMEOUT).cp
    batch = shard_batch(whole_batch(), cp)
    sent = []

    def counted(sends, receives, axis):
        sent.append([x.nbytes for x, _ in sends])
        return exchange(sends, receives, axis)

    inputs = [draw(batch.tokens.numel(), 2, 6, seed=i).requires_grad_() for i in range(3)]
    with patch("pith_engine.context_parallel.exchange", counted):
        context_attention(*inputs, batch, cp, window=4, backend=FLASH).sum().backward()
    return sent


@pytest.mark.core
def test_windows_fetch_only_the_keys_before_a_block(gloo_pool):
    piece = NUM_SEQUENCES * 3 * 2 * 12 * 8
    forward, backward = zip(*gloo_pool.run(window_bytes), strict=True)
    # Blocks 0 .. 7 on ranks 0 1 2 3 3 2 1 0: only 3 to 4 stays at home, nobody follows 7.
    assert forward == ([piece], [piece] * 2, [piece] * 2, [piece])
    assert backward == ([piece], [piece] * 2, [piece] * 2, [piece])


def summed_dtypes():
    """On a rank of cp4 in bf16: what the ring merges into, and what halos' gradients travel in."""
    cp = Mesh.create(MeshConfig(cp=4), TIMEOUT).cp
    batch = shard_batch(whole_batch(), cp)
    merged, sent = [], []

    def merge(out, lse, part, part_lse):
        merged.append(out.dtype)
        return merge_attention(out, lse, part, part_lse)

    def recorded(sends, receives, axis):
        sent.extend(x.dtype for x, _ in sends)
        return exchange(sends, receives, axis)

    inputs = [draw(batch.tokens.numel(), 2, 8, seed=i).bfloat16() for i in range(3)]
    inputs = [x.requires_grad_() for x in inputs]
    module = "pith_engine.context_parallel"
    with patch(f"{module}.merge_attention", merge), patch(f"{module}.exchange", recorded):
        context_attention(*inputs, batch, cp, backend=FLASH)
        out = context_attention(*inputs, batch, cp, window=4, backend=FLASH)
        sent.clear()
        out.backward(torch.ones_like(out))
    return merged, sent


@pytest.mark.core
def test_sums_over_ranks_are_rounded_once(gloo_pool):
    """No tolerance of bf16 would tell."""
    for merged, sent in gloo_pool.run(summed_dtypes):
        assert merged == [torch.float32] * 3
        assert sent and set(sent) == {torch.float32}


def repeated(backend):
    """Outputs and gradients of two runs."""
    cp = Mesh.create(MeshConfig(cp=4), TIMEOUT).cp
    batch = shard_batch(whole_batch(DOCUMENTS[2]), cp)
    runs = []
    for _ in range(2):
        inputs = [draw(batch.tokens.numel(), 2, 6, seed=i).float() for i in range(3)]
        inputs = [x.requires_grad_() for x in inputs]
        out = context_attention(*inputs, batch, cp, backend=backend)
        runs.append([out, *torch.autograd.grad(out, inputs, out.detach())])
    return all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.core
def test_two_runs_agree_bit_for_bit(gloo_pool):
    assert all(gloo_pool.run(repeated, FLASH))


def test_zigzag_blocks_with_positions_and_targets_made_before():
    batch = whole_batch([0, 5, 16, 32], num_sequences=2, length=16)
    seen = []
    for rank in range(2):
        shard = shard_batch(batch, Mesh.plan(MeshConfig(cp=2), rank).cp)
        assert (shard.sequence_length, shard.num_sequences) == (8, 2)
        assert shard.documents is batch.documents
        assert torch.equal(shard.targets, shard.tokens + 1)
        assert torch.equal(shard.positions, shard.tokens % 16)
        seen.append(shard.tokens.tolist())
    assert seen[0] == [0, 1, 2, 3, 12, 13, 14, 15, 16, 17, 18, 19, 28, 29, 30, 31]
    assert sorted(seen[0] + seen[1]) == list(range(32))
    assert shard_batch(batch, Mesh.single().cp) is batch
    with pytest.raises(ValueError, match="sequence length 16 is no multiple of 2 x cp = 6"):
        shard_batch(batch, Mesh.plan(MeshConfig(cp=3), 0).cp)


def refusals():
    """What bad arguments raise on every rank, before anything is sent."""
    cp = Mesh.create(MeshConfig(cp=4), TIMEOUT).cp
    messages = []
    for documents, window, value_dim in (([0, 90], None, 6), (None, -3, 6), (None, None, 5)):
        batch = shard_batch(whole_batch(documents), cp)
        inputs = [draw(batch.tokens.numel(), 2, d, seed=0) for d in (6, 6, value_dim)]
        try:
            context_attention(*inputs, batch, cp, window=window, backend=FLASH)
        except ValueError as error:
            messages.append(str(error))
    return messages


@pytest.mark.core
def test_bad_input_is_refused(gloo_pool):
    for documents, window, value_dim in gloo_pool.run(refusals):
        assert "documents [0, 90] must ascend from 0 to 96" in documents
        assert "window -3" in window
        assert "value_dim 5 differs from head_dim 6" in value_dim


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [REFERENCE, AttentionBackend.CUDNN])
def test_gpu_latent_attention_equals_dense_attention(backend):
    tokens, heads, nope, rotary, value, rank = 256, 4, 128, 64, 128, 96
    shapes = [(tokens, heads, nope + rotary), (tokens, rank), (tokens, rotary)]
    shapes.append((heads * (nope + value), rank))
    inputs = [0.3 * draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    inputs = [x.bfloat16().requires_grad_() for x in inputs]
    grad = draw(tokens, heads, value, seed=7).bfloat16()
    query, latent, rotary_key, kv_b = (x.double() for x in inputs)
    expanded = (latent @ kv_b.t()).unflatten(1, (heads, -1))
    key = torch.cat([expanded[..., :nope], rotary_key[:, None].expand(-1, heads, -1)], -1)
    wanted = dense(query, key, expanded[..., nope:], 0.1, None, None, None, sequences=1)
    wanted_grads = torch.autograd.grad(wanted, inputs, grad.double())
    shards = [x.detach().cuda().requires_grad_() for x in inputs]
    batch = whole_batch(num_sequences=1, length=tokens)
    out = latent_attention(*shards, batch, Mesh.single().cp, scale=0.1, backend=backend)
    grads = torch.autograd.grad(out, shards, grad.cuda())
    assert relative(out.cpu(), wanted) < 1e-2
    for got, want in zip(grads, wanted_grads, strict=True):
        assert relative(got.cpu(), want) < 2e-2

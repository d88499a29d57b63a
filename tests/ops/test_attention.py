"""Attention: against a float64 loop over single queries, and against torch's own SDPA."""

import math
from itertools import pairwise

import pytest
import torch
from pith_ops.attention import (
    AttentionBackend,
    Visibility,
    apply_sinks,
    attention,
    attention_backward,
    attention_forward,
    attention_violations,
    choose_attention_backend,
    merge_attention,
    sequence_offsets,
    sinks_gradient,
)
from pith_ops.device import DeviceColumn
from torch.nn.functional import scaled_dot_product_attention

REFERENCE, FLASH, CUDNN = (
    AttentionBackend.REFERENCE,
    AttentionBackend.FLASH,
    AttentionBackend.CUDNN,
)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CPU_BACKENDS = (REFERENCE, FLASH)

# B, S, K, Hq, Hkv, D: odd lengths, one token, more keys than queries, one and several heads a group
SHAPES = [
    (2, 7, 7, 4, 4, 16),
    (1, 33, 33, 6, 2, 7),
    (3, 1, 1, 2, 1, 5),
    (2, 2, 4, 4, 2, 8),
    (1, 5, 70, 3, 1, 9),
    (1, 70, 70, 2, 2, 8),
]
# Relative to the norm of the result. bf16 rounds to 2^-9 relative, a wrong factor is far beyond.
TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1e-2}


def relative(got, wanted):
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


def operands(shape, dtype, *, value_dim=None, device="cpu", seed=0):
    batch, queries, keys, heads, kv_heads, dim = shape
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*size):
        values = torch.randn(size, generator=generator, dtype=torch.float64, device=device)
        return values.to(dtype).requires_grad_()

    value_dim = value_dim or dim
    return (
        draw(batch, queries, heads, dim),
        draw(batch, keys, kv_heads, dim),
        draw(batch, keys, kv_heads, value_dim),
        draw(batch, queries, heads, value_dim).detach(),
    )


def seen(query, documents=None, window=None):
    """Causal visibility of a packed batch."""
    if documents is not None:
        documents = torch.as_tensor(documents, dtype=torch.int32, device=query.device)
        documents = (sequence_offsets(documents, *query.shape[:2]),) * 2
    return Visibility(offsets=documents, window=window)


def loop_attention(query, key, value, scale, document_of=None, window=None, sinks=None):
    """One query at a time, over the list of the keys it sees, in float64."""
    query, key, value = query.double(), key.double(), value.double()
    batch, queries, heads, _ = query.shape
    keys, group = key.shape[1], heads // key.shape[2]
    out = torch.zeros(batch, queries, heads, value.shape[3], dtype=torch.float64)
    lse = torch.full((batch, heads, queries), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for i in range(queries):
            last = i + keys - queries
            seen = [j for j in range(keys) if last - (window or keys) < j <= last]
            if document_of is not None:
                start = b * queries
                seen = [j for j in seen if document_of[start + j] == document_of[start + i]]
            for h in range(heads if seen else 0):
                scores = scale * key[b, seen, h // group] @ query[b, i, h]
                weights = scores.exp()
                total = weights.sum() if sinks is None else weights.sum() + sinks[h].exp()
                lse[b, h, i] = total.log()
                out[b, i, h] = (weights / total) @ value[b, seen, h // group]
    return out, lse


def check_against_loop(
    backend, shape, dtype, *, value_dim=None, scale=None, documents=None, window=None, sinks=None
):
    *inputs, grad = operands(shape, dtype, value_dim=value_dim)
    if sinks is not None:
        inputs.append(torch.tensor(sinks, dtype=torch.float64).requires_grad_())
    document_of = None
    if documents is not None:
        sizes = [b - a for a, b in pairwise(documents)]
        document_of = [index for index, size in enumerate(sizes) for _ in range(size)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    wanted_out, wanted_lse = loop_attention(
        *wide[:3], scale or shape[-1] ** -0.5, document_of, window, *wide[3:]
    )
    wanted = torch.autograd.grad(wanted_out, wide, grad.double())
    settings = {"visibility": seen(inputs[0], documents, window), "backend": backend}
    if sinks is not None:
        settings["sinks"] = inputs[3]
    out, lse = attention(*inputs[:3], scale=scale, **settings)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = TOLERANCES[dtype]
    assert relative(out, wanted_out) < tolerance
    assert torch.allclose(lse.double(), wanted_lse, rtol=0, atol=min(tolerance, 1e-3))
    for i, (got, want) in enumerate(
        zip(torch.autograd.grad(out, inputs, grad), wanted, strict=True)
    ):
        assert got.dtype == inputs[i].dtype
        # A lone key takes all weight whatever the query: the gradient is 0 up to rounding.
        assert (got.double() - want).norm() <= tolerance * max(want.norm().item(), 1.0)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_values_lse_and_gradients_equal_a_float64_loop(backend, shape, dtype):
    check_against_loop(backend, shape, dtype)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_scale_is_used(backend):
    check_against_loop(backend, (2, 9, 9, 2, 1, 8), torch.float64, scale=0.77)


def test_values_of_another_head_dim():
    check_against_loop(REFERENCE, (2, 9, 9, 4, 2, 12), torch.float64, value_dim=5)


@pytest.mark.parametrize("documents", [[0, 3, 3, 11, 18], [0, 18], [0, 1, 2, 17, 18]])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_attention_crosses_neither_documents_nor_sequences(backend, documents):
    check_against_loop(backend, (2, 9, 9, 4, 2, 6), torch.float64, documents=documents)


@pytest.mark.parametrize("documents", [None, [0, 3, 3, 11, 18]])
@pytest.mark.parametrize("window", [1, 4, 9, 100])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_windows_and_sinks(backend, window, documents):
    shape, sinks = (2, 9, 9, 4, 2, 6), (0.3, -2.0, 1.7, 0.0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        check_against_loop(backend, shape, dtype, documents=documents, window=window)
        check_against_loop(backend, shape, dtype, documents=documents, window=window, sinks=sinks)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_windows_over_more_keys_than_queries_align_at_the_bottom_right(backend):
    check_against_loop(backend, (2, 5, 11, 4, 2, 6), torch.float64, window=4, sinks=(1, 2, 3, -4))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_window_equals_torch_sdpa_with_its_mask(backend):
    query, key, value, _ = operands((1, 256, 256, 2, 2, 8), torch.float64)
    places = torch.arange(256)
    behind = places[:, None] - places
    heads_first = [x.transpose(1, 2) for x in (query, key, value)]
    mask = (behind >= 0) & (behind < 128)
    wanted = scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(1, 2)
    out, _ = attention(query, key, value, visibility=Visibility(window=128), backend=backend)
    assert relative(out, wanted) < 1e-13
    full, _ = attention(query, key, value, backend=backend)
    assert (out - full).abs()[0, 128:].amax((1, 2)).min() > 0


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_keys_keep_the_sigmoid_of_lse_minus_sink(backend):
    query, key, value, _ = operands((1, 7, 7, 4, 2, 8), torch.float64)
    ones, sinks = torch.ones_like(value), torch.tensor([0.5, -1.0, 4.0, 0.0], dtype=torch.float64)
    _, bare = attention(query, key, ones, backend=backend)
    out, lse = attention(query, key, ones, sinks=sinks, backend=backend)
    share = (bare - sinks[:, None]).sigmoid().transpose(1, 2)[..., None]
    assert torch.allclose(out, share.expand_as(out), rtol=0, atol=1e-14)
    assert torch.allclose(lse, torch.logaddexp(bare, sinks[:, None]), rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match=r"sinks \[2\] must hold one logit for each of the 4"):
        attention(query, key, ones, sinks=sinks[:2], backend=backend)


# Queries and keys of one sequence, offsets of both; some queries or keys meet nobody.
RECTANGLES = [
    (6, 9, [0, 0, 4, 6], [0, 5, 9, 9]),
    (6, 4, [0, 6, 6], [0, 0, 4]),
    (5, 9, [0, 0, 2, 5], [0, 4, 6, 9]),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "query_offsets", "key_offsets"), RECTANGLES)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_segments_with_queries_that_see_nothing(
    backend, queries, keys, query_offsets, key_offsets, causal
):
    *inputs, grad = (x.detach() for x in operands((1, queries, keys, 4, 2, 6), torch.float64))
    offsets = [torch.tensor(o, dtype=torch.int32) for o in (query_offsets, key_offsets)]
    settings = {
        "scale": 0.4,
        "visibility": Visibility(causal=causal, offsets=tuple(offsets)),
        "backend": backend,
    }
    out, lse = attention_forward(*inputs, **settings)
    grads = attention_backward(grad, *inputs, out, lse, **settings)
    wanted_out = torch.zeros_like(out)
    wanted = [torch.zeros_like(x) for x in inputs]
    for (q0, q1), (k0, k1) in zip(pairwise(query_offsets), pairwise(key_offsets), strict=True):
        seen = min(q1 - q0, k1 - k0) if causal else q1 - q0
        if k1 == k0 or q1 == q0:
            assert (lse[:, :, q0:q1] == -math.inf).all()
            continue
        parts = [
            x.clone().requires_grad_()
            for x in (inputs[0][:, q0:q1], *(x[:, k0:k1] for x in inputs[1:]))
        ]
        heads_first = [x.transpose(1, 2) for x in parts]
        mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        mask = mask.tril(k1 - k0 - (q1 - q0)) if causal else mask
        part = scaled_dot_product_attention(
            *heads_first, attn_mask=mask, scale=0.4, enable_gqa=True
        ).transpose(1, 2)
        shown = part[:, -seen:]
        wanted_out[:, q1 - seen : q1] = shown
        found = torch.autograd.grad(shown, parts, grad[:, q1 - seen : q1])
        wanted[0][:, q0:q1] = found[0].nan_to_num()
        wanted[1][:, k0:k1], wanted[2][:, k0:k1] = found[1].nan_to_num(), found[2].nan_to_num()
        assert (lse[:, :, q0 : q1 - seen] == -math.inf).all()
    assert torch.allclose(out, wanted_out, rtol=0, atol=1e-13)
    for got, want in zip(grads, wanted, strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-13)
    # Of other keys, too, these queries see some: here as much as to halve what they give these.
    blind = lse == -math.inf
    other = torch.where(blind, 0.0, lse + math.log(2.0))
    grads = attention_backward(grad, *inputs, torch.zeros_like(out), other, **settings)
    bare = attention_backward(grad, *inputs, torch.zeros_like(out), lse, **settings)
    for got, want in zip(grads, bare, strict=True):
        assert torch.allclose(got, want / 2, rtol=0, atol=1e-13)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_backwards_over_parts_of_the_keys_add_up(backend):
    """With out and LSE of all keys and of sinks, every part yields its share."""
    *inputs, grad = operands((2, 6, 6, 4, 2, 4), torch.float64)
    sinks = torch.tensor([0.2, -1.0, 2.0, 0.7], dtype=torch.float64).requires_grad_()
    whole, _ = attention(*inputs, scale=0.3, sinks=sinks, backend=REFERENCE)
    wanted = torch.autograd.grad(whole, (*inputs, sinks), grad)
    query, key, value = (x.detach() for x in inputs)
    settings = {"scale": 0.3, "backend": backend}
    # The last four queries see keys 0 and 1 in full; every query sees its own keys causally.
    near, far = Visibility(causal=True), Visibility(causal=False)
    tail, old = (query[:, 2:], key[:, :2], value[:, :2]), (query, key, value)
    out, lse = torch.zeros_like(query), torch.zeros(2, 4, 6, dtype=torch.float64)
    out[:, :2], lse[..., :2] = attention_forward(
        *(x[:, :2] for x in old), visibility=near, **settings
    )
    parts = [
        attention_forward(*(x[:, 2:] for x in old), visibility=near, **settings),
        attention_forward(*tail, visibility=far, **settings),
    ]
    # Zero and -inf are the result over no keys at all, also where both have seen none.
    lse[..., 2:] = -math.inf
    merge_attention(out[:, 2:], lse[..., 2:], torch.zeros_like(parts[0][0]), lse[..., 2:].clone())
    assert (out[:, 2:] == 0).all() and (lse[..., 2:] == -math.inf).all()
    for part, part_lse in parts:
        merge_attention(out[:, 2:], lse[..., 2:], part, part_lse)
    out, lse = apply_sinks(out, lse, sinks.detach())
    dq, dk, dv = (torch.zeros_like(x) for x in old)
    for rows, keys, visibility in (
        (slice(0, 2), slice(0, 2), near),
        (slice(2, 6), slice(2, 6), near),
        (slice(2, 6), slice(0, 2), far),
    ):
        operands_ = grad[:, rows], query[:, rows], key[:, keys], value[:, keys]
        found = attention_backward(
            *operands_, out[:, rows], lse[..., rows], visibility=visibility, **settings
        )
        dq[:, rows] += found[0]
        dk[:, keys] += found[1]
        dv[:, keys] += found[2]
    dsinks = sinks_gradient(grad, out, lse, sinks.detach())
    for got, want in zip((dq, dk, dv, dsinks), wanted, strict=True):
        assert relative(got, want) < 1e-13


def test_windows_that_make_no_sense_are_refused():
    for window in (-1, 0):
        with pytest.raises(ValueError, match=f"window {window}, causal True: a window is at le"):
            Visibility(window=window)
    with pytest.raises(ValueError, match="window 3, causal False"):
        Visibility(causal=False, window=3)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_equals_torch_sdpa(backend):
    *inputs, grad = operands((2, 650, 650, 6, 3, 16), torch.float32)
    heads_first = [x.transpose(1, 2) for x in inputs]
    wanted = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    wanted = wanted.transpose(1, 2)
    out, _ = attention(*inputs, backend=backend)
    assert relative(out, wanted) < 2e-6
    gradients = torch.autograd.grad(out, inputs, grad)
    for got, want in zip(gradients, torch.autograd.grad(wanted, inputs, grad), strict=True):
        assert relative(got, want) < 4e-6


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_fewer_queries_than_keys_align_at_the_bottom_right(backend):
    # Equal scores make the output the mean of the visible values, 1 .. n.
    query, key = torch.zeros(1, 2, 1, 4), torch.zeros(1, 4, 1, 4)
    value = torch.arange(1.0, 5.0).view(1, 4, 1, 1).expand(1, 4, 1, 4).contiguous()
    out, lse = attention(query, key, value, backend=backend)
    assert torch.allclose(out[0, :, 0, 0], torch.tensor([2.0, 2.5]))
    assert torch.allclose(lse[0, 0], torch.tensor([3.0, 4.0]).log())


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_last_queries_of_a_sequence_equal_those_of_the_whole(backend):
    query, key, value, _ = operands((2, 11, 11, 4, 2, 8), torch.float64)
    whole, whole_lse = attention(query, key, value, backend=backend)
    out, lse = attention(query[:, 7:], key, value, backend=backend)
    assert torch.allclose(out, whole[:, 7:], rtol=0, atol=1e-14)
    assert torch.allclose(lse, whole_lse[:, :, 7:], rtol=0, atol=1e-14)


def test_a_query_without_keys_gives_zero_minus_infinity_and_finite_gradients():
    *inputs, grad = operands((1, 5, 2, 2, 1, 4), torch.float64)
    out, lse = attention(*inputs, backend=REFERENCE)
    assert torch.equal(out[:, :3], torch.zeros_like(out[:, :3]))
    assert torch.equal(lse[:, :, :3], torch.full_like(lse[:, :, :3], -math.inf))
    dq, dk, dv = torch.autograd.grad((out, lse), inputs, (grad, torch.ones_like(lse)))
    assert torch.equal(dq[:, :3], torch.zeros_like(dq[:, :3]))
    assert all(x.isfinite().all() for x in (dq, dk, dv))
    with pytest.raises(ValueError, match="some see none, which only 'reference' takes"):
        attention(*inputs, backend=FLASH)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_changing_one_document_leaves_the_others_bit_unchanged(backend):
    *inputs, grad = operands((2, 10, 10, 4, 2, 8), torch.float32)

    def run(factor):
        changed = [x.detach().clone() for x in (*inputs, grad)]
        for x in changed:
            x.view(20, *x.shape[2:])[6:13] *= factor
        leaves = [x.requires_grad_() for x in changed[:3]]
        visibility = seen(leaves[0], [0, 6, 13, 20])
        out, lse = attention(*leaves, visibility=visibility, backend=backend)
        gradients = torch.autograd.grad(out, leaves, changed[3])
        return [x.reshape(20, -1) for x in (out, lse.transpose(1, 2), *gradients)]

    others = [*range(6), *range(13, 20)]
    for before, after in zip(run(1.0), run(-3.0), strict=True):
        assert torch.equal(before[others], after[others])
        assert not torch.equal(before[6:13], after[6:13])


def test_reference_differentiates_the_lse():
    query, key, value, _ = operands((1, 3, 4, 2, 1, 3), torch.float64)
    assert torch.autograd.gradcheck(
        lambda q, k, v: attention(q, k, v, backend=REFERENCE), (query, key, value)
    )


def test_flash_refuses_a_gradient_of_the_lse():
    query, key, value, _ = operands((1, 4, 4, 2, 1, 8), torch.float32)
    out, lse = attention(query, key, value, backend=FLASH)
    with pytest.raises(ValueError, match="a gradient arrived at the LSE"):
        (out.sum() + lse.sum()).backward()


def test_partial_results_merge_by_their_lse():
    query, key, value, _ = operands((1, 6, 6, 2, 2, 4), torch.float64)
    whole, whole_lse = attention(query, key, value, backend=REFERENCE)
    # The last two queries see keys 0..3 in full and keys 4..5 causally; the full block is a causal
    # call in which every query stands alone behind all of its keys.
    near, near_lse = attention(query[:, 4:], key[:, 4:], value[:, 4:], backend=FLASH)
    parts = [
        attention(query[:, i : i + 1], key[:, :4], value[:, :4], backend=FLASH) for i in (4, 5)
    ]
    far, far_lse = (
        torch.cat(x, dim) for x, dim in zip(zip(*parts, strict=True), (1, 2), strict=True)
    )
    lse = torch.logaddexp(near_lse, far_lse)
    weights = [(x - lse).exp().transpose(1, 2)[..., None] for x in (near_lse, far_lse)]
    assert torch.allclose(lse, whole_lse[:, :, 4:], rtol=0, atol=1e-14)
    assert torch.allclose(weights[0] * near + weights[1] * far, whole[:, 4:], rtol=0, atol=1e-14)


def test_strided_views_are_taken_as_they_are():
    fused = torch.randn(2, 9, 8, 6, dtype=torch.float64)
    query, key, value = fused.split((4, 2, 2), dim=2)
    wanted, _ = attention(
        *(x.contiguous() for x in (query, key, value)),
        backend=FLASH,
    )
    assert torch.equal(attention(query, key, value, backend=FLASH)[0], wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(2, 4, 3, 8)}, "Hq a multiple of Hkv"),
        ({"key": torch.zeros(2, 4, 2, 6)}, r"must be \[B, S, Hq, D\]"),
        ({"value": torch.zeros(2, 5, 2, 8)}, r"must be \[B, S, Hq, D\]"),
        ({"value": torch.zeros(2, 4, 2, 8).double()}, "must be equal"),
        ({"value": torch.zeros(2, 4, 2, 6)}, "value_dim 6 differs from head_dim 8"),
        ({"backend": CUDNN}, "device cpu is none of sm_90, sm_100"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arguments = {
        "query": torch.zeros(2, 4, 4, 8),
        "key": torch.zeros(2, 4, 2, 8),
        "value": torch.zeros(2, 4, 2, 8),
        "backend": FLASH,
    }
    attention(**arguments)
    with pytest.raises(ValueError, match=message):
        attention(**arguments | change)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (torch.tensor([0, 8]), "must be int32"),
        (torch.tensor([0, 7], dtype=torch.int32), "ascend from 0 to 8"),
        (torch.tensor([1, 8], dtype=torch.int32), "ascend from 0 to 8"),
        (torch.tensor([0, 5, 4, 8], dtype=torch.int32), "ascend from 0 to 8"),
        (torch.tensor([], dtype=torch.int32), "ascend from 0 to 8"),
    ],
)
def test_documents_that_do_not_fit_are_refused(documents, message):
    with pytest.raises(ValueError, match=message):
        sequence_offsets(documents, 2, 4)
    query, key, value, _ = operands((2, 4, 4, 2, 1, 8), torch.float32)
    good = torch.tensor([0, 5, 8], dtype=torch.int32)
    for backend in CPU_BACKENDS:
        with pytest.raises(ValueError, match=message):
            visibility = Visibility(offsets=(good, documents))
            attention(query, key, value, visibility=visibility, backend=backend)


def test_auto_takes_the_first_that_can_and_names_are_honoured():
    assert choose_attention_backend("auto", CPU, torch.float64, 16, 16, True) is FLASH
    assert choose_attention_backend("auto", CPU, torch.float32, 16, 8, False) is REFERENCE
    assert choose_attention_backend("reference", CPU, torch.float32, 16, 16, False) is REFERENCE


def test_an_impossible_or_unknown_backend_is_an_error_that_says_what_can():
    with pytest.raises(ValueError, match=r"device cpu is none of sm_90, sm_100.*flash, reference"):
        choose_attention_backend("cudnn", CPU, torch.bfloat16, 128, 128, False)
    with pytest.raises(ValueError, match="allowed: auto, cudnn, flash, reference"):
        choose_attention_backend("fa9", CPU, torch.bfloat16, 128, 128, False)
    with pytest.raises(ValueError, match=r"value_dim 128 differs from head_dim 192.*: reference"):
        choose_attention_backend("flash", CPU, torch.bfloat16, 192, 128, False)


def test_gpu_rows_of_the_table_are_read(monkeypatch):
    for column in (DeviceColumn.SM_90, DeviceColumn.SM_100):
        monkeypatch.setattr("pith_ops.attention.device_column", lambda _, column=column: column)
        check = attention_violations
        assert check(CUDNN, CUDA, torch.bfloat16, 192, 128) == []
        assert len(check(CUDNN, CUDA, torch.float32, 260, 8, packed=True)) == 3
        assert check(CUDNN, CUDA, torch.bfloat16, 64, 64, window=True) == [
            "it takes no sliding window"
        ]
        assert check(CUDNN, CUDA, torch.bfloat16, 64, 64, more_keys=True) == [
            "it takes no more keys than queries"
        ]
        assert check(FLASH, CUDA, torch.bfloat16, 64, 64, packed=True, more_keys=True) == []
        choose = choose_attention_backend
        assert choose("auto", CUDA, torch.bfloat16, 128, 128, False) is CUDNN
        assert choose("auto", CUDA, torch.bfloat16, 128, 128, True) is FLASH
        assert choose("auto", CUDA, torch.bfloat16, 128, 128, False, window=True) is FLASH
        assert choose("auto", CUDA, torch.float32, 128, 128, False) is REFERENCE


# On a GPU: B, S, K, Hq, Hkv, D, Dv, documents
GPU_CASES = [
    (FLASH, (2, 255, 255, 8, 2, 128), 128, None),
    (FLASH, (2, 37, 101, 4, 2, 64), 64, None),
    (FLASH, (2, 130, 130, 4, 4, 256), 256, None),
    (FLASH, (2, 255, 255, 8, 2, 64), 64, [0, 1, 100, 100, 300, 510]),
    (CUDNN, (2, 255, 255, 8, 2, 128), 128, None),
    (CUDNN, (2, 130, 130, 4, 4, 192), 128, None),
    (CUDNN, (1, 1024, 1024, 8, 1, 64), 64, None),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "shape", "value_dim", "documents"), GPU_CASES)
def test_gpu_backends_equal_the_reference_in_float64(backend, shape, value_dim, documents):
    *inputs, grad = operands(shape, torch.bfloat16, value_dim=value_dim, device="cuda")
    visibility = seen(inputs[0], documents)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    wanted_out, wanted_lse = attention(*wide, visibility=visibility, backend=REFERENCE)
    wanted = torch.autograd.grad(wanted_out, wide, grad.double())
    out, lse = attention(*inputs, visibility=visibility, backend=backend)
    assert out.shape == wanted_out.shape and lse.shape == wanted_lse.shape
    assert relative(out, wanted_out) < 5e-3
    assert (lse - wanted_lse).abs().max() < 1e-5
    for got, want in zip(torch.autograd.grad(out, inputs, grad), wanted, strict=True):
        assert relative(got, want) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [None, [0, 1, 100, 100, 300, 510]])
@pytest.mark.parametrize("window", [None, 1, 70, 600])
@pytest.mark.parametrize("backend", [FLASH, CUDNN])
def test_gpu_windows_and_sinks_equal_the_reference_in_float64(backend, window, documents):
    if backend is CUDNN and (window or documents):
        pytest.skip("cuDNN has neither")
    *inputs, grad = operands((2, 255, 255, 8, 2, 64), torch.bfloat16, device="cuda")
    inputs.append(torch.linspace(-2, 3, 8, device="cuda").requires_grad_())
    wide = [x.detach().double().requires_grad_() for x in inputs]
    settings = {"visibility": seen(inputs[0], documents, window)}
    wanted_out, wanted_lse = attention(*wide[:3], sinks=wide[3], backend=REFERENCE, **settings)
    wanted = torch.autograd.grad(wanted_out, wide, grad.double())
    out, lse = attention(*inputs[:3], sinks=inputs[3], backend=backend, **settings)
    assert relative(out, wanted_out) < 8e-3
    assert (lse - wanted_lse).abs().max() < 1e-5
    for got, want in zip(torch.autograd.grad(out, inputs, grad), wanted, strict=True):
        assert relative(got, want) < 1.5e-2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("visibility", "backends"),
    [
        (Visibility(causal=False), (FLASH, CUDNN)),
        (Visibility(window=90), (FLASH,)),
        (Visibility(window=400), (FLASH,)),
        ("rectangle", (FLASH,)),
    ],
)
def test_gpu_pairs_equal_the_reference_with_given_out_and_lse(visibility, backends):
    """As in a ring: more keys than queries, and an LSE larger than that of these keys."""
    *inputs, grad = (
        x.detach() for x in operands((2, 130, 257, 8, 2, 64), torch.bfloat16, device="cuda")
    )
    if visibility == "rectangle":
        # The second sequence's queries from 20 on see nothing, nobody sees its first 100 keys.
        offsets = ([0, 130, 130, 150, 260], [0, 257, 357, 514, 514])
        offsets = tuple(torch.tensor(o, dtype=torch.int32, device="cuda") for o in offsets)
        visibility = Visibility(causal=False, offsets=offsets)
    settings = {"scale": 0.1, "visibility": visibility}
    wide = [x.double() for x in inputs]
    wanted_out, wanted_lse = attention_forward(*wide, backend=REFERENCE, **settings)
    merged = (0.7 * wanted_out).bfloat16(), torch.logaddexp(wanted_lse, wanted_lse - 0.8).float()
    merged_wide = [x.double() for x in merged]
    wanted = attention_backward(grad.double(), *wide, *merged_wide, backend=REFERENCE, **settings)
    for backend in backends:
        out, lse = attention_forward(*inputs, backend=backend, **settings)
        assert relative(out, wanted_out) < 5e-3
        seen = wanted_lse.isfinite()
        assert torch.equal(seen, lse.isfinite()) and (lse[~seen] == -math.inf).all()
        assert (lse - wanted_lse)[seen].abs().max() < 1e-5
        grads = attention_backward(grad, *inputs, *merged, backend=backend, **settings)
        for got, want in zip(grads, wanted, strict=True):
            assert relative(got, want) < 1e-2


@pytest.mark.gpu
def test_gpu_flash_is_deterministic_when_torch_is_asked_for_it():
    *inputs, grad = operands((1, 2048, 2048, 16, 2, 128), torch.bfloat16, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        runs = [
            torch.autograd.grad(attention(*inputs, backend=FLASH)[0], inputs, grad)
            for _ in range(5)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [FLASH, CUDNN])
def test_gpu_backends_refuse_what_their_kernels_get_wrong(backend):
    inputs = operands((1, 16, 16, 2, 1, 64), torch.float32, device="cuda")[:3]
    with pytest.raises(ValueError, match=r"dtype torch\.float32 is none of"):
        attention(*inputs, backend=backend)
    query, key, value, _ = operands((1, 16, 8, 2, 1, 64), torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="some see none"):
        attention(query, key, value, backend=backend)

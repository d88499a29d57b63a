"""Attention: against a float64 loop over single queries, and against torch's own SDPA."""

import math
from itertools import pairwise

import pytest
import torch
from pith_ops.attention import (
    ATTENTION_TABLE,
    AttentionBackend,
    attention,
    attention_violations,
    choose_attention_backend,
)
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


def loop_attention(query, key, value, scale, document_of=None):
    """One query at a time, over the list of the keys it sees, in float64."""
    query, key, value = query.double(), key.double(), value.double()
    batch, queries, heads, _ = query.shape
    keys, group = key.shape[1], heads // key.shape[2]
    out = torch.zeros(batch, queries, heads, value.shape[3], dtype=torch.float64)
    lse = torch.full((batch, heads, queries), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for i in range(queries):
            seen = [j for j in range(keys) if j <= i + keys - queries]
            if document_of is not None:
                start = b * queries
                seen = [j for j in seen if document_of[start + j] == document_of[start + i]]
            for h in range(heads if seen else 0):
                scores = scale * key[b, seen, h // group] @ query[b, i, h]
                weights = scores.exp()
                lse[b, h, i] = weights.sum().log()
                out[b, i, h] = (weights / weights.sum()) @ value[b, seen, h // group]
    return out, lse


def check_against_loop(backend, shape, dtype, *, value_dim=None, scale=None, documents=None):
    *inputs, grad = operands(shape, dtype, value_dim=value_dim)
    document_of = None
    if documents is not None:
        sizes = [b - a for a, b in pairwise(documents)]
        document_of = [index for index, size in enumerate(sizes) for _ in range(size)]
        documents = torch.tensor(documents, dtype=torch.int32)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    wanted_out, wanted_lse = loop_attention(*wide, scale or shape[-1] ** -0.5, document_of)
    wanted = torch.autograd.grad(wanted_out, wide, grad.double())
    out, lse = attention(*inputs, scale=scale, documents=documents, backend=backend)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = TOLERANCES[dtype]
    assert relative(out, wanted_out) < tolerance
    assert torch.allclose(lse.double(), wanted_lse, rtol=0, atol=min(tolerance, 1e-3))
    for got, want in zip(torch.autograd.grad(out, inputs, grad), wanted, strict=True):
        assert got.dtype == dtype
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
    documents = torch.tensor([0, 6, 13, 20], dtype=torch.int32)
    *inputs, grad = operands((2, 10, 10, 4, 2, 8), torch.float32)

    def run(factor):
        changed = [x.detach().clone() for x in (*inputs, grad)]
        for x in changed:
            x.view(20, *x.shape[2:])[6:13] *= factor
        leaves = [x.requires_grad_() for x in changed[:3]]
        out, lse = attention(*leaves, documents=documents, backend=backend)
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
        ({"documents": torch.tensor([0, 8])}, "must be int32"),
        ({"documents": torch.tensor([0, 7], dtype=torch.int32)}, "ascend from 0 to 8"),
        ({"documents": torch.tensor([1, 8], dtype=torch.int32)}, "ascend from 0 to 8"),
        ({"documents": torch.tensor([0, 5, 4, 8], dtype=torch.int32)}, "ascend from 0 to 8"),
        ({"documents": torch.tensor([], dtype=torch.int32)}, "ascend from 0 to 8"),
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


def test_documents_need_as_many_keys_as_queries():
    query, key, value, _ = operands((1, 2, 4, 2, 1, 8), torch.float32)
    documents = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="documents need as many keys as queries"):
        attention(query, key, value, documents=documents, backend=REFERENCE)


def test_auto_takes_the_first_that_can_and_names_are_honoured():
    chosen = choose_attention_backend("auto", CPU, torch.float64, 16, 16, True, deterministic=True)
    assert chosen is FLASH
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
    for column in ("sm_90", "sm_100"):
        rows = {row.backend: row for row in ATTENTION_TABLE if row.column.value == column}
        monkeypatch.setattr(
            "pith_ops.attention.device_column", lambda _, rows=rows: rows[FLASH].column
        )
        check = attention_violations
        assert check(CUDNN, CUDA, torch.bfloat16, 192, 128) == []
        assert len(check(CUDNN, CUDA, torch.float32, 260, 8, packed=True)) == 3
        assert "run to run" in check(CUDNN, CUDA, torch.bfloat16, 64, 64, deterministic=True)[0]
        choose = choose_attention_backend
        assert choose("auto", CUDA, torch.bfloat16, 128, 128, False) is CUDNN
        assert choose("auto", CUDA, torch.bfloat16, 128, 128, True) is FLASH
        assert choose("auto", CUDA, torch.float32, 128, 128, False) is REFERENCE
        deterministic = choose("auto", CUDA, torch.bfloat16, 128, 128, False, deterministic=True)
        assert deterministic is FLASH


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
    if documents is not None:
        documents = torch.tensor(documents, dtype=torch.int32, device="cuda")
    wide = [x.detach().double().requires_grad_() for x in inputs]
    wanted_out, wanted_lse = attention(*wide, documents=documents, backend=REFERENCE)
    wanted = torch.autograd.grad(wanted_out, wide, grad.double())
    out, lse = attention(*inputs, documents=documents, backend=backend)
    assert out.shape == wanted_out.shape and lse.shape == wanted_lse.shape
    assert relative(out, wanted_out) < 5e-3
    assert (lse - wanted_lse).abs().max() < 1e-5
    for got, want in zip(torch.autograd.grad(out, inputs, grad), wanted, strict=True):
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

"""Causal attention with grouped query heads and packed documents, returning output and LSE.

Per query head h, with g = h // (Hq / Hkv) the key/value head it shares:

    s[i, j] = scale * q[i, h] . k[j, g]      -inf where i must not see j
    lse[i]  = log(sum over j of exp(s[i, j]))
    out[i]  = sum over j of exp(s[i, j] - lse[i]) * v[j, g]

The LSE merges partial results over blocks of keys (ring attention); torch's public operator does
not return it, those below it do. Causal masks align at the bottom right: of S queries and K keys,
query i sees keys 0 .. i + K - S; one that sees none gives 0 and LSE -inf. Documents cut further:
attention crosses neither a document nor a sequence.

`REFERENCE` is plain torch and holds all S x K scores; `FLASH` is torch's FlashAttention-2 (Dao
2023, arXiv 2307.08691) on CUDA and its counterpart on CPUs; `CUDNN` is cuDNN's on CUDA.

The trap: below torch's public interface nothing is checked. When S and K differ, cuDNN and torch's
CPU operator align the mask at the top left; a query without keys gets +inf, -inf or a finite LSE;
cuDNN fills fp32 outputs with NaN (seen on an H200 and a CPU). Hence `ATTENTION_TABLE`.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pith_ops.device import DeviceColumn, accumulation_dtype, device_column


class AttentionBackend(Enum):
    """Who computes attention, in the order in which "auto" prefers them."""

    CUDNN = "cudnn"
    FLASH = "flash"
    REFERENCE = "reference"


@dataclass(frozen=True, kw_only=True)
class AttentionCapability:
    """What one backend can do on one kind of device."""

    backend: AttentionBackend
    """Who computes."""
    column: DeviceColumn
    """Where."""
    dtypes: tuple[torch.dtype, ...]
    """Of query, key and value."""
    max_head_dim: int | None = None
    """Largest head dim, None without a limit."""
    head_dim_multiple: int = 1
    """What divides every head dim."""
    other_value_dim: bool = False
    """Whether values may have another head dim than queries and keys."""
    packed: bool = True
    """Whether it takes document offsets."""
    other_lengths: bool = True
    """Whether there may be more keys than queries."""
    deterministic: bool = True
    """Whether two backwards agree bit for bit; flash on CUDA only under
    `torch.use_deterministic_algorithms`."""


HALF_DTYPES = (torch.bfloat16, torch.float16)

# The rows of SM_90 are what ran on an H200; those of SM_100 repeat them and have never run.
ATTENTION_TABLE: tuple[AttentionCapability, ...] = (
    *(
        AttentionCapability(
            backend=AttentionBackend.CUDNN,
            column=column,
            dtypes=HALF_DTYPES,
            max_head_dim=256,
            head_dim_multiple=8,
            other_value_dim=True,
            packed=False,
            other_lengths=False,
            deterministic=False,
        )
        for column in (DeviceColumn.SM_90, DeviceColumn.SM_100)
    ),
    *(
        AttentionCapability(
            backend=AttentionBackend.FLASH,
            column=column,
            dtypes=HALF_DTYPES,
            max_head_dim=256,
            head_dim_multiple=8,
        )
        for column in (DeviceColumn.SM_90, DeviceColumn.SM_100)
    ),
    AttentionCapability(
        backend=AttentionBackend.FLASH,
        column=DeviceColumn.CPU,
        dtypes=(torch.float64, torch.float32, *HALF_DTYPES),
    ),
)


def choose_attention_backend(
    requested: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    packed: bool,
    *,
    deterministic: bool = False,
) -> AttentionBackend:
    """Turn "auto" or a backend's name into a backend that can do the job, before a model is built.

    `packed`: document offsets will be passed; `deterministic`: refuse a backend whose backward
    differs from run to run. A ValueError says what is missing and which backends can.
    """
    violations = {
        backend.value: attention_violations(
            backend, device, dtype, head_dim, value_dim, packed=packed, deterministic=deterministic
        )
        for backend in AttentionBackend
    }
    able = [name for name, found in violations.items() if not found]
    if requested == "auto":
        return AttentionBackend(able[0])
    if requested not in violations:
        raise ValueError(
            f"attention backend {requested!r} is unknown; allowed: auto, {', '.join(violations)}"
        )
    if violations[requested]:
        raise ValueError(
            f"attention backend {requested!r} cannot be used: {'; '.join(violations[requested])}. "
            f"Ask for 'auto' or one that can: {', '.join(able)}"
        )
    return AttentionBackend(requested)


def attention_violations(
    backend: AttentionBackend,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    *,
    packed: bool = False,
    other_lengths: bool = False,
    deterministic: bool = False,
) -> list[str]:
    """Everything that keeps `backend` from doing the job, in words; empty if it can.

    The flags ask for document offsets, more keys than queries, and bit-equal repeated runs.
    """
    if backend is AttentionBackend.REFERENCE:
        return []
    rows = {row.column: row for row in ATTENTION_TABLE if row.backend is backend}
    column = device_column(device)
    if column not in rows:
        return [f"device {device} is none of {', '.join(column.value for column in rows)}"]
    row = rows[column]
    violations = []
    if dtype not in row.dtypes:
        violations.append(f"dtype {dtype} is none of {', '.join(map(str, row.dtypes))}")
    for name, dim in (("head_dim", head_dim), ("value_dim", value_dim)):
        if dim % row.head_dim_multiple or (row.max_head_dim and dim > row.max_head_dim):
            violations.append(
                f"{name} {dim} is no multiple of {row.head_dim_multiple} up to {row.max_head_dim}"
            )
    if value_dim != head_dim and not row.other_value_dim:
        violations.append(f"value_dim {value_dim} differs from head_dim {head_dim}")
    if packed and not row.packed:
        violations.append("it takes no document offsets")
    if other_lengths and not row.other_lengths:
        violations.append("it takes as many keys as queries only")
    if deterministic and not row.deterministic:
        violations.append("its backward differs from run to run")
    return violations


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    documents: Tensor | None = None,
    backend: AttentionBackend,
) -> tuple[Tensor, Tensor]:
    """Causal attention of every sequence or document with itself.

    `query [B, S, Hq, D]`, `key [B, K, Hkv, D]`, `value [B, K, Hkv, Dv]` -> output `[B, S, Hq, Dv]`
    in their dtype and LSE `[B, Hq, S]` in the accumulation dtype. `scale` is `D ** -0.5` when None.
    `documents [num_documents + 1]` int32 are ascending offsets from 0 to `B * S` and need K = S;
    they are trusted on CUDA, where a look would make the host wait. Only `REFERENCE` differentiates
    the LSE. A ValueError says what does not fit or what the backend cannot do.
    """
    _check_operands(query, key, value, documents, backend)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    match backend:
        case AttentionBackend.REFERENCE:
            return attention_reference(query, key, value, scale=scale, documents=documents)
        case AttentionBackend.CUDNN:
            return _CudnnAttention.apply(query, key, value, scale)
        case AttentionBackend.FLASH if query.is_cuda:
            offsets = None if documents is None else _sequence_offsets(query, documents)
            return _FlashCuda.apply(query, key, value, scale, offsets)
        case AttentionBackend.FLASH:
            mask = None
            if documents is not None or query.shape[1] != key.shape[1]:
                hidden = ~_visible_keys(query, key, documents)[:, None]
                mask = query.new_zeros(hidden.shape).masked_fill(hidden, -torch.inf)
            return _FlashCpu.apply(query, key, value, scale, mask)


def attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The formula by plain autograd in the accumulation dtype, the output rounded once."""
    wide = accumulation_dtype(query.dtype)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    grouped = query.to(wide).unflatten(2, (key.shape[2], -1))
    scores = torch.einsum("bihgd,bjhd->bhgij", grouped, key.to(wide)) * scale
    hidden = ~_visible_keys(query, key, documents)
    scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
    lse = scores.logsumexp(-1)
    # A query without keys: exp(-inf - 0) = 0, where exp(-inf - -inf) would be NaN.
    shift = lse.masked_fill(lse == -torch.inf, 0.0)
    probabilities = (scores - shift[..., None]).exp()
    out = torch.einsum("bhgij,bjhd->bihgd", probabilities, value.to(wide))
    return out.flatten(2, 3).to(query.dtype), lse.flatten(1, 2)


def _check_operands(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, backend: AttentionBackend
) -> None:
    q, k, v = query.shape, key.shape, value.shape
    fits = len(q) == len(k) == len(v) == 4 and q[0] == k[0] and q[3] == k[3] and k[:3] == v[:3]
    if not fits or q[2] % k[2]:
        raise ValueError(
            f"attention: query {list(q)}, key {list(k)}, value {list(v)} must be [B, S, Hq, D], "
            "[B, K, Hkv, D], [B, K, Hkv, Dv] with Hq a multiple of Hkv"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"attention: dtypes {query.dtype}, {key.dtype}, {value.dtype} must be equal"
        )
    packed, other_lengths = documents is not None, k[1] != q[1]
    violations = attention_violations(
        backend, query.device, query.dtype, q[3], v[3], packed=packed, other_lengths=other_lengths
    )
    if k[1] < q[1] and backend is not AttentionBackend.REFERENCE:
        violations.append(
            f"{q[1]} queries of {k[1]} keys: some see none, which only 'reference' takes"
        )
    if documents is not None:
        if other_lengths:
            violations.append("documents need as many keys as queries")
        violations += _document_violations(documents, q[0] * q[1])
    if violations:
        raise ValueError(f"attention with backend {backend.value!r}: {'; '.join(violations)}")


def _document_violations(documents: Tensor, num_tokens: int) -> list[str]:
    if documents.dtype != torch.int32 or documents.ndim != 1:
        return [f"documents {documents.dtype} {list(documents.shape)} must be int32 offsets [D+1]"]
    if documents.device.type == "cpu":
        offsets = documents.tolist()
        if offsets != sorted(offsets) or offsets[:1] + offsets[-1:] != [0, num_tokens]:
            return [f"documents {offsets} must ascend from 0 to {num_tokens}, the number of tokens"]
    return []


def _visible_keys(query: Tensor, key: Tensor, documents: Tensor | None) -> Tensor:
    """Which key each query sees, bool `[B or 1, S, K]`."""
    batch, num_queries, num_keys = query.shape[0], query.shape[1], key.shape[1]
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
    causal = ones.tril(num_keys - num_queries)[None]
    if documents is None:
        return causal
    tokens = torch.arange(batch * num_queries, device=query.device, dtype=documents.dtype)
    document = torch.searchsorted(documents, tokens, right=True).view(batch, num_queries)
    return causal & (document[:, :, None] == document[:, None, :])


def _sequence_offsets(query: Tensor, documents: Tensor) -> Tensor:
    """Documents cut at sequence boundaries too, as `[D + B + 2]` int32 ascending offsets."""
    batch, length = query.shape[:2]
    starts = torch.arange(batch + 1, dtype=documents.dtype, device=documents.device) * length
    # Sorted, not deduplicated: counting the distinct ones would make the host wait, and an offset
    # that occurs twice is an empty document.
    return torch.cat([documents, starts]).sort().values


class _FlashCpu(torch.autograd.Function):
    """torch's CPU operator; `mask` is additive, None for square causal."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, lse, mask)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return out.transpose(1, 2), lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_lse_gradient(grad_lse)
        *saved, mask = ctx.saved_tensors
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.transpose(1, 2), *saved, 0.0, mask is None, attn_mask=mask, scale=ctx.scale
        )
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv, None, None


class _FlashCuda(torch.autograd.Function):
    """FlashAttention-2; with `offsets` the batch is one row of `B * S` tokens, cut at them."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, offsets: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q, k, v = query, key, value
        if offsets is not None:
            q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        lengths = (query.shape[1], key.shape[1])
        out, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, offsets, offsets, *lengths, 0.0, True, False, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, lse, offsets, rng_state, unused)
        ctx.scale, ctx.lengths, ctx.shapes = scale, lengths, (query.shape, key.shape, value.shape)
        ctx.set_materialize_grads(False)
        if offsets is not None:
            lse = lse.unflatten(1, (query.shape[0], -1)).transpose(0, 1)
        return out.view(query.shape), lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_lse_gradient(grad_lse)
        q, k, v, out, lse, offsets, *rng = ctx.saved_tensors
        operands = (grad.reshape(out.shape), q, k, v, out, lse, offsets, offsets, *ctx.lengths)
        grads = torch.ops.aten._flash_attention_backward(
            *operands, 0.0, True, *rng, scale=ctx.scale
        )
        dq, dk, dv = (x.view(shape) for x, shape in zip(grads, ctx.shapes, strict=True))
        return dq, dk, dv, None, None


class _CudnnAttention(torch.autograd.Function):
    """cuDNN's fused attention, square causal."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = (
            torch.ops.aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, True, False, scale=scale
            )
        )
        ctx.save_for_backward(q, k, v, out, lse, seed, offset, None, cum_q, cum_k)
        ctx.scale, ctx.lengths = scale, (max_q, max_k)
        ctx.set_materialize_grads(False)
        return out.transpose(1, 2), lse.squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_lse_gradient(grad_lse)
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad.transpose(1, 2), *ctx.saved_tensors, *ctx.lengths, 0.0, True, scale=ctx.scale
        )
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv, None


def _refuse_lse_gradient(grad_lse: Tensor | None) -> None:
    if grad_lse is not None:
        raise ValueError(
            "attention: a gradient arrived at the LSE, which only the backend 'reference' "
            "differentiates; detach the LSE or use that backend"
        )

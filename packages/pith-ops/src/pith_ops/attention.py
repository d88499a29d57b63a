"""Causal attention with grouped query heads and packed documents, returning output and LSE.

Per query head h, with g = h // (Hq / Hkv) the key/value head it shares:

    s[i, j] = scale * q[i, h] . k[j, g]      -inf where i must not see j
    lse[i]  = log(sum over j of exp(s[i, j]))
    out[i]  = sum over j of exp(s[i, j] - lse[i]) * v[j, g]

The LSE is what lets partial results over blocks of keys be merged (ring attention) and what the
backward recomputes the probabilities from; torch's public `scaled_dot_product_attention` does not
return it. The operators below it do, and are called here inside one autograd function each.

Which keys a query sees:

    causal      bottom-right aligned: of S queries and K keys, query i sees keys 0 .. i + K - S, so
                the last query sees all. A query that sees no key (K < S) gives 0 and LSE -inf.
    documents   offsets that cut the tokens further; attention crosses neither a document nor a
                sequence (a row of the batch).

Backends: `REFERENCE` is plain torch, any device and dtype, and holds all S x K scores at once.
`FLASH` is torch's FlashAttention-2 (Dao 2023, arXiv 2307.08691) on CUDA and its counterpart on
CPUs. `CUDNN` is cuDNN's fused attention on CUDA. `ATTENTION_TABLE` says what each can do where.

Layouts: query [B, S, Hq, D], key [B, K, Hkv, D], value [B, K, Hkv, Dv]; B sequences of a batch.

The trap: below torch's public interface nothing is checked. When S and K differ, cuDNN and torch's
CPU operator align the causal mask at the top left, FlashAttention-2 at the bottom right; a query
without keys gets +inf, -inf or a finite LSE; cuDNN fills fp32 outputs with NaN (all seen on an H200
or a CPU). Hence the table, and the refusals of `attention`.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pith_ops.device import DeviceColumn, accumulation_dtype, device_column


class AttentionBackend(Enum):
    """Who computes attention."""

    REFERENCE = "reference"
    FLASH = "flash"
    CUDNN = "cudnn"


@dataclass(frozen=True, kw_only=True)
class AttentionCapability:
    """What one backend can do on one kind of device."""

    backend: AttentionBackend
    """Who computes."""
    column: DeviceColumn
    """Where."""
    dtypes: tuple[torch.dtype, ...]
    """Dtypes of query, key and value that it takes."""
    max_head_dim: int | None = None
    """Largest head dim, None without a limit."""
    head_dim_multiple: int = 1
    """Head dims must be a multiple of this."""
    other_value_dim: bool = True
    """Whether values may have another head dim than queries and keys."""
    packed: bool = True
    """Whether it takes document offsets."""
    other_lengths: bool = True
    """Whether there may be more keys than queries."""
    deterministic: bool = True
    """Whether two runs agree bit for bit, backward included, once torch is asked for that:
    flash on CUDA sums in a fixed order under `torch.use_deterministic_algorithms` only."""


HALF_DTYPES = (torch.bfloat16, torch.float16)
CPU_DTYPES = (torch.float64, torch.float32, *HALF_DTYPES)

# In the order in which "auto" prefers them. The rows of SM_90 are what ran on an H200; those of
# SM_100 repeat them and have never run.
ATTENTION_TABLE: tuple[AttentionCapability, ...] = (
    *(
        AttentionCapability(
            backend=AttentionBackend.CUDNN,
            column=column,
            dtypes=HALF_DTYPES,
            max_head_dim=256,
            head_dim_multiple=8,
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
            other_value_dim=False,
        )
        for column in (DeviceColumn.SM_90, DeviceColumn.SM_100)
    ),
    AttentionCapability(
        backend=AttentionBackend.FLASH,
        column=DeviceColumn.CPU,
        dtypes=CPU_DTYPES,
        other_value_dim=False,
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
    """Turn a configured name into a backend that can do the job, once, before a model is built.

    Args:
        requested: "auto" (the first of cudnn, flash, reference that can) or a backend's name.
        device: where attention will run.
        dtype: compute dtype of query, key and value.
        head_dim: D of queries and keys.
        value_dim: Dv of values.
        packed: whether document offsets will be passed.
        deterministic: refuse backends whose backward differs from run to run.

    Raises:
        ValueError: the name is unknown, or that backend cannot; the text says why and what can.
    """
    usable = {}
    for backend in (AttentionBackend.CUDNN, AttentionBackend.FLASH, AttentionBackend.REFERENCE):
        usable[backend.value] = attention_violations(
            backend,
            device,
            dtype,
            head_dim,
            value_dim,
            packed=packed,
            deterministic=deterministic,
        )
    able = [name for name, violations in usable.items() if not violations]
    if requested == "auto":
        return AttentionBackend(able[0])
    if requested not in usable:
        raise ValueError(
            f"attention backend {requested!r} is unknown; allowed: auto, {', '.join(usable)}"
        )
    if usable[requested]:
        raise ValueError(
            f"attention backend {requested!r} cannot be used: {'; '.join(usable[requested])}. "
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

    Args:
        backend: who would compute.
        device: where.
        dtype: of query, key and value.
        head_dim: D of queries and keys.
        value_dim: Dv of values.
        packed: whether there are document offsets.
        other_lengths: whether there are more keys than queries.
        deterministic: whether runs must agree bit for bit.
    """
    if backend is AttentionBackend.REFERENCE:
        return []
    column = device_column(device)
    rows = [row for row in ATTENTION_TABLE if row.backend is backend and row.column is column]
    if not rows:
        columns = [row.column.value for row in ATTENTION_TABLE if row.backend is backend]
        return [f"device {device} is none of {', '.join(columns)}"]
    (row,) = rows
    violations = []
    if dtype not in row.dtypes:
        violations.append(f"dtype {dtype} is none of {', '.join(map(str, row.dtypes))}")
    for name, dim in (("head_dim", head_dim), ("value_dim", value_dim)):
        if dim % row.head_dim_multiple or (row.max_head_dim and dim > row.max_head_dim):
            violations.append(
                f"{name} {dim} is no multiple of {row.head_dim_multiple} "
                f"up to {row.max_head_dim or 'any size'}"
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

    Args:
        query: `[B, S, Hq, D]`.
        key: `[B, K, Hkv, D]`, Hq a multiple of Hkv.
        value: `[B, K, Hkv, Dv]`.
        scale: factor on the scores, `D ** -0.5` when None.
        documents: `[num_documents + 1]` int32 ascending offsets into the `B * S` tokens, from 0 to
            `B * S`; needs K = S. Checked on CPUs; trusted on CUDA, where a look would make the host
            wait.
        backend: who computes; `choose_attention_backend` picks one.

    Returns:
        Output `[B, S, Hq, Dv]` in the query's dtype, and LSE `[B, Hq, S]` in fp32 (float64 for
        float64 inputs). `REFERENCE` differentiates both; the others raise a ValueError when a
        gradient arrives at the LSE.

    Raises:
        ValueError: shapes or dtypes do not fit, or the backend cannot do this.
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
    """The formula by plain autograd, in the accumulation dtype, the output rounded once.

    Arguments and results as for `attention`; all `[B, Hq, S, K]` scores exist at once.
    """
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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None,
    backend: AttentionBackend,
) -> None:
    """Raise the ValueErrors of `attention`."""
    q, k, v = query.shape, key.shape, value.shape
    violations = []
    fits = len(q) == len(k) == len(v) == 4 and q[0] == k[0] and q[3] == k[3] and k[:3] == v[:3]
    if not fits or q[2] % k[2]:
        violations.append(
            f"query {list(q)}, key {list(k)}, value {list(v)} must be [B, S, Hq, D], "
            "[B, K, Hkv, D], [B, K, Hkv, Dv] with Hq a multiple of Hkv"
        )
    elif not query.dtype == key.dtype == value.dtype:
        violations.append(f"dtypes {query.dtype}, {key.dtype}, {value.dtype} must be equal")
    else:
        if k[1] < q[1] and backend is not AttentionBackend.REFERENCE:
            violations.append(
                f"{q[1]} queries of {k[1]} keys: some see none, which only 'reference' takes"
            )
        violations += attention_violations(
            backend,
            query.device,
            query.dtype,
            q[3],
            v[3],
            packed=documents is not None,
            other_lengths=k[1] != q[1],
        )
        if documents is not None:
            violations += _document_violations(documents, q[0] * q[1], k[1] == q[1])
    if violations:
        raise ValueError(f"attention with backend {backend.value!r}: {'; '.join(violations)}")


def _document_violations(documents: Tensor, num_tokens: int, equal_lengths: bool) -> list[str]:
    if not equal_lengths:
        return ["documents need as many keys as queries"]
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
    """Documents cut at sequence boundaries too, as `[D + B + 2]` int32 ascending offsets.

    Sorted rather than deduplicated, since the number of distinct offsets would cost a wait for the
    device: an offset that occurs twice is an empty document.
    """
    batch, length = query.shape[:2]
    sequences = torch.arange(
        0, batch * length + 1, length, dtype=documents.dtype, device=documents.device
    )
    return torch.cat([documents, sequences]).sort().values


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
    def backward(
        ctx: Any, grad_out: Tensor, grad_lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        _refuse_lse_gradient(grad_lse)
        q, k, v, out, lse, mask = ctx.saved_tensors
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out.transpose(1, 2),
            *(q, k, v, out, lse),
            0.0,
            mask is None,
            attn_mask=mask,
            scale=ctx.scale,
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), None, None


class _FlashCuda(torch.autograd.Function):
    """FlashAttention-2; with `offsets` the batch is one row of `B * S` tokens, cut at them."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, offsets: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        batch, ctx.lengths = query.shape[0], (query.shape[1], key.shape[1])
        q, k, v = query, key, value
        if offsets is not None:
            q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        out, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
            *(q, k, v, offsets, offsets),
            *ctx.lengths,
            0.0,
            True,
            False,
            scale=scale,
        )
        ctx.save_for_backward(q, k, v, out, lse, offsets, rng_state, unused)
        ctx.scale, ctx.shapes = scale, (query.shape, key.shape, value.shape)
        ctx.set_materialize_grads(False)
        if offsets is not None:
            lse = lse.unflatten(1, (batch, -1)).transpose(0, 1)
        return out.view(query.shape), lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_out: Tensor, grad_lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        _refuse_lse_gradient(grad_lse)
        q, k, v, out, lse, offsets, rng_state, unused = ctx.saved_tensors
        grads = torch.ops.aten._flash_attention_backward(
            grad_out.reshape(out.shape),
            *(q, k, v, out, lse, offsets, offsets),
            *ctx.lengths,
            0.0,
            True,
            rng_state,
            unused,
            scale=ctx.scale,
        )
        dq, dk, dv = (g.view(shape) for g, shape in zip(grads, ctx.shapes, strict=True))
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
        ctx.save_for_backward(q, k, v, out, lse, seed, offset, cum_q, cum_k)
        ctx.scale, ctx.lengths = scale, (max_q, max_k)
        ctx.set_materialize_grads(False)
        return out.transpose(1, 2), lse.squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_out: Tensor, grad_lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        _refuse_lse_gradient(grad_lse)
        q, k, v, out, lse, seed, offset, cum_q, cum_k = ctx.saved_tensors
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad_out.transpose(1, 2),
            *(q, k, v, out, lse, seed, offset, None, cum_q, cum_k),
            *ctx.lengths,
            0.0,
            True,
            scale=ctx.scale,
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), None


def _refuse_lse_gradient(grad_lse: Tensor | None) -> None:
    if grad_lse is not None:
        raise ValueError(
            "attention: a gradient arrived at the LSE, which only the backend 'reference' "
            "differentiates; detach the LSE or use that backend"
        )

"""Causal attention with grouped query heads and packed documents, returning output and LSE.

Per query head h, with g = h // (Hq / Hkv) the key/value head it shares:

    s[i, j] = scale * q[i, h] . k[j, g]      -inf where i must not see j
    lse[i]  = log(sum over j of exp(s[i, j]), plus exp(sink[h]) where heads have sinks)
    out[i]  = sum over j of exp(s[i, j] - lse[i]) * v[j, g]
    ds      = exp(s - lse) * (dout . v' - delta),   delta[i] = dout[i] . out[i]

The LSE merges partial results over blocks of keys; torch's public operator does not return it,
those below it do. The last formula is all of a backward, and needs of the forward only out and lse:
given those of *all* keys, `attention_backward` over some keys yields their share of the gradients.
Ring attention and sinks rest on that. `Visibility` says what a query sees; one that sees nothing
gives 0 and LSE -inf.

`REFERENCE` is plain torch and holds all S x K scores; `FLASH` is torch's FlashAttention-2 (Dao
2023, arXiv 2307.08691) on CUDA and its counterpart on CPUs; `CUDNN` is cuDNN's on CUDA.

The trap: below torch's public interface nothing is checked. When S and K differ, cuDNN and torch's
CPU operator align the mask at the top left; a query without keys gets +inf, -inf or a finite LSE;
cuDNN fills fp32 outputs with NaN (seen on an H200 and a CPU). Hence `ATTENTION_TABLE`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from pith_ops.device import DeviceColumn, accumulation_dtype, device_column
from pith_ops.weight_grad import dense_weight_grad


class AttentionBackend(Enum):
    """Who computes attention, in the order in which "auto" prefers them."""

    CUDNN = "cudnn"
    FLASH = "flash"
    REFERENCE = "reference"


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """Which of K keys each of S queries sees.

    Masks align at the bottom right: key j is `(i - S) - (j - K)` places before query i. With
    `offsets`, S and K are the lengths of the segments of i and j, and i and j count from there.
    """

    causal: bool = True
    """Whether a query sees no key after itself."""
    window: int | None = None
    """A query sees itself and the `window - 1` keys before it; None for all."""
    offsets: tuple[Tensor, Tensor] | None = None
    """`[N + 1]` int32 each, ascending from 0 to `B * S` and `B * K`: queries of segment n see keys
    of segment n alone; None for one segment a sequence."""

    def __post_init__(self) -> None:
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ValueError(
                f"attention window {self.window}, causal {self.causal}: a window is at least 1 and "
                "causal; None for no window"
            )


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
    window: bool = True
    """Whether it takes a sliding window."""
    other_lengths: bool = True
    """Whether a causal call may have more keys than queries."""
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
            window=False,
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
    window: bool = False,
    deterministic: bool = False,
) -> AttentionBackend:
    """Turn "auto" or a backend's name into a backend that can do the job, before a model is built.

    `packed`: document offsets will be passed; `window`: a sliding window, over more keys than
    queries if cp > 1; `deterministic`: refuse a backend whose backward differs from run to run. A
    ValueError says what is missing and which backends can.
    """
    violations = {
        backend.value: attention_violations(
            backend,
            device,
            dtype,
            head_dim,
            value_dim,
            packed=packed,
            window=window,
            other_lengths=window,
            deterministic=deterministic,
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
    window: bool = False,
    other_lengths: bool = False,
    deterministic: bool = False,
) -> list[str]:
    """Everything that keeps `backend` from doing the job, in words; empty if it can.

    The flags ask for document offsets, a sliding window, more keys than queries in a causal call,
    and bit-equal repeated runs.
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
    if window and not row.window:
        violations.append("it takes no sliding window")
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
    visibility: Visibility | None = None,
    sinks: Tensor | None = None,
    backend: AttentionBackend,
) -> tuple[Tensor, Tensor]:
    """Attention of every sequence or document with itself, causal unless `visibility` says else.

    `query [B, S, Hq, D]`, `key [B, K, Hkv, D]`, `value [B, K, Hkv, Dv]` -> output `[B, S, Hq, Dv]`
    in their dtype and LSE `[B, Hq, S]` in the accumulation dtype. `scale` is `D ** -0.5` when None;
    `sinks [Hq]` are logits that take weight and have no value. Only `REFERENCE` differentiates the
    LSE. A ValueError says what does not fit or what the backend cannot do.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    visibility = visibility or Visibility()
    _check_operands(query, key, value, visibility, backend)
    if sinks is not None and sinks.shape != query.shape[2:3]:
        raise ValueError(
            f"attention: sinks {list(sinks.shape)} must hold one logit for each of the "
            f"{query.shape[2]} query heads"
        )
    if backend is AttentionBackend.REFERENCE:
        return attention_reference(
            query, key, value, scale=scale, visibility=visibility, sinks=sinks
        )
    return _Attention.apply(query, key, value, sinks, scale, visibility, backend)


def attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    visibility: Visibility | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The formula by plain autograd in the accumulation dtype, the output rounded once."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = _reference_scores(query, key, scale, visibility or Visibility())
    lse = scores.logsumexp(-1)
    # A query without keys: exp(-inf - 0) = 0, where exp(-inf - -inf) would be NaN.
    shift = lse.masked_fill(lse == -torch.inf, 0.0)
    probabilities = (scores - shift[..., None]).exp()
    out = torch.einsum("bhgij,bjhd->bihgd", probabilities, value.to(scores.dtype))
    out, lse = out.flatten(2, 3), lse.flatten(1, 2)
    if sinks is not None:
        out, lse = apply_sinks(out, lse, sinks)
    return out.to(query.dtype), lse


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    visibility: Visibility,
    backend: AttentionBackend,
) -> tuple[Tensor, Tensor]:
    """Output and LSE over these keys, as in `attention`, but without autograd."""
    _check_operands(query, key, value, visibility, backend)
    offsets = visibility.offsets
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    match backend:
        case AttentionBackend.REFERENCE:
            return attention_reference(query, key, value, scale=scale, visibility=visibility)
        case AttentionBackend.CUDNN:
            out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, visibility.causal, False, scale=scale
            )
            return out.transpose(1, 2), lse.squeeze(-1)
        case AttentionBackend.FLASH if query.is_cuda:
            rows = _flash_rows((query, key, value), visibility)
            operands = (*rows, *(offsets or (None, None)), query.shape[1], key.shape[1])
            out, lse, *_ = torch.ops.aten._flash_attention_forward(
                *operands, 0.0, visibility.causal, False, **_flash_settings(scale, visibility)
            )
            if offsets is not None:
                lse = lse.unflatten(1, query.shape[:2]).transpose(0, 1)
                lse = lse.masked_fill(lse == torch.inf, -torch.inf)  # what it says of no keys
            return out.view(*query.shape[:3], -1), lse
        case AttentionBackend.FLASH:
            causal, mask = _cpu_mask(query, key, visibility)
            blind = None
            if mask is not None:
                # A row without keys has no softmax: it sees all, and becomes 0 and -inf below.
                blind = (mask == -torch.inf).all(-1, keepdim=True)
                mask = mask.masked_fill(blind, 0.0)
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, attn_mask=mask, scale=scale
            )
            if blind is not None:
                out, lse = out.masked_fill(blind, 0.0), lse.masked_fill(blind[..., 0], -torch.inf)
            return out.transpose(1, 2), lse


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    visibility: Visibility,
    backend: AttentionBackend,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value that go through these keys.

    `grad` and `out` `[B, S, Hq, Dv]` and `lse` `[B, Hq, S]` are those of the whole softmax, other
    keys and sinks included.
    """
    # exp(s - inf) is 0 for a query without keys, where exp(-inf - -inf) would be NaN.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf).contiguous()
    lengths, rows = (query.shape[1], key.shape[1]), (grad.contiguous(), query, key, value, out)
    heads_first = [x.transpose(1, 2) for x in rows]
    match backend:
        case AttentionBackend.REFERENCE:
            return _reference_backward(*rows, lse, scale, visibility)
        case AttentionBackend.CUDNN:
            # Random state that only dropout would use; no bias, no offsets.
            unused = (*torch.zeros(2, 1, dtype=torch.int64, device=lse.device), None, None, None)
            grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                *heads_first, lse[..., None], *unused, *lengths, 0.0, visibility.causal, scale=scale
            )
        case AttentionBackend.FLASH if query.is_cuda:
            offsets = visibility.offsets or (None, None)
            if visibility.offsets is not None:
                lse = lse.transpose(0, 1).flatten(1).contiguous()
            state = torch.zeros(2, dtype=torch.uint64, device=lse.device)
            operands = (*_flash_rows(rows, visibility), lse, *offsets, *lengths, 0.0)
            dq, dk, dv = torch.ops.aten._flash_attention_backward(
                *operands, visibility.causal, state, state[0], **_flash_settings(scale, visibility)
            )
            return dq.view(query.shape), dk.view(key.shape), dv.view(value.shape)
        case AttentionBackend.FLASH:
            causal, mask = _cpu_mask(query, key, visibility)
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *heads_first, lse, 0.0, causal, attn_mask=mask, scale=scale
            )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def merge_attention(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add the result over other keys to `out` and `lse` in place, both of the dtype of `lse`."""
    total = torch.logaddexp(lse, part_lse)
    shift = total.masked_fill(total == -torch.inf, 0.0)  # -inf - -inf would be NaN
    kept, added = ((x - shift).exp().transpose(1, 2)[..., None] for x in (lse, part_lse))
    out.mul_(kept).add_(part * added)
    lse.copy_(total)


def expand_latent(
    latent: Tensor, rotary_key: Tensor, kv_b: Tensor, num_heads: int, num_nope: int
) -> tuple[Tensor, Tensor]:
    """`latent [B, K, R]`, shared `rotary_key [B, K, Dr]`, `kv_b [Hq * (Dn + Dv), R]` -> all heads'
    keys `[B, K, Hq, Dn + Dr]` and values `[B, K, Hq, Dv]`; `num_nope` is Dn."""
    heads = linear(latent, kv_b).unflatten(-1, (num_heads, -1))
    rotary = rotary_key[:, :, None].expand(-1, -1, num_heads, -1)
    return torch.cat([heads[..., :num_nope], rotary], -1), heads[..., num_nope:]


def expand_latent_backward(
    dkey: Tensor, dvalue: Tensor, latent: Tensor, kv_b: Tensor, num_nope: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of latent, rotary key (in fp32 or wider) and `kv_b`."""
    dheads = torch.cat([dkey[..., :num_nope], dvalue], -1).flatten(2)
    drotary = dkey[..., num_nope:].sum(2, dtype=accumulation_dtype(dkey.dtype))
    return dheads @ kv_b, drotary, dense_weight_grad(latent, dheads)


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add sinks `[Hq]` to the softmax of a finished result: the keys keep `sigmoid(lse - sink)`."""
    logits = sinks.to(lse.dtype)[:, None]
    kept = (lse - logits).sigmoid().transpose(1, 2)[..., None]
    return (out * kept).to(out.dtype), torch.logaddexp(lse, logits)


def sinks_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """`-sum over queries of exp(sink - lse) * delta`, `[Hq]`, with out and lse after the sinks."""
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)


def sequence_offsets(documents: Tensor, num_sequences: int, length: int) -> Tensor:
    """Offsets of documents `[D + 1]` int32, from 0 to the number of tokens, cut at sequences too.

    -> `[D + B + 2]` int32, ascending, for `Visibility`.
    """
    _check_offsets(documents, num_sequences * length)
    starts = torch.arange(num_sequences + 1, dtype=torch.int32, device=documents.device) * length
    # Sorted, not deduplicated: counting the distinct ones would make the host wait, and an offset
    # that occurs twice is an empty document.
    return torch.cat([documents, starts]).sort().values


class _Attention(torch.autograd.Function):
    """The pair of functions above as one differentiable operator."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        scale: float,
        visibility: Visibility,
        backend: AttentionBackend,
    ) -> tuple[Tensor, Tensor]:
        out, lse = attention_forward(
            query, key, value, scale=scale, visibility=visibility, backend=backend
        )
        if sinks is not None:
            out, lse = apply_sinks(out, lse, sinks)
        ctx.save_for_backward(query, key, value, out, lse, sinks)
        ctx.scale, ctx.visibility, ctx.backend = scale, visibility, backend
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_lse is not None:
            raise ValueError(
                "attention: a gradient arrived at the LSE, which only the backend 'reference' "
                "differentiates; detach the LSE or use that backend"
            )
        query, key, value, out, lse, sinks = ctx.saved_tensors
        settings = {"scale": ctx.scale, "visibility": ctx.visibility, "backend": ctx.backend}
        grads = attention_backward(grad, query, key, value, out, lse, **settings)
        dsinks = None if sinks is None else sinks_gradient(grad, out, lse, sinks)
        return *grads, dsinks, None, None, None


def _check_operands(
    query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, backend: AttentionBackend
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
    aligned = visibility.causal and visibility.offsets is None
    for offsets, length in zip(visibility.offsets or (), (q[1], k[1]), strict=False):
        _check_offsets(offsets, q[0] * length)
    violations = attention_violations(
        backend,
        query.device,
        query.dtype,
        q[3],
        v[3],
        packed=visibility.offsets is not None,
        window=visibility.window is not None,
        other_lengths=aligned and k[1] != q[1],
    )
    if aligned and k[1] < q[1] and backend is not AttentionBackend.REFERENCE:
        violations.append(
            f"{q[1]} queries of {k[1]} keys: some see none, which only 'reference' takes"
        )
    if violations:
        raise ValueError(f"attention with backend {backend.value!r}: {'; '.join(violations)}")


def _check_offsets(offsets: Tensor, num_tokens: int) -> None:
    """Values are trusted on CUDA, where a look would make the host wait."""
    fault = None
    if offsets.dtype != torch.int32 or offsets.ndim != 1:
        fault = f"{offsets.dtype} {list(offsets.shape)} must be int32 offsets [D+1]"
    elif offsets.device.type == "cpu":
        values = offsets.tolist()
        if values != sorted(values) or values[:1] + values[-1:] != [0, num_tokens]:
            fault = f"{values} must ascend from 0 to {num_tokens}, the number of tokens"
    if fault:
        raise ValueError(f"attention: documents {fault}")


def _visible_keys(query: Tensor, key: Tensor, visibility: Visibility) -> Tensor:
    """Which key each query sees, bool `[B, S, K]`."""
    segments, places = [], []
    for side, x in enumerate((query, key)):
        batch, length = x.shape[:2]
        tokens = torch.arange(batch * length, device=x.device, dtype=torch.int32)
        offsets = torch.arange(batch + 1, device=x.device, dtype=torch.int32) * length
        if visibility.offsets is not None:
            offsets = visibility.offsets[side]
        segment = torch.searchsorted(offsets, tokens, right=True)
        segments.append(segment.view(batch, -1))
        places.append((tokens - offsets[segment]).view(batch, -1))  # from the segment's end
    visible = segments[0][:, :, None] == segments[1][:, None, :]
    before = places[0][:, :, None] - places[1][:, None, :]
    if visibility.causal:
        visible = visible & (before >= 0)
    return visible if visibility.window is None else visible & (before < visibility.window)


def _reference_scores(query: Tensor, key: Tensor, scale: float, visibility: Visibility) -> Tensor:
    """`[B, Hkv, Hq / Hkv, S, K]` in the accumulation dtype, -inf where hidden."""
    wide = accumulation_dtype(query.dtype)
    grouped = query.to(wide).unflatten(2, (key.shape[2], -1))
    scores = torch.einsum("bihgd,bjhd->bhgij", grouped, key.to(wide)) * scale
    hidden = ~_visible_keys(query, key, visibility)
    return scores.masked_fill(hidden[:, None, None], -torch.inf)


def _reference_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    visibility: Visibility,
) -> tuple[Tensor, Tensor, Tensor]:
    scores = _reference_scores(query, key, scale, visibility)
    wide, groups = scores.dtype, (key.shape[2], -1)
    probabilities = (scores - lse.unflatten(1, groups)[..., None]).exp()
    grouped, dout = (x.to(wide).unflatten(2, groups) for x in (query, grad))
    delta = (dout * out.to(wide).unflatten(2, groups)).sum(-1).permute(0, 2, 3, 1)
    dscores = torch.einsum("bihgd,bjhd->bhgij", dout, value.to(wide)) - delta[..., None]
    dscores *= probabilities * scale
    dq = torch.einsum("bhgij,bjhd->bihgd", dscores, key.to(wide)).flatten(2, 3)
    dk = torch.einsum("bhgij,bihgd->bjhd", dscores, grouped)
    dv = torch.einsum("bhgij,bihgd->bjhd", probabilities, dout)
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


def _cpu_mask(query: Tensor, key: Tensor, visibility: Visibility) -> tuple[bool, Tensor | None]:
    """Whether torch's operator shall hide later keys itself, else a mask `[B, 1, S, K]`."""
    square = query.shape[1] == key.shape[1] or not visibility.causal
    if square and visibility.window is None and visibility.offsets is None:
        return visibility.causal, None
    hidden = ~_visible_keys(query, key, visibility)[:, None]
    return False, query.new_zeros(hidden.shape).masked_fill(hidden, -torch.inf)


def _flash_rows(tensors: Sequence[Tensor], visibility: Visibility) -> list[Tensor]:
    """With offsets the batch is one row of `B * S` tokens, cut at them."""
    return [x if visibility.offsets is None else x.flatten(0, 1) for x in tensors]


def _flash_settings(scale: float, visibility: Visibility) -> dict[str, float]:
    """FlashAttention counts the keys before and after a query's own; -1 is no limit."""
    left = -1 if visibility.window is None else visibility.window - 1
    right = 0 if visibility.causal else -1
    return {"scale": scale, "window_size_left": left, "window_size_right": right}

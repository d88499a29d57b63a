"""Attention with grouped query heads, packed documents, windows and sinks: output and LSE.

Per query head h, with g = h // (Hq / Hkv) the key/value head it shares:

    s[i, j] = scale * q[i, h] . k[j, g]      -inf where i must not see j
    lse[i]  = log(sum over j of exp(s[i, j]) [+ exp(sink[h])])
    out[i]  = sum over j of exp(s[i, j] - lse[i]) * v[j, g]
    ds      = exp(s - lse) * (dout . v' - delta),   delta[i] = dout[i] . out[i]

The LSE, which torch's public operator lacks, merges results over blocks of keys: given out and lse
over *all* keys, a backward over some yields their share of the gradients (ring attention, sinks). A
query that sees nothing gives 0 and LSE -inf.

`REFERENCE` holds all S x K scores; `FLASH` is torch's FlashAttention-2 (Dao 2023, arXiv 2307.08691)
or its CPU counterpart. The trap: below torch's public interface nothing is checked. When S and K
differ, cuDNN and the CPU operator align the mask at the top left; a query without keys gets +inf,
-inf or a finite LSE; cuDNN fills fp32 outputs with NaN. Hence `ATTENTION_TABLE`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pith_ops.device import DeviceColumn, accumulation_dtype, device_column
from pith_ops.linear import linear, weight_gradient


class AttentionBackend(Enum):
    """In the order of "auto"."""

    CUDNN = "cudnn"
    FLASH = "flash"
    REFERENCE = "reference"


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """Which of K keys each of S queries sees.

    Aligned at the bottom right: key j is `(i - S) - (j - K)` places before query i, in segments if
    there are `offsets`.
    """

    causal: bool = True
    """No later key."""
    window: int | None = None
    """The query's own key and `window - 1` before it, or None."""
    offsets: tuple[Tensor, Tensor] | None = None
    """`[N + 1]` int32, from 0 to `B * S` and `B * K`, of segments that see themselves only; None
    for the sequences."""

    def __post_init__(self) -> None:
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ValueError(
                f"attention window {self.window}, causal {self.causal}: a window is at least 1, "
                "and causal"
            )


@dataclass(frozen=True)
class _Capability:
    backend: AttentionBackend
    columns: tuple[DeviceColumn, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    any_head_dim: bool = False  # not only multiples of 8 up to 256
    other_value_dim: bool = False  # than that of queries and keys
    any_mask: bool = True  # offsets, windows, more keys than queries in a causal call
    deterministic: bool = True  # flash on CUDA: under torch.use_deterministic_algorithms


_GPUS = (DeviceColumn.SM_90, DeviceColumn.SM_100)  # The first ran on an H200, the second never.

ATTENTION_TABLE: tuple[_Capability, ...] = (
    _Capability(
        AttentionBackend.CUDNN, _GPUS, other_value_dim=True, any_mask=False, deterministic=False
    ),
    _Capability(AttentionBackend.FLASH, _GPUS),
    _Capability(
        AttentionBackend.FLASH,
        (DeviceColumn.CPU,),
        (torch.float64, torch.float32, torch.bfloat16, torch.float16),
        any_head_dim=True,
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
) -> AttentionBackend:
    """The backend of that name, or with "auto" the first that can; ValueError if it cannot."""
    violations = {
        backend.value: attention_violations(
            backend, device, dtype, head_dim, value_dim, packed=packed, window=window
        )
        for backend in AttentionBackend
    }
    able = [name for name, found in violations.items() if not found]
    requested = able[0] if requested == "auto" else requested
    if requested not in able:
        found = violations.get(requested, [f"unknown; allowed: auto, {', '.join(violations)}"])
        raise ValueError(
            f"attention backend {requested!r}: {'; '.join(found)}; use 'auto' or one that can: "
            f"{', '.join(able)}"
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
    more_keys: bool = False,
) -> list[str]:
    """What `backend` cannot do; `packed` with document offsets, `more_keys` than causal queries."""
    if backend is AttentionBackend.REFERENCE:
        return []
    rows = {
        column: row for row in ATTENTION_TABLE if row.backend is backend for column in row.columns
    }
    if (column := device_column(device)) not in rows:
        return [f"device {device} is none of {', '.join(column.value for column in rows)}"]
    row = rows[column]
    violations = []
    if dtype not in row.dtypes:
        violations.append(f"dtype {dtype} is none of {', '.join(map(str, row.dtypes))}")
    for name, dim in (("head_dim", head_dim), ("value_dim", value_dim)):
        if (dim % 8 or dim > 256) and not row.any_head_dim:
            violations.append(f"{name} {dim} is no multiple of 8 up to 256")
    if value_dim != head_dim and not row.other_value_dim:
        violations.append(f"value_dim {value_dim} differs from head_dim {head_dim}")
    if not row.any_mask:
        asked = {"document offsets": packed, "sliding window": window}
        asked["more keys than queries"] = more_keys
        violations += [f"it takes no {name}" for name in asked if asked[name]]
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
    """`query [B, S, Hq, D]`, `key [B, K, Hkv, D]`, `value [B, K, Hkv, Dv]` -> output
    `[B, S, Hq, Dv]` in their dtype, LSE `[B, Hq, S]` in fp32 or float64, which only `REFERENCE`
    differentiates.

    `scale` None is `D ** -0.5`, `visibility` None causal within sequences; `sinks [Hq]` are logits
    without a value. A ValueError says what does not fit or what the backend cannot do.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    settings = {"scale": scale, "visibility": visibility or Visibility(), "backend": backend}
    if backend is AttentionBackend.REFERENCE:
        return apply_sinks(*attention_forward(query, key, value, **settings), sinks)
    return _Attention.apply(sinks, settings, query, key, value)


def attention_reference(
    query: Tensor, key: Tensor, value: Tensor, scale: float, visibility: Visibility
) -> tuple[Tensor, Tensor]:
    """By plain autograd, the output rounded once."""
    wide = accumulation_dtype(query.dtype)
    grouped = query.to(wide).unflatten(2, (key.shape[2], -1))
    scores = torch.einsum("bihgd,bjhd->bhgij", grouped, key.to(wide)) * scale
    visible = _visible_keys(query, key, visibility)[:, None, None]
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    # Without keys exp(-inf - 0) = 0, where exp(-inf - -inf) would be NaN.
    shift = lse.masked_fill(lse == -torch.inf, 0.0)
    probabilities = (scores - shift[..., None]).exp()
    out = torch.einsum("bhgij,bjhd->bihgd", probabilities, value.to(wide))
    return out.flatten(2, 3).to(query.dtype), lse.flatten(1, 2)


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    visibility: Visibility,
    backend: AttentionBackend,
) -> tuple[Tensor, Tensor]:
    """`attention` without sinks, and without a gradient but by `REFERENCE`."""
    _check_operands(query, key, value, visibility, backend)
    heads_first = [x.transpose(1, 2) for x in (query, key, value)]
    match backend:
        case AttentionBackend.REFERENCE:
            return attention_reference(query, key, value, scale, visibility)
        case AttentionBackend.CUDNN:
            out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
                *heads_first, None, True, 0.0, visibility.causal, False, scale=scale
            )
            return out.transpose(1, 2), lse.squeeze(-1)
        case AttentionBackend.FLASH if query.is_cuda:
            rows, settings, window = _flash_arguments((query, key, value), query, key, visibility)
            out, lse, *_ = torch.ops.aten._flash_attention_forward(
                *rows, *settings, False, scale=scale, **window
            )
            if visibility.offsets is not None:
                lse = lse.unflatten(1, query.shape[:2]).transpose(0, 1)
                lse = lse.masked_fill(lse == torch.inf, -torch.inf)  # no keys
            return out.view(*query.shape[:3], -1), lse
        case AttentionBackend.FLASH:
            causal, mask = _cpu_mask(query, key, visibility)
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *heads_first, 0.0, causal, attn_mask=mask, scale=scale
            )
            if mask is not None:
                blind = (mask == -torch.inf).all(-1)
                out = out.masked_fill(blind[..., None], 0.0)
                lse = lse.masked_fill(blind, -torch.inf)
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
) -> tuple[Tensor, ...]:
    """Gradients through these keys; out and LSE are over all keys and sinks."""
    # exp(s - inf) = 0 for a query without keys.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf).contiguous()
    tensors = (grad.contiguous(), query, key, value, out)
    heads_first = [x.transpose(1, 2) for x in tensors]
    match backend:
        case AttentionBackend.REFERENCE:
            # Of the sum of `exp(part_lse - lse) * dout . (part - out)`.
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in (query, key, value)]
                q, k, v = (x.to(lse.dtype) for x in leaves)
                part, part_lse = attention_reference(q, k, v, scale, visibility)
                share = (part_lse - lse).exp().transpose(1, 2)[..., None]
                total = (share * grad * (part - out)).sum()
            return torch.autograd.grad(total, leaves)
        case AttentionBackend.CUDNN:
            unused = (*torch.zeros(2, 1, dtype=torch.int64, device=lse.device), None, None, None)
            settings = (query.shape[1], key.shape[1], 0.0, visibility.causal)
            grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                *heads_first, lse[..., None], *unused, *settings, scale=scale
            )
        case AttentionBackend.FLASH if query.is_cuda:
            if visibility.offsets is not None:
                lse = lse.transpose(0, 1).flatten(1).contiguous()
            rows, settings, window = _flash_arguments(tensors, query, key, visibility)
            unused = torch.zeros(2, dtype=torch.uint64, device=lse.device)
            dq, dk, dv = torch.ops.aten._flash_attention_backward(
                *rows, lse, *settings, unused, unused[0], scale=scale, **window
            )
            return dq.view(query.shape), dk.view(key.shape), dv.view(value.shape)
        case AttentionBackend.FLASH:
            causal, mask = _cpu_mask(query, key, visibility)
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *heads_first, lse, 0.0, causal, attn_mask=mask, scale=scale
            )
    return tuple(x.transpose(1, 2) for x in grads)


def merge_attention(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add the result over other keys to `out` and `lse` in place, both of one dtype."""
    total = torch.logaddexp(lse, part_lse)
    shift = total.masked_fill(total == -torch.inf, 0.0)  # -inf - -inf would be NaN
    kept, added = ((x - shift).exp().transpose(1, 2)[..., None] for x in (lse, part_lse))
    out.mul_(kept).add_(part * added)
    lse.copy_(total)


def expand_latent(
    latent: Tensor, rotary_key: Tensor, kv_b: Tensor, num_heads: int, num_nope: int
) -> tuple[Tensor, Tensor]:
    """`latent [B, K, R]`, `rotary_key [B, K, Dr]`, `kv_b [Hq * (Dn + Dv), R]` -> keys
    `[B, K, Hq, Dn + Dr]`, values `[B, K, Hq, Dv]`; `num_nope` is Dn."""
    heads = linear(latent, kv_b).unflatten(-1, (num_heads, -1))
    rotary = rotary_key[:, :, None].expand(-1, -1, num_heads, -1)
    return torch.cat([heads[..., :num_nope], rotary], -1), heads[..., num_nope:]


def expand_latent_backward(
    dkey: Tensor, dvalue: Tensor, latent: Tensor, kv_b: Tensor, num_nope: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of latent, rotary key (fp32 or wider), `kv_b`."""
    dheads = torch.cat([dkey[..., :num_nope], dvalue], -1).flatten(2)
    drotary = dkey[..., num_nope:].sum(2, dtype=accumulation_dtype(dkey.dtype))
    return dheads @ kv_b, drotary, weight_gradient(latent, dheads)


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add sinks `[Hq]`, if any, to a finished softmax: the keys keep `sigmoid(lse - sink)`."""
    if sinks is None:
        return out, lse
    if sinks.shape != lse.shape[1:2]:
        raise ValueError(
            f"attention: sinks {list(sinks.shape)} must hold one logit for each of the "
            f"{lse.shape[1]} heads"
        )
    logits = sinks.to(lse.dtype)[:, None]
    kept = (lse - logits).sigmoid().transpose(1, 2)[..., None]
    return (out * kept).to(out.dtype), torch.logaddexp(lse, logits)


def sinks_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """`-sum over queries of exp(sink - lse) * delta` `[Hq]`; out and lse include the sinks."""
    delta = (grad * out.to(lse.dtype)).sum(-1).transpose(1, 2)
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)


def sequence_offsets(documents: Tensor, num_sequences: int, length: int) -> Tensor:
    """Documents `[D + 1]` int32 -> `[D + B + 2]` for `Visibility`, cut at sequences too."""
    _check_offsets(documents, num_sequences * length)
    starts = torch.arange(num_sequences + 1, dtype=torch.int32, device=documents.device) * length
    # Not deduplicated: the host would wait for their number.
    return torch.cat([documents, starts]).sort().values


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sinks: Tensor | None, settings: dict[str, Any], *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, lse = apply_sinks(*attention_forward(*inputs, **settings), sinks)
        ctx.save_for_backward(sinks, *inputs, out, lse)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_lse is not None:
            raise ValueError(
                "attention: a gradient arrived at the LSE: detach it or use the backend 'reference'"
            )
        sinks, query, key, value, out, lse = ctx.saved_tensors
        dsinks = None if sinks is None else sinks_gradient(grad, out, lse, sinks)
        grads = attention_backward(grad, query, key, value, out, lse, **ctx.settings)
        return dsinks, None, *grads


def _check_operands(
    query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, backend: AttentionBackend
) -> None:
    q, k, v = query.shape, key.shape, value.shape
    dtypes = query.dtype, key.dtype, value.dtype
    fits = len(q) == len(k) == len(v) == 4 and q[0] == k[0] and q[3] == k[3] and k[:3] == v[:3]
    if not fits or q[2] % k[2] or len({*dtypes}) > 1:
        raise ValueError(
            f"attention: query {list(q)}, key {list(k)}, value {list(v)} must be [B, S, Hq, D], "
            f"[B, K, Hkv, D], [B, K, Hkv, Dv], Hq a multiple of Hkv, and {dtypes} must be equal"
        )
    for offsets, length in zip(visibility.offsets or (), (q[1], k[1]), strict=False):
        _check_offsets(offsets, q[0] * length)
    packed = visibility.offsets is not None
    more = k[1] - q[1] if visibility.causal and not packed else 0
    masks = {"packed": packed, "window": visibility.window is not None, "more_keys": more > 0}
    violations = attention_violations(backend, query.device, query.dtype, q[3], v[3], **masks)
    if more < 0 and backend is not AttentionBackend.REFERENCE:
        violations.append(
            f"{q[1]} queries, {k[1]} keys: some see none, which only 'reference' takes"
        )
    if violations:
        raise ValueError(f"attention with backend {backend.value!r}: {'; '.join(violations)}")


def _check_offsets(offsets: Tensor, num_tokens: int) -> None:
    """On CUDA values are trusted: looking would make the host wait."""
    fits = offsets.dtype == torch.int32 and offsets.ndim == 1
    if fits and offsets.device.type == "cpu":
        values = offsets.tolist()
        fits = values == sorted(values) and values[:1] + values[-1:] == [0, num_tokens]
    if not fits:
        raise ValueError(
            f"attention: {offsets.dtype} documents {offsets.tolist()} must ascend from 0 to "
            f"{num_tokens}, the tokens, and must be int32 [D + 1]"
        )


def _visible_keys(query: Tensor, key: Tensor, visibility: Visibility) -> Tensor:
    """Bool `[B or 1, S, K]`."""
    batch, offsets, lengths = len(query), visibility.offsets, (query.shape[1], key.shape[1])
    if offsets is None:
        batch, offsets = 1, [torch.arange(2, device=query.device) * length for length in lengths]
    segments, places = [], []
    for ends, length in zip(offsets, lengths, strict=True):
        tokens = torch.arange(batch * length, device=query.device, dtype=ends.dtype)
        tokens = tokens.view(batch, length)
        segments.append(torch.searchsorted(ends, tokens, right=True))
        places.append(tokens - ends[segments[-1]])
    visible = segments[0][:, :, None] == segments[1][:, None]
    before = places[0][:, :, None] - places[1][:, None]
    if visibility.causal:
        visible &= before >= 0
    return visible if visibility.window is None else visible & (before < visibility.window)


def _cpu_mask(query: Tensor, key: Tensor, visibility: Visibility) -> tuple[bool, Tensor | None]:
    """Whether torch hides later keys itself; else a mask `[B or 1, 1, S, K]`."""
    square = query.shape[1] == key.shape[1] or not visibility.causal
    if square and visibility.window is None and visibility.offsets is None:
        return visibility.causal, None
    hidden = ~_visible_keys(query, key, visibility)[:, None]
    return False, query.new_zeros(hidden.shape).masked_fill(hidden, -torch.inf)


def _flash_arguments(
    tensors: Sequence[Tensor], query: Tensor, key: Tensor, visibility: Visibility
) -> tuple[list[Tensor], tuple[Any, ...], dict[str, int]]:
    """Tensors (rows of tokens if there are offsets), settings, keys before and after or -1."""
    offsets, causal = visibility.offsets, visibility.causal
    rows = [x if offsets is None else x.flatten(0, 1) for x in tensors]
    left = -1 if visibility.window is None else visibility.window - 1
    window = {"window_size_left": left, "window_size_right": 0 if causal else -1}
    return rows, (*(offsets or (None, None)), query.shape[1], key.shape[1], 0.0, causal), window

"""Context parallelism: the ranks of the cp axis share every sequence.

Zigzag: of `2 * cp` blocks of a sequence rank r holds an early one, r, and a late one,
`2 * cp - 1 - r`, so that causal attention costs all ranks the same.

Ring (Liu et al., arXiv 2310.01889): keys and values go round; those of rank j are seen by rank r

    j = r   causally
    j < r   only the early block, in full
    j > r   only by the late block, in full

and the parts are merged by LSE while the next hop is under way. The backward makes the same round
with the merged output and LSE; gradients, in fp32 or wider, follow one hop behind. In latent
attention (MLA, DeepSeek-V2, arXiv 2405.04434) the latent and the heads' common rotary key travel
instead, and are expanded again in the backward.

With a sliding window a block fetches the `window - 1` keys before it, wherever they lie, and
returns their gradients.

The trap: all ranks of the axis must issue these exchanges in one order.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from pith_ops.attention import (
    AttentionBackend,
    Visibility,
    apply_sinks,
    attention,
    attention_backward,
    attention_forward,
    expand_latent,
    expand_latent_backward,
    merge_attention,
    sequence_offsets,
    sinks_gradient,
)
from pith_ops.device import accumulation_dtype
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from pith_engine.contract import Batch
from pith_engine.mesh import Axis
from pith_engine.runtime import Exchange, exchange


def shard_batch(batch: Batch, cp: Axis) -> Batch:
    """This rank's two blocks of every sequence, of a length that `2 * cp` must divide."""
    if cp.size == 1:
        return batch
    length, num_blocks = batch.sequence_length, 2 * cp.size
    if length % num_blocks:
        raise ValueError(f"sequence length {length} is no multiple of 2 x cp = {num_blocks}")
    early, late = _blocks_of(cp.rank, cp)
    tokens, targets, positions = (
        x.view(-1, num_blocks, length // num_blocks)[:, early : late + 1 : late - early].flatten()
        for x in (batch.tokens, batch.targets, batch.positions)
    )
    local = length // cp.size
    return replace(
        batch, tokens=tokens, targets=targets, positions=positions, sequence_length=local
    )


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    cp: Axis,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    backend: AttentionBackend,
) -> Tensor:
    """Causal attention within the sequences and documents of a batch.

    `query [T, Hq, D]`, `key [T, Hkv, D]`, `value [T, Hkv, Dv]` -> `[T, Hq, Dv]`; a query sees the
    `window` keys up to its own (None, 0: all); scale and sinks as in `attention`.
    """
    query, key, value = (x.unflatten(0, (-1, batch.sequence_length)) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    call = _Call(batch, cp, window, scale, backend)
    if cp.size == 1:
        _, _, visibility = call.meeting(0)
        out, _ = attention(query, key, value, sinks=sinks, visibility=visibility, **call.settings)
    elif call.window is None:
        out = _Ring.apply(query, key, value, None, sinks, call)
    else:
        # Before anything is sent: these refuse a bad window.
        visibilities = [
            call.visibility([span], [range(span.start - call.reach(span.start), span.stop)])
            for span in call.spans(cp.rank)
        ]
        blocks, parts = _Halo.apply(torch.cat([key, value], -1), call), []
        for q, kv, seen in zip(query.split(call.block, 1), blocks, visibilities, strict=True):
            k, v = kv.split((key.shape[-1], value.shape[-1]), -1)
            parts.append(attention(q, k, v, sinks=sinks, visibility=seen, **call.settings)[0])
        out = torch.cat(parts, 1)
    return out.flatten(0, 1)


def latent_attention(
    query: Tensor,
    latent: Tensor,
    rotary_key: Tensor,
    kv_b: Tensor,
    batch: Batch,
    cp: Axis,
    *,
    scale: float,
    backend: AttentionBackend,
) -> Tensor:
    """As `context_attention`, with keys and values expanded from a latent.

    `query [T, Hq, Dn + Dr]`, the others of `expand_latent` with T for B, K -> `[T, Hq, Dv]`.
    """
    tensors = [x.unflatten(0, (-1, batch.sequence_length)) for x in (query, latent, rotary_key)]
    call = _Call(batch, cp, None, scale, backend)
    return _Ring.apply(*tensors, kv_b, None, call).flatten(0, 1)


class _Call:
    """One attention; spans, length and offsets are those of unsharded sequences."""

    def __init__(
        self, batch: Batch, cp: Axis, window: int | None, scale: float, backend: AttentionBackend
    ):
        self.cp, self.window = cp, window or None
        self.settings: dict[str, Any] = {"scale": scale, "backend": backend}
        self.length = batch.sequence_length * cp.size
        self.block = batch.sequence_length // 2
        self.offsets = batch.documents  # and of sequences
        if self.offsets is not None:
            self.offsets = sequence_offsets(self.offsets, batch.num_sequences, self.length)

    def spans(self, rank: int) -> list[range]:
        return [range(b * self.block, (b + 1) * self.block) for b in _blocks_of(rank, self.cp)]

    def visibility(
        self, queries: list[range], keys: list[range], causal: bool = True
    ) -> Visibility:
        offsets = self.offsets
        if offsets is not None:
            offsets = (self.before(offsets, queries), self.before(offsets, keys))
        return Visibility(causal=causal, window=self.window, offsets=offsets)

    def before(self, offsets: Tensor, spans: list[range]) -> Tensor:
        """Tokens in the spans of all sequences before each offset."""
        if self.cp.size == 1:
            return offsets
        counts = offsets // self.length * sum(map(len, spans))
        for span in spans:
            counts = counts + (offsets % self.length - span.start).clamp(0, len(span))
        return counts

    def meeting(self, source: int) -> tuple[slice, slice, Visibility]:
        """Rows of queries here, those of a rank's keys that they see, and how."""
        both, early, late = slice(None), slice(0, self.block), slice(self.block, None)
        mine, theirs = self.spans(self.cp.rank), self.spans(source)
        if source == self.cp.rank:
            return both, both, self.visibility(mine, theirs)
        if source < self.cp.rank:
            return both, early, self.visibility(mine, theirs[:1], causal=False)
        return late, both, self.visibility(mine[1:], theirs, causal=False)

    def reach(self, start: int) -> int:
        """Keys that the window shows before the block that starts here."""
        return min((self.window or 1) - 1, start)


def _blocks_of(rank: int, cp: Axis) -> tuple[int, int]:
    return rank, 2 * cp.size - 1 - rank


class _Ring(torch.autograd.Function):
    """Keys and values travel, or with a `weight` latents and rotary keys."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        first: Tensor,
        second: Tensor,
        weight: Tensor | None,
        sinks: Tensor | None,
        call: _Call,
    ) -> Tensor:
        out = lse = query  # The own part comes first and replaces them.
        for source, (a, b) in _round([first, second], call.cp):
            rows, keys, visibility = call.meeting(source)
            key, value = _expand(query, a[:, keys], b[:, keys], weight)
            part, part_lse = attention_forward(
                query[:, rows], key, value, visibility=visibility, **call.settings
            )
            if source == call.cp.rank:
                out, lse = part.to(part_lse.dtype, copy=True), part_lse
            else:
                merge_attention(out[:, rows], lse[..., rows], part, part_lse)
        out, lse = apply_sinks(out, lse, sinks)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, out, lse, first, second, weight, sinks)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, out, lse, first, second, weight, sinks = ctx.saved_tensors
        call: _Call = ctx.call
        dquery = torch.zeros_like(query, dtype=lse.dtype)
        dweight = lse.new_zeros(() if weight is None else weight.shape)
        # Gradients of the keys at hand, from ranks that had them before.
        carried = [lse.new_zeros(x.shape) for x in (first, second)]
        hop = exchange([], [], call.cp)
        for source, (a, b) in _round([first, second], call.cp):
            rows, keys, visibility = call.meeting(source)
            key, value = _expand(query, a[:, keys], b[:, keys], weight)
            dout, q, o = (x[:, rows] for x in (grad, query, out))
            dq, dk, dv = attention_backward(
                dout, q, key, value, o, lse[..., rows], visibility=visibility, **call.settings
            )
            dquery[:, rows] += dq
            if weight is not None:
                num_nope = query.shape[-1] - second.shape[-1]
                dk, dv, part = expand_latent_backward(dk, dv, a[:, keys], weight, num_nope)
                dweight += part
            hop.wait_sends()
            for total, part in zip(carried, (dk, dv), strict=True):
                total[:, keys] += part
            hop, carried = _hop(carried, call.cp)
        hop.wait_sends()
        dfirst, dsecond = (x.to(first.dtype) for x in carried)
        dweight = None if weight is None else dweight.to(weight.dtype)
        dsinks = None if sinks is None else sinks_gradient(grad, out, lse, sinks)
        return dquery.to(query.dtype), dfirst, dsecond, dweight, dsinks, None


def _expand(
    query: Tensor, first: Tensor, second: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    if weight is None:
        return first, second
    return expand_latent(first, second, weight, query.shape[2], query.shape[3] - second.shape[2])


def _round(tensors: list[Tensor], cp: Axis) -> Iterator[tuple[int, list[Tensor]]]:
    """Every rank and its tensors, own first, the next on their way."""
    tensors = [x.contiguous() for x in tensors]
    for step in range(cp.size - 1):
        hop, arriving = _hop(tensors, cp)
        yield (cp.rank - step) % cp.size, tensors
        hop.wait_sends()
        tensors = arriving
    yield (cp.rank + 1) % cp.size, tensors


def _hop(tensors: list[Tensor], cp: Axis) -> tuple[Exchange, list[Tensor]]:
    """Start to send to the next rank; what will arrive."""
    if cp.size == 1:
        return exchange([], [], cp), tensors
    arriving = [torch.empty_like(x) for x in tensors]
    sends = [(x, (cp.rank + 1) % cp.size) for x in tensors]
    receives = [(x, (cp.rank - 1) % cp.size) for x in arriving]
    return exchange(sends, receives, cp), arriving


class _Halo(torch.autograd.Function):
    """Own blocks of keys and values, each after what its window shows before it."""

    @staticmethod
    def forward(ctx: Any, kv: Tensor, call: _Call) -> tuple[Tensor, ...]:
        blocks = [
            pad(block, (0, 0, 0, 0, call.reach(span.start), 0))
            for span, block in zip(call.spans(call.cp.rank), kv.split(call.block, 1), strict=True)
        ]
        _exchange_halos(kv, blocks, call, home=False)
        ctx.call = call
        return tuple(blocks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wide = [grad.to(accumulation_dtype(grad.dtype)) for grad in grads]
        dkv = torch.cat([grad[:, -ctx.call.block :] for grad in wide], 1)
        _exchange_halos(dkv, wide, ctx.call, home=True)
        return dkv.to(grads[0].dtype), None


def _exchange_halos(kv: Tensor, blocks: list[Tensor], call: _Call, *, home: bool) -> None:
    """Add rows of `kv` to halos of later blocks, or (`home`) halos to their rows."""
    cp, size = call.cp, call.block
    own, sends, receives, sums = _blocks_of(cp.rank, cp), [], [], []
    for earlier, block in combinations(range(2 * cp.size), 2):
        end = call.reach(block * size) - (block - 1 - earlier) * size  # its end in the halo
        if end <= 0:
            continue
        count, here, there = min(end, size), None, None
        if earlier in own:
            last = (own.index(earlier) + 1) * size
            here = kv[:, last - count : last]
        if block in own:
            there = blocks[own.index(block)][:, end - count : end]
        source, target = (there, here) if home else (here, there)
        peer = min(_blocks_of(earlier if block in own else block, cp))
        if target is not None:
            if source is None:
                source = target.new_empty(target.shape)
                receives.append((source, peer))
            sums.append((target, source))
        elif source is not None:
            sends.append((source.contiguous(), peer))
    exchange(sends, receives, cp).wait_sends()
    for target, source in sums:
        target += source

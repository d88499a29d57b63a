"""Top-k gates: which experts a token goes to, and with what weight.

    s = softmax(x W^T)            scores over all N experts, or sigmoids (DeepSeek-V3)
    ids = the K largest           ties go to the lower expert id; of s + bias, where there is one
    w = s[ids]                    or s[ids] / sum(s[ids]) with `normalise` (`norm_topk_prob`)

times `scaling` either way; GPT-OSS takes the softmax of the chosen logits. All return ids int32
`[T, K]`, best first, weights `[T, K]` and scores for balancing `[T, N]`, whose rows sum to 1.

All runs in the accumulation dtype, autocast or not: experts often differ by less than a bf16 step.
The traps: `torch.topk` promises no order among ties, a stable sort does; experts of an excluded
group filled with 0 would win over negative biased scores; a recomputed forward is handed the ids of
the first, since its logits may round otherwise.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pith_ops.device import accumulation_dtype


@dataclass(frozen=True)
class ExpertGroups:
    """Group-limited routing: a token's experts come from its best groups."""

    num_groups: int
    """Groups of neighbouring experts."""
    num_chosen: int
    """Of them, for a token."""
    best: int
    """Experts whose scores make a group's: 1 in V2, 2 in V3."""


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x [T, H]`, `weight [N, H]`, `bias [N]` -> `[T, N]` in the accumulation dtype."""
    dtype = accumulation_dtype(torch.promote_types(x.dtype, weight.dtype))
    with torch.autocast(x.device.type, enabled=False):
        bias = None if bias is None else bias.to(dtype)
        return functional.linear(x.to(dtype), weight.to(dtype), bias)


def score_topk(
    logits: Tensor,
    top_k: int,
    normalise: bool,
    *,
    sigmoid: bool = False,
    groups: ExpertGroups | None = None,
    scaling: float = 1.0,
    chosen: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """From `logits [T, N]`; `bias [N]` is added for the choice alone (arXiv 2408.15664).

    `chosen` ids are taken as they are. A ValueError refuses `top_k`, `chosen` or `groups` that do
    not fit.
    """
    logits = logits.to(accumulation_dtype(logits.dtype))
    scores = logits.sigmoid() if sigmoid else logits.softmax(1)
    ids = _choose(logits, scores, top_k, groups, chosen, bias)
    weights = scores.gather(1, ids)
    if normalise:
        weights = weights / (weights.sum(1, keepdim=True) + _TINY)
    if scaling != 1:
        weights = weights * scaling
    if sigmoid:
        scores = scores / (scores.sum(1, keepdim=True) + _TINY)
    return ids.to(torch.int32), weights, scores


def topk_softmax(
    logits: Tensor, top_k: int, *, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `score_topk`, weights being the softmax over the chosen logits."""
    logits = logits.to(accumulation_dtype(logits.dtype))
    scores = logits.softmax(1)
    ids = _choose(logits, scores, top_k, None, chosen, None)
    return ids.to(torch.int32), logits.gather(1, ids).softmax(1), scores


_TINY = 1e-20
"""DeepSeek's guard against sums of zero; in others it rounds away."""


@torch.no_grad()
def _choose(
    logits: Tensor,
    scores: Tensor,
    top_k: int,
    groups: ExpertGroups | None,
    chosen: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Ids int64 `[T, K]`."""
    num_tokens, num_experts = logits.shape
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k: {top_k} is not between 1 and the {num_experts} experts")
    if chosen is not None:
        if chosen.shape != (num_tokens, top_k):
            raise ValueError(f"chosen: {list(chosen.shape)} is not {[num_tokens, top_k]}, [T, K]")
        return chosen.long()
    if bias is not None:
        keys = scores + bias
    else:
        # Not scores where logits do: scores that underflow or round would tie.
        keys = scores if groups is not None and groups.best > 1 else logits
    if groups is not None:
        keys = _mask_groups(keys, top_k, groups)
    return keys.sort(dim=1, descending=True, stable=True).indices[:, :top_k]


def _mask_groups(keys: Tensor, top_k: int, groups: ExpertGroups) -> Tensor:
    """-inf for experts outside the chosen groups."""
    num_experts = keys.shape[1]
    size, rest = divmod(num_experts, max(groups.num_groups, 1))
    fit = not rest and 1 <= groups.num_chosen <= groups.num_groups and 1 <= groups.best <= size
    if not fit or groups.num_chosen * size < top_k:
        raise ValueError(
            f"groups: {groups} does not fit {num_experts} experts, top_k {top_k}: num_groups must "
            "divide the experts, num_chosen hold top_k, best be from 1 to a group's size"
        )
    grouped = keys.unflatten(1, (groups.num_groups, size))
    totals = grouped.topk(groups.best, dim=2).values.sum(2)
    kept = totals.sort(dim=1, descending=True, stable=True).indices[:, : groups.num_chosen]
    excluded = torch.ones_like(totals, dtype=torch.bool).scatter(1, kept, False)
    return grouped.masked_fill(excluded[:, :, None], -math.inf).flatten(1)

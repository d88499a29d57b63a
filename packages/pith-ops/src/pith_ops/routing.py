"""Top-k gates: which experts a token goes to, and with what weight.

    s = softmax(x W^T)            scores over all N experts
    ids = the K largest           ties go to the lower expert id; of s + bias, where there is one
    w = s[ids]                    or s[ids] / sum(s[ids]) with `normalise` (`norm_topk_prob`)

Everything runs in the accumulation dtype, autocast or not: neighbouring experts often differ by
less than a bf16 step. The trap: `torch.topk` promises no order among ties; a stable sort does. A
recomputed forward is handed the ids of the first: its logits may round otherwise.
"""

import torch
from torch import Tensor
from torch.nn import functional

from pith_ops.device import accumulation_dtype


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """`x [T, H]`, `weight [N, H]` -> `[T, N]` in the accumulation dtype."""
    dtype = accumulation_dtype(torch.promote_types(x.dtype, weight.dtype))
    with torch.autocast(x.device.type, enabled=False):
        return functional.linear(x.to(dtype), weight.to(dtype))


def softmax_topk(
    logits: Tensor,
    top_k: int,
    normalise: bool,
    *,
    chosen: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`logits [T, N]` -> ids int32, first choice first, and weights, `[T, K]`; scores `[T, N]`.

    `bias [N]` is added to the scores for the choice alone (arXiv 2408.15664); `chosen` ids are
    taken as they are. A ValueError refuses a `top_k` outside 1..N and `chosen` of another shape.
    """
    num_experts = logits.shape[1]
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k: {top_k} is not between 1 and the {num_experts} experts")
    logits = logits.to(accumulation_dtype(logits.dtype))
    scores = logits.softmax(1)
    if chosen is None:
        # Sorting logits, not scores: scores that underflow or round would tie where logits do not.
        keys = logits.detach() if bias is None else scores.detach() + bias.detach()
        ids = keys.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    elif chosen.shape != (len(logits), top_k):
        raise ValueError(f"chosen: {list(chosen.shape)} is not {[len(logits), top_k]}, [T, K]")
    else:
        ids = chosen.long()
    weights = scores.gather(1, ids)
    if normalise:
        weights = weights / weights.sum(1, keepdim=True)
    return ids.to(torch.int32), weights, scores

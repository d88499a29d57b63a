"""Top-k gates: which experts a token goes to, and with what weight.

    s = softmax(x W^T)            scores over all N experts
    ids = the K largest           ties go to the lower expert id
    w = s[ids]                    or s[ids] / sum(s[ids]) with `normalise` (`norm_topk_prob`)

Everything runs in fp32, or float64 for a float64 model, autocast or not: neighbouring experts
often differ by less than a bf16 step, so that rounding would send tokens elsewhere.

Gradients flow through the weights and the scores; the choice itself has none. The trap is ties:
`torch.topk` promises no order among equal values, so a recomputed forward could pick other experts
than the first one did. A stable sort always picks the same.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from pith_ops.device import accumulation_dtype


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Router scores before the softmax.

    Args:
        x: tokens `[T, H]` in any floating dtype.
        weight: router weight `[N, H]`, usually kept in fp32.

    Returns:
        `[T, N]` in the accumulation dtype, never down-cast by autocast.
    """
    dtype = accumulation_dtype(torch.promote_types(x.dtype, weight.dtype))
    with torch.autocast(x.device.type, enabled=False):
        return torch_linear(x.to(dtype), weight.to(dtype))


def softmax_topk(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the `top_k` experts of each token by softmax score.

    Args:
        logits: `[T, N]`.
        top_k: K, experts per token.
        normalise: divide the K weights by their sum (Hugging Face's `norm_topk_prob`).

    Returns:
        `(ids, weights, scores)`: ids int32 `[T, K]`, largest score first, equal ones by ascending
        id; weights `[T, K]` and scores `[T, N]` in the accumulation dtype, differentiable.

    Raises:
        ValueError: `top_k` is not in 1..N.
    """
    num_experts = logits.shape[1]
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k: {top_k} is not between 1 and the {num_experts} experts")
    logits = logits.to(accumulation_dtype(logits.dtype))
    scores = logits.softmax(1)
    # Sorting logits, not scores: scores that underflow or round would tie where logits do not.
    ids = logits.detach().sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if normalise:
        weights = weights / weights.sum(1, keepdim=True)
    return ids.to(torch.int32), weights, scores

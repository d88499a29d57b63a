"""Load balancing of experts: auxiliary losses, selection bias, the load that a run shows.

For the N members of a router's pool, c_i how often counted tokens (with a target) chose i, and s_ti
the normalised score of token t,

    f_i = N c_i / sum over j of c_j     P_i = mean over the counted tokens of s_ti
    L   = sum over i of f_i P_i

which is 1 when the load is even, whatever the top-k (Hugging Face's value is k times this). A step
adds the coefficient times the sum of L over layers; f has no gradient. Methods count c over:

    micro-batch   the sequences of one micro-batch       arXiv 2101.03961
    sequence      each sequence                          2412.19437
    global-batch  the global batch of the step before    2501.11873
    bias          no loss: `update_balance_biases`       2408.15664

A global batch's own counts are not known at its first backward; the first step takes even ones. Any
method goes with the router z-loss (2202.08906), mean over counted tokens of logsumexp(logits)^2.

The trap: no value may depend on how sequences fall into micro-batches or ranks, so these are sums,
which the caller divides by the global count.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, log
from typing import Literal, get_args

import torch
from torch import Tensor

from pith_engine.contract import Batch, Role, Routing
from pith_engine.fsdp import ShardedParameter, cut_block
from pith_engine.mesh import Axis
from pith_engine.runtime import all_reduce

BalanceMethod = Literal["none", "micro-batch", "sequence", "global-batch", "bias"]


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """How experts are kept evenly loaded."""

    method: BalanceMethod = "sequence"
    """Auxiliary loss over each `sequence`, the `global-batch` with the factors of the step before,
    or each `micro-batch`, which alone depends on its size. `bias`: no loss, a bias that only
    selects, for families whose Hugging Face format has it."""
    coefficient: float = 1e-3
    """Weight of the auxiliary loss (at least 0); `none` and `bias` do not read it."""
    bias_rate: float = 1e-3
    """What `bias` moves an expert's bias by in a step (above 0)."""
    z_coefficient: float = 0.0
    """Weight of the router z-loss, with any method; 0 leaves it out."""

    def violations(self) -> list[str]:
        """What is out of range, a line each."""
        methods, numbers = get_args(BalanceMethod), "allowed are finite numbers"
        weight, rate, z_weight = self.coefficient, self.bias_rate, self.z_coefficient
        is_sound = {
            f"method is {self.method!r}: allowed are {', '.join(methods)}": self.method in methods,
            f"coefficient is {weight}: {numbers} from 0": 0 <= weight < inf,
            f"z_coefficient is {z_weight}: {numbers} from 0": 0 <= z_weight < inf,
            f"bias_rate is {rate}: {numbers} above 0": 0 < rate < inf,
        }
        return [f"balance.{fault}" for fault, sound in is_sound.items() if not sound]


def count_choices(routing: Routing, batch: Batch, method: BalanceMethod) -> Tensor:
    """Counted tokens' choices, `[B, N]` int64: with `sequence` a row a sequence, else one."""
    num_rows = batch.num_sequences if method == "sequence" else 1
    valid = batch.counted[:, None] & (routing.chosen >= 0)
    ids = routing.chosen.clamp(min=0).long().view(num_rows, -1)
    counts = ids.new_zeros(num_rows, routing.scores.shape[1])
    return counts.scatter_add(1, ids, valid.view(num_rows, -1).long())


def load_factors(
    method: BalanceMethod, counts: Tensor, previous: Tensor | None, cp: Axis
) -> Tensor | None:
    """f, `[B, N]` float64, from `count_choices`; None without an auxiliary loss.

    `previous` `[N]`: the choices of the step before, None at the first.
    """
    if method in ("none", "bias"):
        return None
    if method == "global-batch":
        counts = torch.ones_like(counts) if previous is None else previous[None]
    else:
        counts = all_reduce(counts.clone(), cp)
    return counts.double() / counts.sum(1, keepdim=True).clamp(min=1) * counts.shape[1]


def balance_loss(routing: Routing, batch: Batch, factors: Tensor) -> Tensor:
    """Sum over counted tokens and the pool of f * score, in the scores' dtype."""
    num_rows, pool = factors.shape
    counted = routing.scores * batch.counted[:, None]
    return (factors.to(counted.dtype) * counted.view(num_rows, -1, pool).sum(1)).sum()


def router_z_loss(routing: Routing, batch: Batch) -> Tensor:
    """Sum over counted tokens of logsumexp(logits)^2, in the logits' dtype."""
    return (routing.logits.logsumexp(1).square() * batch.counted).sum()


def auxiliary_losses(
    config: BalanceConfig, routing: Routing, batch: Batch, factors: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """Weighted sum of balance loss and z-loss (None: both off); both unweighted, `[2]` float64."""
    terms, values = [], routing.scores.new_zeros(2, dtype=torch.float64)
    if factors is not None:
        balance = balance_loss(routing, batch, factors)
        values[0] = balance.detach()
        terms.append(config.coefficient * balance)
    if config.z_coefficient:
        z = router_z_loss(routing, batch)
        values[1] = z.detach()
        terms.append(config.z_coefficient * z)
    return torch.stack(terms).sum() if terms else None, values


@torch.no_grad()
def update_balance_biases(
    parameters: Iterable[ShardedParameter], counts: Mapping[int, Tensor], rate: float
) -> None:
    """After the optimizer: bias += rate * sign(mean - count), on this rank's blocks.

    `counts` are `Pipeline.expert_counts`. The biases' mean may drift: no selection notices.
    """
    for parameter in parameters:
        if parameter.role is Role.BALANCE_BIAS:
            total = counts[int(parameter.name.split(".")[1])]
            # In integers: a rounded mean would move an expert that has exactly the mean.
            direction = torch.sign(total.sum() - len(total) * total)
            block = cut_block(direction, parameter.offsets, parameter.shard.shape)
            parameter.shard.add_(block.to(parameter.shard.dtype), alpha=rate)


def layer_loads(counts: Tensor) -> Tensor:
    """How even the load is, `[L, 3]` float64, from choices `[L, N]` of a whole step.

    Columns: largest over mean; members that nobody chose; entropy of the shares over log N (0 is
    one expert for all).
    """
    shares, pool = counts.double() / counts.sum(1, keepdim=True).clamp(min=1), counts.shape[1]
    # A pool of one is even.
    entropies = torch.special.entr(shares).sum(1) / log(pool) if pool > 1 else shares[:, 0]
    return torch.stack([shares.amax(1) * pool, (counts == 0).sum(1).double(), entropies], dim=1)

"""AdamW on this rank's shards (Loshchilov and Hutter, arXiv 1711.05101).

    m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g^2
    w <- w - lr * wd * w - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

Weight decay wd acts where `Role.is_decayed`. All is elementwise: a mesh changes nothing. torch's
fused kernel is a function here: checkpoints need moments by name before the first step.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Literal

import torch
from torch.optim.adamw import adamw

from pith_engine.fsdp import ShardedParameter
from pith_engine.mesh import Mesh
from pith_engine.runtime import gather_objects
from pith_engine.violations import raise_violations


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Which optimizer, and its constants."""

    method: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for matrices, AdamW for embedding, head, router, norms and biases."""
    momentum: float | None = None
    """Muon's momentum, from 0 to below 1 (default 0.95); muon only."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of the two moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices, multiplied by the learning rate."""

    def violations(self) -> list[str]:
        """What is out of range, a line each."""
        method, momentum, betas, decay = self.method, self.momentum, self.betas, self.weight_decay
        fix = "set --optim.momentum None or use optim.method muon"
        is_unread = method == "adamw" and momentum is not None
        is_sound = {
            f"method = {method!r}: adamw or muon": method in ("adamw", "muon"),
            f"momentum = {momentum}: from 0 to below 1": momentum is None or 0 <= momentum < 1,
            f"momentum = {momentum} but AdamW has betas; {fix}": not is_unread,
            f"betas = {betas}: each from 0 to below 1": all(0 <= beta < 1 for beta in betas),
            f"eps = {self.eps}: above 0 and finite": 0 < self.eps < inf,
            f"weight_decay = {decay}: 0 or more and finite": 0 <= decay < inf,
        }
        return [f"optim.{fault}" for fault, sound in is_sound.items() if not sound]


def describe_groups(groups: dict[str, list[ShardedParameter]], mesh: Mesh) -> str:
    """A table of what each method updates; all ranks call it. Gate and up are two tensors."""
    counts = Counter[tuple[str, str]]()
    for method, members in groups.items():
        for p in members:
            row = f"{method:<10} {p.role.value:<14}"
            counts[row, "tensors"] += max(1, len(p.parts))
            counts[row, "elements"] += prod(p.global_shape)
    counts = sum(gather_objects(counts, mesh.pp), Counter())
    lines = [f"{'optimizer':<10} {'role':<14} {'tensors':>8} {'elements':>16}"]
    for row in sorted({row for row, _ in counts}):
        lines.append(f"{row} {counts[row, 'tensors']:>8} {counts[row, 'elements']:>16,}")
    return "\n".join(lines)


class AdamW:
    """One rank's optimizer; a resumed run sets `num_steps`, the updates so far.

    `groups`: method -> what it trains. `moments`: stored name -> live tensors like the shard.
    """

    def __init__(self, parameters: Sequence[ShardedParameter], config: OptimizerConfig):
        raise_violations(config.violations(), "optimizer")
        self.num_steps = 0
        self._config = config
        trained = [p for p in parameters if p.role.is_trained]
        self.groups = {"adamw": trained}
        self.moments = {
            p.name: {name: torch.zeros_like(p.shard) for name in ("exp_avg", "exp_avg_sq")}
            for p in trained
        }
        assert len(self.moments) == len(trained), "two parameters have one name"

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update all shards."""
        beta1, beta2 = self._config.betas
        held = [p for p in self.groups["adamw"] if p.shard.numel()]
        for decayed in (True, False):
            members = [p for p in held if p.role.is_decayed == decayed]
            if not members:
                continue
            moments = [self.moments[p.name] for p in members]
            device = members[0].shard.device
            # The kernel adds one to the count of steps first.
            counts = torch.full((len(members),), float(self.num_steps), device=device)
            adamw(
                [p.shard for p in members],
                [p.grad for p in members],
                [m["exp_avg"] for m in moments],
                [m["exp_avg_sq"] for m in moments],
                [],
                list(counts.unbind()),
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=lr,
                weight_decay=self._config.weight_decay if decayed else 0.0,
                eps=self._config.eps,
                maximize=False,
            )
        self.num_steps += 1

"""Executes a schedule table: micro-batches through the two chunks of every rank, and back.

For each slot of its row of the table, a rank

    1. starts one batched exchange: the sends of the previous slot and the receives of this one,
    2. waits for the receives and drops what earlier exchanges have sent,
    3. runs the actions as operations of `overlap.py`,
    4. keeps the results for its other chunk or the next exchange.

Only `hidden` and its gradient travel, `[T, H]` in the compute dtype.

The trap: a batched exchange is a meeting. Those of the table are proved; send nothing outside it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from pith_ops.device import accumulation_dtype
from pith_ops.linear import WeightGradQueue
from torch import Tensor

from pith_engine.balance import BalanceConfig, layer_loads
from pith_engine.contract import Batch, ModelChunk
from pith_engine.mesh import Mesh
from pith_engine.overlap import Recompute, interleave
from pith_engine.runtime import Exchange, all_reduce, exchange, gather_objects
from pith_engine.schedule import (
    Action,
    ActionKind,
    Output,
    ScheduleTable,
    Transfer,
    TransferKind,
    dualpipev,
    forward_only,
    made_outputs,
    needed_outputs,
)
from pith_engine.stages import ChunkPass, communication_streams, run_operations
from pith_engine.violations import raise_violations


@dataclass(frozen=True, kw_only=True)
class StepLosses:
    """What a step measured over the whole mesh, equal on every rank."""

    loss: float
    """Mean over the targets; 0 without."""
    num_targets: int
    """How many they are."""
    balance: float = 0.0
    """Without coefficient, mean over layers: 1 is even, 0 is off."""
    z_loss: float = 0.0
    """As `balance`."""
    max_load: float = 0.0
    """Largest expert load over the mean load of its layer; 0 without MoE layers."""
    dead_experts: int = 0
    """Experts of all layers that no counted token chose."""
    load_entropy: float = 0.0
    """Entropy of the load over its largest value, mean over layers: 1 is even."""


class Pipeline:
    """Runs whole steps with this rank's two chunks, lower one first; `dtype` is that of compute.

    A ValueError for another number of chunks, or a `balance` out of range.
    """

    def __init__(
        self,
        chunks: Sequence[ModelChunk],
        mesh: Mesh,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        balance: BalanceConfig,
        recompute: Recompute = "none",
    ):
        if len(chunks) != 2:
            raise ValueError(f"a rank holds 2 chunks (V-shaped placement), got {len(chunks)}")
        raise_violations(balance.violations(), "expert balance")
        self.mesh, self.balance, self.recompute = mesh, balance, recompute
        self.chunks = {mesh.pp.rank: chunks[0], 2 * mesh.pp.size - 1 - mesh.pp.rank: chunks[1]}
        self.hidden_size, self.dtype, self.device = hidden_size, dtype, device
        self.streams = communication_streams(device)
        layers = [item for chunk in chunks for item in chunk.decoder_layers().items()]
        self.moe_layers = [number for number, layer in layers if layer.num_local_experts]
        self.expert_counts: dict[int, Tensor] = {}
        """MoE layer -> `[N]` int64 choices in the latest global batch; empty at first."""

    def train_step(self, batches: Sequence[Batch], num_targets: int) -> StepLosses:
        """Forward and backward of this rank's micro-batches; gradients are added to `.grad`.

        At least `2 * pp` (else a ValueError), of equal token counts; `num_targets` is
        `count_targets`, and with 0 nothing is run.
        """
        table = dualpipev(self.mesh.pp.size, len(batches))
        if num_targets == 0:
            return StepLosses(loss=0.0, num_targets=0)
        dtype = accumulation_dtype(self.dtype)
        scale = torch.tensor(1.0 / num_targets, dtype=dtype, device=self.device)
        return _Step(self, batches, scale).run(table, num_targets)

    def saved_counts(self) -> dict[str, list[int]]:
        """`expert_counts` of all ranks of pp, which call it, for JSON."""
        own = {str(layer): counts.tolist() for layer, counts in self.expert_counts.items()}
        return {layer: c for part in gather_objects(own, self.mesh.pp) for layer, c in part.items()}

    def restore_counts(self, saved: Mapping[str, list[int]]) -> None:
        """From `saved_counts` of any mesh: all MoE layers or none."""
        self.expert_counts = {
            number: torch.tensor(saved[str(number)], dtype=torch.int64, device=self.device)
            for number in (self.moe_layers if saved else ())
        }

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], num_targets: int) -> StepLosses:
        """As `train_step`, forward only; balance and z-loss are 0."""
        table = forward_only(self.mesh.pp.size, len(batches))
        return _Step(self, batches, None).run(table, num_targets)


class _Step:
    def __init__(self, pipeline: Pipeline, batches: Sequence[Batch], loss_scale: Tensor | None):
        self.pipeline, self.batches, self.loss_scale = pipeline, batches, loss_scale
        self.passes: dict[tuple[int, int], ChunkPass] = {}
        self.deferred: dict[tuple[int, int], WeightGradQueue] = {}
        self.parcels: dict[Output, Tensor] = {}
        self.started: list[Exchange] = []
        self.sums = torch.zeros(3, dtype=torch.float64, device=pipeline.device)
        self.expert_counts: dict[int, Tensor] = {}

    def run(self, table: ScheduleTable, num_targets: int) -> StepLosses:
        sends: tuple[Transfer, ...] = ()
        for slot in table[self.pipeline.mesh.pp.rank]:
            self._exchange(sends, slot.receives)
            self._act(slot.actions)
            sends = slot.sends
        self._exchange(sends, ())
        self._drop_sent()
        assert not self.passes and not self.deferred and not self.parcels, "work is left behind"
        return self._losses(num_targets)

    def _losses(self, num_targets: int) -> StepLosses:
        mesh = self.pipeline.mesh
        counts = [count for _, count in sorted(self.expert_counts.items())]
        totals = all_reduce(torch.cat(counts), mesh.data) if counts else self.sums[:0]
        if self.loss_scale is not None:
            self.pipeline.expert_counts = dict(zip(self.pipeline.moe_layers, totals, strict=True))
        own = self.sums.new_zeros(3 + mesh.pp.size)
        # Equal on all ranks of `data`: one adds its layers, and its worst in its place of pp.
        if counts and mesh.data.rank == 0:
            loads = layer_loads(totals)
            own[:2], own[2] = loads[:, 1:].sum(0), len(loads)
            own[3 + mesh.pp.rank] = loads[:, 0].max()
        sums = all_reduce(torch.cat([self.sums, own]), mesh.world)
        loss, balance, z_loss, dead_experts, entropy, num_layers, *max_loads = sums.tolist()
        num_terms = max(num_targets * num_layers, 1)
        return StepLosses(
            loss=loss / max(num_targets, 1),
            num_targets=num_targets,
            balance=balance / num_terms,
            z_loss=z_loss / num_terms,
            max_load=max(max_loads),
            dead_experts=round(dead_experts),
            load_entropy=entropy / max(num_layers, 1),
        )

    def _exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        pipeline, arriving = self.pipeline, []
        leaving = [(self.parcels.pop(t.output).contiguous(), t.peer) for t in sends]
        for t in receives:
            size = (self.batches[t.output[2]].tokens.numel(), pipeline.hidden_size)
            hidden = torch.empty(size, dtype=pipeline.dtype, device=pipeline.device)
            self.parcels[t.output] = hidden
            arriving.append((hidden, t.peer))
        started = exchange(leaving, arriving, pipeline.mesh.pp)
        if receives:
            started.wait_receives()
            # Exchanges run one after the other: the earlier ones are over.
            self._drop_sent()
        self.started.append(started)

    def _drop_sent(self) -> None:
        for earlier in self.started:
            earlier.wait_sends()
        self.started.clear()

    def _act(self, actions: Sequence[Action]) -> None:
        pipeline, pp = self.pipeline, self.pipeline.mesh.pp.size
        inputs = {output[0]: self.parcels.pop(output) for output in needed_outputs(actions, pp)}
        forward: ChunkPass | None = None
        backward: ChunkPass | None = None
        for action in actions:
            place = (action.chunk, action.micro_batch)
            match action.kind:
                case ActionKind.FORWARD:
                    forward = ChunkPass(
                        pipeline.chunks[action.chunk],
                        self.batches[action.micro_batch],
                        pipeline.mesh,
                        hidden=inputs.pop(TransferKind.HIDDEN, None),
                        balance=pipeline.balance,
                        loss_scale=self.loss_scale,
                        recompute=pipeline.recompute,
                        previous_counts=pipeline.expert_counts,
                    )
                    if self.loss_scale is not None:
                        self.passes[place] = forward
                case ActionKind.WEIGHT:
                    self.deferred.pop(place).flush()
                case _:
                    backward = self.passes.pop(place)
                    backward.output_grad = inputs.pop(TransferKind.GRADIENT, None)
                    if action.kind is ActionKind.BACKWARD_INPUT:
                        self.deferred[place] = backward.weight_grads
        sizes = [None if side is None else len(side.layers) for side in (forward, backward)]
        defer = actions[0].kind is ActionKind.BACKWARD_INPUT
        operations = interleave(*sizes, defer_weights=defer, recompute=pipeline.recompute)
        run_operations(operations, forward, backward, pipeline.streams)
        made = []
        if forward is not None:
            made, forward.output = [forward.output], None
            self.sums += forward.sums
            if forward.expert_counts:
                chunk, counts = actions[0].chunk, torch.stack(forward.expert_counts)
                self.expert_counts[chunk] = counts + self.expert_counts.get(chunk, 0)
        if backward is not None:
            made.append(backward.input_grad)
        tensors = [tensor for tensor in made if tensor is not None]
        self.parcels.update(zip(made_outputs(actions, pp), tensors, strict=True))

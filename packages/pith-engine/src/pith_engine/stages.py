"""The five stages of a decoder layer, forward and backward, written once.

A `ChunkPass` takes one micro-batch through the attention, dispatch, experts, combine and aggregate
of a chunk's layers. `aggregate` of a layer and `attention` of the next share one autograd graph, a
segment; the first embeds or takes the chunk's input, the last ends with the loss or the output.
Graphs never cross a boundary: what enters a segment or `experts` is a leaf, what leaves it a root.
So micro-batches interleave as `overlap.py` declares.

With recomputation a graph is built just before its backward: of `experts` from the rows that
arrived, so no all-to-all is repeated, of a segment from its leaves and the first run's expert ids.
The last segment keeps its graph: its fused loss has no logits to save.

Loss and balance roots get the gradient `loss_scale`; nothing is rescaled later.

The trap: the list says when a result is dropped (`Operation.frees`), so but for rows kept for
recomputation no tensor that communication made may be kept past it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from pith_ops.dispatch import (
    sum_rows,
    weighted_partial_sums,
    weighted_partial_sums_backward,
)
from pith_ops.linear import WeightGradQueue
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pith_engine.balance import BalanceConfig, auxiliary_losses, count_choices, load_factors
from pith_engine.contract import Batch, ModelChunk, Routing
from pith_engine.expert_parallel import (
    Arrival,
    Route,
    exchange_rows,
    open_metadata,
    pack_metadata,
    pack_tokens,
    route_tokens,
)
from pith_engine.mesh import Mesh
from pith_engine.overlap import READS, Operation, OperationKind, Recompute, Stream, Value

Rows = tuple[Tensor, ...]
"""What an operation hands on; metadata second."""


@dataclass(kw_only=True)
class Segment:
    """What entered and left a segment."""

    leaves: list[Tensor]
    """Combined and residual `[T, H]`; of segment 0 the chunk's input, if any."""
    roots: list[GradientEdge | None]
    """Tokens, residual and, with routing, weights and balance; at the end output or loss. None
    where no gradient goes; edges keep no value alive."""
    route: Route | None = None
    """None for a dense layer and at the end."""
    chosen: Tensor | None = None
    """By the first run's routing."""
    factors: Tensor | None = None
    """`load_factors` of the first run."""


def communication_streams(device: torch.device) -> dict[Stream, torch.cuda.Stream]:
    """The CUDA streams but COMPUTE; none on a CPU, which runs in program order."""
    if device.type != "cuda":
        return {}
    # Communication kernels are short and on the critical path.
    kinds = (Stream.FORWARD_COMM, Stream.BACKWARD_COMM)
    return {kind: torch.cuda.Stream(device, priority=-1) for kind in kinds}


@dataclass(eq=False)
class ChunkPass:
    """One micro-batch in one chunk."""

    chunk: ModelChunk
    batch: Batch
    mesh: Mesh
    _: KW_ONLY
    hidden: Tensor | None
    """The chunk's input `[T, H]`; None for the first chunk."""
    balance: BalanceConfig
    loss_scale: Tensor | None
    """1 / (global target count); None for evaluation, which keeps no graph."""
    recompute: Recompute
    previous_counts: Mapping[int, Tensor]
    """As in `Pipeline.expert_counts`."""

    def __post_init__(self):
        numbered = self.chunk.decoder_layers()
        self.layers, self.layer_numbers = list(numbered.values()), list(numbered)
        self.segments: dict[int, Segment] = {}
        self.expert_calls: dict[int, tuple[Tensor, Tensor, Arrival | None]] = {}
        """Of experts: leaf, root, order (None: dense)."""
        self.kept_rows: dict[int, tuple[Tensor, Arrival | None]] = {}
        """What arrived, for recomputation."""
        self.weight_grads = WeightGradQueue()
        self.expert_counts: list[Tensor] = []
        self.sums = self.batch.tokens.new_zeros(3, dtype=torch.float64)
        """Loss, balance loss, z-loss."""
        self.residual: Tensor | None = None
        """`[T, H]`, until the next segment takes it."""
        self.output: Tensor | None = None
        self.output_grad: Tensor | None = None
        """Or of the residual, for the next backward segment."""
        self.input_grad: Tensor | None = None

    def run(self, operation: Operation, arrived: Rows) -> Rows:
        """One operation; recomputation builds a graph again."""
        index = operation.index
        match operation.kind:
            case OperationKind.FORWARD_SEGMENT:
                return self.forward_segment(index, arrived)
            case OperationKind.FORWARD_EXPERTS:
                return self.forward_experts(index, arrived)
            case OperationKind.BACKWARD_SEGMENT:
                return self.backward_segment(index, arrived)
            case OperationKind.BACKWARD_EXPERTS:
                return self.backward_experts(index, arrived)
            case OperationKind.BACKWARD_WEIGHT:
                self.weight_grads.flush()
            case OperationKind.RECOMPUTE_SEGMENT:
                *_, routing = self._run_segment(index, self.segments[index])
                if routing is not None:
                    self._add_balance(self.segments[index], routing)
            case OperationKind.RECOMPUTE_EXPERTS:
                self.expert_calls[index] = self._run_experts(index, *self.kept_rows.pop(index))
            case _:
                return self.exchange(operation, arrived)
        return ()

    def forward_segment(self, index: int, arrived: Rows) -> Rows:
        """Aggregate below, attention of layer `index`; rows to dispatch."""
        values = [] if self.hidden is None else [self.hidden]
        if index > 0:
            below, combined = self.segments[index - 1], arrived[0]
            if below.route is not None:
                combined = sum_rows(combined, below.route.plan.token_rows)
            assert self.residual is not None, "the segment below has run, and only once"
            values, self.residual = [combined, self.residual], None
            if self.loss_scale is None:
                del self.segments[index - 1]
        leaves = [value.detach().requires_grad_(self.loss_scale is not None) for value in values]
        segment = self.segments[index] = Segment(leaves=leaves, roots=[])
        if index == len(self.layers):
            root = self._enter(index, leaves)
            if self.chunk.is_last:
                root = self.chunk.loss(root, self.batch)
                self.sums[0] += root.detach()
            else:
                self.output = root.detach()
            segment.roots = [_edge(root)]
            return ()
        is_kept = self.loss_scale is not None and self.recompute != "attention+experts"
        with torch.set_grad_enabled(is_kept):
            tokens, self.residual, routing = self._run_segment(index, segment)
            if routing is None:
                return (tokens.detach(),)
            segment.chosen = routing.chosen
            num_experts, method = self.layers[index].num_local_experts, self.balance.method
            route = segment.route = route_tokens(routing, num_experts, self.mesh.ep)
            # After the host has waited for the counts, not before.
            counts = count_choices(routing, self.batch, method)
            self.expert_counts.append(counts.sum(0))
            if self.loss_scale is not None:
                previous = self.previous_counts.get(self.layer_numbers[index])
                segment.factors = load_factors(method, counts, previous, self.mesh.cp)
                self.sums[1:] += self._add_balance(segment, routing)
        return pack_tokens(tokens, route), pack_metadata(routing, route)

    def exchange(self, operation: Operation, rows: Rows) -> Rows:
        """All-to-all to experts or back; the rows of a dense layer stay."""
        kind, route = operation.kind, self.segments[operation.index].route
        if route is None:
            return rows
        back = kind in (OperationKind.FORWARD_COMBINE, OperationKind.BACKWARD_DISPATCH)
        axis = self.mesh.ep if kind.is_forward else self.mesh.ep_backward
        return tuple(exchange_rows(row, route, axis, back=back) for row in rows)

    def forward_experts(self, index: int, received: Rows) -> Rows:
        """One partial sum for each row that arrived."""
        route = self.segments[index].route
        arrival = None if route is None else open_metadata(received[1], route)
        is_kept = self.loss_scale is not None and self.recompute == "none"
        with torch.set_grad_enabled(is_kept):
            call = self._run_experts(index, received[0], arrival)
        if is_kept:
            self.expert_calls[index] = call
        elif self.loss_scale is not None:
            self.kept_rows[index] = received[0], arrival
        outputs = call[1].detach()
        return (outputs if arrival is None else weighted_partial_sums(outputs, *arrival),)

    def backward_segment(self, index: int, arrived: Rows) -> Rows:
        """Gradient rows of the layer below the segment."""
        segment = self.segments.pop(index)
        assert self.loss_scale is not None, "a pass without a graph has no backward"
        if segment.route is not None:
            arrived = tuple(sum_rows(rows, segment.route.plan.token_rows) for rows in arrived)
        above = [] if self.output_grad is None else [self.output_grad]
        # In the order of the roots, of which loss and balance come last.
        gradients = [*arrived[:1], *above, *arrived[1:]]
        gradients += [self.loss_scale] * (len(segment.roots) - len(gradients))
        pairs = zip(segment.roots, gradients, strict=True)
        roots, gradients = zip(*[pair for pair in pairs if pair[0] is not None], strict=True)
        torch.autograd.backward(roots, gradients)
        grads = [_gradient(leaf) for leaf in segment.leaves]
        if index == 0:
            self.input_grad = grads[0] if grads else None
            return ()
        self.output_grad = grads[1]
        route = self.segments[index - 1].route
        return (grads[0] if route is None else pack_tokens(grads[0], route),)

    def backward_experts(self, index: int, received: Rows) -> Rows:
        """Input gradients; those of weights go to `weight_grads`."""
        leaf, root, arrival = self.expert_calls.pop(index)
        if arrival is None:
            torch.autograd.backward([root], [received[0]])
            return (_gradient(leaf),)
        grads = weighted_partial_sums_backward(received[0], root.detach(), *arrival)
        torch.autograd.backward([root], grads[:1])
        return sum_rows(_gradient(leaf), arrival[1].row_pairs), grads[1]

    def _enter(self, index: int, leaves: list[Tensor]) -> Tensor:
        if index > 0:
            return self.layers[index - 1].aggregate(leaves[0], leaves[1])
        return leaves[0] if leaves else self.chunk.embed(self.batch)

    def _run_segment(self, index: int, segment: Segment) -> tuple[Tensor, Tensor, Routing | None]:
        """From leaves to all roots but balance."""
        hidden = self._enter(index, segment.leaves)
        *roots, routing = found = self.layers[index].attention(hidden, self.batch, segment.chosen)
        roots += [] if routing is None else [routing.weights]
        segment.roots = [_edge(root) for root in roots]
        return found

    def _run_experts(
        self, index: int, received: Tensor, arrival: Arrival | None
    ) -> tuple[Tensor, Tensor, Arrival | None]:
        rows, groups = received, None
        if arrival is not None:
            rows, groups = received[arrival[1].pair_rows], arrival[1].groups
        leaf = rows.detach().requires_grad_(self.loss_scale is not None)
        return leaf, self.layers[index].experts(leaf, groups, self.weight_grads), arrival

    def _add_balance(self, segment: Segment, routing: Routing) -> Tensor:
        """Add the balance root, if any; both losses."""
        root, losses = auxiliary_losses(self.balance, routing, self.batch, segment.factors)
        if root is not None:
            segment.roots.append(_edge(root))
        return losses


def run_operations(
    operations: Sequence[Operation],
    forward: ChunkPass | None,
    backward: ChunkPass | None,
    streams: Mapping[Stream, torch.cuda.Stream],
) -> None:
    """Execute a list of `interleave` on `communication_streams` and the current one."""
    results: dict[Value, Rows] = {}
    done = []
    for operation in operations:
        side = forward if operation.kind.is_forward else backward
        assert side is not None, f"{operation.kind} without a pass that it belongs to"
        arrived: Rows = ()
        for source, offset in READS.get(operation.kind, ())[:1]:
            arrived = results.get((source, operation.index + offset), ())
        if streams:
            stream = streams.get(operation.kind.stream) or torch.cuda.current_stream()
            for position in operation.waits:
                stream.wait_event(done[position])
            with torch.cuda.stream(stream):
                results[operation.value] = side.run(operation, arrived)
            done.append(stream.record_event())
        else:
            results[operation.value] = side.run(operation, arrived)
        del arrived
        for value in operation.frees:
            del results[value]
    assert not any(results.values()), f"results that no operation took: {list(results)}"


def _edge(root: Tensor) -> GradientEdge | None:
    return get_gradient_edge(root) if root.requires_grad else None


def _gradient(leaf: Tensor) -> Tensor:
    """What reached a leaf; zeros when nothing depends on it."""
    gradient, leaf.grad = leaf.grad, None
    return torch.zeros_like(leaf) if gradient is None else gradient

"""The five stages of a decoder layer, forward and backward, written once.

One micro-batch on its way through one chunk is a `ChunkPass`. Its stages are attention, dispatch,
experts, combine and aggregate; `aggregate` of a layer and `attention` of the next share one
autograd graph, called a segment:

    segment 0   dispatch 0   experts 0   combine 0   segment 1   ...   segment L

A chunk of L layers has L + 1 segments; segment 0 embeds or takes the chunk's input, segment L ends
with the loss or the chunk's output. Autograd graphs never cross a boundary: what enters a segment
or `experts` is a leaf (`detach().requires_grad_()`), what leaves it is a root, and the backward of
a stage is one `torch.autograd.backward(roots, gradients)` whose leaves then hold the gradients that
go on. Dispatch and combine are the plain calls of expert_parallel.py, so forward and backward of
different micro-batches interleave in any order that overlap.py declares; `run_operations` is the
one loop that executes such a list, for forward alone, backward alone and both.

Gradients are final: the loss root's gradient is 1 / (global target count), the balance root's is
coefficient / (global target count); nothing is rescaled afterwards.

The trap: an operation hands its result to one later operation, which may run on another stream.
When the result may be dropped is part of the list (`Operation.frees`, proved by overlap.py), so no
tensor that communication made may be kept past it: `open_metadata` copies.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from pith_ops.weight_grad import WeightGradQueue
from torch import Tensor

from pith_engine.balance import BalanceConfig, expert_counts, sequence_balance
from pith_engine.contract import Batch, DecoderLayer, ModelChunk, Routing
from pith_engine.expert_parallel import (
    Arrival,
    Route,
    exchange_rows,
    merge_gradients,
    merge_returned,
    open_metadata,
    pack_tokens,
    return_rows,
    route_tokens,
    sort_rows,
    unsort_gradient,
    weigh_outputs,
    weigh_outputs_backward,
)
from pith_engine.mesh import Mesh
from pith_engine.overlap import Operation, OperationKind, Stream, Value


@dataclass(kw_only=True)
class Segment:
    """One segment's autograd graph: what entered it and what left it."""

    leaves: list[Tensor]
    """Segment 0: the chunk's input, or nothing. Later: combined `[T, H]`, residual `[T, H]`."""
    roots: list[Tensor]
    """Inner: tokens, residual and, with routing, weights and balance. Last: output or loss."""
    route: Route | None
    """Where the segment's tokens go; None for a dense layer and in the last segment."""


@dataclass(kw_only=True)
class ExpertCall:
    """One call of a layer's experts: its leaf, its root and how rows were sorted."""

    leaf: Tensor
    root: Tensor
    arrival: Arrival | None
    """None for a dense layer."""


class Streams:
    """The CUDA streams of `overlap.Stream`; on a CPU everything runs in program order."""

    def __init__(self, device: torch.device):
        self._device = device if device.type == "cuda" else None
        self._comm: dict[Stream, torch.cuda.Stream] = {}
        if self._device is not None:
            # Communication kernels are short and on the critical path: they go before compute.
            for stream in (Stream.FORWARD_COMM, Stream.BACKWARD_COMM):
                self._comm[stream] = torch.cuda.Stream(self._device, priority=-1)

    @contextmanager
    def launch(
        self, stream: Stream, waits: list[torch.cuda.Event], done: list[torch.cuda.Event]
    ) -> Iterator[None]:
        """Run the body on `stream` after the events `waits`; append its event to `done`."""
        if self._device is None:
            yield
            return
        cuda_stream = self._comm.get(stream, torch.cuda.current_stream(self._device))
        for event in waits:
            cuda_stream.wait_event(event)
        with torch.cuda.stream(cuda_stream):
            yield
        done.append(cuda_stream.record_event())


class ChunkPass:
    """One micro-batch in one chunk: its stages' graphs, and the results on their way.

    Args:
        chunk: the model chunk.
        batch: the micro-batch, the same on every rank of the pipeline.
        mesh: its ep and ep_backward axes carry dispatch and combine.
        place: the chunk's number and the micro-batch's.
        hidden: `[T, H]` input of the chunk, None for the first chunk.
        balance: the auxiliary loss.
        loss_scale: 1 / (global target count), a scalar; None for evaluation, which keeps no graph.
    """

    def __init__(
        self,
        chunk: ModelChunk,
        batch: Batch,
        mesh: Mesh,
        *,
        place: tuple[int, int],
        hidden: Tensor | None,
        balance: BalanceConfig,
        loss_scale: Tensor | None,
    ):
        self.chunk, self.batch, self.mesh, self.balance = chunk, batch, mesh, balance
        self.layers: list[DecoderLayer] = chunk.decoder_layers()
        self.place, self.hidden, self.loss_scale = place, hidden, loss_scale
        self.segments: dict[int, Segment] = {}
        self.expert_calls: dict[int, ExpertCall] = {}
        self.weight_grads = WeightGradQueue()
        self.expert_counts: list[Tensor] = []
        self.balance_sum = batch.tokens.new_zeros((), dtype=torch.float64)
        self.loss_sum = batch.tokens.new_zeros((), dtype=torch.float64)
        self.output: Tensor | None = None
        self.output_grad: Tensor | None = None
        """Gradient that flows along the residual into the next backward segment."""
        self.input_grad: Tensor | None = None

    def forward_segment(self, index: int, arrived: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Aggregate layer index - 1, run attention of layer `index`; returns rows to dispatch."""
        leaves = self._segment_leaves(index, arrived)
        if index == 0:
            hidden = leaves[0] if leaves else self.chunk.embed(self.batch)
        else:
            hidden = self.layers[index - 1].aggregate(leaves[0], leaves[1])
        if index == len(self.layers):
            self._finish(hidden, leaves)
            return ()
        tokens, residual, routing = self.layers[index].attention(hidden, self.batch)
        roots, route = [tokens, residual], None
        if routing is not None:
            route = route_tokens(routing, self.layers[index].num_local_experts, self.mesh.ep)
            roots += [routing.weights, *self._balance_roots(routing)]
        self.segments[index] = Segment(leaves=leaves, roots=roots, route=route)
        return (tokens.detach(),) if route is None else (pack_tokens(tokens, route), route.metadata)

    def forward_dispatch(self, index: int, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Send tokens and their metadata to the ranks of their experts."""
        route = self.segments[index].route
        if route is None:
            return rows
        return tuple(exchange_rows(row, route, self.mesh.ep) for row in rows)

    def forward_experts(self, index: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the layer's experts on what arrived; returns one partial sum per row."""
        route, layer = self.segments[index].route, self.layers[index]
        if route is None:
            leaf = self._leaf(received[0])
            root = layer.experts(leaf, None, self.weight_grads)
            self._keep_call(index, ExpertCall(leaf=leaf, root=root, arrival=None))
            return (root.detach(),)
        arrival = open_metadata(received[1], route)
        leaf = self._leaf(sort_rows(received[0], arrival))
        root = layer.experts(leaf, arrival.plan.groups, self.weight_grads)
        self._keep_call(index, ExpertCall(leaf=leaf, root=root, arrival=arrival))
        return (weigh_outputs(root, arrival),)

    def forward_combine(self, index: int, partial_sums: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the partial sums to the ranks of their tokens."""
        route = self.segments[index].route
        if route is None:
            return partial_sums
        return (return_rows(partial_sums[0], route, self.mesh.ep),)

    def backward_segment(self, index: int, arrived: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Backward of a segment; returns the gradient rows of the layer below it."""
        segment = self.segments.pop(index)
        gradients = self._root_gradients(index, segment, arrived)
        pairs = [
            (root, gradient)
            for root, gradient in zip(segment.roots, gradients, strict=True)
            if root.requires_grad
        ]
        torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
        grads = [_gradient(leaf) for leaf in segment.leaves]
        if index == 0:
            self.input_grad = grads[0] if grads else None
            return ()
        self.output_grad = grads[1]
        route = self.segments[index - 1].route
        return (grads[0] if route is None else pack_tokens(grads[0], route),)

    def backward_combine(self, index: int, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Send the gradients of combined tokens to the ranks of their experts."""
        route = self.segments[index].route
        return rows if route is None else (exchange_rows(rows[0], route, self.mesh.ep_backward),)

    def backward_experts(self, index: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Input gradients of the experts; their weight gradients go to `weight_grads`."""
        call = self.expert_calls.pop(index)
        if call.arrival is None:
            torch.autograd.backward([call.root], [received[0]])
            return (_gradient(call.leaf),)
        outputs_grad, gates_grad = weigh_outputs_backward(received[0], call.root, call.arrival)
        torch.autograd.backward([call.root], [outputs_grad])
        return unsort_gradient(_gradient(call.leaf), call.arrival), gates_grad

    def backward_dispatch(self, index: int, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the gradients of dispatched tokens and weights to the ranks of their tokens."""
        route = self.segments[index].route
        if route is None:
            return rows
        return tuple(return_rows(row, route, self.mesh.ep_backward) for row in rows)

    def run_weight_grads(self) -> None:
        """Run the weight gradients that the backward of this pass deferred."""
        self.weight_grads.flush()

    def _leaf(self, tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(self.loss_scale is not None)

    def _keep_call(self, index: int, call: ExpertCall) -> None:
        if self.loss_scale is not None:
            self.expert_calls[index] = call

    def _segment_leaves(self, index: int, arrived: tuple[Tensor, ...]) -> list[Tensor]:
        if index == 0:
            return [] if self.hidden is None else [self._leaf(self.hidden)]
        below = self.segments[index - 1]
        if self.loss_scale is None:
            del self.segments[index - 1]
        combined = arrived[0] if below.route is None else merge_returned(arrived[0], below.route)
        return [self._leaf(combined), self._leaf(below.roots[1])]

    def _balance_roots(self, routing: Routing) -> list[Tensor]:
        self.expert_counts.append(expert_counts(routing, self.batch))
        if self.balance.method == "none":
            return []
        balance = sequence_balance(routing, self.batch)
        self.balance_sum += balance.detach()
        return [balance]

    def _finish(self, hidden: Tensor, leaves: list[Tensor]) -> None:
        if self.chunk.is_last:
            root = self.chunk.loss(hidden, self.batch)
            self.loss_sum += root.detach()
        else:
            root = hidden
            self.output = hidden.detach()
        self.segments[len(self.layers)] = Segment(leaves=leaves, roots=[root], route=None)

    def _root_gradients(
        self, index: int, segment: Segment, arrived: tuple[Tensor, ...]
    ) -> list[Tensor | None]:
        assert self.loss_scale is not None, "a pass without a graph has no backward"
        if index == len(self.layers):
            return [self.output_grad if self.output_grad is not None else self.loss_scale]
        residual_grad = self.output_grad
        if segment.route is None:
            return [arrived[0], residual_grad]
        tokens_grad, gates_grad = merge_gradients(arrived[0], arrived[1], segment.route)
        balance_grad = self.loss_scale * self.balance.coefficient
        return [tokens_grad, residual_grad, gates_grad, *[balance_grad] * (len(segment.roots) - 3)]


def run_operations(
    operations: Sequence[Operation],
    forward: ChunkPass | None,
    backward: ChunkPass | None,
    streams: Streams,
) -> None:
    """Execute a list of `overlap.interleave` for at most one forward and one backward pass.

    Each operation's result is kept until the operation that frees it has been launched.
    """
    results: dict[Value, tuple[Tensor, ...]] = {}
    done: list[torch.cuda.Event] = []
    for operation in operations:
        waits = [done[position] for position in operation.waits] if done else []
        with streams.launch(operation.stream, waits, done):
            results[operation.kind, operation.index] = _run(operation, forward, backward, results)
        for value in operation.frees:
            del results[value]
    assert not any(results.values()), f"results that no operation took: {list(results)}"


def _run(
    operation: Operation,
    forward: ChunkPass | None,
    backward: ChunkPass | None,
    results: dict[Value, tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    kind, index = operation.kind, operation.index
    match kind:
        case OperationKind.FORWARD_SEGMENT:
            arrived = results[OperationKind.FORWARD_COMBINE, index - 1] if index > 0 else ()
            return forward.forward_segment(index, arrived)
        case OperationKind.FORWARD_DISPATCH:
            return forward.forward_dispatch(index, results[OperationKind.FORWARD_SEGMENT, index])
        case OperationKind.FORWARD_EXPERTS:
            return forward.forward_experts(index, results[OperationKind.FORWARD_DISPATCH, index])
        case OperationKind.FORWARD_COMBINE:
            return forward.forward_combine(index, results[OperationKind.FORWARD_EXPERTS, index])
        case OperationKind.BACKWARD_SEGMENT:
            last = index == len(backward.layers)
            arrived = () if last else results[OperationKind.BACKWARD_DISPATCH, index]
            return backward.backward_segment(index, arrived)
        case OperationKind.BACKWARD_COMBINE:
            rows = results[OperationKind.BACKWARD_SEGMENT, index + 1]
            return backward.backward_combine(index, rows)
        case OperationKind.BACKWARD_EXPERTS:
            return backward.backward_experts(index, results[OperationKind.BACKWARD_COMBINE, index])
        case OperationKind.BACKWARD_DISPATCH:
            return backward.backward_dispatch(index, results[OperationKind.BACKWARD_EXPERTS, index])
        case OperationKind.BACKWARD_WEIGHT:
            backward.run_weight_grads()
            return ()


def _gradient(leaf: Tensor) -> Tensor:
    """The gradient that reached a leaf; zeros when nothing depends on it."""
    gradient = leaf.grad
    leaf.grad = None
    return torch.zeros_like(leaf) if gradient is None else gradient

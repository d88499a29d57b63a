"""The stages in one process: a forward interleaved with another micro-batch's backward."""

import gc
import weakref
from dataclasses import fields, is_dataclass
from typing import get_args

import pytest
import torch
from pith_engine.balance import BalanceConfig
from pith_engine.mesh import Mesh
from pith_engine.overlap import Recompute, interleave
from pith_engine.plain import plain_layer
from pith_engine.stages import ChunkPass, run_operations
from torch import nn
from toy_model import EXPERTS, HIDDEN, TOP_K, ToyChunk, plain_balance, toy_batches

SCALE = torch.tensor(0.37, dtype=torch.float64)
BALANCE = BalanceConfig(coefficient=0.2)


def make_chunk(num_layers, *, is_first, is_last, dense=(), seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    chunk = ToyChunk(range(num_layers), is_first=is_first, is_last=is_last, dense=dense)
    for module in chunk.modules():
        for name, declared in list(module.named_parameters(recurse=False)):
            value = torch.randn(declared.shape, generator=generator, dtype=torch.float64)
            module._parameters[name] = nn.Parameter((0.4 * value).to(dtype))
    return chunk


def open_pass(chunk, batch, hidden=None, recompute="none", loss_scale=SCALE):
    return ChunkPass(
        chunk,
        batch,
        Mesh.single(),
        hidden=hidden,
        balance=BALANCE,
        loss_scale=loss_scale,
        recompute=recompute,
        previous_counts={},
    )


def plain_step(chunk, batch, hidden=None, output_grad=None):
    """Reference: the same chunk by plain autograd; returns the output and gradients."""
    leaf = None if hidden is None else hidden.detach().requires_grad_()
    state, balance = (chunk.embed(batch) if leaf is None else leaf), 0
    for layer in chunk.decoder_layers().values():
        state, routing = plain_layer(layer, state, batch)
        balance = (
            balance if routing is None else balance + plain_balance("sequence", routing, batch)
        )
    root = chunk.loss(state, batch) * SCALE if chunk.is_last else (state * output_grad).sum()
    parameters = dict(chunk.named_parameters())
    wanted = list(parameters.values()) + ([] if leaf is None else [leaf])
    total = root + BALANCE.coefficient * SCALE * balance
    gradients = torch.autograd.grad(total, wanted, allow_unused=True)
    return state.detach(), dict(zip([*parameters, "input"], gradients, strict=False))


@pytest.mark.parametrize("dense", [(), (0,), (1,), (0, 1, 2)])
@pytest.mark.parametrize("num_layers", [0, 1, 3])
def test_forward_interleaved_with_backward_equals_plain_autograd(num_layers, dense):
    first = make_chunk(2, is_first=True, is_last=False, dense=dense)
    last = make_chunk(num_layers, is_first=False, is_last=True, dense=dense, seed=1)
    one, two = toy_batches(3)[::2]
    hidden = torch.randn(one.tokens.numel(), HIDDEN, dtype=torch.float64)
    behind = open_pass(last, one, hidden)
    run_operations(interleave(len(last.layers), None), behind, None, {})
    ahead = open_pass(first, two)
    run_operations(interleave(2, num_layers), ahead, behind, {})
    _, gradients = plain_step(last, one, hidden)
    torch.testing.assert_close(behind.input_grad, gradients.pop("input"), rtol=1e-12, atol=1e-15)
    for name, parameter in last.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-12, atol=1e-15)
    output_grad = torch.randn_like(hidden)
    expected, gradients = plain_step(first, two, output_grad=output_grad)
    torch.testing.assert_close(ahead.output, expected, rtol=1e-12, atol=1e-15)
    ahead.output_grad = output_grad
    run_operations(interleave(None, 2), None, ahead, {})
    for name, parameter in first.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-12, atol=1e-15)


def test_deferred_weight_gradients_are_the_experts_and_arrive_later():
    chunk = make_chunk(2, is_first=True, is_last=True)
    batch = toy_batches(1)[0]
    current = open_pass(chunk, batch)
    run_operations(interleave(2, None), current, None, {})
    run_operations(interleave(None, 2, defer_weights=True), None, current, {})
    late = {name for name, p in chunk.named_parameters() if p.grad is None}
    assert late == {f"layers.{layer}.mlp.{part}" for layer in (0, 1) for part in ("up", "down")}
    current.weight_grads.flush()
    _, gradients = plain_step(chunk, batch)
    for name, parameter in chunk.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("recompute", get_args(Recompute))
def test_evaluation_keeps_no_graph(recompute):
    chunk = make_chunk(2, is_first=True, is_last=True)
    batch = toy_batches(1)[0]
    current = open_pass(chunk, batch, recompute=recompute, loss_scale=None)
    with torch.no_grad():
        run_operations(interleave(2, None), current, None, {})
    assert current.sums[0] > 0
    assert [segment.roots for segment in current.segments.values()] == [[None]]
    assert not current.expert_calls and not current.kept_rows


def test_values_that_no_backward_needs_are_dropped():
    """Tokens, residual and output are handed on: between forward and backward only edges stay."""
    chunk = make_chunk(2, is_first=True, is_last=False)
    current = open_pass(chunk, toy_batches(1)[0])
    run_operations(interleave(2, None), current, None, {})
    assert current.output is not None
    assert current.residual is None
    roots = [root for segment in current.segments.values() for root in segment.roots]
    assert not any(isinstance(root, torch.Tensor) for root in roots)


def recomputed_step(recompute, *, num_layers, dense, dtype, defer_weights=False, prepare=None):
    """Forward of one micro-batch, backward under the forward of another; all that it yields."""
    last = make_chunk(num_layers, is_first=False, is_last=True, dense=dense, dtype=dtype)
    first = make_chunk(2, is_first=True, is_last=False, dense=dense, seed=1, dtype=dtype)
    for layer in (*last.decoder_layers().values(), *first.decoder_layers().values()):
        if prepare is not None:
            prepare(layer)
    one, two = toy_batches(3)[::2]
    hidden = torch.randn(one.tokens.numel(), HIDDEN, generator=torch.Generator().manual_seed(4))
    behind = open_pass(last, one, hidden.to(dtype), recompute)
    ahead = open_pass(first, two, recompute=recompute)
    run_operations(interleave(num_layers, None), behind, None, {})
    both = interleave(2, num_layers, defer_weights=defer_weights, recompute=recompute)
    run_operations(both, ahead, behind, {})
    ahead.output_grad = behind.input_grad
    alone = interleave(None, 2, defer_weights=defer_weights, recompute=recompute)
    run_operations(alone, None, ahead, {})
    counts, sums = [], []
    for side in (behind, ahead):
        assert (len(side.weight_grads) > 0) == (defer_weights and num_layers > 0)
        side.weight_grads.flush()
        assert not side.segments and not side.expert_calls and not side.kept_rows
        counts += side.expert_counts
        sums.append(side.sums)
    parameters = [*last.parameters(), *first.parameters()]
    gradients = [behind.input_grad, *(p.grad for p in parameters)]
    assert all(gradient.abs().max() > 0 for gradient in gradients)
    return gradients + sums + counts


@pytest.mark.parametrize("recompute", ["experts", "attention+experts"])
@pytest.mark.parametrize("defer_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num_layers", "dense"), [(3, ()), (3, (1,)), (3, (0, 2)), (1, ())])
def test_recomputation_changes_no_bit(recompute, defer_weights, dtype, num_layers, dense):
    facts = {"num_layers": num_layers, "dense": dense, "dtype": dtype}
    expected = recomputed_step("none", defer_weights=defer_weights, **facts)
    found = recomputed_step(recompute, defer_weights=defer_weights, **facts)
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def break_ties_anew(layer):
    """Make all experts tie, and the router break ties the other way round at every call."""
    layer.ties = torch.arange(EXPERTS)
    with torch.no_grad():
        layer.router[:] = layer.router[0]
    choose = layer.attention

    def attention(hidden, batch, chosen=None):
        layer.ties = layer.ties.flip(0)
        if chosen is None:
            chosen = layer.ties[:TOP_K].int().expand(len(hidden), TOP_K)
        return choose(hidden, batch, chosen)

    layer.attention = attention


def test_exact_ties_broken_otherwise_the_second_time_go_to_the_experts_of_the_forward():
    facts = {"num_layers": 2, "dense": (), "dtype": torch.float64, "prepare": break_ties_anew}
    expected, found = (recomputed_step(r, **facts) for r in ("none", "attention+experts"))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def held_bytes(chunk, recompute):
    """Bytes that a pass holds between forward and backward: its fields and its graphs'."""
    alive = weakref.WeakSet()

    class Packed:
        def __init__(self, tensor):
            self.tensor = tensor
            alive.add(self)

    batch = toy_batches(1, num_sequences=40)[0]
    current = open_pass(chunk, batch, recompute=recompute)
    with torch.autograd.graph.saved_tensors_hooks(Packed, lambda packed: packed.tensor):
        run_operations(interleave(len(chunk.layers), None), current, None, {})
    gc.collect()
    parts = [current.segments, current.expert_calls, current.kept_rows, current.residual]
    tensors = [packed.tensor for packed in alive]
    while parts:
        match parts.pop():
            case torch.Tensor() as tensor:
                tensors.append(tensor)
            case dict() as items:
                parts += items.values()
            case list() | tuple() as items:
                parts += items
            case part if is_dataclass(part):
                parts += [getattr(part, field.name) for field in fields(part)]
    shared = {value.untyped_storage().data_ptr() for value in (*chunk.parameters(), batch.tokens)}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for place, size in storages.items() if place not in shared)


def test_recomputation_holds_less_between_forward_and_backward():
    chunk = make_chunk(4, is_first=True, is_last=False)
    none, experts, both = (held_bytes(chunk, recompute) for recompute in get_args(Recompute))
    rows = 40 * 6 * 8  # tokens, 8 bytes a number
    # Experts: two of 20 a pair, inputs and outputs of 12 a pair; 12 a row kept instead.
    assert none - experts >= 4 * rows * (TOP_K * (20 + HIDDEN) - HIDDEN)
    # Attention: at least the mean, tanh's output, tokens and scores of every layer.
    assert experts - both >= 4 * rows * (2 * HIDDEN + EXPERTS)
    # What is left: residual, combined and dispatched rows of each layer, and integers.
    assert both <= 4 * rows * (3 * HIDDEN + 2 * EXPERTS + 8 * TOP_K)

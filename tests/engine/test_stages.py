"""The stages in one process: a forward interleaved with another micro-batch's backward."""

import pytest
import torch
from pith_engine.balance import BalanceConfig
from pith_engine.contract import plain_layer
from pith_engine.mesh import Mesh
from pith_engine.overlap import interleave
from pith_engine.stages import ChunkPass, Streams, run_operations
from torch import nn
from toy_model import HIDDEN, ToyChunk, plain_balance, toy_batches

CPU = torch.device("cpu")
SCALE = torch.tensor(0.37, dtype=torch.float64)
BALANCE = BalanceConfig(coefficient=0.2)


def make_chunk(num_layers, *, is_first, is_last, dense=(), seed=0):
    generator = torch.Generator().manual_seed(seed)
    chunk = ToyChunk(range(num_layers), is_first=is_first, is_last=is_last, dense=dense)
    for module in chunk.modules():
        for name, declared in list(module.named_parameters(recurse=False)):
            value = torch.randn(declared.shape, generator=generator, dtype=torch.float64)
            module._parameters[name] = nn.Parameter(0.4 * value)
    return chunk


def open_pass(chunk, batch, hidden=None):
    return ChunkPass(
        chunk,
        batch,
        Mesh.single(),
        place=(0, 0),
        hidden=hidden,
        balance=BALANCE,
        loss_scale=SCALE,
    )


def plain_step(chunk, batch, hidden=None, output_grad=None):
    """Reference: the same chunk by plain autograd; returns the output and gradients."""
    leaf = None if hidden is None else hidden.detach().requires_grad_()
    state, balance = (chunk.embed(batch) if leaf is None else leaf), 0
    for layer in chunk.decoder_layers():
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
    streams = Streams(CPU)
    run_operations(interleave(len(last.layers), None), behind, None, streams)
    ahead = open_pass(first, two)
    run_operations(interleave(2, num_layers), ahead, behind, streams)
    _, gradients = plain_step(last, one, hidden)
    torch.testing.assert_close(behind.input_grad, gradients.pop("input"), rtol=1e-12, atol=1e-15)
    for name, parameter in last.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-12, atol=1e-15)
    output_grad = torch.randn_like(hidden)
    expected, gradients = plain_step(first, two, output_grad=output_grad)
    torch.testing.assert_close(ahead.output, expected, rtol=1e-12, atol=1e-15)
    ahead.output_grad = output_grad
    run_operations(interleave(None, 2), None, ahead, streams)
    for name, parameter in first.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-12, atol=1e-15)


def test_deferred_weight_gradients_are_the_experts_and_arrive_later():
    chunk = make_chunk(2, is_first=True, is_last=True)
    batch = toy_batches(1)[0]
    current = open_pass(chunk, batch)
    run_operations(interleave(2, None), current, None, Streams(CPU))
    run_operations(interleave(None, 2, defer_weights=True), None, current, Streams(CPU))
    late = {name for name, p in chunk.named_parameters() if p.grad is None}
    assert late == {f"layers.{layer}.mlp.{part}" for layer in (0, 1) for part in ("up", "down")}
    current.weight_grads.flush()
    _, gradients = plain_step(chunk, batch)
    for name, parameter in chunk.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-12, atol=1e-15)


def test_evaluation_keeps_no_graph():
    chunk = make_chunk(2, is_first=True, is_last=True)
    batch = toy_batches(1)[0]
    current = ChunkPass(
        chunk, batch, Mesh.single(), place=(0, 0), hidden=None, balance=BALANCE, loss_scale=None
    )
    with torch.no_grad():
        run_operations(interleave(2, None), current, None, Streams(CPU))
    assert current.loss_sum > 0
    assert [segment.roots for segment in current.segments.values()] == [[None]]
    assert not current.expert_calls


def test_values_that_no_backward_needs_are_dropped():
    """Tokens, residual and output are handed on: between forward and backward only edges stay."""
    chunk = make_chunk(2, is_first=True, is_last=False)
    current = open_pass(chunk, toy_batches(1)[0])
    run_operations(interleave(2, None), current, None, Streams(CPU))
    assert current.output is not None
    assert all(segment.residual is None for segment in current.segments.values())
    roots = [root for segment in current.segments.values() for root in segment.roots]
    assert not any(isinstance(root, torch.Tensor) for root in roots)

"""The pipeline against plain autograd in one process: losses and every gradient, over meshes.

Float64 and 1e-10: a wrong scale factor, a wrong reduction group or a lost micro-batch shows up in
at least one of the meshes.
"""

from datetime import timedelta
from typing import get_args
from unittest.mock import patch

import pytest
import torch
from pith_engine.balance import BalanceConfig
from pith_engine.contract import IGNORED_TARGET
from pith_engine.fsdp import canonical_blocks, shard_chunks
from pith_engine.gradients import count_targets
from pith_engine.init import initialise
from pith_engine.mesh import Mesh, parse_mesh
from pith_engine.overlap import Recompute
from pith_engine.pipeline import Pipeline
from pith_engine.plain import plain_hidden
from pith_engine.runtime import gather_objects
from toy_model import HIDDEN, plain_balance, toy_batches, toy_chunks

NUM_BATCHES = 8
COEFFICIENT = 0.1
CPU = torch.device("cpu")


def send_all_to_the_first_experts(chunks):
    """Make every router choose experts 0 and 1: ranks that hold others receive nothing."""
    for chunk in chunks:
        for layer in chunk.layers.values():
            layer.only_experts = 2


def make_model(mesh, layers_per_chunk, dense, dtype=torch.float64, *, only_first=False):
    chunks = toy_chunks(layers_per_chunk, mesh, dense)
    if only_first:
        send_all_to_the_first_experts(chunks)
    units = shard_chunks(chunks, mesh, compute_dtype=dtype, device=CPU)
    parameters = [parameter for unit in units for parameter in unit.parameters]
    initialise(parameters, seed=3)
    for unit in units:
        unit.gather()
    return chunks, units, parameters


def reference(layers_per_chunk, dense, dtype=torch.float64, *, only_first=False):
    """Loss, balance and gradients by name, by plain autograd over the whole global batch."""
    halves = (sum(layers_per_chunk) // 2, (sum(layers_per_chunk) + 1) // 2)
    chunks, units, parameters = make_model(
        Mesh.single(), halves, dense, dtype, only_first=only_first
    )
    batches = toy_batches(NUM_BATCHES)
    count = sum(int((batch.targets != IGNORED_TARGET).sum()) for batch in batches)
    loss = balance = torch.zeros((), dtype=torch.float64)
    num_moe_layers = sum(layers_per_chunk) - len(dense)
    for batch in batches:
        states = list(plain_hidden(chunks, batch))
        loss = loss + chunks[-1].loss(states[-1][0], batch) / count
        for _, routing in states:
            if routing is not None:
                balance = balance + plain_balance("sequence", routing, batch) / count
    (loss + COEFFICIENT * balance).backward()
    for unit in units:
        unit.reduce()
    blocks = [block for p in parameters for block in canonical_blocks(p, p.grad)]
    gradients = {block.name: block.tensor.clone() for block in blocks}
    return loss.item(), balance.item() / num_moe_layers, gradients


def run_mesh(
    label, layers_per_chunk, dense, dtype=torch.float64, only_first=False, recompute="none"
):
    """In a worker: one step on a mesh; returns losses and canonical gradient blocks."""
    mesh = Mesh.create(parse_mesh(label), timedelta(seconds=30))
    if mesh is None:
        return None
    chunks, units, parameters = make_model(
        mesh, layers_per_chunk, dense, dtype, only_first=only_first
    )
    share = NUM_BATCHES // mesh.config.num_batch_ranks
    batches = toy_batches(NUM_BATCHES)[mesh.batch_rank * share : (mesh.batch_rank + 1) * share]
    pipeline = Pipeline(
        chunks,
        mesh,
        hidden_size=HIDDEN,
        dtype=dtype,
        device=CPU,
        balance=BalanceConfig(coefficient=COEFFICIENT),
        recompute=recompute,
    )
    count = count_targets(batches, mesh)
    evaluated = pipeline.evaluate(batches, count)
    losses = pipeline.train_step(batches, count)
    for unit in units:
        unit.reduce()
    blocks = [
        (b.name, b.offsets, b.global_shape, b.tensor.clone())
        for p in parameters
        for b in canonical_blocks(p, p.grad)
    ]
    everything = [block for part in gather_objects(blocks, mesh.world) for block in part]
    return losses, evaluated, everything


def assemble(blocks):
    """Whole gradients from the blocks of all ranks; each element must be covered exactly once."""
    whole, covered = {}, {}
    for name, offsets, shape, tensor in blocks:
        whole.setdefault(name, torch.full(shape, torch.nan, dtype=tensor.dtype))
        covered.setdefault(name, torch.zeros(shape, dtype=torch.int64))
        place = tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))
        whole[name][place] = tensor
        covered[name][place] += 1
    assert all((count == 1).all() for count in covered.values())
    return whole


def check(result, expected, tolerance=1e-10, idle=frozenset()):
    loss, balance, gradients = expected
    losses, evaluated, blocks = result
    assert losses.loss == pytest.approx(loss, rel=tolerance)
    assert losses.balance == pytest.approx(balance, rel=tolerance)
    assert evaluated.loss == pytest.approx(loss, rel=tolerance)
    found = assemble(blocks)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        if name in idle:
            gradient, found[name] = gradient[:2], found[name].clone()
            assert (found[name][2:] == 0).all(), name
            found[name] = found[name][:2]
        assert gradient.abs().max() > 0, name
        difference = (found[name] - gradient).abs().max() / gradient.abs().max()
        assert difference <= tolerance, f"{name}: {difference:.3g}"


@pytest.mark.core
@pytest.mark.parametrize(
    ("label", "layers_per_chunk", "dense"),
    [
        ("single", (2, 1), ()),
        ("single", (1, 3), (0, 2)),
        ("dp4", (2, 1), ()),
        ("ep2", (2, 1), (1,)),
        ("ep4", (2, 1), ()),
        ("dp2-ep2", (1, 1), ()),
        ("pp2", (1, 2, 1, 1), (1,)),
        ("pp2-ep2", (2, 1, 1, 1), (0,)),
        ("pp2-dp2", (1, 1, 1, 2), ()),
        ("pp4", (1, 1, 1, 1, 1, 1, 1, 1), (3,)),
    ],
)
def test_every_gradient_equals_one_process(gloo_pool, label, layers_per_chunk, dense):
    expected = reference(layers_per_chunk, dense)
    result = gloo_pool.run(run_mesh, label, layers_per_chunk, dense)[0]
    check(result, expected)


@pytest.mark.core
@pytest.mark.parametrize("label", ["ep2", "ep4", "dp2-ep2"])
def test_a_rank_whose_experts_get_no_token_finishes_with_zero_gradients(gloo_pool, label):
    expected = reference((1, 1), (), only_first=True)
    result = gloo_pool.run(run_mesh, label, (1, 1), (), torch.float64, True)[0]
    idle = {name for name in expected[2] if ".mlp." in name}
    assert len(idle) == 6
    check(result, expected, idle=idle)


@pytest.mark.core
def test_fp32_agrees_to_rounding(gloo_pool):
    expected = reference((2, 1, 1, 1), (), torch.float32)
    result = gloo_pool.run(run_mesh, "pp2-ep2", (2, 1, 1, 1), (), torch.float32)[0]
    check(result, expected, tolerance=1e-5)


@pytest.mark.core
def test_all_ranks_report_the_same_and_two_runs_agree_bit_for_bit(gloo_pool):
    first = [r for r in gloo_pool.run(run_mesh, "ep4", (2, 1), ()) if r is not None]
    second = gloo_pool.run(run_mesh, "ep4", (2, 1), ())[0]
    assert all(result[0] == first[0][0] for result in first)
    again = assemble(second[2])
    for name, gradient in assemble(first[0][2]).items():
        assert torch.equal(gradient, again[name])


def run_recomputing(label, layers_per_chunk, dense, dtype):
    """In a worker: `run_mesh` for every kind of recomputation, and its all-to-alls on this rank."""
    send, calls = torch.distributed.all_to_all_single, []

    def counted(*args, **kwargs):
        calls[-1] += 1
        return send(*args, **kwargs)

    results = []
    with patch.object(torch.distributed, "all_to_all_single", counted):
        for recompute in get_args(Recompute):
            calls.append(0)
            results.append(run_mesh(label, layers_per_chunk, dense, dtype, recompute=recompute))
    return results, calls


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize(
    ("label", "layers_per_chunk", "dense", "least_calls"),
    [
        ("single", (2, 2), (1,), 0),
        ("dp2", (2, 1), (), 0),
        ("ep2", (2, 2), (1,), 3 * 4 * 11),
        ("pp2", (1, 2, 1, 1), (1,), 0),
        ("pp2-ep2", (2, 1, 1, 1), (0,), 2 * 4 * 11),
    ],
)
def test_recomputation_changes_no_bit_and_repeats_no_all_to_all(
    gloo_pool, label, layers_per_chunk, dense, dtype, least_calls
):
    """Every MoE layer and micro-batch needs 4 to evaluate and 7 to train; units have their own."""
    results, calls = gloo_pool.run(run_recomputing, label, layers_per_chunk, dense, dtype)[0]
    expected, *others = results
    gradients = assemble(expected[2])
    for losses, evaluated, blocks in others:
        assert (losses, evaluated) == expected[:2]
        found = assemble(blocks)
        assert found.keys() == gradients.keys()
        assert all(torch.equal(found[name], gradients[name]) for name in gradients)
    assert len(set(calls)) == 1 and calls[0] >= least_calls


def single_pipeline():
    """A pipeline of two one-layer chunks in one process, and its parameters."""
    chunks, _, parameters = make_model(Mesh.single(), (1, 1), ())
    pipeline = Pipeline(
        chunks,
        Mesh.single(),
        hidden_size=HIDDEN,
        dtype=torch.float64,
        device=CPU,
        balance=BalanceConfig(),
    )
    return pipeline, parameters


def test_a_batch_without_targets_runs_nothing():
    pipeline, parameters = single_pipeline()
    losses = pipeline.train_step(toy_batches(2), 0)
    assert (losses.loss, losses.num_targets) == (0.0, 0)
    assert all((parameter.full.grad == 0).all() for parameter in parameters)


def test_too_few_micro_batches_name_the_minimum():
    pipeline, _ = single_pipeline()
    with pytest.raises(ValueError, match=r"num_micro_batches is 1.*at least 2 \* pp = 2"):
        pipeline.train_step(toy_batches(1), 3)

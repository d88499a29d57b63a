from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
from engine_chunks import CPU, HSDP, REPLICATED, SHARDED, declared_units
from pith_engine.contract import Batch, Role, declare
from pith_engine.fsdp import Unit, cut_block
from pith_engine.gradients import (
    clip_gradients,
    count_targets,
    global_norm,
    raise_if_not_finite,
)
from pith_engine.init import initialise
from pith_engine.mesh import Mesh, MeshConfig
from pith_engine.optim import AdamW, OptimizerConfig

TIMEOUT = timedelta(seconds=30)
CASES = [
    (MeshConfig(dp=4), SHARDED),
    (MeshConfig(ep=4), SHARDED),
    (MeshConfig(dp=2, ep=2), SHARDED),
    (MeshConfig(pp=2, ep=2), SHARDED),
    (MeshConfig(dp=2, cp=2), SHARDED),
    (MeshConfig(pp=4), SHARDED),
    (MeshConfig(dp=2, ep=2), HSDP),
    (MeshConfig(pp=2, dp=2), HSDP),
    (MeshConfig(dp=2, cp=2), REPLICATED),
    (MeshConfig(dp=4), REPLICATED),
]


def batch_of(targets):
    targets = torch.tensor(targets)
    zeros = torch.zeros_like(targets)
    return Batch(tokens=zeros, targets=targets, positions=zeros, sequence_length=len(targets))


def counted(config):
    mesh = Mesh.create(config, TIMEOUT)
    # Rank r has r targets in its first micro-batch and none in its second.
    shares = [[5] * mesh.data.rank + [-100] * (6 - mesh.data.rank), [-100] * 6]
    return count_targets([batch_of(share) for share in shares], mesh)


def test_targets_are_counted_over_the_data_ranks_once(gloo_pool):
    assert gloo_pool.run(counted, MeshConfig(dp=2, ep=2)) == [6] * 4
    assert gloo_pool.run(counted, MeshConfig(dp=2, cp=2)) == [6] * 4
    assert gloo_pool.run(counted, MeshConfig(pp=2, dp=2)) == [1] * 4
    assert count_targets([batch_of([-100, 3]), batch_of([1, 2])], Mesh.single()) == 3


def gradients_of_shares(mesh, layers, sharding=SHARDED):
    """Units whose gradients are cut from whole random tensors, one a name."""
    _, _, parameters = declared_units(mesh, sharding=sharding, layers=layers)
    for p in parameters:
        seed = sum(p.name.encode()) * 31 + len(p.name)
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randn(p.global_shape, generator=generator, dtype=torch.float64)
        place = tuple(slice(o, o + n) for o, n in zip(p.offsets, p.grad.shape, strict=True))
        p.grad.copy_(whole[place])
    return parameters


def norms():
    found = []
    for config, sharding in CASES:
        mesh = Mesh.create(config, TIMEOUT)
        stage = (2 * mesh.pp.rank, 2 * mesh.pp.rank + 1)
        parameters = gradients_of_shares(mesh, stage, sharding)
        if mesh.pp.rank:
            parameters = [p for p in parameters if p.name.startswith("layers")]
        norm = global_norm(parameters, mesh)
        clip_gradients(parameters, norm, 2.5)
        found.append((norm.item(), global_norm(parameters, mesh).item()))
    return found


@pytest.mark.core
def test_the_norm_is_global_on_every_mesh(gloo_pool):
    results = gloo_pool.run(norms)
    for case, (config, _) in enumerate(CASES):
        parameters = gradients_of_shares(Mesh.single(), tuple(range(2 * config.pp)))
        expected = sum(p.grad.square().sum() for p in parameters).sqrt().item()
        for rank in range(4):
            norm, clipped = results[rank][case]
            assert norm == pytest.approx(expected, rel=1e-13)
            assert clipped == pytest.approx(2.5, rel=1e-13)
        assert len({rank[case] for rank in results}) == 1


def test_seven_rows_on_four_ranks_of_two_replicas_count_once():
    """A rank at a time, without groups: what each adds to the sum of squares."""
    whole = torch.randn(7, 3, dtype=torch.float64)
    squares, rows = [], []
    for rank in range(8):
        mesh = Mesh.plan(MeshConfig(dp=2, cp=2, ep=2), rank)
        declared = {"layers.0.w": declare((7, 3), Role.MATRIX)}
        unit = Unit(
            "layers.0", declared, mesh, sharding=HSDP, compute_dtype=torch.float64, device=CPU
        )
        [p] = unit.parameters
        p.grad.copy_(cut_block(whole, p.offsets, p.grad.shape))
        rows.append(len(p.grad))
        with patch("pith_engine.gradients.all_reduce", lambda tensor, axis: tensor):
            squares.append(global_norm([p], mesh).item() ** 2)
    assert rows == [2, 2, 2, 1] * 2
    assert squares[4:] == [0.0] * 4
    assert sum(squares) == pytest.approx(whole.square().sum().item(), rel=1e-14)


def three_and_four():
    mesh = Mesh.create(MeshConfig(pp=2, dp=2), TIMEOUT)
    _, _, parameters = declared_units(mesh, layers=(mesh.pp.rank, 2 + mesh.pp.rank))
    if mesh.dp.rank == 0:
        parameters[0].grad.view(-1)[3] = 3.0 if mesh.pp.rank == 0 else -4.0
    norm = global_norm(parameters, mesh)
    clip_gradients(parameters, norm, 1.0)
    return norm.item(), sum(p.grad.sum() for p in parameters).item()


def test_stages_of_norm_3_and_4_make_5(gloo_pool):
    results = gloo_pool.run(three_and_four)
    assert [norm for norm, _ in results] == [5.0] * 4
    assert [value for _, value in results] == pytest.approx([0.6, 0.0, -0.8, 0.0])


def test_small_gradients_are_left_alone_bit_for_bit():
    parameters = gradients_of_shares(Mesh.single(), (0, 1))
    before = [p.grad.clone() for p in parameters]
    norm = global_norm(parameters, Mesh.single())
    clip_gradients(parameters, norm, norm.item() * 1.5)
    assert all(torch.equal(p.grad, b) for p, b in zip(parameters, before, strict=True))
    for p in parameters:
        p.grad.zero_()
    clip_gradients(parameters, global_norm(parameters, Mesh.single()), 1.0)
    assert all((p.grad == 0).all() for p in parameters)


def test_norm_of_a_large_fp32_gradient_is_accurate():
    declared = {"head": declare((4096, 128), Role.HEAD)}
    unit = Unit("head", declared, Mesh.single(), compute_dtype=torch.float32, device="cpu")
    (parameter,) = unit.parameters
    parameter.grad.copy_(torch.randn(4096, 128) * 1e-3)
    parameter.grad[:100] *= 50
    norm = global_norm([parameter], Mesh.single()).item()
    assert norm == pytest.approx(parameter.grad.double().norm().item(), rel=1e-12)


def poisoned(value, sharding):
    mesh = Mesh.create(MeshConfig(dp=2, ep=2), TIMEOUT)
    _, units, parameters = declared_units(mesh, sharding=sharding)
    initialise(parameters, 0)
    optimizer = AdamW(parameters, OptimizerConfig())
    message = ""
    for step in (1, 2, 3):
        for unit in units:
            unit.gather()
        for p in parameters:
            p.full.grad.fill_(0.01)
        before = {p.name: p.shard.clone() for p in parameters}
        moments = {n: m["exp_avg"].clone() for n, m in optimizer.moments.items()}
        if step == 3 and mesh.rank == 1:
            by_name = {p.name: p for p in parameters}
            by_name["layers.1.experts.gate_up"].full.grad[2, 5, 7] = value
        for unit in units:
            unit.reduce()
        norm = global_norm(parameters, mesh)
        try:
            raise_if_not_finite(parameters, norm, step, mesh)
            clip_gradients(parameters, norm, 1.0)
            optimizer.step(0.1)
        except FloatingPointError as error:
            message = str(error)
            assert step == 3 and optimizer.num_steps == 2
            assert all(torch.equal(p.shard, before[p.name]) for p in parameters)
            current = optimizer.moments
            assert all(torch.equal(moments[n], current[n]["exp_avg"]) for n in moments)
    return message


@pytest.mark.core
@pytest.mark.parametrize("sharding", [SHARDED, REPLICATED])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_nan_stops_every_rank_before_the_update(gloo_pool, value, sharding):
    messages = gloo_pool.run(poisoned, value, sharding)
    assert len(set(messages)) == 1
    assert "step 3" in messages[0]
    # Expert 2 of rank 1's four lies in the shard of dp rank 1, ep rank 1: rank 3. Replicated, it
    # reaches both ranks that hold these experts.
    assert "layers.1.experts.gate_up on rank 3 (1 elements)" in messages[0]
    is_everywhere = "layers.1.experts.gate_up on rank 1 (1 elements)" in messages[0]
    assert is_everywhere == (sharding == REPLICATED)

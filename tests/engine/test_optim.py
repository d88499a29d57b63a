from datetime import timedelta

import pytest
import torch
from engine_chunks import declared_units
from pith_engine.contract import Role
from pith_engine.gradients import clip_gradients, global_norm
from pith_engine.init import initialise
from pith_engine.mesh import Mesh, MeshConfig
from pith_engine.optim import AdamW, OptimizerConfig

TIMEOUT = timedelta(seconds=30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weight_decay_touches_matrices_only(dtype):
    _, _, parameters = declared_units(Mesh.single(), dtype)
    initialise(parameters, 0)
    for p in parameters:
        if p.std is None:
            p.shard.normal_()
    before = {p.name: p.shard.clone() for p in parameters}
    AdamW(parameters, OptimizerConfig(weight_decay=0.5)).step(0.1)
    decayed = {p.name for p in parameters if p.role.is_decayed}
    assert {n.split(".")[-1] for n in decayed} == {"embedding", "head", "router", "up", "gate_up"}
    for p in parameters:
        if p.name in decayed:
            torch.testing.assert_close(p.shard, before[p.name] * 0.95, rtol=1e-6, atol=0)
        else:
            assert torch.equal(p.shard, before[p.name]), p.name


def test_every_role_is_decayed_or_not():
    """Norms, biases, sinks and the bias that only selects are not."""
    assert {role for role in Role if role.is_decayed} == {
        *(Role.MATRIX, Role.EXPERT_MATRIX, Role.EMBEDDING, Role.HEAD, Role.ROUTER, Role.CONV)
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torch_over_steps_with_changing_lr(dtype):
    _, _, parameters = declared_units(Mesh.single(), dtype)
    initialise(parameters, 0)
    config = OptimizerConfig(betas=(0.8, 0.9), eps=1e-3, weight_decay=0.3)
    copies = {p.name: p.shard.clone() for p in parameters}
    groups = [
        {"params": [copies[p.name] for p in parameters if p.role.is_decayed]},
        {"params": [copies[p.name] for p in parameters if not p.role.is_decayed]},
    ]
    groups[1]["weight_decay"] = 0.0
    oracle = torch.optim.AdamW(
        groups, betas=config.betas, eps=config.eps, weight_decay=0.3, foreach=False, fused=False
    )
    optimizer = AdamW(parameters, config)
    for step in range(1, 6):
        for p in parameters:
            p.grad.normal_()
            copies[p.name].grad = p.grad.clone()
        lr = 0.01 * step
        for group in oracle.param_groups:
            group["lr"] = lr
        oracle.step()
        optimizer.step(lr)
    assert optimizer.num_steps == 5
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-14}
    )
    for p in parameters:
        torch.testing.assert_close(p.shard, copies[p.name], **tolerance)
        state = oracle.state[copies[p.name]]
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(optimizer.moments[p.name][key], state[key], **tolerance)


def train(config, num_steps, resume_at=None):
    """Steps with gradients that follow from the weights, on uneven shards; returns bits."""
    mesh = Mesh.create(config, TIMEOUT)
    _, units, parameters = declared_units(mesh, torch.float32)
    initialise(parameters, 5)
    optimizer = AdamW(parameters, OptimizerConfig())
    norms = []
    for step in range(1, num_steps + 1):
        for unit in units:
            unit.gather()
        for p in parameters:
            p.full.grad.add_(p.full.detach() * (1.0 + mesh.data.rank) + 0.1 * step)
        for unit in units:
            unit.reduce()
        norm = global_norm(parameters, mesh)
        clip_gradients(parameters, norm, 1.0)
        optimizer.step(0.01)
        norms.append(norm.item())
        if step == resume_at:
            saved = [(p.name, p.shard.clone()) for p in parameters]
            moments = {
                name: {key: value.clone() for key, value in state.items()}
                for name, state in optimizer.moments.items()
            }
            _, units, parameters = declared_units(mesh, torch.float32)
            optimizer = AdamW(parameters, OptimizerConfig())
            for p, (name, shard) in zip(parameters, saved, strict=True):
                assert p.name == name
                p.shard.copy_(shard)
                for key, value in optimizer.moments[name].items():
                    value.copy_(moments[name][key])
            optimizer.num_steps = step
    return norms, [p.shard for p in parameters]


@pytest.mark.core
def test_uneven_shards_resume_bit_for_bit(gloo_pool):
    straight = gloo_pool.run(train, MeshConfig(dp=4), 20)
    resumed = gloo_pool.run(train, MeshConfig(dp=4), 20, 10)
    for (norms, shards), (norms_again, shards_again) in zip(straight, resumed, strict=True):
        assert norms == norms_again
        assert all(torch.equal(a, b) for a, b in zip(shards, shards_again, strict=True))
    assert sum(shard.numel() == 0 for shard in straight[3][1]) == 2  # the norms of 6 rows


def unlike_stages():
    """A dense stage and one with experts: other groups, other orders, the same collectives."""
    mesh = Mesh.create(MeshConfig(pp=2, dp=2), TIMEOUT)
    _, units, parameters = declared_units(mesh)
    if mesh.pp.rank == 0:
        units = [unit for unit in units if not unit.name.endswith("experts")]
        parameters = [p for unit in units for p in unit.parameters]
    else:
        units, parameters = units[::-1], parameters[::-1]
    initialise(parameters, 1)
    optimizer = AdamW(parameters, OptimizerConfig())
    norms = []
    for _ in range(3):
        for unit in units:
            unit.gather()
        for p in parameters:
            p.full.grad.add_(1.0)
        for unit in units:
            unit.reduce()
        norm = global_norm(parameters, mesh)
        clip_gradients(parameters, norm, 1.0)
        optimizer.step(0.1)
        norms.append(norm.item())
    return norms


def test_stages_with_other_groups_do_not_hang(gloo_pool):
    results = gloo_pool.run(unlike_stages)
    assert results == [results[0]] * 4


def test_moments_exist_from_the_start_and_names_are_unique():
    _, _, parameters = declared_units(Mesh.plan(MeshConfig(dp=4), 3))
    moments = AdamW(parameters, OptimizerConfig()).moments
    assert list(moments) == [p.name for p in parameters]
    for p in parameters:
        for value in moments[p.name].values():
            assert value.shape == p.shard.shape and (value == 0).all()
    with pytest.raises(AssertionError, match="two parameters have one name"):
        AdamW([*parameters, parameters[0]], OptimizerConfig())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["eps", "weight_decay", "momentum"])
def test_constants_that_are_not_finite_are_refused(field, value):
    (violation,) = OptimizerConfig(method="muon", **{field: value}).violations()
    assert violation.startswith(f"optim.{field} = {value}")


def test_bad_constants_are_named_together_when_an_optimizer_is_made():
    config = OptimizerConfig(betas=(1.0, 0.9), eps=0.0, weight_decay=-1.0, momentum=0.9)
    with pytest.raises(ValueError, match=r"betas = \(1\.0, 0\.9\)") as caught:
        AdamW([], config)
    assert "optim.eps = 0.0" in str(caught.value) and "weight_decay = -1.0" in str(caught.value)
    assert "optim.momentum = 0.9 but AdamW has betas" in str(caught.value)
    assert OptimizerConfig(method="sgd").violations() == ["optim.method = 'sgd': adamw or muon"]

"""Muon: the formula per canonical matrix, torch's own, every mesh alike, resuming, what gets it."""

from dataclasses import replace
from datetime import timedelta
from math import prod
from zlib import crc32

import pytest
import torch
from engine_chunks import whole_tensors
from pith_engine.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from pith_engine.contract import ModelChunk, Role, declare
from pith_engine.fsdp import canonical_blocks, cut_block, shard_chunks, sharded_parameters
from pith_engine.init import initialise
from pith_engine.mesh import Mesh, parse_mesh
from pith_engine.optim import (
    CHUNK_ELEMENTS,
    AdamW,
    Muon,
    OptimizerConfig,
    describe_groups,
    orthogonalise,
)
from torch import nn

CPU = torch.device("cpu")
MUON = OptimizerConfig(method="muon", momentum=0.9, weight_decay=0.3)
FEW = 60
"""Elements of a chunk: one matrix a rank; of nine dense ones the last has a chunk of its own, in
which all ranks but one own nothing."""


class OddLayer(nn.Module):
    """Every role. Rows that do not divide, fewer rows or experts than ranks, parts cut anywhere."""

    def __init__(self, ep):
        super().__init__()
        self.norm = declare((6,), Role.NORM)
        self.router = declare((6, 8), Role.ROUTER, std=0.3)
        self.bias = declare((5,), Role.BIAS)
        self.sinks = declare((3,), Role.SINK)
        self.conv = declare((8, 3), Role.CONV, std=0.3)
        self.wide = declare((3, 26), Role.MATRIX, std=0.3)
        self.tall = declare((11, 5), Role.MATRIX, std=0.3)
        self.gate_up = declare((14, 9), Role.MATRIX, std=0.3, parts=("gate", "up"))
        self.many = declare((6 // ep, 10, 7), Role.EXPERT_MATRIX, std=0.3, parts=("one", "two"))
        self.few = declare((2 // ep, 10, 7), Role.EXPERT_MATRIX, std=0.3, parts=("a", "b"))
        self.expert_bias = declare((6 // ep, 4), Role.EXPERT_BIAS)


def odd_parameters(mesh, dtype=torch.float64):
    """Parameters of two such layers, embedding and head, filled with initial values."""
    chunk = ModelChunk(is_last=True)
    chunk.embedding = declare((13, 8), Role.EMBEDDING, std=1.0)
    for layer in ("0", "1"):
        chunk.layers[layer] = OddLayer(mesh.ep.size)
    chunk.layers["0"].odd_one = declare((9, 4), Role.MATRIX, std=0.3)
    chunk.head = declare((13, 8), Role.HEAD, std=0.1)
    parameters = sharded_parameters(shard_chunks([chunk], mesh, compute_dtype=dtype, device=CPU))
    initialise(parameters, 3)
    return parameters


def whole_gradient(name, shape, step):
    generator = torch.Generator().manual_seed(crc32(name.encode()) + step)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def run_steps(parameters, optimizer, steps):
    """Updates with gradients that follow from name and step; the learning rate changes."""
    for step in steps:
        for p in parameters:
            whole = whole_gradient(p.name, p.global_shape, step)
            p.grad.copy_(cut_block(whole, p.offsets, p.shard.shape))
        optimizer.step(0.01 * step)


def canonical_state(parameters, optimizer):
    """Every canonical block of weights and moments on this rank."""
    return [
        (f"{kind}.{b.name}", b.tensor.clone(), b.global_shape, b.offsets)
        for p in parameters
        for kind, tensor in {"w": p.shard, **optimizer.moments[p.name]}.items()
        for b in canonical_blocks(p, tensor)
    ]


def formula(weight, gradients, rates, mu=0.9, decay=0.3):
    """One matrix after the steps of the paper's loop, in float64, without transposing."""
    w, m = weight.double().clone(), torch.zeros_like(weight, dtype=torch.float64)
    for g, lr in zip(gradients, rates, strict=True):
        m = mu * m + (1 - mu) * g
        u = (1 - mu) * g + mu * m
        x = u / (u * u).sum().sqrt()
        for _ in range(5):
            s = x @ x.T
            x = 3.4445 * x - 4.7750 * s @ x + 2.0315 * s @ s @ x
        w = w - lr * decay * w - lr * 0.2 * max(w.shape) ** 0.5 * x
    return w


def canonical_matrices(parameter, tensor):
    """Each matrix of a parameter of one process, by name and expert."""
    for b in canonical_blocks(parameter, tensor):
        stack = b.tensor if b.tensor.dim() == 3 else b.tensor[None]
        for expert, matrix in enumerate(stack):
            yield (b.name, expert), matrix


def largest_error(steps=3):
    """Muon in one process against the formula, over the norm of what each matrix moved."""
    parameters = odd_parameters(Mesh.single())
    matrices = [p for p in parameters if p.role.uses_muon]
    before = {k: w.clone() for p in matrices for k, w in canonical_matrices(p, p.shard)}
    gradients = {k: [] for k in before}
    for step in range(1, steps + 1):
        for p in matrices:
            whole = whole_gradient(p.name, p.global_shape, step)
            for key, gradient in canonical_matrices(p, whole):
                gradients[key].append(gradient)
    run_steps(parameters, Muon(parameters, MUON), range(1, steps + 1))
    rates = [0.01 * step for step in range(1, steps + 1)]
    errors = []
    for p in matrices:
        for key, w in canonical_matrices(p, p.shard):
            expected = formula(before[key], gradients[key], rates)
            errors.append((w - expected).norm() / (expected - before[key]).norm())
    assert len(errors) == 2 * (4 + 2 * 6 + 2 * 2) + 1
    return max(errors)


def test_every_canonical_matrix_follows_the_formula():
    assert largest_error() < 1e-12


@pytest.mark.parametrize("fault", ["scale", "parts", "iterations", "experts", "norm"])
def test_a_fault_does_not_pass(monkeypatch, fault):
    match fault:
        case "scale":
            monkeypatch.setattr("pith_engine.optim.UPDATE_RMS", 0.201)
        case "iterations":
            monkeypatch.setattr("pith_engine.optim.NUM_ITERATIONS", 4)
        case "parts":
            monkeypatch.setattr(
                "pith_engine.optim.canonical_blocks",
                lambda p, tensor: canonical_blocks(replace(p, parts=()), tensor),
            )
        case "experts":  # taken as one tall matrix
            monkeypatch.setattr(
                "pith_engine.optim.orthogonalise",
                lambda x: orthogonalise(x.reshape(1, -1, x.shape[-1])).reshape(x.shape),
            )
        case "norm":
            monkeypatch.setattr("pith_engine.optim.SMALLEST_NORM", 100.0)
    assert largest_error() > 1e-4


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (33, 1)])
def test_equals_torch_in_bf16(shape):
    """torch's Muon iterates in bf16, as ours does for a bf16 model; weights stay fp32."""
    chunk = ModelChunk(is_last=True)
    chunk.layers["0"] = nn.Module()
    chunk.layers["0"].weight = declare(shape, Role.MATRIX, std=0.3)
    units = shard_chunks([chunk], Mesh.single(), compute_dtype=torch.bfloat16, device=CPU)
    (parameter,) = sharded_parameters(units)
    initialise([parameter], 0)
    start = parameter.shard.clone()
    copy = nn.Parameter(start.clone())
    oracle = torch.optim.Muon(
        [copy], momentum=0.9, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"
    )
    optimizer = Muon([parameter], MUON)
    for step in range(1, 5):
        parameter.grad.normal_()
        copy.grad = parameter.grad.clone()
        oracle.param_groups[0]["lr"] = 0.01 * step
        oracle.step()
        optimizer.step(0.01 * step)
    assert parameter.shard.dtype == torch.float32
    moved = copy.detach() - start
    assert (parameter.shard - copy.detach()).norm() < 0.01 * moved.norm()
    momentum = oracle.state[copy]["momentum_buffer"]
    torch.testing.assert_close(optimizer.moments[parameter.name]["momentum"], momentum)


def test_singular_values_come_close_to_one():
    stack = torch.randn(3, 20, 9, dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonalise(stack))
    assert ((values > 0.6) & (values < 1.3)).all()
    assert (orthogonalise(torch.zeros(1, 4, 5)) == 0).all()


def steps_on(label, chunk_elements, dtype=torch.float64, num_steps=3):
    mesh = Mesh.create(parse_mesh(label), timedelta(seconds=30))
    if mesh is None:
        return None
    parameters = odd_parameters(mesh, dtype)
    optimizer = Muon(parameters, MUON, chunk_elements=chunk_elements)
    run_steps(parameters, optimizer, range(1, num_steps + 1))
    table = describe_groups(optimizer.groups, mesh)
    return canonical_state(parameters, optimizer), table


def reference_state(dtype=torch.float64):
    parameters = odd_parameters(Mesh.single(), dtype)
    optimizer = Muon(parameters, MUON)
    run_steps(parameters, optimizer, range(1, 4))
    return canonical_state(parameters, optimizer), describe_groups(optimizer.groups, Mesh.single())


def assert_same_state(states, expected, tolerance):
    found = whole_tensors([piece for state in states for piece in state])
    wanted = whole_tensors(expected)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name] - tensor).norm() <= tolerance * tensor.norm(), name


@pytest.mark.core
@pytest.mark.parametrize("label", ["dp4", "ep2", "dp2-ep2"])
@pytest.mark.parametrize("chunk_elements", [CHUNK_ELEMENTS, FEW])
def test_every_mesh_updates_alike(gloo_pool, label, chunk_elements):
    expected, table = reference_state()
    results = [r for r in gloo_pool.run(steps_on, label, chunk_elements) if r is not None]
    assert_same_state([state for state, _ in results], expected, 1e-10)
    assert {t for _, t in results} == {table}


def test_bf16_updates_travel(gloo_pool):
    expected, _ = reference_state(torch.bfloat16)
    results = gloo_pool.run(steps_on, "dp4", CHUNK_ELEMENTS, torch.bfloat16)
    assert_same_state([state for state, _ in results], expected, 1e-3)


def save_on(label, folder):
    mesh = Mesh.create(parse_mesh(label), timedelta(seconds=30))
    parameters = odd_parameters(mesh)
    optimizer = Muon(parameters, MUON)
    run_steps(parameters, optimizer, [1, 2])
    save_checkpoint(folder, 2, parameters, optimizer, {}, mesh)
    run_steps(parameters, optimizer, [3])
    return canonical_state(parameters, optimizer)


def resume_on(label, path):
    mesh = Mesh.create(parse_mesh(label), timedelta(seconds=30))
    if mesh is None:
        return []
    parameters = odd_parameters(mesh)
    optimizer = Muon(parameters, MUON)
    run_steps(parameters, optimizer, [7])
    load_checkpoint(path, parameters, optimizer, mesh)
    assert optimizer.num_steps == 2
    run_steps(parameters, optimizer, [3])
    return canonical_state(parameters, optimizer)


def test_a_run_resumes_on_its_mesh_bit_for_bit_and_on_others(gloo_pool, tmp_path):
    straight = [piece for state in gloo_pool.run(save_on, "dp4", tmp_path) for piece in state]
    path = find_checkpoint(tmp_path)
    assert_same_state(gloo_pool.run(resume_on, "dp4", path), straight, 0.0)
    for label in ("ep2", "dp2-ep2"):
        assert_same_state(gloo_pool.run(resume_on, label, path), straight, 1e-10)
    with pytest.raises(ValueError, match=r"optimizer\.exp_avg\.layers\.0\.wide: missing"):
        parameters = odd_parameters(Mesh.single())
        load_checkpoint(path, parameters, AdamW(parameters, OptimizerConfig()), Mesh.single())


def test_without_gradients_matrices_only_decay():
    parameters = odd_parameters(Mesh.single())
    for p in parameters:
        if p.std is None:
            p.shard.normal_()
    before = {p.name: p.shard.clone() for p in parameters}
    Muon(parameters, MUON).step(0.1)
    for p in parameters:
        factor = 0.97 if p.role.is_decayed else 1.0
        torch.testing.assert_close(p.shard, before[p.name] * factor, rtol=1e-14, atol=0)


def test_every_parameter_is_in_the_group_of_its_role():
    parameters = odd_parameters(Mesh.single())
    optimizer = Muon(parameters, MUON)
    groups = optimizer.groups
    names = [p.name for members in groups.values() for p in members]
    assert sorted(names) == sorted(p.name for p in parameters)
    assert optimizer.moments.keys() == set(names)
    assert {p.role for p in groups["muon"]} == {Role.MATRIX, Role.EXPERT_MATRIX}
    trained = {role for role in Role if role.is_trained}
    assert {p.role for p in groups["adamw"]} == trained - {Role.MATRIX, Role.EXPERT_MATRIX}
    table = describe_groups(optimizer.groups, Mesh.single()).splitlines()[1:]
    elements = [int(line.split()[-1].replace(",", "")) for line in table]
    assert sum(elements) == sum(prod(p.global_shape) for p in parameters)
    assert "muon       expert matrix         8            1,120" in table
    assert "muon       matrix                9              554" in table
    with pytest.raises(AssertionError, match="two parameters have one name"):
        Muon([*parameters, parameters[0]], MUON)

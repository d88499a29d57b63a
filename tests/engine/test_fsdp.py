from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from engine_chunks import CPU, HIDDEN, declared_chunks, declared_units, whole_tensors
from pith_engine.contract import DeclaredParameter, ModelChunk, Role, declare
from pith_engine.fsdp import (
    canonical_blocks,
    chunk_bounds,
    cut_block,
    shard_chunks,
    sharded_parameters,
)
from pith_engine.mesh import Mesh, MeshConfig
from pith_engine.runtime import gather_objects
from torch import nn

TIMEOUT = timedelta(seconds=30)
MESHES = [MeshConfig(dp=4), MeshConfig(dp=2, ep=2), MeshConfig(ep=4), MeshConfig(pp=2, dp=2)]


def random_for(*key, shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(hash(key) % 2**40)
    return torch.randn(shape, generator=generator, dtype=dtype)


def fill_by_position(parameters):
    """Give every shard the values of one whole random tensor a name."""
    for index, parameter in enumerate(sorted(parameters, key=lambda p: p.name)):
        whole = random_for(index, shape=parameter.global_shape)
        place = tuple(
            slice(o, o + n) for o, n in zip(parameter.offsets, parameter.shard.shape, strict=True)
        )
        parameter.shard.copy_(whole[place])


def expected_full(parameter, index, ep_rank):
    whole = random_for(index, shape=parameter.global_shape)
    if parameter.role.is_expert:
        local = parameter.full.shape[0]
        whole = whole[ep_rank * local : (ep_rank + 1) * local]
    return whole


def gather_and_reduce(config, dtype):
    """Returns this rank's facts: reduced blocks and the gradients that went in."""
    mesh = Mesh.create(config, TIMEOUT)
    chunks, units, parameters = declared_units(mesh, dtype)
    assert all(p.full.isnan().all() for p in parameters)
    fill_by_position(parameters)
    for unit in units:
        unit.gather()
    order = sorted(parameters, key=lambda p: p.name)
    for index, parameter in enumerate(order):
        expected = expected_full(parameter, index, mesh.ep.rank)
        kept = parameter.role.keeps_fp32
        assert parameter.full.dtype == (parameter.shard.dtype if kept else dtype)
        rounded = expected.to(parameter.shard.dtype).to(parameter.full.dtype)
        assert torch.equal(parameter.full, rounded), parameter.name
        assert parameter.full.is_contiguous()
    named = dict(chunks[0].named_parameters()) | dict(chunks[1].named_parameters())
    assert {p.name: id(p.full) for p in parameters} == {n: id(p) for n, p in named.items()}
    master = torch.float64 if dtype == torch.float64 else torch.float32
    sent = {}
    for index, parameter in enumerate(order):
        sent[parameter.name] = torch.zeros_like(parameter.full, dtype=master)
        for call in range(3):
            grad = random_for(9, mesh.rank, index, call, shape=parameter.full.shape)
            grad = grad.to(parameter.full.dtype)
            parameter.full.backward(grad)  # accumulates as any backward does
            sent[parameter.name] += grad.to(master)
        assert parameter.full.grad.dtype == master
    for _ in range(2):  # a second reduction gives the same
        for unit in units:
            unit.reduce()
    return [
        (p.name, p.role.is_expert, p.global_shape, p.offsets, p.grad, sent[p.name]) for p in order
    ]


def gather_and_reduce_all(dtype):
    return [gather_and_reduce(config, dtype) for config in MESHES]


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gather_gives_the_whole_and_reduce_sums_over_the_axis(gloo_pool, dtype):
    results = gloo_pool.run(gather_and_reduce_all, dtype)
    for case, config in enumerate(MESHES):
        facts = [rank[case] for rank in results]
        for position, (name, is_expert, *_) in enumerate(facts[0]):
            for rank in range(4):
                mesh = Mesh.plan(config, rank)
                axis = mesh.expert_data if is_expert else mesh.data
                _, _, shape, offsets, grad, own = facts[rank][position]
                total = sum(facts[peer][position][5] for peer in axis.ranks)
                first = offsets[0] - (mesh.ep.rank * own.shape[0] if is_expert else 0)
                block = cut_block(total, (first, *offsets[1:]), grad.shape)
                # Sums in rank order on gloo: equal to the bit.
                assert torch.equal(grad, block), (config.label, name)
                assert shape[0] == own.shape[0] * (config.ep if is_expert else 1)


def backward_calls(dtype):
    """Several backward passes through a linear layer, and a late gradient added by hand."""
    mesh = Mesh.single()
    chunk = ModelChunk(is_first=False, is_last=True)
    chunk.weight = declare((5, 7), Role.MATRIX, std=1.0)
    [unit] = shard_chunks([chunk], mesh, compute_dtype=dtype, device=CPU)
    [parameter] = unit.parameters
    parameter.shard.normal_()
    unit.gather()
    buffer = parameter.full.grad
    expected = torch.zeros(5, 7, dtype=torch.float64)
    for _ in range(4):
        x = torch.randn(3, 7).to(dtype)
        upstream = torch.randn(3, 5).to(dtype)
        (x @ chunk.weight.T).backward(upstream)
        expected += (upstream.T @ x).double()
    late = torch.randn(5, 7, dtype=torch.float64) * 1e-4
    parameter.full.grad.add_(late)
    expected += late
    assert parameter.full.grad is buffer
    assert parameter.full.grad.data_ptr() == unit._full_grads.data_ptr()
    unit.reduce()
    return parameter.grad, expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gradients_accumulate_in_the_preset_buffer(dtype):
    torch.manual_seed(0)
    grad, expected = backward_calls(dtype)
    master = torch.float64 if dtype == torch.float64 else torch.float32
    assert grad.dtype == master
    # Sums are in the master dtype: what each call rounds is known, their sum is not rounded.
    torch.testing.assert_close(
        grad.double(), expected, rtol=0, atol=1e-15 if master.itemsize == 8 else 2e-6
    )


def test_single_rank_gather_starts_a_new_gradient():
    _, units, parameters = declared_units(Mesh.single())
    fill_by_position(parameters)
    for unit in units:
        unit.gather()
        for parameter in unit.parameters:
            parameter.full.grad.fill_(3.0)
        unit.reduce()
        assert all((p.grad == 3.0).all() for p in unit.parameters)
        unit.gather()
        assert all((p.full.grad == 0.0).all() for p in unit.parameters)


def test_replaced_gradient_is_refused():
    chunks, units, _ = declared_units(Mesh.single())
    units[0].gather()
    chunks[0].zero_grad(set_to_none=True)
    with pytest.raises(RuntimeError, match=r"embedding\.grad was replaced"):
        units[0].reduce()


def test_chunk_bounds_are_torch_chunk():
    for size in range(40):
        for num_ranks in range(1, 12):
            bounds = [chunk_bounds(size, num_ranks, rank) for rank in range(num_ranks)]
            expected = [len(c) for c in torch.arange(size).chunk(num_ranks)] if size else []
            sizes = [stop - start for start, stop in bounds]
            assert sizes == expected + [0] * (num_ranks - len(expected))
            assert all(a[1] == b[0] for a, b in pairwise(bounds))


@pytest.mark.parametrize(
    ("config", "num_experts"),
    [
        (MeshConfig(dp=4), 8),
        (MeshConfig(dp=8), 4),
        (MeshConfig(dp=3, ep=2), 32),
        (MeshConfig(dp=2, ep=4), 8),
        (MeshConfig(dp=3), 16),
    ],
)
def test_blocks_tile_every_tensor(config, num_experts):
    """Uneven shards, with their true offsets, stored and canonical."""
    stored, canonical, sizes = [], [], {}
    for rank in range(config.world_size):
        _, _, parameters = declared_units(Mesh.plan(config, rank), num_experts=num_experts)
        for index, p in enumerate(sorted(parameters, key=lambda p: p.name)):
            whole = random_for(index, shape=p.global_shape)
            place = tuple(slice(o, o + n) for o, n in zip(p.offsets, p.shard.shape, strict=True))
            p.shard.copy_(whole[place])
            sizes.setdefault(p.name, []).append(p.shard.shape)
            stored.append((p.name, p.shard, p.global_shape, p.offsets))
            for b in canonical_blocks(p, p.shard):
                assert b.tensor.numel() == 0 or b.tensor.storage_offset() >= 0
                canonical.append((b.name, b.tensor, b.global_shape, b.offsets))
    wholes = whole_tensors(stored)
    parts = whole_tensors(canonical)
    for layer in (0, 1):
        gate_up = wholes.pop(f"layers.{layer}.experts.gate_up")
        gate, up = (parts.pop(f"layers.{layer}.experts.{n}_proj") for n in ("gate", "up"))
        assert torch.equal(torch.cat([gate, up], 1), gate_up)
        gate_up = wholes.pop(f"layers.{layer}.up")
        gate, up = (parts.pop(f"layers.{layer}.dense_{n}") for n in ("gate", "up"))
        assert torch.equal(torch.cat([gate, up]), gate_up)
    assert wholes.keys() == parts.keys()
    assert all(torch.equal(wholes[name], parts[name]) for name in wholes)
    if config == MeshConfig(dp=4):
        assert [s[0] for s in sizes["embedding"]] == [65, 65, 65, 62]
        assert [s[0] for s in sizes["layers.0.norm"]] == [2, 2, 2, 0]
    if config == MeshConfig(dp=3):
        assert [s[0] for s in sizes["layers.0.experts.gate_up"]] == [6, 6, 4]
    if config == MeshConfig(dp=8):  # 4 experts over 8 ranks: the last dim is split
        assert [s[2] for s in sizes["layers.0.experts.gate_up"]] == [9] * 7 + [3]


def few_experts():
    """2 experts over 4 ranks, with an odd last dim: gather and reduce against the definition."""
    mesh = Mesh.create(MeshConfig(dp=4), TIMEOUT)
    _, units, parameters = declared_units(mesh, num_experts=2)
    fill_by_position(parameters)
    order = sorted(parameters, key=lambda p: p.name)
    for unit in units:
        unit.gather()
    for index, parameter in enumerate(order):
        assert torch.equal(parameter.full, random_for(index, shape=parameter.global_shape))
        parameter.full.grad.add_(random_for(mesh.rank, index, shape=parameter.full.shape))
    for unit in units:
        unit.reduce()
    for index, p in enumerate(order):
        total = sum(random_for(rank, index, shape=p.full.shape) for rank in range(4))
        place = tuple(slice(o, o + n) for o, n in zip(p.offsets, p.grad.shape, strict=True))
        assert torch.equal(p.grad, total[place]), p.name
    experts = [p for p in order if p.role is Role.EXPERT_MATRIX]
    assert all(p.shard.shape[0] == 2 and p.shard.is_contiguous() for p in experts)
    return [p.shard.shape[2] for p in experts]


@pytest.mark.core
def test_fewer_experts_than_ranks_split_the_last_dim(gloo_pool):
    assert gloo_pool.run(few_experts) == [[17, 17]] * 3 + [[15, 15]]


def expert_without_tokens():
    """20 steps in which rank 1's experts get nothing: zeros, not None, and no hang."""
    mesh = Mesh.create(MeshConfig(dp=2, ep=2), TIMEOUT)
    chunks, units, parameters = declared_units(mesh)
    for p in parameters:
        p.shard.fill_(0.5)
    for _ in range(20):
        for unit in units:
            unit.gather()
        if mesh.rank != 1:
            experts = chunks[0].layers["0"].experts
            (torch.ones(3, HIDDEN, dtype=torch.float64) @ experts.gate_up[1].T).sum().backward()
        for unit in units:
            unit.reduce()
    gate_up = next(p for p in parameters if p.name == "layers.0.experts.gate_up")
    others = [p for p in parameters if p is not gate_up]
    assert all(p.grad is not None and (p.grad == 0).all() for p in others)
    return gather_objects(gate_up.grad.sum((1, 2)).tolist(), mesh.world)


@pytest.mark.core
def test_an_expert_without_tokens_gets_zeros(gloo_pool):
    one = 3.0 * 20 * HIDDEN
    # ep rank 0 (ranks 0, 2) saw both data ranks, ep rank 1 (ranks 1, 3) only rank 3.
    assert gloo_pool.run(expert_without_tokens)[0] == [[0, 2 * one], [0, one], [0, 0], [0, 0]]


def test_units_and_their_order():
    _, units, parameters = declared_units(Mesh.plan(MeshConfig(dp=2, ep=2), 3))
    names = ["embedding", "layers.0", "layers.0.experts", "layers.1", "layers.1.experts", "head"]
    assert sorted(u.name for u in units) == sorted(names)
    assert units[0].name == "embedding"
    assert [p.name for p in sharded_parameters(units)] == [p.name for p in parameters]
    by_name = {unit.name: [p.name for p in unit.parameters] for unit in units}
    assert by_name["head"] == ["final_norm", "head"]
    assert set(by_name["layers.1"]) == {"layers.1.norm", "layers.1.up", "layers.1.router"}
    assert by_name["layers.1"][-1] == "layers.1.router"  # fp32 after bf16


def test_on_the_meta_device_nothing_is_allocated():
    chunks = declared_chunks(Mesh.plan(MeshConfig(dp=2, ep=4), 5))
    units = shard_chunks(
        chunks,
        Mesh.plan(MeshConfig(dp=2, ep=4), 5),
        compute_dtype=torch.bfloat16,
        device=torch.device("meta"),
    )
    assert all(p.shard.is_meta and p.full.is_meta for p in sharded_parameters(units))


def test_undeclared_and_tied_parameters_are_refused():
    mesh = Mesh.single()
    chunk = ModelChunk(is_first=True, is_last=False)
    chunk.weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"weight: every parameter comes from declare"):
        shard_chunks([chunk], mesh, compute_dtype=torch.float32, device=CPU)
    chunk.weight = declare((2, 2), Role.MATRIX)
    chunk.other = chunk.weight
    assert isinstance(chunk.other, DeclaredParameter)
    with pytest.raises(ValueError, match="tied"):
        shard_chunks([chunk], mesh, compute_dtype=torch.float32, device=CPU)


def optimizer_bytes(config):
    mesh = Mesh.create(config, TIMEOUT)
    _, _, parameters = declared_units(mesh)
    return sum(p.shard.numel() for p in parameters), dist.get_world_size()


def test_every_rank_holds_its_share(gloo_pool):
    whole = sum(p.shard.numel() for p in declared_units(Mesh.single())[2])
    for config in (MeshConfig(dp=4), MeshConfig(ep=4), MeshConfig(dp=2, ep=2)):
        shares = [elements for elements, _ in gloo_pool.run(optimizer_bytes, config)]
        assert sum(shares) == whole
        assert max(shares) <= whole / 4 * 1.03

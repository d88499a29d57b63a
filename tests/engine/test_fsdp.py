from datetime import timedelta
from itertools import pairwise

import pytest
import torch
from engine_chunks import (
    CPU,
    HIDDEN,
    HSDP,
    REPLICATED,
    SHARDED,
    declared_chunks,
    declared_units,
    whole_tensors,
)
from pith_engine.contract import ModelChunk, Role, declare
from pith_engine.fsdp import (
    Unit,
    canonical_blocks,
    cut_block,
    shard_axes,
    shard_chunks,
    sharded_parameters,
)
from pith_engine.mesh import Mesh, MeshConfig
from pith_engine.runtime import gather_objects
from torch import nn

TIMEOUT = timedelta(seconds=30)
CASES = [
    (MeshConfig(dp=4), SHARDED),
    (MeshConfig(dp=2, ep=2), SHARDED),
    (MeshConfig(ep=4), SHARDED),
    (MeshConfig(pp=2, dp=2), SHARDED),
    (MeshConfig(dp=2, ep=2), HSDP),
    (MeshConfig(dp=2, cp=2), HSDP),
    (MeshConfig(dp=2, ep=2), REPLICATED),
    (MeshConfig(dp=2, cp=2), REPLICATED),
    (MeshConfig(pp=2, dp=2), REPLICATED),
    (MeshConfig(ep=4), REPLICATED),
]


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


def gather_and_reduce(config, sharding, dtype):
    """Returns this rank's facts: reduced blocks and the gradients that went in."""
    mesh = Mesh.create(config, TIMEOUT)
    chunks, units, parameters = declared_units(mesh, dtype, sharding)
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
    return [gather_and_reduce(*case, dtype) for case in CASES]


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gather_gives_the_whole_and_reduce_sums_over_the_axis(gloo_pool, dtype):
    results = gloo_pool.run(gather_and_reduce_all, dtype)
    for case, (config, sharding) in enumerate(CASES):
        facts = [rank[case] for rank in results]
        for position, (name, is_expert, *_) in enumerate(facts[0]):
            for rank in range(4):
                mesh = Mesh.plan(config, rank)
                whole = mesh.expert_data if is_expert else mesh.data
                _, replicas = shard_axes(mesh, sharding, is_expert=is_expert)
                _, _, shape, offsets, grad, own = facts[rank][position]
                # A replica's ranks first, then the replicas (two, so their order is nothing).
                parts = [Mesh.plan(config, peer) for peer in whole.ranks]
                total = sum(
                    sum(
                        facts[part.rank][position][5]
                        for part in parts
                        if replicas.size == 1 or part.dp.rank == replica
                    )
                    for replica in range(replicas.size)
                )
                for peer in replicas.ranks:
                    assert torch.equal(grad, facts[peer][position][4])
                first = offsets[0] - (mesh.ep.rank * own.shape[0] if is_expert else 0)
                block = cut_block(total, (first, *offsets[1:]), grad.shape)
                # Sums in rank order on gloo: equal to the bit.
                assert torch.equal(grad, block), (config.label, name)
                assert shape[0] == own.shape[0] * (config.ep if is_expert else 1)


def backward_calls(dtype):
    """Several backward passes through a linear layer, and a late gradient added by hand."""
    mesh = Mesh.single()
    chunk = ModelChunk(is_last=True)
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


def test_shards_are_torch_chunk():
    for size in range(1, 40):
        for num_ranks in range(1, 12):
            bounds = []
            for rank in range(num_ranks):
                mesh = Mesh.plan(MeshConfig(dp=num_ranks), rank)
                norm = {"norm": declare((size,), Role.NORM)}
                [p] = Unit("head", norm, mesh, torch.float32, CPU).parameters
                bounds.append((p.offsets[0], p.offsets[0] + len(p.shard)))
            expected = [len(c) for c in torch.arange(size).chunk(num_ranks)]
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


def test_undeclared_parameters_are_refused():
    mesh = Mesh.single()
    chunk = ModelChunk(is_last=False)
    chunk.weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"weight: every parameter comes from declare"):
        shard_chunks([chunk], mesh, compute_dtype=torch.float32, device=CPU)
    layer = declared_chunks(mesh)[0]
    layer.layers["1"] = layer.layers["0"]
    names = {
        unit.name for unit in shard_chunks([layer], mesh, compute_dtype=torch.float32, device=CPU)
    }
    assert names == {"embedding", "layers.0", "layers.0.experts"}
    with pytest.raises(AssertionError, match=r"two parameters are called layers\.0\.norm"):
        shard_chunks(
            declared_chunks(mesh, layers=(0, 0)), mesh, compute_dtype=torch.float32, device=CPU
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_parameter_of_two_names_is_one_whose_gradient_sums_both_uses(num_chunks, dtype):
    """Each use has a backward of its own, as chunks have; then both in one backward."""
    first = ModelChunk(is_last=num_chunks == 1)
    last = first if num_chunks == 1 else ModelChunk(is_last=True)
    first.embedding = declare((13, 5), Role.EMBEDDING, std=0.1)
    last.head = first.embedding
    last.final_norm = declare((5,), Role.NORM)
    chunks = [first, last][:num_chunks]
    units = shard_chunks(chunks, Mesh.single(), compute_dtype=dtype, device=CPU)
    assert [[p.name for p in u.parameters] for u in units] == [["embedding"], ["final_norm"]]
    assert first.embedding is last.head is units[0].parameters[0].full
    assert isinstance(first.embedding, nn.Parameter)
    [parameter] = units[0].parameters
    parameter.shard.copy_(random_for(1, shape=(13, 5)))
    tokens, upstream = torch.tensor([3, 3, 12]), random_for(2, shape=(3, 13)).to(dtype)
    plain = parameter.shard.clone().requires_grad_()
    ((plain[tokens].tanh() @ plain.T) * upstream).sum().backward()
    tolerance = 1e-14 if dtype == torch.float64 else 1e-5
    for is_one_backward in (False, True):
        units[0].gather()
        embedded = first.embedding[tokens]
        hidden = embedded if is_one_backward else embedded.detach().requires_grad_()
        ((hidden.tanh() @ last.head.T) * upstream).sum().backward()
        if not is_one_backward:
            embedded.backward(hidden.grad)
        units[0].reduce()
        torch.testing.assert_close(parameter.grad, plain.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("config", "sharding", "num_shards"),
    [
        (MeshConfig(dp=4), SHARDED, 4),
        (MeshConfig(ep=4), SHARDED, 4),
        (MeshConfig(dp=2, ep=2), SHARDED, 4),
        (MeshConfig(dp=2, cp=2, ep=2), HSDP, (4, 8)),
        (MeshConfig(dp=2, cp=2, ep=2), REPLICATED, 4),
        (MeshConfig(dp=4, ep=2), HSDP, (2, 8)),
        (MeshConfig(dp=4), REPLICATED, 1),
    ],
)
def test_every_rank_holds_its_share(config, sharding, num_shards):
    """Elements of shards, and so bytes of optimizer state, are the whole over its shards."""
    whole = declared_units(Mesh.single())[2]
    by_kind = num_shards if isinstance(num_shards, tuple) else (num_shards, num_shards)
    for is_expert, shards in enumerate(by_kind):
        total = sum(p.shard.numel() for p in whole if p.role.is_expert == is_expert)
        shares = [
            sum(p.shard.numel() for p in parameters if p.role.is_expert == is_expert)
            for rank in range(config.world_size)
            for _, _, parameters in [declared_units(Mesh.plan(config, rank), sharding=sharding)]
        ]
        assert sum(shares) == total * config.world_size // shards
        assert max(shares) <= total / shards * 1.03


@pytest.mark.parametrize("sharding", [SHARDED, REPLICATED])
def test_four_experts_on_eight_ranks_leave_no_rank_out(sharding):
    config = MeshConfig(dp=2, cp=8) if sharding == REPLICATED else MeshConfig(dp=8)
    sizes = set()
    for rank in range(config.world_size):
        mesh = Mesh.plan(config, rank)
        declared = {"mlp.up": declare((4, 6, 16), Role.EXPERT_MATRIX)}
        unit = Unit(
            "mlp", declared, mesh, sharding=sharding, compute_dtype=torch.float32, device=CPU
        )
        sizes.add((unit.parameters[0].shard.numel(), unit._shards.numel()))
    assert sizes == {(48, 64)}  # an eighth each, in a row that is aligned to 64 elements


@pytest.mark.parametrize("config", [MeshConfig(dp=2, cp=2, ep=2), MeshConfig(dp=3, ep=2)])
@pytest.mark.parametrize("sharding", [HSDP, REPLICATED])
def test_every_replica_tiles_every_tensor(config, sharding):
    pieces: dict[int, list] = {}
    for rank in range(config.world_size):
        mesh = Mesh.plan(config, rank)
        for p in declared_units(mesh, sharding=sharding)[2]:
            is_replicated = sharding.replicate_experts or not p.role.is_expert
            assert p.replicas.size == (config.dp if is_replicated else 1)
            assert p.replicas.rank == (mesh.dp.rank if is_replicated else 0)
            assert p.replicas.ranks[p.replicas.rank] == rank
            p.shard.fill_(rank)
            for replica in [p.replicas.rank] if is_replicated else range(config.dp):
                pieces.setdefault(replica, []).append((p.name, p.shard, p.global_shape, p.offsets))
    assert all(
        not whole.isnan().any() for r in pieces for whole in whole_tensors(pieces[r]).values()
    )
    assert len(pieces) == config.dp

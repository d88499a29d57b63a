import torch
from engine_chunks import declared_units, whole_tensors
from pith_engine.contract import Role
from pith_engine.fsdp import canonical_blocks
from pith_engine.init import initialise, tensor_seed
from pith_engine.mesh import Mesh, MeshConfig


def initial_weights(config, seed=3, num_experts=8, dtype=torch.float32):
    pieces = []
    for rank in range(config.world_size):
        mesh = Mesh.plan(config, rank)
        _, _, parameters = declared_units(mesh, dtype, num_experts=num_experts)
        # Stages of a pipeline would hold other layers; here all hold the same.
        if mesh.pp.rank:
            continue
        initialise(parameters, seed)
        for p in parameters:
            for b in canonical_blocks(p, p.shard):
                pieces.append((b.name, b.tensor, b.global_shape, b.offsets))
    return whole_tensors(pieces)


def test_equal_on_every_mesh():
    single = initial_weights(MeshConfig())
    for config in (
        MeshConfig(dp=4),
        MeshConfig(ep=4),
        MeshConfig(dp=2, ep=2),
        MeshConfig(dp=3, ep=2),
        MeshConfig(cp=2, ep=8),
        MeshConfig(dp=16),
        MeshConfig(pp=2, dp=2),
    ):
        weights = initial_weights(config)
        assert weights.keys() == single.keys()
        for name, value in weights.items():
            assert torch.equal(value, single[name]), (config.label, name)


def test_nothing_is_drawn_twice():
    """No two experts, layers, parts or tensors are alike, and the std is the declared one."""
    weights = initial_weights(MeshConfig(ep=2))
    rows = [
        matrix.flatten()[:60]
        for name, value in weights.items()
        if not value.eq(value.flatten()[0]).all()
        for matrix in (value if value.dim() == 3 else [value])
    ]
    assert len(rows) == 2 + 2 * (1 + 2 + 16)
    distances = torch.cdist(torch.stack(rows), torch.stack(rows))
    assert (distances + torch.eye(len(rows)) > 0.1).all()
    assert abs(weights["embedding"].std() - 1.0) < 0.02
    assert abs(weights["layers.1.experts.up_proj"].std() - 0.1) < 0.003
    assert abs(weights["embedding"].mean()) < 0.03
    assert (weights["layers.0.norm"] == 1).all() and (weights["layers.0.experts.bias"] == 0).all()


def test_depends_on_the_seed_and_not_on_torch_state():
    first = initial_weights(MeshConfig(), seed=3)
    torch.manual_seed(99)
    torch.rand(7)
    state = torch.get_rng_state()
    again = initial_weights(MeshConfig(), seed=3)
    assert torch.equal(state, torch.get_rng_state())
    other = initial_weights(MeshConfig(), seed=4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head"], other["head"])


def test_wide_masters_start_from_the_same_values():
    narrow, wide = initial_weights(MeshConfig()), initial_weights(MeshConfig(), dtype=torch.float64)
    for name, value in wide.items():
        assert value.dtype == torch.float64
        assert torch.equal(value.float(), narrow[name])


def test_seeds_are_fixed_for_ever():
    """A change here changes every run that anybody has started."""
    assert tensor_seed(0, "embedding", None) == 5229658571078073769
    assert tensor_seed(1, "layers.0.experts.gate_proj", 7) == 8374193247597787076


def test_master_shards_of_a_bf16_model_are_fp32():
    _, _, parameters = declared_units(Mesh.single(), torch.bfloat16)
    initialise(parameters, 0)
    assert all(p.shard.dtype == torch.float32 for p in parameters)
    head = next(p for p in parameters if p.role is Role.HEAD)
    assert not torch.equal(head.shard, head.shard.bfloat16().float())

from datetime import timedelta

import pytest
import torch.distributed as dist
from pith_engine.mesh import (
    Mesh,
    MeshConfig,
    describe_mesh,
    feasible_meshes,
    mesh_violations,
    parse_mesh,
)

TIMEOUT = timedelta(seconds=47)


@pytest.mark.parametrize("sizes", [(2, 3, 1, 4), (1, 2, 2, 2), (3, 1, 2, 1)])
def test_axes_of_every_rank(sizes):
    config = MeshConfig(pp=sizes[0], dp=sizes[1], cp=sizes[2], ep=sizes[3])
    seen = set()
    for rank in range(config.world_size):
        mesh = Mesh.plan(config, rank)
        place = (mesh.pp.rank, mesh.dp.rank, mesh.cp.rank, mesh.ep.rank)
        seen.add(place)
        axes = (mesh.pp, mesh.dp, mesh.cp, mesh.ep, mesh.data, mesh.expert_data, mesh.world)
        for axis in (*axes, mesh.dense_shards):
            assert axis.ranks[axis.rank] == rank
            assert len(axis.ranks) == axis.size and list(axis.ranks) == sorted(axis.ranks)
            for other in axis.ranks:
                peer = Mesh.plan(config, other)
                assert getattr(peer, axis.name).ranks == axis.ranks
        assert mesh.data.size == config.dp * config.cp * config.ep
        assert mesh.expert_data.size == config.dp * config.cp
        assert mesh.dense_shards.size == config.cp * config.ep
        assert set(mesh.dense_shards.ranks) & set(mesh.dp.ranks) == {rank}
        assert mesh.ep_backward.ranks == mesh.ep.ranks
        assert mesh.batch_rank == place[1] * config.ep + place[3]
        assert mesh.world.ranks == tuple(range(config.world_size))
    assert len(seen) == config.world_size
    assert Mesh.plan(config, 1).ep.rank == (1 if config.ep > 1 else 0)


def groups_of(config):
    mesh = Mesh.create(config, TIMEOUT)
    if mesh is None:
        return None
    facts = {}
    names = ("pp", "dp", "cp", "ep", "ep_backward", "data", "expert_data", "world")
    for name in (*names, "dense_shards"):
        axis = getattr(mesh, name)
        if axis.size == 1:
            assert axis.group is None
            continue
        assert tuple(dist.get_process_group_ranks(axis.group)) == axis.ranks
        assert dist.get_rank(axis.group) == axis.rank
        backend = axis.group._get_backend(axis.group._device_types[0])
        facts[name] = backend.options._timeout
    if mesh.ep.size > 1:
        assert mesh.ep.group is not mesh.ep_backward.group
    if mesh.cp.size == 1:  # the same ranks, so no communicator of its own
        assert mesh.dense_shards.group is mesh.ep.group
    return facts


def test_every_group_has_the_timeout(gloo_pool):
    for config in (MeshConfig(dp=2, ep=2), MeshConfig(pp=2, cp=2), MeshConfig(ep=4)):
        for facts in gloo_pool.run(groups_of, config):
            assert facts and set(facts.values()) == {TIMEOUT}


def test_ranks_beyond_the_mesh_get_none(gloo_pool):
    results = gloo_pool.run(groups_of, MeshConfig(ep=3))
    assert results[3] is None and all(results[:3])


def too_large():
    try:
        Mesh.create(MeshConfig(dp=5), TIMEOUT)
    except ValueError as error:
        return str(error)
    return ""


def test_mesh_larger_than_the_world(gloo_pool):
    assert "needs 5 processes, 4 are running" in gloo_pool.run(too_large)[2]


def test_labels():
    assert MeshConfig(pp=2, ep=4).label == "pp2-ep4"
    assert MeshConfig().label == "single" and parse_mesh("single") == MeshConfig()
    assert parse_mesh("pp2-dp3-ep4") == MeshConfig(pp=2, dp=3, ep=4)
    for wrong in ("pp0", "pp2-", "pp2ep2", "tp2", "", "pp2-pp2", "pp", "ep2-single"):
        with pytest.raises(ValueError, match="pp2-ep2"):
            parse_mesh(wrong)
    with pytest.raises(ValueError, match=r"(?s)mesh\.dp = 0: .*mesh\.ep = -1: "):
        Mesh.plan(MeshConfig(dp=0, ep=-1), 0)
    with pytest.raises(ValueError, match="0 to 3"):
        Mesh.plan(MeshConfig(ep=4), 4)


def test_violations_come_together_with_valid_values():
    model = {"num_experts": 6, "num_layers": 4, "num_micro_batches": 8, "sequence_length": 9}
    wrong = mesh_violations(MeshConfig(pp=4, ep=4), world_size=4, **model)
    assert len(wrong) == 4
    world, experts, layers, batches = wrong
    assert "= 16 processes, but 4 run" in world and "pp2-dp2, pp2-ep2" in world
    assert "valid: 1, 2, 3, 6" in experts
    assert "at most 2" in layers
    assert batches.startswith("train.batch / train.micro_batch = 8: allowed are multiples of")
    assert "= 4 from 32 (2 x pp x dp x ep); set --train.batch 32, times" in batches
    (uneven,) = mesh_violations(MeshConfig(ep=3), world_size=3, **model | {"num_micro_batches": 10})
    assert "= 3 from 6 (2 x pp x dp x ep); set --train.batch 12, times" in uneven
    assert mesh_violations(MeshConfig(pp=2, ep=2), world_size=4, **model) == []
    dense = mesh_violations(MeshConfig(ep=2), world_size=2, **model | {"num_experts": 0})
    assert dense == ["mesh.ep = 2: the model has no experts; use mesh.dp"]


def test_a_sequence_that_cp_does_not_cut_evenly():
    model = {"num_experts": 6, "num_layers": 4, "num_micro_batches": 8}
    for length, valid in ((2999, "2992, 3000"), (3, "8"), (3001, "3000, 3008")):
        (wrong,) = mesh_violations(MeshConfig(cp=4), world_size=4, sequence_length=length, **model)
        assert wrong.endswith(f"train.sequence_length {length}; nearest valid lengths: {valid}")
        assert "2 x cp = 8" in wrong
    assert mesh_violations(MeshConfig(cp=4), world_size=4, sequence_length=3000, **model) == []


def test_feasible_meshes_have_no_violation():
    model = {"num_experts": 8, "num_layers": 6, "num_micro_batches": 24, "sequence_length": 9}
    meshes = feasible_meshes(6, **model)
    assert {m.label for m in meshes} == {"dp6", "dp3-ep2", "pp2-dp3", "pp3-dp2", "pp3-ep2"}
    model["sequence_length"] = 12
    meshes = feasible_meshes(6, **model)
    shared = {m.label for m in meshes if m.cp > 1}
    assert shared == {"cp6", "dp3-cp2", "dp2-cp3", "cp3-ep2", "pp3-cp2", "pp2-cp3"}
    for mesh in meshes:
        assert mesh_violations(mesh, world_size=6, **model) == []


def test_table_says_which_axis_crosses_nodes():
    lines = describe_mesh(MeshConfig(pp=2, dp=2, ep=2), ranks_per_node=4).splitlines()
    table = {line.split()[0]: line.split()[1:4] for line in lines[1:]}
    assert table["pp"] == ["2", "4", "yes"]
    assert table["dp"] == ["2", "2", "no"]
    assert table["ep"] == ["2", "1", "no"]
    assert table["cp"] == ["1", "-", "no"]
    assert table["world"] == ["8", "1", "yes"]
    assert table["data"] == ["4", "1", "no"]
    # A replica a node: its gathers stay there, only sums over dp leave it.
    lines = describe_mesh(MeshConfig(dp=2, cp=2, ep=2), ranks_per_node=4).splitlines()
    table = {line.split()[0]: line.split()[1:4] for line in lines[1:]}
    assert table["data"] == ["8", "1", "yes"] and table["expert_data"] == ["4", "2", "yes"]
    assert table["dense_shards"] == ["4", "1", "no"]
    assert table["dp"] == ["2", "4", "yes"]

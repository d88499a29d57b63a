"""Checkpoints: any mesh reads what any other wrote; incomplete ones are never resumed."""

import json
import warnings
from datetime import timedelta

import pytest
import torch
from engine_chunks import HSDP, REPLICATED, SHARDED
from pith_engine.checkpoint import (
    MANIFEST_NAME,
    checkpoint_fault,
    find_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    read_manifest,
    read_tensor,
    save_checkpoint,
    tensor_names,
    write_checkpoint,
)
from pith_engine.fsdp import CanonicalBlock, canonical_blocks, shard_chunks
from pith_engine.init import initialise
from pith_engine.mesh import Mesh, parse_mesh
from pith_engine.optim import AdamW, OptimizerConfig
from pith_engine.runtime import gather_objects
from torch.distributed.checkpoint import FileSystemReader
from toy_model import EXPERTS, HIDDEN, VOCABULARY, toy_chunks

CPU = torch.device("cpu")
LAYERS = {1: (2, 2), 2: (1, 1, 1, 1)}
DENSE = (1,)


def make_state(mesh, seed, sharding=SHARDED):
    """Parameters with weights and moments that depend on the seed and the canonical name alone."""
    chunks = toy_chunks(LAYERS[mesh.pp.size], mesh, DENSE)
    units = shard_chunks(chunks, mesh, sharding=sharding, compute_dtype=torch.float32, device=CPU)
    parameters = [parameter for unit in units for parameter in unit.parameters]
    optimizer = AdamW(parameters, OptimizerConfig())
    initialise(parameters, seed)
    for parameter in parameters:
        for tensor in optimizer.moments[parameter.name].values():
            tensor.copy_(parameter.shard * (seed + 2))
    return parameters, optimizer


def save_on(label, folder, step, sharding=SHARDED):
    mesh = Mesh.create(parse_mesh(label), timedelta(seconds=30))
    if mesh is not None:
        parameters, optimizer = make_state(mesh, 5, sharding)
        save_checkpoint(folder, step, parameters, optimizer, {"tokens": 12}, mesh)


def load_on(label, path, sharding=SHARDED):
    """Load over other values; returns every canonical block of weights and both moments."""
    mesh = Mesh.create(parse_mesh(label), timedelta(seconds=30))
    if mesh is None:
        return None
    parameters, optimizer = make_state(mesh, 9, sharding)
    manifest = load_checkpoint(path, parameters, optimizer, mesh)
    assert optimizer.num_steps == manifest.step
    found = []
    for parameter in parameters:
        tensors = {"model": parameter.shard, **optimizer.moments[parameter.name]}
        for kind, tensor in tensors.items():
            for b in canonical_blocks(parameter, tensor):
                found.append((f"{kind}.{b.name}", b.global_shape, b.offsets, b.tensor.clone()))
    return [block for part in gather_objects(found, mesh.world) for block in part]


def whole_tensors(blocks):
    whole = {}
    for name, shape, offsets, tensor in blocks:
        target = whole.setdefault(name, torch.full(shape, torch.nan))
        place = tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))
        assert ((target[place] == tensor) | target[place].isnan()).all(), f"{name}: replicas differ"
        target[place] = tensor
    return whole


@pytest.mark.parametrize(
    ("written", "sharding"),
    [
        pytest.param("single", SHARDED, marks=pytest.mark.core),
        pytest.param("pp2-ep2", SHARDED, marks=pytest.mark.core),
        ("dp4", SHARDED),
        pytest.param("ep4", SHARDED, marks=pytest.mark.core),
        pytest.param("dp2-ep2", HSDP, marks=pytest.mark.core),
        pytest.param("pp2-dp2", REPLICATED, marks=pytest.mark.core),
        ("dp4", REPLICATED),
    ],
)
def test_every_mesh_reads_what_every_other_wrote(gloo_pool, tmp_path, written, sharding):
    gloo_pool.run(save_on, written, tmp_path, 7, sharding)
    path = find_checkpoint(tmp_path)
    assert path is not None
    assert read_manifest(path).run == {"tokens": 12}
    parameters, optimizer = make_state(Mesh.single(), seed=5)
    expected = {}
    for parameter in parameters:
        tensors = {"model": parameter.shard, **optimizer.moments[parameter.name]}
        for kind, tensor in tensors.items():
            for b in canonical_blocks(parameter, tensor):
                expected[f"{kind}.{b.name}"] = b.tensor
    assert expected["model.layers.2.mlp.one"].shape == (EXPERTS, 10, HIDDEN)
    # Each block is there once: replicas overlap nothing.
    for key, stored in FileSystemReader(path).read_metadata().state_dict_metadata.items():
        assert sum(chunk.sizes.numel() for chunk in stored.chunks) == stored.size.numel(), key
    readers = [(label, SHARDED) for label in ("single", "pp2-dp2", "ep2", "dp2-ep2")]
    for label, reading in [*readers, ("dp2-ep2", HSDP), ("pp2-dp2", REPLICATED)]:
        loaded = whole_tensors(gloo_pool.run(load_on, label, path, reading)[0])
        assert loaded.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(loaded[name], tensor), (label, name)


def test_every_tensor_is_there_once_with_its_global_shape(gloo_pool, tmp_path):
    gloo_pool.run(save_on, "pp2-ep2", tmp_path, 1)
    path = find_checkpoint(tmp_path)
    names = tensor_names(path)
    assert read_tensor(path, "model.embedding").shape == (VOCABULARY, HIDDEN)
    assert read_tensor(path, "model.layers.3.mlp.two").shape == (EXPERTS, 10, HIDDEN)
    assert {name.split(".")[1] for name in names if name.startswith("layers.")} == set("0123")
    keys = FileSystemReader(path).read_metadata().state_dict_metadata
    prefix = "optimizer.exp_avg_sq."
    assert sorted(k.removeprefix(prefix) for k in keys if k.startswith(prefix)) == names
    with pytest.raises(ValueError, match="has no tensor"):
        read_tensor(path, "model.nothing")


@pytest.mark.core
def test_ranks_outside_the_mesh_take_no_part(gloo_pool, tmp_path):
    """A mesh of two of four ranks saves: torch's default group has ranks that never call."""
    gloo_pool.run(save_on, "ep2", tmp_path, 3)
    assert checkpoint_fault(tmp_path / "step-00000003") is None


def test_elements_that_were_not_saved_are_named(tmp_path):
    half = CanonicalBlock(
        name="head",
        tensor=torch.empty(2, 2, device="meta"),
        global_shape=(4, 2),
        offsets=(2, 0),
    )
    blocks, mesh = {"model.head": half}, Mesh.single()
    path = write_checkpoint(tmp_path, 0, blocks, {}, mesh, lambda key: torch.ones(2, 2))
    with pytest.raises(ValueError, match="4 of 8 elements were saved"):
        read_tensor(path, "model.head")


def test_one_process_saves_and_loads_without_a_warning(tmp_path):
    parameters, optimizer = make_state(Mesh.single(), seed=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = save_checkpoint(tmp_path, 1, parameters, optimizer, {}, Mesh.single())
        load_checkpoint(path, parameters, optimizer, Mesh.single())


def damaged(path, how):
    files = sorted(p for p in path.iterdir() if p.name != MANIFEST_NAME)
    match how:
        case "manifest missing":
            (path / MANIFEST_NAME).unlink()
        case "manifest cut":
            text = (path / MANIFEST_NAME).read_text()
            (path / MANIFEST_NAME).write_text(text[: len(text) // 2])
        case "file missing":
            files[0].unlink()
        case "file cut":
            files[-1].write_bytes(files[-1].read_bytes()[:-1])
        case "file outside" | "manifest without files":
            fields = json.loads((path / MANIFEST_NAME).read_text())
            (path.parent / "other").write_bytes(b"1234")
            outside = {"../other": {"size": 4, "sha256": ""}}
            fields["files"] = outside if how == "file outside" else 3
            (path / MANIFEST_NAME).write_text(json.dumps(fields))


FAULTS = [
    "manifest missing",
    "manifest cut",
    "manifest without files",
    "file missing",
    "file cut",
    "file outside",
]


@pytest.mark.parametrize("how", FAULTS)
def test_an_incomplete_checkpoint_is_passed_over_with_a_warning(tmp_path, how):
    mesh = Mesh.single()
    parameters, optimizer = make_state(mesh, seed=5)
    for step in (3, 10):
        save_checkpoint(tmp_path, step, parameters, optimizer, {}, mesh)
    (tmp_path / "step-00000099.tmp").mkdir()
    assert find_checkpoint(tmp_path).name == "step-00000010"
    damaged(tmp_path / "step-00000010", how)
    with pytest.warns(UserWarning, match="step-00000010 is incomplete"):
        assert find_checkpoint(tmp_path).name == "step-00000003"
    with pytest.raises(ValueError, match="incomplete"):
        load_checkpoint(tmp_path / "step-00000010", parameters, optimizer, mesh)


def load_damaged(path):
    mesh = Mesh.create(parse_mesh("dp4"), timedelta(seconds=30))
    try:
        load_checkpoint(path, *make_state(mesh, seed=9), mesh)
    except ValueError as error:
        return str(error)


def test_a_file_that_changed_is_named_on_every_rank(gloo_pool, tmp_path):
    gloo_pool.run(save_on, "dp4", tmp_path, 7)
    path = tmp_path / "step-00000007"
    files = sorted(file for file in path.iterdir() if file.name != MANIFEST_NAME)
    assert len(files) == 5
    for file in files:
        content = file.read_bytes()
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        assert find_checkpoint(tmp_path) == path
        for error in gloo_pool.run(load_damaged, path):
            assert f"is damaged, {file.name} changed after saving" in error
        file.write_bytes(content)
    assert gloo_pool.run(load_damaged, path) == [None] * 4


def test_a_save_replaces_the_same_step_and_ignores_what_a_killed_save_left(tmp_path):
    mesh = Mesh.single()
    parameters, optimizer = make_state(mesh, seed=5)
    (tmp_path / "step-00000002.tmp").mkdir()
    (tmp_path / "step-00000002.tmp" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "step-00000001.tmp").mkdir()
    (tmp_path / "step-00000001.deleted").mkdir()
    for tokens in (1, 2):
        save_checkpoint(tmp_path, 2, parameters, optimizer, {"tokens": tokens}, mesh)
    assert read_manifest(tmp_path / "step-00000002").run == {"tokens": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]


def test_pruning_keeps_the_newest_complete_and_foreign_files(tmp_path):
    mesh = Mesh.single()
    parameters, optimizer = make_state(mesh, seed=5)
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path, step, parameters, optimizer, {}, mesh)
    (tmp_path / "notes.txt").write_text("mine")
    damaged(tmp_path / "step-00000004", "file cut")
    prune_checkpoints(tmp_path, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "notes.txt",
        "step-00000003",
        "step-00000004",
    ]


def test_a_missing_folder_holds_no_checkpoint(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_checkpoint(tmp_path / "nothing") is None
        assert find_checkpoint(tmp_path) is None


def test_missing_keys_and_wrong_shapes_are_named_and_nothing_is_loaded(tmp_path):
    shapes = {"model.embedding": (VOCABULARY, HIDDEN + 1), "model.head": (3, 2)}
    blocks = {
        key: CanonicalBlock(
            name=key,
            tensor=torch.empty(shape, device="meta"),
            global_shape=shape,
            offsets=(0,) * len(shape),
        )
        for key, shape in shapes.items()
    }
    mesh = Mesh.single()
    path = write_checkpoint(tmp_path, 0, blocks, {}, mesh, lambda key: torch.ones(shapes[key]))
    assert torch.equal(read_tensor(path, "model.head"), torch.ones(3, 2))
    assert checkpoint_fault(path) is None
    parameters, optimizer = make_state(Mesh.single(), seed=5)
    before = [parameter.shard.clone() for parameter in parameters]
    with pytest.raises(ValueError, match=r"(?s)embedding: shape.*layers.0.mix: missing"):
        load_checkpoint(path, parameters, None, Mesh.single())
    with pytest.raises(ValueError, match="no optimizer state"):
        load_checkpoint(path, parameters, optimizer, Mesh.single())
    for parameter, value in zip(parameters, before, strict=True):
        assert torch.equal(parameter.shard, value)


def test_manifest_lists_every_other_file_with_its_hash(tmp_path):
    parameters, optimizer = make_state(Mesh.single(), seed=5)
    path = save_checkpoint(tmp_path, 1, parameters, optimizer, {}, Mesh.single())
    listed = json.loads((path / MANIFEST_NAME).read_text())["files"]
    assert set(listed) == {p.name for p in path.iterdir()} - {MANIFEST_NAME}
    assert all(len(record["sha256"]) == 64 and record["size"] > 0 for record in listed.values())

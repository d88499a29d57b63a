"""Checkpoints: saved by all ranks in parallel, independent of the mesh, complete or invisible.

`step-00000100` is a folder in PyTorch's DCP format. Tensors have canonical names
(`model.layers.3.q_proj`, `optimizer.exp_avg.layers.3.q_proj`) and global shapes; each rank writes
its blocks at their offsets, so any mesh reads them. To save:

    1. rank 0 deletes what killed saves left and makes an empty `step-00000100.tmp`
    2. every rank writes its blocks, rank 0 also `.metadata`, and hashes its files
    3. rank 0 writes `manifest.json`, a `Manifest`
    4. rank 0 takes `.tmp` off the folder's name

It is complete when every file of the manifest has its size; a load compares hashes (1.3 s a GB on
one core). No DTensor placement is a share of a part (gate and up are one tensor), hence our
planners. The trap: DCP does not check that a load covers every element; `_read_blocks` does.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from platform import python_version
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from pith_engine.fsdp import CanonicalBlock, ShardedParameter, canonical_blocks
from pith_engine.mesh import Mesh
from pith_engine.optim import AdamW, Muon
from pith_engine.runtime import barrier, gather_objects

MANIFEST_NAME = "manifest.json"
_COMPLETE_NAME = re.compile(r"step-\d{8}")
_LEFT_NAME = re.compile(r"step-\d{8}\.(tmp|deleted)")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds."""

    step: int
    """Optimizer updates done."""
    has_optimizer: bool
    """False for an import."""
    files: dict[str, dict[str, Any]]
    """`size` in bytes and `sha256` of the other files by name."""
    run: dict[str, Any]
    """JSON: configuration, corpus, tokens seen, updates, expert counts."""
    versions: dict[str, str]
    """Of Python and torch."""


def save_checkpoint(
    folder: Path,
    step: int,
    parameters: Sequence[ShardedParameter],
    optimizer: AdamW | Muon,
    run: Mapping[str, Any],
    mesh: Mesh,
) -> Path:
    """All ranks save weights, moments and rank 0's `run` as `folder/step-<step>`, returned.

    Earlier ones survive any failure, which raises on every rank, or on rank 0 (its OSError).
    """
    written = [p for p in parameters if p.replicas.rank == 0]  # replicas hold the same bits
    return write_checkpoint(folder, step, _blocks(written, optimizer), run, mesh)


def write_checkpoint(
    folder: Path,
    step: int,
    blocks: Mapping[str, CanonicalBlock],
    run: Mapping[str, Any],
    mesh: Mesh,
    read: Callable[[str], Tensor] | None = None,
) -> Path:
    """Save blocks by key. An import has meta blocks, each read when it is written."""
    final, rank = folder / f"step-{step:08d}", mesh.world.rank
    temporary = final.with_suffix(".tmp")
    # 1.
    if rank == 0:
        _delete_left(folder)
        temporary.mkdir(parents=True)
    barrier(mesh.world)
    # 2. DCP keeps a file's tensors until it is closed: those read one by one get a file each.
    writer = FileSystemWriter(temporary, single_file_per_rank=read is None, sync_files=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process
            save(
                {},
                storage_writer=writer,
                planner=_BlockSavePlanner(blocks, read),
                process_group=mesh.world.group,
                no_dist=mesh.world.size == 1,
            )
    except CheckpointException as error:
        if mesh.world.size > 1:
            raise
        shutil.rmtree(temporary)
        raise error.failures[0][0] from None
    mine = [*temporary.glob(f"__{rank}_*"), *([temporary / ".metadata"] if rank == 0 else [])]
    records = gather_objects({path.name: _record(path) for path in sorted(mine)}, mesh.world)
    # 3. and 4.
    if rank == 0:
        manifest = Manifest(
            step=step,
            has_optimizer=read is None,
            files=dict(ChainMap(*records)),
            run=dict(run),
            versions={"python": python_version(), "torch": torch.__version__},
        )
        (temporary / MANIFEST_NAME).write_text(json.dumps(asdict(manifest), indent=1))
        _sync(temporary / MANIFEST_NAME)
        _sync(temporary)
        if final.exists():
            _rename_aside(final)
        temporary.rename(final)
        _sync(folder)
        _delete_left(folder)
    barrier(mesh.world)
    return final


def find_checkpoint(folder: Path) -> Path | None:
    """The newest complete one; warns about others."""
    for path in reversed(_folders(folder, _COMPLETE_NAME)):
        if (fault := checkpoint_fault(path)) is None:
            return path
        warnings.warn(f"checkpoint {path} is incomplete and is ignored: {fault}", stacklevel=2)
    return None


def checkpoint_fault(path: Path) -> str | None:
    """Why it is not complete, or None."""
    if not (path / MANIFEST_NAME).is_file():
        return f"no {MANIFEST_NAME}" if path.is_dir() else "no such folder"
    try:
        sizes = {name: record["size"] for name, record in read_manifest(path).files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST_NAME} cannot be read: {error}"
    for name, size in sizes.items():
        file = path / name
        if file.parent != path:
            return f"{MANIFEST_NAME} lists {name}, which is not in the folder"
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            return f"{name} has {found} bytes instead of {size}"
    return None


def read_manifest(path: Path) -> Manifest:
    """FileNotFoundError if there is none."""
    return Manifest(**json.loads((path / MANIFEST_NAME).read_text()))


def verify_checkpoint(path: Path, mesh: Mesh) -> Manifest:
    """Compare hashes; ValueError on every rank if a file is gone or changed."""
    if fault := checkpoint_fault(path):
        raise ValueError(f"checkpoint {path} is incomplete: {fault}")
    manifest = read_manifest(path)
    mine = sorted(manifest.files)[mesh.world.rank :: mesh.world.size]
    changed = [name for name in mine if _record(path / name) != manifest.files[name]]
    if changed := [*chain(*gather_objects(changed, mesh.world))]:
        raise ValueError(
            f"checkpoint {path} is damaged, {', '.join(changed)} changed after saving: remove it "
            "to go on from an older one"
        )
    return manifest


def load_checkpoint(
    path: Path, parameters: Sequence[ShardedParameter], optimizer: AdamW | Muon | None, mesh: Mesh
) -> Manifest:
    """Load on all ranks; ValueError for damage or a misfit."""
    manifest = verify_checkpoint(path, mesh)
    if optimizer is not None and not manifest.has_optimizer:
        raise ValueError(f"checkpoint {path} holds no optimizer state: start a run from it")
    reader = FileSystemReader(path)
    _read_blocks(reader, reader.read_metadata(), _blocks(parameters, optimizer))
    if optimizer is not None:
        optimizer.num_steps = manifest.step
    barrier(mesh.world)
    return manifest


def tensor_names(path: Path) -> list[str]:
    """Sorted names of the model's tensors, without `model.`."""
    keys = FileSystemReader(path).read_metadata().state_dict_metadata
    return sorted(key.removeprefix("model.") for key in keys if key.startswith("model."))


def read_tensor(path: Path, key: str) -> Tensor:
    """A whole tensor; ValueError if there is none."""
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    stored = metadata.state_dict_metadata.get(key)
    if not isinstance(stored, TensorStorageMetadata):
        raise ValueError(f"checkpoint {path} has no tensor {key}")
    tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
    origin = (0,) * tensor.dim()
    block = CanonicalBlock(name=key, tensor=tensor, global_shape=tensor.shape, offsets=origin)
    _read_blocks(reader, metadata, {key: block})
    return tensor


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Delete complete checkpoints but the `keep` (from 1) newest."""
    complete = [path for path in _folders(folder, _COMPLETE_NAME) if not checkpoint_fault(path)]
    for path in complete[:-keep]:
        _rename_aside(path)
    _delete_left(folder)


def _read_blocks(
    reader: FileSystemReader, metadata: Metadata, blocks: Mapping[str, CanonicalBlock]
) -> None:
    items, faults = [], []
    for key, block in blocks.items():
        stored, shape = metadata.state_dict_metadata.get(key), block.global_shape
        if not isinstance(stored, TensorStorageMetadata):
            faults.append(f"{key}: missing")
        elif tuple(stored.size) != shape:
            faults.append(f"{key}: shape {tuple(stored.size)}, expected {shape}")
        elif wanted := block.tensor.numel():
            reads = create_read_items_for_chunk_list(key, stored, [_chunk(block)])
            # Saved chunks do not overlap: equal counts mean full cover.
            covered = sum(read.lengths.numel() for read in reads)
            if covered != wanted:
                faults.append(f"{key}: {covered} of {wanted} elements were saved")
            items += reads
    if faults:
        raise ValueError(f"checkpoint {reader.path} does not fit this model: " + "; ".join(faults))
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    planner = _BlockLoadPlanner()
    planner.state_dict = dict(blocks)
    reader.read_data(LoadPlan(items), planner).wait()


class _BlockSavePlanner(DefaultSavePlanner):
    """DCP's state dict stays empty."""

    def __init__(
        self, blocks: Mapping[str, CanonicalBlock], read: Callable[[str], Tensor] | None
    ) -> None:
        super().__init__(flatten_state_dict=False)
        self._blocks, self._read = blocks, read

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([])
        for key, block in self._blocks.items():
            if block.tensor.numel():
                properties = TensorProperties(dtype=block.tensor.dtype)
                data = TensorWriteData(_chunk(block), properties, torch.Size(block.global_shape))
                index = MetadataIndex(key, block.offsets)
                self.plan.items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        key = write_item.index.fqn
        return self._read(key) if self._read else self._blocks[key].tensor


class _BlockLoadPlanner(DefaultLoadPlanner):
    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor


def _blocks(
    parameters: Sequence[ShardedParameter], optimizer: AdamW | Muon | None
) -> dict[str, CanonicalBlock]:
    blocks = {}
    for parameter in parameters:
        moments = optimizer.moments.get(parameter.name, {}) if optimizer else {}
        tensors = {f"optimizer.{moment}": tensor for moment, tensor in moments.items()}
        for prefix, tensor in {"model": parameter.shard, **tensors}.items():
            for block in canonical_blocks(parameter, tensor):
                blocks[f"{prefix}.{block.name}"] = block
    return blocks


def _chunk(block: CanonicalBlock) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(block.offsets), block.tensor.shape)


def _rename_aside(path: Path) -> None:
    """For `_delete_left`: half a deletion must not look whole."""
    path.rename(path.with_suffix(".deleted"))


def _delete_left(folder: Path) -> None:
    for left in _folders(folder, _LEFT_NAME):
        shutil.rmtree(left)


def _folders(folder: Path, name: re.Pattern[str]) -> list[Path]:
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in found if name.fullmatch(path.name) and path.is_dir())


def _record(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def _sync(path: Path) -> None:
    """Make a file or a folder's names survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)

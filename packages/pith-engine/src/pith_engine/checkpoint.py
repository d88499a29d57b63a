"""Checkpoints: saved by every rank in parallel, independent of the mesh, complete or invisible.

A checkpoint is a folder `step-00000100` in PyTorch's DCP format plus `manifest.json`. Its tensors
carry canonical names (`model.layers.3.q_proj`, `optimizer.exp_avg.layers.3.q_proj`) and their true
global shapes; each rank writes the blocks it holds with their true offsets, so any mesh reads what
any other wrote. The steps of a save:

    1. rank 0 makes an empty `step-00000100.tmp`
    2. every rank writes its blocks (DCP; rank 0 also writes `.metadata`) and hashes its files
    3. rank 0 writes the manifest, the last object: file names, sizes, hashes, and the run's facts
    4. rank 0 renames the folder to `step-00000100`

A folder is complete when its manifest is there and every listed file has the listed size. Anything
else is ignored with a warning, and the newest complete one is resumed.

The planners below are DCP's extension point. They are needed because a canonical tensor may be a
part of a stored one (gate and up are stored together): its share on a rank is a block that no
DTensor placement describes. The trap: a load must cover every element of every block, and DCP does
not check that, so `load_blocks` does.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from platform import python_version
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from pith_engine.fsdp import ShardedParameter, canonical_blocks
from pith_engine.mesh import Mesh
from pith_engine.optim import AdamW
from pith_engine.runtime import barrier, gather_objects

MANIFEST_NAME = "manifest.json"
_FOLDER_PATTERN = re.compile(r"step-(\d{8})")


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint."""

    size: int
    """Bytes."""
    sha256: str
    """Hash of its content."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The last object of a checkpoint: what it holds and where the run stood."""

    step: int
    """Optimizer updates done."""
    has_optimizer: bool
    """Whether moments are there; an imported checkpoint has none."""
    files: dict[str, FileRecord]
    """Every other file by its name."""
    run: dict[str, Any]
    """Facts of the run as JSON values: configuration, data position, tokens seen."""
    versions: dict[str, str]
    """Versions of Python and torch that wrote it."""


@dataclass(frozen=True, kw_only=True)
class StoredBlock:
    """A rectangular part of one tensor of a checkpoint, or the whole tensor."""

    key: str
    """Name in the checkpoint."""
    shape: tuple[int, ...]
    """Global shape."""
    offsets: tuple[int, ...]
    """Where the block starts in each dim."""
    sizes: tuple[int, ...]
    """The block's own shape."""
    dtype: torch.dtype
    """Its dtype."""
    read: Callable[[], Tensor]
    """Gives the block's tensor when it is needed, so that one at a time can be in memory."""


def save_checkpoint(
    folder: Path,
    step: int,
    parameters: Sequence[ShardedParameter],
    optimizer: AdamW,
    run: Mapping[str, Any],
    mesh: Mesh,
) -> Path:
    """Save weights, moments and the run's facts as `folder/step-<step>`; all ranks call it.

    Args:
        folder: where checkpoints stand, shared by all ranks.
        step: optimizer updates done.
        parameters: this rank's parameters.
        optimizer: their optimizer.
        run: JSON values for `Manifest.run`, used from rank 0.
        mesh: the ranks that save.

    Returns:
        The committed folder.

    Raises:
        CheckpointException: a rank could not write (the same error on every rank); what was
            committed before stays.
    """
    blocks = _model_blocks(parameters) + _optimizer_blocks(parameters, optimizer)
    return _commit(folder, step, blocks, run, mesh, has_optimizer=True)


def write_checkpoint(folder: Path, step: int, blocks: Iterable[StoredBlock], run: dict) -> Path:
    """Save whole tensors from one process, one in memory at a time; for imports.

    Args:
        folder: where checkpoints stand.
        step: step to name it after, 0 for imported weights.
        blocks: one per canonical tensor, keys with the prefix `model.`.
        run: JSON values for `Manifest.run`.

    Returns:
        The committed folder.
    """
    return _commit(folder, step, list(blocks), run, Mesh.single(), has_optimizer=False)


def find_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a folder, None without one; warns about incomplete ones."""
    for path in reversed(_step_folders(folder)):
        fault = checkpoint_fault(path)
        if fault is None:
            return path
        warnings.warn(f"checkpoint {path} is incomplete and is ignored: {fault}", stacklevel=2)
    return None


def checkpoint_fault(path: Path) -> str | None:
    """Why a checkpoint is not complete; None when it is."""
    if not (path / MANIFEST_NAME).is_file():
        return f"no {MANIFEST_NAME}"
    try:
        manifest = read_manifest(path)
    except (ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST_NAME} cannot be read: {error}"
    for name, record in manifest.files.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != record.size:
            return f"{name} has {found} bytes instead of {record.size}"
    return None


def read_manifest(path: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        FileNotFoundError: there is none.
        ValueError, KeyError, TypeError: it is damaged.
    """
    fields = json.loads((path / MANIFEST_NAME).read_text())
    files = {name: FileRecord(**record) for name, record in fields.pop("files").items()}
    return Manifest(files=files, **fields)


def load_checkpoint(
    path: Path, parameters: Sequence[ShardedParameter], optimizer: AdamW | None, mesh: Mesh
) -> Manifest:
    """Load weights, and moments when an optimizer is given, saved on any mesh; all ranks call it.

    Args:
        path: a complete checkpoint.
        parameters: written in place (`shard`).
        optimizer: its moments and step count are written in place.
        mesh: the ranks that load.

    Returns:
        The manifest.

    Raises:
        ValueError: incomplete checkpoint, a tensor missing or of another shape, or no moments for
            an optimizer.
    """
    if fault := checkpoint_fault(path):
        raise ValueError(f"checkpoint {path} is incomplete: {fault}")
    manifest = read_manifest(path)
    blocks = _model_blocks(parameters)
    if optimizer is not None:
        if not manifest.has_optimizer:
            raise ValueError(f"checkpoint {path} holds no optimizer state: start a run from it")
        blocks += _optimizer_blocks(parameters, optimizer)
        optimizer.num_steps = manifest.step
    load_blocks(path, blocks, no_dist=mesh.world.size == 1)
    return manifest


def tensor_names(path: Path, prefix: str = "model.") -> list[str]:
    """Names without the prefix of all tensors that have it, sorted."""
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    return [key.removeprefix(prefix) for key in sorted(stored) if key.startswith(prefix)]


def read_tensors(path: Path, prefix: str = "model.") -> Iterator[tuple[str, Tensor]]:
    """Read whole tensors one at a time in one process, in the order of their names.

    Yields:
        Name without the prefix, and the tensor on the CPU in its stored dtype.
    """
    for name in tensor_names(path, prefix):
        yield name, read_tensor(path, prefix + name)


def read_tensor(path: Path, key: str) -> Tensor:
    """Read one whole tensor by its key in the checkpoint.

    Raises:
        ValueError: no such key.
    """
    stored = FileSystemReader(path).read_metadata().state_dict_metadata.get(key)
    if not isinstance(stored, TensorStorageMetadata):
        raise ValueError(f"checkpoint {path} has no tensor {key}")
    tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
    load_blocks(path, [_whole_block(key, tensor)], no_dist=True)
    return tensor


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Delete all but the `keep` newest complete checkpoints; everything else stays untouched."""
    complete = [path for path in _step_folders(folder) if checkpoint_fault(path) is None]
    for path in complete[: max(len(complete) - keep, 0)]:
        shutil.rmtree(_renamed_aside(path))


def load_blocks(path: Path, blocks: Sequence[StoredBlock], *, no_dist: bool) -> None:
    """Fill the tensors of `blocks` from a checkpoint.

    Args:
        path: the checkpoint.
        blocks: this rank's blocks; `read()` gives the tensor to write.
        no_dist: whether this process loads alone.

    Raises:
        ValueError: a key is missing, has another shape, or is not covered by what was saved.
    """
    reader = FileSystemReader(path)
    stored = reader.read_metadata().state_dict_metadata
    faults = []
    for block in blocks:
        found = stored.get(block.key)
        if not isinstance(found, TensorStorageMetadata):
            faults.append(f"{block.key}: missing")
        elif tuple(found.size) != block.shape:
            faults.append(f"{block.key}: shape {tuple(found.size)}, expected {block.shape}")
    if faults:
        raise ValueError(f"checkpoint {path} does not fit this model: " + "; ".join(faults))
    load({}, storage_reader=reader, planner=_BlockLoadPlanner(blocks), no_dist=no_dist)


class _BlockSavePlanner(DefaultSavePlanner):
    """Saves blocks with their own offsets; DCP's state dict stays empty."""

    def __init__(self, blocks: Sequence[StoredBlock]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._blocks = {block.key: block for block in blocks if 0 not in block.sizes}

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, block in self._blocks.items():
            chunk = ChunkStorageMetadata(torch.Size(block.offsets), torch.Size(block.sizes))
            data = TensorWriteData(
                chunk, TensorProperties(dtype=block.dtype), torch.Size(block.shape)
            )
            index = MetadataIndex(key, chunk.offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._blocks[write_item.index.fqn].read().detach()


class _BlockLoadPlanner(DefaultLoadPlanner):
    """Loads blocks from whatever chunks were saved."""

    def __init__(self, blocks: Sequence[StoredBlock]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._blocks = {block.key: block for block in blocks if 0 not in block.sizes}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "DCP sets the planner up before it plans"
        items: list[ReadItem] = []
        for key, block in self._blocks.items():
            stored = self.metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata), f"{key} was checked to be a tensor"
            chunk = ChunkStorageMetadata(torch.Size(block.offsets), torch.Size(block.sizes))
            reads = create_read_items_for_chunk_list(key, stored, [chunk])
            # Saved chunks do not overlap, so equal counts mean that every element is covered.
            covered = sum(read.lengths.numel() for read in reads)
            if covered != chunk.sizes.numel():
                raise ValueError(f"{key}: {covered} of {chunk.sizes.numel()} elements were saved")
            items += reads
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        tensor = self._blocks[read_item.dest_index.fqn].read().detach()
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            tensor = tensor.narrow(dim, start, length)
        return tensor


def _commit(
    folder: Path,
    step: int,
    blocks: Sequence[StoredBlock],
    run: Mapping[str, Any],
    mesh: Mesh,
    *,
    has_optimizer: bool,
) -> Path:
    """The numbered steps of the file's docstring."""
    final = folder / f"step-{step:08d}"
    temporary = final.with_suffix(".tmp")
    alone = mesh.world.size == 1
    # 1. An empty folder.
    if mesh.world.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    barrier(mesh.world)
    # 2. Every rank's blocks.
    writer = FileSystemWriter(temporary, sync_files=True)
    save({}, storage_writer=writer, planner=_BlockSavePlanner(blocks), no_dist=alone)
    mine = [name for name in sorted(os.listdir(temporary)) if _writer_of(name) == mesh.world.rank]
    records = gather_objects({name: _record(temporary / name) for name in mine}, mesh.world)
    # 3. and 4. The manifest last, then the name.
    if mesh.world.rank == 0:
        manifest = Manifest(
            step=step,
            has_optimizer=has_optimizer,
            files={name: record for part in records for name, record in part.items()},
            run=dict(run),
            versions={"python": python_version(), "torch": torch.__version__},
        )
        _write_durably(temporary / MANIFEST_NAME, json.dumps(asdict(manifest), indent=1))
        replaced = _renamed_aside(final) if final.exists() else None
        temporary.rename(final)
        _sync_folder(folder)
        if replaced is not None:
            shutil.rmtree(replaced)
    barrier(mesh.world)
    return final


def _model_blocks(parameters: Sequence[ShardedParameter]) -> list[StoredBlock]:
    return [
        _stored_block(f"model.{block.name}", block.tensor, block.global_shape, block.offsets)
        for parameter in parameters
        for block in canonical_blocks(parameter, parameter.shard)
    ]


def _optimizer_blocks(
    parameters: Sequence[ShardedParameter], optimizer: AdamW
) -> list[StoredBlock]:
    moments = optimizer.moments()
    return [
        _stored_block(
            f"optimizer.{moment}.{block.name}", block.tensor, block.global_shape, block.offsets
        )
        for parameter in parameters
        for moment, tensor in moments[parameter.name].items()
        for block in canonical_blocks(parameter, tensor)
    ]


def _stored_block(
    key: str, tensor: Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]
) -> StoredBlock:
    return StoredBlock(
        key=key,
        shape=tuple(shape),
        offsets=tuple(offsets),
        sizes=tuple(tensor.shape),
        dtype=tensor.dtype,
        read=lambda: tensor,
    )


def _whole_block(key: str, tensor: Tensor) -> StoredBlock:
    return _stored_block(key, tensor, tuple(tensor.shape), (0,) * tensor.dim())


def _renamed_aside(path: Path) -> Path:
    """Rename before deleting: a deletion that is cut short must not leave what looks whole."""
    aside = path.with_suffix(".deleted")
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


def _step_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if _FOLDER_PATTERN.fullmatch(p.name) and p.is_dir())


def _writer_of(name: str) -> int:
    """The rank that wrote a DCP file: `__3_0.distcp` is rank 3's, `.metadata` is rank 0's."""
    found = re.fullmatch(r"__(\d+)_\d+\.distcp", name)
    return int(found[1]) if found else 0


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(size=path.stat().st_size, sha256=digest)


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make names in a folder survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)

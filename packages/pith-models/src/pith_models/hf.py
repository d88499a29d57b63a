"""Hugging Face folders: read and written tensor by tensor, with a strict account of every key.

A checkpoint of ours names *canonical* tensors ("layers.3.experts_gate_proj", `[E, I, H]`); a
Hugging Face file holds one entry per expert. Values are made when asked for, so memory stays at one
canonical tensor, plus one file when writing.

The trap is a silent partial load, which trains and evaluates plausibly: a key that is missing,
unexpected or of another shape is an error that lists it, before any value is read.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
COMPANION_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Copied byte for byte."""


@dataclass(frozen=True)
class CanonicalTensor:
    """One tensor of a checkpoint and where Hugging Face files keep it."""

    name: str
    """Canonical name, with the global layer number."""
    shape: tuple[int, ...]
    """Global shape."""
    keys: tuple[str, ...]
    """Hugging Face keys: one, or one per expert for a stack."""
    is_expert_stack: bool = False
    """Whether each key holds an expert's slice along dim 0 instead of the whole tensor."""
    copies: tuple[str, ...] = ()
    """Other keys under which a folder may hold the whole tensor again; never written."""

    @property
    def key_shape(self) -> tuple[int, ...]:
        """The shape behind each key."""
        return self.shape[1:] if self.is_expert_stack else self.shape

    def slices(self, tensor: Tensor) -> Sequence[Tensor]:
        """Views of a tensor of `shape`, one per key."""
        return tensor.unbind(0) if self.is_expert_stack else (tensor,)


class HuggingFaceTensors(Mapping[str, Tensor]):
    """The canonical tensors of a Hugging Face folder, each read as `dtype` when asked for.

    A ValueError lists every missing, unexpected and misshapen key, or names a damaged file.
    `account` says in one line what became of the keys.
    """

    def __init__(self, folder: Path, layout: Sequence[CanonicalTensor], dtype: torch.dtype):
        self._layout = {tensor.name: tensor for tensor in layout}
        self._dtype = dtype
        self._files, shapes, dtypes = _read_headers(folder)
        _check_keys(folder, layout, shapes)
        self._check_copies(folder, layout)
        new = str(dtype).removeprefix("torch.")
        counts = sorted(Counter(old for old in dtypes.values() if old != new).items())
        changes = ", ".join(f"{number} keys {old} -> {new}" for old, number in counts) or "none"
        self.account = (
            f"keys: {len(shapes)} loaded, 0 unexpected, 0 missing; dtype changes: {changes}"
        )

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._layout[name]
        out = torch.empty(tensor.shape, dtype=self._dtype)
        places: dict[Path, list[tuple[str, Tensor]]] = {}
        for key, view in zip(tensor.keys, tensor.slices(out), strict=True):
            places.setdefault(self._files[key], []).append((key, view))
        for path, entries in places.items():
            with safe_open(path, framework="pt") as file:
                for key, view in entries:
                    view.copy_(file.get_tensor(key))
        return out

    def _check_copies(self, folder: Path, layout: Sequence[CanonicalTensor]) -> None:
        pairs = [(tensor, key) for tensor in layout for key in tensor.copies if key in self._files]
        for tensor, key in pairs:
            with safe_open(self._files[key], framework="pt") as file:
                copy = file.get_tensor(key).to(self._dtype)
            if not torch.equal(copy, self[tensor.name]):
                raise ValueError(
                    f"{folder}: {key} differs from {tensor.keys[0]}, to which config.json ties it: "
                    "set tie_word_embeddings to false there or remove the key"
                )

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout)

    def __len__(self) -> int:
        return len(self._layout)


def read_hf_config(folder: Path) -> dict:
    """`config.json` of a Hugging Face folder; a ValueError if it has none."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a Hugging Face folder: it has no config.json")
    return _read_json(path)


def export_tensors(
    tensors: Mapping[str, Tensor],
    layout: Sequence[CanonicalTensor],
    config_fields: Mapping[str, object],
    out: Path,
    *,
    dtype: torch.dtype,
    companions: Path | None = None,
    max_file_bytes: int = 4 * 2**30,
    replace: bool = False,
) -> None:
    """Write a Hugging Face folder that transformers and vLLM open without an edit.

    It gets its name when complete. `tensors` are asked for one at a time in the order of `layout`,
    whose names they must have; the dtype is added to `config_fields`; `companions` is a folder
    whose `COMPANION_FILES` are copied. A ValueError if `out` exists without `replace`, or the
    tensors are not those of the layout.
    """
    if out.exists() and not replace:
        raise ValueError(f"{out} exists: choose another folder or remove it")
    # Compared as sets of names: `name in tensors` may read the tensor.
    expected, present = {tensor.name for tensor in layout}, set(tensors)
    missing, unexpected = expected - present, present - expected
    if missing or unexpected:
        raise ValueError(
            f"the tensors are not those of this model: missing {_first(sorted(missing))}; "
            f"unexpected {_first(sorted(unexpected))}"
        )
    temporary = out.with_name(out.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name in COMPANION_FILES:
        if companions is not None and (companions / name).is_file():
            shutil.copyfile(companions / name, temporary / name)
    fields = {**config_fields, "torch_dtype": str(dtype).removeprefix("torch.")}
    _write_json(temporary / "config.json", fields)
    _write_files(tensors, layout, temporary, dtype, max_file_bytes)
    for path in temporary.glob("*.safetensors"):  # written with mode 0600
        shutil.copymode(temporary / "config.json", path)
    if out.exists():
        replaced = out.with_name(out.name + ".replaced")
        out.rename(replaced)
        temporary.rename(out)
        shutil.rmtree(replaced)
    else:
        temporary.rename(out)


def _read_headers(
    folder: Path,
) -> tuple[dict[str, Path], dict[str, tuple[int, ...]], dict[str, str]]:
    """Every key's file, shape and dtype, from the files' own headers."""
    index_path = folder / INDEX_FILE
    has_index = index_path.is_file()
    index = _read_json(index_path).get("weight_map") if has_index else {}
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise ValueError(f"{index_path} has no weight_map from keys to file names")
    names = sorted(set(index.values())) if has_index else [SINGLE_FILE]
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ValueError(
            f"{folder} lacks {_first(absent)}" + (", named by its index" if has_index else "")
        )
    files, shapes, dtypes = {}, {}, {}
    for name in names:
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - not a dict
                    entry = file.get_slice(key)
                    files[key] = folder / name
                    shapes[key] = tuple(entry.get_shape())
                    dtypes[key] = _SAFETENSORS_DTYPES.get(entry.get_dtype(), entry.get_dtype())
        except SafetensorError as error:
            raise ValueError(f"{folder / name} is damaged: {error}") from None
    if has_index:
        actual = {key: path.name for key, path in files.items()}
        odd = sorted(dict(index.items() ^ actual.items()))
        if odd:
            raise ValueError(f"{index_path} and the files disagree about {_first(odd)}")
    return files, shapes, dtypes


def _check_keys(
    folder: Path, layout: Sequence[CanonicalTensor], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    needed = {key for tensor in layout for key in tensor.keys}
    wanted = {k: tensor.key_shape for tensor in layout for k in (*tensor.keys, *tensor.copies)}
    wrong_shapes = [
        f"{key} {list(shapes[key])}, expected {list(wanted[key])}"
        for key in sorted(wanted.keys() & shapes.keys())
        if shapes[key] != wanted[key]
    ]
    faults = [
        f"{label} ({len(keys)}): {_first(keys)}"
        for label, keys in (
            ("missing keys", sorted(needed - shapes.keys())),
            ("unexpected keys", sorted(shapes.keys() - wanted.keys())),
            ("wrong shapes", wrong_shapes),
        )
        if keys
    ]
    if faults:
        raise ValueError(f"{folder} does not hold this model: " + "; ".join(faults))


def _write_files(
    tensors: Mapping[str, Tensor],
    layout: Sequence[CanonicalTensor],
    folder: Path,
    dtype: torch.dtype,
    max_file_bytes: int,
) -> None:
    weight_map = _plan_files(layout, dtype, max_file_bytes)
    pending: dict[str, Tensor] = {}
    name = weight_map[layout[0].keys[0]]
    for tensor in layout:
        value = tensors[tensor.name]
        if tuple(value.shape) != tensor.shape:
            raise ValueError(f"{tensor.name} is {list(value.shape)}, expected {tensor.shape}")
        # One clone per key: a file stores each tensor whole, not a view into the stack.
        for key, view in zip(tensor.keys, tensor.slices(value.detach()), strict=True):
            if weight_map[key] != name:
                save_file(pending, folder / name, metadata={"format": "pt"})
                pending, name = {}, weight_map[key]
            pending[key] = view.to("cpu", dtype, copy=True).contiguous()
    save_file(pending, folder / name, metadata={"format": "pt"})
    if name != SINGLE_FILE:
        total = sum(prod(tensor.shape) for tensor in layout)
        metadata = {"total_size": total * dtype.itemsize, "total_parameters": total}
        _write_json(folder / INDEX_FILE, {"metadata": metadata, "weight_map": weight_map})


def _plan_files(
    layout: Sequence[CanonicalTensor], dtype: torch.dtype, max_file_bytes: int
) -> dict[str, str]:
    """The file name of every key."""
    numbers: dict[str, int] = {}
    number, filled = 1, 0
    for tensor in layout:
        size = prod(tensor.key_shape) * dtype.itemsize
        for key in tensor.keys:
            if filled and filled + size > max_file_bytes:
                number, filled = number + 1, 0
            numbers[key] = number
            filled += size
    if number == 1:
        return dict.fromkeys(numbers, SINGLE_FILE)
    return {key: f"model-{i:05}-of-{number:05}.safetensors" for key, i in numbers.items()}


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected a JSON object")
    return content


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more if names else "none"


_SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}

"""Hugging Face folders: read and written with a strict account of every key.

A checkpoint of ours names *canonical* tensors ("layers.3.experts_gate_proj", `[E, I, H]`). Files
hold one under its own key, one key per expert, or fused: `gate_up_proj` has all experts' gate and
up rows, halves or, in GPT-OSS, in turn and transposed. FP8 and MXFP4 are decoded. Memory: a
canonical tensor or two.

The trap is a partial load, which trains plausibly: all keys are checked before a value is read.
"""

import json
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Collection, Container, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fcntl import LOCK_EX, LOCK_NB, flock
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from pith_engine.contract import DeclaredParameter, Role
from pith_engine.fsdp import cut_block
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
COMPANION_FILES = (
    *("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt", "chat_template.*"),
)
"""Copied byte for byte."""


@dataclass(frozen=True)
class FusedKey:
    """A tensor `[E, rows, ...]` that holds one or two canonical ones."""

    key: str
    """Its name."""
    half: int | None = None
    """Which half of the rows is the canonical tensor: 0, 1 or None for all."""
    is_interleaved: bool = False
    """Whether the halves' rows alternate."""
    is_transposed: bool = False
    """Whether it is `[E, columns, rows]`, which a square shape does not tell."""


_FUSED = {
    "gate_proj.weight": FusedKey("gate_up_proj", 0),
    "up_proj.weight": FusedKey("gate_up_proj", 1),
    "down_proj.weight": FusedKey("down_proj"),
}


@dataclass(frozen=True)
class CanonicalTensor:
    """A tensor of a checkpoint, and where Hugging Face files keep it."""

    name: str
    """With the global layer number."""
    shape: tuple[int, ...]
    """Global shape."""
    keys: tuple[str, ...]
    """One, or one per expert of a stack; () where files only have `fused`."""
    is_expert_stack: bool = False
    """Whether dim 0 counts experts."""
    copy: str | None = None
    """A key that may hold it again; never written."""
    fused: FusedKey | None = None
    """Where files without `keys` hold the stack; written only if `keys` is ()."""
    keeps_float32: bool = False
    """Whether files hold it in fp32, whatever their dtype."""

    def fused_in(self, present: Container[str] = ()) -> FusedKey | None:
        """The fused key if files that have these keys, or an export, hold it there."""
        is_fused = self.fused and (not self.keys or self.fused.key in present)
        return self.fused if is_fused else None

    def stored(self, present: Container[str] = ()) -> dict[str, tuple[int, ...]]:
        """Key -> shape in files that have these keys, or in an export."""
        fused = self.fused_in(present)
        if fused is None:
            return dict.fromkeys(self.keys, self.shape[1:] if self.is_expert_stack else self.shape)
        experts, rows, *columns = self.shape
        rows *= 1 if fused.half is None else 2
        shape = (*columns, rows) if fused.is_transposed else (rows, *columns)
        return {fused.key: (experts, *shape)}

    def slices(self, tensor: Tensor) -> Sequence[Tensor]:
        """Views: a stack's experts, else the tensor."""
        return tensor.unbind(0) if self.is_expert_stack else (tensor,)


def layer_tensors(
    layer: nn.Module, number: int, keys: Mapping[str, str | FusedKey]
) -> list[CanonicalTensor]:
    """The tensors that a layer declares, with all its experts.

    `keys`: canonical name in the layer -> key there; or beginning of names -> of keys, which end in
    `.weight`. `{}` is for the expert; such keys may be fused, with gate and up in halves.
    """
    stem, tensors = f"model.layers.{number}.", []
    for stored, parameter in layer.named_parameters():
        assert isinstance(parameter, DeclaredParameter), f"{stored} is not declared"
        *shape, parts, role = *parameter.shape, parameter.parts, parameter.role
        if parts:
            shape[-2] //= len(parts)
        for name in parts or (stored,):
            key = keys.get(name)
            if key is None:
                start = next(ours for ours in keys if name.startswith(ours))
                key = f"{keys[start]}{name.removeprefix(start)}.weight"
            if isinstance(key, FusedKey):
                own, fused = (), replace(key, key=stem + key.key)
            elif "{}" in key:
                own = tuple(stem + key.format(expert) for expert in range(shape[0]))
                before, last = key.split("{}.")
                fused = replace(_FUSED[last], key=stem + before + _FUSED[last].key)
            else:
                own, fused = (stem + key,), None
            tensor = CanonicalTensor(f"layers.{number}.{name}", tuple(shape), own, role.is_expert)
            tensors.append(replace(tensor, fused=fused, keeps_float32=role is Role.BALANCE_BIAS))
    return tensors


class HuggingFaceTensors(Mapping[str, Tensor]):
    """A folder's canonical tensors, read as `dtype` when asked for.

    ValueError with every missing, unexpected and misshapen key, or a damaged file; `account` is a
    line about the keys. `skipped_layer` is one of multi-token prediction.
    """

    def __init__(
        self,
        folder: Path,
        layout: Sequence[CanonicalTensor],
        dtype: torch.dtype,
        skipped_layer: int | None = None,
    ):
        self._layout, self._dtype = {tensor.name: tensor for tensor in layout}, dtype
        headers, note = _read_headers(folder), ""
        prefix = f"model.layers.{skipped_layer}."
        if f"{prefix}eh_proj.weight" in headers:
            skipped = [headers.pop(key) for key in [*headers] if key.startswith(prefix)]
            note = f"; {len(skipped)} keys of {prefix[:-1]} skipped: multi-token "
            note += "prediction is not implemented"
        self._headers, self._parts = headers, _check_keys(folder, layout, headers)
        for tensor in layout:
            if tensor.copy in headers:
                copy = self._load(replace(tensor, keys=(tensor.copy,)))
                if not torch.equal(copy, self._load(tensor)):
                    raise ValueError(
                        f"{folder}: {tensor.copy} differs from {tensor.keys[0]}, tied by "
                        "config.json: set tie_word_embeddings to false there or remove it"
                    )
        found = (headers[parts[0]].dtype for parts in self._parts.values())
        new, olds = _dtype_name(dtype), Counter(_dtype_name(_DTYPES.get(n, n)) for n in found)
        changes = [f"{n} keys {old} -> {new}" for old, n in sorted(olds.items()) if old != new]
        self.account = (
            f"keys: {len(headers)} loaded, 0 unexpected, 0 missing; dtype changes: "
            f"{', '.join(changes) or 'none'}{note}"
        )

    def __getitem__(self, name: str) -> Tensor:
        return self._load(self._layout[name])

    def block(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A block; of a stack only its experts are read."""
        if 0 in sizes:
            return torch.empty(tuple(sizes), dtype=self._dtype)
        tensor, experts = self._layout[name], slice(None)
        if tensor.is_expert_stack:
            experts, offsets = slice(offsets[0], offsets[0] + sizes[0]), (0, *offsets[1:])
        return cut_block(self._load(tensor, experts), offsets, sizes)

    def _load(self, tensor: CanonicalTensor, experts: slice = slice(None)) -> Tensor:
        places = [(key, ...) for key in tensor.keys]
        if fused := tensor.fused_in(self._parts):
            places = [(fused.key, expert) for expert in range(tensor.shape[0])]
        places = places[experts]
        shape = (len(places), *tensor.shape[1:]) if tensor.is_expert_stack else tensor.shape
        out = torch.empty(shape, dtype=self._dtype)
        paths = {self._headers[part].path for key, _ in places for part in self._parts[key]}
        with ExitStack() as stack:
            files = {path: stack.enter_context(safe_open(path, framework="pt")) for path in paths}
            for (key, index), view in zip(places, tensor.slices(out), strict=True):
                parts = [files[self._headers[p].path].get_slice(p)[index] for p in self._parts[key]]
                value = _decode(*parts)
                view.copy_(_rows(value, fused) if fused else value)
        return out

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout)

    def __len__(self) -> int:
        return len(self._layout)


def read_hf_config(folder: Path) -> dict:
    """`config.json` of a Hugging Face folder; ValueError if it has none."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is no Hugging Face folder: it has no config.json")
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
    """Write a Hugging Face folder for transformers and vLLM, under its name once complete.

    `tensors` are asked for one at a time; `COMPANION_FILES` come from `companions`. ValueError if
    `out` exists without `replace`, another process writes it, or `tensors` are not of `layout`.
    """
    if os.path.lexists(out) and not replace:
        raise ValueError(f"{out} exists: choose another folder or remove it")
    # As sets: `name in tensors` may read the tensor.
    expected, present = {tensor.name for tensor in layout}, set(tensors)
    if expected != present:
        raise ValueError(
            f"the tensors are not this model's: missing {_first(expected - present)}; "
            f"unexpected {_first(present - expected)}"
        )
    temporary, replaced = (out.with_name(f"{out.name}.{end}") for end in ("tmp", "replaced"))
    with held_folder(temporary) as lock:
        for left in temporary.iterdir():
            if left != lock:
                left.unlink()
        if companions is not None:
            for path in (p for name in COMPANION_FILES for p in companions.glob(name)):
                if path.is_file():
                    shutil.copyfile(path, temporary / path.name)
        fields = {**config_fields, "torch_dtype": _dtype_name(dtype)}
        _write_json(temporary / "config.json", fields)
        _write_values(tensors, layout, _create_files(layout, temporary, dtype, max_file_bytes))
        if replace and out.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            out.rename(replaced)
        temporary.rename(out)
        (out / lock.name).unlink()
        shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def held_folder(folder: Path) -> Generator[Path]:
    """Hold a folder, made if missing, alone for the body; yields its lock file.

    ValueError while another process holds it, until that ends, however; a warning without locks.
    """
    lock = folder / "lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = lock.open("a")
    except OSError as error:
        raise ValueError(f"cannot write {folder}: {error}") from None
    with file:
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{folder} is in use by another process: stop it, wait, or choose another folder "
                "(--name for a run)"
            ) from None
        except OSError as error:
            warnings.warn(f"{folder} is not protected from a second run: {error}", stacklevel=3)
        yield lock


class _Header(NamedTuple):
    path: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int = 0  # set where it is written


def _read_headers(folder: Path) -> dict[str, _Header]:
    index_path = folder / INDEX_FILE
    has_index = index_path.is_file()
    index = _read_json(index_path).get("weight_map") if has_index else {}
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise ValueError(f"{index_path} has no weight_map from keys to file names")
    names = {*index.values()} if has_index else {SINGLE_FILE}
    if (folder / SINGLE_FILE).is_file():
        names.add(SINGLE_FILE)  # which transformers reads first
    if absent := [name for name in names if not (folder / name).is_file()]:
        by_index = ", named by its index" if has_index else ""
        raise ValueError(f"{folder} lacks {_first(absent)}{by_index}")
    headers: dict[str, _Header] = {}
    for name in sorted(names):
        path = folder / name
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - not a dict
                    if key in headers:
                        raise ValueError(f"{path} and {headers[key].path} both hold {key}")
                    entry = file.get_slice(key)
                    headers[key] = _Header(path, tuple(entry.get_shape()), entry.get_dtype())
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from None
    if has_index:
        actual = {key: header.path.name for key, header in headers.items()}
        if odd := dict(index.items() ^ actual.items()):
            raise ValueError(f"{index_path} and the files disagree about {_first(odd)}")
    return headers


def _rows(stored: Tensor, fused: FusedKey) -> Tensor:
    """Our rows of an expert in a fused key, a view."""
    ours = stored.mT if fused.is_transposed else stored
    if fused.half is None:
        return ours
    return ours[fused.half :: 2] if fused.is_interleaved else ours.chunk(2)[fused.half]


def _check_keys(
    folder: Path, layout: Sequence[CanonicalTensor], headers: Mapping[str, _Header]
) -> dict[str, tuple[str, ...]]:
    """Key that is read -> names of what `_decode` needs."""
    wanted: dict[str, tuple[int, ...]] = {}
    for tensor in layout:
        wanted |= tensor.stored(headers)
        if tensor.copy in headers:
            wanted[tensor.copy] = tensor.shape
    parts = {key: _parts(key, shape, headers) for key, shape in wanted.items()}
    needed = {name: facts for part in parts.values() for name, facts in part.items()}
    wrong = [
        f"{name} {list(found.shape)} {found.dtype}, expected {list(shape)} {' or '.join(dtypes)}"
        for name, (shape, dtypes) in needed.items()
        if (found := headers.get(name)) and (found.shape != shape or found.dtype not in dtypes)
    ]
    found = {
        "missing keys": needed.keys() - headers,
        "unexpected keys": headers.keys() - needed,
        "wrong shapes or dtypes": wrong,
    }
    faults = [f"{label} ({len(keys)}): {_first(keys)}" for label, keys in found.items() if keys]
    if faults:
        raise ValueError(f"{folder} does not hold this model: " + "; ".join(faults))
    return {key: tuple(part) for key, part in parts.items()}


def _parts(
    key: str, shape: tuple[int, ...], headers: Mapping[str, _Header]
) -> dict[str, tuple[tuple[int, ...], Sequence[str]]]:
    """What files must hold for a key: name -> shape, dtypes."""
    if key not in headers and f"{key}_blocks" in headers and len(shape) == 3 and shape[1] % 32 == 0:
        groups = shape[0], shape[2], shape[1] // 32
        return {f"{key}_blocks": ((*groups, 16), ["U8"]), f"{key}_scales": (groups, ["U8"])}
    if key in headers and headers[key].dtype == "F8_E4M3" and len(shape) > 1:
        grid = *shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)
        return {key: (shape, ["F8_E4M3"]), f"{key}_scale_inv": (grid, ["F32"])}
    return {key: (shape, list(_DTYPES))}


def _decode(values: Tensor, scales: Tensor | None = None) -> Tensor:
    """A key's tensor, or an expert's; quantised ones rounded to bf16, as published.

    FP8 `[..., out, in]`: times the fp32 scale of a block of 128 x 128. MXFP4 `[rows, G, 16]`: bytes
    of two E2M1 numbers, low one first, times `2 ** (scale - 127)`; the key is transposed.
    """
    if scales is None:
        return values
    if values.dtype == torch.uint8:
        magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        codes = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2).long()
        numbers = torch.cat((magnitudes, -magnitudes))[codes]
        return torch.ldexp(numbers, scales.int()[..., None] - 127).flatten(-2).mT.bfloat16()
    rows, columns = values.shape[-2:]
    scales = scales.repeat_interleave(128, -2)[..., :rows, :].repeat_interleave(128, -1)
    return (values.float() * scales[..., :columns]).bfloat16()


def _write_values(
    tensors: Mapping[str, Tensor], layout: Sequence[CanonicalTensor], places: Mapping[str, _Header]
) -> None:
    sharing: dict[str, list[CanonicalTensor]] = {}
    for tensor in layout:
        sharing.setdefault(next(iter(tensor.stored())), []).append(tensor)
    for first_key, members in sharing.items():
        values: dict[str, Tensor] = {}
        for tensor in members:
            value = tensors[tensor.name].detach()
            if tuple(value.shape) != tensor.shape:
                raise ValueError(f"{tensor.name} is {list(value.shape)}, expected {tensor.shape}")
            slices = tensor.slices(value)
            if fused := tensor.fused_in():
                place = places[first_key]
                empty = torch.empty(place.shape, dtype=_DTYPES[place.dtype])
                whole = values.setdefault(first_key, empty)
                for expert, view in zip(whole, slices, strict=True):
                    _rows(expert, fused).copy_(view)
            else:
                values = dict(zip(tensor.keys, slices, strict=True))
        for key, value in values.items():
            place = places[key]
            flat = value.to("cpu", _DTYPES[place.dtype]).flatten().view(torch.uint8)
            with place.path.open("r+b") as file:
                file.seek(place.offset)
                file.write(flat.numpy().data)


def _create_files(
    layout: Sequence[CanonicalTensor], folder: Path, dtype: torch.dtype, max_file_bytes: int
) -> dict[str, _Header]:
    """Write index and files as safetensors does; return where values go."""
    names = {own: name for name, own in _DTYPES.items()}
    written = {
        key: (shape, "F32" if tensor.keeps_float32 else names[dtype])
        for tensor in layout
        for key, shape in tensor.stored().items()
    }
    total = sum(prod(shape) for shape, _ in written.values())
    assert total == sum(prod(tensor.shape) for tensor in layout), "a fused key has gaps"
    sizes = {key: prod(shape) * _DTYPES[own].itemsize for key, (shape, own) in written.items()}
    files, filled = [[]], 0
    for key, size in sizes.items():
        if filled and filled + size > max_file_bytes:
            files, filled = [*files, []], 0
        files[-1].append(key)
        filled += size
    places: dict[str, _Header] = {}
    for number, keys in enumerate(files, start=1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        path = folder / (name if len(files) > 1 else SINGLE_FILE)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts, end = {}, 0
        # safetensors' order, widest first: every tensor is aligned.
        for key in sorted(keys, key=lambda key: (-_DTYPES[written[key][1]].itemsize, key)):
            shape, own = written[key]
            starts[key], end = end, end + sizes[key]
            offsets = [starts[key], end]
            header[key] = {"dtype": own, "shape": shape, "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        data = path.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(path, data + end)
        for key, start in starts.items():
            places[key] = _Header(path, *written[key], data + start)
    if len(files) > 1:
        metadata = {"total_size": sum(sizes.values()), "total_parameters": total}
        weight_map = {key: place.path.name for key, place in places.items()}
        _write_json(folder / INDEX_FILE, {"metadata": metadata, "weight_map": weight_map})
    return places


def _dtype_name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected a JSON object")
    return content


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _first(names: Collection[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(sorted(names)[:10]) + more or "none"


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

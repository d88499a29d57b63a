"""Between Hugging Face folders and checkpoints of ours, in one process, a tensor at a time.

    import   config.json, *.safetensors  ->  step-00000000, weights in fp32, no moments
    export   any complete checkpoint     ->  a folder that transformers and vLLM open as it is

The trap: bf16 -> fp32 -> bf16 is exact, so an import exports to the same bytes in its dtype; a
trained fp32 weight exported in bf16 is rounded.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from pith_engine.checkpoint import (
    find_checkpoint,
    read_tensor,
    tensor_names,
    verify_checkpoint,
    write_checkpoint,
)
from pith_engine.fsdp import CanonicalBlock
from pith_engine.mesh import Mesh
from pith_engine.violations import raise_violations
from pith_models.build import ModelConfig, canonical_tensors, open_hf, parameter_counts
from pith_models.hf import export_tensors, held_folder, read_hf_config
from torch import Tensor
from tqdm import tqdm

from pith_apps.checks import hf_model_changes, required_checkpoint
from pith_apps.config import Dtype, RunConfig, model_record, torch_dtype
from pith_apps.corpus import named_eos_token, open_tokenizer, raise_if_too_large, tokenizer_hash


class CheckpointTensors(Mapping[str, Tensor]):
    """A checkpoint's model by canonical name, read, and counted, when asked for."""

    def __init__(self, path: Path, bar: tqdm):
        self._path, self._names, self._bar = path, tensor_names(path), bar

    def __getitem__(self, name: str) -> Tensor:
        tensor = read_tensor(self._path, f"model.{name}")
        self._bar.update(tensor.numel())
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    companions: Path,
    replace: bool = False,
) -> None:
    """Write a checkpoint's weights, saved on any mesh, as the Hugging Face folder `out`.

    Other files and fields are those of `companions`, a tokenizer or Hugging Face folder. ValueError
    for damage, another model or tokenizer, an `out` that exists without `replace`.
    """
    manifest, digest = verify_checkpoint(checkpoint, Mesh.single()), tokenizer_hash(companions)
    if manifest.run.get("tokenizer", digest) != digest:
        raise ValueError(f"tokenizer {companions} is not the run's: set --data.tokenizer")
    raise_if_too_large(companions, config.vocab_size)
    layout, total = canonical_tensors(config), parameter_counts(config).total
    with _progress("export", total) as bar:
        export_tensors(
            CheckpointTensors(checkpoint, bar),
            layout,
            {**_companion_fields(companions), **config.to_hf()},
            out,
            dtype=dtype,
            companions=companions,
            replace=replace,
        )
    size = total * dtype.itemsize / 1e6
    print(f"exported {checkpoint} to {out}: {len(layout)} tensors, {size:,.1f} MB, {dtype}")


def export_newest(config: RunConfig, out: Path | None = None, dtype: Dtype | None = None) -> None:
    """Export the newest checkpoint, by default to the export folder, anew, in the run's dtype."""
    export_checkpoint(
        required_checkpoint(config),
        out or config.export_folder,
        config.model,
        dtype=torch_dtype(dtype or config.train.dtype),
        companions=config.tokenizer_folder,
        replace=out is None,
    )


def import_checkpoint(source: Path, checkpoints: Path, config: ModelConfig) -> Path:
    """Write a Hugging Face folder as a run's checkpoint of step 0; its path.

    ValueError for another model, a larger tokenizer, or a run with a checkpoint.
    """
    raise_violations(hf_model_changes(source, config), "the recipe describes another model")
    facts = {"imported_from": str(source), "config": {"model": model_record(config)}}
    if (source / "tokenizer.json").exists():
        raise_if_too_large(source, config.vocab_size)
        facts["tokenizer"] = tokenizer_hash(source)
    layout = canonical_tensors(config)
    tensors = open_hf(source, config, torch.float32)
    print(f"importing {source}: {tensors.account}")
    total = parameter_counts(config).total
    with held_folder(checkpoints.parent), _progress("import", total) as bar:
        if existing := find_checkpoint(checkpoints):
            raise ValueError(f"{existing} would be resumed instead: choose another --name")
        blocks = {
            f"model.{tensor.name}": CanonicalBlock(
                name=tensor.name,
                tensor=torch.empty(tensor.shape, dtype=torch.float32, device="meta"),
                global_shape=tensor.shape,
                offsets=(0,) * len(tensor.shape),
            )
            for tensor in layout
        }

        def read(key: str) -> Tensor:
            name = key.removeprefix("model.")
            tensor = tensors[name]
            if not tensor.isfinite().all():
                raise ValueError(f"{name} holds values that are not finite")
            bar.update(tensor.numel())
            return tensor

        path = write_checkpoint(checkpoints, 0, blocks, facts, Mesh.single(), read)
    print(f"imported {source} to {path}: {len(layout)} tensors, {total * 4 / 1e6:,.1f} MB")
    return path


def _companion_fields(folder: Path) -> dict[str, object]:
    if (folder / "config.json").is_file():
        return {n: value for n, value in read_hf_config(folder).items() if n in _COMPANION_FIELDS}
    if named_eos_token(folder) is not None:
        return {"eos_token_id": open_tokenizer(folder)[1]}
    return {}


def _progress(label: str, total: int) -> tqdm:
    # disable=None: silent where no terminal would show it.
    return tqdm(total=total, desc=label, unit=" parameters", unit_scale=True, disable=None)


_COMPANION_FIELDS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "use_cache",
    "output_router_logits",
    "router_aux_loss_coef",
)
"""Fields of `config.json` that do not change the model."""

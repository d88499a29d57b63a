"""What a verb takes beside the fields of a recipe."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from pith_apps.config import RunConfig
from pith_apps.parity import PARITY_MESHES


@dataclass(frozen=True, kw_only=True)
class ParityArguments:
    """Loss and gradients of one step on every mesh, against one process."""

    config: Annotated[RunConfig, arg(name="")]
    """Gives the model, sequence length, seed, balance loss, attention backend and device."""
    meshes: tuple[str, ...] = PARITY_MESHES
    """Meshes in short form, such as pp2-ep2."""
    dtype: Literal["fp64", "fp32"] = "fp64"
    """`fp64` compares within 1e-10; `fp32` within 1e-5, gradients within 1e-4."""


@dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """The newest complete checkpoint of a run to a Hugging Face folder."""

    config: Annotated[RunConfig, arg(name="")]
    """Names the run and its tokenizer."""
    output: Path | None = None
    """The new folder (default: RUN_FOLDER/export, which is replaced)."""
    dtype: Literal["bf16", "fp32", "fp64"] | None = None
    """Of the written weights (default: the run's compute dtype)."""


@dataclass(frozen=True, kw_only=True)
class ImportArguments:
    """A Hugging Face folder to the checkpoint of step 0, from which the run then starts."""

    config: Annotated[RunConfig, arg(name="")]
    """Names the run and describes the model, which must be the folder's."""
    source: Path
    """The Hugging Face folder."""

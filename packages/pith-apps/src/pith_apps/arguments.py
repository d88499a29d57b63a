"""What a command takes after its verb: a recipe's `RunConfig`, whose fields need no prefix, and the
options of its own.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro import MISSING
from tyro.conf import arg

from pith_apps.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """The fields of the recipe, which has all."""

    config: Annotated[RunConfig, arg(name="")]
    """The recipe's configuration."""


@dataclass(frozen=True, kw_only=True)
class ParityArguments(RunArguments):
    """Loss and gradients of one step on every mesh, against one process."""

    meshes: tuple[str, ...] = ()
    """Meshes in short form, such as pp2-ep2, or hsdp-dp2-ep2 (default: those of the grid)."""
    grid: Literal["usual", "full"] = "usual"
    """`usual`: meshes of dp, ep and pp in 4 processes; `full`: cp, HSDP and 8 processes too."""
    variations: Annotated[str, arg(name="with")] = ""
    """What to switch on, such as packed,aux: packed, padding, aux, tied, recompute, muon, hsdp."""
    dtype: Literal["fp64", "fp32"] = "fp64"
    """`fp64` compares within 1e-10; `fp32` within 1e-5, gradients within 1e-4."""


@dataclass(frozen=True, kw_only=True)
class ExportArguments(RunArguments):
    """The newest complete checkpoint of a run to a Hugging Face folder."""

    output: Path | None = None
    """The new folder (default: RUN_FOLDER/export, which is replaced)."""
    dtype: Literal["bf16", "fp32", "fp64"] | None = None
    """Of the written weights (default: the run's compute dtype)."""


@dataclass(frozen=True, kw_only=True)
class ImportArguments(RunArguments):
    """A Hugging Face folder to the checkpoint of step 0, from which the run then starts."""

    source: Path = MISSING
    """The Hugging Face folder."""

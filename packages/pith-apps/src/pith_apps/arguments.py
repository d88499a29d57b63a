"""What a verb takes beside the fields of a recipe."""

from dataclasses import dataclass
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

"""What a command takes after its verb: fields of a recipe's `RunConfig`, options of its own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro import MISSING
from tyro.conf import arg

from pith_apps.config import Dtype, RunConfig


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """A recipe's fields."""

    config: Annotated[RunConfig, arg(name="")]
    """The recipe's configuration."""


@dataclass(frozen=True, kw_only=True)
class ExportArguments(RunArguments):
    """The newest complete checkpoint of a run to a Hugging Face folder."""

    output: Path | None = None
    """The new folder (default: RUN_FOLDER/export, which is replaced)."""
    dtype: Dtype | None = None
    """Of the written weights (default: the run's compute dtype)."""


@dataclass(frozen=True, kw_only=True)
class ImportArguments(RunArguments):
    """A Hugging Face folder to the checkpoint of step 0, from which the run then starts."""

    source: Path = MISSING
    """The Hugging Face folder."""

"""`pith VERB ...`: the one command.

A verb's function imports what it needs: `pith --help` and `pith tokenize` import no torch.

Exit codes: 0 done, 1 a rank failed or a comparison was off, 2 refused,
130 interrupted before any rank started, 128 + the number of the signal that stopped the ranks.
"""

import ctypes
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pith_engine.violations import did_you_mean, raise_violations

if TYPE_CHECKING:
    from pith_apps.arguments import RunArguments

Arguments = TypeVar("Arguments", bound="RunArguments")

USAGE = """\
usage: pith VERB ...

  pith tokenize --inputs FILES --tokenizer FOLDER --output FOLDER
                             text files to a corpus folder
  pith pretrain RECIPE       train, or resume: the same command again
  pith evaluate RECIPE       held-out loss of a run's newest checkpoint
  pith convert export RECIPE that checkpoint to a Hugging Face folder
  pith convert import RECIPE --source FOLDER
                             a Hugging Face folder to a checkpoint that the run starts from
  pith parity RECIPE         loss and gradients of many meshes against one process

RECIPE is demo, a model such as qwen3-8b (a wrong name lists all), its tiny form (qwen3-8b-tiny) or
the path of a Python file with one function that returns a RunConfig. `pith VERB RECIPE --help`
lists the options: `--train.steps 4` sets the field `steps` of its `train`.
"""


@dataclass(frozen=True, kw_only=True)
class TokenizeArguments:
    """Text files to a corpus folder, the same for any number of workers."""

    inputs: tuple[Path, ...]
    """`.py` and `.txt` files (a document each), `.jsonl` files (a document a line), folders."""
    tokenizer: Path
    """Hugging Face tokenizer folder (`tokenizer.json`, `tokenizer_config.json`)."""
    output: Path
    """The corpus folder to write; must not exist."""
    eos_token: str | None = None
    """Token that ends a document (default: that of the tokenizer's configuration)."""
    text_field: str = "text"
    """Field of a `.jsonl` line that holds the text."""
    workers: int = 1
    """Batches of documents that are encoded at once, each by all cores."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what follows `pith`, by default on the command line; return the exit code."""
    _follow_launcher()
    verb, *rest = list(sys.argv[1:] if arguments is None else arguments) or [""]
    if verb == "--version":
        print(version("pith-apps"))
        return 0
    helped = ("", "pretrain", "evaluate", "convert", "convert export", "convert import", "parity")
    *path, last = verb, *rest
    if last in ("-h", "--help") and " ".join(path) in helped:
        print(USAGE, end="")
        return 0
    if not verb:
        print(USAGE, end="", file=sys.stderr)
        return 2
    try:
        return _run_verb(verb, rest)
    except ValueError as error:
        print(f"pith {verb}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"pith {verb}: interrupted", file=sys.stderr)
        return 130


def _launcher() -> int | None:
    """The process id of the `launch` that started this worker."""
    found = re.fullmatch(r"launched-by-pith-(\d+)", os.environ.get("TORCHELASTIC_RUN_ID", ""))
    return int(found[1]) if found else None


def _follow_launcher() -> None:
    """Let the kernel end this worker with its launcher (Linux)."""
    if (launcher := _launcher()) is None:
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher reports it
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG is 1 in linux/prctl.h.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != launcher:
            sys.exit(f"pith: launcher {launcher} is gone")


def _run_verb(verb: str, rest: list[str]) -> int:
    match verb, rest:
        case "tokenize", _:
            return _tokenize(rest)
        case "pretrain" | "evaluate", _:
            return _run_in_ranks(verb, rest)
        case "parity", _:
            return _parity(rest)
        case "convert", ["export" | "import" as direction, *options]:
            return _convert(direction, options)
        case "convert", _:
            raise ValueError("say `pith convert export RECIPE` or `pith convert import RECIPE`")
    verbs = ("tokenize", "pretrain", "evaluate", "convert", "parity")
    hint = did_you_mean(verb, verbs)
    raise ValueError(f"there is no such verb: {hint}allowed are {', '.join(verbs)}")


def _tokenize(rest: list[str]) -> int:
    import tyro

    from pith_apps.corpus import tokenize_files

    _option_names(rest)
    arguments = tyro.cli(TokenizeArguments, args=rest, prog="pith tokenize")
    meta = tokenize_files(
        list(arguments.inputs),
        arguments.tokenizer,
        arguments.output,
        eos_token=arguments.eos_token,
        text_field=arguments.text_field,
        num_workers=arguments.workers,
    )
    print(
        f"{arguments.output}: {meta.num_tokens:,} tokens in {meta.num_documents:,} documents, "
        f"{meta.num_empty_documents} empty ones left out"
    )
    return 0


def _convert(direction: str, rest: list[str]) -> int:
    from pith_apps.arguments import ExportArguments, ImportArguments
    from pith_apps.checks import own_violations
    from pith_apps.convert import export_newest, import_checkpoint

    form = ExportArguments if direction == "export" else ImportArguments
    arguments = _parse_recipe(f"convert {direction}", rest, form)
    config = arguments.config
    raise_violations(own_violations(config), f"{config.name!r} describes no run")
    if isinstance(arguments, ExportArguments):
        export_newest(config, arguments.output, arguments.dtype)
        return 0
    import_checkpoint(arguments.source, config.checkpoint_folder, config.model)
    return 0


def _run_in_ranks(verb: str, rest: list[str]) -> int:
    """Check the run, then be one rank of it or start the ranks."""
    from pith_engine.runtime import read_launch
    from pith_models.hf import held_folder

    from pith_apps.arguments import RunArguments
    from pith_apps.checks import check_resume, check_run, required_checkpoint
    from pith_apps.launch import find_machine, is_rank, launch

    config = _parse_recipe(verb, rest, RunArguments).config
    machine = find_machine(config.nproc or config.mesh.world_size, os.environ)
    check_run(config, machine)
    if verb == "pretrain":
        check_resume(config)
    else:
        required_checkpoint(config)
    # A launcher holds the run folder for its ranks, which end with it.
    is_writer = verb == "pretrain" and _launcher() is None and read_launch(os.environ).rank == 0
    with held_folder(config.run_folder) if is_writer else nullcontext():
        if is_writer and config.data.standard_library and not config.folders.held_out.exists():
            print("tokenising the standard library (once, about 20 s)", flush=True)
        if not is_rank(os.environ) and machine.world_size > 1:
            return launch(machine.world_size, [verb, *rest])
        if verb == "evaluate":
            from pith_apps.evaluate import evaluate

            return evaluate(config)
        from pith_apps.pretrain import pretrain

        return pretrain(config, machine)


def _parity(rest: list[str]) -> int:
    """As `_run_in_ranks`, with the ranks of the largest mesh."""
    from pith_apps.launch import find_machine, is_rank, launch
    from pith_apps.parity import ParityArguments, check_parity, parity_plan, parity_worker
    from pith_apps.trainer import joined_group

    arguments = _parse_recipe("parity", rest, ParityArguments)
    runs, variations = parity_plan(arguments, _option_names(rest))
    least = max(run.mesh.world_size for run in runs)
    machine = find_machine(runs[0].nproc or least, os.environ)
    check_parity(runs, machine, variations)
    if not is_rank(os.environ) and machine.world_size > 1:
        return launch(machine.world_size, ["parity", *rest])
    with joined_group(runs[0]) as device:
        agrees = parity_worker(runs, device, variations)
    return 0 if agrees else 1


def _parse_recipe(command: str, rest: list[str], form: type[Arguments]) -> Arguments:
    """A form with the recipe named first and the options after it."""
    import tyro

    from pith_apps.recipes.load import load_recipe

    if not rest or rest[0].startswith("-"):
        raise ValueError(
            f"a recipe comes first, a name or the path of a .py file, as in `pith {command} demo`"
        )
    recipe, *options = rest
    config = load_recipe(recipe)
    names = _option_names(options)
    yarn = [name for name in names if name.startswith("--model.rope-scaling.")]
    if yarn and config.model.rope_scaling is None:
        raise ValueError(f"{yarn[0]}: recipe {recipe} has no YaRN; set it in a file")
    arguments = tyro.cli(
        form,
        default=form(config=config),
        args=options,
        prog=f"pith {command} {recipe}",
        config=(tyro.conf.AvoidSubcommands,),
    )
    method = arguments.config.balance.method
    read = {"none": "", "bias": "--balance.bias-rate"}.get(method, "--balance.coefficient")
    if unread := {"--balance.bias-rate", "--balance.coefficient"} & {*names} - {read}:
        raise ValueError(f"{min(unread)}: unread with balance.method {method}")
    return arguments


def _option_names(options: list[str]) -> list[str]:
    """The options by name, `--no-x` as `--x`; refuses one given twice."""
    spelled = [option.split("=")[0].replace("_", "-") for option in options if option[:2] == "--"]
    names = [re.sub(r"(^--|\.)no-", r"\1", name) for name in spelled]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"given more than once: {', '.join(twice)}; keep one")
    return names


if __name__ == "__main__":
    sys.exit(main())

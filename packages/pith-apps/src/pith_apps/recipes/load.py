"""Recipes: Python functions that return a `RunConfig`, built in or in a file of the user's.

A built-in recipe is a function in a file of this folder and an arm of `load_recipe`. A user's file
holds one public function `def ...() -> RunConfig`, which usually starts from a built-in one with
`dataclasses.replace`.
"""

import inspect
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from runpy import run_path
from traceback import extract_tb
from typing import get_type_hints

from pith_engine.violations import raise_violations, type_violations

from pith_apps.config import RunConfig
from pith_apps.recipes.deepseek_v2_lite import deepseek_v2_lite, deepseek_v2_lite_tiny
from pith_apps.recipes.deepseek_v3 import deepseek_v3, deepseek_v3_tiny
from pith_apps.recipes.demo import demo
from pith_apps.recipes.gpt_oss_20b import gpt_oss_20b, gpt_oss_20b_tiny
from pith_apps.recipes.gpt_oss_120b import gpt_oss_120b, gpt_oss_120b_tiny
from pith_apps.recipes.qwen3_8b import qwen3_8b, qwen3_8b_tiny
from pith_apps.recipes.qwen3_30b_a3b import qwen3_30b_a3b, qwen3_30b_a3b_tiny
from pith_apps.recipes.qwen3_235b_a22b import qwen3_235b_a22b, qwen3_235b_a22b_tiny

BUILT_IN_RECIPES = (
    "demo",
    *("qwen3-8b", "qwen3-8b-tiny"),
    *("qwen3-30b-a3b", "qwen3-30b-a3b-tiny"),
    *("qwen3-235b-a22b", "qwen3-235b-a22b-tiny"),
    *("deepseek-v2-lite", "deepseek-v2-lite-tiny"),
    *("deepseek-v3", "deepseek-v3-tiny"),
    *("gpt-oss-20b", "gpt-oss-20b-tiny"),
    *("gpt-oss-120b", "gpt-oss-120b-tiny"),
)


def load_recipe(name: str) -> RunConfig:
    """The configuration of a recipe, `name` one of `BUILT_IN_RECIPES` or the path of a `.py` file.

    Raises:
        ValueError: no such recipe or file, not exactly one recipe in the file, it fails, or fields
            hold values of other types than theirs.
    """
    match name:
        case "demo":
            return demo()
        case "qwen3-8b":
            return qwen3_8b()
        case "qwen3-8b-tiny":
            return qwen3_8b_tiny()
        case "qwen3-30b-a3b":
            return qwen3_30b_a3b()
        case "qwen3-30b-a3b-tiny":
            return qwen3_30b_a3b_tiny()
        case "qwen3-235b-a22b":
            return qwen3_235b_a22b()
        case "qwen3-235b-a22b-tiny":
            return qwen3_235b_a22b_tiny()
        case "deepseek-v2-lite":
            return deepseek_v2_lite()
        case "deepseek-v2-lite-tiny":
            return deepseek_v2_lite_tiny()
        case "deepseek-v3":
            return deepseek_v3()
        case "deepseek-v3-tiny":
            return deepseek_v3_tiny()
        case "gpt-oss-20b":
            return gpt_oss_20b()
        case "gpt-oss-20b-tiny":
            return gpt_oss_20b_tiny()
        case "gpt-oss-120b":
            return gpt_oss_120b()
        case "gpt-oss-120b-tiny":
            return gpt_oss_120b_tiny()
    if name.endswith(".py"):
        return _recipe_of_file(Path(name))
    near = get_close_matches(name, BUILT_IN_RECIPES, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(
        f"recipe is {name!r}: {hint}allowed are {', '.join(BUILT_IN_RECIPES)} or the path of a "
        f"Python file (ending in .py) with one function that returns a RunConfig"
    )


def _recipe_of_file(path: Path) -> RunConfig:
    if not path.is_file():
        raise ValueError(f"recipe is {str(path)!r}: there is no such file")
    run_name = f"pith_recipe_{path.stem}"
    try:
        recipes = [
            item
            for name, item in run_path(str(path), run_name=run_name).items()
            if inspect.isfunction(item)
            and item.__module__ == run_name
            and not name.startswith("_")
            and get_type_hints(item).get("return") is RunConfig
        ]
        config = recipes[0]() if len(recipes) == 1 else None
    except Exception as error:  # whatever the file raises, named by the file's line
        frames = extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        if isinstance(error, SyntaxError):
            lines = lines or [error.lineno]
        place = f"{path}:{lines[-1]}" if lines else path
        raise ValueError(f"recipe {place}: {type(error).__name__}: {error}") from error
    if len(recipes) != 1:
        names = ", ".join(recipe.__name__ for recipe in recipes) or "none"
        raise ValueError(
            f"recipe {str(path)!r} must hold exactly one public function annotated "
            f"`-> RunConfig`; found: {names}"
        )
    if not isinstance(config, RunConfig):
        raise ValueError(f"recipe {path}: {recipes[0].__name__} returns {config!r}, no RunConfig")
    raise_violations(type_violations(asdict(config), RunConfig, ""), f"recipe {path}")
    return config

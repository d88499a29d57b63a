"""Find a recipe, built in or in a file of the user's.

A file holds one public function `def ...() -> RunConfig`, usually `dataclasses.replace` of another.
"""

import inspect
from dataclasses import asdict
from pathlib import Path
from runpy import run_path
from traceback import extract_tb
from typing import get_type_hints

from pith_engine.violations import did_you_mean, raise_violations, type_violations

from pith_apps.config import RunConfig
from pith_apps.recipes.released import built_in_recipes


def load_recipe(name: str) -> RunConfig:
    """By built-in name or path of a `.py` file.

    ValueError if there is none, the file fails or holds not exactly one, or types are wrong.
    """
    if name.endswith(".py"):
        return _recipe_of_file(Path(name))
    built_in = {recipe.name: recipe for recipe in built_in_recipes()}
    if name in built_in:
        return built_in[name]
    raise ValueError(
        f"recipe is {name!r}: {did_you_mean(name, built_in)}allowed are {', '.join(built_in)} or "
        "the path of a Python file (.py) with one function that returns a RunConfig"
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
    names = ", ".join(recipe.__name__ for recipe in recipes) or "none"
    if len(recipes) != 1:
        raise ValueError(
            f"recipe {path} must hold exactly one public function with `-> RunConfig`; "
            f"found: {names}"
        )
    if not isinstance(config, RunConfig):
        raise ValueError(f"recipe {path}: {names} returns {config!r}, no RunConfig")
    raise_violations(type_violations(asdict(config), RunConfig, ""), f"recipe {path}")
    return config

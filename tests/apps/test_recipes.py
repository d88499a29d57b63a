"""Recipes: the built-in ones may start, and a file holds exactly one."""

from dataclasses import replace
from pathlib import Path

import pytest
from pith_apps.checks import violations
from pith_apps.config import DataConfig
from pith_apps.plan import Machine
from pith_apps.recipes.demo import demo, demo_mesh, demo_model
from pith_apps.recipes.load import BUILT_IN_RECIPES, load_recipe
from pith_apps.recipes.qwen3_30b_a3b import qwen3_30b_a3b
from pith_engine.mesh import MeshConfig
from pith_models.build import parameter_counts


@pytest.mark.parametrize("name", BUILT_IN_RECIPES)
def test_built_in_recipes_may_start(name, tmp_path):
    recipe = replace(load_recipe(name), runs_folder=tmp_path)
    assert recipe.name == name
    # What a machine with other devices and without a corpus cannot judge is set aside.
    recipe = replace(
        recipe,
        data=DataConfig(standard_library=True),
        train=replace(recipe.train, device="cpu", attention="reference"),
    )
    world_size = recipe.mesh.world_size
    assert violations(recipe, Machine(world_size=world_size, processes_here=4, num_gpus=0)) == []


def test_the_demo_has_the_agreed_sizes():
    recipe, model = demo(), demo_model()
    assert (model.num_hidden_layers, model.num_experts, model.num_experts_per_tok) == (4, 8, 2)
    assert (model.hidden_size, model.vocab_size) == (128, 4096)
    assert (recipe.train.sequence_length, recipe.num_micro_batches) == (256, 8)
    assert [demo_mesh(n) for n in (0, 1, 2, 3)] == [
        MeshConfig(pp=2, ep=2),
        MeshConfig(),
        MeshConfig(ep=2),
        MeshConfig(ep=2),
    ]
    assert demo_mesh(4) == demo_mesh(8) == MeshConfig(pp=2, ep=2)


def test_qwen3_30b_a3b_has_the_released_size():
    """30.5 B parameters, 3.3 B active: Qwen3 technical report, arXiv 2505.09388, table 2."""
    counts = parameter_counts(qwen3_30b_a3b().model)
    assert counts.total == 30_532_122_624
    assert 3.3e9 <= counts.active < 3.4e9


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(ValueError, match=r"recipe is 'dmeo': did you mean 'demo'\?.*qwen3-30b-a3b"):
        load_recipe("dmeo")
    with pytest.raises(ValueError, match="no such file"):
        load_recipe("nowhere/recipe.py")


RECIPE = """
from dataclasses import replace
from pith_apps.config import RunConfig
from pith_apps.recipes.demo import demo

def helper(steps: int) -> int:
    return steps + 1

def _hidden() -> RunConfig:
    return demo()

def mine() -> RunConfig:
    return replace(demo(), name="mine", train=replace(demo().train, steps=helper(6)))
"""


def test_a_file_holds_one_recipe(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(RECIPE)
    recipe = load_recipe(str(path))
    assert (recipe.name, recipe.train.steps) == ("mine", 7)
    path.write_text(RECIPE + "\ndef second() -> RunConfig:\n    return demo()\n")
    with pytest.raises(ValueError, match=r"exactly one.*found: mine, second"):
        load_recipe(str(path))
    path.write_text("x = 1\n")
    with pytest.raises(ValueError, match="found: none"):
        load_recipe(str(path))


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("x = 1\ndef broken(:\n", r"mine\.py:2: SyntaxError"),
        ("x = 1\n\nimport nowhere\n", r"mine\.py:3: ModuleNotFoundError: .*nowhere"),
        (RECIPE.replace("helper(6)", "helper('6')"), r"mine\.py:7: TypeError"),
        (RECIPE.replace('name="mine"', "nam=1"), r"mine\.py:13: TypeError.*nam"),
        (RECIPE.replace("return replace(", "replace("), r"mine\.py: mine returns None"),
    ],
)
def test_a_file_that_fails_is_refused_by_line(tmp_path: Path, source: str, named: str):
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(ValueError, match=named):
        load_recipe(str(path))

"""Recipes: the built-in ones may start, and a file holds exactly one."""

from dataclasses import replace
from pathlib import Path

import pytest
from pith_apps.checks import violations
from pith_apps.config import DataConfig
from pith_apps.plan import Machine
from pith_apps.recipes.demo import demo, demo_mesh, demo_model
from pith_apps.recipes.load import load_recipe
from pith_apps.recipes.released import built_in_recipes
from pith_engine.mesh import Mesh, MeshConfig
from pith_models.build import build_chunks, parameter_counts
from pith_ops.attention import AttentionBackend

BUILT_IN_RECIPES = [recipe.name for recipe in built_in_recipes()]


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


RELEASED = {
    # Total; those that no token meets, by hand (layers * idle experts * 3 matrices * width *
    # hidden); published total and active in billions, rounded to as many digits as they have.
    # Convention: all parameters, embedding and head among the active ones (arXiv 2505.09388).
    "qwen3-8b": (8_190_735_360, 0, "8.2", "8.2"),
    # The report's 3.3 is cut off, not rounded; the name's A3B is what 3.353 rounds to.
    "qwen3-30b-a3b": (30_532_122_624, 48 * (128 - 8) * 3 * 768 * 2048, "30.5", "3"),
    "qwen3-235b-a22b": (235_093_634_560, 94 * (128 - 8) * 3 * 1536 * 4096, "235", "22"),
    # Reports 2405.04434 and 2412.19437, the embedding not among the active ones; V2-Lite's 2.4
    # leaves out its gates too, else it would round to 2.5.
    "deepseek-v2-lite": (15_706_484_224, 26 * (64 - 6) * 3 * 1408 * 2048, "15.7", "2.4"),
    "deepseek-v3": (671_026_419_200, 58 * (256 - 8) * 3 * 2048 * 7168, "671", "37"),
    # The model card, arXiv 2508.10925, counts the head as active and the embedding not.
    "gpt-oss-20b": (20_914_757_184, 24 * (32 - 4) * 3 * (2880 + 1) * 2880, "20.91", "3.61"),
    "gpt-oss-120b": (116_829_156_672, 36 * (128 - 4) * 3 * (2880 + 1) * 2880, "116.83", "5.13"),
}


@pytest.mark.parametrize("name", [n for n in BUILT_IN_RECIPES if n != "demo" and "tiny" not in n])
def test_released_sizes_build_with_their_exact_totals(name: str):
    """On the meta device, and counted from the key map; a recipe without a row here fails."""
    total, idle, published, published_active = RELEASED[name]
    model = load_recipe(name).model
    half = model.num_hidden_layers // 2
    layers = (half, model.num_hidden_layers - half)
    chunks = build_chunks(
        model, Mesh.single(), layers, attention_backend=AttentionBackend.REFERENCE
    )
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    assert all(p.is_meta for p in parameters)
    counts = parameter_counts(model)
    assert sum({id(p): p.numel() for p in parameters}.values()) == counts.total == total
    assert counts.active == total - idle
    active = counts.active
    if not name.startswith("qwen3"):
        active -= model.vocab_size * model.hidden_size
    if name == "deepseek-v2-lite":
        active -= 26 * 64 * 2048
    for count, figure in ((counts.total, published), (active, published_active)):
        assert f"{count / 1e9:.{len(figure.partition('.')[2])}f}" == figure


def test_qwen3_8b_written_out():
    layer = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 12288 * 4096 + 2 * 128 + 2 * 4096
    assert 2 * 151_936 * 4096 + 36 * layer + 4096 == RELEASED["qwen3-8b"][0]
    qwen = [name for name in RELEASED if name.startswith("qwen3")]
    assert {load_recipe(name).model.rope_theta for name in qwen} == {1e6}


@pytest.mark.parametrize("name", BUILT_IN_RECIPES)
def test_every_model_has_a_tiny_form_of_its_family(name: str):
    if name == "demo" or name.endswith("-tiny"):
        return
    full, tiny = load_recipe(name), load_recipe(f"{name}-tiny")
    assert type(full.model) is type(tiny.model) and tiny.train.device == "cpu"
    assert (tiny.model.num_hidden_layers, tiny.model.vocab_size) == (4, 4096)
    sparse = [tiny.model.is_sparse(layer) for layer in range(4)]
    assert any(sparse) == (full.model.num_experts > 0)
    assert tiny.mesh == (MeshConfig(ep=2) if any(sparse) else MeshConfig(dp=2))


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

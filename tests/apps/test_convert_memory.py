"""What converting needs does not grow with the model: `pith convert` on 2 GB and 4 GB in fp32."""

import json
import shutil
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
from pith_apps.recipes.load import load_recipe
from pith_models.build import canonical_tensors, parameter_counts

RECIPE = """
from dataclasses import replace
from pathlib import Path
from pith_apps.config import DataConfig, RunConfig
from pith_apps.recipes.demo import demo

def large() -> RunConfig:
    model = replace(
        demo().model,
        hidden_size=1024,
        moe_intermediate_size=768,
        num_experts=32,
        num_hidden_layers={layers},
    )
    return replace(demo(), name="large", model=model, data=DataConfig(tokenizer=Path("source")))
"""

TOKENIZER = '{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'

CONVERT = """
import sys
from pathlib import Path
from pith_apps.cli import main

code = main(["convert", *sys.argv[1:]])
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
sys.exit(code)
"""
"""Prints the most memory that was resident, in KiB; pages of mapped files are part of it."""


def write_sparse(folder: Path, layers: int, keys_per_file: int = 200) -> int:
    """Write a source of zeros, which takes no space on disk; return its bytes."""
    folder.mkdir()
    recipe = folder.with_name("recipe.py")
    recipe.write_text(RECIPE.format(layers=layers))
    config = load_recipe(str(recipe)).model
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    (folder / "tokenizer.json").write_text(TOKENIZER)
    entries = [item for tensor in canonical_tensors(config) for item in tensor.stored().items()]
    weight_map = {}
    for start in range(0, len(entries), keys_per_file):
        name, header, end = f"model-{start:05}.safetensors", {}, 0
        for key, shape in entries[start : start + keys_per_file]:
            weight_map[key], begin = name, end
            end += 4 * prod(shape)
            header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert len(set(weight_map.values())) > 2
    return 4 * parameter_counts(config).total


def convert(*arguments: str, cwd: Path) -> float:
    """Run `pith convert` and return its peak in MB."""
    command = [sys.executable, "-c", CONVERT, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout.split()[-1]) * 1024 / 1e6


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path: Path):
    peaks = {}
    for gigabytes, layers in ((2, 6), (4, 12)):
        folder = tmp_path / f"{gigabytes}"
        folder.mkdir()
        assert 0.9 < write_sparse(folder / "source", layers) / (gigabytes * 1e9) < 1.1
        imported = convert("import", "recipe.py", "--source", "source", cwd=folder)
        exported = convert("export", "recipe.py", "--output", "out", "--dtype", "bf16", cwd=folder)
        peaks[gigabytes] = imported, exported
        written = sum(path.stat().st_size for path in (folder / "out").glob("*.safetensors"))
        assert 0.45 < written / (gigabytes * 1e9) < 0.55
        shutil.rmtree(folder)
    print(f"peak MB of import, export by GB: {peaks}")
    for small, large in zip(peaks[2], peaks[4], strict=True):
        assert abs(large - small) < 200
        assert large < 3 * 2**30 / 1e6

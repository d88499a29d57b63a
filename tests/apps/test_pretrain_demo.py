"""The demo from beginning to end, as a user runs it on a machine without a GPU."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from pith_apps.checks import required_checkpoint
from pith_apps.config import RunConfig
from pith_apps.corpus import Corpus
from pith_apps.recipes.demo import demo
from pith_apps.run_log import read_metrics
from pith_apps.trainer import build_trainer
from pith_engine.checkpoint import load_checkpoint
from pith_engine.contract import Batch
from pith_engine.mesh import Mesh, MeshConfig
from pith_engine.plain import plain_hidden


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> RunConfig:
    """The demo's configuration in the folder where its one full run has ended."""
    folder = tmp_path_factory.mktemp("demo")
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "pith_apps.cli", "pretrain", "demo"],
        cwd=folder,
        env={**kept, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "output.txt").write_text(done.stdout)
    recipe = demo()
    train = replace(recipe.train, device="cpu", dtype="fp32")
    return replace(recipe, runs_folder=folder / "runs", mesh=MeshConfig(), train=train)


def test_held_out_loss_falls_below_three_quarters(config):
    records = read_metrics(config.run_folder)
    held_out = [record for record in records if "held_out_loss" in record]
    assert held_out[0]["step"] == 0
    assert held_out[-1]["step"] == config.train.steps
    assert held_out[-1]["held_out_loss"] < 0.75 * held_out[0]["held_out_loss"]
    # Its own figure: a run that learns much worse than this one is a fault, not noise.
    assert held_out[-1]["held_out_loss"] < 0.72 * held_out[0]["held_out_loss"]
    assert len([record for record in records if "loss" in record]) == config.train.steps


def test_every_place_that_is_printed_exists(config):
    output = (config.runs_folder.parent / "output.txt").read_text()
    assert "mesh pp2-ep2: 4 process(es) on 1 node(s)" in output
    for line in output.splitlines()[-4:]:
        assert (config.runs_folder.parent / line.split()[-1]).exists(), line
    assert not list(config.run_folder.glob("*.tmp"))


def test_the_export_gives_the_same_logits_in_transformers(config):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(config.export_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(config.export_folder)
    corpus = Corpus.open(config.folders.held_out, config.model.vocab_size)
    ids = torch.tensor(corpus.tokens[:128].astype("int64"))
    text = "import os\n\ndef main():\n    return os.getcwd()\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == corpus.meta.eos_id

    trainer = build_trainer(config, Mesh.single(), torch.device("cpu"))
    load_checkpoint(required_checkpoint(config), trainer.parameters, None, trainer.mesh)
    trainer.gather()
    chunks = list(trainer.pipeline.chunks.values())
    batch = Batch(
        tokens=ids, targets=ids, positions=torch.arange(len(ids)), sequence_length=len(ids)
    )
    with torch.no_grad():
        *_, (hidden, _) = plain_hidden(chunks, batch)
        ours = chunks[-1].logits(hidden)
        expected = theirs(ids[None]).logits[0]
    assert (ours - expected).abs().max() <= 1e-4
    assert expected.std() > 0.5

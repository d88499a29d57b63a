"""Held-out loss: the mean over the same tokens, on every mesh, against plain PyTorch."""

import math
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from pith_apps.checks import required_checkpoint
from pith_apps.config import DataConfig, EvaluationConfig, RunConfig
from pith_apps.corpus import tokenize_files, train_tokenizer
from pith_apps.evaluate import held_out_loss
from pith_apps.recipes.released import qwen3_30b_a3b, tiny_form
from pith_apps.trainer import build_trainer, check_same_corpora
from pith_engine.contract import Batch
from pith_engine.mesh import Mesh, MeshConfig
from pith_engine.plain import plain_hidden
from torch.nn.functional import cross_entropy

SEQUENCE, SEQUENCES = 24, 11


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> RunConfig:
    """A float64 run on a small corpus; 11 sequences fill no whole number of batches of 8."""
    root = tmp_path_factory.mktemp("evaluate")
    words = [f"word{number}" for number in range(300)]
    (root / "text.txt").write_text(" ".join(np.random.default_rng(0).choice(words, 4000)))
    train_tokenizer([root / "text.txt"], root / "tokenizer", vocab_size=300)
    tokenize_files([root / "text.txt"], root / "tokenizer", root / "corpus")
    tiny = tiny_form(qwen3_30b_a3b())
    return replace(
        tiny,
        runs_folder=root,
        model=replace(tiny.model, vocab_size=300),
        mesh=MeshConfig(),
        data=DataConfig(
            training=root / "corpus", held_out=root / "corpus", tokenizer=root / "tokenizer"
        ),
        train=replace(tiny.train, batch=8, sequence_length=SEQUENCE, dtype="fp64"),
        evaluation=EvaluationConfig(sequences=SEQUENCES),
    )


def plain_loss(config: RunConfig) -> float:
    """Full logits, one sequence at a time, the sequences picked by hand."""
    trainer = build_trainer(config, Mesh.single(), torch.device("cpu"))
    trainer.gather()
    chunks = list(trainer.pipeline.chunks.values())
    tokens = torch.from_numpy(np.load(config.folders.held_out / "tokens.npy").astype(np.int64))
    total = math.ceil((len(tokens) - 1) / SEQUENCE)
    losses = []
    for place in range(SEQUENCES):
        start = place * total // SEQUENCES * SEQUENCE
        row = tokens[start : start + SEQUENCE + 1]
        batch = Batch(
            tokens=row[:-1],
            targets=row[1:],
            positions=torch.arange(len(row) - 1),
            sequence_length=len(row) - 1,
        )
        with torch.no_grad():
            *_, (hidden, _) = plain_hidden(chunks, batch)
            losses += cross_entropy(chunks[-1].logits(hidden), batch.targets, reduction="none")
    return torch.stack(losses).mean().item()


def evaluate_on(config: RunConfig, mesh_config: MeshConfig) -> tuple[float, int] | None:
    """Held-out loss on the first ranks of the pool."""
    mesh = Mesh.create(mesh_config, timedelta(seconds=60))
    if mesh is None:
        return None
    trainer = build_trainer(replace(config, mesh=mesh_config), mesh, torch.device("cpu"))
    return held_out_loss(trainer)


def test_held_out_loss_is_the_mean_over_tokens(config):
    trainer = build_trainer(config, Mesh.single(), torch.device("cpu"))
    loss, num_targets = held_out_loss(trainer)
    assert num_targets == SEQUENCE * SEQUENCES
    assert loss == pytest.approx(plain_loss(config), rel=1e-12)
    assert all(not p.full.grad.any() for p in trainer.parameters)


@pytest.mark.core
@pytest.mark.parametrize(
    "mesh", [MeshConfig(pp=2), MeshConfig(ep=4), MeshConfig(pp=2, ep=2), MeshConfig(dp=2, ep=2)]
)
def test_every_mesh_evaluates_alike(gloo_pool, config, mesh):
    expected = plain_loss(config)
    for found in gloo_pool.run(evaluate_on, config, mesh):
        if found is not None:
            assert found[0] == pytest.approx(expected, rel=1e-12)
            assert found[1] == SEQUENCE * SEQUENCES


def test_a_run_without_checkpoint_is_refused_by_name(config, tmp_path):
    config = replace(config, runs_folder=tmp_path)
    for _ in range(2):
        with pytest.raises(ValueError, match="holds no complete checkpoint: run `pith pretrain`"):
            required_checkpoint(config)
        half_written = config.checkpoint_folder / "step-00000002"
        half_written.mkdir(parents=True, exist_ok=True)


def faults_of_rank(config: RunConfig, others: Path) -> str:
    """What a rank says when ranks 2 and 3 find another held-out corpus."""
    mesh = Mesh.create(MeshConfig(dp=4), timedelta(seconds=60))
    assert mesh is not None
    check_same_corpora(config, mesh)
    if mesh.rank >= 2:
        config = replace(config, data=replace(config.data, held_out=others))
    with pytest.raises(ValueError) as error:
        check_same_corpora(config, mesh)
    return str(error.value)


def test_ranks_that_read_another_corpus_are_named(gloo_pool, config, tmp_path):
    folders = config.folders
    (tmp_path / "more.txt").write_text("another text")
    tokenize_files([tmp_path / "more.txt"], folders.tokenizer, tmp_path / "other")
    for fault in gloo_pool.run(faults_of_rank, config, tmp_path / "other"):
        assert "on ranks [2, 3] is another corpus than on rank 0" in fault

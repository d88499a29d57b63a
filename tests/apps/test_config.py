"""Refusals: every reason at once, with the value and a way out, before anything is touched."""

import json
import shutil
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pith_apps.checks import CAPABILITIES, check_run, violations
from pith_apps.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LogConfig,
    RunConfig,
    config_record,
)
from pith_apps.corpus import tokenize_files, train_tokenizer
from pith_apps.plan import Machine, describe_run
from pith_apps.recipes.released import deepseek_v2_lite, gpt_oss_20b, qwen3_30b_a3b, tiny_form
from pith_apps.trainer import build_trainer
from pith_engine.balance import BalanceConfig
from pith_engine.fsdp import ShardingConfig
from pith_engine.lr import LearningRateConfig
from pith_engine.mesh import Mesh, MeshConfig
from pith_engine.optim import OptimizerConfig
from pith_engine.violations import type_violations


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> Path:
    """A tokenizer of 300 entries and three corpora: long, another one, and one too short."""
    root = tmp_path_factory.mktemp("corpora")
    generator = np.random.default_rng(0)
    words = [f"word{number}" for number in range(300)]
    for name, count in [("long", 4000), ("short", 20)]:
        (root / f"{name}.txt").write_text(" ".join(generator.choice(words, count)))
    train_tokenizer([root / "long.txt"], root / "tokenizer", vocab_size=300)
    for name in ("long", "short"):
        tokenize_files([root / f"{name}.txt"], root / "tokenizer", root / name)
    return root


@pytest.fixture
def run(corpora, tmp_path) -> RunConfig:
    """A run that may start on one process."""
    tiny = tiny_form(qwen3_30b_a3b())
    return replace(
        tiny,
        runs_folder=tmp_path / "runs",
        model=replace(tiny.model, vocab_size=300),
        mesh=MeshConfig(),
        data=DataConfig(
            training=corpora / "long", held_out=corpora / "long", tokenizer=corpora / "tokenizer"
        ),
    )


def machine(world_size: int = 1, num_gpus: int = 0) -> Machine:
    return Machine(world_size=world_size, processes_here=world_size, num_gpus=num_gpus)


def test_a_good_run_has_no_violation(run):
    assert violations(run, machine()) == []
    check_run(run, machine())


@pytest.mark.parametrize(
    ("mesh", "experts", "world_size", "named"),
    [
        (MeshConfig(ep=4), 6, 4, ["mesh.ep = 4", "6 experts", "1, 2, 3, 6"]),
        (MeshConfig(ep=3), 8, 3, ["mesh.ep = 3", "8 experts", "1, 2, 4, 8"]),
        (MeshConfig(pp=2, ep=4), 8, 4, ["pp 2 x dp 1 x cp 1 x ep 4 = 8", "4 run", "ep4"]),
        (MeshConfig(ep=8), 8, 2, ["= 8 processes", "2 run", "dp2"]),
        (MeshConfig(cp=3), 8, 3, ["mesh.cp = 3", "2 x cp = 6", "valid lengths: 60, 66"]),
    ],
)
def test_meshes_that_do_not_fit(run, mesh, experts, world_size, named):
    run = replace(run, mesh=mesh, model=replace(run.model, num_experts=experts))
    found = "\n".join(violations(run, machine(world_size)))
    for text in named:
        assert text in found


def test_replicas_are_printed_and_need_an_axis(run):
    both = ShardingConfig(replicate_dense=True, replicate_experts=True)
    alone = replace(run, sharding=both)
    dense, experts = violations(alone, machine())
    assert "mesh.dp 1 has no replicas" in dense and "--sharding.no-replicate-dense" in dense
    assert "sharding.replicate_experts is True" in experts
    for sharding, printed in [
        (ShardingConfig(), "dense in 4 shard(s) over data; experts in 2 shard(s) over expert_data"),
        (
            ShardingConfig(replicate_dense=True),
            "dense in 2 shard(s) over dense_shards, 2 replicas over dp; "
            "experts in 2 shard(s) over expert_data",
        ),
        (
            both,
            "dense in 2 shard(s) over dense_shards, 2 replicas over dp; "
            "experts in 1 shard(s) over cp, 2 replicas over dp",
        ),
    ]:
        many = replace(run, mesh=MeshConfig(dp=2, ep=2), sharding=sharding)
        assert violations(many, machine(4)) == []
        assert f"\nsharding: {printed}\n" in describe_run(many, machine(4), 10_000)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 7])
def test_too_few_micro_batches_name_the_minimum(run, num_micro_batches):
    run = replace(
        run,
        mesh=MeshConfig(pp=4),
        model=replace(run.model, num_hidden_layers=8),
        train=replace(run.train, batch=num_micro_batches),
    )
    (found,) = violations(run, machine(4))
    assert found.startswith(f"train.batch / train.micro_batch = {num_micro_batches}: ")
    assert "set --train.batch 8, times train.micro_batch" in found


def test_layers_and_batches_that_cannot_be_divided(run):
    few_layers = replace(run, mesh=MeshConfig(pp=4), train=replace(run.train, batch=8))
    (found,) = violations(few_layers, machine(4))
    assert "8 chunks" in found
    assert "4 layers" in found
    uneven = replace(run, train=replace(run.train, batch=8, micro_batch=3))
    (found,) = violations(uneven, machine())
    assert "train.batch is 8" in found
    assert "--train.batch 9" in found
    chunks = replace(run, layers_per_chunk=(1, 2))
    (found,) = violations(chunks, machine())
    assert "layers_per_chunk is (1, 2)" in found
    assert "add up to 4" in found


def test_corpora_that_do_not_serve(run, corpora, tmp_path):
    short = replace(run, data=replace(run.data, training=corpora / "short"))
    (found,) = violations(short, machine())
    assert "data.training" in found
    assert "fewer than the batch of 8" in found
    missing = replace(run, data=replace(run.data, held_out=tmp_path / "none"))
    (found,) = violations(missing, machine())
    assert "data.held_out" in found
    assert "pith tokenize" in found
    one = shutil.copytree(corpora / "long", tmp_path / "one token")
    meta = json.loads((one / "meta.json").read_text())
    (one / "meta.json").write_text(json.dumps({**meta, "num_tokens": 1, "num_documents": 1}))
    np.save(one / "tokens.npy", np.load(one / "tokens.npy")[:1])
    np.save(one / "documents.npy", np.array([0, 1]))
    (found,) = violations(replace(run, data=replace(run.data, held_out=one)), machine())
    assert "one token has no target" in found
    small = replace(run, model=replace(run.model, vocab_size=200))
    found = "\n".join(violations(small, machine()))
    assert "outside the model's vocab_size 200" in found
    no_folders = replace(run, data=DataConfig(training=corpora / "long"))
    (found,) = violations(no_folders, machine())
    assert "give all three folders" in found
    both = replace(run, data=replace(run.data, standard_library=True))
    found = "\n".join(violations(both, machine()))
    assert "data.standard_library is True beside" in found
    assert "set --model.vocab-size 4096" in found


def test_the_tokenizer_must_be_the_corpus_one(run, corpora, tmp_path):
    train_tokenizer([corpora / "long.txt"], tmp_path / "tokenizer", vocab_size=290)
    other = replace(run, data=replace(run.data, tokenizer=tmp_path / "tokenizer"))
    found = violations(other, machine())
    assert len(found) == 2
    assert all("is another tokenizer" in text for text in found)
    for wrong in (tmp_path / "none", corpora / "tokenizer" / "tokenizer.json"):
        data = replace(run.data, tokenizer=wrong)
        (found,) = violations(replace(run, data=data), machine())
        expected = f"data.tokenizer is {str(wrong)!r}: {wrong} is no folder with a tokenizer.json"
        assert found.startswith(expected)
        data = replace(data, training=tmp_path / "none", held_out=corpora / "long.txt")
        found = violations(replace(run, data=data), machine())
        assert found[0].startswith(expected)
        assert [text.split()[0] for text in found[1:]] == ["data.training", "data.held_out"]
        assert all("no meta.json of `pith tokenize`" in text for text in found[1:])


def test_run_folders_that_cannot_be_written(run, tmp_path):
    (tmp_path / "file").write_text("")
    blocked = replace(run, runs_folder=tmp_path / "file" / "runs")
    (found,) = violations(blocked, machine())
    assert "runs_folder" in found
    assert str(tmp_path / "file") in found
    folder = tmp_path / "dangling" / "checkpoints"
    folder.parent.mkdir()
    folder.symlink_to(tmp_path / "gone")
    (found,) = violations(replace(run, runs_folder=tmp_path, name="dangling"), machine())
    assert found.startswith(f"{folder} is not a folder")
    for name in ("", "..", "a/b", "é" * 128):
        (found,) = violations(replace(run, name=name), machine())
        assert f"name is {name!r}" in found


def test_devices_and_backends_that_are_not_there(run):
    on_gpu = replace(run, train=replace(run.train, device="cuda", attention="reference"))
    (found,) = violations(on_gpu, machine())
    assert "--train.device cpu" in found
    two = replace(on_gpu, mesh=MeshConfig(ep=2))
    (found,) = violations(two, machine(2, num_gpus=1))
    assert "1 GPU(s)" in found
    cudnn = replace(run, train=replace(run.train, attention="cudnn"))
    (found,) = violations(cudnn, machine())
    assert "train.attention is 'cudnn'" in found
    long = replace(run, train=replace(run.train, sequence_length=129))
    (found,) = violations(long, machine())
    assert "max_position_embeddings 128" in found


def test_all_violations_come_in_one_error_and_nothing_is_written(run, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    bad = replace(
        run,
        name="a/b",
        mesh=MeshConfig(ep=3),
        layers_per_chunk=(4,),
        data=DataConfig(),
        train=replace(run.train, attention="cudnn", sequence_length=4096),
    )
    with pytest.raises(ValueError) as error:
        check_run(bad, machine(4))
    text = str(error.value)
    for part in (
        "name is 'a/b'",
        "mesh.ep = 3",
        "4 run",
        "layers_per_chunk",
        "data.training",
        "train.attention",
        "train.sequence_length is 4096",
    ):
        assert part in text
    assert text.startswith(f"{text.count('  - ')} reason(s)")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("train.steps", 0),
        ("train.batch", 0),
        ("train.micro_batch", 0),
        ("train.sequence_length", 0),
        ("train.seed", -1),
        ("train.max_grad_norm", 0.0),
        ("train.max_grad_norm", float("nan")),
        ("evaluation.interval", -1),
        ("evaluation.sequences", 0),
        ("checkpoint.interval", -1),
        ("checkpoint.keep", 0),
        ("nproc", 0),
        ("timeout", 0.0),
        ("timeout", float("inf")),
        ("timeout", 1e10),
        ("train.seed", 2**63),
        ("train.steps", 10**8),
    ],
)
def test_numbers_out_of_range_are_named(run, path, value):
    match path.split("."):
        case ["train", name]:
            bad = replace(run, train=replace(run.train, **{name: value}))
        case ["evaluation", name]:
            bad = replace(run, evaluation=EvaluationConfig(**{name: value}))
        case ["checkpoint", name]:
            bad = replace(run, checkpoint=CheckpointConfig(**{name: value}))
        case [name]:
            bad = replace(run, **{name: value})
    (found,) = violations(bad, machine())
    assert found.startswith(f"{path} is {value}: allowed are")


def test_recompute_reaches_the_pipeline_and_the_plan_or_is_refused(run):
    asked = replace(run, train=replace(run.train, recompute="attention+experts"))
    assert violations(asked, machine()) == []
    trainer = build_trainer(asked, Mesh.single(), torch.device("cpu"))
    assert trainer.pipeline.recompute == "attention+experts"
    assert describe_run(asked, machine(), 1000).endswith(", recompute attention+experts")
    unknown = asdict(replace(run, train=replace(run.train, recompute="all")))
    (found,) = type_violations(unknown, RunConfig, "")
    assert found.startswith("train.recompute is 'all', of type str: allowed is typing.Literal")


def test_a_number_out_of_range_hides_nothing_else(run):
    bad = replace(
        run,
        mesh=MeshConfig(ep=3),
        data=DataConfig(),
        train=replace(run.train, steps=0, micro_batch=2, batch=7, attention="cudnn"),
        optim=OptimizerConfig(eps=-1.0, momentum=0.9),
    )
    found = "\n".join(violations(bad, machine()))
    for part in (
        *("train.steps is 0", "mesh.ep = 3", "--train.batch 8", "data.training", "cudnn"),
        *("optim.eps = -1.0", "optim.momentum = 0.9"),
    ):
        assert part in found
    for name in ("micro_batch", "batch", "sequence_length"):
        worse = replace(bad, train=replace(bad.train, **{name: -2}), data=run.data)
        found = "\n".join(violations(worse, machine()))
        assert f"set --train.{name.replace('_', '-')} 1\n" in f"{found}\n"
        assert "cudnn" in found


def test_tensorboard_that_is_not_installed_is_refused(run, monkeypatch):
    asked = replace(run, log=LogConfig(tensorboard=True))
    monkeypatch.setattr("pith_apps.checks.find_spec", lambda name: None)
    (found,) = violations(asked, machine())
    assert "pip install 'pith-apps[tensorboard]'" in found
    assert violations(run, machine()) == []


def test_bf16_on_a_gpu_needs_rows_of_16_bytes(run):
    model = replace(run.model, hidden_size=68, moe_intermediate_size=44)
    odd = replace(run, model=model, train=replace(run.train, attention="reference"))
    assert violations(odd, machine()) == []
    on_gpu = replace(odd, train=replace(odd.train, device="cuda", dtype="bf16"))
    found = violations(on_gpu, machine(num_gpus=1))
    assert len(found) == 2
    assert "--model.hidden-size 72" in found[0]
    assert "--model.moe-intermediate-size 48" in found[1]


def test_every_section_is_reported_at_once(run, tmp_path):
    bad = replace(
        run,
        name="..",
        nproc=0,
        timeout=-1.0,
        layers_per_chunk=(),
        model=replace(run.model, head_dim=0, num_key_value_heads=-1),
        mesh=MeshConfig(dp=0, ep=-2),
        data=DataConfig(training=tmp_path / "none"),
        train=replace(run.train, micro_batch=0),
        optim=OptimizerConfig(eps=-1.0),
        lr=LearningRateConfig(peak=-1.0, warmup_steps=-3),
        balance=BalanceConfig(coefficient=-1.0),
        evaluation=EvaluationConfig(interval=-1),
        checkpoint=CheckpointConfig(keep=0),
    )
    found = violations(bad, machine(0))
    for path in (
        "name is '..'",
        "nproc is 0",
        "timeout is -1.0",
        "layers_per_chunk is ()",
        "model.head_dim = 0",
        "model.num_key_value_heads = -1",
        "mesh.dp = 0",
        "mesh.ep = -2",
        "data.training, data.held_out",
        "train.micro_batch is 0",
        "optim.eps = -1.0",
        "lr.peak is -1.0",
        "lr.warmup_steps is -3",
        "balance.coefficient is -1.0",
        "evaluation.interval is -1",
        "checkpoint.keep is 0",
    ):
        assert len([line for line in found if line.startswith(path)]) == 1, path
    assert len(found) == 16


@pytest.mark.parametrize("value", [0, -1, -8])
def test_no_size_out_of_range_breaks_a_check(run, value):
    """Each whole number of the model and the mesh, alone: it is named, and nothing crashes."""
    for section in ("model", "mesh"):
        part = getattr(run, section)
        for name in [field.name for field in fields(part) if field.type is int]:
            bad = replace(run, **{section: replace(part, **{name: value})})
            found = violations(bad, machine())
            assert any(line.startswith(f"{section}.{name} = {value}") for line in found)


def test_a_vocabulary_out_of_range_does_not_hide_the_corpora(run, tmp_path):
    data = replace(run.data, training=tmp_path / "none")
    found = violations(replace(run, data=data, model=replace(run.model, vocab_size=0)), machine())
    assert [line.split()[0] for line in found] == ["model.vocab_size", "data.training"]


def test_the_plan_says_when_a_run_ends_before_its_warmup(run):
    lr = LearningRateConfig(peak=1e-3, warmup_steps=10)
    for steps, says in ((9, True), (10, False)):
        plan = describe_run(
            replace(run, lr=lr, train=replace(run.train, steps=steps)), machine(), 10_000
        )
        assert "warmup of 10 steps to 0.001" in plan
        assert ("which this short run never reaches" in plan) == says


def test_balancing_that_cannot_work_is_refused_by_name(run):
    bad = BalanceConfig(coefficient=-1.0, z_coefficient=float("inf"), bias_rate=0.0)
    found = violations(replace(run, balance=bad), machine())
    names = [text.split()[0] for text in found]
    assert names == ["balance.coefficient", "balance.z_coefficient", "balance.bias_rate"]
    (found,) = violations(replace(run, balance=BalanceConfig(method="magic")), machine())
    assert "'magic': allowed are none, micro-batch, sequence, global-batch, bias" in found
    # Qwen3-MoE's Hugging Face format has no such tensor, so a run could not be exported.
    (found,) = violations(replace(run, balance=BalanceConfig(method="bias")), machine())
    assert found.startswith("balance.method bias with a model_type other than deepseek_v3: its")
    for method in ("none", "micro-batch", "sequence", "global-batch"):
        assert violations(replace(run, balance=BalanceConfig(method=method)), machine()) == []


def test_a_fault_of_one_field_is_reported_and_nothing_that_follows_from_it(run):
    """Neither an error of what reads the field, nor a relation that makes no sense with it."""
    model = replace(tiny_form(gpt_oss_20b()).model, layer_types=("full_attention",))
    found = violations(replace(run, model=model), machine())
    assert sum("model.layer_types = ('full_attention',)" in line for line in found) == 1
    model = replace(tiny_form(deepseek_v2_lite()).model, n_routed_experts=0)
    found = violations(replace(run, model=model, mesh=MeshConfig(ep=2)), machine(2))
    assert any(line.startswith("model.n_routed_experts = 0") for line in found)
    assert not any("the model has no experts" in line for line in found)


def test_the_readme_has_the_table_of_capabilities():
    readme = (Path(__file__).parents[2] / "packages/pith-apps/README.md").read_text()
    rows = [f"| {option} | {other} | {reason} |" for option, other, reason in CAPABILITIES]
    start = readme.index("| setting | with | why |")
    assert readme[start:].splitlines()[2 : 2 + len(rows) + 1] == [*rows, ""]


def test_capabilities_are_written_in_words_that_the_validator_knows(run, monkeypatch):
    """A misspelt row is an error, not a row that never holds."""
    assert len(CAPABILITIES) >= 1
    wrong = ("balance.method biased", *CAPABILITIES[0][1:])
    monkeypatch.setattr("pith_apps.checks.CAPABILITIES", (wrong,))
    with pytest.raises(KeyError, match="biased"):
        violations(run, machine())


def test_a_configuration_is_plain_values():
    for recipe in (qwen3_30b_a3b(), tiny_form(qwen3_30b_a3b())):
        record = config_record(recipe)
        assert json.loads(json.dumps(record)) == record
        assert record["model"]["num_experts"] == recipe.model.num_experts
        assert record["runs_folder"] == "runs"

"""`pith parity`: every mesh agrees with one process, and each broken factor shows where it acts."""

import contextlib
import io
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pith_apps.config import RunConfig
from pith_apps.parity import (
    PARITY_MESHES,
    ParityResult,
    check_parity,
    cut_sequences,
    parity_batch,
    parity_runs,
    parity_worker,
)
from pith_apps.plan import Machine
from pith_engine.balance import BalanceConfig
from pith_engine.contract import IGNORED_TARGET, Batch
from pith_engine.fsdp import ShardingConfig, Unit
from pith_engine.init import initialise
from pith_engine.mesh import Mesh
from pith_engine.pipeline import Pipeline
from pith_models.chunk import DecoderChunk
from pith_ops.cross_entropy import linear_cross_entropy
from pith_ops.rms_norm import rms_norm
from tiny_run import tiny_run

CPU = torch.device("cpu")
pytestmark = pytest.mark.core


def tiny(**changes: Any) -> RunConfig:
    return replace(tiny_run(num_layers=5, sequence_length=11), **changes)


def parity(
    labels: tuple[str, ...],
    dtype: Literal["fp64", "fp32"],
    broken: str | None = None,
    config: RunConfig | None = None,
) -> tuple[bool, str]:
    """Runs in every worker: the verdict and what was printed."""
    runs, output = parity_runs(config or tiny(), labels, dtype), io.StringIO()
    with contextlib.redirect_stdout(output), BREAKS[broken]() if broken else no_break():
        agree = parity_worker(runs, CPU)
    return agree, output.getvalue()


def no_break() -> AbstractContextManager:
    return contextlib.nullcontext()


@contextlib.contextmanager
def local_token_count() -> Iterator[None]:
    def count(batches: list, mesh: object) -> int:
        return sum(int((batch.targets != IGNORED_TARGET).sum()) for batch in batches)

    with patch("pith_apps.trainer.count_targets", count):
        yield


@contextlib.contextmanager
def loss_scale() -> Iterator[None]:
    """The loss that is reported stays right, its gradient is doubled."""
    original = Pipeline.train_step

    def doubled(self: Pipeline, batches: list, num_targets: int) -> object:
        losses = original(self, batches, num_targets)
        for chunk in self.chunks.values():
            for parameter in chunk.parameters():
                parameter.grad *= 2
        return losses

    with patch.object(Pipeline, "train_step", doubled):
        yield


@contextlib.contextmanager
def experts_averaged_over_ep() -> Iterator[None]:
    original = Unit.reduce

    def averaged(self: Unit) -> None:
        original(self)
        for parameter in self.parameters:
            if parameter.role.is_expert:
                ep = parameter.global_shape[0] // parameter.full.shape[0]
                parameter.grad.div_(ep)

    with patch.object(Unit, "reduce", averaged):
        yield


@contextlib.contextmanager
def balance_coefficient_per_rank() -> Iterator[None]:
    original = Pipeline.__init__

    def changed(self: Pipeline, chunks: list, mesh: Any, **settings: Any) -> None:
        original(self, chunks, mesh, **settings)
        coefficient = self.balance.coefficient / mesh.data.size
        self.balance = replace(self.balance, coefficient=coefficient)

    with patch.object(Pipeline, "__init__", changed):
        yield


@contextlib.contextmanager
def replicas_in_the_norm() -> Iterator[None]:
    from pith_engine.gradients import global_norm

    def counted_twice(parameters: list, mesh: Any) -> torch.Tensor:
        return global_norm(parameters, mesh) * math.sqrt(mesh.dp.size)

    with patch("pith_apps.trainer.global_norm", counted_twice):
        yield


@contextlib.contextmanager
def weights_by_rank() -> Iterator[None]:
    def by_rank(parameters: list, seed: int) -> None:
        initialise(parameters, seed + dist.get_rank())

    with patch("pith_apps.trainer.initialise", by_rank):
        yield


@contextlib.contextmanager
def nan_on_one_rank() -> Iterator[None]:
    original = Unit.reduce

    def poisoned(self: Unit) -> None:
        original(self)
        if dist.get_rank() == 1 and self.name == "layers.4.experts":
            for parameter in self.parameters:
                parameter.grad[..., -1] = math.nan

    with patch.object(Unit, "reduce", poisoned):
        yield


@contextlib.contextmanager
def replicas_not_summed() -> Iterator[None]:
    with patch("pith_engine.fsdp.all_reduce", lambda tensor, axis: tensor):
        yield


@contextlib.contextmanager
def replicas_averaged() -> Iterator[None]:
    from pith_engine.runtime import all_reduce

    def averaged(tensor: torch.Tensor, axis: Any) -> torch.Tensor:
        return all_reduce(tensor, axis).div_(axis.size)

    with patch("pith_engine.fsdp.all_reduce", averaged):
        yield


@contextlib.contextmanager
def every_replica_in_the_norm() -> Iterator[None]:
    from pith_engine.gradients import global_norm

    def counted_twice(parameters: list, mesh: Any) -> torch.Tensor:
        alone = Mesh.single().world
        return global_norm([replace(p, replicas=alone) for p in parameters], mesh)

    with patch("pith_apps.trainer.global_norm", counted_twice):
        yield


@contextlib.contextmanager
def head_without_gradient() -> Iterator[None]:
    def loss(self: DecoderChunk, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        normed = rms_norm(hidden, self.final_norm, self.config.rms_norm_eps)
        return linear_cross_entropy(normed, self.head.detach(), batch.targets, IGNORED_TARGET)

    with patch.object(DecoderChunk, "loss", loss):
        yield


# Test code may hold callables in a table: a worker is told by name which fault to inject.
BREAKS: dict[str, Callable[[], AbstractContextManager]] = {
    "local token count": local_token_count,
    "loss scale": loss_scale,
    "experts averaged over ep": experts_averaged_over_ep,
    "balance coefficient per rank": balance_coefficient_per_rank,
    "replicas in the norm": replicas_in_the_norm,
    "weights by rank": weights_by_rank,
    "nan on one rank": nan_on_one_rank,
    "replicas not summed": replicas_not_summed,
    "replicas averaged": replicas_averaged,
    "every replica in the norm": every_replica_in_the_norm,
    "head without gradient": head_without_gradient,
}


def rows(table: str) -> dict[str, str]:
    """Lines of the table by mesh, replicated or not."""
    first_words = {line.split()[0].removeprefix("hsdp-"): line for line in table.splitlines()}
    return {label: first_words[label] for label in PARITY_MESHES if label in first_words}


def wrong_columns(row: str, limit: float) -> list[str]:
    cells = row.split()
    numbers = dict(zip(("loss", "balance", "norm", "gradient"), cells[2:6], strict=True))
    wrong = [] if cells[1] == "bit-equal" else ["weights"]
    return wrong + [name for name, cell in numbers.items() if not float(cell) <= limit]


@pytest.mark.parametrize(("dtype", "limit"), [("fp64", 1e-12), ("fp32", 5e-6)])
def test_all_meshes_agree(gloo_pool: Any, dtype: str, limit: float) -> None:
    results = gloo_pool.run(parity, PARITY_MESHES, dtype, timeout=180)
    assert [agree for agree, _ in results] == [True] * 4
    assert [text for _, text in results[1:]] == [""] * 3
    table = results[0][1]
    assert tuple(rows(table)) == PARITY_MESHES
    assert table.splitlines()[-1] == "PASS"
    for row in rows(table).values():
        assert " agrees " in row
        assert wrong_columns(row, limit) == []


def parity_with(labels: tuple[str, ...], balance: BalanceConfig) -> tuple[bool, str]:
    """Runs in every worker, in float64: as `parity`, with this balancing."""
    runs, output = parity_runs(tiny(balance=balance), labels, "fp64"), io.StringIO()
    with contextlib.redirect_stdout(output):
        agree = parity_worker(runs, CPU)
    return agree, output.getvalue()


@pytest.mark.parametrize(
    "method",
    [
        "global-batch",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("none", "micro-batch", "sequence")),
    ],
)
def test_every_balancing_agrees(gloo_pool: Any, method: str) -> None:
    balance = BalanceConfig(method=method, coefficient=0.05, z_coefficient=0.01)  # type: ignore
    labels = ("ep2", "pp2-ep2", "dp2-ep2")
    agree, table = gloo_pool.run(parity_with, labels, balance, timeout=180)[0]
    assert agree, table
    assert [wrong_columns(row, 1e-12) for row in rows(table).values()] == [[]] * 3
    value = float(table.splitlines()[1].split("balance ")[1].split(",")[0])
    assert value == 0 if method == "none" else value > 0.9
    # The frequencies given for the step before are uneven, and nothing like those of this step.
    assert method != "global-batch" or abs(value - 1) > 1e-3


@pytest.mark.parametrize(
    ("broken", "columns", "meshes"),
    [
        ("local token count", ["loss", "balance", "norm", "gradient"], ("dp2", "ep2", "pp2-ep2")),
        ("loss scale", ["norm", "gradient"], ("dp2", "ep2", "pp2", "pp2-ep2")),
        ("experts averaged over ep", ["norm", "gradient"], ("ep2", "pp2-ep2")),
        ("balance coefficient per rank", ["norm", "gradient"], ("dp2", "ep2", "pp2-ep2")),
        ("replicas in the norm", ["norm"], ("dp2",)),
        ("nan on one rank", ["norm", "gradient"], ("dp2", "ep2")),
    ],
)
def test_a_broken_factor_shows_where_it_acts(
    gloo_pool: Any, broken: str, columns: list[str], meshes: tuple[str, ...]
) -> None:
    labels = ("dp2", "ep2", "pp2", "pp2-ep2")
    results = gloo_pool.run(parity, labels, "fp64", broken, timeout=180)
    assert results[0][0] is False
    table = results[0][1]
    assert table.splitlines()[-1] == "FAIL"
    for label, row in rows(table).items():
        if broken == "nan on one rank" and label not in meshes:
            continue
        assert wrong_columns(row, 1e-10) == (columns if label in meshes else []), row
        assert (" DIFFERS " in row) == (label in meshes)


def replicated(*, dense: bool, experts: bool) -> RunConfig:
    return tiny(sharding=ShardingConfig(replicate_dense=dense, replicate_experts=experts))


def tied() -> RunConfig:
    return tiny(model=replace(tiny().model, tie_word_embeddings=True))


@pytest.mark.parametrize(
    ("config", "labels"),
    [
        (replicated(dense=True, experts=False), ("dp2", "dp4", "pp2-dp2", "dp2-ep2")),
        (replicated(dense=True, experts=True), ("dp2", "pp2-dp2", "dp2-ep2")),
        (replicated(dense=False, experts=True), ("dp2-ep2",)),
        (tied(), ("dp2", "ep2", "pp2", "pp2-ep2")),
        (replace(tied(), sharding=ShardingConfig(replicate_dense=True)), ("dp2-ep2", "pp2-dp2")),
    ],
    ids=["hsdp", "replicated", "experts", "tied", "tied-hsdp"],
)
def test_replicas_and_tied_embeddings_agree(
    gloo_pool: Any, config: RunConfig, labels: tuple[str, ...]
) -> None:
    results = gloo_pool.run(parity, labels, "fp64", None, config, timeout=180)
    assert [agree for agree, _ in results] == [True] * 4, results[0][1]
    for row in rows(results[0][1]).values():
        assert wrong_columns(row, 1e-12) == [], row


@pytest.mark.parametrize(
    ("broken", "config", "columns"),
    [
        ("replicas not summed", replicated(dense=True, experts=False), ["norm", "gradient"]),
        ("replicas averaged", replicated(dense=True, experts=False), ["norm", "gradient"]),
        ("every replica in the norm", replicated(dense=True, experts=True), ["norm"]),
        ("head without gradient", tied(), ["norm", "gradient"]),
    ],
)
def test_a_broken_replica_or_tie_shows(
    gloo_pool: Any, broken: str, config: RunConfig, columns: list[str]
) -> None:
    labels = ("dp2", "dp2-ep2")
    results = gloo_pool.run(parity, labels, "fp64", broken, config, timeout=180)
    found = rows(results[0][1])
    assert tuple(found) == labels
    for row in found.values():
        assert wrong_columns(row, 1e-10) == columns, row
        assert ("replicas differ" in row) == (broken == "replicas not summed")


def test_weights_that_depend_on_the_rank_differ(gloo_pool: Any) -> None:
    results = gloo_pool.run(parity, ("dp2", "pp2"), "fp64", "weights by rank")
    for row in rows(results[0][1]).values():
        assert row.split()[1] == "DIFFER"
        assert " DIFFERS " in row


def test_the_batch_is_uneven() -> None:
    runs = parity_runs(tiny(), PARITY_MESHES, "fp64")
    assert {run.train.batch for run in runs} == {8}
    whole = parity_batch(runs[0], CPU)
    batches = [cut_sequences(whole, number, 1) for number in range(8)]
    counts = [int((batch.targets != IGNORED_TARGET).sum()) for batch in batches]
    assert counts == [11, 10, 0, 7, 6, 5, 3, 2]
    assert sum(counts[:4]) != sum(counts[4:])
    assert len(batches[1].tokens.unique()) == 1


def test_verdicts() -> None:
    def result(**changes: Any) -> ParityResult:
        names = ("loss", "balance", "norm", "gradient", "update")
        numbers = {name: changes.pop(name, 0.0) for name in names}
        facts = {"weights_equal": True, "covered": True, "worst": "head", **changes}
        return ParityResult(**facts, differences=numbers)

    assert result().agrees("fp64")
    for name in ("loss", "balance", "norm", "gradient", "update"):
        assert result(**{name: 1e-10}).agrees("fp64")
        assert not result(**{name: 1.1e-10}).agrees("fp64")
        assert not result(**{name: math.nan}).agrees("fp32")
    assert result(loss=1e-5, norm=1e-5, gradient=1e-4).agrees("fp32")
    assert not result(norm=1.1e-5).agrees("fp32")
    assert not result(gradient=1.1e-4).agrees("fp32")
    assert result(update=1e-3).agrees("fp32") and not result(update=1.1e-3).agrees("fp32")
    assert not result(weights_equal=False).agrees("fp32")
    assert not result(covered=False).agrees("fp32")


def test_meshes_that_cannot_run_are_refused_together() -> None:
    here = Machine(world_size=4, processes_here=4, num_gpus=0)
    check_parity(parity_runs(tiny(), PARITY_MESHES, "fp64"), here)
    with pytest.raises(ValueError, match=r"(?s)pp4: mesh.pp = 4 .*ep3: mesh.ep = 3"):
        check_parity(parity_runs(tiny(), ("pp4", "ep3"), "fp64"), here)

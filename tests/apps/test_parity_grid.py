"""`pith parity` over the full grid with its variations, and faults of each that it shows."""

import contextlib
import io
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
    FULL_GRID,
    VARIATIONS,
    check_parity,
    cut_sequences,
    parity_batch,
    parity_runs,
    parity_worker,
    vary,
    without_experts,
)
from pith_apps.plan import Machine
from pith_engine.balance import BalanceConfig, auxiliary_losses, load_factors
from pith_engine.context_parallel import shard_batch
from pith_engine.contract import IGNORED_TARGET
from pith_engine.gradients import count_targets
from pith_engine.mesh import Mesh, MeshConfig
from pith_engine.overlap import Operation, OperationKind
from pith_engine.stages import ChunkPass, Rows
from pith_ops.attention import attention_backward, attention_forward
from tiny_run import tiny_dense_run, tiny_run
from torch.nn.functional import embedding

MESHES = tuple(label for label in (*FULL_GRID, "cp2") if label != "pp2-cp2-ep2")
"""What four ranks can run; the mesh of eight runs in `test_parity_cli.py`."""


def tiny(sequence_length: int = 24) -> RunConfig:
    return tiny_run(num_layers=4, sequence_length=sequence_length)


def parity(
    labels: tuple[str, ...],
    dtype: Literal["fp64", "fp32"],
    variations: tuple[str, ...] = (),
    broken: str | None = None,
    balance: BalanceConfig | None = None,
    micro_batch: int = 1,
) -> tuple[bool, str]:
    """Runs in every worker: the verdict and what was printed."""
    config = tiny()
    config = replace(config, train=replace(config.train, micro_batch=micro_batch))
    config = replace(config, balance=balance or config.balance)
    runs, output = parity_runs(config, labels, dtype, variations), io.StringIO()
    fault = BREAKS[broken]() if broken else contextlib.nullcontext()
    with contextlib.redirect_stdout(output), fault:
        agree = parity_worker(runs, torch.device("cpu"), variations)
    return agree, output.getvalue()


@contextlib.contextmanager
def positions_of_the_shard() -> Iterator[None]:
    def numbered(batch: Any, cp: Any) -> Any:
        shard = shard_batch(batch, cp)
        places = torch.arange(shard.sequence_length).repeat(shard.num_sequences)
        return replace(shard, positions=places)

    with patch("pith_apps.parity.shard_batch", numbered):
        yield


@contextlib.contextmanager
def targets_of_the_shard() -> Iterator[None]:
    """The target of a block's last token is taken from the rank's next block."""

    def shifted(batch: Any, cp: Any) -> Any:
        shard = shard_batch(batch, cp)
        targets = torch.where(
            shard.targets == IGNORED_TARGET, IGNORED_TARGET, shard.tokens.roll(-1)
        )
        return replace(shard, targets=targets)

    with patch("pith_apps.parity.shard_batch", shifted):
        yield


@contextlib.contextmanager
def targets_counted_on_one_rank() -> Iterator[None]:
    def count(batches: list, mesh: Any) -> int:
        return count_targets(batches, mesh) // mesh.cp.size

    with patch("pith_apps.trainer.count_targets", count):
        yield


@contextlib.contextmanager
def gradients_of_keys_stay_away() -> Iterator[None]:
    def lost(*operands: Any, visibility: Any, **settings: Any) -> Any:
        dq, dk, dv = attention_backward(*operands, visibility=visibility, **settings)
        return (dq, dk, dv) if visibility.causal else (dq, dk * 0, dv * 0)

    with patch("pith_engine.context_parallel.attention_backward", lost):
        yield


@contextlib.contextmanager
def own_keys_unmasked() -> Iterator[None]:
    def unmasked(*operands: Any, visibility: Any, **settings: Any) -> Any:
        return attention_forward(
            *operands, visibility=replace(visibility, causal=False), **settings
        )

    with patch("pith_engine.context_parallel.attention_forward", unmasked):
        yield


@contextlib.contextmanager
def parts_averaged() -> Iterator[None]:
    """Parts are merged as if each had the same LSE."""

    def level(*operands: Any, **settings: Any) -> Any:
        out, lse = attention_forward(*operands, **settings)
        return out, torch.zeros_like(lse)

    with patch("pith_engine.context_parallel.attention_forward", level):
        yield


@contextlib.contextmanager
def documents_ignored() -> Iterator[None]:
    """On meshes attention crosses documents; the reference is right."""

    def whole(batch: Any, cp: Any) -> Any:
        return replace(shard_batch(batch, cp), documents=None)

    with patch("pith_apps.parity.shard_batch", whole):
        yield


@contextlib.contextmanager
def padding_counted_in_the_balance() -> Iterator[None]:
    def all_counted(config: Any, routing: Any, batch: Any, factors: Any) -> Any:
        return auxiliary_losses(
            config, routing, replace(batch, targets=torch.zeros_like(batch.targets)), factors
        )

    with patch("pith_engine.stages.auxiliary_losses", all_counted):
        yield


@contextlib.contextmanager
def counts_not_summed_over_cp() -> Iterator[None]:
    def local(method: Any, counts: Any, previous: Any, cp: Any) -> Any:
        return load_factors(method, counts, previous, Mesh.single().cp)

    with patch("pith_engine.stages.load_factors", local):
        yield


@contextlib.contextmanager
def segments_not_rebuilt() -> Iterator[None]:
    """The recomputed graph of a segment lacks its balance root."""

    def without(self: ChunkPass, operation: Operation, arrived: Rows) -> Rows:
        made = original(self, operation, arrived)
        if operation.kind is OperationKind.RECOMPUTE_SEGMENT:
            del self.segments[operation.index].roots[3:]
        return made

    original = ChunkPass.run
    with patch.object(ChunkPass, "run", without):
        yield


@contextlib.contextmanager
def tied_gradient_of_the_embedding_lost() -> Iterator[None]:
    def detached(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # The reference runs on `Mesh.single`, before any group of a mesh exists.
        return embedding(tokens, weight if len(tokens) > 24 else weight.detach())

    with patch("pith_models.chunk.embedding", detached):
        yield


@contextlib.contextmanager
def replicas_not_summed() -> Iterator[None]:
    with patch("pith_engine.fsdp.all_reduce", lambda tensor, axis: tensor):
        yield


@contextlib.contextmanager
def iteration_differs_by_rank() -> Iterator[None]:
    original = torch.baddbmm

    def weaker(x: torch.Tensor, *factors: torch.Tensor, beta: float, alpha: float = 1.0) -> Any:
        return original(x, *factors, beta=beta * (1 + 1e-6 * dist.get_rank()), alpha=alpha)

    with patch("torch.baddbmm", weaker):
        yield


# Test code may hold callables in a table: a worker is told by name which fault to inject.
BREAKS: dict[str, Callable[[], AbstractContextManager]] = {
    "positions of the shard": positions_of_the_shard,
    "targets of the shard": targets_of_the_shard,
    "targets counted on one rank": targets_counted_on_one_rank,
    "gradients of keys stay away": gradients_of_keys_stay_away,
    "own keys unmasked": own_keys_unmasked,
    "parts averaged": parts_averaged,
    "documents ignored": documents_ignored,
    "padding counted in the balance": padding_counted_in_the_balance,
    "counts not summed over cp": counts_not_summed_over_cp,
    "segments not rebuilt": segments_not_rebuilt,
    "tied gradient of the embedding lost": tied_gradient_of_the_embedding_lost,
    "replicas not summed": replicas_not_summed,
    "iteration differs by rank": iteration_differs_by_rank,
}


def rows(table: str) -> list[list[str]]:
    """Cells of the rows: two lines and a head come before them, a verdict after."""
    return [line.split() for line in table.splitlines()[3:-1]]


def shown(labels: tuple[str, ...], variations: tuple[str, ...]) -> list[str]:
    """Labels as the table shows them: with the variation hsdp, meshes with dp are replicated."""
    plain = [label.removeprefix("hsdp-") for label in labels]
    if "hsdp" not in variations:
        return list(labels)
    return [f"hsdp-{label}" if "dp" in label else label for label in plain]


def wrong_columns(row: list[str], limit: float) -> list[str]:
    names = ("loss", "balance", "norm", "gradient", "update")
    numbers = dict(zip(names, row[2:7], strict=True))
    wrong = [] if row[1] == "bit-equal" else ["weights"]
    return wrong + [name for name, cell in numbers.items() if not float(cell) <= limit]


def rows_that_agree(results: list, labels: list[str], limit: float) -> None:
    """The table has a row for each label, all within the limit."""
    assert [agree for agree, _ in results] == [True] * 4, results[0][1]
    table = rows(results[0][1])
    assert [row[0] for row in table] == labels
    assert [wrong_columns(row, limit) for row in table] == [[]] * len(labels)


@pytest.mark.parametrize(
    ("dtype", "variations", "limit"),
    [
        pytest.param("fp64", (), 1e-12, marks=pytest.mark.slow),
        pytest.param("fp64", VARIATIONS, 1e-11, marks=pytest.mark.core),
        pytest.param(
            *("fp32", tuple(name for name in VARIATIONS if name != "muon"), 1e-5),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plain", "all", "fp32"],
)
def test_the_grid_agrees(
    gloo_pool: Any, dtype: str, variations: tuple[str, ...], limit: float
) -> None:
    results = gloo_pool.run(parity, MESHES, dtype, variations, timeout=240)
    rows_that_agree(results, shown(MESHES, variations), limit)
    head = results[0][1].splitlines()[0]
    assert [name for name in VARIATIONS if f"+{name}" in head] == list(variations)


@pytest.mark.slow
@pytest.mark.parametrize("variation", VARIATIONS)
def test_each_variation_agrees_alone_and_changes_something(gloo_pool: Any, variation: str) -> None:
    labels = ("dp2-ep2", "cp2-ep2", "pp2-cp2")
    plain = gloo_pool.run(parity, labels, "fp64", timeout=180)
    results = gloo_pool.run(parity, labels, "fp64", (variation,), timeout=180)
    rows_that_agree(results, shown(labels, (variation,)), 1e-11)
    before, after = (text.splitlines()[1] for text in (plain[0][1], results[0][1]))
    assert (before != after) == (variation in ("packed", "padding", "aux", "tied"))
    assert (float(rows(results[0][1])[0][6]) > 0) == (variation == "muon")


def dense_parity(labels: tuple[str, ...], variations: tuple[str, ...]) -> tuple[bool, str]:
    """Runs in every worker: as `parity`, of a model without experts."""
    config, output = tiny_dense_run(num_layers=4, sequence_length=24), io.StringIO()
    runs = parity_runs(config, labels, "fp64", variations)
    with contextlib.redirect_stdout(output):
        agree = parity_worker(runs, torch.device("cpu"), variations)
    return agree, output.getvalue()


@pytest.mark.parametrize(
    "variations",
    [tuple(v for v in VARIATIONS if v != "aux"), pytest.param((), marks=pytest.mark.slow)],
    ids=["all", "plain"],
)
def test_a_model_without_experts_agrees(gloo_pool: Any, variations: tuple[str, ...]) -> None:
    labels = tuple(label for label in without_experts(MESHES) if label != "dp4")  # hsdp-dp4 stays
    results = gloo_pool.run(dense_parity, labels, variations, timeout=240)
    lines = results[0][1].splitlines()
    assert lines.pop(1).startswith("the model has no experts: nothing is balanced")
    results = [(agree, "\n".join(lines)) for agree, _ in results]
    rows_that_agree(results, shown(labels, variations), 1e-11)
    assert all(float(row[3]) == 0 for row in rows(results[0][1]))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "method",
    ["sequence", *(pytest.param(name, marks=SLOW) for name in ("global-batch", "micro-batch"))],
)
def test_splits_of_one_global_batch(gloo_pool: Any, method: str) -> None:
    """One, two and four sequences a micro-batch: of these methods `micro-batch` alone depends."""
    balance = BalanceConfig(method=method, coefficient=0.5, z_coefficient=0.05)  # type: ignore
    references = set()
    for size in (1, 2, 4):
        results = gloo_pool.run(
            parity, ("single", "cp2"), "fp64", ("packed",), None, balance, size, timeout=180
        )
        assert [agree for agree, _ in results] == [True] * 4, results[0][1]
        references.add(results[0][1].splitlines()[1])
    assert len(references) == (3 if method == "micro-batch" else 1)


@pytest.mark.parametrize(
    ("broken", "variations", "columns", "labels"),
    [
        ("positions of the shard", (), "loss balance norm gradient", ("cp2", "pp2-cp2")),
        ("targets of the shard", (), "loss norm gradient", ("cp2", "pp2-cp2")),
        ("targets counted on one rank", (), "loss balance norm gradient", ("cp2", "pp2-cp2")),
        ("gradients of keys stay away", (), "norm gradient", ("cp2", "pp2-cp2")),
        ("own keys unmasked", (), "loss balance norm gradient", ("cp2", "pp2-cp2")),
        ("parts averaged", (), "loss balance norm gradient", ("cp2", "pp2-cp2")),
        ("documents ignored", ("packed",), "loss balance norm gradient", ("dp4", "cp4")),
        ("padding counted in the balance", ("padding", "aux"), "balance norm gradient", ("ep4",)),
        ("counts not summed over cp", ("aux",), "balance norm gradient", ("cp2", "cp2-ep2")),
        ("segments not rebuilt", ("recompute", "aux"), "norm gradient", ("dp4", "pp2-ep2")),
        ("tied gradient of the embedding lost", ("tied",), "norm gradient", ("dp4", "pp2-dp2")),
        ("replicas not summed", ("hsdp",), "norm gradient", ("dp4", "dp2-ep2")),
        ("iteration differs by rank", ("muon",), "update", ("dp4", "dp2-ep2")),
    ],
)
def test_a_broken_factor_group_or_mask_shows(
    gloo_pool: Any,
    broken: str,
    variations: tuple[str, ...],
    columns: str,
    labels: tuple[str, ...],
) -> None:
    results = gloo_pool.run(parity, labels, "fp64", variations, broken, timeout=180)
    assert results[0][0] is False
    table = rows(results[0][1])
    assert [row[0] for row in table] == shown(labels, variations)
    for row in table:
        assert wrong_columns(row, 1e-10) == columns.split(), row


def parity_of_single_tokens(labels: tuple[str, ...]) -> bool:
    """Runs in every worker: documents of one token, whose softmax is constant."""
    runs = parity_runs(tiny(sequence_length=1), labels, "fp64")
    with contextlib.redirect_stdout(io.StringIO()):
        return parity_worker(runs, torch.device("cpu"))


def test_gradients_that_are_zero_but_for_rounding_agree(gloo_pool: Any) -> None:
    assert gloo_pool.run(parity_of_single_tokens, ("dp2", "ep2")) == [True] * 4


def test_the_variations_of_the_batch() -> None:
    device = torch.device("cpu")
    whole = parity_batch(tiny(), device, ("packed",))
    packed = [cut_sequences(whole, number, 1) for number in range(8)]
    pair = cut_sequences(whole, 0, 2)
    assert pair.documents.tolist() == [0, 1, 6, 19, 21, 24, 29, 42, 44, 48]
    assert pair.tokens.equal(torch.cat([packed[0].tokens, packed[1].tokens]))
    assert packed[0].documents.tolist() == [0, 1, 6, 19, 21, 24]
    assert packed[1].documents.tolist() == [0, 5, 18, 20, 24]
    assert packed[0].positions.tolist()[:8] == [0, 0, 1, 2, 3, 4, 0, 1]
    assert all(b.targets[end - 1] == IGNORED_TARGET for b in packed for end in b.documents[1:])
    padded = parity_batch(tiny(), device, ("padding",)).targets.view(8, 24)
    assert (padded[:, 12:] == IGNORED_TARGET).all()
    assert int((padded != IGNORED_TARGET).sum()) > 20


def test_what_is_no_mesh_or_variation_is_refused() -> None:
    with pytest.raises(ValueError, match="--with magic: allowed are packed, padding"):
        vary(tiny(), ("packed", "magic"))
    with pytest.raises(ValueError, match="'hsdp-ep2': hsdp replicates over dp"):
        parity_runs(tiny(), ("hsdp-ep2",), "fp64")
    plain, replicated = parity_runs(tiny(), ("dp2-ep2", "hsdp-dp2-ep2"), "fp64")
    assert plain.mesh == replicated.mesh == MeshConfig(dp=2, ep=2)
    assert not plain.sharding.replicate_dense and replicated.sharding.replicate_dense


def test_lengths_that_a_mesh_cannot_cut_are_refused_together() -> None:
    here = Machine(world_size=4, processes_here=4, num_gpus=0)
    check_parity(parity_runs(tiny(), MESHES, "fp64"), here)
    with pytest.raises(ValueError, match=r"(?s)cp4: .* 16, 24\n.*cp2: mesh.cp = 2 .* 20, 24"):
        check_parity(parity_runs(tiny(sequence_length=22), MESHES, "fp64"), here)

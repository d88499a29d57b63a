"""`pith parity` on meshes with a cp axis, and faults of context parallelism that it shows."""

import contextlib
import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from pith_apps.config import RunConfig, TrainConfig
from pith_apps.parity import check_parity, parity_worker
from pith_apps.plan import Machine
from pith_engine.balance import BalanceConfig
from pith_engine.context_parallel import shard_batch
from pith_engine.contract import IGNORED_TARGET
from pith_engine.gradients import count_targets
from pith_engine.lr import LearningRateConfig
from pith_engine.mesh import parse_mesh
from pith_models.qwen3_moe import Qwen3MoeConfig
from pith_ops.attention import attention_backward, attention_forward

MESHES = ("cp2", "cp4", "dp2-cp2", "cp2-ep2", "pp2-cp2")
pytestmark = pytest.mark.core


def tiny(sequence_length: int = 24) -> RunConfig:
    model = Qwen3MoeConfig(
        vocab_size=61,
        hidden_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=20,
        moe_intermediate_size=10,
        num_experts=8,
        num_experts_per_tok=3,
        mlp_only_layers=(1,),
        initializer_range=0.2,
        max_position_embeddings=64,
    )
    return RunConfig(
        name="tiny",
        model=model,
        mesh=parse_mesh("single"),
        train=TrainConfig(
            steps=1, batch=8, sequence_length=sequence_length, dtype="fp32", device="cpu"
        ),
        lr=LearningRateConfig(schedule="constant", peak=1e-3, warmup_steps=1),
        balance=BalanceConfig(method="none"),
    )


def parity(
    labels: tuple[str, ...], dtype: Literal["fp64", "fp32"], broken: str | None = None
) -> tuple[bool, str]:
    """Runs in every worker: the verdict and what was printed."""
    meshes = tuple(parse_mesh(label) for label in labels)
    output = io.StringIO()
    fault = BREAKS[broken]() if broken else contextlib.nullcontext()
    with contextlib.redirect_stdout(output), fault:
        agree = parity_worker(tiny(), meshes, dtype, torch.device("cpu"))
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


# Test code may hold callables in a table: a worker is told by name which fault to inject.
BREAKS: dict[str, Callable[[], AbstractContextManager]] = {
    "positions of the shard": positions_of_the_shard,
    "targets of the shard": targets_of_the_shard,
    "targets counted on one rank": targets_counted_on_one_rank,
    "gradients of keys stay away": gradients_of_keys_stay_away,
    "own keys unmasked": own_keys_unmasked,
    "parts averaged": parts_averaged,
}


def rows(table: str) -> dict[str, list[str]]:
    """Cells of the table by mesh."""
    cells = [line.split() for line in table.splitlines()]
    return {row[0]: row for row in cells if row[0] in MESHES}


def wrong_columns(row: list[str], limit: float) -> list[str]:
    numbers = dict(zip(("loss", "balance", "norm", "gradient"), row[2:6], strict=True))
    wrong = [] if row[1] == "bit-equal" else ["weights"]
    return wrong + [name for name, cell in numbers.items() if not float(cell) <= limit]


@pytest.mark.parametrize(("dtype", "limit"), [("fp64", 1e-12), ("fp32", 1e-5)])
def test_all_meshes_with_cp_agree(gloo_pool: Any, dtype: str, limit: float) -> None:
    results = gloo_pool.run(parity, MESHES, dtype, timeout=180)
    assert [agree for agree, _ in results] == [True] * 4
    table = rows(results[0][1])
    assert tuple(table) == MESHES
    assert [wrong_columns(row, limit) for row in table.values()] == [[]] * len(MESHES)


@pytest.mark.parametrize(
    ("broken", "columns"),
    [
        ("positions of the shard", ["loss", "norm", "gradient"]),
        ("targets of the shard", ["loss", "norm", "gradient"]),
        ("targets counted on one rank", ["loss", "norm", "gradient"]),
        ("gradients of keys stay away", ["norm", "gradient"]),
        ("own keys unmasked", ["loss", "norm", "gradient"]),
        ("parts averaged", ["loss", "norm", "gradient"]),
    ],
)
def test_a_broken_ring_shows(gloo_pool: Any, broken: str, columns: list[str]) -> None:
    labels = ("cp2", "pp2-cp2")
    results = gloo_pool.run(parity, labels, "fp64", broken, timeout=180)
    assert results[0][0] is False
    table = rows(results[0][1])
    assert tuple(table) == labels
    for row in table.values():
        assert wrong_columns(row, 1e-10) == columns, row


def test_lengths_that_a_mesh_cannot_cut_are_refused_together() -> None:
    here = Machine(world_size=4, processes_here=4, num_gpus=0)
    meshes = tuple(parse_mesh(label) for label in MESHES)
    check_parity(tiny(), meshes, "fp64", here)
    with pytest.raises(ValueError, match=r"(?s)cp2: mesh.cp = 2 .* 20, 24\n.*cp4: .* 16, 24\n"):
        check_parity(tiny(sequence_length=22), meshes, "fp64", here)

"""The order of data: each target once an epoch, the same samples in a step on every mesh."""

import numpy as np
import pytest
import torch
from pith_apps.config import TrainConfig
from pith_apps.data import (
    TrainingData,
    held_out_batches,
    num_samples,
    permuted,
    too_few_samples,
)
from pith_engine.contract import IGNORED_TARGET, Batch
from pith_engine.mesh import Mesh, MeshConfig

CPU = torch.device("cpu")


def training_data(tokens: np.ndarray, mesh: Mesh | None = None, **changes: int) -> TrainingData:
    train, vocab_size = sizes(4, changes)
    return TrainingData(tokens, mesh or Mesh.single(), train, vocab_size=vocab_size, device=CPU)


def sizes(batch: int, changes: dict[str, int]) -> tuple[TrainConfig, int]:
    """Sequences of 8 unless changed, and the vocabulary's size."""
    fields = {"steps": 1, "sequence_length": 8, "batch": batch, **changes}
    vocab_size = fields.pop("vocab_size", 1 << 20)
    return TrainConfig(**fields), vocab_size


def flat(lists: list[list]) -> list:
    return [item for items in lists for item in items]


def meshes(**sizes: int) -> list[Mesh]:
    config = MeshConfig(**sizes)
    return [Mesh.plan(config, rank) for rank in range(config.world_size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 63, 64, 65, 1000, 4097])
def test_permutation_is_a_bijection(size: int) -> None:
    for seed, epoch in [(0, 0), (0, 1), (12345678901234567890, 7)]:
        assert sorted(permuted(i, size, seed, epoch) for i in range(size)) == list(range(size))


def test_permutation_mixes_and_depends_on_seed_and_epoch() -> None:
    size = 1000
    orders = {
        key: np.array([permuted(i, size, *key) for i in range(size)])
        for key in [(0, 0), (0, 1), (1, 0), (1, 1), (10, 1), (1, 10)]
    }
    for one, first in orders.items():
        # Of uniform random orders: correlation 0 +- 0.03, 1 equal place, 1 pair of neighbours kept.
        assert abs(np.corrcoef(first, np.arange(size))[0, 1]) < 0.15
        assert (np.diff(first) == 1).sum() < 10
        for two, second in orders.items():
            assert one == two or (first == second).sum() < 10
    # Each place is reached about equally often over epochs (chi-square, 15 degrees of freedom).
    counts = np.bincount([permuted(5, 16, 0, epoch) for epoch in range(1600)], minlength=16)
    assert ((counts - 100) ** 2 / 100).sum() < 45


def test_permutation_of_a_large_epoch_is_quick_and_fixed() -> None:
    # Fixed values: changing the order would break resuming of runs.
    values = [permuted(i, 10**12 + 39, 1, 2) for i in range(4)]
    assert values == [747473679603, 810751657695, 497806310149, 696774538134]


def test_each_target_once_an_epoch() -> None:
    tokens = np.arange(8 * 12 + 6, dtype=np.uint16)
    data = training_data(tokens)
    assert data.num_samples == num_samples(len(tokens), 8) == 12
    seen: list[int] = []
    for step in range(1, 4):
        for batch in data.micro_batches(step):
            assert torch.equal(batch.targets, batch.tokens + 1)
            assert torch.equal(batch.positions, torch.arange(8))
            assert batch.tokens.dtype == batch.targets.dtype == torch.int64
            assert (batch.sequence_length, batch.num_sequences, batch.documents) == (8, 1, None)
            seen += batch.targets.tolist()
    assert sorted(seen) == list(range(1, 97))  # 97..101: the tail of less than S + 1 ids


def test_one_token_less_loses_one_sample() -> None:
    assert [num_samples(n, 8) for n in (0, 1, 8, 9, 16, 17)] == [0, 0, 0, 1, 1, 2]


def step_samples(mesh_list: list[Mesh], step: int, **changes: int) -> list[list[int]]:
    """First token of every sample in each micro-batch of a step, over the batch ranks."""
    tokens = np.arange(8 * 21 + 1, dtype=np.uint32)
    by_rank = {
        mesh.batch_rank: training_data(tokens, mesh, **changes).micro_batches(step)
        for mesh in mesh_list
    }
    return [
        batch.tokens.view(batch.num_sequences, -1)[:, 0].tolist()
        for rank in sorted(by_rank)
        for batch in by_rank[rank]
    ]


@pytest.mark.parametrize("step", [1, 2, 3, 9])
def test_samples_belong_to_steps_not_to_ranks(step: int) -> None:
    sizes = {"batch": 8, "micro_batch": 2}
    single = step_samples(meshes(), step, **sizes)
    assert len(single) == 4
    for mesh_sizes in [{"dp": 2}, {"ep": 4}, {"dp": 2, "ep": 2}, {"pp": 2, "ep": 2}, {"pp": 4}]:
        assert step_samples(meshes(**mesh_sizes), step, **sizes) == single
    # The micro-batch size regroups the same samples.
    ungrouped = step_samples(meshes(dp=2), step, batch=8)
    assert flat(single) == flat(ungrouped)
    assert single != step_samples(meshes(), step, **sizes, seed=1)


def test_ranks_of_one_pipeline_read_the_same() -> None:
    tokens = np.arange(8 * 21 + 1)
    pipelines: dict[int, list[list[int]]] = {}
    for mesh in meshes(pp=2, dp=2):
        batches = training_data(tokens, mesh).micro_batches(1)
        pipelines.setdefault(mesh.batch_rank, []).append([int(b.tokens[0]) for b in batches])
    assert len(pipelines) == 2
    assert all(first == second for first, second in pipelines.values())


def test_epochs_follow_each_other_in_another_order() -> None:
    tokens = np.arange(8 * 10 + 1)
    data = training_data(tokens, batch=4)
    read = [int(b.tokens[0]) // 8 for step in range(1, 11) for b in data.micro_batches(step)]
    epochs = [read[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_any_step_can_be_asked_for() -> None:
    tokens = np.arange(8 * 40 + 1)
    data = training_data(tokens)

    def first_tokens(batches: list[Batch]) -> list[int]:
        return [int(batch.tokens[0]) for batch in batches]

    in_order = {step: first_tokens(data.micro_batches(step)) for step in range(1, 6)}
    for step in [4, 1, 5, 5, 2]:
        assert first_tokens(data.micro_batches(step)) == in_order[step]
    assert first_tokens(training_data(tokens).micro_batches(5)) == in_order[5]


def test_too_little_data_and_uneven_batches_are_refused() -> None:
    short = np.arange(8 * 4)
    with pytest.raises(ValueError, match=r"32 tokens has 3 samples .* fewer than the batch of 4"):
        training_data(short)
    training_data(np.arange(8 * 4 + 1))
    assert "0 samples" in too_few_samples(0, 8, 4)
    for kind in ("training", "held out"):
        with pytest.raises(AssertionError, match="mesh_violations refuses such a batch"):
            if kind == "training":
                training_data(np.arange(1000), meshes(ep=2, dp=2)[0], batch=6)
            else:
                held_out(np.arange(1000), meshes(ep=2, dp=2)[0], batch=6)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    tokens = np.zeros(8 * 40 + 1, dtype=np.uint16)
    tokens[77] = 100
    data = training_data(tokens, vocab_size=100, batch=40)
    with pytest.raises(ValueError, match="id 100, outside vocab_size 100"):
        data.micro_batches(1)
    with pytest.raises(ValueError, match="id 100, outside vocab_size 100"):
        held_out(tokens, Mesh.single(), vocab_size=100)
    training_data(tokens, vocab_size=101, batch=40).micro_batches(1)


def held_out(tokens: np.ndarray, mesh: Mesh, **changes: int) -> list[list[Batch]]:
    max_samples = changes.pop("max_samples", len(tokens))
    train, vocab_size = sizes(8, changes)
    return list(
        held_out_batches(
            tokens, mesh, train, vocab_size=vocab_size, device=CPU, max_samples=max_samples
        )
    )


@pytest.mark.parametrize("num_tokens", [2, 9, 10, 11 * 8 + 1, 16 * 8 + 1, 16 * 8 + 2, 150])
@pytest.mark.parametrize("sizes", [{}, {"dp": 2}, {"dp": 2, "ep": 2}, {"pp": 2, "ep": 2}])
def test_held_out_targets_once_and_all_ranks_stop_together(
    num_tokens: int, sizes: dict[str, int]
) -> None:
    tokens = np.arange(num_tokens, dtype=np.uint16)
    mesh_list = meshes(**sizes)
    calls = {mesh.batch_rank: held_out(tokens, mesh, micro_batch=2) for mesh in mesh_list}
    num_calls = -(-(num_tokens - 1) // (8 * 8))
    seen = []
    for batches_of_calls in calls.values():
        assert [len(batches) for batches in batches_of_calls] == [4 // len(calls)] * num_calls
        for batch in flat(batches_of_calls):
            assert (batch.tokens.numel(), batch.sequence_length) == (16, 8)
            assert batch.tokens.min() >= 0
            counted = batch.targets != IGNORED_TARGET
            assert torch.equal(batch.targets[counted], batch.tokens[counted] + 1)
            seen += batch.targets[counted].tolist()
    assert sorted(seen) == list(range(1, num_tokens))


def test_limited_held_out_data_is_spread_evenly() -> None:
    tokens = np.arange(8 * 100 + 1)
    batches = flat(held_out(tokens, Mesh.single(), max_samples=10))
    real = [batch for batch in batches if (batch.targets != IGNORED_TARGET).any()]
    assert [int(batch.tokens[0]) // 8 for batch in real] == list(range(0, 100, 10))
    assert len(batches) == 16


def test_cp_ranks_share_the_samples_of_a_step_and_cut_them_after_the_shift() -> None:
    tokens = np.arange(2000, dtype=np.uint32)
    (whole,) = meshes()
    for step in (1, 3):
        wanted = training_data(tokens, whole, sequence_length=12).micro_batches(step)
        seen: list[list[tuple[int, int, int]]] = [[] for _ in wanted]
        for mesh in meshes(dp=2, cp=3):
            first = mesh.batch_rank * len(wanted) // 2
            shards = training_data(tokens, mesh, sequence_length=12).micro_batches(step)
            assert len(shards) == len(wanted) // 2
            for number, shard in enumerate(shards):
                assert shard.sequence_length == 4
                assert shard.targets.tolist() == (shard.tokens + 1).tolist()
                facts = zip(*(x.tolist() for x in (shard.tokens, shard.positions)), strict=True)
                seen[first + number] += [(*fact, mesh.cp.rank) for fact in facts]
        for batch, facts in zip(wanted, seen, strict=True):
            assert [token for token, _, _ in sorted(facts)] == batch.tokens.tolist()
            for _, position, rank in facts:
                assert min(position // 2, 5 - position // 2) == rank


def test_held_out_targets_are_counted_once_over_cp() -> None:
    tokens = np.arange(60, dtype=np.uint32)
    counted: list[int] = []
    for mesh in meshes(cp=2):
        for batches in held_out(tokens, mesh, batch=2):
            for batch in batches:
                counted += batch.targets[batch.targets != IGNORED_TARGET].tolist()
    assert sorted(counted) == list(range(1, 60))

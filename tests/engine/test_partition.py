"""Layers per chunk: the optimum by brute force, conservation, and the table that is printed."""

import random
from itertools import combinations, pairwise

import pytest
from pith_engine.partition import describe_partition, layers_per_chunk, partition_violations


def quality(layers, layer_costs, head) -> tuple[float, float]:
    """(most loaded rank, sum of squared chunk costs), from first principles."""
    costs = list(layer_costs)
    costs[-1] += head
    ends = [sum(layers[: n + 1]) for n in range(len(layers))]
    sums = [sum(costs[a:b]) for a, b in pairwise([0, *ends])]
    ranks = [sums[r] + sums[-1 - r] for r in range(len(sums) // 2)]
    return max(ranks), sum(s * s for s in sums)


def best_by_trying(layer_costs, num_chunks, head) -> tuple[float, float]:
    num_layers = len(layer_costs)
    splits = (
        [b - a for a, b in pairwise((0, *cuts, num_layers))]
        for cuts in combinations(range(1, num_layers), num_chunks - 1)
    )
    found = [quality(layers, layer_costs, head) for layers in splits]
    most = min(rank for rank, _ in found)
    return most, min(squares for rank, squares in found if rank <= most * (1 + 1e-9))


def test_optimum_of_random_costs():
    generator = random.Random(0)
    for _ in range(120):
        num_chunks = generator.choice([2, 4, 6])
        costs = tuple(
            generator.choice([1.0, 1.0, 2.0, 0.0, 5.0, generator.random()])
            for _ in range(generator.randint(num_chunks, 11))
        )
        head = generator.random() * 6
        layers = layers_per_chunk(costs, num_chunks // 2, head)
        assert len(layers) == num_chunks and min(layers) >= 1 and sum(layers) == len(costs)
        expected = best_by_trying(costs, num_chunks, head)
        assert quality(layers, costs, head) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("num_layers", "pp", "head", "expected"),
    [
        (8, 1, 0.0, (4, 4)),
        (8, 2, 0.0, (2, 2, 2, 2)),
        (48, 4, 0.0, (6,) * 8),
        (8, 2, 4.0, (1, 3, 3, 1)),
        (4, 2, 9.0, (1, 1, 1, 1)),
        (94, 8, 2.0, (*(6,) * 15, 4)),
    ],
)
def test_known_partitions(num_layers, pp, head, expected):
    assert layers_per_chunk((1.0,) * num_layers, pp, head) == expected


def test_units_do_not_matter():
    costs = (3.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 2.0)
    assert layers_per_chunk(costs, 2, 2.5) == layers_per_chunk(
        tuple(c * 1e12 for c in costs), 2, 2.5e12
    )


def test_all_costs_zero_still_holds_every_layer():
    assert sum(layers_per_chunk((0.0,) * 7, 2, 0.0)) == 7


def test_large_models_are_split_at_every_pp():
    for pp in (1, 2, 4, 8, 16):
        layers = layers_per_chunk((0.4, *(1.0,) * 60), pp, 2.3)
        assert sum(layers) == 61 and min(layers) >= 1 and len(layers) == 2 * pp


def test_too_few_layers_end_in_an_assertion():
    """`mesh_violations` refuses them before; alone, the search must not return a short answer."""
    with pytest.raises(AssertionError, match="refuses 8 chunks of 7 layers"):
        layers_per_chunk((1.0,) * 7, 4, 1.0)


@pytest.mark.parametrize("layers", [(2, 2, 2, 1), (4, 0, 3, 1), (3, 3, 2), (), (9, -1)])
def test_a_partition_that_loses_a_layer_is_refused(layers):
    (violation,) = partition_violations(layers, 2, 8)
    assert "4 numbers (2 * pp) from 1 that add up to 8 layers" in violation


def test_table():
    assert partition_violations((1, 3, 3, 1), 2, 8) == []
    table = describe_partition((1, 3, 3, 1), (1.5, *(1.0,) * 7), 4.0)
    assert table.splitlines() == [
        "rank  chunk  layers     cost share  |  chunk  layers     cost share  |  rank share",
        "   0      0  0-0             12.0%  |      3  7-7             40.0%  |       52.0%",
        "   1      1  1-3             24.0%  |      2  4-6             24.0%  |       48.0%",
        "most loaded rank: 1.040 times the mean",
    ]

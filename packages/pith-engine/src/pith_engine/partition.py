"""How many layers each pipeline chunk holds, by cost.

Rank 0, which holds the first and the last chunk, also carries the head, which for a large
vocabulary weighs several layers. The pipeline is limited by

    minimise   max over ranks r of  cost(chunk r) + cost(chunk 2 pp - 1 - r)
    then       sum over chunks of   cost(chunk) ** 2

where the second keeps a rank's two chunks alike, for their overlap. The first is found by bisection
over a limit, tested by filling ranks from both ends of the model inwards; near the optimum that
leaves few states, and the second is exact over them.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from pith_engine.schedule import chunk_rank
from pith_engine.violations import raise_violations

PRECISION = 1e-9
"""Relative difference of costs that counts as none."""


@dataclass(frozen=True, kw_only=True)
class ChunkCost:
    """One chunk of a partition."""

    chunk: int
    """Its number."""
    rank: int
    """The pp rank that holds it."""
    first_layer: int
    """Global number of its first layer."""
    num_layers: int
    """Layers it holds."""
    cost: float
    """Of these, and of the head in the last chunk."""


@cache
def layers_per_chunk(
    layer_costs: tuple[float, ...], num_chunks: int, head_cost: float
) -> tuple[int, ...]:
    """Layers of `2 * pp` chunks that load the fullest rank least; costs in any one unit."""
    if num_chunks < 2 or num_chunks % 2:
        raise ValueError(f"num_chunks is {num_chunks}; allowed are 2 * pp with pp >= 1")
    if len(layer_costs) < num_chunks:
        raise ValueError(
            f"{len(layer_costs)} layers cannot fill num_chunks = {num_chunks}; "
            f"use pp of at most {len(layer_costs) // 2}"
        )
    if (least := min(*layer_costs, head_cost)) < 0:
        raise ValueError(f"costs must not be negative: {least}")
    costs = [*layer_costs]
    costs[-1] += head_cost
    sums = (0.0, *accumulate(costs))
    pp = num_chunks // 2
    best = _fill(sums, pp, 2 * sums[-1], evenly=False)  # no limit, rounding included
    assert best is not None, "with as many layers as chunks something always fits"
    low, high = sums[-1] / pp, _most_loaded_rank(sums, best)
    while high - low > PRECISION * sums[-1]:
        middle = (low + high) / 2
        found = _fill(sums, pp, middle, evenly=False)
        low, high = (middle, high) if found is None else (low, _most_loaded_rank(sums, found))
    layers = _fill(sums, pp, high + PRECISION * sums[-1], evenly=True)
    assert layers is not None, "the limit is that of a partition found"
    chunk_costs(layers, layer_costs, head_cost)  # proves that no layer is lost
    return layers


def chunk_costs(
    layers: tuple[int, ...], layer_costs: tuple[float, ...], head_cost: float
) -> tuple[ChunkCost, ...]:
    """The cost of every chunk; ValueError for `partition_violations`."""
    pp = max(1, (len(layers) + 1) // 2)
    raise_violations(partition_violations(layers, pp, len(layer_costs)), "partition")
    chunks = []
    for chunk, (num_layers, last) in enumerate(zip(layers, accumulate(layers), strict=True)):
        first, rank = last - num_layers, chunk_rank(chunk, pp)
        cost = sum(layer_costs[first:last]) + head_cost * (chunk == len(layers) - 1)
        chunks.append(
            ChunkCost(chunk=chunk, rank=rank, first_layer=first, num_layers=num_layers, cost=cost)
        )
    return tuple(chunks)


def partition_violations(layers: tuple[int, ...], pp: int, num_layers: int) -> list[str]:
    """A line unless `2 * pp` chunks of these `layers` hold every layer once."""
    if len(layers) == 2 * pp and min(layers) >= 1 and sum(layers) == num_layers:
        return []
    return [
        f"layers_per_chunk is {layers}: allowed are {2 * pp} numbers (2 * pp) from 1 that add up "
        f"to {num_layers} layers; --layers-per-chunk None balances by cost"
    ]


def describe_partition(chunks: tuple[ChunkCost, ...]) -> str:
    """A table of every rank's chunks and their costs, and the imbalance."""
    total = sum(chunk.cost for chunk in chunks)
    lines = ["rank  chunk  layers     cost share  |  chunk  layers     cost share  |  rank share"]
    pairs = [(first, chunks[-1 - first.chunk]) for first in chunks[: len(chunks) // 2]]
    for pair in pairs:
        cells = [f"{pair[0].rank:4}"]
        for chunk in pair:
            span = f"{chunk.first_layer}-{chunk.first_layer + chunk.num_layers - 1}"
            cells.append(f"{chunk.chunk:5}  {span:<9}  {chunk.cost / total:10.1%}  |")
        lines.append("  ".join([*cells, f"{sum(c.cost for c in pair) / total:10.1%}"]))
    worst = max(sum(c.cost for c in pair) for pair in pairs) * len(pairs) / total
    lines.append(f"most loaded rank: {worst:.3f} times the mean")
    return "\n".join(lines)


def _most_loaded_rank(sums: tuple[float, ...], layers: tuple[int, ...]) -> float:
    costs = [sums[end] - sums[start] for start, end in pairwise((0, *accumulate(layers)))]
    return max(first + last for first, last in zip(costs, reversed(costs), strict=True))


def _fill(
    sums: tuple[float, ...], pp: int, limit: float, *, evenly: bool
) -> tuple[int, ...] | None:
    """Layers per chunk with no rank above `limit`, the first found or the most even, or None.

    `sums[n]` is the cost of the first n layers.
    """

    @cache
    def place(rank: int, start: int, end: int) -> tuple[float, tuple[int, ...]] | None:
        """(sum of squares, layers) of ranks from `rank` on with layers `start .. end - 1`."""
        if rank == pp:
            return (0.0, ()) if start == end else None
        inner = pp - 1 - rank
        best = None
        most = end - start - 2 * inner  # every chunk inside needs a layer
        for first in range(min(most, bisect_right(sums, sums[start] + limit) - start) - 1, 0, -1):
            cost = sums[start + first] - sums[start]
            largest = min(most - first, end - bisect_left(sums, sums[end] - (limit - cost)))
            for second in range(largest, 0, -1):
                if sums[end - second] - sums[start + first] > inner * limit:
                    break  # the ranks inside cannot carry what is left, nor more
                rest = place(rank + 1, start + first, end - second)
                if rest is None:
                    continue
                squares = cost**2 + (sums[end] - sums[end - second]) ** 2 + rest[0]
                if best is None or squares < best[0]:
                    best = squares, (first, *rest[1], second)
                if not evenly:
                    return best
        return best

    found = place(0, 0, len(sums) - 1)
    return None if found is None else found[1]

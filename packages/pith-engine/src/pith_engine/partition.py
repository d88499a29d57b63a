"""How many layers each pipeline chunk holds, by cost.

Rank 0, with the first and the last chunk, also has the head, which for a large vocabulary weighs
several layers. The pipeline is limited by

    minimise   max over ranks r of  cost(chunk r) + cost(chunk 2 pp - 1 - r)
    then       sum over chunks of   cost(chunk) ** 2

where the second keeps a rank's two chunks alike, for their overlap. The first is found by bisection
over a limit, tested by filling ranks from both ends of the model inwards; near the optimum that
leaves few states, and the second is exact over them.
"""

from bisect import bisect_left, bisect_right
from functools import cache
from itertools import accumulate, pairwise

PRECISION = 1e-9
"""Relative difference of costs that counts as none."""


@cache
def layers_per_chunk(layer_costs: tuple[float, ...], pp: int, head_cost: float) -> tuple[int, ...]:
    """Layers of `2 * pp` chunks that load the fullest rank least; costs from 0, in any unit."""
    sums = _cost_sums(layer_costs, head_cost)
    total = sums[-1]
    low, high = total / pp, 2 * total
    while high - low > PRECISION * total:
        middle = (low + high) / 2
        fits = _fill(sums, pp, middle, evenly=False)
        low, high = (low, middle) if fits else (middle, high)
    layers = _fill(sums, pp, high + PRECISION * total, evenly=True)
    assert layers, f"mesh_violations refuses {2 * pp} chunks of {len(layer_costs)} layers"
    assert sum(layers) == len(layer_costs), "no layer is lost"
    return layers


def partition_violations(layers: tuple[int, ...], pp: int, num_layers: int) -> list[str]:
    """A line unless `2 * pp` chunks of these `layers` hold every layer once."""
    if len(layers) == 2 * pp and min(layers) >= 1 and sum(layers) == num_layers:
        return []
    return [
        f"layers_per_chunk is {layers}: allowed are {2 * pp} numbers (2 * pp) from 1 that add up "
        f"to {num_layers} layers; --layers-per-chunk None balances by cost"
    ]


def describe_partition(
    layers: tuple[int, ...], layer_costs: tuple[float, ...], head_cost: float
) -> str:
    """A table of every rank's chunks and costs, and the imbalance."""
    sums, ends, pp = _cost_sums(layer_costs, head_cost), (0, *accumulate(layers)), len(layers) // 2
    shares = [(sums[end] - sums[first]) / sums[-1] for first, end in pairwise(ends)]
    loads = [shares[rank] + shares[-1 - rank] for rank in range(pp)]
    lines = ["rank  chunk  layers     cost share  |  chunk  layers     cost share  |  rank share"]
    for rank, load in enumerate(loads):
        line = f"{rank:4}  "
        for chunk in (rank, 2 * pp - 1 - rank):
            span = f"{ends[chunk]}-{ends[chunk + 1] - 1}"
            line += f"{chunk:5}  {span:<9}  {shares[chunk]:10.1%}  |  "
        lines.append(f"{line}{load:10.1%}")
    return "\n".join([*lines, f"most loaded rank: {max(loads) * pp:.3f} times the mean"])


def _cost_sums(layer_costs: tuple[float, ...], head_cost: float) -> tuple[float, ...]:
    """Item n is the cost of the first n layers; the last carries the head."""
    return 0.0, *accumulate((*layer_costs[:-1], layer_costs[-1] + head_cost))


def _fill(
    sums: tuple[float, ...], pp: int, limit: float, *, evenly: bool
) -> tuple[int, ...] | None:
    """Layers per chunk with no rank above `limit`, the first found or the most even, or None."""

    @cache
    def place(rank: int, start: int, end: int) -> tuple[float, tuple[int, ...]] | None:
        """Sum of squares and layers of ranks from `rank` on with layers `start .. end - 1`."""
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
                if rest := place(rank + 1, start + first, end - second):
                    squares = cost**2 + (sums[end] - sums[end - second]) ** 2 + rest[0]
                    if best is None or squares < best[0]:
                        best = squares, (first, *rest[1], second)
                    if not evenly:
                        return best
        return best

    found = place(0, 0, len(sums) - 1)
    return found and found[1]

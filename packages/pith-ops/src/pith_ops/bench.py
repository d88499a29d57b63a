"""Check operators against their references, then time them beside what else could do the job.

    python -m pith_ops.bench [OPERATOR ...] [--device cuda] [--json FILE]

1. Gate: outputs, and gradients for random upstream gradients, are compared with a reference in the
   accumulation dtype. What fails gets no time, and the exit code is 1.
2. Time: medians of a forward without grad and of a forward with its backward.
3. Rate: operations or bytes that the mathematics needs over the time; recomputation earns nothing
   (a product's backward is two products, attention's 2.5 forwards).

The trap: an error of NaN is neither above nor below a tolerance, so it counts as infinite.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum, auto
from functools import partial
from pathlib import Path
from statistics import median
from timeit import repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pith_ops.attention import AttentionBackend, attention, attention_violations
from pith_ops.cross_entropy import linear_cross_entropy
from pith_ops.device import accumulation_dtype
from pith_ops.dispatch import count_dispatch, plan_dispatch, plan_experts, weighted_partial_sums
from pith_ops.grouped_linear import Groups, grouped_linear, grouped_linear_reference
from pith_ops.rms_norm import rms_norm
from pith_ops.rope import apply_rope, rope_frequencies, rope_table
from pith_ops.routing import score_topk
from pith_ops.swiglu import swiglu, swiglu_reference

GATE_TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Relative error by norm; integers must be equal."""

TensorFunction = Callable[..., Tensor | tuple[Tensor, ...]]

BenchRow = dict[str, Any]
"""What the gate found (`error` is the largest, relative) and, if it passed, times and rates."""


class Operator(StrEnum):
    """What can be benchmarked."""

    ATTENTION = auto()
    ROPE = auto()
    RMS_NORM = auto()
    SWIGLU = auto()
    GROUPED_LINEAR = auto()
    ROUTING = auto()
    DISPATCH = auto()
    CROSS_ENTROPY = auto()


def measure(
    operator: Operator,
    operands: Sequence[Tensor],
    work: Sequence[float],
    names: Sequence[str],
    *runs: TensorFunction,
    flops: float = 0.0,
) -> list[BenchRow]:
    """Compare `runs` with the last of them in the accumulation dtype; time those that agree.

    `work` of a forward, and with its backward, in multiples of `flops` or of the bytes of the first
    operand.
    """
    unit, base = ("TFLOP/s", flops) if flops else ("TB/s", operands[0].nbytes)
    shape, is_cuda = " ".join("x".join(map(str, x.shape)) for x in operands), operands[0].is_cuda
    wide = [x.to(accumulation_dtype(x.dtype)) if x.is_floating_point() else x for x in operands]
    wide = [x.detach().requires_grad_(x.requires_grad) for x in wide]
    wanted, rows = _results(runs[-1], wide), []
    for name, run in zip(names, runs, strict=True):
        got, error = _results(run, operands), math.inf
        if [x.shape for x in got] == [x.shape for x in wanted]:
            error = max(map(_relative_error, got, wanted))
        passed = error <= GATE_TOLERANCES.get(operands[0].dtype, 0.0)
        row: BenchRow = {"operator": operator, "implementation": name, "shape": shape}
        row |= {"error": error, "passed": passed, "unit": unit}
        rows.append(row)
        if not passed:
            continue
        with torch.no_grad():
            seconds = {"forward": _seconds(partial(run, *operands), is_cuda)}
        if num_leaves := sum(x.requires_grad for x in operands):
            upstream = [x.detach() for x in got[:-num_leaves]]
            seconds["total"] = _seconds(partial(_results, run, operands, upstream), is_cuda)
        for (what, time), factor in zip(seconds.items(), work, strict=True):
            row |= {f"{what}_ms": time * 1e3, f"{what}_rate": factor * base / time / 1e12}
    return rows


def run_benchmarks(
    operators: Sequence[Operator], device: torch.device, dtype: torch.dtype
) -> list[BenchRow]:
    """Gate and time `operators`, on the same operands in every run."""
    with torch.random.fork_rng():
        return [row for name in operators for row in _bench_operator(name, device, dtype)]


def bench_table(rows: Sequence[BenchRow]) -> str:
    """The rows as aligned text."""
    columns = "{:15} {:26} {:>8}   {:28} {}"
    table = columns.format("operator", "implementation", "error", "forward", "with backward")
    for row in rows:
        figures = [
            f"{row[f'{what}_ms']:.3f} ms {row[f'{what}_rate']:.4g} {row['unit']}"
            for what in ("forward", "total")
            if f"{what}_ms" in row
        ]
        cells = (row["operator"], row["implementation"], f"{row['error']:.1e}")
        table += "\n" + columns.format(*cells, *figures or ["GATE FAILED"], "").rstrip()
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns 1 if a gate failed."""
    parser = argparse.ArgumentParser(prog="python -m pith_ops.bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "operators", nargs="*", metavar="OPERATOR", help=f"of {', '.join(Operator)}"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    options = parser.parse_args(arguments)
    if unknown := set(options.operators) - set(Operator):
        parser.error(f"unknown operator {', '.join(unknown)}; choose from {', '.join(Operator)}")
    device, name, dtype = torch.device(options.device), "cpu", torch.float32
    if device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device cuda: torch finds no CUDA device here; use --device cpu")
        name, dtype = torch.cuda.get_device_name(device), torch.bfloat16
    rows = run_benchmarks([Operator(n) for n in options.operators or Operator], device, dtype)
    environment = {"device": name, "torch": torch.__version__, "dtype": str(dtype)}
    print(", ".join(f"{key} {value}" for key, value in environment.items()))
    print(bench_table(rows))
    if options.json:
        content = {"environment": environment, "rows": rows}
        options.json.write_text(json.dumps(content, indent=1))
    return 0 if all(row["passed"] for row in rows) else 1


def _bench_operator(operator: Operator, device: torch.device, dtype: torch.dtype) -> list[BenchRow]:
    """On a GPU with the sizes of a layer of Qwen3-30B-A3B."""
    torch.manual_seed(0)
    is_cuda, wide = device.type == "cuda", accumulation_dtype(dtype)
    tokens, sequence, hidden = (8192, 4096, 2048) if is_cuda else (256, 128, 64)
    heads, kv_heads, head_dim = (32, 4, 128) if is_cuda else (4, 2, 16)
    experts, top_k, width, words = (128, 8, 768, 151_936) if is_cuda else (32, 2, 48, 1000)

    def draw(*size: int, std: float = 1.0) -> Tensor:
        return (torch.randn(size, device=device) * std).to(dtype).requires_grad_()

    def measure_product(name: str, x: Tensor, weight: Tensor, *runs: TensorFunction):
        flops = 2.0 * len(x) * weight.shape[-2:].numel()
        names = ("pith_ops", name)
        return measure(operator, (x, weight), (1, 3), names, *runs, flops=flops)

    x = draw(tokens, hidden)
    # Not in bf16, where they tie: torch's topk breaks ties its own way.
    logits = torch.randn(tokens, experts, device=device, dtype=wide, requires_grad=True)
    match operator:
        case Operator.ATTENTION:
            batch, all_heads = tokens // sequence, (heads, kv_heads, kv_heads)
            operands = [draw(batch, sequence, num_heads, head_dim) for num_heads in all_heads]
            names, runs = ["torch SDPA"], []
            for backend in AttentionBackend:
                if not attention_violations(backend, device, dtype, head_dim, head_dim):
                    names.append(f"pith_ops {backend.value}")
                    runs.append(partial(_attend, backend=backend))
            # A causal mask halves both products.
            flops = 2.0 * tokens * sequence * heads * head_dim
            return measure(
                operator, operands, (1, 3.5), names, _torch_attention, *runs, flops=flops
            )
        case Operator.ROPE:
            frequencies = rope_frequencies(head_dim, 1e6, dtype=wide, device=device)
            table = rope_table(torch.arange(tokens, device=device) % sequence, frequencies)
            operands, names = (draw(tokens, heads, head_dim), *table), ("pith_ops", "torch complex")
            return measure(operator, operands, (2, 4), names, apply_rope, _complex_rotation)
        case Operator.RMS_NORM:
            operands, names = (x, draw(hidden)), ("pith_ops", "torch rms_norm")
            ours = partial(rms_norm, eps=1e-6)
            return measure(operator, operands, (2, 5), names, ours, _torch_rms_norm)
        case Operator.SWIGLU:
            operands, names = [draw(tokens * top_k, 2 * width)], ("pith_ops", "torch autograd")
            return measure(operator, operands, (1.5, 4), names, swiglu, swiglu_reference)
        case Operator.GROUPED_LINEAR:
            rows, num_groups = draw(tokens * top_k, hidden), experts // 8
            weight = draw(num_groups, 2 * width, hidden, std=hidden**-0.5)
            # Expert 1 has the rows of experts 0 and 1.
            sizes = [len(rows) // num_groups] * num_groups
            sizes[:2] = [0, len(rows) - sum(sizes[2:])]
            groups = Groups.from_sizes(sizes, device)
            ours = partial(grouped_linear, groups=groups)
            loop = partial(grouped_linear_reference, groups=groups)
            return measure_product("torch loop over groups", rows, weight, ours, loop)
        case Operator.ROUTING:
            names = ("pith_ops", "torch softmax, topk")
            theirs = partial(_torch_topk, top_k=top_k)
            return measure(
                operator, [logits], (2, 4), names, lambda z: score_topk(z, top_k, True)[1:], theirs
            )
        case Operator.DISPATCH:
            return _bench_dispatch(draw(tokens * top_k, hidden).detach(), logits.detach(), top_k)
        case Operator.CROSS_ENTROPY:
            weight = draw(words, hidden, std=hidden**-0.5)
            targets = torch.randint(words, (tokens,), device=device)
            targets[::100] = -100
            ours = partial(linear_cross_entropy, targets=targets)
            theirs = partial(_full_logits, targets=targets)
            return measure_product("torch full logits", x, weight, ours, theirs)


def _bench_dispatch(outputs: Tensor, logits: Tensor, top_k: int) -> list[BenchRow]:
    num_ranks, (num_tokens, num_experts) = 8, logits.shape
    ids, weights, _ = score_topk(logits, top_k, True)
    order = ids.flatten().argsort(stable=True)
    counts = count_dispatch(ids, num_experts, num_ranks)
    num_rows = int(counts[:, 0].sum())
    plan = plan_experts(ids, counts[:, 1:].flatten().tolist())

    def plan_send(ids: Tensor) -> Tensor:
        count_dispatch(ids, num_experts, num_ranks)
        return plan_dispatch(ids, num_experts, num_ranks, num_rows).send_tokens.long()

    def plan_by_loop(ids: Tensor) -> Tensor:
        owners = ids // (num_experts // num_ranks)
        return torch.cat([(owners == r).any(1).nonzero()[:, 0] for r in range(num_ranks)])

    def index_add(outputs: Tensor, weights: Tensor) -> Tensor:
        weighted = outputs.to(weights.dtype) * weights.flatten()[order][:, None]
        total = weights.new_zeros(num_tokens, outputs.shape[1])
        return total.index_add_(0, order // top_k, weighted).to(outputs.dtype)

    names = ("pith_ops plan, 8 ranks", "torch plan by loop")
    rows = measure(Operator.DISPATCH, [ids], [1], names, plan_send, plan_by_loop)
    operands, names = [outputs, weights], ("pith_ops combine", "torch index_add")
    combine = partial(weighted_partial_sums, plan=plan)
    work = [1 + 1 / top_k]
    return rows + measure(Operator.DISPATCH, operands, work, names, combine, index_add)


def _attend(q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend) -> Tensor:
    return attention(q, k, v, backend=backend)[0]


def _torch_attention(*operands: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in operands)
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def _complex_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.complex(cos, sin)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)


def _torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, 1e-6)


def _torch_topk(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(1)
    weights = scores.topk(top_k).values
    return weights / weights.sum(1, keepdim=True), scores


def _full_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ weight.t()).to(accumulation_dtype(hidden.dtype))
    return functional.cross_entropy(logits, targets, reduction="sum")


def _results(
    run: TensorFunction, operands: Sequence[Tensor], upstream: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Outputs, and gradients if any, by default for random `upstream` gradients."""
    outputs = run(*operands)
    outputs = [outputs] if isinstance(outputs, Tensor) else [*outputs]
    leaves = [x for x in operands if x.requires_grad]
    if not leaves:
        return outputs
    if not upstream:
        torch.manual_seed(1)
        # Values that every dtype represents alike.
        upstream = [torch.randn_like(x, dtype=torch.bfloat16).to(x.dtype) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]


def _relative_error(got: Tensor, wanted: Tensor) -> float:
    if not wanted.is_floating_point():
        return 0.0 if torch.equal(got, wanted) else math.inf
    error = ((got.to(wanted.dtype) - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()
    return error if math.isfinite(error) else math.inf


def _seconds(call: Callable[[], object], is_cuda: bool) -> float:
    """Median of 20 calls on CUDA, of 5 elsewhere, after two warm-up calls."""
    if not is_cuda:
        return median(repeat(call, number=1, repeat=7)[2:])
    times = []
    for _ in range(22):
        # Events count launch gaps where the host is the bottleneck.
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times[2:])


if __name__ == "__main__":
    sys.exit(main())

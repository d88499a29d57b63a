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
from pith_ops.linear import linear
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
    LINEAR = auto()
    GROUPED_LINEAR = auto()
    ROUTING = auto()
    DISPATCH = auto()
    CROSS_ENTROPY = auto()


class Gate:
    """Operands and what `reference` makes of them in the accumulation dtype.

    A forward's work is `forward` times `flops` or the bytes of the first operand, with its backward
    `total` times.
    """

    def __init__(
        self,
        operator: Operator,
        reference: TensorFunction,
        operands: Sequence[Tensor],
        forward: float,
        total: float = 0.0,
        *,
        flops: float = 0.0,
    ):
        self.operator, self.reference, self.operands = operator, reference, operands
        self.unit, work = "TFLOP/s" if flops else "TB/s", (flops or operands[0].nbytes) / 1e12
        self.forward_work, self.total_work = forward * work, total * work
        wide = [x.to(accumulation_dtype(x.dtype)) if x.is_floating_point() else x for x in operands]
        wide = [x.detach().requires_grad_(x.requires_grad) for x in wide]
        self.wanted = _results(reference, wide)

    def measure_both(self, ours: TensorFunction, competitor: str) -> list[BenchRow]:
        """Ours, then the competitor, whose code is the reference."""
        return [self.measure("pith_ops", ours), self.measure(competitor, self.reference)]

    def measure(self, implementation: str, run: TensorFunction) -> BenchRow:
        """Compare `run` with the reference and time it if they agree."""
        operands, error = self.operands, math.inf
        got = _results(run, operands)
        if [x.shape for x in got] == [x.shape for x in self.wanted]:
            error = max(map(_relative_error, got, self.wanted))
        row: BenchRow = {
            "operator": self.operator,
            "implementation": implementation,
            "shape": " ".join("x".join(map(str, x.shape)) for x in operands),
            "error": error,
            "passed": error <= GATE_TOLERANCES.get(operands[0].dtype, 0.0),
            "unit": self.unit,
        }
        if row["passed"]:
            with torch.no_grad():
                row |= self._timed("forward", lambda: run(*operands), self.forward_work)
            if num_leaves := sum(x.requires_grad for x in operands):
                upstream = [x.detach() for x in got[:-num_leaves]]
                both = partial(_results, run, operands, upstream)
                row |= self._timed("total", both, self.total_work)
        return row

    def _timed(self, what: str, call: Callable[[], object], work: float) -> dict[str, float]:
        """The median of 20 calls on CUDA, of 5 elsewhere, after two warm-up calls."""
        times = []
        if self.operands[0].is_cuda:
            for _ in range(22):
                # Events count launch gaps where the host is the bottleneck.
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) / 1e3)
        seconds = median((times or repeat(call, number=1, repeat=7))[2:])
        return {f"{what}_ms": seconds * 1e3, f"{what}_rate": work / seconds}


def run_benchmarks(
    operators: Sequence[Operator], device: torch.device, dtype: torch.dtype
) -> list[BenchRow]:
    """Gate and time `operators`, on the same operands in every run."""
    rows = []
    for operator in operators:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            rows += _bench_operator(operator, device, dtype)
    return rows


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
    parser.add_argument("operators", nargs="*", choices=[str(operator) for operator in Operator])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    options = parser.parse_args(arguments)
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
    is_cuda, wide = device.type == "cuda", accumulation_dtype(dtype)
    tokens, sequence, hidden = (8192, 4096, 2048) if is_cuda else (256, 128, 64)
    heads, kv_heads, head_dim = (32, 4, 128) if is_cuda else (4, 2, 16)
    experts, top_k, width, words = (128, 8, 768, 151_936) if is_cuda else (32, 2, 48, 1000)

    def draw(*size: int, std: float = 1.0) -> Tensor:
        return (torch.randn(size, device=device) * std).to(dtype).requires_grad_()

    def product_gate(reference: TensorFunction, x: Tensor, *size: int) -> Gate:
        flops = 2.0 * len(x) * size[-2] * size[-1]
        operands = x, draw(*size, std=size[-1] ** -0.5)
        return Gate(operator, reference, operands, 1, 3, flops=flops)

    x = draw(tokens, hidden)
    # Not in bf16, where they tie: torch's topk breaks ties its own way.
    logits = torch.randn(tokens, experts, device=device, dtype=wide, requires_grad=True)
    match operator:
        case Operator.ATTENTION:
            batch, all_heads = tokens // sequence, (heads, kv_heads, kv_heads)
            operands = [draw(batch, sequence, num_heads, head_dim) for num_heads in all_heads]
            # A causal mask halves both products.
            flops = 2.0 * tokens * sequence * heads * head_dim
            reference = partial(_attend, backend=AttentionBackend.REFERENCE)
            gate = Gate(operator, reference, operands, 1, 3.5, flops=flops)
            rows = [
                gate.measure(f"pith_ops {backend.value}", partial(_attend, backend=backend))
                for backend in AttentionBackend
                if not attention_violations(backend, device, dtype, head_dim, head_dim)
            ]
            return [*rows, gate.measure("torch SDPA", _torch_attention)]
        case Operator.ROPE:
            x = draw(tokens, heads, head_dim)
            frequencies = rope_frequencies(head_dim, 1e6, dtype=wide, device=device)
            table = rope_table(torch.arange(tokens, device=device) % sequence, frequencies)
            gate = Gate(operator, _complex_rotation, (x, *table), 2, 4)
            return gate.measure_both(apply_rope, "torch complex")
        case Operator.RMS_NORM:
            gate = Gate(operator, _torch_rms_norm, (x, draw(hidden)), 2, 5)
            return gate.measure_both(partial(rms_norm, eps=1e-6), "torch rms_norm")
        case Operator.SWIGLU:
            gate = Gate(operator, swiglu_reference, (draw(tokens * top_k, 2 * width),), 1.5, 4)
            return gate.measure_both(swiglu, "torch autograd")
        case Operator.LINEAR:
            gate = product_gate(functional.linear, x, heads * head_dim, hidden)
            return gate.measure_both(linear, "torch linear")
        case Operator.GROUPED_LINEAR:
            rows, num_groups = draw(tokens * top_k, hidden), experts // 8
            # Expert 1 has the rows of experts 0 and 1.
            sizes = [len(rows) // num_groups] * num_groups
            sizes[:2] = [0, len(rows) - sum(sizes[2:])]
            groups = Groups.from_sizes(sizes, device)
            loop = partial(grouped_linear_reference, groups=groups)
            gate = product_gate(loop, rows, num_groups, 2 * width, hidden)
            return gate.measure_both(partial(grouped_linear, groups=groups), "torch loop")
        case Operator.ROUTING:
            gate = Gate(operator, partial(_torch_topk, top_k=top_k), (logits,), 2, 4)
            return gate.measure_both(lambda z: score_topk(z, top_k, True)[1:], "torch topk")
        case Operator.DISPATCH:
            return _bench_dispatch(draw(tokens * top_k, hidden).detach(), logits.detach(), top_k)
        case Operator.CROSS_ENTROPY:
            targets = torch.randint(words, (tokens,), device=device)
            targets[::100] = -100
            gate = product_gate(partial(_full_logits, targets=targets), x, words, hidden)
            ours = partial(linear_cross_entropy, targets=targets)
            return gate.measure_both(ours, "torch full logits")


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

    planning = Gate(Operator.DISPATCH, plan_by_loop, (ids,), 1)
    combining = Gate(Operator.DISPATCH, index_add, (outputs, weights), 1 + 1 / top_k)
    return [
        planning.measure("pith_ops plan, 8 ranks", plan_send),
        planning.measure("torch plan by loop", plan_by_loop),
        combining.measure("pith_ops combine", partial(weighted_partial_sums, plan=plan)),
        combining.measure("torch index_add", index_add),
    ]


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


if __name__ == "__main__":
    sys.exit(main())

"""Check operators against their references, then time them beside what else could do the job.

    python -m pith_ops.bench [OPERATOR ...] [--device cuda] [--json FILE]

1. Gate: outputs, and gradients for random upstream gradients, are compared with a reference in the
   accumulation dtype. What fails gets no time, and the exit code is 1.
2. Time: medians of a forward without grad and of a forward with its backward.
3. Rate: operations or bytes that the mathematics needs over the time; padding and recomputation
   earn nothing (a product's backward is two products, attention's 2.5 forwards).

The trap: an error of NaN is neither above nor below a tolerance, so it counts as infinite.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum, auto
from functools import partial
from pathlib import Path
from statistics import median
from timeit import repeat

import torch
from torch import Tensor
from torch.nn import functional

from pith_ops.attention import (
    AttentionBackend,
    attention,
    attention_violations,
)
from pith_ops.cross_entropy import linear_cross_entropy
from pith_ops.device import accumulation_dtype
from pith_ops.dispatch import count_dispatch, plan_dispatch, plan_experts, weighted_partial_sums
from pith_ops.grouped_linear import Groups, grouped_linear, grouped_linear_reference
from pith_ops.linear import linear
from pith_ops.rms_norm import rms_norm
from pith_ops.rope import apply_rope, rope_frequencies, rope_table
from pith_ops.routing import softmax_topk
from pith_ops.swiglu import swiglu, swiglu_reference

GATE_TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Relative error by norm; integers must be equal."""

TensorFunction = Callable[..., Tensor | tuple[Tensor, ...]]


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


@dataclass(frozen=True, kw_only=True)
class _BenchRow:
    """What the gate found and, if it passed, how fast it is."""

    operator: Operator
    implementation: str
    shape: str
    error: float  # the largest of outputs and gradients, relative
    passed: bool
    unit: str  # of the rates
    forward_ms: float | None = None
    forward_rate: float | None = None
    total_ms: float | None = None  # with the backward
    total_rate: float | None = None


class Gate:
    """Operands and what `reference` makes of them in the accumulation dtype.

    Work is in operations or bytes, `total_work` with the backward.
    """

    def __init__(
        self,
        operator: Operator,
        reference: TensorFunction,
        operands: Sequence[Tensor],
        unit: str,
        forward_work: float,
        total_work: float = 0.0,
    ):
        self.operator, self.reference, self.operands = operator, reference, operands
        self.unit, scale = unit, 1e12 if unit == "TFLOP/s" else 1e9
        self.forward_work, self.total_work = forward_work / scale, total_work / scale
        wide = [_widen(x) for x in operands]
        outputs = _outputs(reference, wide)
        # Values that every dtype represents alike.
        self.upstream = [torch.randn_like(x, dtype=torch.bfloat16).to(x.dtype) for x in outputs]
        self.wanted = [*outputs, *_gradients(outputs, wide, self.upstream)]

    def measure_both(self, ours: TensorFunction, competitor: str) -> list[_BenchRow]:
        """Ours, then the competitor, whose code is the reference."""
        return [self.measure("pith_ops", ours), self.measure(competitor, self.reference)]

    def measure(self, implementation: str, run: TensorFunction) -> _BenchRow:
        """Compare `run` with the reference and time it if they agree."""
        operands, device = self.operands, self.operands[0].device
        outputs, error = _outputs(run, operands), math.inf
        upstream = [u.to(x.dtype) for u, x in zip(self.upstream, outputs, strict=False)]
        if [x.shape for x in outputs] == [x.shape for x in self.upstream]:
            got = [*outputs, *_gradients(outputs, operands, upstream)]
            error = max(_relative_error(a, b) for a, b in zip(got, self.wanted, strict=True))
        row = _BenchRow(
            operator=self.operator,
            implementation=implementation,
            shape=" ".join("x".join(map(str, x.shape)) for x in operands),
            error=error,
            passed=error <= GATE_TOLERANCES.get(operands[0].dtype, 0.0),
            unit=self.unit,
        )
        if not row.passed:
            return row
        with torch.no_grad():
            time = _seconds(lambda: run(*operands), device)
        row = replace(row, forward_ms=time * 1e3, forward_rate=self.forward_work / time)
        if not outputs[0].requires_grad:
            return row
        time = _seconds(lambda: _gradients(_outputs(run, operands), operands, upstream), device)
        return replace(row, total_ms=time * 1e3, total_rate=self.total_work / time)


def run_benchmarks(
    operators: Sequence[Operator], device: torch.device, dtype: torch.dtype
) -> list[_BenchRow]:
    """Gate and time `operators`, on the same operands in every run."""
    rows, layer = [], _Layer(device=device, dtype=dtype)
    if device.type != "cuda":
        layer = replace(layer, tokens=256, sequence=128, hidden=64, heads=4, kv_heads=2)
        layer = replace(layer, head_dim=16, experts=32, top_k=2, expert_width=48, words=1000)
    for operator in operators:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            match operator:
                case Operator.ATTENTION:
                    rows += _bench_attention(layer)
                case Operator.ROPE:
                    rows += _bench_rope(layer)
                case Operator.RMS_NORM:
                    rows += _bench_rms_norm(layer)
                case Operator.SWIGLU:
                    rows += _bench_swiglu(layer)
                case Operator.LINEAR:
                    rows += _bench_linear(layer)
                case Operator.GROUPED_LINEAR:
                    rows += _bench_grouped_linear(layer)
                case Operator.ROUTING:
                    rows += _bench_routing(layer)
                case Operator.DISPATCH:
                    rows += _bench_dispatch(layer)
                case Operator.CROSS_ENTROPY:
                    rows += _bench_cross_entropy(layer)
    return rows


def bench_table(rows: Sequence[_BenchRow]) -> str:
    """The rows as aligned text."""
    columns = "{:15} {:26} {:>8}   {:28} {}"
    table = columns.format("operator", "implementation", "error", "forward", "with backward")
    for row in rows:
        forward, total = "GATE FAILED", ""
        if row.forward_ms is not None:
            forward = f"{row.forward_ms:.3f} ms {row.forward_rate:.4g} {row.unit}"
        if row.total_ms is not None:
            total = f"{row.total_ms:.3f} ms {row.total_rate:.4g} {row.unit}"
        cells = (row.operator, row.implementation, f"{row.error:.1e}", forward, total)
        table += "\n" + columns.format(*cells).rstrip()
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns 1 if a gate failed."""
    names = list(Operator)
    parser = argparse.ArgumentParser(prog="python -m pith_ops.bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=f"of {', '.join(names)}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.operators) - set(names)):
        parser.error(f"unknown operator {', '.join(unknown)}; choose from {', '.join(names)}")
    device = torch.device(options.device)
    is_cuda = device.type == "cuda"
    if is_cuda and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here; use --device cpu")
    dtype = torch.bfloat16 if is_cuda else torch.float32
    rows = run_benchmarks([Operator(n) for n in options.operators or names], device, dtype)
    name = torch.cuda.get_device_name(device) if is_cuda else "cpu"
    environment = {"device": name, "torch": torch.__version__, "dtype": str(dtype)}
    print(", ".join(f"{key} {value}" for key, value in environment.items()))
    print(bench_table(rows))
    if options.json:
        content = {"environment": environment, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=1))
    return 0 if all(row.passed for row in rows) else 1


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """Where to run, and sizes, by default those of Qwen3-30B-A3B."""

    device: torch.device
    dtype: torch.dtype
    tokens: int = 8192
    sequence: int = 4096
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    experts: int = 128
    top_k: int = 8
    expert_width: int = 768
    words: int = 151_936

    def draw(self, *size: int, std: float = 1.0) -> Tensor:
        return (torch.randn(size, device=self.device) * std).to(self.dtype).requires_grad_()

    def draw_logits(self) -> Tensor:
        # Not in bf16, where logits tie: torch's topk breaks ties its own way.
        dtype = accumulation_dtype(self.dtype)
        return torch.randn(self.tokens, self.experts, device=self.device, dtype=dtype)


def _bench_attention(layer: _Layer) -> list[_BenchRow]:
    dim, sequence = layer.head_dim, layer.sequence
    batch, heads = layer.tokens // sequence, (layer.heads, layer.kv_heads, layer.kv_heads)
    operands = [layer.draw(batch, sequence, num_heads, dim) for num_heads in heads]
    # A causal mask halves both products.
    flops = 2.0 * batch * layer.heads * sequence**2 * dim

    def run(q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend) -> Tensor:
        return attention(q, k, v, backend=backend)[0]

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    reference = partial(run, backend=AttentionBackend.REFERENCE)
    gate = Gate(Operator.ATTENTION, reference, operands, "TFLOP/s", flops, 3.5 * flops)
    rows = [
        gate.measure(f"pith_ops {backend.value}", partial(run, backend=backend))
        for backend in AttentionBackend
        if not attention_violations(backend, layer.device, layer.dtype, dim, dim)
    ]
    return [*rows, gate.measure("torch SDPA", sdpa)]


def _bench_rope(layer: _Layer) -> list[_BenchRow]:
    x = layer.draw(layer.tokens, layer.heads, layer.head_dim)
    wide = accumulation_dtype(x.dtype)
    frequencies = rope_frequencies(layer.head_dim, 1e6, dtype=wide, device=x.device)
    cos, sin = rope_table(torch.arange(len(x), device=x.device) % layer.sequence, frequencies)

    def complex_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.to(cos.dtype).chunk(2, dim=-1)
        turned = torch.complex(first, second) * torch.complex(cos, sin)[:, None]
        return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)

    operands = (x, cos, sin)
    gate = Gate(Operator.ROPE, complex_rotation, operands, "GB/s", 2 * x.nbytes, 4 * x.nbytes)
    return gate.measure_both(apply_rope, "torch complex")


def _bench_rms_norm(layer: _Layer) -> list[_BenchRow]:
    x, weight = layer.draw(layer.tokens, layer.hidden), layer.draw(layer.hidden)

    def torch_rms_norm(x: Tensor, w: Tensor) -> Tensor:
        return functional.rms_norm(x, w.shape, w, 1e-6)

    gate = Gate(Operator.RMS_NORM, torch_rms_norm, (x, weight), "GB/s", 2 * x.nbytes, 5 * x.nbytes)
    return gate.measure_both(partial(rms_norm, eps=1e-6), "torch rms_norm")


def _bench_swiglu(layer: _Layer) -> list[_BenchRow]:
    gate_up = layer.draw(layer.tokens * layer.top_k, 2 * layer.expert_width)
    size = gate_up.nbytes
    gate = Gate(Operator.SWIGLU, swiglu_reference, (gate_up,), "GB/s", 1.5 * size, 4 * size)
    return gate.measure_both(swiglu, "torch autograd")


def _bench_linear(layer: _Layer) -> list[_BenchRow]:
    x = layer.draw(layer.tokens, layer.hidden)
    weight = layer.draw(layer.heads * layer.head_dim, layer.hidden, std=layer.hidden**-0.5)
    flops = 2.0 * layer.tokens * weight.numel()
    gate = Gate(Operator.LINEAR, functional.linear, (x, weight), "TFLOP/s", flops, 3 * flops)
    return gate.measure_both(linear, "torch linear")


def _bench_grouped_linear(layer: _Layer) -> list[_BenchRow]:
    num_rows, num_groups = layer.tokens * layer.top_k, layer.experts // 8
    x = layer.draw(num_rows, layer.hidden)
    width, std = 2 * layer.expert_width, layer.hidden**-0.5
    weight = layer.draw(num_groups, width, layer.hidden, std=std)
    # Expert 1 has the rows of experts 0 and 1.
    sizes = [num_rows // num_groups] * num_groups
    sizes[:2] = [0, num_rows - sum(sizes[2:])]
    groups = Groups.from_sizes(sizes, layer.device)
    flops = 2.0 * num_rows * weight[0].numel()

    loop = partial(grouped_linear_reference, groups=groups)
    gate = Gate(Operator.GROUPED_LINEAR, loop, (x, weight), "TFLOP/s", flops, 3 * flops)
    return gate.measure_both(partial(grouped_linear, groups=groups), "torch loop over groups")


def _bench_routing(layer: _Layer) -> list[_BenchRow]:
    logits, top_k = layer.draw_logits().requires_grad_(), layer.top_k
    size = logits.nbytes

    def torch_topk(logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.softmax(1)
        weights = scores.topk(top_k).values
        return weights / weights.sum(1, keepdim=True), scores

    gate = Gate(Operator.ROUTING, torch_topk, (logits,), "GB/s", 2 * size, 4 * size)
    return gate.measure_both(lambda x: softmax_topk(x, top_k, True)[1:], "torch softmax, topk")


def _bench_dispatch(layer: _Layer) -> list[_BenchRow]:
    num_ranks, tokens, experts, top_k = 8, layer.tokens, layer.experts, layer.top_k
    ids, weights, _ = softmax_topk(layer.draw_logits(), top_k, True)
    outputs = layer.draw(tokens * top_k, layer.hidden).detach()
    order = ids.flatten().argsort(stable=True)
    counts = count_dispatch(ids, experts, num_ranks)
    num_rows = int(counts[:, 0].sum())
    plan = plan_experts(ids, counts[:, 1:].flatten().tolist())

    def plan_send(ids: Tensor) -> Tensor:
        count_dispatch(ids, experts, num_ranks)
        return plan_dispatch(ids, experts, num_ranks, num_rows).send_tokens.long()

    def plan_by_loop(ids: Tensor) -> Tensor:
        owners = ids // (experts // num_ranks)
        return torch.cat([(owners == r).any(1).nonzero()[:, 0] for r in range(num_ranks)])

    def index_add(outputs: Tensor, weights: Tensor) -> Tensor:
        weighted = outputs.to(weights.dtype) * weights.flatten()[order][:, None]
        total = weights.new_zeros(tokens, layer.hidden)
        return total.index_add_(0, order // top_k, weighted).to(outputs.dtype)

    planning = Gate(Operator.DISPATCH, plan_by_loop, [ids], "GB/s", ids.nbytes)
    moved = outputs.nbytes * (1 + 1 / top_k)
    combining = Gate(Operator.DISPATCH, index_add, [outputs, weights], "GB/s", moved)
    return [
        planning.measure("pith_ops plan, 8 ranks", plan_send),
        planning.measure("torch plan by loop", plan_by_loop),
        combining.measure("pith_ops combine", partial(weighted_partial_sums, plan=plan)),
        combining.measure("torch index_add", index_add),
    ]


def _bench_cross_entropy(layer: _Layer) -> list[_BenchRow]:
    hidden = layer.draw(layer.tokens, layer.hidden)
    weight = layer.draw(layer.words, layer.hidden, std=layer.hidden**-0.5)
    targets = torch.randint(layer.words, (layer.tokens,), device=layer.device)
    targets[::100] = -100
    flops = 2.0 * layer.tokens * weight.numel()

    def full_logits(h: Tensor, w: Tensor) -> Tensor:
        logits = (h @ w.t()).to(accumulation_dtype(h.dtype))
        return functional.cross_entropy(logits, targets, reduction="sum")

    gate = Gate(Operator.CROSS_ENTROPY, full_logits, (hidden, weight), "TFLOP/s", flops, 3 * flops)
    return gate.measure_both(partial(linear_cross_entropy, targets=targets), "torch full logits")


def _widen(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x
    return x.detach().to(accumulation_dtype(x.dtype)).requires_grad_(x.requires_grad)


def _outputs(run: TensorFunction, operands: Sequence[Tensor]) -> list[Tensor]:
    outputs = run(*operands)
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def _gradients(
    outputs: list[Tensor], operands: Sequence[Tensor], upstream: list[Tensor]
) -> Sequence[Tensor]:
    leaves = [x for x in operands if x.requires_grad]
    return torch.autograd.grad(outputs, leaves, upstream) if leaves else []


def _relative_error(got: Tensor, wanted: Tensor) -> float:
    if not wanted.is_floating_point():
        return 0.0 if torch.equal(got, wanted) else math.inf
    error = ((got.to(wanted.dtype) - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()
    return error if math.isfinite(error) else math.inf


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median of 20 calls on CUDA, of 5 elsewhere, after two warm-up calls."""
    if device.type != "cuda":
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

"""Check operators against their references, then time them beside what else could do the job.

    python -m pith_ops.bench [OPERATOR ...] [--device cuda] [--dtype bfloat16] [--json FILE]

Every implementation, ours and the competitors', must agree with the reference before it is timed
(`bench_gate.py` says how); one that does not is shown without a time and makes the exit code 1.

Rates count what the mathematics needs: floating-point operations (a causal mask halves attention;
the backward of a product is two products, that of attention 2.5 times its forward) or bytes that
must be read and written once. Padding and recomputation earn nothing.

Shapes default to one layer of Qwen3-30B-A3B on a GPU and to small ones on a CPU. The trap: a figure
in this table compares implementations on one machine in one run; it is no training speed.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from pith_ops.attention import (
    AttentionBackend,
    attention,
    attention_reference,
    attention_violations,
)
from pith_ops.bench_gate import GATE_TOLERANCES, BenchRow, Gate, SpeedUnit, TensorFunction
from pith_ops.cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from pith_ops.device import accumulation_dtype, peak_flops
from pith_ops.dispatch import (
    count_dispatch,
    gather_rows,
    plan_dispatch,
    plan_experts,
    weighted_partial_sums,
)
from pith_ops.grouped_linear import Groups, grouped_linear, grouped_linear_reference
from pith_ops.linear import linear
from pith_ops.rms_norm import rms_norm, rms_norm_reference
from pith_ops.rope import apply_rope, rope_frequencies, rope_table
from pith_ops.routing import softmax_topk
from pith_ops.swiglu import swiglu, swiglu_reference
from pith_ops.weight_grad import WeightGradQueue


class Operator(Enum):
    """What can be benchmarked."""

    ATTENTION = "attention"
    ROPE = "rope"
    RMS_NORM = "rms_norm"
    SWIGLU = "swiglu"
    LINEAR = "linear"
    GROUPED_LINEAR = "grouped_linear"
    ROUTING = "routing"
    DISPATCH = "dispatch"
    CROSS_ENTROPY = "cross_entropy"


@dataclass(frozen=True, kw_only=True)
class OperatorShapes:
    """Sizes, dtype and device of one benchmark; the defaults are Qwen3-30B-A3B's."""

    device: torch.device
    """Where to run."""
    dtype: torch.dtype
    """Dtype of activations and weights."""
    tokens: int = 8192
    """Tokens of a micro-batch on this device."""
    sequence: int = 4096
    """Tokens of a sequence; divides `tokens`."""
    hidden: int = 2048
    """Hidden size."""
    heads: int = 32
    """Query heads."""
    kv_heads: int = 4
    """Key/value heads."""
    head_dim: int = 128
    """Size of a head."""
    expert_hidden: int = 768
    """Intermediate size of an expert."""
    experts: int = 128
    """Experts of the layer."""
    local_experts: int = 16
    """Experts on this device, which receive `tokens * top_k` rows together."""
    top_k: int = 8
    """Experts of a token."""
    vocabulary: int = 151_936
    """Words."""


def default_shapes(device: torch.device, dtype: torch.dtype) -> OperatorShapes:
    """Qwen3-30B-A3B on a GPU, small sizes on anything else."""
    shapes = OperatorShapes(device=device, dtype=dtype)
    if device.type == "cuda":
        return shapes
    return replace(
        shapes,
        tokens=256,
        sequence=128,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        expert_hidden=48,
        experts=8,
        local_experts=4,
        top_k=2,
        vocabulary=1000,
    )


def run_benchmarks(operators: Sequence[Operator], shapes: OperatorShapes) -> list[BenchRow]:
    """Gate and time `operators` in order; operands are the same in every run."""
    rows = []
    for operator in operators:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            match operator:
                case Operator.ATTENTION:
                    rows += _bench_attention(shapes)
                case Operator.ROPE:
                    rows += _bench_rope(shapes)
                case Operator.RMS_NORM:
                    rows += _bench_rms_norm(shapes)
                case Operator.SWIGLU:
                    rows += _bench_swiglu(shapes)
                case Operator.LINEAR:
                    rows += _bench_linear(shapes)
                case Operator.GROUPED_LINEAR:
                    rows += _bench_grouped_linear(shapes)
                case Operator.ROUTING:
                    rows += _bench_routing(shapes)
                case Operator.DISPATCH:
                    rows += _bench_dispatch(shapes)
                case Operator.CROSS_ENTROPY:
                    rows += _bench_cross_entropy(shapes)
    return rows


def bench_table(rows: Sequence[BenchRow]) -> str:
    """The rows as aligned text; a failed gate shows its error and no time."""
    header = ["operator", "implementation", "error", "forward", "", "with backward", ""]
    lines = [header]
    for row in rows:
        cells = [row.operator, row.implementation, f"{row.error:.1e}"]
        if not row.passed:
            cells += ["GATE FAILED", f"above {row.tolerance:.0e}", "", ""]
        else:
            cells += _speed_cells(row.forward_ms, row.forward_rate, row.unit)
            cells += _speed_cells(row.total_ms, row.total_rate, row.unit)
        lines.append(cells)
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns 1 if a gate failed."""
    names = [operator.value for operator in Operator]
    parser = argparse.ArgumentParser(prog="python -m pith_ops.bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=f"of {', '.join(names)}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=[str(d).split(".")[1] for d in GATE_TOLERANCES])
    parser.add_argument("--tokens", type=int, help="tokens of a micro-batch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.operators) - set(names)):
        parser.error(f"unknown operator {', '.join(unknown)}; choose from {', '.join(names)}")
    if options.tokens is not None and options.tokens < 1:
        parser.error(f"--tokens {options.tokens} must be at least 1")
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here; use --device cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = next((d for d in GATE_TOLERANCES if str(d) == f"torch.{options.dtype}"), dtype)
    shapes = default_shapes(device, dtype)
    if options.tokens:
        sequence = math.gcd(options.tokens, shapes.sequence)
        shapes = replace(shapes, tokens=options.tokens, sequence=sequence)
    rows = run_benchmarks([Operator(n) for n in options.operators or names], shapes)
    is_cuda = device.type == "cuda"
    peak = peak_flops(device)
    environment = {
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "peak_tflops_bf16": peak and peak / 1e12,
        "torch": torch.__version__,
        "dtype": str(dtype),
    }
    print(", ".join(f"{key} {value}" for key, value in environment.items() if value))
    print(bench_table(rows))
    if options.json:
        table = [{**asdict(row), "passed": row.passed} for row in rows]
        options.json.write_text(json.dumps({"environment": environment, "rows": table}, indent=1))
    return 0 if all(row.passed for row in rows) else 1


def _bench_attention(s: OperatorShapes) -> list[BenchRow]:
    batch = s.tokens // s.sequence
    query = _draw(s, batch, s.sequence, s.heads, s.head_dim)
    key, value = (_draw(s, batch, s.sequence, s.kv_heads, s.head_dim) for _ in range(2))
    flops = 2.0 * batch * s.heads * s.sequence**2 * s.head_dim
    gate = Gate(
        Operator.ATTENTION.value,
        lambda q, k, v: attention_reference(q, k, v)[0],
        (query, key, value),
        unit=SpeedUnit.FLOPS,
        forward_work=flops,
        total_work=3.5 * flops,
    )

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    rows = []
    for backend in AttentionBackend:
        if attention_violations(backend, s.device, s.dtype, s.head_dim, s.head_dim):
            continue

        def ours(q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend = backend) -> Tensor:
            return attention(q, k, v, backend=backend)[0]

        rows.append(gate.measure(f"pith_ops {backend.value}", ours))
    return [*rows, gate.measure("torch SDPA", sdpa)]


def _bench_rope(s: OperatorShapes) -> list[BenchRow]:
    x = _draw(s, s.tokens, s.heads, s.head_dim)
    positions = torch.arange(s.tokens, device=s.device) % s.sequence
    wide = accumulation_dtype(s.dtype)
    cos, sin = rope_table(positions, rope_frequencies(s.head_dim, 1e6, dtype=wide, device=s.device))

    def complex_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.to(cos.dtype).chunk(2, dim=-1)
        turned = torch.complex(first, second) * torch.complex(cos, sin)[:, None]
        return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)

    gate = Gate(
        Operator.ROPE.value,
        complex_rotation,
        (x, cos, sin),
        unit=SpeedUnit.BYTES,
        forward_work=2 * x.nbytes,
        total_work=4 * x.nbytes,
    )
    return [gate.measure("pith_ops", apply_rope), gate.measure("torch complex", complex_rotation)]


def _bench_rms_norm(s: OperatorShapes) -> list[BenchRow]:
    x, weight = _draw(s, s.tokens, s.hidden), _draw(s, s.hidden)
    gate = Gate(
        Operator.RMS_NORM.value,
        lambda x, w: rms_norm_reference(x, w, 1e-6),
        (x, weight),
        unit=SpeedUnit.BYTES,
        forward_work=2 * x.nbytes,
        total_work=5 * x.nbytes,
    )
    return [
        gate.measure("pith_ops", lambda x, w: rms_norm(x, w, 1e-6)),
        gate.measure("torch rms_norm", lambda x, w: functional.rms_norm(x, w.shape, w, 1e-6)),
    ]


def _bench_swiglu(s: OperatorShapes) -> list[BenchRow]:
    gate_up = _draw(s, s.tokens * s.top_k, 2 * s.expert_hidden)
    gate = Gate(
        Operator.SWIGLU.value,
        swiglu_reference,
        (gate_up,),
        unit=SpeedUnit.BYTES,
        forward_work=1.5 * gate_up.nbytes,
        total_work=4 * gate_up.nbytes,
    )
    return [gate.measure("pith_ops", swiglu), gate.measure("torch autograd", swiglu_reference)]


def _bench_linear(s: OperatorShapes) -> list[BenchRow]:
    width = s.heads * s.head_dim
    x, weight = _draw(s, s.tokens, s.hidden), _draw(s, width, s.hidden, std=s.hidden**-0.5)
    queue = WeightGradQueue()
    gate = Gate(
        Operator.LINEAR.value,
        lambda x, w: x @ w.t(),
        (x, weight),
        unit=SpeedUnit.FLOPS,
        forward_work=2.0 * s.tokens * s.hidden * width,
        total_work=6.0 * s.tokens * s.hidden * width,
    )
    return [
        gate.measure("pith_ops", linear),
        gate.measure("pith_ops deferred", lambda x, w: linear(x, w, weight_grads=queue), queue),
        gate.measure("torch linear", functional.linear),
    ]


def _bench_grouped_linear(s: OperatorShapes) -> list[BenchRow]:
    num_rows, width = s.tokens * s.top_k, 2 * s.expert_hidden
    x = _draw(s, num_rows, s.hidden)
    weight = _draw(s, s.local_experts, width, s.hidden, std=s.hidden**-0.5)
    # Uneven groups, one of them empty: expert 1 has the rows of experts 0 and 1.
    sizes = [num_rows // s.local_experts] * s.local_experts
    sizes[:2] = [0, num_rows - sum(sizes[2:])]
    groups = Groups.from_sizes(sizes, s.device)
    queue = WeightGradQueue()

    def loop(x: Tensor, w: Tensor) -> Tensor:
        return grouped_linear_reference(x, w, groups)

    gate = Gate(
        Operator.GROUPED_LINEAR.value,
        loop,
        (x, weight),
        unit=SpeedUnit.FLOPS,
        forward_work=2.0 * num_rows * s.hidden * width,
        total_work=6.0 * num_rows * s.hidden * width,
    )
    return [
        gate.measure("pith_ops", lambda x, w: grouped_linear(x, w, groups)),
        gate.measure("pith_ops deferred", lambda x, w: grouped_linear(x, w, groups, queue), queue),
        gate.measure("torch loop over groups", loop),
    ]


def _bench_routing(s: OperatorShapes) -> list[BenchRow]:
    # Not rounded to bf16: rounded logits tie, and torch's topk breaks ties its own way.
    dtype = accumulation_dtype(s.dtype)
    logits = torch.randn(s.tokens, s.experts, device=s.device, dtype=dtype, requires_grad=True)

    def torch_topk(logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.softmax(1)
        weights = scores.topk(s.top_k).values
        return weights / weights.sum(1, keepdim=True), scores

    gate = Gate(
        Operator.ROUTING.value,
        torch_topk,
        (logits,),
        unit=SpeedUnit.BYTES,
        forward_work=2 * logits.nbytes,
        total_work=4 * logits.nbytes,
    )
    return [
        gate.measure("pith_ops", lambda logits: softmax_topk(logits, s.top_k, True)[1:]),
        gate.measure("torch softmax, topk", torch_topk),
    ]


def _bench_dispatch(s: OperatorShapes) -> list[BenchRow]:
    dtype, num_ranks = accumulation_dtype(s.dtype), s.experts // s.local_experts
    logits = torch.randn(s.tokens, s.experts, device=s.device, dtype=dtype)
    ids, weights, _ = softmax_topk(logits, s.top_k, True)
    hidden = _draw(s, s.tokens, s.hidden).detach()
    outputs = _draw(s, s.tokens * s.top_k, s.hidden).detach()
    order = ids.flatten().argsort(stable=True)
    counts = count_dispatch(ids, s.experts, num_ranks)
    num_rows = int(counts[:, 0].sum())
    plan = plan_experts(ids, s.experts, counts[:, 1:].flatten().tolist())

    def plan_send(ids: Tensor) -> Tensor:
        count_dispatch(ids, s.experts, num_ranks)
        return plan_dispatch(ids, s.experts, num_ranks, num_rows).send_tokens.long()

    def plan_by_loop(ids: Tensor) -> Tensor:
        ranks = range(num_ranks)
        return torch.cat([(ids // s.local_experts == r).any(1).nonzero()[:, 0] for r in ranks])

    def gather_by_sort(rows: Tensor) -> Tensor:
        return rows[order // s.top_k]

    def index_add(outputs: Tensor, weights: Tensor) -> Tensor:
        weighted = outputs.to(weights.dtype) * weights.flatten()[order][:, None]
        total = weights.new_zeros(s.tokens, s.hidden)
        return total.index_add_(0, order // s.top_k, weighted).to(outputs.dtype)

    def gate(reference: TensorFunction, operands: Sequence[Tensor], num_bytes: int) -> Gate:
        return Gate(
            Operator.DISPATCH.value,
            reference,
            operands,
            unit=SpeedUnit.BYTES,
            forward_work=num_bytes,
        )

    moved = hidden.nbytes + outputs.nbytes
    planning = gate(plan_by_loop, [ids], ids.nbytes)
    gathering = gate(gather_by_sort, [hidden], moved)
    combining = gate(index_add, [outputs, weights], moved)
    return [
        planning.measure(f"pith_ops plan, {num_ranks} ranks", plan_send),
        planning.measure("torch plan by loop", plan_by_loop),
        gathering.measure("pith_ops gather", lambda rows: gather_rows(rows, plan)),
        gathering.measure("torch gather", gather_by_sort),
        combining.measure("pith_ops combine", lambda y, w: weighted_partial_sums(y, w, plan)),
        combining.measure("torch index_add", index_add),
    ]


def _bench_cross_entropy(s: OperatorShapes) -> list[BenchRow]:
    hidden = _draw(s, s.tokens, s.hidden)
    weight = _draw(s, s.vocabulary, s.hidden, std=s.hidden**-0.5)
    targets = torch.randint(s.vocabulary, (s.tokens,), device=s.device)
    targets[:: s.sequence] = -100

    def full_logits(h: Tensor, w: Tensor) -> Tensor:
        logits = (h @ w.t()).to(accumulation_dtype(h.dtype))
        return functional.cross_entropy(logits, targets, reduction="sum")

    gate = Gate(
        Operator.CROSS_ENTROPY.value,
        lambda h, w: linear_cross_entropy_reference(h, w, targets),
        (hidden, weight),
        unit=SpeedUnit.FLOPS,
        forward_work=2.0 * s.tokens * s.hidden * s.vocabulary,
        total_work=6.0 * s.tokens * s.hidden * s.vocabulary,
    )
    return [
        gate.measure("pith_ops", lambda h, w: linear_cross_entropy(h, w, targets)),
        gate.measure("torch full logits", full_logits),
    ]


def _draw(s: OperatorShapes, *size: int, std: float = 1.0) -> Tensor:
    return (torch.randn(size, device=s.device) * std).to(s.dtype).requires_grad_()


def _speed_cells(milliseconds: float | None, rate: float | None, unit: str) -> list[str]:
    if milliseconds is None or rate is None:
        return ["", ""]
    return [f"{milliseconds:.3f} ms", f"{rate:.4g} {unit}"]


if __name__ == "__main__":
    sys.exit(main())

"""The gate and the clock of the benchmarks: no figure before the implementation agreed.

`Gate` evaluates an operator's reference once; `Gate.measure` then takes one implementation after
the other, ours and competitors alike:

1. Gate. Outputs and gradients for random upstream gradients are compared with the reference,
   evaluated in fp32 (float64 for float64). The largest relative error, by norm and per tensor, must
   not exceed `GATE_TOLERANCES`. Integer results must be equal.
2. Time, only if the gate passed: the median of a forward alone (without grad) and of a forward with
   its backward, deferred weight gradients included. On CUDA by events, so launch gaps count where
   the host is the bottleneck.
3. Rate: work that the mathematics needs, given by the caller, over the time.

The trap: an error of NaN is neither above nor below a tolerance. It counts as infinite here.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from pith_ops.device import accumulation_dtype
from pith_ops.weight_grad import WeightGradQueue


class SpeedUnit(Enum):
    """What bounds an operator, and in what its speed is given."""

    FLOPS = "TFLOP/s"
    BYTES = "GB/s"


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One implementation: what the gate found and, if it passed, how fast it is."""

    operator: str
    """Name of the operator."""
    implementation: str
    """Whose code: "pith_ops ..." or a competitor's."""
    shape: str
    """Sizes of the operands."""
    error: float
    """Largest relative error over outputs and gradients."""
    tolerance: float
    """What the gate allows."""
    unit: str
    """SpeedUnit of the rates."""
    forward_ms: float | None = None
    """Median time of a forward; None if the gate failed."""
    forward_rate: float | None = None
    """Work of the forward per time."""
    total_ms: float | None = None
    """Median time of forward and backward; None without one or if the gate failed."""
    total_rate: float | None = None
    """Work of forward and backward per time."""

    @property
    def passed(self) -> bool:
        """Whether the gate passed."""
        return self.error <= self.tolerance


GATE_TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Relative error by norm: rounding stays below, a wrong factor or a wrong row does not."""

TensorFunction = Callable[..., Tensor | tuple[Tensor, ...]]


class Gate:
    """An operator's operands and what its reference makes of them; `measure` times who agrees."""

    def __init__(
        self,
        operator: str,
        reference: TensorFunction,
        operands: Sequence[Tensor],
        *,
        unit: SpeedUnit,
        forward_work: float,
        total_work: float | None = None,
    ):
        """Evaluate the reference.

        Args:
            operator: name of what is measured.
            reference: maps operands to a tensor or a tuple of them; called with the floating ones
                in their accumulation dtype.
            operands: gradients of those that require one are compared too.
            unit: of the work.
            forward_work: floating-point operations or bytes of a forward.
            total_work: of forward and backward; None if there is no backward.
        """
        self.operator, self.operands, self.unit = operator, operands, unit
        self.forward_work, self.total_work = forward_work, total_work
        floating = [x.dtype for x in operands if x.is_floating_point()]
        self.tolerance = GATE_TOLERANCES[floating[0]] if floating else 0.0
        wide = [_widen(x) for x in operands]
        self.wanted = _results(reference, wide, total_work is not None, None)

    def measure(
        self, implementation: str, run: TensorFunction, queue: WeightGradQueue | None = None
    ) -> BenchRow:
        """Compare `run` with the reference and, if they agree, time it.

        Args:
            implementation: whose code `run` is.
            run: the same mathematics on the operands as they are.
            queue: holds the weight gradients that `run` defers.
        """
        got = _results(run, self.operands, self.total_work is not None, queue)
        # A gradient that never arrived is an error like any other.
        complete = len(got) == len(self.wanted)
        errors = [_relative_error(a, b) for a, b in zip(got, self.wanted, strict=False)]
        row = BenchRow(
            operator=self.operator,
            implementation=implementation,
            shape=" ".join("x".join(map(str, x.shape)) for x in self.operands),
            error=max(errors) if complete else math.inf,
            tolerance=self.tolerance,
            unit=self.unit.value,
        )
        if not row.passed:
            return row
        scale = 1e12 if self.unit is SpeedUnit.FLOPS else 1e9
        operands, device = self.operands, self.operands[0].device
        with torch.no_grad():
            forward = _seconds(lambda: run(*operands), device)
        rate = self.forward_work / forward / scale
        row = replace(row, forward_ms=forward * 1e3, forward_rate=rate)
        if self.total_work is None:
            return row
        upstream = _upstream(run(*operands))

        def train() -> None:
            _backward(run(*operands), upstream, operands, queue)

        total = _seconds(train, device)
        return replace(row, total_ms=total * 1e3, total_rate=self.total_work / total / scale)


def _widen(operand: Tensor) -> Tensor:
    if not operand.is_floating_point():
        return operand
    wide = operand.detach().to(accumulation_dtype(operand.dtype))
    return wide.requires_grad_(operand.requires_grad)


def _results(
    function: TensorFunction,
    operands: Sequence[Tensor],
    differentiable: bool,
    queue: WeightGradQueue | None,
) -> list[Tensor]:
    """Outputs and, behind them, gradients."""
    outputs = function(*operands)
    gradients = _backward(outputs, _upstream(outputs), operands, queue) if differentiable else []
    return [x.detach() for x in (*_as_tuple(outputs), *gradients)]


def _upstream(outputs: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    """Random gradients of the outputs, values that every dtype represents alike."""
    draws = []
    for index, output in enumerate(_as_tuple(outputs)):
        generator = torch.Generator(output.device).manual_seed(index)
        draw = torch.randn(output.shape, generator=generator, device=output.device)
        draws.append(draw.to(torch.bfloat16).to(output.dtype))
    return draws


def _backward(
    outputs: Tensor | tuple[Tensor, ...],
    upstream: list[Tensor],
    operands: Sequence[Tensor],
    queue: WeightGradQueue | None,
) -> list[Tensor]:
    """Gradients of the operands that require one, deferred ones included."""
    leaves = [x for x in operands if x.requires_grad]
    for leaf in leaves:
        leaf.grad = None
    torch.autograd.backward(_as_tuple(outputs), upstream)
    if queue is not None:
        queue.flush()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def _as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def _relative_error(got: Tensor, wanted: Tensor) -> float:
    """By norm; infinite where shapes differ, something is not finite or integers are not equal."""
    if got.shape != wanted.shape:
        return math.inf
    if not wanted.is_floating_point():
        return 0.0 if torch.equal(got, wanted) else math.inf
    error = ((got.to(wanted.dtype) - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()
    return error if math.isfinite(error) else math.inf


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median time of `call`: of 20 calls on CUDA, of 5 elsewhere, after two warm-up calls."""
    for _ in range(2):
        call()
    times = []
    for _ in range(20 if device.type == "cuda" else 5):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return statistics.median(times)

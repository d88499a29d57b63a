"""The benchmark: every operator is in it, and nothing that is wrong gets a figure."""

import json
import math
import pkgutil

import pith_ops
import pytest
import torch
from pith_ops.bench import Operator, bench_table, main, measure, run_benchmarks

CPU = torch.device("cpu")
NOT_OPERATORS = {"bench", "device", "linear"}
"""Modules without an operator of their own; `linear` is torch's, but for what it defers."""


def test_every_operator_of_the_package_is_measured():
    modules = {module.name for module in pkgutil.iter_modules(pith_ops.__path__)}
    assert {operator.value for operator in Operator} == modules - NOT_OPERATORS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all_pass_their_gates_beside_a_competitor(dtype):
    rows = run_benchmarks(list(Operator), CPU, dtype)
    for operator in Operator:
        names = [row["implementation"] for row in rows if row["operator"] == operator]
        assert any(name.startswith("pith_ops") for name in names)
        assert any(name.startswith("torch") for name in names)
    for row in rows:
        assert row["passed"], row
        assert row["forward_ms"] > 0 and row["forward_rate"] > 0
        assert ("total_ms" not in row) == (row["operator"] == "dispatch")


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad


WRONG = {
    "a factor": lambda x: 1.001 * x * x,
    "rows out of order": lambda x: (x * x).flip(0),
    "a shape": lambda x: (x * x)[:-1],
    "nan": lambda x: torch.where(torch.arange(len(x)) == 2, math.nan, x * x),
    "the gradient": WrongGradient.apply,
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_not_timed(what):
    operands, calls = [torch.randn(6, requires_grad=True)], []

    def run(x):
        calls.append(None)
        return WRONG[what](x)

    names = ("right", "wrong", "reference")
    right, row, _ = measure(
        Operator.SWIGLU, operands, (1, 3), names, lambda x: x**2, run, lambda x: x * x
    )
    assert right["passed"] and right["total_ms"] > 0
    assert not row["passed"] and len(calls) == 1
    assert not {"forward_ms", "forward_rate", "total_ms", "total_rate"} & row.keys()
    (line,) = bench_table([row]).splitlines()[1:]
    assert "GATE FAILED" in line and " ms" not in line and "TB/s" not in line


def test_an_unequal_integer_fails_and_needs_no_tolerance():
    names = ("wrong", "right")
    wrong, right = measure(
        Operator.DISPATCH,
        [torch.arange(5)],
        [1],
        names,
        lambda ids: ids + (ids == 3),
        lambda ids: ids + 1,
    )
    assert right["error"] == 0 and right["passed"]
    assert wrong["error"] == math.inf and not wrong["passed"]


def test_command_line(tmp_path, capsys):
    path = tmp_path / "rows.json"
    assert main(["swiglu", "routing", "--device", "cpu", "--json", str(path)]) == 0
    text = capsys.readouterr().out
    assert "dtype torch.float32" in text and "attention" not in text
    written = json.loads(path.read_text())
    assert written["environment"]["torch"] == torch.__version__
    assert {row["operator"] for row in written["rows"]} == {"swiglu", "routing"}
    assert all(row["passed"] and row["forward_ms"] > 0 for row in written["rows"])


def test_command_line_measures_all_by_default(capsys):
    assert main(["--device", "cpu"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]} == set(Operator)


def test_command_line_fails_with_a_broken_operator_and_prints_no_time_for_it(monkeypatch, capsys):
    monkeypatch.setattr("pith_ops.bench.swiglu", lambda x: x.chunk(2, -1)[0] * x.chunk(2, -1)[1])
    assert main(["swiglu", "--device", "cpu"]) == 1
    ours, competitor = capsys.readouterr().out.splitlines()[2:]
    assert "GATE FAILED" in ours and " ms" not in ours
    assert " ms" in competitor


def test_command_line_refuses(capsys):
    with pytest.raises(SystemExit) as error:
        main(["swigloo"])
    assert error.value.code == 2
    message = "unknown operator swigloo; choose from attention, rope"
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_all_pass_their_gates_on_a_gpu():
    rows = run_benchmarks(list(Operator), torch.device("cuda"), torch.bfloat16)
    print(bench_table(rows))
    assert all(row["passed"] for row in rows)

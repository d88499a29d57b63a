import gc
import weakref

import pytest
import torch
from pith_ops.grouped_linear import Groups
from pith_ops.linear import (
    WeightGradQueue,
    add_weight_grad,
    weight_gradient,
)
from torch import Tensor, nn


def operands(weight: Tensor, rows: tuple[int, ...] = (2, 3)) -> tuple[Tensor, Tensor]:
    """`x` and `dy` for it."""
    out, width = weight.shape
    return (
        torch.randn(*rows, width, dtype=weight.dtype),
        torch.randn(*rows, out, dtype=weight.dtype),
    )


def test_dense_gradient_equals_autograd():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
    x, grad = operands(weight)
    (x @ weight.t()).backward(grad)
    expected = weight.grad.clone()
    torch.testing.assert_close(weight_gradient(x, grad), expected)
    weight.grad = None
    add_weight_grad(weight, x, grad)
    torch.testing.assert_close(weight.grad, expected)
    add_weight_grad(weight, x, grad)
    torch.testing.assert_close(weight.grad, 2 * expected)


def test_an_empty_batch_gives_zeros():
    weight = nn.Parameter(torch.randn(3, 5))
    add_weight_grad(weight, *operands(weight, rows=(0,)))
    assert torch.equal(weight.grad, torch.zeros(3, 5))


def test_grouped_gradient_ignores_rows_past_the_groups():
    torch.manual_seed(1)
    x, grad = torch.randn(9, 5, dtype=torch.float64), torch.randn(9, 3, dtype=torch.float64)
    x[7:], grad[7:] = torch.nan, torch.nan
    gradient = weight_gradient(x, grad, Groups.from_sizes([0, 4, 0, 3], "cpu"))
    expected = torch.stack(
        [
            torch.zeros(3, 5, dtype=torch.float64),
            grad[:4].t() @ x[:4],
            torch.zeros(3, 5, dtype=torch.float64),
            grad[4:7].t() @ x[4:7],
        ]
    )
    torch.testing.assert_close(gradient, expected)


def test_a_preset_fp32_buffer_receives_the_sum_in_fp32():
    """1 + 2**-10 exists in fp32 and not in bf16."""
    weight = nn.Parameter(torch.ones(1, 1).bfloat16())
    weight.grad_dtype = torch.float32
    buffer = torch.ones(1, 1)
    weight.grad = buffer
    one = torch.ones(1, 1).bfloat16()
    add_weight_grad(weight, one * 2**-10, one)
    assert weight.grad is buffer
    assert buffer.item() == 1 + 2**-10


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_an_absent_gradient_is_set_in_the_declared_dtype(grad_dtype):
    weight = nn.Parameter(torch.randn(3, 5).bfloat16())
    weight.grad_dtype = grad_dtype
    add_weight_grad(weight, *operands(weight))
    assert weight.grad.dtype == grad_dtype


def test_entries_run_oldest_first_and_free_their_operands(monkeypatch):
    weights = [nn.Parameter(torch.randn(3, 5)) for _ in range(3)]
    queue, pushed, seen = WeightGradQueue(), [], []

    def recorded(*entry):
        gc.collect()
        seen.append([o() is None for o in pushed])
        add_weight_grad(*entry)
        seen.append([w.grad is not None for w in weights])

    monkeypatch.setattr("pith_ops.linear.add_weight_grad", recorded)
    for weight in weights:
        x, grad = operands(weight)
        pushed.append(weakref.ref(grad))
        queue.push(weight, x, grad)
    del x, grad
    assert len(queue) == 3
    queue.flush()
    # Before an entry runs, those before it are gone; after it has run, its gradient is there.
    for i in range(3):
        assert seen[2 * i] == [j < i for j in range(3)]
        assert seen[2 * i + 1] == [j <= i for j in range(3)]
    gc.collect()
    assert len(queue) == 0 and all(o() is None for o in pushed)
    queue.flush()
    assert len(seen) == 6


@pytest.mark.parametrize(
    ("weight", "word"),
    [
        (nn.Parameter(torch.randn(3, 5), requires_grad=False), "frozen"),
        (nn.Parameter(torch.randn(3, 5)) * 2, "computed"),
    ],
)
def test_a_weight_that_cannot_hold_a_gradient_is_refused(weight, word):
    with pytest.raises(ValueError, match=word):
        WeightGradQueue().push(weight, *operands(weight))

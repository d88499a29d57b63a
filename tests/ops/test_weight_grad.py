import gc
import weakref

import pytest
import torch
from pith_ops.grouped_linear import Groups
from pith_ops.weight_grad import (
    WeightGradEntry,
    WeightGradQueue,
    add_weight_grad,
    dense_weight_grad,
    grouped_weight_grad,
)
from torch import Tensor, nn


def dense_entry(weight: Tensor, rows: tuple[int, ...] = (2, 3)) -> WeightGradEntry:
    out, width = weight.shape
    return WeightGradEntry(
        weight=weight,
        input=torch.randn(*rows, width, dtype=weight.dtype),
        grad_output=torch.randn(*rows, out, dtype=weight.dtype),
        groups=None,
    )


def test_dense_gradient_equals_autograd():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
    entry = dense_entry(weight)
    (entry.input @ weight.t()).backward(entry.grad_output)
    expected = weight.grad.clone()
    torch.testing.assert_close(dense_weight_grad(entry.input, entry.grad_output), expected)
    weight.grad = None
    add_weight_grad(entry)
    torch.testing.assert_close(weight.grad, expected)
    add_weight_grad(entry)
    torch.testing.assert_close(weight.grad, 2 * expected)


def test_an_empty_batch_gives_zeros():
    entry = dense_entry(nn.Parameter(torch.randn(3, 5)), rows=(0,))
    add_weight_grad(entry)
    assert torch.equal(entry.weight.grad, torch.zeros(3, 5))


def test_grouped_gradient_ignores_rows_past_the_groups():
    torch.manual_seed(1)
    x, grad = torch.randn(9, 5, dtype=torch.float64), torch.randn(9, 3, dtype=torch.float64)
    x[7:], grad[7:] = torch.nan, torch.nan
    gradient = grouped_weight_grad(x, grad, Groups.from_sizes([0, 4, 0, 3], "cpu"))
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
    add_weight_grad(
        WeightGradEntry(weight=weight, input=one * 2**-10, grad_output=one, groups=None)
    )
    assert weight.grad is buffer
    assert buffer.item() == 1 + 2**-10


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_an_absent_gradient_is_set_in_the_declared_dtype(grad_dtype):
    weight = nn.Parameter(torch.randn(3, 5).bfloat16())
    weight.grad_dtype = grad_dtype
    add_weight_grad(dense_entry(weight))
    assert weight.grad.dtype == grad_dtype


def test_entries_run_oldest_first_and_free_their_operands():
    weights = [nn.Parameter(torch.randn(3, 5)) for _ in range(3)]
    queue = WeightGradQueue()
    operands = []
    for weight in weights:
        entry = dense_entry(weight)
        operands.append(weakref.ref(entry.input))
        queue.push(entry)
    del entry
    assert len(queue) == 3
    queue.run_oldest()
    gc.collect()
    assert [w.grad is not None for w in weights] == [True, False, False]
    assert [o() is None for o in operands] == [True, False, False]
    queue.flush()
    assert len(queue) == 0
    assert all(w.grad is not None for w in weights)
    queue.flush()


def test_an_empty_queue_has_no_oldest_entry():
    with pytest.raises(RuntimeError, match="empty"):
        WeightGradQueue().run_oldest()


@pytest.mark.parametrize(
    ("weight", "word"),
    [
        (nn.Parameter(torch.randn(3, 5), requires_grad=False), "frozen"),
        (nn.Parameter(torch.randn(3, 5)) * 2, "computed"),
    ],
)
def test_a_weight_that_cannot_hold_a_gradient_is_refused(weight, word):
    with pytest.raises(ValueError, match=word):
        WeightGradQueue().push(dense_entry(weight))

import pytest
import torch
from pith_ops.grouped_linear import Groups, grouped_linear, grouped_linear_reference
from pith_ops.linear import WeightGradQueue
from torch import Tensor, nn

SIZES = [
    [3, 5, 2],
    [0, 4, 0, 3, 0],
    [0, 0, 7],
    [0, 0],
    [1],
    [0, 1, 31, 127, 128, 129],
]


def loop(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    """Row by row, so no grouping is shared with what it checks."""
    owners = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    rows = [weight[g] @ x[p] for p, g in enumerate(owners.tolist())]
    padding = [x.new_zeros(weight.shape[1])] * (len(x) - len(rows))
    return torch.stack([*rows, *padding]) if len(x) else x.new_zeros(0, weight.shape[1])


def relative(actual: Tensor, expected: Tensor) -> float:
    norm = expected.double().norm()
    return float((actual.double() - expected.double()).norm() / norm) if norm > 0 else 0.0


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("sizes", SIZES)
def test_values_and_gradients(sizes, padding, deferred):
    torch.manual_seed(0)
    total = sum(sizes)
    x = torch.randn(total + padding, 5, dtype=torch.float64)
    weight = nn.Parameter(torch.randn(len(sizes), 3, 5, dtype=torch.float64))
    upstream = torch.randn(total + padding, 3, dtype=torch.float64)
    clean = x.clone().requires_grad_()
    expected = loop(clean, weight, sizes)
    expected_grads = torch.autograd.grad(
        expected.mul(upstream).sum() + 0 * weight.sum() + 0 * clean.sum(), [clean, weight]
    )

    x[total:], upstream[total:] = torch.nan, torch.nan
    x.requires_grad_()
    queue = WeightGradQueue() if deferred else None
    y = grouped_linear(x, weight, Groups.from_sizes(sizes, "cpu"), queue)
    y.backward(upstream)
    if queue is not None:
        assert weight.grad is None
        assert len(queue) == 1
        queue.flush()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, expected_grads[0])
    torch.testing.assert_close(weight.grad, expected_grads[1])


def test_the_reference_agrees_with_the_loop():
    torch.manual_seed(1)
    x, weight = torch.randn(9, 5), torch.randn(3, 4, 5)
    x[7:] = torch.nan
    groups = Groups.from_sizes([2, 0, 5], "cpu")
    expected = loop(x, weight, [2, 0, 5])
    torch.testing.assert_close(grouped_linear_reference(x, weight, groups), expected)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_operands_without_a_gradient_get_none(frozen):
    torch.manual_seed(2)
    x = torch.randn(4, 5, requires_grad=frozen != "x")
    weight = nn.Parameter(torch.randn(2, 3, 5), requires_grad=frozen != "weight")
    queue = WeightGradQueue()
    y = grouped_linear(x, weight, Groups.from_sizes([1, 3], "cpu"), queue)
    y.backward(torch.randn_like(y))
    queue.flush()
    assert (x.grad is None) == (frozen == "x")
    assert (weight.grad is None) == (frozen == "weight")


@pytest.mark.parametrize("deferred", [False, True])
def test_bf16_weights_accumulate_into_an_fp32_buffer(deferred):
    torch.manual_seed(3)
    weight = nn.Parameter(torch.randn(2, 8, 16).bfloat16())
    weight.grad_dtype = torch.float32
    buffer = torch.zeros(2, 8, 16)
    weight.grad = buffer
    groups = Groups.from_sizes([30, 20], "cpu")
    queue = WeightGradQueue() if deferred else None
    expected = torch.zeros(2, 8, 16, dtype=torch.float64)
    for _ in range(3):
        x, upstream = torch.randn(50, 16).bfloat16(), torch.randn(50, 8).bfloat16()
        y = grouped_linear(x, weight, groups, queue)
        assert y.dtype == torch.bfloat16
        y.backward(upstream)
        for g, rows in enumerate([slice(0, 30), slice(30, 50)]):
            expected[g] += upstream[rows].double().t() @ x[rows].double()
    if queue is not None:
        assert not buffer.any()
        queue.flush()
    assert weight.grad is buffer
    assert relative(buffer, expected) < 3e-3


def test_rows_of_a_strided_upstream_gradient():
    torch.manual_seed(4)
    x = torch.randn(4, 5, requires_grad=True)
    weight = nn.Parameter(torch.randn(2, 3, 5))
    groups = Groups.from_sizes([1, 3], "cpu")
    grouped_linear(x, weight, groups).sum().backward()  # an expanded scalar: strides of zero
    torch.testing.assert_close(x.grad, torch.stack([weight[0].sum(0), *[weight[1].sum(0)] * 3]))


@pytest.mark.parametrize(
    ("x", "weight", "sizes", "message"),
    [
        ((4, 5), (2, 3, 6), [2, 2], "same `in`"),
        ((4, 5), (3, 5), [4], r"\[G, out, in\]"),
        ((4, 5), (2, 3, 5), [4], "1 groups"),
        ((4, 5), (2, 3, 5), [4, 1], "5 rows"),
    ],
)
def test_operands_that_do_not_fit_are_refused(x, weight, sizes, message):
    with pytest.raises(ValueError, match=message):
        grouped_linear(torch.randn(x), torch.randn(weight), Groups.from_sizes(sizes, "cpu"))


def test_mixed_dtypes_and_negative_sizes_are_refused():
    with pytest.raises(ValueError, match="must be equal"):
        grouped_linear(
            torch.randn(2, 5), torch.randn(1, 3, 5).bfloat16(), Groups.from_sizes([2], "cpu")
        )
    with pytest.raises(ValueError, match="negative"):
        Groups.from_sizes([2, -1], "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("padding", [0, 24])
@pytest.mark.parametrize("sizes", SIZES)
def test_bf16_on_cuda_equals_the_float64_loop(sizes, padding, deferred):
    torch.manual_seed(5)
    # Freed NaN blocks are what later allocations of the same size find.
    for _ in range(8):
        torch.full((64, 1 << 16), torch.nan, device="cuda")
    total = sum(sizes)
    x = torch.randn(total + padding, 64).bfloat16()
    weight = torch.randn(len(sizes), 48, 64).bfloat16()
    upstream = torch.randn(total + padding, 48).bfloat16()
    clean, exact = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = grouped_linear_reference(clean, exact, Groups.from_sizes(sizes, "cpu"))
    expected.backward(upstream.double())

    x, upstream = x.cuda(), upstream.cuda()
    x[total:], upstream[total:] = torch.nan, torch.nan
    x.requires_grad_()
    parameter = nn.Parameter(weight.cuda())
    queue = WeightGradQueue() if deferred else None
    y = grouped_linear(x, parameter, Groups.from_sizes(sizes, "cuda"), queue)
    y.backward(upstream)
    if queue is not None:
        queue.flush()
    for actual, wanted in [
        (y.detach(), expected.detach()),
        (x.grad, clean.grad),
        (parameter.grad, exact.grad),
    ]:
        assert actual.isfinite().all()
        assert actual.shape == wanted.shape
        assert relative(actual.cpu(), wanted) < 3e-3
    empty = [g for g, size in enumerate(sizes) if size == 0]
    assert not parameter.grad[empty].any()


@pytest.mark.gpu
def test_bf16_on_cuda_refuses_unaligned_sizes():
    x, weight = torch.randn(2, 5), torch.randn(1, 3, 5)
    with pytest.raises(ValueError, match="multiples of 8"):
        grouped_linear(
            x.cuda().bfloat16(), weight.cuda().bfloat16(), Groups.from_sizes([2], "cuda")
        )


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("sizes", SIZES[:5])
def test_a_bias_is_added_to_the_rows_of_its_group_and_to_no_padding(sizes, padding, deferred):
    torch.manual_seed(6)
    total = sum(sizes)
    x = torch.randn(total + padding, 5, dtype=torch.float64)
    weight = nn.Parameter(torch.randn(len(sizes), 3, 5, dtype=torch.float64))
    bias = nn.Parameter(torch.randn(len(sizes), 3, dtype=torch.float64))
    upstream = torch.randn(total + padding, 3, dtype=torch.float64)
    expected, expected_grad = loop(x, weight.detach(), sizes), torch.zeros_like(bias)
    owners = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    for p, g in enumerate(owners.tolist()):
        expected[p] += bias.detach()[g]
        expected_grad[g] += upstream[p]
    x[total:], upstream[total:] = torch.nan, torch.nan
    groups = Groups.from_sizes(sizes, "cpu")
    queue = WeightGradQueue() if deferred else None
    y = grouped_linear(x, weight, groups, queue, bias)
    torch.testing.assert_close(y.detach(), expected)
    assert not y[total:].any()
    torch.testing.assert_close(grouped_linear_reference(x, weight, groups, bias), y)
    y.backward(upstream)
    torch.testing.assert_close(bias.grad, expected_grad)
    assert (weight.grad is None) == deferred


def test_gradcheck_with_a_bias_and_empty_groups():
    torch.manual_seed(7)
    operands = [
        torch.randn(size, dtype=torch.float64, requires_grad=True)
        for size in ((9, 5), (4, 3, 5), (4, 3))
    ]
    groups = Groups.from_sizes([0, 4, 0, 3], "cpu")
    assert torch.autograd.gradcheck(lambda x, w, b: grouped_linear(x, w, groups, bias=b), operands)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bf16_rows_with_a_bias_sum_its_gradient_in_fp32(dtype):
    """A bf16 sum of 3000 ones would stop at 256."""
    torch.manual_seed(8)
    x, weight = torch.randn(3005, 16).bfloat16(), torch.randn(3, 8, 16).bfloat16()
    bias = nn.Parameter(torch.randn(3, 8).to(dtype))
    bias.grad_dtype = torch.float32
    groups = Groups.from_sizes([3000, 0, 5], "cpu")
    y = grouped_linear(x, weight, groups, bias=bias)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, grouped_linear_reference(x, weight, groups, bias))
    y.backward(torch.ones_like(y))
    assert bias.grad.dtype == torch.float32
    assert bias.grad.tolist() == [[3000.0] * 8, [0.0] * 8, [5.0] * 8]


def test_a_bias_that_does_not_fit_is_refused():
    x, weight, groups = torch.randn(2, 5), torch.randn(2, 3, 5), Groups.from_sizes([1, 1], "cpu")
    for bias in (torch.randn(3), torch.randn(2, 5), torch.randn(2, 3).bfloat16()):
        with pytest.raises(ValueError, match=r"bias .*: expected \[G, out\] = \(2, 3\) in \(torch"):
            grouped_linear(x, weight, groups, bias=bias)

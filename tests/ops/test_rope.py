"""RoPE: against complex rotation in numpy, and the properties that make it relative."""

import numpy as np
import pytest
import torch
from pith_ops.rope import apply_rope, rope_frequencies, rope_table


def complex_rotation(x, positions, theta):
    """Each pair (i, i + D/2) as one complex number, turned by exp(i * position * theta^(-2i/D))."""
    half = x.shape[-1] // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    frequencies = np.power(float(theta), -2.0 * np.arange(half) / x.shape[-1])
    turned = pairs * np.exp(1j * positions[:, None] * frequencies)[:, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def rotate(x, positions, theta, dtype=torch.float64):
    return apply_rope(x, *rope_table(positions, rope_frequencies(x.shape[-1], theta, dtype=dtype)))


@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "theta"), [(13, 3, 6, 1e4), (1, 1, 2, 1e6)]
)
def test_equals_complex_rotation(tokens, heads, head_dim, theta):
    generator = np.random.default_rng(0)
    x = generator.standard_normal((tokens, heads, head_dim))
    positions = generator.integers(0, 5000, tokens)
    got = rotate(torch.from_numpy(x), torch.from_numpy(positions), theta)
    np.testing.assert_allclose(got.numpy(), complex_rotation(x, positions, theta), atol=1e-12)


def test_gradient_is_the_rotation_back():
    x = torch.randn(7, 2, 8, dtype=torch.float64, requires_grad=True)
    positions = torch.randint(0, 100, (7,))
    grad = torch.randn_like(x)
    (got,) = torch.autograd.grad(rotate(x, positions, 1e4), x, grad)
    assert torch.allclose(got, rotate(grad, -positions, 1e4), rtol=0, atol=1e-14)


def test_scores_depend_on_the_distance_only():
    query, key = torch.randn(2, 1, 1, 64, dtype=torch.float64)

    def score(at_query, at_key):
        return (
            rotate(query, torch.tensor([at_query]), 1e4) * rotate(key, torch.tensor([at_key]), 1e4)
        ).sum()

    assert torch.allclose(score(5, 2), score(1005, 1002), rtol=1e-10)
    assert not torch.allclose(score(5, 2), score(6, 2), rtol=1e-3)


def test_fp32_frequencies_are_those_of_released_models():
    # Hugging Face's `1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))`, bit for bit.
    wanted = 1.0 / (1e6 ** (torch.arange(0, 128, 2).float() / 128))
    assert torch.equal(rope_frequencies(128, 1e6), wanted)
    cos, sin = rope_table(torch.arange(9), wanted)
    phases = torch.outer(torch.arange(9).float(), wanted)
    assert torch.equal(cos, phases.cos()) and torch.equal(sin, phases.sin())


def test_bf16_values_are_rotated_in_fp32_and_rounded_once():
    x = torch.randn(50, 2, 16).to(torch.bfloat16)
    positions = torch.arange(1000, 1050)
    table = rope_table(positions, rope_frequencies(16, 1e4))
    assert table[0].dtype == torch.float32
    got = apply_rope(x, *table)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, apply_rope(x.float(), *table).to(torch.bfloat16))
    exact = rotate(x.double(), positions, 1e4)
    assert ((got.double() - exact).norm() / exact.norm()) < 2**-8


def test_odd_head_dim_is_refused():
    with pytest.raises(ValueError, match="head_dim 7 must be even"):
        rope_frequencies(7, 1e4)

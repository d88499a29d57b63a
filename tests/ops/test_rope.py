"""RoPE: against complex rotation in numpy, and the properties that make it relative."""

import math

import numpy as np
import pytest
import torch
from pith_ops.rope import Yarn, apply_rope, rope_frequencies, rope_table


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


GPT_OSS = Yarn(factor=32.0, original_max_position_embeddings=4096, truncate=False)
DEEPSEEK_V2 = Yarn(
    factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707
)


@pytest.mark.parametrize(
    ("yarn", "theta", "low", "high"),
    [
        # As published in vllm#28244: not 8 and 18.
        (GPT_OSS, 150000.0, 8.092779115512402, 17.39802450158856),
        # i(32) = 10.47 and i(1) = 22.51 for theta 10000 and head dim 64.
        (DEEPSEEK_V2, 10000.0, 10, 23),
        # i(32) is below 0; i(1) = 2.6 rounds up.
        (Yarn(factor=4.0, original_max_position_embeddings=13), 10000.0, 0, 3),
    ],
)
def test_yarn_frequencies(yarn, theta, low, high):
    wanted = []
    for i in range(32):
        plain = theta ** (-i / 32)
        ramp = min(max((i - low) / (high - low), 0), 1)
        wanted.append(plain * (1 - ramp) + plain / yarn.factor * ramp)
    got = rope_frequencies(64, theta, yarn=yarn, dtype=torch.float64)
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-13)
    narrow = rope_frequencies(64, theta, yarn=yarn)
    assert narrow.dtype == torch.float32
    np.testing.assert_allclose(narrow.numpy(), wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "table", "softmax"),
    [
        ({"factor": 32.0}, 1.3465735902799727, 1.0),
        ({"factor": 1.0}, 1.0, 1.0),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0, (1 + 0.0707 * math.log(40)) ** 2),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0, (1 + 0.1 * math.log(40)) ** 2),
        (
            {"mscale": 1.3, "mscale_all_dim": 0.6},
            (1 + 0.13 * math.log(40)) / (1 + 0.06 * math.log(40)),
            (1 + 0.06 * math.log(40)) ** 2,
        ),
        ({"attention_factor": 0.9}, 0.9, 1.0),
        ({"mscale": 0.0, "mscale_all_dim": 0.0}, 1 + 0.1 * math.log(40), 1.0),
    ],
)
def test_yarn_scales(fields, table, softmax):
    yarn = Yarn(**{"factor": 40.0, "original_max_position_embeddings": 4096, **fields})
    assert yarn.violations("model.rope_scaling") == []
    assert yarn.table_scale == pytest.approx(table, rel=1e-14)
    assert yarn.softmax_scale == pytest.approx(softmax, rel=1e-14)
    plain = rope_table(torch.arange(5), rope_frequencies(8, 1e4))
    scaled = rope_table(torch.arange(5), rope_frequencies(8, 1e4), yarn.table_scale)
    assert all(torch.equal(a * yarn.table_scale, b) for a, b in zip(plain, scaled, strict=True))


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"factor": 0.5}, "yarn.factor = 0.5: must be finite and at least 1"),
        ({"factor": math.nan}, "yarn.factor = nan: must be finite"),
        ({"original_max_position_embeddings": 0}, "yarn.original_max_position_embeddings = 0"),
        ({"beta_fast": 1.0}, "yarn.beta_fast = 1.0: must be finite and above beta_slow = 1.0"),
        ({"beta_slow": 0.0}, "beta_slow = 0.0 > 0"),
        ({"beta_fast": math.inf}, "yarn.beta_fast = inf: must be finite and above"),
        ({"attention_factor": 0.0}, "yarn.attention_factor = 0.0: must be positive"),
        ({"attention_factor": math.inf}, "yarn.attention_factor = inf: must be positive"),
        ({"mscale": 1.0}, "yarn.mscale, mscale_all_dim = (1.0, 0): must be both"),
        (
            {"mscale": -1.0, "mscale_all_dim": 1.0},
            "mscale_all_dim = (-1.0, 1.0): must be both",
        ),
    ],
)
def test_yarn_violations(fields, line):
    yarn = Yarn(**{"factor": 40.0, "original_max_position_embeddings": 4096, **fields})
    (found,) = yarn.violations("yarn")
    assert line in found


def test_yarn_with_a_theta_of_one_is_refused():
    with pytest.raises(ValueError, match=r"theta 1\.0 must be above 1 for YaRN"):
        rope_frequencies(8, 1.0, yarn=GPT_OSS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_interleaved_pairs_are_those_of_the_paper(dtype):
    """Each (2i, 2i + 1) as one complex number; the output keeps the layout of the input."""
    generator = np.random.default_rng(1)
    x = torch.from_numpy(generator.standard_normal((13, 3, 10))).to(dtype)
    positions = generator.integers(0, 5000, 13)
    exact = x.double().numpy()
    frequencies = np.power(1e4, -2.0 * np.arange(5) / 10)
    turned = (exact[..., ::2] + 1j * exact[..., 1::2]) * np.exp(
        1j * positions[:, None] * frequencies
    )[:, None, :]
    wanted = np.stack([turned.real, turned.imag], axis=-1).reshape(exact.shape)
    table = rope_table(torch.from_numpy(positions), rope_frequencies(10, 1e4, dtype=torch.float64))
    got = apply_rope(x, *table, interleaved=True)
    assert got.dtype == dtype
    tolerance = {"atol": 1e-12} if dtype == torch.float64 else {"rtol": 2**-8, "atol": 1e-12}
    np.testing.assert_allclose(got.double().numpy(), wanted, **tolerance)


def test_gradient_of_the_interleaved_rotation():
    x = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)
    table = rope_table(torch.tensor([1, 7, 30]), rope_frequencies(6, 1e2, dtype=torch.float64), 1.3)
    assert torch.autograd.gradcheck(lambda x: apply_rope(x, *table, interleaved=True), x)
    assert apply_rope(x[:0], table[0][:0], table[1][:0], interleaved=True).shape == (0, 2, 6)

"""Keys and values expanded from a latent, against a loop over heads and autograd."""

import torch
from pith_ops.attention import expand_latent, expand_latent_backward


def test_latent_heads_and_their_gradients():
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 5, 7), (2, 5, 4), (3 * (2 + 6), 7)
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    latent, rotary, kv_b = (x.requires_grad_() for x in inputs)
    key, value = expand_latent(latent, rotary, kv_b, 3, 2)
    assert key.shape == (2, 5, 3, 6) and value.shape == (2, 5, 3, 6)
    for head, rows in enumerate(kv_b.view(3, 8, 7)):
        wanted = torch.cat([latent @ rows[:2].t(), rotary], -1)
        assert torch.allclose(key[:, :, head], wanted, rtol=0, atol=1e-14)
        assert torch.allclose(value[:, :, head], latent @ rows[2:].t(), rtol=0, atol=1e-14)
    grads = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in (key, value)]
    wanted = torch.autograd.grad((key, value), (latent, rotary, kv_b), grads)
    for got, want in zip(expand_latent_backward(*grads, latent, kv_b, 2), wanted, strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-13)

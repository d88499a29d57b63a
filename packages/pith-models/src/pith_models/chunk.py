"""What all families have around their layers.

    hidden = embedding[tokens]     ...layers...     loss = sum cross_entropy(n(hidden) W_head^T)

Logits of all tokens never exist in training. The trap: a tied head is the embedding's own tensor
with both gradients, which works since rank 0 holds the first chunk and the last.
"""

from collections.abc import Mapping

from pith_engine.contract import IGNORED_TARGET, Batch, ModelChunk, Role, declare
from pith_ops.cross_entropy import linear_cross_entropy
from pith_ops.device import accumulation_dtype
from pith_ops.linear import linear
from pith_ops.rms_norm import rms_norm
from pith_ops.rope import rope_frequencies, rope_table
from torch import Tensor, nn
from torch.nn.functional import embedding

from pith_models.hf_config import DecoderConfig


class DecoderChunk(ModelChunk):
    """Layers by global number, with the embedding if first and norm and head if last."""

    def __init__(
        self,
        config: DecoderConfig,
        layers: Mapping[int, nn.Module],
        *,
        is_first: bool,
        is_last: bool,
        tied_embedding: Tensor | None,
    ):
        super().__init__(is_last=is_last)
        self.config = config
        shape, std = (config.vocab_size, config.hidden_size), config.initializer_range
        if is_first:
            self.embedding = declare(shape, Role.EMBEDDING, std=std)
        for number, layer in layers.items():
            self.layers[str(number)] = layer
        if is_last:
            self.final_norm = declare(shape[1:], Role.NORM)
            untied = tied_embedding is None
            self.head = declare(shape, Role.HEAD, std=std) if untied else tied_embedding

    def embed(self, batch: Batch) -> Tensor:
        """Token ids `[T]` -> hidden `[T, H]`."""
        return embedding(batch.tokens, self.embedding)

    def loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Sum of the token losses, in fp32 or wider."""
        return linear_cross_entropy(self._normed(hidden), self.head, batch.targets, IGNORED_TARGET)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden `[T, H]` -> logits `[T, V]`."""
        return linear(self._normed(hidden), self.head)

    def _normed(self, hidden: Tensor) -> Tensor:
        epsilon, once = self.config.rms_norm_eps, self.config.norm_rounds_once
        return rms_norm(hidden, self.final_norm, epsilon, rounds_once=once)


def rotary_table(
    config: DecoderConfig, dim: int, hidden: Tensor, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[T, dim / 2]` of the positions, in fp32 or wider."""
    theta, yarn, wide = config.rope_theta, config.rope_scaling, accumulation_dtype(hidden.dtype)
    frequencies = rope_frequencies(dim, theta, yarn=yarn, dtype=wide, device=hidden.device)
    return rope_table(batch.positions, frequencies, yarn.table_scale if yarn else 1.0)

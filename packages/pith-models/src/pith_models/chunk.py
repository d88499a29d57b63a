"""What all families have around their decoder layers: embedding, final norm, head.

    hidden = embedding[tokens]     ...layers...     loss = sum cross_entropy(n(hidden) W_head^T)

Logits of all tokens never exist in training. The trap: a tied head is the embedding itself, one
parameter that gets both gradients; rank 0 holds the first chunk and the last, so one tensor serves.
"""

from collections.abc import Mapping

from pith_engine.contract import IGNORED_TARGET, Batch, ModelChunk, Role, declare
from pith_ops.cross_entropy import linear_cross_entropy
from pith_ops.linear import linear
from pith_ops.rms_norm import rms_norm
from torch import Tensor, nn
from torch.nn.functional import embedding


class DecoderChunk(ModelChunk):
    """Layers by global number, with the embedding if first and norm and head if last.

    The last chunk of a tied model is given the first one's embedding.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        *,
        vocab_size: int,
        hidden_size: int,
        initial_std: float,
        norm_epsilon: float,
        norm_rounds_once: bool,
        is_first: bool,
        is_last: bool,
        tied_embedding: Tensor | None,
    ):
        super().__init__(is_first=is_first, is_last=is_last)
        self.norm_epsilon, self.norm_rounds_once = norm_epsilon, norm_rounds_once
        shape = (vocab_size, hidden_size)
        if is_first:
            self.embedding = declare(shape, Role.EMBEDDING, std=initial_std)
        for number, layer in layers.items():
            self.layers[str(number)] = layer
        if is_last:
            self.final_norm = declare((hidden_size,), Role.NORM)
            untied = tied_embedding is None
            self.head = declare(shape, Role.HEAD, std=initial_std) if untied else tied_embedding

    def embed(self, batch: Batch) -> Tensor:
        """Token ids `[T]` -> hidden `[T, H]`."""
        return embedding(batch.tokens, self.embedding)

    def loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Sum of the token losses, a scalar in fp32 or wider."""
        return linear_cross_entropy(self._normed(hidden), self.head, batch.targets, IGNORED_TARGET)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden `[T, H]` -> logits `[T, V]`."""
        return linear(self._normed(hidden), self.head)

    def _normed(self, hidden: Tensor) -> Tensor:
        return rms_norm(
            hidden, self.final_norm, self.norm_epsilon, rounds_once=self.norm_rounds_once
        )

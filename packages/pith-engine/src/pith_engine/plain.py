"""A model run by autograd alone, layer by layer: a reference of all that the engine does."""

from collections.abc import Iterator

import torch
from pith_ops.grouped_linear import Groups
from torch import Tensor

from pith_engine.contract import Batch, DecoderLayer, ModelChunk, Routing


def plain_layer(layer: DecoderLayer, hidden: Tensor, batch: Batch) -> tuple[Tensor, Routing | None]:
    """Hidden states `[T, H]` after a layer that holds all experts, and its routing."""
    tokens, residual, routing = layer.attention(hidden, batch)
    if routing is None:
        return layer.aggregate(layer.experts(tokens, None, None), residual), None
    experts = range(layer.num_local_experts)
    rows = [torch.where((routing.expert_ids == e).any(1))[0] for e in experts]
    groups = Groups.from_sizes([len(r) for r in rows], tokens.device)
    order = torch.cat(rows)
    outputs = layer.experts(tokens[order], groups, None)
    combined = torch.zeros_like(tokens, dtype=routing.weights.dtype)
    for expert, (index, output) in enumerate(zip(rows, outputs.split(groups.sizes), strict=True)):
        weight = (routing.weights * (routing.expert_ids == expert)).sum(1)[index]
        combined = combined.index_add(0, index, output.to(weight.dtype) * weight[:, None])
    return layer.aggregate(combined.to(tokens.dtype), residual), routing


def plain_hidden(chunks: list[ModelChunk], batch: Batch) -> Iterator[tuple[Tensor, Routing | None]]:
    """`(hidden, routing)` after every layer of a whole model."""
    hidden = chunks[0].embed(batch)
    for chunk in chunks:
        for layer in chunk.decoder_layers().values():
            hidden, routing = plain_layer(layer, hidden, batch)
            yield hidden, routing

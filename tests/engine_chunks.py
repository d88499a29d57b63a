"""Chunks that only declare parameters: odd shapes, every role that shards differently."""

import torch
from pith_engine.contract import ModelChunk, Role, declare
from pith_engine.fsdp import ShardingConfig, shard_chunks, sharded_parameters
from torch import nn

VOCABULARY, HIDDEN, INTERMEDIATE = 257, 66, 10
CPU = torch.device("cpu")
SHARDED = ShardingConfig()
HSDP = ShardingConfig(replicate_dense=True)
REPLICATED = ShardingConfig(replicate_dense=True, replicate_experts=True)


class DeclaredLayer(nn.Module):
    """Norm, router, a dense matrix of two parts and stacked experts."""

    def __init__(self, num_experts: int, ep: int):
        super().__init__()
        local = num_experts // ep
        self.norm = declare((6,), Role.NORM)
        self.router = declare((num_experts, HIDDEN), Role.ROUTER, std=0.3)
        self.up = declare((14, HIDDEN), Role.MATRIX, std=0.2, parts=("dense_gate", "dense_up"))
        self.experts = nn.Module()
        self.experts.gate_up = declare(
            (local, 2 * INTERMEDIATE, HIDDEN),
            Role.EXPERT_MATRIX,
            std=0.1,
            parts=("gate_proj", "up_proj"),
        )
        self.experts.bias = declare((local, INTERMEDIATE), Role.EXPERT_BIAS)


def declared_chunks(mesh, num_experts=8, layers=(0, 1)) -> list[ModelChunk]:
    """First chunk with the embedding and the first layer, last chunk with the rest and the head."""
    first = ModelChunk(is_last=False)
    first.embedding = declare((VOCABULARY, HIDDEN), Role.EMBEDDING, std=1.0)
    last = ModelChunk(is_last=True)
    for index, layer in enumerate(layers):
        chunk = last if index else first
        chunk.layers[str(layer)] = DeclaredLayer(num_experts, mesh.ep.size)
    last.final_norm = declare((HIDDEN,), Role.NORM)
    last.head = declare((VOCABULARY, HIDDEN), Role.HEAD, std=0.02)
    return [first, last]


def declared_units(mesh, dtype=torch.float64, sharding=SHARDED, **arguments):
    """Chunks, units and parameters of the above on the CPU."""
    chunks = declared_chunks(mesh, **arguments)
    units = shard_chunks(chunks, mesh, sharding=sharding, compute_dtype=dtype, device=CPU)
    return chunks, units, sharded_parameters(units)


def whole_tensors(pieces) -> dict[str, torch.Tensor]:
    """Assemble `(name, tensor, global_shape, offsets)` of all ranks; each element exactly once."""
    wholes, counts = {}, {}
    for name, tensor, shape, offsets in pieces:
        whole = wholes.setdefault(name, torch.full(shape, torch.nan, dtype=tensor.dtype))
        count = counts.setdefault(name, torch.zeros(shape, dtype=torch.int32))
        assert whole.shape == torch.Size(shape)
        place = tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))
        assert whole[place].shape == tensor.shape
        whole[place] = tensor
        count[place] += 1
    assert all((count == 1).all() for count in counts.values())
    return wholes

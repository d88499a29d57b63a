"""Initial weights: a pure function of (seed, canonical name, expert), equal on every mesh.

Each canonical tensor is drawn whole from a generator of its own,

    values = std * normal(seed = hash(seed, name, expert), shape = the whole tensor)

in fp32 on the shard's device, and cut to the block that this rank holds. Stacked experts are drawn
one by one, so a rank draws only experts that it has a part of. Ranks draw more than they keep; that
costs seconds once, and no checkpoint of initial weights is needed to compare meshes. CPUs and GPUs
have different generators: their runs start alike only from a checkpoint.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from pith_engine.contract import Role
from pith_engine.fsdp import CanonicalBlock, ShardedParameter, canonical_blocks


@torch.no_grad()
def initialise(parameters: Iterable[ShardedParameter], seed: int) -> None:
    """Fill every shard: normal values with the declared std, else 1 for norms and 0 for the rest.

    Args:
        parameters: their shards are written.
        seed: the run's seed.
    """
    for parameter in parameters:
        if parameter.std is None:
            parameter.shard.fill_(1.0 if parameter.role is Role.NORM else 0.0)
            continue
        for block in canonical_blocks(parameter, parameter.shard):
            if block.tensor.numel() == 0:
                continue
            if parameter.role.is_expert:
                _fill_experts(block, seed, parameter.std)
            else:
                whole = _draw(block.global_shape, seed, block.name, None, block.tensor.device)
                block.tensor.copy_(_cut(whole, block.offsets, block.tensor.shape) * parameter.std)


def tensor_seed(seed: int, name: str, expert: int | None) -> int:
    """63-bit seed of one canonical tensor's generator, or of one expert's in a stack."""
    key = f"{seed}\n{name}\n{'' if expert is None else expert}"
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _fill_experts(block: CanonicalBlock, seed: int, std: float) -> None:
    for row, target in enumerate(block.tensor):
        expert = block.offsets[0] + row
        whole = _draw(block.global_shape[1:], seed, block.name, expert, target.device)
        target.copy_(_cut(whole, block.offsets[1:], target.shape) * std)


def _draw(
    shape: tuple[int, ...], seed: int, name: str, expert: int | None, device: torch.device
) -> Tensor:
    generator = torch.Generator(device).manual_seed(tensor_seed(seed, name, expert))
    return torch.randn(shape, generator=generator, dtype=torch.float32, device=device)


def _cut(whole: Tensor, offsets: tuple[int, ...], shape: torch.Size) -> Tensor:
    for dim, (start, size) in enumerate(zip(offsets, shape, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole

"""Initial weights: a pure function of (seed, canonical name, expert), equal on every mesh.

Each canonical tensor, and each expert of a stack, is drawn whole in fp32 on the shard's device,

    values = std * normal(seed = hash(seed, name, expert), shape = the whole tensor)

and cut to this rank's block. The trap: generators of CPUs and GPUs differ.
"""

import hashlib
from collections.abc import Iterable

import torch

from pith_engine.contract import Role
from pith_engine.fsdp import CanonicalBlock, ShardedParameter, canonical_blocks, cut_block


@torch.no_grad()
def initialise(parameters: Iterable[ShardedParameter], seed: int) -> None:
    """Fill every shard: normal with the declared std; without one, 1 for norms, else 0."""
    for parameter in parameters:
        if parameter.std is None:
            parameter.shard.fill_(1.0 if parameter.role is Role.NORM else 0.0)
            continue
        for block in canonical_blocks(parameter, parameter.shard):
            if block.tensor.numel():
                _draw(block, seed, parameter.std, is_stack=parameter.role.is_expert)


def tensor_seed(seed: int, name: str, expert: int | None) -> int:
    """63 bits for the generator of a canonical tensor or of one expert's."""
    key = f"{seed}\n{name}\n{'' if expert is None else expert}"
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _draw(block: CanonicalBlock, seed: int, std: float, is_stack: bool) -> None:
    dim = 1 if is_stack else 0
    for row, target in enumerate(block.tensor if is_stack else [block.tensor]):
        generator = torch.Generator(target.device)
        expert = block.offsets[0] + row if is_stack else None
        generator.manual_seed(tensor_seed(seed, block.name, expert))
        whole = target.new_empty(block.global_shape[dim:], dtype=torch.float32)
        whole.normal_(generator=generator)
        target.copy_(cut_block(whole, block.offsets[dim:], target.shape) * std)

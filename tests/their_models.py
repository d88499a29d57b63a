"""Comparing a family with transformers' own model: random weights, runs, gradients by our names.

transformers computes norms, softmaxes and rotary phases in fp32 whatever the model's dtype; for the
float64 comparison `Promote` asks torch for float64 wherever its code says float32, so that
agreement to 1e-10 is possible at all.
"""

from pathlib import Path
from typing import Any

import torch
from pith_engine.contract import IGNORED_TARGET, Batch, ModelChunk
from pith_engine.fsdp import Unit, canonical_blocks, shard_chunks
from pith_engine.mesh import Mesh
from pith_models.build import (
    ModelConfig,
    build_chunks,
    canonical_tensors,
    model_config_from_hf,
    skipped_layer,
)
from pith_models.hf import FusedKey, HuggingFaceTensors, read_hf_config
from pith_ops.attention import AttentionBackend
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

SEQUENCES, LENGTH = 2, 64


class Promote(TorchFunctionMode):
    """Replaces float32 by float64 in every torch call."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        def wide(value: object) -> object:
            return torch.float64 if value is torch.float32 else value

        if function is Tensor.float:
            return args[0].double()
        promoted = {name: wide(value) for name, value in (kwargs or {}).items()}
        return function(*[wide(value) for value in args], **promoted)


def randomise(model: nn.Module, std: float = 0.15) -> None:
    """Give weights large enough that a wrong detail shows, vectors off 1."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(std * torch.randn_like(parameter))


def make_batch(vocab_size: int, sequences: int = SEQUENCES, length: int = LENGTH) -> Batch:
    """Random tokens and targets, of which a few are ignored."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(vocab_size, (sequences, length), generator=generator)
    targets = torch.randint(vocab_size, (sequences, length), generator=generator)
    targets[0, 5:9] = IGNORED_TARGET
    return Batch(
        tokens=tokens.flatten(),
        targets=targets.flatten(),
        positions=torch.arange(length).repeat(sequences),
        sequence_length=length,
    )


def load_ours(folder: Path, dtype: torch.dtype) -> tuple[list[ModelChunk], list[Unit]]:
    """The model of a Hugging Face folder in one process, its parameters gathered."""
    config = model_config_from_hf(read_hf_config(folder))
    mesh = Mesh.single()
    first = config.num_hidden_layers // 2
    chunks = build_chunks(
        config,
        mesh,
        (first, config.num_hidden_layers - first),
        attention_backend=AttentionBackend.REFERENCE,
    )
    units = shard_chunks(chunks, mesh, compute_dtype=dtype, device=torch.device("cpu"))
    # The masters are fp32, or wider.
    wide = torch.promote_types(dtype, torch.float32)
    layout = canonical_tensors(config)
    values = HuggingFaceTensors(folder, layout, wide, skipped_layer(config))
    for unit in units:
        for parameter in unit.parameters:
            for block in canonical_blocks(parameter, parameter.shard):
                block.tensor.copy_(values[block.name])
        unit.gather()
    return chunks, units


def run_theirs(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits `[T, V]` and summed loss of transformers' model, after a backward."""
    logits = model(batch.tokens.view(-1, batch.sequence_length)).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(
        logits, batch.targets, ignore_index=IGNORED_TARGET, reduction="sum"
    )
    loss.backward()
    return logits.detach(), loss.detach()


def their_gradients(model: nn.Module, config: ModelConfig) -> dict[str, Tensor]:
    """Gradients of transformers' model under our canonical names; it fuses expert stacks."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients = {}
    for tensor in canonical_tensors(config):
        if tensor.fused is not None:
            gradients[tensor.name] = _part(found[tensor.fused.key], tensor.fused)
        elif tensor.keys[0] in found:
            gradients[tensor.name] = found[tensor.keys[0]]
    return gradients


def _part(stack: Tensor, fused: FusedKey) -> Tensor:
    ours = stack.mT if fused.is_transposed else stack
    if fused.half is None:
        return ours
    if fused.is_interleaved:
        return ours.unflatten(1, (-1, 2))[:, :, fused.half]
    return ours.unflatten(1, (2, -1))[:, fused.half]


def our_gradients(units: list[Unit]) -> dict[str, Tensor]:
    """Gradients of every trained parameter after a backward, by canonical name."""
    gradients = {}
    for unit in units:
        unit.reduce()
        for parameter in unit.parameters:
            if parameter.role.is_trained:
                for block in canonical_blocks(parameter, parameter.grad):
                    gradients[block.name] = block.tensor
    return gradients


def worst(actual: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest expected value."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()

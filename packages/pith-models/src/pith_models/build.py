"""The only list of model families: from a configuration to chunks, tensors and counts.

To add a family: write its file, add its configuration to `ModelConfig` and an arm to each `match`.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from pith_engine.contract import ModelChunk
from pith_engine.mesh import Mesh, expert_violations
from pith_engine.partition import partition_violations
from pith_engine.violations import raise_violations
from pith_ops.attention import AttentionBackend
from torch import nn

from pith_models.chunk import DecoderChunk
from pith_models.deepseek import DeepseekConfig, DeepseekLayer, deepseek_keys
from pith_models.gpt_oss import GPT_OSS_KEYS, GptOssConfig, GptOssLayer
from pith_models.hf import CanonicalTensor, FusedKey, HuggingFaceTensors, layer_tensors
from pith_models.qwen3_dense import Qwen3Config
from pith_models.qwen3_moe import QWEN3_MOE_KEYS, Qwen3MoeConfig, Qwen3MoeLayer

ModelConfig: TypeAlias = Qwen3MoeConfig | Qwen3Config | DeepseekConfig | GptOssConfig
"""The configuration of any family."""


class ParameterCounts(NamedTuple):
    """Parameters of a whole model."""

    total: int
    """All."""
    active: int
    """Those that one token meets."""


def build_chunks(
    config: ModelConfig,
    mesh: Mesh,
    layers_per_chunk: tuple[int, ...],
    *,
    attention_backend: AttentionBackend,
) -> list[ModelChunk]:
    """This rank's two chunks, r and `2 * pp - 1 - r`, on the meta device, without process groups.

    A ValueError if a size is out of range, or layers or experts do not fit the mesh.
    """
    num_chunks, wrong = 2 * mesh.pp.size, config.violations()
    wrong += partition_violations(layers_per_chunk, mesh.pp.size, config.num_hidden_layers)
    wrong += expert_violations(config.num_experts, mesh.ep.size)
    raise_violations(wrong, "model")
    chunks: list[ModelChunk] = []
    for chunk in (mesh.pp.rank, num_chunks - 1 - mesh.pp.rank):
        start, is_last = sum(layers_per_chunk[:chunk]), chunk == num_chunks - 1
        layers = {
            layer: _decoder_layer(config, layer, mesh, attention_backend)[0]
            for layer in range(start, start + layers_per_chunk[chunk])
        }
        is_tied = config.tie_word_embeddings and is_last
        tied = chunks[0].get_parameter("embedding") if is_tied else None
        chunks.append(
            DecoderChunk(config, layers, is_first=chunk == 0, is_last=is_last, tied_embedding=tied)
        )
    return chunks


def _decoder_layer(
    config: ModelConfig, layer: int, mesh: Mesh, backend: AttentionBackend
) -> tuple[nn.Module, Mapping[str, str | FusedKey]]:
    """The layer and its Hugging Face keys."""
    experts = config.num_experts // mesh.ep.size if config.is_sparse(layer) else 0
    match config:
        case Qwen3MoeConfig() | Qwen3Config():
            return Qwen3MoeLayer(config, experts, backend, mesh.cp), QWEN3_MOE_KEYS
        case DeepseekConfig():
            return DeepseekLayer(config, experts, backend, mesh.cp), deepseek_keys(experts > 0)
        case GptOssConfig():
            return GptOssLayer(config, layer, experts, backend, mesh.cp), GPT_OSS_KEYS


def canonical_tensors(config: ModelConfig) -> tuple[CanonicalTensor, ...]:
    """Every tensor of the whole model, in order."""
    shape, head = (config.vocab_size, config.hidden_size), "lm_head.weight"
    tied, embedding = config.tie_word_embeddings, ("model.embed_tokens.weight",)
    tensors = [CanonicalTensor("embedding", shape, embedding, copy=head if tied else None)]
    for layer in range(config.num_hidden_layers):
        tensors += _layer_tensors(config, layer)
    tensors.append(CanonicalTensor("final_norm", shape[1:], ("model.norm.weight",)))
    return (*tensors, *([] if tied else [CanonicalTensor("head", shape, (head,))]))


def _layer_tensors(config: ModelConfig, number: int) -> list[CanonicalTensor]:
    layer, keys = _decoder_layer(config, number, Mesh.single(), AttentionBackend.REFERENCE)
    return layer_tensors(layer, number, keys)


def skipped_layer(config: ModelConfig) -> int | None:
    """The layer after the last in V3's files: multi-token prediction, which is not implemented."""
    is_v3 = isinstance(config, DeepseekConfig) and config.is_v3
    return config.num_hidden_layers if is_v3 else None


def open_hf(folder: Path, config: ModelConfig, dtype: torch.dtype) -> HuggingFaceTensors:
    """A folder's tensors as `dtype`; ValueError where it does not hold this model."""
    return HuggingFaceTensors(folder, canonical_tensors(config), dtype, skipped_layer(config))


def head_dims(config: ModelConfig) -> tuple[int, int]:
    """Width of a head's query and key, and of its value."""
    if isinstance(config, DeepseekConfig):
        return config.query_dim, config.v_head_dim
    return config.head_dim, config.head_dim


def model_config_from_hf(fields: dict) -> ModelConfig:
    """Read a `config.json`; a ValueError names a family or field that is not implemented."""
    match fields.get("model_type"):
        case "qwen3_moe":
            return Qwen3MoeConfig.from_hf(fields)
        case "qwen3":
            return Qwen3Config.from_hf(fields)
        case "deepseek_v2" | "deepseek_v3":
            return DeepseekConfig.from_hf(fields)
        case "gpt_oss":
            return GptOssConfig.from_hf(fields)
        case other:
            known = ["qwen3_moe", "qwen3", "deepseek_v2", "deepseek_v3", "gpt_oss"]
            raise ValueError(f"model_type = {other!r}: implemented are {known}")


def parameter_counts(config: ModelConfig) -> ParameterCounts:
    """Count parameters from the shapes alone."""
    tensors = canonical_tensors(config)
    return ParameterCounts(
        total=sum(prod(tensor.shape) for tensor in tensors),
        active=sum(_active_size(config, tensor) for tensor in tensors),
    )


def _active_size(config: ModelConfig, tensor: CanonicalTensor) -> int:
    size = prod(tensor.shape)
    if tensor.is_expert_stack:
        return size // config.num_experts * config.num_experts_per_tok
    return size


def forward_flops(config: ModelConfig, sequence_length: int) -> tuple[tuple[float, ...], float]:
    """Forward operations of a token in a sequence of this length: of each layer, of the head.

    2 for each number of a matrix that it meets and, in each head, of the keys and values that its
    query sees on average. The embedding costs none.
    """
    layers = []
    for layer in range(config.num_hidden_layers):
        tensors = _layer_tensors(config, layer)
        matrices = [t for t in tensors if len(t.shape) - t.is_expert_stack > 1]
        span = min(config.window(layer) or sequence_length, sequence_length)
        # The first `span` queries see 1, 2, ... keys, the others `span` each.
        keys = span - span * (span - 1) / 2 / sequence_length
        attention = config.num_attention_heads * sum(head_dims(config)) * keys
        layers.append(2 * (sum(_active_size(config, t) for t in matrices) + attention))
    return tuple(layers), 2.0 * config.hidden_size * config.vocab_size

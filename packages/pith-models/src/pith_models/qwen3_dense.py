"""Qwen3, dense: its configuration.

Its layers are those of `qwen3_moe.py` without experts (arXiv 2505.09388): attention, then one MLP
of width `intermediate_size` for every token.

The trap: a config.json without `head_dim` means 128, whatever `hidden_size / num_attention_heads`
(Qwen3-0.6B: 64); the small released models tie the head to the embedding.
"""

from dataclasses import dataclass

from pith_models.hf_config import GroupedQueryConfig, config_from_hf, written_hf_fields


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(GroupedQueryConfig):
    """A dense Qwen3 model."""

    num_experts = num_experts_per_tok = moe_intermediate_size = 0
    norm_topk_prob = False
    aligned_sizes = ()

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer routes: none does."""
        return False

    @staticmethod
    def from_hf(hf_fields: dict) -> "Qwen3Config":
        """Read a `config.json`; a ValueError names every fault."""
        kinds, layers = hf_fields.get("layer_types"), hf_fields.get("num_hidden_layers")
        full = ["full_attention"] * (layers if isinstance(layers, int) else 1)
        return config_from_hf(
            Qwen3Config,
            hf_fields,
            fixed={**_FIXED_HF_FIELDS, "layer_types": None if kinds is None else full},
            defaults={} if "head_dim" in hf_fields else {"head_dim": 128},
            neutral=("sliding_window", "max_window_layers"),  # need `use_sliding_window`
        )

    def to_hf(self) -> dict:
        """The fields of a `config.json`."""
        return written_hf_fields(self, "Qwen3", _FIXED_HF_FIELDS)


_FIXED_HF_FIELDS = {"model_type": "qwen3", "use_sliding_window": False}

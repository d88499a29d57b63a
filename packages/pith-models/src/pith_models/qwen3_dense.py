"""Qwen3, dense: configuration, layers and Hugging Face key map.

Formulas (Qwen3 technical report, arXiv 2505.09388; x is `[T, H]`, n_* are RMS norms):

    attention   q, k, v = Wq n(x), Wk n(x), Wv n(x);  q, k = rope(n_q(q)), rope(n_k(k)) per head
                h = x + Wo softmax(q k' / sqrt(D), causal) v
    layer       h + Wdown (silu(Wgate u) * (Wup u)),  u = n(h)

T tokens, H hidden, D head dim, I width of the MLP. Of `[2 * I, H]` gate rows are first.
The trap: a config.json without `head_dim` means 128, whatever `hidden_size / num_attention_heads`
(Qwen3-0.6B: 64); the small released models tie the head to the embedding.
"""

from dataclasses import dataclass
from functools import partial

from pith_engine.context_parallel import context_attention
from pith_engine.contract import Batch, Role, declare
from pith_engine.mesh import Axis
from pith_ops.attention import AttentionBackend
from pith_ops.grouped_linear import Groups
from pith_ops.linear import linear
from pith_ops.rms_norm import rms_norm
from pith_ops.rope import apply_rope
from pith_ops.swiglu import swiglu
from pith_ops.weight_grad import WeightGradQueue
from torch import Tensor, nn

from pith_models.chunk import rotary_table
from pith_models.hf_config import DecoderConfig, config_from_hf, written_hf_fields


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(DecoderConfig):
    """A dense Qwen3 model."""

    num_key_value_heads: int
    """Key and value heads; divides the query heads."""
    head_dim: int
    """Width of a head; even."""

    num_experts = num_experts_per_tok = 0
    aligned_sizes = ()

    def is_sparse(self, layer: int) -> bool:
        """Never."""
        return False

    @staticmethod
    def from_hf(hf_fields: dict) -> "Qwen3Config":
        """Read a `config.json`; a ValueError names every fault."""
        kinds = hf_fields.get("layer_types")
        full = ["full_attention"] * (len(kinds) if isinstance(kinds, list) else 1)
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


class Qwen3Layer(nn.Module):
    """A `DecoderLayer`."""

    num_local_experts = 0

    def __init__(self, config: Qwen3Config, backend: AttentionBackend, cp: Axis):
        super().__init__()
        self.config, self.backend, self.cp = config, backend, cp
        H, D, I = config.hidden_size, config.head_dim, config.intermediate_size
        q_width, kv_width = config.num_attention_heads * D, config.num_key_value_heads * D
        matrix = partial(declare, role=Role.MATRIX, std=config.initializer_range)
        self.attention_norm = declare((H,), Role.NORM)
        self.q_proj = matrix((q_width, H))
        self.k_proj = matrix((kv_width, H))
        self.v_proj = matrix((kv_width, H))
        self.q_norm = declare((D,), Role.NORM)
        self.k_norm = declare((D,), Role.NORM)
        self.o_proj = matrix((H, q_width))
        self.mlp_norm = declare((H,), Role.NORM)
        self.gate_up = matrix((2 * I, H), parts=("gate_proj", "up_proj"))
        self.down_proj = matrix((H, I))

    def attention(
        self, hidden: Tensor, batch: Batch, chosen: Tensor | None = None
    ) -> tuple[Tensor, Tensor, None]:
        """Normed tokens, residual, both `[T, H]`, no routing."""
        D, eps = self.config.head_dim, self.config.rms_norm_eps
        normed = rms_norm(hidden, self.attention_norm, eps)
        heads = (normed.shape[0], -1, D)
        # 1. Project, and normalise q and k per head.
        query = rms_norm(linear(normed, self.q_proj).view(heads), self.q_norm, eps)
        key = rms_norm(linear(normed, self.k_proj).view(heads), self.k_norm, eps)
        value = linear(normed, self.v_proj).view(heads)
        # 2. Rotate q and k by their positions.
        cos, sin = rotary_table(self.config, D, hidden, batch)
        query, key = apply_rope(query, cos, sin), apply_rope(key, cos, sin)
        # 3. Attend within each sequence, project back, add the residual.
        out = context_attention(query, key, value, batch, self.cp, backend=self.backend)
        residual = hidden + linear(out.flatten(1), self.o_proj)
        return rms_norm(residual, self.mlp_norm, eps), residual, None

    def experts(
        self, tokens: Tensor, groups: Groups | None, weight_grads: WeightGradQueue | None
    ) -> Tensor:
        """The MLP; both `[T, H]`."""
        gate_up = linear(tokens, self.gate_up, weight_grads=weight_grads)
        return linear(swiglu(gate_up), self.down_proj, weight_grads=weight_grads)

    def aggregate(self, combined: Tensor, residual: Tensor) -> Tensor:
        """All three `[T, H]`."""
        return residual + combined


QWEN3_KEYS = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
    "": "self_attn.",
}
_FIXED_HF_FIELDS = {"model_type": "qwen3", "use_sliding_window": False}

"""Qwen3, dense: configuration, layers and Hugging Face key map.

Formulas (Qwen3 technical report, arXiv 2505.09388; x is `[T, H]`, n_* are RMS norms):

    attention   q, k, v = Wq n(x), Wk n(x), Wv n(x);  q, k = rope(n_q(q)), rope(n_k(k)) per head
                h = x + Wo softmax(q k' / sqrt(D), causal) v
    layer       h + Wdown (silu(Wgate u) * (Wup u)),  u = n(h)

T tokens, H hidden, D head dim, I width of the MLP. Gate and up are one tensor `[2 * I, H]`, gate
rows first.
The trap: a config.json without `head_dim` means 128, whatever `hidden_size / num_attention_heads`
(Qwen3-0.6B: 64); the small released models tie the head to the embedding.
"""

from dataclasses import dataclass

from pith_engine.context_parallel import context_attention
from pith_engine.contract import Batch, Role, declare
from pith_engine.mesh import Axis
from pith_ops.attention import AttentionBackend
from pith_ops.grouped_linear import Groups
from pith_ops.linear import linear
from pith_ops.rms_norm import rms_norm
from pith_ops.rope import Yarn, apply_rope
from pith_ops.swiglu import swiglu
from pith_ops.weight_grad import WeightGradQueue
from torch import Tensor, nn

from pith_models.chunk import rotary_table
from pith_models.hf import CanonicalTensor, gated_tensors, layer_tensors
from pith_models.hf_config import HfConfigReader, shape_violations, written_hf_fields


@dataclass(frozen=True, kw_only=True)
class Qwen3Config:
    """A dense Qwen3 model, under Hugging Face's field names."""

    vocab_size: int
    """Rows of embedding and head."""
    hidden_size: int
    """Width of the residual stream."""
    num_hidden_layers: int
    """Decoder layers."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key and value heads; divides the query heads."""
    head_dim: int
    """Width of a head; even."""
    intermediate_size: int
    """Width of the MLP."""
    rope_theta: float = 1_000_000.0
    """Base of the rotary frequencies."""
    rope_scaling: Yarn | None = None
    """YaRN, if any."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in every norm."""
    initializer_range: float = 0.02
    """Standard deviation of every initial matrix."""
    max_position_embeddings: int = 40_960
    """Longest sequence, in tokens."""
    tie_word_embeddings: bool = False
    """Whether the head is the embedding."""

    num_experts = num_experts_per_tok = 0
    aligned_sizes, has_window = (), False
    """Not fields: every layer is dense and none slides."""

    def violations(self) -> list[str]:
        """What does not fit, a line each."""
        return shape_violations(self, {})

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer routes: none does."""
        return False

    @staticmethod
    def from_hf(hf_fields: dict) -> "Qwen3Config":
        """Read the fields of a `config.json`; a ValueError names every fault."""
        kinds = hf_fields.get("layer_types")
        full = ["full_attention"] * (len(kinds) if isinstance(kinds, list) else 1)
        neutral = ("sliding_window", "max_window_layers")  # need `use_sliding_window`
        fixed = {**_FIXED_HF_FIELDS, "layer_types": None if kinds is None else full}
        read = HfConfigReader(hf_fields, "Qwen3", fixed=fixed, neutral=neutral)
        return read.config(Qwen3Config, {} if "head_dim" in hf_fields else {"head_dim": 128})

    def to_hf(self) -> dict:
        """The fields of a `config.json`."""
        return written_hf_fields(self, "Qwen3", _FIXED_HF_FIELDS)


class Qwen3Layer(nn.Module):
    """A `DecoderLayer` with one MLP for every token."""

    num_local_experts = 0

    def __init__(self, config: Qwen3Config, backend: AttentionBackend, cp: Axis):
        super().__init__()
        self.config, self.backend, self.cp = config, backend, cp
        H, D, I = config.hidden_size, config.head_dim, config.intermediate_size
        q_width, kv_width = config.num_attention_heads * D, config.num_key_value_heads * D
        std, parts = config.initializer_range, ("gate_proj", "up_proj")
        self.attention_norm = declare((H,), Role.NORM)
        self.q_proj = declare((q_width, H), Role.MATRIX, std=std)
        self.k_proj = declare((kv_width, H), Role.MATRIX, std=std)
        self.v_proj = declare((kv_width, H), Role.MATRIX, std=std)
        self.q_norm = declare((D,), Role.NORM)
        self.k_norm = declare((D,), Role.NORM)
        self.o_proj = declare((H, q_width), Role.MATRIX, std=std)
        self.mlp_norm = declare((H,), Role.NORM)
        self.gate_up = declare((2 * I, H), Role.MATRIX, std=std, parts=parts)
        self.down_proj = declare((H, I), Role.MATRIX, std=std)

    def attention(
        self, hidden: Tensor, batch: Batch, chosen: Tensor | None = None
    ) -> tuple[Tensor, Tensor, None]:
        """`[T, H]` -> normed tokens `[T, H]`, residual `[T, H]`, no routing."""
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
        """The MLP: `[T, H]` -> `[T, H]`."""
        gate_up = linear(tokens, self.gate_up, weight_grads=weight_grads)
        return linear(swiglu(gate_up), self.down_proj, weight_grads=weight_grads)

    def aggregate(self, combined: Tensor, residual: Tensor) -> Tensor:
        """MLP outputs and residual, both `[T, H]` -> hidden `[T, H]`."""
        return residual + combined


def qwen3_tensors(config: Qwen3Config, layer: int) -> list[CanonicalTensor]:
    """Every tensor of a layer, in order."""
    H, D = config.hidden_size, config.head_dim
    Q, KV = config.num_attention_heads * D, config.num_key_value_heads * D
    shapes = {"q_proj": (Q, H), "k_proj": (KV, H), "v_proj": (KV, H)}
    shapes |= {"q_norm": (D,), "k_norm": (D,), "o_proj": (H, Q)}
    plain: dict[str, tuple[str, tuple[int, ...]]] = {
        "attention_norm": ("input_layernorm", (H,)),
        **{name: (f"self_attn.{name}", shape) for name, shape in shapes.items()},
        "mlp_norm": ("post_attention_layernorm", (H,)),
    }
    gated = gated_tensors(layer, "", "mlp", config.intermediate_size, H)
    return layer_tensors(layer, plain) + gated


_FIXED_HF_FIELDS = {
    "model_type": "qwen3",
    "attention_bias": False,
    "use_sliding_window": False,
}

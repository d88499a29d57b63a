"""Qwen3-MoE: configuration, layers and Hugging Face key map.

Formulas (Qwen3 technical report, arXiv 2505.09388; x is `[T, H]`, n_* are RMS norms):

    attention   q, k, v = Wq n(x), Wk n(x), Wv n(x);  q, k = rope(n_q(q)), rope(n_k(k)) per head
                h = x + Wo softmax(q k' / sqrt(D), causal) v
    router      p = softmax(Wr n(h)) over N experts in fp32; the K largest are the weights,
                divided by their sum if `norm_topk_prob`
    experts     y = sum over K experts of p_e * Wdown_e (silu(Wgate_e u) * (Wup_e u)),  u = n(h)
    layer       h + y;  a dense layer has one such MLP of width `intermediate_size` and no router

T tokens, H hidden, D head dim, E experts on this rank, I expert width. Gate and up are one tensor
`[E, 2 * I, H]`, gate rows first; two in checkpoints (`parts`).
The trap: `head_dim` need not be `hidden_size / num_attention_heads` (Qwen3-30B-A3B: 128, not 64).
"""

from dataclasses import dataclass
from functools import partial

from pith_engine.context_parallel import context_attention
from pith_engine.contract import Batch, Role, Routing, declare
from pith_engine.mesh import Axis
from pith_ops.attention import AttentionBackend
from pith_ops.grouped_linear import Groups, grouped_linear
from pith_ops.linear import WeightGradQueue, linear
from pith_ops.rms_norm import rms_norm
from pith_ops.rope import apply_rope
from pith_ops.routing import router_logits, score_topk
from pith_ops.swiglu import swiglu
from torch import Tensor, nn

from pith_models.chunk import rotary_table
from pith_models.hf_config import GroupedQueryConfig, config_from_hf, written_hf_fields
from pith_models.qwen3_dense import Qwen3Config


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(GroupedQueryConfig):
    """A Qwen3-MoE model."""

    moe_intermediate_size: int
    """Width of one expert."""
    num_experts: int
    """Experts of a sparse layer, over all ranks."""
    num_experts_per_tok: int
    """Experts of a token (top-k)."""
    norm_topk_prob: bool = True
    """Whether the chosen probabilities are divided by their sum."""
    mlp_only_layers: tuple[int, ...] = ()
    """Layers (from 0) that are dense whatever `decoder_sparse_step` says."""
    decoder_sparse_step: int = 1
    """Layer i is sparse if `(i + 1) % decoder_sparse_step == 0`."""

    def violations(self) -> list[str]:
        """What does not fit, a line each."""
        faults, layers = super().violations(), self.num_hidden_layers
        if outside := [i for i in self.mlp_only_layers if not 0 <= i < layers]:
            faults.append(
                f"model.mlp_only_layers = {self.mlp_only_layers}: {outside} are not among layers "
                f"0 to {layers - 1}"
            )
        return faults

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer (from 0) routes to experts."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    @staticmethod
    def from_hf(hf_fields: dict) -> "Qwen3MoeConfig":
        """Read a `config.json`; a ValueError names every fault."""
        hidden, heads = hf_fields.get("hidden_size"), hf_fields.get("num_attention_heads")
        head_dim = 2  # `violations` names what is wrong with the others
        if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            head_dim = hidden // heads
        return config_from_hf(
            Qwen3MoeConfig,
            hf_fields,
            fixed=_FIXED_HF_FIELDS,
            defaults={"head_dim": head_dim, "mlp_only_layers": ()},
            neutral=("sliding_window", "max_window_layers"),  # need `use_sliding_window`
        )

    def to_hf(self) -> dict:
        """The fields of a `config.json`."""
        return written_hf_fields(self, "Qwen3Moe", _FIXED_HF_FIELDS)


class Qwen3MoeAttention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, config: Qwen3MoeConfig | Qwen3Config, backend: AttentionBackend, cp: Axis):
        super().__init__()
        self.config, self.backend, self.cp = config, backend, cp
        H, D, std = config.hidden_size, config.head_dim, config.initializer_range
        q_width, kv_width = config.num_attention_heads * D, config.num_key_value_heads * D
        matrix = partial(declare, role=Role.MATRIX, std=std)
        self.norm = declare((H,), Role.NORM)
        self.q_proj = matrix((q_width, H))
        self.k_proj = matrix((kv_width, H))
        self.v_proj = matrix((kv_width, H))
        self.q_norm = declare((D,), Role.NORM)
        self.k_norm = declare((D,), Role.NORM)
        self.o_proj = matrix((H, q_width))

    def forward(self, hidden: Tensor, batch: Batch) -> Tensor:
        """`[T, H]` -> `[T, H]`, with norm and residual."""
        config, D, eps = self.config, self.config.head_dim, self.config.rms_norm_eps
        normed = rms_norm(hidden, self.norm, eps)
        heads = (normed.shape[0], -1, D)
        # 1. Project, and normalise q and k per head.
        query = rms_norm(linear(normed, self.q_proj).view(heads), self.q_norm, eps)
        key = rms_norm(linear(normed, self.k_proj).view(heads), self.k_norm, eps)
        value = linear(normed, self.v_proj).view(heads)
        # 2. Rotate q and k by their positions.
        cos, sin = rotary_table(config, D, hidden, batch)
        query, key = apply_rope(query, cos, sin), apply_rope(key, cos, sin)
        # 3. Attend within each sequence, project back, add the residual.
        out = context_attention(query, key, value, batch, self.cp, backend=self.backend)
        return hidden + linear(out.flatten(1), self.o_proj)


class Qwen3MoeLayer(nn.Module):
    """A `DecoderLayer`, sparse or dense."""

    def __init__(
        self,
        config: Qwen3MoeConfig | Qwen3Config,
        num_local_experts: int,
        backend: AttentionBackend,
        cp: Axis,
    ):
        super().__init__()
        self.config, self.num_local_experts = config, num_local_experts
        H, E, std = config.hidden_size, num_local_experts, config.initializer_range
        self.self_attention = Qwen3MoeAttention(config, backend, cp)
        self.mlp_norm = declare((H,), Role.NORM)
        if E:
            I, parts = config.moe_intermediate_size, ("experts_gate_proj", "experts_up_proj")
            self.router = declare((config.num_experts, H), Role.ROUTER, std=std)
            self.experts_gate_up = declare((E, 2 * I, H), Role.EXPERT_MATRIX, std=std, parts=parts)
            self.experts_down_proj = declare((E, H, I), Role.EXPERT_MATRIX, std=std)
        else:
            I, parts = config.intermediate_size, ("mlp_gate_proj", "mlp_up_proj")
            self.mlp_gate_up = declare((2 * I, H), Role.MATRIX, std=std, parts=parts)
            self.mlp_down_proj = declare((H, I), Role.MATRIX, std=std)

    def attention(
        self, hidden: Tensor, batch: Batch, chosen: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Routing | None]:
        """Normed tokens, residual, both `[T, H]`, routing (to `chosen` if given)."""
        config, residual = self.config, self.self_attention(hidden, batch)
        tokens = rms_norm(residual, self.mlp_norm, config.rms_norm_eps)
        if not self.num_local_experts:
            return tokens, residual, None
        logits = router_logits(tokens, self.router)
        ids, weights, scores = score_topk(
            logits, config.num_experts_per_tok, config.norm_topk_prob, chosen=chosen
        )
        routing = Routing(expert_ids=ids, weights=weights, scores=scores, chosen=ids, logits=logits)
        return tokens, residual, routing

    def experts(
        self, tokens: Tensor, groups: Groups | None, weight_grads: WeightGradQueue | None
    ) -> Tensor:
        """Rows in expert order, or dense tokens; both `[P, H]`."""
        if groups is None:
            gate_up = linear(tokens, self.mlp_gate_up, weight_grads=weight_grads)
            return linear(swiglu(gate_up), self.mlp_down_proj, weight_grads=weight_grads)
        gate_up = grouped_linear(tokens, self.experts_gate_up, groups, weight_grads)
        return grouped_linear(swiglu(gate_up), self.experts_down_proj, groups, weight_grads)

    def aggregate(self, combined: Tensor, residual: Tensor) -> Tensor:
        """All three `[T, H]`."""
        return residual + combined


QWEN3_MOE_KEYS = {
    "self_attention.norm": "input_layernorm.weight",
    "self_attention.": "self_attn.",
    "mlp_norm": "post_attention_layernorm.weight",
    "mlp_": "mlp.",
    "router": "mlp.gate.weight",
    "experts_": "mlp.experts.{}.",
}
_FIXED_HF_FIELDS = {"model_type": "qwen3_moe", "use_sliding_window": False}

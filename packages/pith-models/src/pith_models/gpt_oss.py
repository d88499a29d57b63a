"""GPT-OSS: configuration, layers and Hugging Face key map.

Formulas (model card, arXiv 2508.10925, and the released code; x is `[T, H]`, n_* are RMS norms, all
linear maps of a layer have biases):

    attention   q, k = rope(Wq n(x) + bq), rope(Wk n(x) + bk),  v = Wv n(x) + bv
                P = exp(q k' / sqrt(D)) / (exp(sink) + row sum), a learned sink per query head
                h = x + Wo P v + bo;  a sliding layer sees the last `sliding_window` keys only
    router      l = Wr n(h) + br in fp32; the K largest, softmax over these alone
    experts     g, u = Wgate_e n(h) + bgate_e, Wup_e n(h) + bup_e, clamped: g <= c, -c <= u <= c
                y = sum over K experts of p_e * (Wdown_e ((u + 1) * g * sigmoid(alpha g)) + bdown_e)
    layer       h + y

T tokens, H hidden, D head dim, E experts on this rank, I expert width.
The traps: files interleave the rows of gate and up (here all gate rows are first) and transpose
every expert matrix, which no shape tells where H = I, as released. YaRN does not round its range
(`truncate`), norms round once, and no scaling in a `config.json` means YaRN to transformers.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from pith_engine.context_parallel import context_attention
from pith_engine.contract import Batch, Role, Routing, declare
from pith_engine.mesh import Axis
from pith_ops.attention import AttentionBackend
from pith_ops.grouped_linear import Groups, grouped_linear
from pith_ops.linear import WeightGradQueue, linear
from pith_ops.rms_norm import rms_norm
from pith_ops.rope import apply_rope
from pith_ops.routing import router_logits, topk_softmax
from pith_ops.swiglu import clamped_swiglu
from torch import Tensor, nn

from pith_models.chunk import rotary_table
from pith_models.hf import FusedKey
from pith_models.hf_config import GroupedQueryConfig, config_from_hf, written_hf_fields

_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(GroupedQueryConfig):
    """A GPT-OSS model."""

    num_experts: int
    """Experts of a layer, over all ranks (`num_local_experts` in files)."""
    num_experts_per_tok: int
    """Top-k: experts of a token."""
    sliding_window: int
    """Keys that a query of a sliding layer sees, its own among them."""
    layer_types: tuple[str, ...] = ()
    """`sliding_attention` or `full_attention` a layer; empty: even layers (from 0) slide."""
    rope_theta: float = 150_000.0
    """Base of the rotary frequencies."""
    rms_norm_eps: float = 1e-5
    """Added to the mean square in every norm."""
    swiglu_limit: float = 7.0
    """Upper bound of an expert's gate; of its up projection on both sides."""
    swiglu_alpha: float = 1.702
    """Factor of the gate inside its sigmoid."""
    max_position_embeddings: int = 131_072
    """Longest sequence."""

    aligned_sizes = ("hidden_size", "intermediate_size")
    norm_rounds_once = True

    def violations(self) -> list[str]:
        """What does not fit, a line each."""
        faults, kinds = super().violations(), self.layer_types
        if kinds and (len(kinds) != self.num_hidden_layers or set(kinds) - {_SLIDING, _FULL}):
            faults.append(
                f"model.layer_types = {kinds}: must be empty or {_SLIDING} or {_FULL} for each of "
                f"num_hidden_layers = {self.num_hidden_layers}"
            )
        return faults

    def window(self, layer: int) -> int | None:
        """Keys that a query of the layer sees, if it slides."""
        kinds = self.layer_types
        slides = _SLIDING in kinds[layer : layer + 1] if kinds else layer % 2 == 0
        return self.sliding_window if slides else None

    @staticmethod
    def from_hf(hf_fields: dict) -> "GptOssConfig":
        """Read a `config.json`; a ValueError names every fault."""
        # Without either, transformers takes YaRN.
        rope_key = "rope_parameters" if hf_fields.get("rope_parameters") else "rope_scaling"
        rope, length = hf_fields.get(rope_key), hf_fields.get("initial_context_length")
        if isinstance(rope, dict):
            length = rope.get("original_max_position_embeddings") or length
        config = config_from_hf(
            GptOssConfig,
            hf_fields,
            fixed={**_FIXED_HF_FIELDS, "initial_context_length": length},
            defaults={"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "layer_types": ()},
            needed=(rope_key,),
        )
        derived = replace(config, layer_types=())
        return derived if derived._kinds() == config._kinds() else config

    def to_hf(self) -> dict:
        """The fields of a `config.json`."""
        written = written_hf_fields(self, "GptOss", _FIXED_HF_FIELDS)
        experts = written.pop("num_experts")
        return {**written, "num_local_experts": experts, "layer_types": self._kinds()}

    def _kinds(self) -> list[str]:
        layers = range(self.num_hidden_layers)
        return [_SLIDING if self.window(layer) else _FULL for layer in layers]


class GptOssLayer(nn.Module):
    """A `DecoderLayer`."""

    def __init__(
        self,
        config: GptOssConfig,
        layer: int,
        num_local_experts: int,
        backend: AttentionBackend,
        cp: Axis,
    ):
        super().__init__()
        self.config, self.backend, self.cp = config, backend, cp
        self.num_local_experts = num_local_experts
        self.window = config.window(layer)
        H, D, std = config.hidden_size, config.head_dim, config.initializer_range
        I, E, N = config.intermediate_size, num_local_experts, config.num_experts
        heads, kv_width = config.num_attention_heads, config.num_key_value_heads * D
        parts = ("experts_gate_proj", "experts_up_proj")
        matrix = partial(declare, role=Role.MATRIX, std=std)
        bias = partial(declare, role=Role.BIAS)
        self.attention_norm = declare((H,), Role.NORM)
        self.q_proj = matrix((heads * D, H))
        self.q_bias = bias((heads * D,))
        self.k_proj = matrix((kv_width, H))
        self.k_bias = bias((kv_width,))
        self.v_proj = matrix((kv_width, H))
        self.v_bias = bias((kv_width,))
        self.sinks = declare((heads,), Role.SINK, std=std)
        self.o_proj = matrix((H, heads * D))
        self.o_bias = bias((H,))
        self.mlp_norm = declare((H,), Role.NORM)
        self.router = declare((N, H), Role.ROUTER, std=std)
        self.router_bias = declare((N,), Role.BIAS, std=std)
        self.experts_gate_up = declare((E, 2 * I, H), Role.EXPERT_MATRIX, std=std, parts=parts)
        self.experts_gate_bias = declare((E, I), Role.EXPERT_BIAS)
        self.experts_up_bias = declare((E, I), Role.EXPERT_BIAS)
        self.experts_down_proj = declare((E, H, I), Role.EXPERT_MATRIX, std=std)
        self.experts_down_bias = declare((E, H), Role.EXPERT_BIAS)

    def attention(
        self, hidden: Tensor, batch: Batch, chosen: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Routing]:
        """Normed tokens, residual, both `[T, H]`, routing (to `chosen`)."""
        config, dtype = self.config, hidden.dtype
        D, eps = config.head_dim, config.rms_norm_eps
        # 1. Normalise and project; fp32 biases would make the sums so.
        normed = rms_norm(hidden, self.attention_norm, eps, rounds_once=True)
        heads = (normed.shape[0], -1, D)
        query = linear(normed, self.q_proj, self.q_bias.to(dtype)).view(heads)
        key = linear(normed, self.k_proj, self.k_bias.to(dtype)).view(heads)
        value = linear(normed, self.v_proj, self.v_bias.to(dtype)).view(heads)
        # 2. Rotate q and k by their positions.
        cos, sin = rotary_table(config, D, hidden, batch)
        query, key = apply_rope(query, cos, sin), apply_rope(key, cos, sin)
        # 3. Attend within sequences, project back, add the residual.
        args, backend = (query, key, value, batch, self.cp), self.backend
        out = context_attention(*args, window=self.window, sinks=self.sinks, backend=backend)
        residual = hidden + linear(out.flatten(1), self.o_proj, self.o_bias.to(dtype))
        # 4. Choose the experts.
        tokens = rms_norm(residual, self.mlp_norm, eps, rounds_once=True)
        logits = router_logits(tokens, self.router, self.router_bias)
        ids, weights, scores = topk_softmax(logits, config.num_experts_per_tok, chosen=chosen)
        routing = Routing(expert_ids=ids, weights=weights, scores=scores, chosen=ids, logits=logits)
        return tokens, residual, routing

    def experts(
        self, tokens: Tensor, groups: Groups | None, weight_grads: WeightGradQueue | None
    ) -> Tensor:
        """Rows in expert order; both `[P, H]`."""
        assert groups is not None, "a sparse layer's rows come in expert order"
        config, down = self.config, self.experts_down_proj
        bias = torch.cat([self.experts_gate_bias, self.experts_up_bias], 1)
        gate_up = grouped_linear(tokens, self.experts_gate_up, groups, weight_grads, bias)
        inner = clamped_swiglu(gate_up, limit=config.swiglu_limit, alpha=config.swiglu_alpha)
        return grouped_linear(inner, down, groups, weight_grads, self.experts_down_bias)

    def aggregate(self, combined: Tensor, residual: Tensor) -> Tensor:
        """All three `[T, H]`."""
        return residual + combined


_GATE_UP = "mlp.experts.gate_up_proj"
GPT_OSS_KEYS = {
    "attention_norm": "input_layernorm.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "sinks": "self_attn.sinks",
    "": "self_attn.",
    "o_bias": "self_attn.o_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "router": "mlp.router.weight",
    "router_bias": "mlp.router.bias",
    "experts_gate_proj": FusedKey(_GATE_UP, 0, is_interleaved=True, is_transposed=True),
    "experts_up_proj": FusedKey(_GATE_UP, 1, is_interleaved=True, is_transposed=True),
    "experts_gate_bias": FusedKey(f"{_GATE_UP}_bias", 0, is_interleaved=True),
    "experts_up_bias": FusedKey(f"{_GATE_UP}_bias", 1, is_interleaved=True),
    "experts_down_proj": FusedKey("mlp.experts.down_proj", is_transposed=True),
    "experts_down_bias": FusedKey("mlp.experts.down_proj_bias"),
}
_FIXED_HF_FIELDS = {"model_type": "gpt_oss", "attention_bias": True}

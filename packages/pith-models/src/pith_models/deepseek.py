"""DeepSeek-V2-Lite, V2 and V3: configuration, layers and Hugging Face key map.

Formulas (DeepSeek-V2, arXiv 2405.04434; V3, arXiv 2412.19437; x is `[T, H]`, n_* are RMS norms):

    query       q = Wq n(x), or Wqb n_q(Wqa n(x)) with `q_lora_rank`;  per head Dn + Dr, rope on Dr
    latent      c, r = Wkva n(x), of R and Dr;  c = n_kv(c);  k, v = Wkvb c per head
    attention   k = [k, rope(r)], one rotary key for all heads;  u = (Dn + Dr)^-0.5 * YaRN's factor
                h = x + Wo softmax(u q k', causal) v
    router      V2: s = softmax(Wr n(h)), the K largest;  with `group_limited_greedy` out of the
                groups with the largest best
                V3: s = sigmoid(Wr n(h)), the K largest s + bias out of the groups whose two best
                have the largest sum;  the bias only selects
                w = s, over their sum if `norm_topk_prob`, times `routed_scaling_factor` anyway
    layer       h + shared(n(h)) + sum over K experts of w_e E_e(n(h)), all SwiGLU MLPs;
                h + MLP(n(h)) in the first `first_k_dense_replace`

T tokens, H hidden, R `kv_lora_rank`, Dn, Dr, Dv head dims (`qk_nope_`, `qk_rope_`, `v_`), E
experts on this rank, I expert width. Shared experts are one MLP.

The traps: rotary pairs are (2i, 2i + 1); norms of low ranks have epsilon 1e-6 whatever
`rms_norm_eps` says. V2 models do not normalise weights; if one did, V3's rule would hold here,
where other code differs.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from pith_engine.context_parallel import latent_attention
from pith_engine.contract import Batch, Role, Routing, declare
from pith_engine.mesh import Axis
from pith_ops.attention import AttentionBackend
from pith_ops.grouped_linear import Groups, grouped_linear
from pith_ops.linear import WeightGradQueue, linear
from pith_ops.rms_norm import rms_norm
from pith_ops.rope import apply_rope
from pith_ops.routing import ExpertGroups, router_logits, score_topk
from pith_ops.swiglu import swiglu
from torch import Tensor, nn

from pith_models.chunk import rotary_table
from pith_models.hf_config import DecoderConfig, config_from_hf, written_hf_fields

_LOW_RANK_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(DecoderConfig):
    """A DeepSeek-V2 or V3 model."""

    q_lora_rank: int | None
    """Low rank of the query; None: a full matrix."""
    kv_lora_rank: int
    """Low rank of keys and values: the latent."""
    qk_nope_head_dim: int
    """Width of a head's query and key without positions."""
    qk_rope_head_dim: int
    """Of the rotary part, whose key all heads share; even."""
    v_head_dim: int
    """Width of a head's value."""
    moe_intermediate_size: int
    """Width of one expert."""
    first_k_dense_replace: int
    """How many layers are dense, from the first on."""
    n_routed_experts: int
    """Experts of a sparse layer, over all ranks."""
    n_shared_experts: int
    """Experts' widths in a sparse layer's shared MLP; 0: none."""
    num_experts_per_tok: int
    """Top-k: experts of a token."""
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"]
    """V2's softmax gate without or with groups; V3's sigmoid gate, groups, selection bias."""
    n_group: int = 1
    """Groups of neighbouring experts."""
    topk_group: int = 1
    """Groups that a token's experts come from."""
    norm_topk_prob: bool = False
    """Whether the chosen scores are divided by their sum."""
    routed_scaling_factor: float = 1.0
    """Multiplies the weights."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    max_position_embeddings: int = 163_840
    """Longest sequence."""

    limits = (
        ("num_experts_per_tok", "n_routed_experts"),
        ("first_k_dense_replace", "num_hidden_layers"),
        ("topk_group", "n_group"),
    )
    may_be_zero = ("first_k_dense_replace", "n_shared_experts")

    def violations(self) -> list[str]:
        """What does not fit, a line each."""
        faults, experts, groups = super().violations(), self.n_routed_experts, self.n_group
        if self.q_lora_rank is not None and self.q_lora_rank < 1:
            faults.append(f"model.q_lora_rank = {self.q_lora_rank}: must be at least 1, or None")
        if min(experts, groups) < 1:
            return faults
        size, rest = divmod(experts, groups)
        least, path = 2 if self.is_v3 else 1, f"model.n_group = {groups}: must"
        if self.topk_method == "greedy" and groups > 1:
            faults.append(f"{path} be 1 with topk_method greedy")
        if rest or size < least:
            faults.append(
                f"{path} divide n_routed_experts = {experts} into groups of at least {least}"
            )
        elif self.topk_group * size < self.num_experts_per_tok:
            faults.append(
                f"model.topk_group = {self.topk_group}: groups of {size} must hold "
                f"num_experts_per_tok = {self.num_experts_per_tok}"
            )
        return faults

    @property
    def is_v3(self) -> bool:
        """Whether model_type is deepseek_v3."""
        return self.topk_method == "noaux_tc"

    @property
    def num_experts(self) -> int:
        """Experts of a sparse layer."""
        return self.n_routed_experts

    @property
    def query_dim(self) -> int:
        """Width of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """What query times key is multiplied by."""
        yarn = self.rope_scaling
        return self.query_dim**-0.5 * (yarn.softmax_scale if yarn else 1.0)

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer (from 0) routes."""
        return layer >= self.first_k_dense_replace

    @staticmethod
    def from_hf(hf_fields: dict) -> "DeepseekConfig":
        """Read a `config.json`; a ValueError names every fault."""
        is_v3 = hf_fields.get("model_type") == "deepseek_v3"
        methods = ("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")
        # transformers' V3 has one method, unnamed.
        method = hf_fields.get("topk_method", methods[0])
        # transformers has other defaults where these are absent.
        nulls = {"q_lora_rank": None, "n_shared_experts": 0}
        defaults = {name: null for name, null in nulls.items() if name in hf_fields}
        if method == "greedy":
            defaults |= {"n_group": 1, "topk_group": 1}
        return config_from_hf(
            DeepseekConfig,
            hf_fields,
            fixed={
                **_fixed_hf_fields(is_v3, hf_fields.get("num_attention_heads")),
                "topk_method": method if method in methods else " or ".join(methods),
            },
            defaults={"topk_method": method, **defaults},
            neutral=_NEUTRAL_HF_FIELDS,
        )

    def to_hf(self) -> dict:
        """The fields of a `config.json`."""
        fixed = _fixed_hf_fields(self.is_v3, self.num_attention_heads)
        written = written_hf_fields(self, f"DeepseekV{3 if self.is_v3 else 2}", fixed)
        return {**written, "num_nextn_predict_layers": 0}


class DeepseekAttention(nn.Module):
    """Multi-head latent attention."""

    def __init__(self, config: DeepseekConfig, backend: AttentionBackend, cp: Axis):
        super().__init__()
        self.config, self.backend, self.cp = config, backend, cp
        H, R, heads = config.hidden_size, config.kv_lora_rank, config.num_attention_heads
        q_rank, query_width = config.q_lora_rank, heads * config.query_dim
        matrix = partial(declare, role=Role.MATRIX, std=config.initializer_range)
        self.norm = declare((H,), Role.NORM)
        if q_rank is None:
            self.q_proj = matrix((query_width, H))
        else:
            self.q_a_proj = matrix((q_rank, H))
            self.q_a_norm = declare((q_rank,), Role.NORM)
            self.q_b_proj = matrix((query_width, q_rank))
        self.kv_a_proj = matrix((R + config.qk_rope_head_dim, H))
        self.kv_a_norm = declare((R,), Role.NORM)
        self.kv_b_proj = matrix((heads * (config.qk_nope_head_dim + config.v_head_dim), R))
        self.o_proj = matrix((H, heads * config.v_head_dim))

    def forward(self, hidden: Tensor, batch: Batch) -> Tensor:
        """`[T, H]` -> `[T, H]`, with norm and residual."""
        config = self.config
        rotary_dim, nope_dim = config.qk_rope_head_dim, config.qk_nope_head_dim
        normed = rms_norm(hidden, self.norm, config.rms_norm_eps)
        # 1. Query per head, latent, shared rotary key.
        if config.q_lora_rank is None:
            query = linear(normed, self.q_proj)
        else:
            low_rank = rms_norm(linear(normed, self.q_a_proj), self.q_a_norm, _LOW_RANK_EPSILON)
            query = linear(low_rank, self.q_b_proj)
        query = query.unflatten(1, (-1, config.query_dim))
        latent, key = linear(normed, self.kv_a_proj).split((config.kv_lora_rank, rotary_dim), 1)
        latent = rms_norm(latent, self.kv_a_norm, _LOW_RANK_EPSILON)
        # 2. Rotate the rotary parts by their positions.
        cos, sin = rotary_table(config, rotary_dim, hidden, batch)
        key = apply_rope(key[:, None], cos, sin, interleaved=True)[:, 0]
        rotated = apply_rope(query[..., nope_dim:], cos, sin, interleaved=True)
        query = torch.cat([query[..., :nope_dim], rotated], -1)
        # 3. Attend within sequences, project back, add the residual.
        args, scale = (query, latent, key, self.kv_b_proj, batch, self.cp), config.softmax_scale
        out = latent_attention(*args, scale=scale, backend=self.backend)
        return hidden + linear(out.flatten(1), self.o_proj)


class DeepseekLayer(nn.Module):
    """A `DecoderLayer`, sparse or dense."""

    def __init__(
        self, config: DeepseekConfig, num_local_experts: int, backend: AttentionBackend, cp: Axis
    ):
        super().__init__()
        self.config, self.num_local_experts = config, num_local_experts
        H, I, E = config.hidden_size, config.moe_intermediate_size, num_local_experts
        std, width = config.initializer_range, config.n_shared_experts * I
        self.self_attention = DeepseekAttention(config, backend, cp)
        self.mlp_norm = declare((H,), Role.NORM)
        if E:
            self.router = declare((config.num_experts, H), Role.ROUTER, std=std)
            if config.is_v3:
                self.router_bias = declare((config.num_experts,), Role.BALANCE_BIAS)
            parts = ("experts_gate_proj", "experts_up_proj")
            self.experts_gate_up = declare((E, 2 * I, H), Role.EXPERT_MATRIX, std=std, parts=parts)
            self.experts_down_proj = declare((E, H, I), Role.EXPERT_MATRIX, std=std)
        else:
            width = config.intermediate_size
        if width:  # the MLP, or the shared experts
            parts = ("mlp_gate_proj", "mlp_up_proj")
            self.mlp_gate_up = declare((2 * width, H), Role.MATRIX, std=std, parts=parts)
            self.mlp_down_proj = declare((H, width), Role.MATRIX, std=std)

    def attention(
        self, hidden: Tensor, batch: Batch, chosen: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Routing | None]:
        """Normed tokens, residual, both `[T, H]`, routing (to `chosen`).

        A sparse layer's residual holds what the shared experts add.
        """
        config, residual = self.config, self.self_attention(hidden, batch)
        tokens = rms_norm(residual, self.mlp_norm, config.rms_norm_eps)
        if not self.num_local_experts:
            return tokens, residual, None
        logits = router_logits(tokens, self.router)
        groups = None
        if config.n_group > config.topk_group:
            groups = ExpertGroups(config.n_group, config.topk_group, 2 if config.is_v3 else 1)
        ids, weights, scores = score_topk(
            logits,
            config.num_experts_per_tok,
            config.norm_topk_prob,
            sigmoid=config.is_v3,
            groups=groups,
            scaling=config.routed_scaling_factor,
            chosen=chosen,
            bias=self.router_bias if config.is_v3 else None,
        )
        if config.n_shared_experts:
            residual = residual + self.experts(tokens, None, None)
        routing = Routing(expert_ids=ids, weights=weights, scores=scores, chosen=ids, logits=logits)
        return tokens, residual, routing

    def experts(
        self, tokens: Tensor, groups: Groups | None, weight_grads: WeightGradQueue | None
    ) -> Tensor:
        """Rows in expert order, or tokens of the MLP or shared experts; both `[P, H]`."""
        if groups is None:
            gate_up = linear(tokens, self.mlp_gate_up, weight_grads=weight_grads)
            return linear(swiglu(gate_up), self.mlp_down_proj, weight_grads=weight_grads)
        gate_up = grouped_linear(tokens, self.experts_gate_up, groups, weight_grads)
        return grouped_linear(swiglu(gate_up), self.experts_down_proj, groups, weight_grads)

    def aggregate(self, combined: Tensor, residual: Tensor) -> Tensor:
        """All three `[T, H]`."""
        return residual + combined


def deepseek_keys(is_sparse: bool) -> dict[str, str]:
    """For `layer_tensors`."""
    return {
        "self_attention.norm": "input_layernorm.weight",
        "self_attention.q_a_norm": "self_attn.q_a_layernorm.weight",
        "self_attention.kv_a_proj": "self_attn.kv_a_proj_with_mqa.weight",
        "self_attention.kv_a_norm": "self_attn.kv_a_layernorm.weight",
        "self_attention.": "self_attn.",
        "mlp_norm": "post_attention_layernorm.weight",
        "mlp_": "mlp.shared_experts." if is_sparse else "mlp.",
        "router": "mlp.gate.weight",
        "router_bias": "mlp.gate.e_score_correction_bias",
        "experts_": "mlp.experts.{}.",
    }


def _fixed_hf_fields(is_v3: bool, num_heads: object) -> dict[str, object]:
    return {
        "model_type": f"deepseek_v{3 if is_v3 else 2}",
        "scoring_func": "sigmoid" if is_v3 else "softmax",
        "num_key_value_heads": num_heads,
        "mlp_bias": False,
        "moe_layer_freq": 1,
        "rope_interleave": True,
    }


_NEUTRAL_HF_FIELDS = (
    "aux_loss_alpha",
    "ep_size",
    "head_dim",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "qk_head_dim",
    "seq_aux",
)

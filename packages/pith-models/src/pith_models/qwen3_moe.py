"""Qwen3-MoE: configuration, layers and Hugging Face key map.

Formulas (Qwen3 technical report, arXiv 2505.09388; x is `[T, H]`, n_* are RMS norms):

    attention   q, k, v = Wq n(x), Wk n(x), Wv n(x);  q, k = rope(n_q(q)), rope(n_k(k)) per head
                h = x + Wo softmax(q k' / sqrt(D), causal) v
    router      p = softmax(Wr n(h)) over N experts in fp32; the K largest are the weights,
                divided by their sum if `norm_topk_prob`
    experts     y = sum over K experts of p_e * Wdown_e (silu(Wgate_e u) * (Wup_e u)),  u = n(h)
    layer       h + y;  a dense layer has one such MLP of width `intermediate_size` and no router

T tokens, H hidden, D head dim, E experts on this rank, I expert width. Gate and up are stored as
one tensor `[E, 2 * I, H]`, gate rows first; checkpoints see two (`parts`).
The trap: `head_dim` need not be `hidden_size / num_attention_heads` (Qwen3-30B-A3B: 128, not 64).
"""

from dataclasses import asdict, dataclass, fields

from pith_engine.context_parallel import context_attention
from pith_engine.contract import Batch, Role, Routing, declare
from pith_engine.mesh import Axis
from pith_engine.violations import size_violations
from pith_ops.attention import AttentionBackend
from pith_ops.device import accumulation_dtype
from pith_ops.grouped_linear import Groups, grouped_linear
from pith_ops.linear import linear
from pith_ops.rms_norm import rms_norm
from pith_ops.rope import Yarn, apply_rope, rope_frequencies, rope_table
from pith_ops.routing import router_logits, softmax_topk
from pith_ops.swiglu import swiglu
from pith_ops.weight_grad import WeightGradQueue
from torch import Tensor, nn

from pith_models.hf import CanonicalTensor, gated_expert_tensors
from pith_models.hf_config import HfConfigReader, head_violations, rope_hf_fields


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig:
    """A Qwen3-MoE model, under Hugging Face's field names."""

    vocab_size: int
    """Rows of the embedding and of the head; may exceed the tokenizer's vocabulary."""
    hidden_size: int
    """Width of the residual stream."""
    num_hidden_layers: int
    """Decoder layers."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key and value heads; divides the query heads."""
    head_dim: int
    """Width of a head; even, independent of the hidden size."""
    intermediate_size: int
    """Width of the MLP in dense layers."""
    moe_intermediate_size: int
    """Width of one expert."""
    num_experts: int
    """Experts of a sparse layer, over all ranks."""
    num_experts_per_tok: int
    """Top-k: experts that each token is sent to."""
    norm_topk_prob: bool = True
    """Whether the k chosen probabilities are divided by their sum."""
    mlp_only_layers: tuple[int, ...] = ()
    """Layers (from 0) that are dense whatever `decoder_sparse_step` says."""
    decoder_sparse_step: int = 1
    """Layer i is sparse if `(i + 1) % decoder_sparse_step == 0`."""
    rope_theta: float = 1_000_000.0
    """Base of the rotary frequencies."""
    rope_scaling: Yarn | None = None
    """YaRN for longer contexts than the model was first trained on, if any."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square inside every norm."""
    initializer_range: float = 0.02
    """Standard deviation of every initial matrix."""
    max_position_embeddings: int = 40_960
    """Longest sequence that the model is meant for."""
    tie_word_embeddings: bool = False
    """Whether the head is the embedding: one parameter, whose gradient sums both uses."""

    def violations(self) -> list[str]:
        """What is out of range or does not fit, a line each."""
        faults = size_violations(self) + head_violations(self)
        if self.num_experts_per_tok > self.num_experts:
            faults.append(
                f"model.num_experts_per_tok = {self.num_experts_per_tok}: must be at most "
                f"num_experts = {self.num_experts}"
            )
        outside = [i for i in self.mlp_only_layers if not 0 <= i < self.num_hidden_layers]
        if outside:
            faults.append(
                f"model.mlp_only_layers = {self.mlp_only_layers}: {outside} are not among layers "
                f"0 to {self.num_hidden_layers - 1}"
            )
        return faults

    @property
    def query_dim(self) -> int:
        """Width of a head's query and key."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a head's value."""
        return self.head_dim

    @property
    def has_window(self) -> bool:
        """Whether any layer attends within a sliding window."""
        return False

    @property
    def aligned_sizes(self) -> dict[str, int]:
        """Field -> value of the sizes in grouped products, which GPUs want in multiples of 8."""
        return {
            "hidden_size": self.hidden_size,
            "moe_intermediate_size": self.moe_intermediate_size,
        }

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer of this global number routes its tokens to experts."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    @staticmethod
    def from_hf(hf_fields: dict) -> "Qwen3MoeConfig":
        """Read the fields of a `config.json`, in the spelling of transformers 4 or 5.

        A ValueError names every key that is missing or unknown, or whose value has another type, is
        out of range or not implemented.
        """
        # The windows need `use_sliding_window`, which must be false.
        neutral = ("sliding_window", "max_window_layers")
        read = HfConfigReader(hf_fields, "Qwen3-MoE", fixed=_FIXED_HF_FIELDS, neutral=neutral)
        theta, scaling = read.rope()
        plain = {name: read.required(name) for name in _PLAIN_HF_FIELDS}
        experts = read.required("num_experts", "num_local_experts")
        head_dim, dense = read.optional("head_dim", None), read.optional("mlp_only_layers", [])
        tied = read.optional("tie_word_embeddings", False)
        read.raise_faults()
        if head_dim is None:
            hidden, heads = plain["hidden_size"], plain["num_attention_heads"]
            # `violations` names anything else.
            head_dim = hidden // heads if type(hidden) is type(heads) is int and heads > 0 else 2
        return read.checked(
            Qwen3MoeConfig(
                **plain,
                num_experts=experts,
                head_dim=head_dim,
                mlp_only_layers=tuple(dense) if isinstance(dense, list) else dense,
                rope_theta=theta,
                rope_scaling=scaling,
                tie_word_embeddings=tied,
            )
        )

    def to_hf(self) -> dict:
        """The fields of a `config.json` that transformers 4 and 5 and vLLM read alike."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            **_FIXED_HF_FIELDS,
            **asdict(self),
            **rope_hf_fields(self.rope_theta, self.rope_scaling),
            "mlp_only_layers": list(self.mlp_only_layers),
        }


class Qwen3MoeAttention(nn.Module):
    """Grouped-query attention with its input norm and residual."""

    def __init__(self, config: Qwen3MoeConfig, backend: AttentionBackend, cp: Axis):
        super().__init__()
        self.config, self.backend, self.cp = config, backend, cp
        H, D, std = config.hidden_size, config.head_dim, config.initializer_range
        q_width, kv_width = config.num_attention_heads * D, config.num_key_value_heads * D
        self.norm = declare((H,), Role.NORM)
        self.q_proj = declare((q_width, H), Role.MATRIX, std=std)
        self.k_proj = declare((kv_width, H), Role.MATRIX, std=std)
        self.v_proj = declare((kv_width, H), Role.MATRIX, std=std)
        self.q_norm = declare((D,), Role.NORM)
        self.k_norm = declare((D,), Role.NORM)
        self.o_proj = declare((H, q_width), Role.MATRIX, std=std)

    def forward(self, hidden: Tensor, batch: Batch) -> Tensor:
        """`[T, H]` -> `[T, H]`, the input added."""
        config = self.config
        D, eps = config.head_dim, config.rms_norm_eps
        normed = rms_norm(hidden, self.norm, eps)
        heads = (normed.shape[0], -1, D)
        # 1. Project, and normalise q and k per head.
        query = rms_norm(linear(normed, self.q_proj).view(heads), self.q_norm, eps)
        key = rms_norm(linear(normed, self.k_proj).view(heads), self.k_norm, eps)
        value = linear(normed, self.v_proj).view(heads)
        # 2. Rotate q and k by their positions.
        wide = accumulation_dtype(hidden.dtype)
        yarn = config.rope_scaling
        frequencies = rope_frequencies(
            D, config.rope_theta, yarn=yarn, dtype=wide, device=hidden.device
        )
        cos, sin = rope_table(batch.positions, frequencies, yarn.table_scale if yarn else 1.0)
        query, key = apply_rope(query, cos, sin), apply_rope(key, cos, sin)
        # 3. Attend within each sequence, project back, add the residual.
        out = context_attention(query, key, value, batch, self.cp, backend=self.backend)
        return hidden + linear(out.flatten(1), self.o_proj)


class Qwen3MoeSparseLayer(nn.Module):
    """A `DecoderLayer` whose tokens go to K of the experts."""

    def __init__(
        self, config: Qwen3MoeConfig, num_local_experts: int, backend: AttentionBackend, cp: Axis
    ):
        super().__init__()
        self.config, self.num_local_experts = config, num_local_experts
        H, I, E = config.hidden_size, config.moe_intermediate_size, num_local_experts
        std, parts = config.initializer_range, ("experts_gate_proj", "experts_up_proj")
        self.self_attention = Qwen3MoeAttention(config, backend, cp)
        self.mlp_norm = declare((H,), Role.NORM)
        self.router = declare((config.num_experts, H), Role.ROUTER, std=std)
        self.experts_gate_up = declare((E, 2 * I, H), Role.EXPERT_MATRIX, std=std, parts=parts)
        self.experts_down_proj = declare((E, H, I), Role.EXPERT_MATRIX, std=std)

    def attention(
        self, hidden: Tensor, batch: Batch, chosen: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Routing]:
        """`[T, H]` -> normed tokens `[T, H]`, residual `[T, H]`, routing to `chosen` if given."""
        config, residual = self.config, self.self_attention(hidden, batch)
        tokens = rms_norm(residual, self.mlp_norm, config.rms_norm_eps)
        logits = router_logits(tokens, self.router)
        ids, weights, scores = softmax_topk(
            logits, config.num_experts_per_tok, config.norm_topk_prob, chosen=chosen
        )
        routing = Routing(expert_ids=ids, weights=weights, scores=scores, chosen=ids, logits=logits)
        return tokens, residual, routing

    def experts(
        self, tokens: Tensor, groups: Groups | None, weight_grads: WeightGradQueue | None
    ) -> Tensor:
        """Rows in expert order `[P, H]` -> unweighted expert outputs `[P, H]`."""
        assert groups is not None, "a sparse layer's rows come in expert order"
        gate_up = grouped_linear(tokens, self.experts_gate_up, groups, weight_grads)
        return grouped_linear(swiglu(gate_up), self.experts_down_proj, groups, weight_grads)

    def aggregate(self, combined: Tensor, residual: Tensor) -> Tensor:
        """Weighted expert sums and residual, both `[T, H]` -> hidden `[T, H]`."""
        return residual + combined


class Qwen3MoeDenseLayer(nn.Module):
    """A `DecoderLayer` with one MLP for every token."""

    num_local_experts = 0

    def __init__(self, config: Qwen3MoeConfig, backend: AttentionBackend, cp: Axis):
        super().__init__()
        self.config = config
        H, I, std = config.hidden_size, config.intermediate_size, config.initializer_range
        self.self_attention = Qwen3MoeAttention(config, backend, cp)
        self.mlp_norm = declare((H,), Role.NORM)
        parts = ("mlp_gate_proj", "mlp_up_proj")
        self.mlp_gate_up = declare((2 * I, H), Role.MATRIX, std=std, parts=parts)
        self.mlp_down_proj = declare((H, I), Role.MATRIX, std=std)

    def attention(
        self, hidden: Tensor, batch: Batch, chosen: Tensor | None = None
    ) -> tuple[Tensor, Tensor, None]:
        """`[T, H]` -> normed tokens `[T, H]`, residual `[T, H]`, no routing."""
        residual = self.self_attention(hidden, batch)
        return rms_norm(residual, self.mlp_norm, self.config.rms_norm_eps), residual, None

    def experts(
        self, tokens: Tensor, groups: Groups | None, weight_grads: WeightGradQueue | None
    ) -> Tensor:
        """The MLP: `[T, H]` -> `[T, H]`."""
        gate_up = linear(tokens, self.mlp_gate_up, weight_grads=weight_grads)
        return linear(swiglu(gate_up), self.mlp_down_proj, weight_grads=weight_grads)

    def aggregate(self, combined: Tensor, residual: Tensor) -> Tensor:
        """MLP outputs and residual, both `[T, H]` -> hidden `[T, H]`."""
        return residual + combined


def qwen3_moe_layer(
    config: Qwen3MoeConfig,
    layer: int,
    *,
    num_local_experts: int,
    attention_backend: AttentionBackend,
    cp: Axis,
) -> Qwen3MoeSparseLayer | Qwen3MoeDenseLayer:
    """The layer of this global number, on the meta device."""
    if config.is_sparse(layer):
        return Qwen3MoeSparseLayer(config, num_local_experts, attention_backend, cp)
    return Qwen3MoeDenseLayer(config, attention_backend, cp)


def qwen3_moe_tensors(config: Qwen3MoeConfig) -> tuple[CanonicalTensor, ...]:
    """Every tensor of the whole model, in order."""
    V, H, D = config.vocab_size, config.hidden_size, config.head_dim
    q_width, kv_width = config.num_attention_heads * D, config.num_key_value_heads * D
    E = config.num_experts
    tied, head = config.tie_word_embeddings, "lm_head.weight"
    embedding_keys, copies = ("model.embed_tokens.weight",), (head,) if tied else ()
    tensors = [CanonicalTensor("embedding", (V, H), embedding_keys, copies=copies)]
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        plain: list[tuple[str, tuple[int, ...], str]] = [
            ("self_attention.norm", (H,), "input_layernorm"),
            ("self_attention.q_proj", (q_width, H), "self_attn.q_proj"),
            ("self_attention.k_proj", (kv_width, H), "self_attn.k_proj"),
            ("self_attention.v_proj", (kv_width, H), "self_attn.v_proj"),
            ("self_attention.q_norm", (D,), "self_attn.q_norm"),
            ("self_attention.k_norm", (D,), "self_attn.k_norm"),
            ("self_attention.o_proj", (H, q_width), "self_attn.o_proj"),
            ("mlp_norm", (H,), "post_attention_layernorm"),
        ]
        if config.is_sparse(layer):
            plain.append(("router", (E, H), "mlp.gate"))
        else:
            width = config.intermediate_size
            shapes = {"gate_proj": (width, H), "up_proj": (width, H), "down_proj": (H, width)}
            plain += [(f"mlp_{name}", shape, f"mlp.{name}") for name, shape in shapes.items()]
        tensors += [
            CanonicalTensor(f"{ours}.{name}", shape, (f"{theirs}.{key}.weight",))
            for name, shape, key in plain
        ]
        if config.is_sparse(layer):
            stem, width = f"{theirs}.mlp.experts", config.moe_intermediate_size
            tensors += gated_expert_tensors(f"{ours}.experts", stem, E, width, H)
    tensors.append(CanonicalTensor("final_norm", (H,), ("model.norm.weight",)))
    if not tied:
        tensors.append(CanonicalTensor("head", (V, H), (head,)))
    return tuple(tensors)


def qwen3_moe_layer_flops(config: Qwen3MoeConfig, layer: int, sequence_length: int) -> float:
    """Forward operations of one layer per token, causal attention counted by half."""
    H, width = config.hidden_size, config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    projections = 2 * H * (2 * width + 2 * kv_width)
    scores_and_values = 2 * 2 * width * (sequence_length + 1) / 2
    if config.is_sparse(layer):
        experts = config.num_experts_per_tok * 6 * H * config.moe_intermediate_size
        return projections + scores_and_values + experts + 2 * H * config.num_experts
    return projections + scores_and_values + 6 * H * config.intermediate_size


_RESPELLED_HF_FIELDS = (
    "num_experts",
    "head_dim",
    "mlp_only_layers",
    "rope_theta",
    "rope_scaling",
    "tie_word_embeddings",
)
_PLAIN_HF_FIELDS = tuple(
    field.name for field in fields(Qwen3MoeConfig) if field.name not in _RESPELLED_HF_FIELDS
)
_FIXED_HF_FIELDS = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
}

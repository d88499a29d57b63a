"""What configurations have in common, and reading a Hugging Face `config.json` strictly.

A field is read by the family, must have its one implemented value, or has no effect on the forward
pass; any other is an error. RoPE has two spellings:
`rope_theta` and `rope_scaling` (transformers 4), `rope_parameters` (transformers 5).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from pith_engine.violations import raise_violations, size_violations, type_violations
from pith_ops.rope import Yarn

NEUTRAL_HF_FIELDS = (
    "architectures",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "router_aux_loss_coef",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
"""Without effect on the forward pass."""
_SPELLINGS = {
    "num_experts": ("num_experts", "num_local_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "experts_per_token"),
}
_FIXED_HF_FIELDS = {"hidden_act": "silu", "attention_dropout": 0.0, "attention_bias": False}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The fields of every family, under Hugging Face's names."""

    vocab_size: int
    """Rows of embedding and head."""
    hidden_size: int
    """Width of the residual stream."""
    num_hidden_layers: int
    """Decoder layers."""
    num_attention_heads: int
    """Query heads."""
    intermediate_size: int
    """Width of a dense layer's MLP; of an expert where no layer is dense (GPT-OSS)."""
    rope_theta: float = 1_000_000.0
    """Base of the rotary frequencies."""
    rope_scaling: Yarn | None = None
    """YaRN, if any."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in norms of the residual stream."""
    initializer_range: float = 0.02
    """Standard deviation of initial matrices."""
    max_position_embeddings: int = 40_960
    """Longest sequence."""
    tie_word_embeddings: bool = False
    """Whether the head is the embedding."""

    # Not fields:
    aligned_sizes = ("hidden_size", "moe_intermediate_size")  # those of grouped products
    limits = (("num_experts_per_tok", "num_experts"),)  # a field and the one that bounds it
    may_be_zero = ()
    norm_rounds_once = False

    def window(self, layer: int) -> int | None:
        """Keys that a query of the layer (from 0) sees, if it slides."""
        return None

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer (from 0) routes to experts."""
        return True

    def violations(self) -> list[str]:
        """What does not fit, a line each."""
        values, found = asdict(self), size_violations(self, may_be_zero=self.may_be_zero)
        found += [
            f"model.{name} = {values[name]}: must be at most {limit} = {values[limit]}"
            for name, limit in self.limits
            if name in values and values[name] > values[limit]
        ]
        heads, groups = self.num_attention_heads, values.get("num_key_value_heads", 1)
        if groups >= 1 and heads % groups:
            found.append(
                f"model.num_attention_heads = {heads}: must be a multiple of "
                f"num_key_value_heads = {groups}"
            )
        found += [
            f"model.{name} = {values[name]}: must be even for rotary embeddings"
            for name in ("head_dim", "qk_rope_head_dim")
            if values.get(name, 0) % 2
        ]
        if scaling := self.rope_scaling:
            found += scaling.violations("model.rope_scaling")
            if self.rope_theta <= 1:
                found.append(f"model.rope_theta = {self.rope_theta}: YaRN needs more than 1")
        return found


@dataclass(frozen=True, kw_only=True)
class GroupedQueryConfig(DecoderConfig):
    """The fields of grouped-query attention."""

    num_key_value_heads: int
    """Key and value heads; divides the query heads."""
    head_dim: int
    """Width of a head; even."""


_Config = TypeVar("_Config", bound=DecoderConfig)


def config_from_hf(
    family: type[_Config],
    hf_fields: Mapping[str, Any],
    *,
    fixed: Mapping[str, object],
    defaults: Mapping[str, object],
    neutral: Sequence[str] = (),
    needed: Sequence[str] = (),
) -> _Config:
    """Make a configuration of the fields of a `config.json`; ValueError with all faults.

    `fixed` fields have one implemented value, `defaults` is for fields absent or null, `neutral`
    adds to `NEUTRAL_HF_FIELDS`, `needed` are others that must be there.
    """
    fixed = {**_FIXED_HF_FIELDS, **fixed}
    defaults = {"tie_word_embeddings": False, **defaults}
    given = {key: value for key, value in hf_fields.items() if not key.startswith("_")}
    faults = [
        f"{key} = {given[key]!r}: only {allowed} is implemented"
        for key, allowed in fixed.items()
        if given.get(key, allowed) != allowed
    ]
    quantized = _object(given, "quantization_config", faults)
    method, block = quantized.get("quant_method"), quantized.get("weight_block_size")
    if quantized and method != "mxfp4" and (method, block) != ("fp8", [128, 128]):
        faults.append(
            f"quantization_config = {quantized}: only mxfp4, and fp8 in blocks of [128, 128], "
            "can be decoded"
        )
    theta, scaling = _rope(given, faults)
    values: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling}
    known = {*fixed, *neutral, *NEUTRAL_HF_FIELDS, "quantization_config", "rope_parameters"}
    for name in [field.name for field in fields(family)]:
        names = _SPELLINGS.get(name, (name,))
        known.update(names)
        if name in values:
            continue
        found = [given[key] for key in names if given.get(key) is not None]
        values[name] = found[0] if found else defaults.get(name)
        if any(value != found[0] for value in found) or not (found or name in defaults):
            problem = f"one value needed, found {found}" if len(names) > 1 else "missing"
            faults.append(f"{', '.join(names)}: {problem}")
    faults += [f"{name}: missing" for name in needed if not given.get(name)]
    faults += [
        f"{key} = {value!r}: unknown field, and it may change what the model computes"
        for key, value in given.items()
        if key not in known
    ]
    what = f"config.json of a {fixed['model_type']} model"
    raise_violations(faults, what)
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    config = family(**values)
    raise_violations(type_violations(asdict(config), family, "model") or config.violations(), what)
    return config


def _object(given: Mapping[str, Any], name: str, faults: list[str]) -> dict[str, Any]:
    value = given.get(name)
    if isinstance(value, dict):
        return {key: inner for key, inner in value.items() if inner is not None}
    if value is not None:
        faults.append(f"{name} = {value!r}: must be an object or null")
    return {}


def _rope(given: Mapping[str, Any], faults: list[str]) -> tuple[float, Yarn | None]:
    thetas, scalings = [given.get("rope_theta")], []
    for key in ("rope_scaling", "rope_parameters"):
        nested = _object(given, key, faults)
        thetas.append(nested.pop("rope_theta", None))
        kinds = {str(nested.pop(name)) for name in ("rope_type", "type") if name in nested}
        if nested or kinds:
            scalings.append(_scaling(key, kinds, nested, faults))
    found = [theta for theta in thetas if theta is not None]
    if not found or any(theta != found[0] for theta in found):
        names = "rope_theta, rope_parameters.rope_theta"
        faults.append(f"{names}: one value needed, found {sorted(found, key=str)}")
    if any(scaling != scalings[0] for scaling in scalings):
        faults.append("rope_scaling and rope_parameters contradict each other")
    theta = found[0] if found else 0.0
    return float(theta) if type(theta) is int else theta, scalings[0] if scalings else None


def _scaling(key: str, kinds: set[str], given: dict[str, Any], faults: list[str]) -> Yarn | None:
    unknown = sorted(given.keys() - {field.name for field in fields(Yarn)})
    missing = sorted({"factor", "original_max_position_embeddings"} - given.keys())
    if kinds <= {"default"}:
        if given:
            faults.append(f"{key}: {sorted(given)} have no meaning with rope_type 'default'")
    elif kinds != {"yarn"}:
        allowed = "only 'default' and 'yarn' are implemented"
        faults.append(f"{key}.rope_type = {sorted(kinds)}: {allowed}")
    elif unknown or missing:
        faults.append(f"{key}: missing {missing}, unknown {unknown}")
    else:
        return Yarn(**given)
    return None


def written_hf_fields(
    config: DecoderConfig, name: str, fixed: Mapping[str, object]
) -> dict[str, Any]:
    """The fields of a `config.json` that transformers 4 and 5 and vLLM read alike."""
    own: dict[str, Any] = asdict(config)
    own |= {key: list(v) for key, v in own.items() if isinstance(v, tuple)}
    rope: dict[str, object] = {"rope_type": "default"}
    if yarn := own["rope_scaling"]:
        rope = {"rope_type": "yarn", **{key: v for key, v in yarn.items() if v is not None}}
        own["rope_scaling"] = {"type": "yarn", **rope}
    rope["rope_theta"] = config.rope_theta
    own |= {"architectures": [f"{name}ForCausalLM"], "rope_parameters": rope}
    return {**_FIXED_HF_FIELDS, **fixed, **own}

"""Reading a Hugging Face `config.json` strictly, whichever family it describes.

A field is read by the family, must have its one implemented value, or has no effect on the forward
pass; any other may change what the model computes: an error. RoPE has two spellings:
`rope_theta` and `rope_scaling` (transformers 4), `rope_parameters` (transformers 5).
"""

from collections.abc import Mapping, Sequence
from dataclasses import Field, asdict, fields
from typing import Any, ClassVar, Protocol, TypeVar

from pith_engine.violations import raise_violations, size_violations, type_violations
from pith_ops.rope import Yarn


class _Checkable(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def violations(self) -> list[str]: ...


_Config = TypeVar("_Config", bound=_Checkable)

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
_FIXED_HF_FIELDS = {"hidden_act": "silu", "attention_dropout": 0.0}


class HfConfigReader:
    """Makes a configuration of the fields of a `config.json`."""

    def __init__(
        self,
        hf_fields: Mapping[str, Any],
        family: str,
        *,
        fixed: Mapping[str, object],
        neutral: Sequence[str] = (),
    ):
        """`fixed` fields have one implemented value; `neutral` adds to `NEUTRAL_HF_FIELDS`."""
        fixed = {**_FIXED_HF_FIELDS, **fixed}
        self._values = {key: v for key, v in hf_fields.items() if not key.startswith("_")}
        self._what = f"config.json of a {family} model"
        self._known = {*fixed, *neutral, *NEUTRAL_HF_FIELDS}
        self._faults = [
            f"{key} = {self._values[key]!r}: only {allowed} is implemented"
            for key, allowed in fixed.items()
            if self._values.get(key, allowed) != allowed
        ]
        quantized = self._object("quantization_config")
        method, block = quantized.get("quant_method"), quantized.get("weight_block_size")
        if quantized and method != "mxfp4" and (method, block) != ("fp8", [128, 128]):
            self._faults.append(
                f"quantization_config = {quantized}: only mxfp4, and fp8 in blocks of [128, 128], "
                "can be decoded"
            )

    def required(self, *spellings: str) -> Any:
        """The one value under these names; absent is a fault."""
        self._known.update(spellings)
        found = [self._values[key] for key in spellings if self._values.get(key) is not None]
        if not found or any(value != found[0] for value in found):
            problem = f"one value needed, found {found}" if len(spellings) > 1 else "missing"
            self._faults.append(f"{', '.join(spellings)}: {problem}")
        return found[0] if found else None

    def optional(self, name: str, default: Any) -> Any:
        """A field's value; the default where absent or null."""
        self._known.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def config(self, family: type[_Config], own: Mapping[str, Any]) -> _Config:
        """`own` fields, RoPE, others by name; lists become tuples. ValueError with all faults."""
        theta, scaling = self._rope()
        tied = self.optional("tie_word_embeddings", False)
        values = {"rope_theta": theta, "rope_scaling": scaling, "tie_word_embeddings": tied, **own}
        names = [field.name for field in fields(family)]
        values |= {name: self.required(name) for name in names if name not in values}
        self._faults += [
            f"{key} = {value!r}: unknown field, and it may change what the model computes"
            for key, value in self._values.items()
            if key not in self._known
        ]
        raise_violations(self._faults, self._what)
        config = family(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
        wrong = type_violations(asdict(config), family, "model") or config.violations()
        raise_violations(wrong, self._what)
        return config

    def _object(self, name: str) -> dict[str, Any]:
        given = self.optional(name, {})
        if isinstance(given, dict):
            return {key: value for key, value in given.items() if value is not None}
        self._faults.append(f"{name} = {given!r}: must be an object or null")
        return {}

    def _rope(self) -> tuple[float, Yarn | None]:
        thetas, scalings = [self.optional("rope_theta", None)], []
        for key in ("rope_scaling", "rope_parameters"):
            nested = self._object(key)
            thetas.append(nested.pop("rope_theta", None))
            kinds = {str(nested.pop(name)) for name in ("rope_type", "type") if name in nested}
            if nested or kinds - {"default"}:
                scalings.append(self._scaling(key, kinds, nested))
        found = [theta for theta in thetas if theta is not None]
        if not found or any(theta != found[0] for theta in found):
            names = "rope_theta, rope_parameters.rope_theta"
            self._faults.append(f"{names}: one value needed, found {sorted(found, key=str)}")
        if any(scaling != scalings[0] for scaling in scalings):
            self._faults.append("rope_scaling and rope_parameters contradict each other")
        theta = found[0] if found else 0.0
        return float(theta) if type(theta) is int else theta, scalings[0] if scalings else None

    def _scaling(self, key: str, kinds: set[str], given: dict[str, Any]) -> Yarn | None:
        if kinds != {"yarn"}:
            fault = f".rope_type = {sorted(kinds)}: only 'default' and 'yarn' are implemented"
            if kinds <= {"default"}:
                fault = f": {sorted(given)} have no meaning with rope_type 'default'"
            self._faults.append(key + fault)
            return None
        unknown = sorted(given.keys() - {field.name for field in fields(Yarn)})
        missing = sorted({"factor", "original_max_position_embeddings"} - given.keys())
        if unknown or missing:
            self._faults.append(f"{key}: missing {missing}, unknown {unknown}")
            return None
        return Yarn(**given)


def shape_violations(
    config: Any, limits: Mapping[str, str], *, may_be_zero: Sequence[str] = ()
) -> list[str]:
    """Sizes out of range or above their limit, heads and RoPE that do not fit."""
    values, found = asdict(config), size_violations(config, may_be_zero=may_be_zero)
    found += [
        f"model.{name} = {values[name]}: must be at most {limit} = {values[limit]}"
        for name, limit in limits.items()
        if values[name] > values[limit]
    ]
    heads, groups = config.num_attention_heads, values.get("num_key_value_heads", 1)
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
    scaling = config.rope_scaling
    return found + (scaling.violations("model.rope_scaling") if scaling else [])


def written_hf_fields(config: Any, name: str, fixed: Mapping[str, object]) -> dict[str, Any]:
    """The fields of a `config.json` that transformers 4 and 5 and vLLM read alike."""
    own = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(config).items()}
    scaling: dict[str, object] = {"rope_type": "default"}
    if yarn := config.rope_scaling:
        given = {key: v for key, v in asdict(yarn).items() if v is not None}
        scaling = {"rope_type": "yarn", **given}
        own["rope_scaling"] = {"type": "yarn", **scaling}
    rope = {**scaling, "rope_theta": config.rope_theta}
    written = {"architectures": [f"{name}ForCausalLM"], **_FIXED_HF_FIELDS, **fixed}
    return {**written, **own, "rope_parameters": rope}

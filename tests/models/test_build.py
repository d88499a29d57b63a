"""Configurations, chunks and counts, all on the meta device."""

import re
from dataclasses import replace
from math import prod

import pytest
from pith_engine.contract import DeclaredParameter
from pith_engine.mesh import Mesh, MeshConfig
from pith_models.build import (
    build_chunks,
    canonical_tensors,
    forward_flops,
    model_config_from_hf,
    parameter_counts,
)
from pith_models.qwen3_moe import Qwen3MoeConfig
from pith_ops.attention import AttentionBackend
from pith_ops.rope import Yarn
from transformers import Qwen3MoeConfig as TheirConfig

# The published config.json of Qwen3-30B-A3B, in the spelling of transformers 4.
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
TINY = Qwen3MoeConfig(
    vocab_size=97,
    hidden_size=64,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=80,
    moe_intermediate_size=24,
    num_experts=8,
    num_experts_per_tok=2,
    mlp_only_layers=(2,),
)


def declared(mesh: Mesh, config: Qwen3MoeConfig, layers: tuple[int, ...]):
    chunks = build_chunks(config, mesh, layers, attention_backend=AttentionBackend.REFERENCE)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            assert isinstance(parameter, DeclaredParameter)
            yield name, parameter


def test_published_model_has_its_published_size():
    config = model_config_from_hf(QWEN3_30B_A3B)
    on_meta = sum(p.numel() for _, p in declared(Mesh.single(), config, (24, 24)))
    assert on_meta == parameter_counts(config).total == 30_532_122_624
    idle_experts = 48 * (128 - 8) * 3 * 768 * 2048
    assert parameter_counts(config).active == 30_532_122_624 - idle_experts == 3_353_032_704


def test_flops_of_a_layer_written_out():
    """2 operations per weight that a token meets, and two causal [S, S] products per head."""
    S, total = 64, 0
    for layer in range(TINY.num_hidden_layers):
        weights = 64 * 128 + 2 * 64 * 64 + 128 * 64
        weights += 3 * 64 * 80 if layer == 2 else 64 * 8 + 2 * 3 * 64 * 24
        pairs_per_token = sum(range(1, S + 1)) / S
        total += 2 * weights + 2 * 2 * 4 * 32 * pairs_per_token
    layers, head = forward_flops(TINY, S)
    assert sum(layers) == pytest.approx(total, rel=1e-12)
    assert head == 2 * 64 * 97


@pytest.mark.parametrize("mesh_config", [MeshConfig(), MeshConfig(pp=2, ep=4), MeshConfig(ep=8)])
def test_chunks_hold_every_tensor_once_with_its_shape(mesh_config: MeshConfig):
    """Over all ranks: names and shapes are those of the key map, experts split over ep."""
    layers = (3, 3) if mesh_config.pp == 1 else (1, 2, 2, 1)
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for rank in range(mesh_config.world_size):
        mesh = Mesh.plan(mesh_config, rank)
        for name, parameter in declared(mesh, TINY, layers):
            shape = tuple(parameter.shape)
            parts = parameter.parts or (name.split(".")[-1],)
            part_shape = (*shape[:-2], shape[-2] // len(parts), shape[-1]) if parts[1:] else shape
            for part in parts:
                canonical = ".".join([*name.split(".")[:-1], part])
                shapes.setdefault(canonical, []).append(part_shape)
    expected = {
        tensor.name: [
            (tensor.shape[0] // mesh_config.ep, *tensor.shape[1:])
            if tensor.is_expert_stack
            else tensor.shape
        ]
        * mesh_config.ep
        for tensor in canonical_tensors(TINY)
    }
    assert shapes == expected
    assert sum(prod(t.shape) for t in canonical_tensors(TINY)) == parameter_counts(TINY).total


@pytest.mark.parametrize("layers", [(3, 3), (1, 2, 2, 1), (1,) * 6])
def test_a_tied_model_has_one_tensor_for_both_ends(layers: tuple[int, ...]):
    """On rank 0 the last chunk's head is the first one's embedding; it is counted once."""
    tied = replace(TINY, tie_word_embeddings=True)
    pp = len(layers) // 2
    for rank in range(pp):
        first, last = build_chunks(
            tied,
            Mesh.plan(MeshConfig(pp=pp), rank),
            layers,
            attention_backend=AttentionBackend.REFERENCE,
        )
        assert (hasattr(first, "embedding"), last.is_last) == (rank == 0, rank == 0)
        if rank == 0:
            assert last.get_parameter("head") is first.get_parameter("embedding")
    names = [tensor.name for tensor in canonical_tensors(tied)]
    assert names == [t.name for t in canonical_tensors(TINY) if t.name != "head"]
    assert parameter_counts(TINY).total - parameter_counts(tied).total == 97 * 64
    assert forward_flops(tied, 64) == forward_flops(TINY, 64)


def test_key_map_is_a_bijection():
    keys = [key for tensor in canonical_tensors(TINY) for key in tensor.keys]
    assert len(set(keys)) == len(keys)


def test_v_shape_gives_rank_the_ends():
    first, last = build_chunks(
        TINY,
        Mesh.plan(MeshConfig(pp=2), 0),
        (1, 2, 2, 1),
        attention_backend=AttentionBackend.REFERENCE,
    )
    assert hasattr(first, "embedding") and last.is_last
    assert [*first.layers, *last.layers] == ["0", "5"]


def test_meshes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"ep = 3 .*valid: 1, 2, 4, 8"):
        list(declared(Mesh.plan(MeshConfig(ep=3), 0), TINY, (3, 3)))
    with pytest.raises(ValueError, match=r"layers_per_chunk is \(3, 3\): allowed are 4 numbers"):
        list(declared(Mesh.plan(MeshConfig(pp=2), 0), TINY, (3, 3)))


@pytest.mark.parametrize("name", ["rope_theta", "rms_norm_eps", "initializer_range"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_constants_are_positive_and_finite(name: str, value: float):
    bad = replace(TINY, **{name: value})
    assert bad.violations() == [f"model.{name} = {value}: must be positive and finite"]
    with pytest.raises(ValueError, match=f"model.{name} = {value}"):
        list(declared(Mesh.single(), bad, (3, 3)))


def test_config_reports_all_faults_at_once():
    bad = replace(
        TINY,
        head_dim=7,
        num_key_value_heads=3,
        num_experts_per_tok=9,
        mlp_only_layers=(6,),
        hidden_size=0,
        rope_theta=0.0,
    )
    with pytest.raises(ValueError, match=r"config\.json of a qwen3_moe model") as error:
        model_config_from_hf(bad.to_hf())
    for part in (
        "hidden_size = 0",
        "head_dim = 7",
        "num_key_value_heads = 3",
        "num_experts_per_tok = 9",
        "layers 0 to 5",
        "rope_theta = 0.0",
    ):
        assert part in str(error.value)


def test_both_spellings_read_alike():
    """transformers 5 writes `rope_parameters` and `num_local_experts`, 4 the flat fields."""
    theirs = TheirConfig(**QWEN3_30B_A3B)
    fields = theirs.to_diff_dict()
    assert "rope_theta" not in fields and "num_experts" not in fields
    assert model_config_from_hf(fields) == model_config_from_hf(QWEN3_30B_A3B)


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        replace(TINY, decoder_sparse_step=2, rope_theta=5e5),
        replace(TINY, tie_word_embeddings=True),
        replace(TINY, rope_scaling=Yarn(factor=4.0, original_max_position_embeddings=64)),
    ],
)
def test_exported_config_reads_back(config: Qwen3MoeConfig):
    assert model_config_from_hf(config.to_hf()) == config
    theirs = TheirConfig(**config.to_hf())
    assert theirs.rope_parameters["rope_theta"] == config.rope_theta
    assert theirs.rope_parameters["rope_type"] == ("yarn" if config.rope_scaling else "default")
    assert theirs.tie_word_embeddings == config.tie_word_embeddings
    assert model_config_from_hf(theirs.to_diff_dict()) == config


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "model_type = 'mixtral': implemented are ['qwen3_moe'"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta": 1.0}},
            "rope_scaling: missing ['original_max_position_embeddings'], unknown ['beta']",
        ),
        (
            {"rope_scaling": {**YARN, "factor": 0.5}},
            "model.rope_scaling.factor = 0.5: must be finite and at least 1",
        ),
        (
            {"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 8.0}},
            "rope_scaling and rope_parameters contradict each other",
        ),
        (
            {"rope_scaling": {"type": "default"}, "rope_parameters": YARN},
            "rope_scaling and rope_parameters contradict each other",
        ),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling and rope_parameters contradict each other",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters.rope_type = ['llama3']"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling: ['factor'] have no meaning"),
        ({"rope_scaling": "yarn"}, "rope_scaling = 'yarn': must be an object or null"),
        ({"rope_parameters": [4.0]}, "rope_parameters = [4.0]: must be an object or null"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_parameters.rope_type = "),
        ({"rope_theta": [1e4]}, "model.rope_theta is (10000.0,), of type tuple: allowed is float"),
        ({"quantization_config": "fp8"}, "quantization_config = 'fp8': must be an object or null"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "one value needed, found [10000.0, 1000000.0]"),
        ({"num_local_experts": 64}, "num_experts, num_local_experts: one value needed"),
        (
            {"tie_word_embeddings": "yes"},
            "model.tie_word_embeddings is 'yes', of type str: allowed is bool",
        ),
        ({"attention_bias": True}, "attention_bias = True: only False"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': only silu"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window = True"),
        ({"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size = 512"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size: missing"),
        ({"hidden_size": "2048"}, "model.hidden_size is '2048', of type str: allowed is int"),
        ({"mlp_only_layers": 3}, "model.mlp_only_layers is 3, of type int"),
        ({"rope_theta": "big"}, "model.rope_theta is 'big', of type str: allowed is float"),
        ({"head_dim": None, "num_attention_heads": 0}, "model.num_attention_heads = 0"),
        ({"head_dim": 63}, "model.head_dim = 63: must be even"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        model_config_from_hf({**QWEN3_30B_A3B, **changes})


def test_head_dim_defaults_as_in_transformers():
    fields = {key: value for key, value in QWEN3_30B_A3B.items() if key != "head_dim"}
    assert model_config_from_hf(fields).head_dim == 64


def test_vocabulary_is_kept_as_it_is():
    """151,936 rows although the tokenizer has fewer entries: padding rows are part of the model."""
    assert canonical_tensors(model_config_from_hf(QWEN3_30B_A3B))[0].shape == (151_936, 2048)

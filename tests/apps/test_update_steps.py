"""Three AdamW updates on a mesh leave the weights of one process, the same bits on all replicas."""

import functools
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from pith_apps.config import RunConfig, TrainConfig
from pith_apps.parity import cut_sequences, parity_batch
from pith_apps.trainer import build_trainer, step_gradients
from pith_engine.fsdp import ShardingConfig, canonical_blocks
from pith_engine.gradients import clip_gradients
from pith_engine.lr import LearningRateConfig
from pith_engine.mesh import Mesh, parse_mesh
from pith_engine.optim import AdamW, OptimizerConfig
from pith_engine.runtime import gather_objects
from pith_models.qwen3_moe import Qwen3MoeConfig

CPU = torch.device("cpu")


def eight_layers(label: str, *, tied: bool = False, experts: bool = False) -> RunConfig:
    model = Qwen3MoeConfig(
        vocab_size=29,  # 15 and 14 rows on two ranks
        hidden_size=12,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=6,
        intermediate_size=10,
        moe_intermediate_size=7,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=(1,),
        initializer_range=0.2,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
    )
    return RunConfig(
        name="eight",
        model=model,
        mesh=parse_mesh(label),
        sharding=ShardingConfig(replicate_dense=True, replicate_experts=experts),
        train=TrainConfig(steps=3, batch=8, sequence_length=7, dtype="fp64", device="cpu"),
        lr=LearningRateConfig(schedule="constant", peak=1e-2, warmup_steps=1),
    )


Blocks = list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]


def updates_in_worker(config: RunConfig) -> tuple[list[float], bool, Blocks] | None:
    mesh = Mesh.create(config.mesh, timedelta(seconds=60))
    return None if mesh is None else three_updates(config, mesh)


@functools.cache
def updates_alone(tied: bool) -> tuple[list[float], bool, Blocks]:
    config = replace(eight_layers("single", tied=tied), sharding=ShardingConfig())
    return three_updates(config, Mesh.single())


def three_updates(config: RunConfig, mesh: Mesh) -> tuple[list[float], bool, Blocks]:
    """Norms, whether both ends of the model are one tensor, all ranks' blocks of the weights."""
    trainer = build_trainer(config, mesh, CPU)
    optimizer = AdamW(trainer.parameters, OptimizerConfig())
    names = [p.name for p in trainer.parameters]
    assert len(optimizer.moments) == len(names)
    norms = []
    for step in range(3):
        data = replace(config, train=replace(config.train, seed=step))
        whole, share = parity_batch(data, CPU), 8 // mesh.config.num_batch_ranks
        first = mesh.batch_rank * share
        mine = [cut_sequences(whole, number, 1) for number in range(first, first + share)]
        _, norm = step_gradients(trainer, mine)
        clip_gradients(trainer.parameters, norm, 1.0)
        optimizer.step(1e-2)
        norms.append(norm.item())
    chunks = trainer.pipeline.chunks
    first, last = chunks.get(0), chunks.get(2 * mesh.pp.size - 1)
    is_one = first is not None and first.embedding is last.head
    blocks = [
        (block.name, block.global_shape, block.offsets, block.tensor)
        for p in trainer.parameters
        for block in canonical_blocks(p, p.shard)
    ]
    return norms, is_one, [b for part in gather_objects(blocks, mesh.world) for b in part]


def whole_weights(blocks: Blocks, replicas: dict[str, int]) -> dict[str, torch.Tensor]:
    """Whole tensors; every element is held by as many ranks as there are replicas, bit-equal."""
    wholes: dict[str, torch.Tensor] = {}
    counts: dict[str, torch.Tensor] = {}
    for name, shape, offsets, tensor in blocks:
        whole = wholes.setdefault(name, torch.full(shape, torch.nan, dtype=tensor.dtype))
        count = counts.setdefault(name, torch.zeros(shape, dtype=torch.int64))
        place = tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))
        known = count[place] > 0
        assert torch.equal(whole[place][known], tensor[known]), f"{name}: replicas parted"
        whole[place] = tensor
        count[place] += 1
    for name, count in counts.items():
        expected = replicas["experts" if ".experts_" in name else "dense"]
        assert (count == expected).all(), name
    return wholes


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("label", "tied", "experts", "replicas"),
    [
        ("pp2-dp2", False, True, {"dense": 2, "experts": 2}),
        ("pp2-dp2", True, False, {"dense": 2, "experts": 1}),
        ("pp4", True, False, {"dense": 1, "experts": 1}),
        slow("dp2-ep2", False, False, {"dense": 2, "experts": 1}),
        slow("dp4", True, True, {"dense": 4, "experts": 4}),
        slow("pp2", True, False, {"dense": 1, "experts": 1}),
        slow("ep2", True, False, {"dense": 1, "experts": 1}),
    ],
)
def test_three_updates_are_those_of_one_process(
    gloo_pool, label: str, tied: bool, experts: bool, replicas: dict[str, int]
) -> None:
    config = eight_layers(label, tied=tied, experts=experts)
    expected_norms, is_one, expected_blocks = updates_alone(tied)
    assert is_one == tied
    expected = whole_weights(expected_blocks, {"dense": 1, "experts": 1})
    results = [r for r in gloo_pool.run(updates_in_worker, config, timeout=180) if r is not None]
    for norms, _, _ in results:
        assert norms == pytest.approx(expected_norms, rel=1e-11)
    assert results[0][1] == tied
    found = whole_weights(results[0][2], replicas)
    assert found.keys() == expected.keys() and ("head" in found) != tied
    for name, whole in expected.items():
        torch.testing.assert_close(found[name], whole, rtol=0, atol=1e-12, msg=name)

"""Balancing over meshes: gradients, frequencies of the step before, the bias, resumed runs."""

import math
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pith_engine.balance import BalanceConfig, router_z_loss, update_balance_biases
from pith_engine.checkpoint import load_checkpoint, read_manifest, save_checkpoint
from pith_engine.contract import IGNORED_TARGET, Batch
from pith_engine.fsdp import canonical_blocks, shard_chunks, sharded_parameters
from pith_engine.gradients import count_targets
from pith_engine.init import initialise
from pith_engine.mesh import Mesh, parse_mesh
from pith_engine.optim import AdamW, OptimizerConfig
from pith_engine.pipeline import Pipeline
from pith_engine.plain import plain_hidden
from pith_engine.runtime import gather_objects
from toy_model import EXPERTS, HIDDEN, LENGTH, plain_balance, toy_batches, toy_chunks

NUM_SEQUENCES, NUM_LAYERS, DENSE = 16, 4, (1,)
BIASED = (2, 3)
CPU = torch.device("cpu")
MESHES = ("dp2", "ep2", "dp2-ep2", "pp2")
UNEVEN = {str(layer): [1 + layer, 7, 0, 3] for layer in range(NUM_LAYERS) if layer not in DENSE}


def micro_batches(size, step=0):
    """The global batch of a step in micro-batches of `size` sequences, half of it padding."""
    singles = toy_batches(NUM_SEQUENCES, num_sequences=1, seed=step)
    for number, batch in enumerate(singles):
        batch.targets[LENGTH - number % LENGTH :] = IGNORED_TARGET
    groups = [singles[s : s + size] for s in range(0, NUM_SEQUENCES, size)]
    return [
        Batch(
            tokens=torch.cat([batch.tokens for batch in group]),
            targets=torch.cat([batch.targets for batch in group]),
            positions=torch.arange(LENGTH).repeat(size),
            sequence_length=LENGTH,
        )
        for group in groups
    ]


class Run:
    """A toy model on a mesh, and what its steps give."""

    def __init__(self, mesh, config, *, learns_language, biased=()):
        per_chunk = (2, 2) if mesh.pp.size == 1 else (1, 1, 1, 1)
        self.mesh, self.config = mesh, config
        self.chunks = toy_chunks(per_chunk, mesh, DENSE, biased)
        if not learns_language:
            for chunk in self.chunks:
                chunk.loss = lambda hidden, batch, chunk=chunk: (
                    0 * type(chunk).loss(chunk, hidden, batch)
                )
        self.units = shard_chunks(self.chunks, mesh, compute_dtype=torch.float64, device=CPU)
        self.parameters = sharded_parameters(self.units)
        initialise(self.parameters, seed=3)
        self.pipeline = Pipeline(
            self.chunks,
            mesh,
            hidden_size=HIDDEN,
            dtype=torch.float64,
            device=CPU,
            balance=config,
        )
        self.optimizer = AdamW(self.parameters, OptimizerConfig())

    def gradients(self, size=1, step=0):
        """One forward and backward; the losses, with gradients reduced."""
        batches = micro_batches(size, step)
        share = len(batches) // self.mesh.config.num_batch_ranks
        batches = batches[self.mesh.batch_rank * share : (self.mesh.batch_rank + 1) * share]
        for unit in self.units:
            unit.gather()
        losses = self.pipeline.train_step(batches, count_targets(batches, self.mesh))
        for unit in self.units:
            unit.reduce()
        return losses

    def train(self, steps):
        """Whole steps; their losses."""
        found = []
        for step in steps:
            found.append(self.gradients(step=step))
            self.optimizer.step(1e-2)
            if self.config.method == "bias":
                counts = self.pipeline.expert_counts
                update_balance_biases(self.parameters, counts, self.config.bias_rate)
        return found

    def whole(self, of_gradients):
        """All canonical tensors or gradients, assembled from all ranks."""
        blocks = [
            (block.name, block.offsets, block.global_shape, block.tensor.clone())
            for p in self.parameters
            for block in canonical_blocks(p, p.grad if of_gradients else p.shard)
        ]
        whole = {}
        for part in gather_objects(blocks, self.mesh.world):
            for name, offsets, shape, tensor in part:
                target = whole.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
                place = tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))
                target[place] = tensor
        return whole


def plain_step(config, size):
    """Gradients of the auxiliary losses alone by plain autograd, and their reported values."""
    run = Run(Mesh.single(), config, learns_language=True)
    for unit in run.units:
        unit.gather()
    batches = micro_batches(size)
    count = sum(int((batch.targets != IGNORED_TARGET).sum()) for batch in batches)
    balance = z_loss = 0
    for batch in batches:
        for layer, (_, routing) in enumerate(plain_hidden(run.chunks, batch)):
            if routing is not None:
                previous = torch.tensor(UNEVEN[str(layer)])
                balance = balance + plain_balance(config.method, routing, batch, previous) / count
                z_loss = z_loss + router_z_loss(routing, batch) / count
    (config.coefficient * balance + config.z_coefficient * z_loss).backward()
    num_layers = NUM_LAYERS - len(DENSE)
    return balance.item() / num_layers, z_loss.item() / num_layers, run.whole(True)


def auxiliary_gradients(config, sizes, labels):
    """In a worker: losses and gradients with the language loss zeroed, by mesh and size."""
    found = {}
    for label in labels:
        mesh = Mesh.create(parse_mesh(label), timedelta(seconds=30))
        if mesh is None:
            continue
        run = Run(mesh, config, learns_language=False)
        most = NUM_SEQUENCES // (2 * mesh.pp.size * mesh.config.num_batch_ranks)
        for size in [size for size in sizes if size <= most]:
            run.pipeline.restore_counts(UNEVEN)
            losses = run.gradients(size)
            found[label, size] = losses, run.whole(True)
    return found


def assert_close(found, expected, rtol):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (found[name] - tensor).abs().max()
        assert difference <= rtol * tensor.abs().max(), f"{name}: {difference:.3g}"


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        pytest.param("sequence", (1, 2, 4), marks=pytest.mark.core),
        ("global-batch", (1, 2, 4)),
        pytest.param("micro-batch", (2,), marks=pytest.mark.core),
    ],
)
def test_the_auxiliary_gradient_is_that_of_one_process(gloo_pool, method, sizes):
    """On every mesh and, where the method says so, however the batch is accumulated."""
    config = BalanceConfig(method=method, coefficient=0.1, z_coefficient=0.03)
    balance, z_loss, expected = plain_step(config, sizes[0])
    routers = [name for name in expected if name.endswith("router")]
    assert len(routers) == NUM_LAYERS - len(DENSE)
    assert all(expected[name].abs().max() > 1e-4 for name in routers)
    results = gloo_pool.run(auxiliary_gradients, config, sizes, MESHES)[0]
    expected_runs = {(label, size) for label in MESHES for size in sizes}
    assert results.keys() == expected_runs - {("dp2-ep2", 4)}
    for losses, gradients in results.values():
        assert losses.loss == 0
        assert losses.balance == pytest.approx(balance, rel=1e-12)
        assert losses.z_loss == pytest.approx(z_loss, rel=1e-12)
        assert_close(gradients, expected, 1e-10)


def test_micro_batch_depends_on_its_size():
    """Documented, and the reason why the two other methods exist."""
    config = BalanceConfig(method="micro-batch", coefficient=0.1)
    one, four = plain_step(config, 1)[0], plain_step(config, 4)[0]
    assert abs(one - four) > 1e-3


def trained(label, config, biased, num_steps):
    """In a worker: losses of steps, weights, frequencies and how many collectives a step made."""
    mesh = Mesh.create(parse_mesh(label), timedelta(seconds=30))
    if mesh is None:
        return None
    run = Run(mesh, config, learns_language=True, biased=biased)
    losses = run.train(range(num_steps))
    counts = run.pipeline.saved_counts()
    sizes = []
    original = dist.all_reduce

    def counted(tensor, *args, **settings):
        sizes.append(tensor.numel())
        return original(tensor, *args, **settings)

    with patch.object(dist, "all_reduce", counted):
        run.gradients(step=num_steps)
    return losses, run.whole(False), counts, sizes


def losses_close(found, expected, rtol):
    for one, other in zip(found, expected, strict=True):
        assert vars(one).keys() == vars(other).keys()
        for name, value in vars(other).items():
            assert vars(one)[name] == pytest.approx(value, rel=rtol), name


@pytest.mark.parametrize("label", ["dp2-ep2", pytest.param("pp2-ep2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "config",
    [
        BalanceConfig(method="global-batch", coefficient=0.3),
        BalanceConfig(method="bias", bias_rate=0.002),
    ],
    ids=lambda config: config.method,
)
def test_steps_are_those_of_one_process(gloo_pool, label, config):
    """The frequencies of one step decide the next: three steps, losses, loads and weights."""
    biased = BIASED if config.method == "bias" else ()
    one = Run(Mesh.single(), config, learns_language=True, biased=biased)
    expected = one.train(range(3))
    results = [r for r in gloo_pool.run(trained, label, config, biased, 3) if r is not None]
    for losses, weights, counts, sizes in results:
        losses_close(losses, expected, 1e-9)
        assert_close(weights, one.whole(False), 1e-7)
        assert counts == one.pipeline.saved_counts()
        # Targets; losses with loads; the frequencies of all layers here: one all-reduce each.
        assert len(sizes) == 3
    shares = [torch.tensor(c).double() / sum(c) for c in counts.values()]
    evenness = [torch.special.entr(share).sum().item() / math.log(len(share)) for share in shares]
    assert expected[-1].load_entropy == pytest.approx(sum(evenness) / len(evenness), rel=1e-12)
    largest = max(share.max().item() * len(share) for share in shares)
    assert expected[-1].max_load == pytest.approx(largest, rel=1e-12)
    assert expected[-1].dead_experts == sum(c.count(0) for c in counts.values())
    assert sorted(counts) == ["0", "2", "3"]
    assert all(sum(c) == sum(counts["0"]) > 0 for c in counts.values())
    for layer in biased:
        bias = results[0][1][f"layers.{layer}.router_bias"]
        assert torch.equal(bias, one.whole(False)[f"layers.{layer}.router_bias"])
        assert bias.abs().max() > 0
        assert f"layers.{layer}.router_bias" not in one.optimizer.moments
    if config.method == "global-batch":
        even = Run(Mesh.single(), replace(config, coefficient=0.0), learns_language=True)
        assert abs(even.train(range(3))[-1].loss - expected[-1].loss) > 1e-6


def test_the_first_step_of_global_batch_is_even_and_evaluation_changes_nothing():
    config = BalanceConfig(method="global-batch", coefficient=0.3)
    run = Run(Mesh.single(), config, learns_language=True)
    assert run.pipeline.expert_counts == {}
    assert run.gradients().balance == pytest.approx(1.0, rel=1e-12)
    counts = run.pipeline.saved_counts()
    assert counts.keys() == {"0", "2", "3"}
    batches = micro_batches(1, step=1)
    run.pipeline.evaluate(batches, count_targets(batches, run.mesh))
    assert run.pipeline.saved_counts() == counts
    run.pipeline.train_step(batches, 0)
    assert run.pipeline.saved_counts() == counts
    assert run.gradients(step=1).balance != pytest.approx(1.0, rel=1e-3)


def test_a_bias_selects_and_gets_no_gradient():
    """A large bias sends every token to one expert; its weight stays the score."""
    run = Run(Mesh.single(), BalanceConfig(method="bias"), learns_language=True, biased=BIASED)
    biases = [p for p in run.parameters if p.name.endswith("router_bias")]
    assert [tuple(p.global_shape) for p in biases] == [(EXPERTS,)] * 2
    biases[0].shard.copy_(torch.tensor([0.0, 0.0, 2.0, 0.0]))
    losses = run.gradients()
    counts = run.pipeline.saved_counts()["2"]
    assert counts[2] == sum(counts) // 2
    assert losses.max_load == 2.0
    assert (losses.balance, losses.z_loss) == (0, 0)
    for parameter in biases:
        assert not parameter.full.requires_grad
        assert (parameter.grad == 0).all()
    run.optimizer.step(1e-2)
    assert biases[0].shard.tolist() == [0, 0, 2, 0]


def save(label, config, biased, folder):
    """In a worker: two steps and a checkpoint, then the steps after it."""
    mesh = Mesh.create(parse_mesh(label), timedelta(seconds=30))
    if mesh is None:
        return None
    run = Run(mesh, config, learns_language=True, biased=biased)
    run.train(range(2))
    facts = {"expert_counts": run.pipeline.saved_counts()}
    save_checkpoint(folder, 2, run.parameters, run.optimizer, facts, mesh)
    held = run.whole(False)
    return held, run.train(range(2, 4)), run.whole(False), run.pipeline.saved_counts()


def resume(label, config, biased, path):
    """In a worker: load, give back what was loaded, then the steps after it."""
    mesh = Mesh.create(parse_mesh(label), timedelta(seconds=30))
    if mesh is None:
        return None
    run = Run(mesh, config, learns_language=True, biased=biased)
    manifest = load_checkpoint(path, run.parameters, run.optimizer, mesh)
    run.pipeline.restore_counts(manifest.run["expert_counts"])
    loaded = run.whole(False), run.pipeline.saved_counts()
    return loaded, run.train(range(2, 4)), run.whole(False), run.pipeline.saved_counts()


@pytest.mark.parametrize(
    "config",
    [
        BalanceConfig(method="global-batch", coefficient=0.3),
        BalanceConfig(method="bias", bias_rate=0.002),
    ],
    ids=lambda config: config.method,
)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(gloo_pool, tmp_path, config):
    biased = BIASED if config.method == "bias" else ()
    results = gloo_pool.run(save, "pp2-ep2", config, biased, tmp_path)
    held, losses, weights, counts = results[0]
    path = tmp_path / "step-00000002"
    saved = read_manifest(Path(path)).run["expert_counts"]
    assert saved.keys() == {"0", "2", "3"}
    for label in ("pp2-ep2", "dp2-ep2"):
        loaded, resumed, ended, after = gloo_pool.run(resume, label, config, biased, path)[0]
        assert {str(layer): c for layer, c in loaded[1].items()} == saved
        assert held.keys() == loaded[0].keys()
        assert all(torch.equal(tensor, held[name]) for name, tensor in loaded[0].items())
        if label == "pp2-ep2":
            assert resumed == losses
            assert all(torch.equal(ended[name], weights[name]) for name in weights)
        losses_close(resumed, losses, 1e-9)
        assert_close(ended, weights, 1e-7)
        assert after == counts
        for layer in biased:
            name = f"layers.{layer}.router_bias"
            assert torch.equal(ended[name], weights[name])
    assert not biased or held["layers.2.router_bias"].abs().max() > 0
    if config.method == "global-batch":
        # Without its frequencies the run would go on otherwise.
        forgotten = Run(Mesh.single(), config, learns_language=True)
        load_checkpoint(path, forgotten.parameters, forgotten.optimizer, forgotten.mesh)
        assert abs(forgotten.train(range(2, 4))[-1].loss / losses[-1].loss - 1) > 1e-8


def test_a_pipeline_refuses_a_bad_configuration():
    with pytest.raises(ValueError, match=r"balance\.coefficient is -1"):
        Run(Mesh.single(), BalanceConfig(coefficient=-1.0), learns_language=True)

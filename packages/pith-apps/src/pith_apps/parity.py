"""The proof that a mesh changes nothing: one step on many meshes against one process.

For each mesh the same initial weights and global batch go through a training step, and losses,
gradient norm and every canonical gradient are compared with a reference: one process, the whole
batch at once, plain autograd over `contract.plain_hidden`, torch's cross-entropy over full logits.
It shares nothing of dispatch, schedule, transfers or sharding.

    difference of two numbers   |a - b| / |b|
    difference of a gradient    max |a - b| / max |b|,  b the reference tensor
    a mesh agrees when          its initial weights are bit-equal, every element of every gradient
                                is held by exactly one rank of each replica, all with the same bits,
                                and no difference exceeds
                                    fp64   1e-10
                                    fp32   1e-5, gradients 1e-4

The optimizer does not run: Adam would hide a factor. The batch is uneven: every sequence ignores
another number of targets, one has none, and one repeats a single token, which all goes to the same
experts. Every rank computes the reference and compares its own blocks. The trap: in fp32 a top-k
tie that rounding breaks differently shows as a large difference.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import sha256
from typing import Literal

import torch
from pith_engine.balance import balance_loss, count_choices, load_factors, router_z_loss
from pith_engine.context_parallel import shard_batch
from pith_engine.contract import IGNORED_TARGET, Batch, plain_hidden
from pith_engine.fsdp import CanonicalBlock, canonical_blocks, cut_block
from pith_engine.mesh import Mesh, MeshConfig, mesh_violations
from pith_engine.runtime import connect_mesh, gather_objects
from pith_engine.violations import raise_violations
from torch import Tensor
from torch.nn.functional import cross_entropy

from pith_apps.checks import step_violations
from pith_apps.config import RunConfig
from pith_apps.plan import Machine
from pith_apps.trainer import Trainer, build_trainer, step_gradients

PARITY_MESHES = ("dp2", "dp4", "ep2", "ep4", "pp2", "pp2-ep2", "pp2-dp2", "dp2-ep2")
"""All two-rank and four-rank meshes of these axes that two chunks a rank allow."""


@dataclass(frozen=True, kw_only=True)
class ParityReference:
    """What one process computes for the whole batch."""

    weights: dict[str, Tensor]
    """Initial value of every canonical tensor, whole."""
    weights_sha256: str
    """Their hash: all ranks must start from one reference."""
    gradients: dict[str, Tensor]
    """Its gradient."""
    loss: float
    """Mean loss of the counted targets, in nats."""
    balance: float
    """Balance loss without coefficient, mean over the layers."""
    norm: float
    """Norm of all gradients."""
    num_targets: int
    """Counted targets of the batch."""


@dataclass(frozen=True, kw_only=True)
class ParityResult:
    """How far one mesh is from the reference."""

    mesh: str
    """Its label."""
    weights_equal: bool
    """Whether the initial weights are the reference's, bit for bit."""
    covered: bool
    """Whether each gradient element is on exactly one rank of each replica, all bit-equal."""
    loss: float
    """Relative difference of the loss."""
    balance: float
    """Relative difference of the balance loss."""
    norm: float
    """Relative difference of the gradient norm."""
    gradient: float
    """Largest relative difference of a gradient tensor."""
    worst: str
    """The tensor that has it."""
    seconds: float
    """Time of the step."""

    def agrees(self, dtype: Literal["fp64", "fp32"]) -> bool:
        """Whether it is within the tolerances of `dtype`; a NaN never is."""
        number, gradient = (1e-10, 1e-10) if dtype == "fp64" else (1e-5, 1e-4)
        return (
            self.weights_equal
            and self.covered
            and all(value <= number for value in (self.loss, self.balance, self.norm))
            and self.gradient <= gradient
        )


def check_parity(
    config: RunConfig,
    meshes: tuple[MeshConfig, ...],
    dtype: Literal["fp64", "fp32"],
    machine: Machine,
) -> None:
    """Raise a ValueError that names every violation of every mesh, and of the machine."""
    faults = step_violations(replace(config, train=replace(config.train, dtype=dtype)), machine)
    model_faults = config.model.violations()
    faults += [
        f"{mesh.label}: {fault}"
        for mesh in meshes
        if not model_faults
        for fault in mesh_violations(
            mesh,
            world_size=mesh.world_size,
            num_experts=config.model.num_experts,
            num_layers=config.model.num_hidden_layers,
            num_micro_batches=num_parity_sequences(meshes),
            sequence_length=config.train.sequence_length,
        )
    ]
    least = max((mesh.world_size for mesh in meshes), default=1)
    if 0 < machine.world_size < least:
        faults.append(f"{machine.world_size} processes run, the largest mesh needs {least}")
    if not meshes:
        faults.append(f"no mesh is named; for example {' '.join(PARITY_MESHES)}")
    raise_violations(faults, "parity cannot run")


def parity_worker(
    config: RunConfig,
    meshes: tuple[MeshConfig, ...],
    dtype: Literal["fp64", "fp32"],
    device: torch.device,
) -> bool:
    """Compare every mesh with one process; rank 0 prints the table; whether all meshes agree.

    Every rank of the default process group calls it; those beyond a mesh skip that mesh.
    """
    train = replace(config.train, dtype=dtype)
    config = replace(config, train=train, layers_per_chunk=None, mesh=MeshConfig())
    sequences = parity_sequences(config, num_parity_sequences(meshes), device)
    reference = compute_reference(config, sequences, device)
    is_first = torch.distributed.get_rank() == 0
    if is_first:
        print(
            f"parity of {config.name} in {dtype}: one step of {len(sequences)} sequences of "
            f"{train.sequence_length}, {reference.num_targets} targets\n"
            f"one process: loss {reference.loss:.12f}, balance {reference.balance:.12f}, "
            f"gradient norm {reference.norm:.12f}\n{_HEADER}",
            flush=True,
        )
    all_agree = True
    for mesh_config in meshes:
        mesh = Mesh.create(mesh_config, timedelta(seconds=config.timeout))
        if mesh is None:
            continue
        connect_mesh(mesh, device)
        result = compare_mesh(replace(config, mesh=mesh_config), mesh, sequences, reference, device)
        all_agree = all_agree and result.agrees(dtype)
        if is_first:
            print(_row(result, dtype), flush=True)
    if is_first:
        print("PASS" if all_agree else "FAIL", flush=True)
    return all_agree


def num_parity_sequences(meshes: tuple[MeshConfig, ...]) -> int:
    """Sequences of the global batch: `2 * pp` micro-batches of one on every batch rank."""
    return math.lcm(*(2 * mesh.pp * mesh.num_batch_ranks for mesh in meshes))


def parity_sequences(config: RunConfig, num_sequences: int, device: torch.device) -> list[Batch]:
    """The global batch as micro-batches of one sequence, uneven on purpose."""
    length, vocab_size = config.train.sequence_length, config.model.vocab_size
    generator = torch.Generator().manual_seed(config.train.seed)
    rows = torch.randint(vocab_size, (num_sequences, length + 1), generator=generator)
    rows[1] = rows[1, 0]
    targets = rows[:, 1:].clone()
    for number, row in enumerate(targets):
        row[: length * number // num_sequences] = IGNORED_TARGET
    targets[2:3] = IGNORED_TARGET
    pairs = zip(rows[:, :-1].to(device), targets.to(device), strict=True)
    return [_batch(tokens, row, length) for tokens, row in pairs]


def uneven_counts(config: RunConfig) -> dict[str, list[int]]:
    """For `Pipeline.restore_counts`: an uneven step before the compared one."""
    layers, counts = config.model.num_hidden_layers, torch.arange(1, config.model.num_experts + 1)
    return {str(layer): counts.roll(layer).tolist() for layer in range(layers)}


def compute_reference(
    config: RunConfig, sequences: list[Batch], device: torch.device
) -> ParityReference:
    """One step of the whole batch in this process, with autograd alone."""
    trainer = build_trainer(config, Mesh.single(), device)
    trainer.pipeline.restore_counts(uneven_counts(config))
    trainer.gather()
    chunks = list(trainer.pipeline.chunks.values())
    tokens = torch.cat([batch.tokens for batch in sequences])
    targets = torch.cat([batch.targets for batch in sequences])
    whole = _batch(tokens, targets, sequences[0].sequence_length)
    num_targets = int((targets != IGNORED_TARGET).sum())
    outputs = list(plain_hidden(chunks, whole))
    logits = chunks[-1].logits(outputs[-1][0])
    loss = cross_entropy(logits, targets, ignore_index=IGNORED_TARGET, reduction="sum")
    routings = {n: routing for n, (_, routing) in enumerate(outputs) if routing is not None}
    balance, z_loss = torch.zeros_like(loss), torch.zeros_like(loss)
    for layer, routing in routings.items():
        # A micro-batch of `parity_sequences` is one sequence.
        method = config.balance.method
        method = "sequence" if method == "micro-batch" else method
        counts, previous = count_choices(routing, whole, method), trainer.pipeline.expert_counts
        factors = load_factors(method, counts, previous[layer], trainer.mesh.cp)
        balance += balance_loss(routing, whole, factors) if factors is not None else 0.0
        z_loss += router_z_loss(routing, whole)
    terms = config.balance.coefficient * balance + config.balance.z_coefficient * z_loss
    ((loss + terms) / num_targets).backward()
    for unit in trainer.units:
        unit.reduce()
    weights, gradients = _canonical(trainer)
    return ParityReference(
        weights={block.name: block.tensor for block in weights},
        weights_sha256=_sha256(block.tensor for block in weights),
        gradients={block.name: block.tensor for block in gradients},
        loss=loss.item() / num_targets,
        balance=balance.item() / (num_targets * max(1, len(routings))),
        norm=math.sqrt(sum(block.tensor.double().square().sum().item() for block in gradients)),
        num_targets=num_targets,
    )


def compare_mesh(
    config: RunConfig,
    mesh: Mesh,
    sequences: list[Batch],
    reference: ParityReference,
    device: torch.device,
) -> ParityResult:
    """Run the step on `mesh`, which is that of `config` and all of whose ranks call this."""
    trainer = build_trainer(config, mesh, device)
    trainer.pipeline.restore_counts(uneven_counts(config))
    weights, _ = _canonical(trainer)
    weights_equal = all(torch.equal(b.tensor, _block_of(reference.weights, b)) for b in weights)
    per_rank = len(sequences) // mesh.num_batch_ranks
    mine = sequences[mesh.batch_rank * per_rank : (mesh.batch_rank + 1) * per_rank]
    batches = [shard_batch(batch, mesh.cp) for batch in mine]
    start = time.perf_counter()
    losses, norm = step_gradients(trainer, batches)
    norm_value = norm.item()
    seconds = time.perf_counter() - start

    compared = {
        (b.name, b.offsets): (*_compare_block(b, reference), p.replicas.size, _sha256([b.tensor]))
        for p in trainer.parameters
        for b in canonical_blocks(p, p.grad)
        if b.tensor.numel()
    }
    facts = gather_objects((weights_equal, reference.weights_sha256, compared), mesh.world)
    sizes = dict.fromkeys(reference.gradients, 0)
    differences = dict.fromkeys(reference.gradients, 0.0)
    for name, offsets in {place for _, _, compared in facts for place in compared}:
        held = [found[name, offsets] for _, _, found in facts if (name, offsets) in found]
        differences[name] = max(differences[name], *(difference for difference, *_ in held))
        _, size, num_replicas, _ = held[0]
        if len(held) == num_replicas and len({digest for *_, digest in held}) == 1:
            sizes[name] += size
    worst = max(differences, key=lambda name: differences[name])
    return ParityResult(
        mesh=mesh.config.label,
        weights_equal=all(equal for equal, _, _ in facts) and len({h for _, h, _ in facts}) == 1,
        covered=all(sizes[name] == g.numel() for name, g in reference.gradients.items()),
        loss=_relative(losses.loss, reference.loss),
        balance=_relative(losses.balance, reference.balance),
        norm=_relative(norm_value, reference.norm),
        gradient=differences[worst],
        worst=worst,
        seconds=seconds,
    )


def _batch(tokens: Tensor, targets: Tensor, length: int) -> Batch:
    positions = torch.arange(length, device=tokens.device).repeat(len(tokens) // length)
    return Batch(tokens=tokens, targets=targets, positions=positions, sequence_length=length)


def _canonical(trainer: Trainer) -> tuple[list[CanonicalBlock], list[CanonicalBlock]]:
    """This rank's blocks of all canonical weights and of their gradients: views."""
    parameters = trainer.parameters
    weights = [block for p in parameters for block in canonical_blocks(p, p.shard)]
    return weights, [block for p in parameters for block in canonical_blocks(p, p.grad)]


def _sha256(tensors: Iterable[Tensor]) -> str:
    digest = sha256()
    for tensor in tensors:
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def _block_of(tensors: dict[str, Tensor], block: CanonicalBlock) -> Tensor:
    return cut_block(tensors[block.name], block.offsets, block.tensor.shape)


def _compare_block(block: CanonicalBlock, reference: ParityReference) -> tuple[float, int]:
    """Largest difference in the block over the largest value of its tensor; elements compared."""
    difference = (block.tensor - _block_of(reference.gradients, block)).abs().max().item()
    scale = reference.gradients[block.name].abs().max().item()
    return _ratio(difference, scale), block.tensor.numel()


def _relative(value: float, reference: float) -> float:
    return _ratio(abs(value - reference), abs(reference))


def _ratio(difference: float, scale: float) -> float:
    """Difference over scale; a NaN, or any difference from zero, is infinitely far."""
    if difference == 0:
        return 0.0
    return difference / scale if scale > 0 and not math.isnan(difference) else math.inf


_HEADER = (
    f"{'mesh':<10} {'weights':<9} {'loss':>8} {'balance':>8} {'norm':>8} {'gradient':>8}  "
    f"{'seconds':>7}  verdict  largest gradient difference in"
)


def _row(result: ParityResult, dtype: Literal["fp64", "fp32"]) -> str:
    weights = "bit-equal" if result.weights_equal else "DIFFER"
    numbers = [result.loss, result.balance, result.norm, result.gradient]
    return (
        f"{result.mesh:<10} {weights:<9} {' '.join(f'{n:8.1e}' for n in numbers)}  "
        f"{result.seconds:7.2f}  {'agrees ' if result.agrees(dtype) else 'DIFFERS'}  {result.worst}"
        + ("" if result.covered else "; some elements on no rank or too many, or replicas differ")
    )

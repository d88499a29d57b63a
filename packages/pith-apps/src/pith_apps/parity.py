"""The proof that a mesh changes nothing: one step on many meshes against one process.

For each mesh the same initial weights and global batch go through a training step, and losses,
gradient norm and every canonical gradient are compared with a reference: one process, the whole
batch at once, plain autograd over `plain_hidden`, torch's cross-entropy over full logits.
It shares nothing of dispatch, schedule, transfers or sharding.

    difference of two numbers   |a - b| / |b|
    difference of a gradient    max |a - b| / max(max |b|, 1e-5 max |B|),  b the reference tensor, B
                                all of them: what should be zero is rounding over rounding
    a mesh agrees when          its initial weights are bit-equal, every element of every gradient
                                is held by exactly one rank of each replica, all with the same bits,
                                and no difference exceeds
                                    fp64   1e-10
                                    fp32   1e-5, gradients 1e-4, updates 1e-3

The batch is uneven: every sequence ignores another number of targets, one has none, and one repeats
a single token, which all goes to the same experts. `VARIATIONS` change it or the run. No optimizer
runs, since Adam would hide a factor; `muon` also compares the updated matrices, relative to their
largest movement (its iteration multiplies rounding by up to 3.4445^5). Every rank computes the
reference and compares its own blocks. The trap: in fp32 a top-k tie that rounding breaks
differently shows as a large difference.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import sha256
from typing import Annotated, Literal

import torch
from pith_engine.balance import balance_loss, count_choices, load_factors, router_z_loss
from pith_engine.context_parallel import shard_batch
from pith_engine.contract import IGNORED_TARGET, Batch
from pith_engine.fsdp import CanonicalBlock, ShardedParameter, canonical_blocks, cut_block
from pith_engine.mesh import Mesh, MeshConfig, mesh_violations, parse_mesh
from pith_engine.optim import Muon
from pith_engine.plain import plain_hidden
from pith_engine.runtime import connect_mesh, gather_objects
from pith_engine.violations import raise_violations
from torch import Tensor
from torch.nn.functional import cross_entropy
from tyro.conf import arg

from pith_apps.arguments import RunArguments
from pith_apps.checks import step_violations
from pith_apps.config import RunConfig
from pith_apps.plan import Machine
from pith_apps.trainer import Trainer, build_trainer, step_gradients

PARITY_MESHES = ("dp2", "dp4", "ep2", "ep4", "pp2", "pp2-ep2", "pp2-dp2", "dp2-ep2")
"""All two-rank and four-rank meshes of these axes that two chunks a rank allow."""
FULL_GRID = (
    *("dp4", "ep4", "dp2-ep2", "pp2-dp2", "pp2-ep2", "dp2-cp2", "cp2-ep2", "cp4", "pp2-cp2"),
    *("hsdp-dp2-ep2", "pp2-cp2-ep2"),
)
"""Every pair of axes, replicated dense parameters, and three axes at once (8 processes)."""
VARIATIONS = ("packed", "padding", "aux", "tied", "recompute", "muon", "hsdp")
"""Several documents in a sequence; half of it padding; balance and z-loss of notable size; tied
embeddings; attention and experts recomputed; Muon's update; HSDP wherever dp has ranks."""
DOCUMENT_LENGTHS = (1, 5, 13, 2, 7)
"""Of `packed`, over and over from another place in each sequence: odd, and some inside a block."""


@dataclass(frozen=True, kw_only=True)
class ParityArguments(RunArguments):
    """Loss and gradients of one step on every mesh, against one process."""

    meshes: tuple[str, ...] = ()
    """Meshes in short form, such as pp2-ep2, or hsdp-dp2-ep2 (default: those of the grid)."""
    grid: Literal["usual", "full"] = "usual"
    """`usual`: meshes of dp, ep and pp in 4 processes; `full`: cp, HSDP and 8 processes too."""
    variations: Annotated[str, arg(name="with")] = ""
    """What to switch on, such as packed,aux: packed, padding, aux, tied, recompute, muon, hsdp."""
    dtype: Literal["fp64", "fp32"] = "fp64"
    """`fp64` compares within 1e-10; `fp32` within 1e-5, gradients within 1e-4."""


@dataclass(frozen=True, kw_only=True)
class ParityMesh:
    """A mesh to compare, `hsdp-dp2-ep2` when dense parameters are replicated over dp."""

    config: MeshConfig
    """Its sizes."""
    is_hsdp: bool = False
    """Whether dense parameters are replicated on it."""

    @property
    def label(self) -> str:
        """As in `parse_parity_mesh`."""
        return f"{'hsdp-' if self.is_hsdp else ''}{self.config.label}"


@dataclass(frozen=True, kw_only=True)
class ParityReference:
    """What one process computes for the whole batch."""

    weights: dict[str, Tensor]
    """Initial value of every canonical tensor, whole."""
    weights_sha256: str
    """Their hash: all ranks must start from one reference."""
    gradients: dict[str, Tensor]
    """Its gradient."""
    largest: float
    """Largest absolute value in them."""
    updated: dict[str, Tensor]
    """With Muon: each matrix after one step."""
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
    update: float
    """Largest relative difference of an updated matrix; 0 without Muon."""
    seconds: float
    """Time of the step."""

    def agrees(self, dtype: Literal["fp64", "fp32"]) -> bool:
        """Whether it is within the tolerances of `dtype`; a NaN never is."""
        number, gradient, update = (1e-10,) * 3 if dtype == "fp64" else (1e-5, 1e-4, 1e-3)
        return (
            self.weights_equal
            and self.covered
            and all(value <= number for value in (self.loss, self.balance, self.norm))
            and self.gradient <= gradient
            and self.update <= update
        )


def parity_plan(
    arguments: ParityArguments, given: Sequence[str]
) -> tuple[RunConfig, tuple[ParityMesh, ...], tuple[str, ...]]:
    """The run, meshes and variations of a command; a ValueError for `given` options not read."""
    variations = tuple(dict.fromkeys(name for name in arguments.variations.split(",") if name))
    replaced = ["--mesh.", "--layers-per-chunk", "--train.dtype"]
    replaced += ["--balance.coefficient", "--balance.z"] if "aux" in variations else []
    replaced += ["--train.recompute"] if "recompute" in variations else []
    replaced += ["--optim.method"] if "muon" in variations else []
    replaced += ["--model.tie"] if "tied" in variations else []
    if twice := [name for name in given if name.startswith(tuple(replaced))]:
        raise ValueError(f"{', '.join(twice)}: set by --meshes, --dtype or --with")
    unread = (
        "--lr.",
        "--start.",
        "--evaluation.",
        "--checkpoint.",
        "--log.",
        "--train.steps",
        "--train.max",
    )
    if unused := [name for name in given if name.startswith(unread)]:
        raise ValueError(f"{', '.join(unused)}: parity runs one step and reads none of these")
    if arguments.meshes and arguments.grid == "full":
        raise ValueError("--meshes beside --grid full: give one of them")
    labels = FULL_GRID if arguments.grid == "full" else PARITY_MESHES
    if not arguments.config.model.num_experts:
        labels = without_experts(labels)
    meshes = tuple(parse_parity_mesh(label) for label in arguments.meshes or labels)
    return vary(arguments.config, variations), meshes, variations


def parse_parity_mesh(label: str) -> ParityMesh:
    """Read `pp2-ep2` or `hsdp-dp2-ep2`; a ValueError for anything else."""
    mesh = ParityMesh(
        config=parse_mesh(label.removeprefix("hsdp-")), is_hsdp=label.startswith("hsdp-")
    )
    if mesh.is_hsdp and mesh.config.dp == 1:
        raise ValueError(f"mesh {label!r}: hsdp replicates over dp; give dp 2 or more")
    return mesh


def without_experts(labels: Iterable[str]) -> tuple[str, ...]:
    """A grid for a dense model: each mesh once, with dp in place of ep."""
    meshes = [parse_parity_mesh(label) for label in labels]
    dense = [replace(m.config, dp=m.config.dp * m.config.ep, ep=1) for m in meshes]
    found = [replace(m, config=config).label for m, config in zip(meshes, dense, strict=True)]
    return tuple(dict.fromkeys(found))


def vary(config: RunConfig, variations: Sequence[str]) -> RunConfig:
    """The run with `variations` on; the batch's act in `parity_sequences`, hsdp on meshes."""
    unknown = sorted(set(variations) - set(VARIATIONS))
    if unknown:
        raise ValueError(f"--with {','.join(unknown)}: allowed are {', '.join(VARIATIONS)}")
    balance, model, optim, train = config.balance, config.model, config.optim, config.train
    if "aux" in variations:
        if not model.num_experts:
            raise ValueError("--with aux: the model has no experts to balance; leave it out")
        method = "sequence" if balance.method in ("none", "bias") else balance.method
        balance = replace(balance, method=method, coefficient=0.5, z_coefficient=0.05)
    if "tied" in variations:
        model = replace(model, tie_word_embeddings=True)
    if "recompute" in variations:
        train = replace(train, recompute="attention+experts")
    if "muon" in variations:
        optim = replace(optim, method="muon")
    return replace(config, balance=balance, model=model, optim=optim, train=train)


def check_parity(
    config: RunConfig,
    meshes: tuple[ParityMesh, ...],
    dtype: Literal["fp64", "fp32"],
    machine: Machine,
    variations: Sequence[str] = (),
) -> None:
    """Raise a ValueError that names every violation of every mesh, and of the machine."""
    faults = step_violations(replace(config, train=replace(config.train, dtype=dtype)), machine)
    if not faults:
        num_sequences = num_parity_sequences(config, meshes)
        num_micro_batches = num_sequences // config.train.micro_batch
        batch = parity_sequences(config, num_sequences, torch.device("cpu"), variations)
        if all((sequence.targets == IGNORED_TARGET).all() for sequence in batch):
            length = config.train.sequence_length
            faults.append(f"train.sequence_length is {length}: no target is left; lengthen it")
        faults += [
            f"{mesh.label}: {fault}"
            for mesh in meshes
            for fault in mesh_violations(
                mesh.config,
                world_size=mesh.config.world_size,
                num_experts=config.model.num_experts,
                num_layers=config.model.num_hidden_layers,
                num_micro_batches=num_micro_batches,
                sequence_length=config.train.sequence_length,
            )
        ]
    least = max((mesh.config.world_size for mesh in meshes), default=1)
    if 0 < machine.world_size < least:
        faults.append(f"{machine.world_size} processes run, the largest mesh needs {least}")
    if not meshes:
        faults.append(f"no mesh is named; for example {' '.join(PARITY_MESHES)}")
    raise_violations(faults, "parity cannot run")


def parity_worker(
    config: RunConfig,
    meshes: tuple[ParityMesh, ...],
    dtype: Literal["fp64", "fp32"],
    device: torch.device,
    variations: Sequence[str] = (),
) -> bool:
    """Compare every mesh with one process; rank 0 prints the table; whether all meshes agree.

    `config` is varied already. Every rank of the default process group calls it; those beyond a
    mesh skip that mesh.
    """
    train = replace(config.train, dtype=dtype)
    config = replace(config, train=train, layers_per_chunk=None, mesh=MeshConfig())
    num_sequences = num_parity_sequences(config, meshes)
    sequences = parity_sequences(config, num_sequences, device, variations)
    reference = compute_reference(config, sequences, device)
    is_first = torch.distributed.get_rank() == 0
    if is_first:
        print(
            f"parity of {config.name} in {dtype}{''.join(f' +{name}' for name in variations)}: one "
            f"step of {num_sequences} sequences of {train.sequence_length}, "
            f"{reference.num_targets} targets\n{'' if config.model.num_experts else _NO_EXPERTS}"
            f"one process: loss {reference.loss:.12f}, balance {reference.balance:.12f}, "
            f"gradient norm {reference.norm:.12f}\n{_HEADER}",
            flush=True,
        )
    all_agree = True
    for parity_mesh in meshes:
        mesh = Mesh.create(parity_mesh.config, timedelta(seconds=config.timeout))
        if mesh is None:
            continue
        connect_mesh(mesh, device)
        if "hsdp" in variations and mesh.dp.size > 1:
            parity_mesh = replace(parity_mesh, is_hsdp=True)
        sharding = config.sharding
        if parity_mesh.is_hsdp:
            sharding = replace(sharding, replicate_dense=True)
        on_mesh = replace(config, mesh=parity_mesh.config, sharding=sharding)
        result = compare_mesh(on_mesh, mesh, sequences, reference, device)
        all_agree = all_agree and result.agrees(dtype)
        if is_first:
            print(_row(parity_mesh.label, result, dtype), flush=True)
    if is_first:
        print("PASS" if all_agree else "FAIL", flush=True)
    return all_agree


def num_parity_sequences(config: RunConfig, meshes: Sequence[ParityMesh]) -> int:
    """Sequences of the global batch, at least 8: `2 * pp` micro-batches or more on a batch rank."""
    size = config.train.micro_batch
    counts = [2 * mesh.config.pp * mesh.config.num_batch_ranks * size for mesh in meshes]
    return math.lcm(8, *counts)


def parity_sequences(
    config: RunConfig, num_sequences: int, device: torch.device, variations: Sequence[str] = ()
) -> list[Batch]:
    """The sequences of the global batch, uneven on purpose."""
    length, vocab_size = config.train.sequence_length, config.model.vocab_size
    generator = torch.Generator().manual_seed(config.train.seed)
    rows = torch.randint(vocab_size, (num_sequences, length + 1), generator=generator)
    rows[1] = rows[1, 0]
    tokens, targets = rows[:, :-1].clone(), rows[:, 1:].clone()
    for number, row in enumerate(targets):
        row[: length * number // num_sequences] = IGNORED_TARGET
    targets[2:3] = IGNORED_TARGET
    if "padding" in variations:
        tokens[:, length // 2 :] = 0
        targets[:, length // 2 :] = IGNORED_TARGET
    sequences = []
    for number in range(num_sequences):
        positions, documents = torch.arange(length), None
        if "packed" in variations:
            documents = _document_offsets(length, number)
            positions = torch.cat([torch.arange(n) for n in documents.diff().tolist()])
            targets[number, documents[1:] - 1] = IGNORED_TARGET
            documents = documents.int().to(device)
        sequences.append(
            Batch(
                tokens=tokens[number].to(device),
                targets=targets[number].to(device),
                positions=positions.to(device),
                sequence_length=length,
                documents=documents,
            )
        )
    return sequences


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
    whole = _joined(sequences)
    num_targets = int((whole.targets != IGNORED_TARGET).sum())
    outputs = list(plain_hidden(chunks, whole))
    logits = chunks[-1].logits(outputs[-1][0])
    loss = cross_entropy(logits, whole.targets, ignore_index=IGNORED_TARGET, reduction="sum")
    routings = {n: routing for n, (_, routing) in enumerate(outputs) if routing is not None}
    balance, z_loss = torch.zeros_like(loss), torch.zeros_like(loss)
    method, counted = config.balance.method, whole
    if method == "micro-batch":
        # In the whole batch a micro-batch is what a sequence is to the method `sequence`.
        length = whole.sequence_length * config.train.micro_batch
        method, counted = "sequence", replace(whole, sequence_length=length)
    for layer, routing in routings.items():
        counts, previous = count_choices(routing, counted, method), trainer.pipeline.expert_counts
        factors = load_factors(method, counts, previous[layer], trainer.mesh.cp)
        balance += balance_loss(routing, counted, factors) if factors is not None else 0.0
        z_loss += router_z_loss(routing, whole)
    terms = config.balance.coefficient * balance + config.balance.z_coefficient * z_loss
    ((loss + terms) / num_targets).backward()
    for unit in trainer.units:
        unit.reduce()
    weights = {b.name: b.tensor.clone() for p in trainer.parameters for b in _values(p)}
    gradients = [b for p in trainer.parameters for b in canonical_blocks(p, p.grad)]
    return ParityReference(
        weights=weights,
        weights_sha256=_sha256(weights.values()),
        gradients={block.name: block.tensor for block in gradients},
        largest=max(block.tensor.abs().max().item() for block in gradients),
        updated={block.name: block.tensor for block in _updated(config, trainer)},
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
    weights = [block for p in trainer.parameters for block in _values(p)]
    weights_equal = all(torch.equal(b.tensor, _block_of(reference.weights, b)) for b in weights)
    per_rank, size = len(sequences) // mesh.config.num_batch_ranks, config.train.micro_batch
    mine = sequences[mesh.batch_rank * per_rank : (mesh.batch_rank + 1) * per_rank]
    batches = [
        shard_batch(_joined(mine[first : first + size]), mesh.cp)
        for first in range(0, per_rank, size)
    ]
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
    moved = [_compare_update(block, reference) for block in _updated(config, trainer)]
    fact = weights_equal, reference.weights_sha256, compared, max(moved, default=0.0)
    facts = gather_objects(fact, mesh.world)
    sizes = dict.fromkeys(reference.gradients, 0)
    differences = dict.fromkeys(reference.gradients, 0.0)
    for name, offsets in {place for _, _, compared, _ in facts for place in compared}:
        held = [found[name, offsets] for _, _, found, _ in facts if (name, offsets) in found]
        differences[name] = max(differences[name], *(difference for difference, *_ in held))
        _, size, num_replicas, _ = held[0]
        if len(held) == num_replicas and len({digest for *_, digest in held}) == 1:
            sizes[name] += size
    worst = max(differences, key=lambda name: differences[name])
    return ParityResult(
        weights_equal=all(equal for equal, *_ in facts) and len({h for _, h, *_ in facts}) == 1,
        covered=all(sizes[name] == g.numel() for name, g in reference.gradients.items()),
        loss=_relative(losses.loss, reference.loss),
        balance=_relative(losses.balance, reference.balance),
        norm=_relative(norm_value, reference.norm),
        gradient=differences[worst],
        worst=worst,
        update=max(update for *_, update in facts),
        seconds=seconds,
    )


def _document_offsets(length: int, number: int) -> Tensor:
    """Where the documents of a sequence start and end, `[D + 1]` from 0 to `length`."""
    offsets, turn = [0], number
    while offsets[-1] < length:
        step = DOCUMENT_LENGTHS[turn % len(DOCUMENT_LENGTHS)]
        offsets.append(min(offsets[-1] + step, length))
        turn += 1
    return torch.tensor(offsets)


def _joined(sequences: Sequence[Batch]) -> Batch:
    """Several sequences, packed or none of them, as one micro-batch."""
    length, documents = sequences[0].sequence_length, None
    packed = [batch.documents for batch in sequences if batch.documents is not None]
    if packed:
        # The end of one sequence is the start of the next: an offset that occurs once.
        shifted = [offsets + n * length for n, offsets in enumerate(packed)]
        documents = torch.cat(shifted).unique()
    return Batch(
        tokens=torch.cat([batch.tokens for batch in sequences]),
        targets=torch.cat([batch.targets for batch in sequences]),
        positions=torch.cat([batch.positions for batch in sequences]),
        sequence_length=length,
        documents=documents,
    )


def _values(parameter: ShardedParameter) -> Iterator[CanonicalBlock]:
    return canonical_blocks(parameter, parameter.shard)


def _updated(config: RunConfig, trainer: Trainer) -> list[CanonicalBlock]:
    """This rank's blocks of all matrices after one step of Muon; nothing with another method."""
    if config.optim.method != "muon":
        return []
    optimizer = Muon(trainer.parameters, config.optim)
    optimizer.step(1.0)
    matrices = [p for p in trainer.parameters if p.role.uses_muon]
    return [block for p in matrices for block in _values(p) if block.tensor.numel()]


def _sha256(tensors: Iterable[Tensor]) -> str:
    digest = sha256()
    for tensor in tensors:
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def _block_of(tensors: dict[str, Tensor], block: CanonicalBlock) -> Tensor:
    return cut_block(tensors[block.name], block.offsets, block.tensor.shape)


def _compare_block(block: CanonicalBlock, reference: ParityReference) -> tuple[float, int]:
    """Difference of the block as the file's docstring defines it; elements compared."""
    difference = (block.tensor - _block_of(reference.gradients, block)).abs().max().item()
    scale = reference.gradients[block.name].abs().max().item()
    return _ratio(difference, max(scale, 1e-5 * reference.largest)), block.tensor.numel()


def _compare_update(block: CanonicalBlock, reference: ParityReference) -> float:
    """Largest difference in an updated block over the largest movement of its tensor."""
    difference = (block.tensor - _block_of(reference.updated, block)).abs().max().item()
    movement = reference.updated[block.name] - reference.weights[block.name]
    return _ratio(difference, movement.abs().max().item())


def _relative(value: float, reference: float) -> float:
    return _ratio(abs(value - reference), abs(reference))


def _ratio(difference: float, scale: float) -> float:
    """Difference over scale; a NaN, or any difference from zero, is infinitely far."""
    if difference == 0:
        return 0.0
    return difference / scale if scale > 0 and not math.isnan(difference) else math.inf


_NO_EXPERTS = (
    "the model has no experts: nothing is balanced, and in a grid dp takes the place of ep\n"
)
_HEADER = (
    f"{'mesh':<12} {'weights':<9} {'loss':>8} {'balance':>8} {'norm':>8} {'gradient':>8} "
    f"{'update':>8}  {'seconds':>7}  verdict  largest gradient difference in"
)


def _row(label: str, result: ParityResult, dtype: Literal["fp64", "fp32"]) -> str:
    weights = "bit-equal" if result.weights_equal else "DIFFER"
    numbers = [result.loss, result.balance, result.norm, result.gradient, result.update]
    return (
        f"{label:<12} {weights:<9} {' '.join(f'{n:8.1e}' for n in numbers)}  "
        f"{result.seconds:7.2f}  {'agrees ' if result.agrees(dtype) else 'DIFFERS'}  {result.worst}"
        + ("" if result.covered else "; some elements on no rank or too many, or replicas differ")
    )

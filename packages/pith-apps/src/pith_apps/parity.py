"""The proof that a mesh changes nothing: one step on many meshes against one process.

From the same initial weights a global batch goes through a training step on each mesh, and through
a reference: one process, the whole batch at once, plain autograd over `plain_hidden`, torch's
cross-entropy over full logits. It shares nothing of dispatch, schedule, transfers or sharding.

    difference of two numbers   |a - b| / |b|
    difference of a gradient    max |a - b| / max(max |b|, 1e-5 max |B|),  b the reference tensor, B
                                all of them: what should be zero is rounding over rounding
    a mesh agrees when          its initial weights are bit-equal, every element of every canonical
                                gradient is held by exactly one rank of each replica, all with the
                                same bits, and no difference exceeds 1e-10 (fp32: `FP32_LIMITS`)

The batch is uneven: every sequence ignores another number of targets, one has none, and one repeats
a single token, which all goes to the same experts. No optimizer runs, since Adam would hide a
factor; `muon` also compares the updated matrices, relative to their largest movement (its iteration
multiplies rounding by up to 3.4445^5). The trap: in fp32 a top-k tie that rounding breaks
differently shows as a large difference.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import sha256
from typing import Annotated, Any, Literal

import torch
from pith_engine.balance import balance_loss, count_choices, load_factors, router_z_loss
from pith_engine.context_parallel import shard_batch
from pith_engine.contract import IGNORED_TARGET, Batch
from pith_engine.fsdp import CanonicalBlock, ShardedParameter, canonical_blocks, cut_block
from pith_engine.mesh import Mesh, MeshConfig, parse_mesh
from pith_engine.optim import Muon
from pith_engine.plain import plain_hidden
from pith_engine.runtime import connect_mesh, gather_objects
from pith_engine.violations import raise_violations
from torch import Tensor
from torch.nn.functional import cross_entropy
from tyro.conf import arg

from pith_apps.arguments import RunArguments
from pith_apps.checks import fit_violations, step_violations
from pith_apps.config import RunConfig
from pith_apps.data import local_range
from pith_apps.plan import Machine
from pith_apps.trainer import Trainer, build_trainer, step_gradients

PARITY_MESHES = ("dp2", "dp4", "ep2", "ep4", "pp2", "pp2-ep2", "pp2-dp2", "dp2-ep2")
"""All meshes of these axes in 2 or 4 ranks that two chunks a rank allow."""
FULL_GRID = (
    *("dp4", "ep4", "dp2-ep2", "pp2-dp2", "pp2-ep2", "dp2-cp2", "cp2-ep2", "cp4", "pp2-cp2"),
    *("hsdp-dp2-ep2", "pp2-cp2-ep2"),
)
"""Every pair of axes, replicated dense parameters, and three axes at once (8 processes)."""
VARIATIONS = ("packed", "padding", "aux", "tied", "recompute", "muon", "hsdp")
"""Several documents in a sequence; half of it padding; balance and z-loss of notable size; tied
embeddings; attention and experts recomputed; Muon's update; HSDP wherever dp has ranks."""
VARIED_OPTIONS = {
    "--balance.coefficient": "aux",
    "--balance.z": "aux",
    "--model.tie": "tied",
    "--train.recompute": "recompute",
    "--optim.method": "muon",
    "--sharding.replicate-dense": "hsdp",
}
"""Beginning of an option -> the variation that sets it."""
DOCUMENT_LENGTHS = (1, 5, 13, 2, 7)
"""Of `packed`, over and over from another place in each sequence: odd, and some inside a block."""
FP32_LIMITS = {"loss": 1e-5, "balance": 1e-5, "norm": 1e-5, "gradient": 1e-4, "update": 1e-3}
"""Largest differences of a mesh that agrees in fp32."""


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
class ParityReference:
    """What one process computes; canonical tensors by name."""

    weights: dict[str, Tensor]
    """Initial values."""
    gradients: dict[str, Tensor]
    """Their gradients."""
    updated: dict[str, Tensor]
    """With Muon: each matrix after one step."""
    numbers: dict[str, float]
    """`loss`, mean of the counted targets in nats; `balance` without coefficient, mean over the
    layers; `norm` of all gradients."""


@dataclass(frozen=True, kw_only=True)
class ParityResult:
    """How far one mesh is from the reference."""

    weights_equal: bool
    """Whether all ranks start from one reference's weights."""
    covered: bool
    """Whether each replica holds each gradient element once, all bit-equal."""
    differences: dict[str, float]
    """Relative, by the names of `FP32_LIMITS`; `update` is 0 without Muon."""
    worst: str
    """The tensor whose gradient differs most."""

    def agrees(self, dtype: str) -> bool:
        """Whether it is within the limits of `dtype`; a NaN never is."""
        limits = dict.fromkeys(FP32_LIMITS, 1e-10) if dtype == "fp64" else FP32_LIMITS
        is_close = all(self.differences[name] <= limit for name, limit in limits.items())
        return self.weights_equal and self.covered and is_close


def parity_plan(
    arguments: ParityArguments, given: Sequence[str]
) -> tuple[list[RunConfig], tuple[str, ...]]:
    """The runs and variations of a command; a ValueError for `given` options that are not read."""
    variations = tuple(dict.fromkeys(filter(None, arguments.variations.split(","))))
    replaced = ["--mesh.", "--layers-per-chunk", "--train.dtype", "--train.batch"]
    replaced += [option for option, name in VARIED_OPTIONS.items() if name in variations]
    if twice := [name for name in given if name.startswith(tuple(replaced))]:
        raise ValueError(f"{', '.join(twice)}: set by --meshes, --dtype or --with")
    unread = ("--lr.", "--start.", "--evaluation.", "--checkpoint.", "--log.", "--data.")
    unread += ("--train.steps", "--train.max", "--runs-folder", "--balance.bias-rate")
    if "muon" not in (*variations, arguments.config.optim.method):
        unread += ("--optim.",)
    if unused := [name for name in given if name.startswith(unread)]:
        raise ValueError(f"{', '.join(unused)}: parity runs one step and reads none of these")
    if arguments.meshes and arguments.grid == "full":
        raise ValueError("--meshes beside --grid full: give one of them")
    grid = FULL_GRID if arguments.grid == "full" else PARITY_MESHES
    if not arguments.config.model.num_experts:
        grid = without_experts(grid)
    labels = arguments.meshes or grid
    return parity_runs(arguments.config, labels, arguments.dtype, variations), variations


def without_experts(labels: Iterable[str]) -> tuple[str, ...]:
    """A grid for a dense model: each mesh once, with dp in place of ep."""
    found = []
    for label in labels:
        _, hsdp, sizes = label.rpartition("hsdp-")
        mesh = parse_mesh(sizes)
        found.append(hsdp + replace(mesh, dp=mesh.dp * mesh.ep, ep=1).label)
    return tuple(dict.fromkeys(found))


def parity_runs(
    config: RunConfig,
    labels: Iterable[str],
    dtype: Literal["fp64", "fp32"],
    variations: Sequence[str] = (),
) -> list[RunConfig]:
    """The varied run on each mesh, such as `hsdp-dp2-ep2`, with one global batch.

    It has at least 8 sequences, and `2 * pp` micro-batches on a batch rank of every mesh.
    """
    varied = replace(vary(config, variations), layers_per_chunk=None)
    runs, batch = list[RunConfig](), 8
    for label in labels:
        mesh, is_hsdp = parse_mesh(label.removeprefix("hsdp-")), label.startswith("hsdp-")
        if is_hsdp and mesh.dp == 1:
            raise ValueError(f"mesh {label!r}: hsdp replicates over dp; give dp 2 or more")
        runs.append(replace(vary(varied, ["hsdp"] if is_hsdp else []), mesh=mesh))
        counted = 2 * mesh.pp * mesh.num_batch_ranks * max(1, config.train.micro_batch)
        batch = math.lcm(batch, counted)
    train = replace(varied.train, dtype=dtype, batch=batch)
    return [replace(run, train=train) for run in runs]


def vary(config: RunConfig, variations: Sequence[str]) -> RunConfig:
    """The run with `variations` on; those of the batch act in `parity_batch`."""
    if unknown := sorted(set(variations) - set(VARIATIONS)):
        raise ValueError(f"--with {','.join(unknown)}: allowed are {', '.join(VARIATIONS)}")
    if "aux" in variations and not config.model.num_experts:
        raise ValueError("--with aux: the model has no experts to balance; leave it out")
    balance = replace(config.balance, coefficient=0.5, z_coefficient=0.05)
    if balance.method in ("none", "bias"):
        balance = replace(balance, method="sequence")
    changes: dict[str, tuple[str, Any]] = {
        "aux": ("balance", balance),
        "tied": ("model", replace(config.model, tie_word_embeddings=True)),
        "recompute": ("train", replace(config.train, recompute="attention+experts")),
        "muon": ("optim", replace(config.optim, method="muon")),
        "hsdp": ("sharding", replace(config.sharding, replicate_dense=True)),
    }
    return replace(config, **dict(changes[name] for name in variations if name in changes))


def check_parity(
    runs: Sequence[RunConfig], machine: Machine, variations: Sequence[str] = ()
) -> None:
    """A ValueError with every violation of every mesh, and of the machine."""
    faults = step_violations(runs[0], machine)
    if not faults:
        if not parity_batch(runs[0], torch.device("cpu"), variations).counted.any():
            length = runs[0].train.sequence_length
            faults.append(f"train.sequence_length is {length}: no target is left; lengthen it")
        for run in runs:
            lines = fit_violations(run, run.mesh.world_size)
            faults += [f"{_label(run)}: {line}" for line in lines]
    least = max(run.mesh.world_size for run in runs)
    if 0 < machine.world_size < least:
        faults.append(f"{machine.world_size} processes run, the largest mesh needs {least}")
    raise_violations(faults, "parity cannot run")


def parity_worker(
    runs: Sequence[RunConfig], device: torch.device, variations: Sequence[str] = ()
) -> bool:
    """Print the table; whether all meshes agree. Every rank of the default group calls it."""
    alone = replace(runs[0], mesh=MeshConfig())
    train, is_first = alone.train, torch.distributed.get_rank() == 0
    batch = parity_batch(alone, device, variations)
    reference = compute_reference(alone, batch)
    if is_first:
        variations_on = "".join(f" +{name}" for name in variations)
        loss, balance, norm = (f"{number:.12f}" for number in reference.numbers.values())
        columns = " ".join(f"{name:>8}" for name in FP32_LIMITS)
        print(
            f"parity of {alone.name} in {train.dtype}{variations_on}: one step of {train.batch} "
            f"sequences of {train.sequence_length}, {int(batch.counted.sum())} targets, "
            f"balance {alone.balance.method}"
        )
        if not alone.model.num_experts:
            print("the model has no experts: nothing is balanced, and in a grid dp replaces ep")
        print(
            f"one process: loss {loss}, balance {balance}, gradient norm {norm}\n"
            f"{'mesh':<12} weights   {columns}  verdict  largest gradient difference in",
            flush=True,
        )
    all_agree = True
    for run in runs:
        mesh = Mesh.create(run.mesh, timedelta(seconds=run.timeout))
        if mesh is None:
            continue
        connect_mesh(mesh, device)
        result = compare_mesh(run, mesh, batch, reference)
        all_agree = all_agree and result.agrees(train.dtype)
        if is_first:
            print(_row(run, result), flush=True)
    if is_first:
        print("PASS" if all_agree else "FAIL", flush=True)
    return all_agree


def parity_batch(config: RunConfig, device: torch.device, variations: Sequence[str] = ()) -> Batch:
    """The global batch, uneven on purpose."""
    length, num_sequences = config.train.sequence_length, config.train.batch
    generator = torch.Generator().manual_seed(config.train.seed)
    shape, vocab_size = (num_sequences, length + 1), config.model.vocab_size
    rows = torch.randint(vocab_size, shape, generator=generator)
    rows[1] = rows[1, 0]
    tokens, targets = rows[:, :-1].clone(), rows[:, 1:].clone()
    for number, row in enumerate(targets):
        row[: length * number // num_sequences] = IGNORED_TARGET
    targets[2:3] = IGNORED_TARGET
    if "padding" in variations:
        tokens[:, length // 2 :] = 0
        targets[:, length // 2 :] = IGNORED_TARGET
    tokens, targets = tokens.flatten(), targets.flatten()
    offsets = torch.arange(0, len(tokens) + 1, length)
    if "packed" in variations:
        for number, start in enumerate(offsets[:-1]):
            ends = torch.tensor(DOCUMENT_LENGTHS).roll(-number).repeat(length).cumsum(0)
            offsets = torch.cat([offsets, start + ends[ends < length]])
        offsets = offsets.unique()
        targets[offsets[1:] - 1] = IGNORED_TARGET
    positions = torch.cat([torch.arange(size) for size in offsets.diff().tolist()])
    return Batch(
        tokens=tokens.to(device),
        targets=targets.to(device),
        positions=positions.to(device),
        sequence_length=length,
        documents=offsets.int().to(device) if "packed" in variations else None,
    )


def cut_sequences(batch: Batch, first: int, count: int) -> Batch:
    """`count` whole sequences of a batch, from number `first` on."""
    start, stop = first * batch.sequence_length, (first + count) * batch.sequence_length
    cut, documents = slice(start, stop), batch.documents
    if documents is not None:
        documents = documents[(documents >= start) & (documents <= stop)] - start
    return replace(
        batch,
        tokens=batch.tokens[cut],
        targets=batch.targets[cut],
        positions=batch.positions[cut],
        documents=documents,
    )


def compute_reference(config: RunConfig, batch: Batch) -> ParityReference:
    """One step of the whole batch in this process, with autograd alone."""
    trainer = _build_uneven(config, Mesh.single(), batch.tokens.device)
    trainer.gather()
    chunks, num_targets = list(trainer.pipeline.chunks.values()), int(batch.counted.sum())
    outputs = list(plain_hidden(chunks, batch))
    logits = chunks[-1].logits(outputs[-1][0])
    loss = cross_entropy(logits, batch.targets, ignore_index=IGNORED_TARGET, reduction="sum")
    method, counted = config.balance.method, batch
    if method == "micro-batch":
        # In the whole batch a micro-batch is what a sequence is to the method `sequence`.
        length = batch.sequence_length * config.train.micro_batch
        method, counted = "sequence", replace(batch, sequence_length=length)
    routings = {n: routing for n, (_, routing) in enumerate(outputs) if routing is not None}
    balance, z_loss = torch.zeros_like(loss), torch.zeros_like(loss)
    for layer, routing in routings.items():
        counts, previous = count_choices(routing, counted, method), trainer.pipeline.expert_counts
        factors = load_factors(method, counts, previous[layer], trainer.mesh.cp)
        balance += balance_loss(routing, counted, factors) if factors is not None else 0.0
        z_loss += router_z_loss(routing, batch)
    terms = config.balance.coefficient * balance + config.balance.z_coefficient * z_loss
    ((loss + terms) / num_targets).backward()
    for unit in trainer.units:
        unit.reduce()
    weights = {block.name: block.tensor.clone() for block in _shards(trainer.parameters)}
    gradients = {b.name: b.tensor for p in trainer.parameters for b in _blocks(p, p.grad)}
    return ParityReference(
        weights=weights,
        gradients=gradients,
        updated={block.name: block.tensor for block in _updated(config, trainer)},
        numbers={
            "loss": loss.item() / num_targets,
            "balance": balance.item() / (num_targets * max(1, len(routings))),
            "norm": math.sqrt(sum(g.double().square().sum().item() for g in gradients.values())),
        },
    )


def compare_mesh(
    config: RunConfig, mesh: Mesh, batch: Batch, reference: ParityReference
) -> ParityResult:
    """Run the step on the mesh of `config`, all of whose ranks call this."""
    trainer = _build_uneven(config, mesh, batch.tokens.device)
    weights = _shards(trainer.parameters)
    weights_equal = all(_difference(b, reference.weights, 1.0) == 0 for b in weights)
    size = config.train.micro_batch
    firsts = local_range(mesh, config.train)[::size]
    batches = [shard_batch(cut_sequences(batch, first, size), mesh.cp) for first in firsts]
    losses, norm = step_gradients(trainer, batches)
    ours = {"loss": losses.loss, "balance": losses.balance, "norm": norm.item()}

    scales = {name: _largest(gradient) for name, gradient in reference.gradients.items()}
    least = 1e-5 * max(scales.values())
    differences, places, moved = [(0.0, "")], [], [0.0]
    for parameter in trainer.parameters:
        for b in _blocks(parameter, parameter.grad):
            scale = max(scales[b.name], least)
            differences.append((_difference(b, reference.gradients, scale), b.name))
            place = b.name, b.tensor.numel(), parameter.replicas.size
            places.append((*place, b.offsets, _digest(b.tensor)))
    for block in _updated(config, trainer):
        movement = reference.updated[block.name] - reference.weights[block.name]
        moved.append(_difference(block, reference.updated, _largest(movement)))
    initial = [_digest(weight) for weight in reference.weights.values()]
    fact = weights_equal, initial, places, max(differences), max(moved)
    equal, initials, held, worst, moves = zip(*gather_objects(fact, mesh.world), strict=True)
    num_held, sizes = Counter(place for places in held for place in places), Counter[str]()
    for (name, size, num_replicas, *_), num_ranks in num_held.items():
        sizes[name] += size if num_ranks == num_replicas else 0
    is_complete = all(sizes[name] == g.numel() for name, g in reference.gradients.items())
    return ParityResult(
        weights_equal=all(equal) and all(first == initial for first in initials),
        covered=is_complete and len({place[:-1] for place in num_held}) == len(num_held),
        differences={
            **{name: _ratio(ours[name] - b, b) for name, b in reference.numbers.items()},
            "gradient": max(worst)[0],
            "update": max(moves),
        },
        worst=max(worst)[1],
    )


def _build_uneven(config: RunConfig, mesh: Mesh, device: torch.device) -> Trainer:
    """A trainer whose experts were chosen unevenly in the step before."""
    trainer = build_trainer(config, mesh, device)
    counts = torch.arange(1, config.model.num_experts + 1)
    layers = range(config.model.num_hidden_layers)
    trainer.pipeline.restore_counts({str(n): counts.roll(n).tolist() for n in layers})
    return trainer


def _blocks(parameter: ShardedParameter, tensor: Tensor) -> list[CanonicalBlock]:
    """Those that this rank holds something of."""
    return [block for block in canonical_blocks(parameter, tensor) if block.tensor.numel()]


def _shards(parameters: Iterable[ShardedParameter]) -> list[CanonicalBlock]:
    return [block for p in parameters for block in _blocks(p, p.shard)]


def _updated(config: RunConfig, trainer: Trainer) -> list[CanonicalBlock]:
    """This rank's blocks of all matrices after one step, if `config` has Muon."""
    if config.optim.method != "muon":
        return []
    Muon(trainer.parameters, config.optim).step(1.0)
    return _shards(p for p in trainer.parameters if p.role.uses_muon)


def _digest(tensor: Tensor) -> str:
    return sha256(tensor.cpu().numpy().tobytes()).hexdigest()


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item()


def _difference(block: CanonicalBlock, tensors: dict[str, Tensor], scale: float) -> float:
    theirs = cut_block(tensors[block.name], block.offsets, block.tensor.shape)
    return _ratio(_largest(block.tensor - theirs), scale)


def _ratio(difference: float, scale: float) -> float:
    """Difference over scale; a NaN, or any difference from zero, is infinitely far."""
    if difference == 0:
        return 0.0
    ratio = abs(difference / scale) if scale else math.inf
    return math.inf if math.isnan(ratio) else ratio


def _label(run: RunConfig) -> str:
    prefix = "hsdp-" if run.sharding.replicate_dense and run.mesh.dp > 1 else ""
    return prefix + run.mesh.label


def _row(run: RunConfig, result: ParityResult) -> str:
    weights = "bit-equal" if result.weights_equal else "DIFFER"
    numbers = " ".join(f"{result.differences[name]:8.1e}" for name in FP32_LIMITS)
    verdict = "agrees " if result.agrees(run.train.dtype) else "DIFFERS"
    gaps = "" if result.covered else "; some elements on no rank or too many, or replicas differ"
    return f"{_label(run):<12} {weights:<9} {numbers}  {verdict}  {result.worst}{gaps}"

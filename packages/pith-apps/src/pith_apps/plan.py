"""What is known about a run before it computes anything, by the code that the run itself uses."""

from dataclasses import dataclass
from math import ceil

import torch
from pith_engine.fsdp import shard_axes
from pith_engine.lr import reaches_peak
from pith_engine.mesh import Mesh, describe_mesh
from pith_engine.partition import describe_partition, layers_per_chunk
from pith_models.build import forward_flops, head_dims, parameter_counts
from pith_ops.attention import AttentionBackend, choose_attention_backend

from pith_apps.config import RunConfig, torch_dtype


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a run finds to run on."""

    world_size: int
    """Processes on all nodes."""
    processes_here: int
    """Those on this node."""
    num_gpus: int
    """That they see together."""


def chosen_layers(config: RunConfig) -> tuple[int, ...]:
    """Layers of each chunk: as configured, or balanced by FLOPs."""
    if config.layers_per_chunk is not None:
        return config.layers_per_chunk
    layers, head = forward_flops(config.model, config.train.sequence_length)
    return layers_per_chunk(layers, config.mesh.pp, head)


def chosen_attention(config: RunConfig) -> AttentionBackend:
    """ValueError if it cannot serve this device, dtype or head dim."""
    return choose_attention_backend(
        config.train.attention,
        torch.device(config.train.device),
        torch_dtype(config.train.dtype),
        *head_dims(config.model),
        packed=False,
        window=any(map(config.model.window, range(config.model.num_hidden_layers))),
    )


def training_flops(config: RunConfig) -> float:
    """FLOPs of a token: forward, and twice as many backward."""
    layers, head = forward_flops(config.model, config.train.sequence_length)
    return 3 * (sum(layers) + head)


def describe_run(config: RunConfig, machine: Machine, num_tokens: int) -> str:
    """The plan, for a training corpus of `num_tokens`."""
    train, mesh, rates = config.train, config.mesh, config.lr
    counts = parameter_counts(config.model)
    flops = forward_flops(config.model, train.sequence_length)
    partition = describe_partition(chosen_layers(config), *flops)
    tokens = train.batch * train.sequence_length
    nodes = ceil(machine.world_size / machine.processes_here)
    balance = config.balance.method if config.model.num_experts else "none: no experts"
    unreached = "" if reaches_peak(rates, train.steps) else ", which this short run never reaches"
    return f"""\
run {config.name} in {config.run_folder}
mesh {mesh.label}: {machine.world_size} process(es) on {nodes} node(s)
{describe_mesh(mesh, machine.processes_here)}
sharding: {_sharding(config)}
layers per chunk ({"configured" if config.layers_per_chunk else "balanced by cost"})
{partition}
parameters: {counts.total:,} in all, {counts.active:,} active for a token; \
{training_flops(config):.3g} FLOPs a token
step: {train.batch} sequences of {train.sequence_length} = {tokens:,} tokens, in \
{config.num_micro_batches // mesh.num_batch_ranks} micro-batches of {train.micro_batch} a rank
run: {train.steps} steps, {train.steps * tokens:,} tokens, \
{train.steps * tokens / num_tokens:.2f} epochs of the corpus
learning rate: {rates.schedule}, warmup of {rates.warmup_steps} steps to {rates.peak:g}{unreached}
chosen: device {train.device}, dtype {train.dtype}, attention {chosen_attention(config).value} \
(asked: {train.attention}), balance {balance}, recompute {train.recompute}"""


def _sharding(config: RunConfig) -> str:
    mesh, parts = Mesh.plan(config.mesh, 0), []
    for kind in ("dense", "experts") if config.model.num_experts else ("dense",):
        shards, replicas = shard_axes(mesh, config.sharding, is_expert=kind == "experts")
        parts.append(f"{kind} in {shards.size} shard(s) over {shards.name}")
        if replicas.size > 1:
            parts[-1] += f", {replicas.size} replicas over {replicas.name}"
    return "; ".join(parts)

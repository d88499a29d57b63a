"""A small model for engine tests: every stage of the contract, no attention kernel.

`ToyChunk` mixes tokens causally with a running mean, routes with softmax top-k, and has a dense
layer where asked, or a bias that selects. Beside the router's operators it is torch alone, so that
the engine is tested without a model.
"""

import torch
from pith_engine.balance import balance_loss, count_choices, load_factors
from pith_engine.contract import IGNORED_TARGET, Batch, ModelChunk, Role, Routing, declare
from pith_engine.mesh import Mesh
from pith_ops.grouped_linear import grouped_linear
from pith_ops.routing import router_logits, score_topk
from torch import nn

VOCABULARY, HIDDEN, EXPERTS, TOP_K, LENGTH = 31, 12, 4, 2, 6


class ToyExperts(nn.Module):
    def __init__(self, num_local):
        super().__init__()
        self.up = declare(
            (num_local, 20, HIDDEN), Role.EXPERT_MATRIX, std=0.3, parts=("one", "two")
        )
        self.down = declare((num_local, HIDDEN, 20), Role.EXPERT_MATRIX, std=0.3)


class ToyLayer(nn.Module):
    def __init__(self, num_local_experts, *, has_bias=False):
        super().__init__()
        self.num_local_experts = num_local_experts
        self.only_experts, self.has_bias = EXPERTS, has_bias
        self.mix = declare((HIDDEN, HIDDEN), Role.MATRIX, std=0.3)
        self.norm = declare((HIDDEN,), Role.NORM)
        if num_local_experts:
            self.router = declare((EXPERTS, HIDDEN), Role.ROUTER, std=1.0)
            if has_bias:
                self.router_bias = declare((EXPERTS,), Role.BALANCE_BIAS)
            self.mlp = ToyExperts(num_local_experts)
        else:
            self.dense = declare((HIDDEN, HIDDEN), Role.MATRIX, std=0.3)

    def attention(self, hidden, batch, chosen=None):
        sequences = hidden.view(batch.num_sequences, batch.sequence_length, -1)
        steps = torch.arange(1, batch.sequence_length + 1, device=hidden.device)[:, None]
        mean = (sequences.cumsum(1) / steps).to(hidden.dtype).view_as(hidden)
        residual = hidden + torch.tanh(mean @ self.mix)
        tokens = residual * self.norm
        if not self.num_local_experts:
            return tokens, residual, None
        logits = router_logits(tokens, self.router)
        if self.has_bias:
            ids, weights, scores = score_topk(
                logits, TOP_K, False, chosen=chosen, bias=self.router_bias
            )
        else:
            scores = logits.softmax(-1)
            ids = scores[:, : self.only_experts].topk(TOP_K).indices if chosen is None else chosen
            weights, ids = scores.gather(1, ids.long()), ids.int()
        return (
            tokens,
            residual,
            Routing(expert_ids=ids, weights=weights, scores=scores, chosen=ids, logits=logits),
        )

    def experts(self, tokens, groups, weight_grads):
        if groups is None:
            return torch.tanh(tokens @ self.dense)
        inner = torch.tanh(grouped_linear(tokens, self.mlp.up, groups, weight_grads))
        return grouped_linear(inner, self.mlp.down, groups, weight_grads)

    def aggregate(self, combined, residual):
        return combined + residual


class ToyChunk(ModelChunk):
    def __init__(self, layers, *, is_first, is_last, ep=1, dense=(), biased=()):
        super().__init__(is_last=is_last)
        for number in layers:
            local = 0 if number in dense else EXPERTS // ep
            self.layers[str(number)] = ToyLayer(local, has_bias=number in biased)
        if is_first:
            self.embedding = declare((VOCABULARY, HIDDEN), Role.EMBEDDING, std=1.0)
        if is_last:
            self.final_norm = declare((HIDDEN,), Role.NORM)
            self.head = declare((VOCABULARY, HIDDEN), Role.HEAD, std=0.5)

    def embed(self, batch):
        return self.embedding[batch.tokens]

    def logits(self, hidden):
        return (hidden * self.final_norm) @ self.head.t()

    def loss(self, hidden, batch):
        logits = self.logits(hidden)
        wide = logits.double() if logits.dtype == torch.float64 else logits.float()
        return nn.functional.cross_entropy(
            wide, batch.targets, ignore_index=IGNORED_TARGET, reduction="sum"
        )


def toy_chunks(layers_per_chunk, mesh, dense=(), biased=()):
    """This rank's two chunks of a model with the given layers per chunk.

    Layers in `dense` have no experts, those in `biased` a bias that selects.
    """
    last = 2 * mesh.pp.size - 1
    starts = [sum(layers_per_chunk[:c]) for c in range(last + 1)]
    return [
        ToyChunk(
            range(starts[c], starts[c] + layers_per_chunk[c]),
            is_first=c == 0,
            is_last=c == last,
            ep=mesh.ep.size,
            dense=dense,
            biased=biased,
        )
        for c in (mesh.pp.rank, last - mesh.pp.rank)
    ]


def plain_balance(method, routing, batch, previous=None):
    """The balance loss of one process, times the counted tokens."""
    counts = count_choices(routing, batch, method)
    return balance_loss(routing, batch, load_factors(method, counts, previous, Mesh.single().cp))


def toy_batches(count, *, num_sequences=2, seed=0):
    """Micro-batches with unequal numbers of ignored targets; one is ignored altogether."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for number in range(count):
        tokens = torch.randint(VOCABULARY, (num_sequences * LENGTH + 1,), generator=generator)
        targets = tokens[1:].clone()
        targets[torch.rand(len(targets), generator=generator) < 0.2] = IGNORED_TARGET
        if number == 1:
            targets[:] = IGNORED_TARGET
        batches.append(
            Batch(
                tokens=tokens[:-1],
                targets=targets,
                positions=torch.arange(LENGTH).repeat(num_sequences),
                sequence_length=LENGTH,
            )
        )
    return batches

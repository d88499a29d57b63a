"""Which tokens a micro-batch holds: a pure function of (seed, epoch, sample index).

Sample i with sequence length S is `tokens[i * S : i * S + S + 1]`: inputs are the first S ids,
targets the last S. A shorter tail is dropped.

    sample number g of a run      = (step - 1) * B + sequence of the step    (steps count from 1)
    its epoch and place           = divmod(g, number of samples)
    the sample read at that place = permutation(place; seed, epoch)

with B samples in a step. Batch rank d of n runs sequences `d * B / n` to
`(d + 1) * B / n - 1` of a step: another mesh sees the same. The cp ranks of a batch rank read the
same samples and keep their blocks of each.

The permutation is a Feistel network over the smallest even number of bits that covers the epoch,
applied again while the result falls outside it (cycle walking; Black and Rogaway, CT-RSA 2002).
"""

import hashlib
import struct
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy
import torch
from pith_engine.context_parallel import shard_batch
from pith_engine.contract import IGNORED_TARGET, Batch
from pith_engine.mesh import Axis, Mesh
from torch import Tensor

from pith_apps.config import TrainConfig

NUM_ROUNDS = 6


class TrainingData:
    """One rank's micro-batches of every step; a thread reads one step ahead."""

    def __init__(
        self,
        tokens: numpy.ndarray,
        mesh: Mesh,
        train: TrainConfig,
        *,
        vocab_size: int,
        device: torch.device,
    ):
        """`tokens` `[N]`."""
        self.tokens, self.vocab_size, self.train = tokens, vocab_size, train
        self.device, self.cp = device, mesh.cp
        self.num_samples = num_samples(len(tokens), train.sequence_length)
        self.local_sequences = local_range(mesh, train)
        if fault := too_few_samples(len(tokens), train.sequence_length, train.batch):
            raise ValueError(fault)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="training-data")
        self._ahead: tuple[int, Future[Tensor]] | None = None

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step; a ValueError if an id is outside the vocabulary."""
        ahead, self._ahead = self._ahead, None
        rows = ahead[1].result() if ahead and ahead[0] == step else self._read(step)
        self._ahead = (step + 1, self._reader.submit(self._read, step + 1))
        if self.device.type == "cuda":
            # In the reader's thread it would open a context on GPU 0 in every rank.
            rows = rows.pin_memory()
        rows = rows.to(self.device, non_blocking=True)
        return _batches_of(rows, self.train.micro_batch, self.cp)

    def _read(self, step: int) -> Tensor:
        train, size, samples = self.train, self.num_samples, []
        for sequence in self.local_sequences:
            epoch, place = divmod((step - 1) * train.batch + sequence, size)
            samples.append(permuted(place, size, train.seed, epoch))
        return _read_rows(self.tokens, samples, train.sequence_length, self.vocab_size)


def held_out_batches(
    tokens: numpy.ndarray,
    mesh: Mesh,
    train: TrainConfig,
    *,
    vocab_size: int,
    device: torch.device,
    max_samples: int,
) -> Iterator[list[Batch]]:
    """This rank's micro-batches of the held-out data, as many at once as in a training step.

    Samples come in order, `max_samples` spread evenly where there are more; what the last lack are
    ignored targets.
    """
    total = -(-(len(tokens) - 1) // train.sequence_length)
    count, local = min(total, max_samples), local_range(mesh, train)
    samples = [place * total // count for place in range(count)] + [total] * (-count % train.batch)
    for first in range(0, count, train.batch):
        mine = samples[first + local.start : first + local.stop]
        rows = _read_rows(tokens, mine, train.sequence_length, vocab_size)
        yield _batches_of(rows.to(device), train.micro_batch, mesh.cp)


def too_few_samples(num_tokens: int, sequence_length: int, batch_size: int) -> str:
    """What refuses a corpus smaller than one step, or nothing."""
    if (count := num_samples(num_tokens, sequence_length)) >= batch_size:
        return ""
    return (
        f"the corpus of {num_tokens} tokens has {count} samples of sequence length "
        f"{sequence_length}, fewer than the batch of {batch_size}: give more text, or a smaller "
        "batch or sequence length"
    )


def num_samples(num_tokens: int, sequence_length: int) -> int:
    """Whole samples in `num_tokens` tokens."""
    return max(0, (num_tokens - 1) // sequence_length)


def permuted(place: int, size: int, seed: int, epoch: int) -> int:
    """Where `place` goes in the permutation of `range(size)` that belongs to (seed, epoch)."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * NUM_ROUNDS).digest()
    keys = struct.unpack(f"<{NUM_ROUNDS}Q", digest)
    while True:
        left, right = place >> half, place & mask
        for round_key in keys:  # a round can be undone, whatever `_mix` is
            left, right = right, left ^ (_mix(right, round_key) & mask)
        place = left << half | right
        if place < size:
            return place


def _mix(value: int, key: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea, Flood, OOPSLA 2014) on `value + key`."""
    value = (value + key) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31


def local_range(mesh: Mesh, train: TrainConfig) -> range:
    """This batch rank's sequences of a step."""
    num_ranks = mesh.config.num_batch_ranks
    is_even = train.batch % (num_ranks * train.micro_batch) == 0
    assert is_even, "mesh_violations refuses such a batch"
    share = train.batch // num_ranks
    return range(mesh.batch_rank * share, (mesh.batch_rank + 1) * share)


def _read_rows(
    tokens: numpy.ndarray, samples: list[int], sequence_length: int, vocab_size: int
) -> Tensor:
    """`[n, S + 1]` int64 ids of n samples; `IGNORED_TARGET` where the data has ended."""
    rows = numpy.full((len(samples), sequence_length + 1), IGNORED_TARGET, dtype=numpy.int64)
    for row, index in zip(rows, samples, strict=True):
        ids = tokens[index * sequence_length :][: sequence_length + 1]
        row[: len(ids)] = ids
    if rows.max() >= vocab_size:
        raise ValueError(f"the data holds id {rows.max()}, outside vocab_size {vocab_size}")
    return torch.from_numpy(rows)


def _batches_of(rows: Tensor, micro_batch: int, cp: Axis) -> list[Batch]:
    """`[n, S + 1]` int64 -> this rank's part of each micro-batch."""
    length = rows.shape[1] - 1
    positions = torch.arange(length, device=rows.device).repeat(micro_batch)
    batches = (
        Batch(
            tokens=part[:, :-1].clamp(min=0).flatten(),
            targets=part[:, 1:].flatten(),
            positions=positions,
            sequence_length=length,
        )
        for part in rows.split(micro_batch)
    )
    return [shard_batch(batch, cp) for batch in batches]

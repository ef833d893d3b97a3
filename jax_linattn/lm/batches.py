"""Tokens to batches: shuffled without end by grain for training, every token once for validation."""

from collections.abc import Iterator
from typing import NamedTuple

import grain
import numpy as np


class Batch(NamedTuple):
    """One token ahead: `targets` are `inputs` shifted by one."""

    inputs: np.ndarray  # int32 [B, T]
    targets: np.ndarray  # int32 [B, T]


PASSES = 2**20  # as good as endless, and a length that fits into 64 bits


class Windows:
    """Every place of a text that a training sequence fits in, as a source of records int32 [T + 1]."""

    def __init__(self, tokens: np.ndarray, context: int):
        self._tokens, self._context = tokens, context

    def __len__(self) -> int:
        return len(self._tokens) - self._context

    def __getitem__(self, index) -> np.ndarray:
        return self._tokens[index : index + self._context + 1]

    def __repr__(self) -> str:
        return f"Windows(of {self._context} in {len(self._tokens)} tokens)"


def train_batches(
    tokens: np.ndarray, *, seed: int, batch_size: int, context: int, process: tuple[int, int] = (0, 1)
) -> grain.DatasetIterator[Batch]:
    """Endless batches: all windows of the text in an order drawn from the seed, anew in each pass.

    The position is `get_state()`, a dict of plain numbers, and is set by `set_state`. It is the same in all processes,
    and means the same batch however many they are.

    Args:
      tokens: int32 [n], n > context.
      seed: of the order.
      batch_size: B, over all processes, which divide it.
      context: T.
      process: (this one's number p, how many there are P): it gets the records p, p + P, ... of each batch.
    """
    number, count = process
    records = grain.MapDataset.source(Windows(tokens, context)).shuffle(seed=seed % 2**32).repeat(PASSES)
    batches = records[number::count].batch(batch_size // count).map(lambda rows: Batch(rows[:, :-1], rows[:, 1:]))
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def validation_batches(
    tokens: np.ndarray, *, batch_size: int, context: int, process: tuple[int, int] = (0, 1)
) -> Iterator[tuple[Batch, np.ndarray]]:
    """Every token but the first as a target just once, in windows side by side: (batch, weights float32 [B, T]).

    The shapes are always the same: what is missing in the last batch has weight 0. Of several processes, each gets its
    share of every batch.
    """
    count = len(tokens) - 1
    size = batch_size * context
    number, processes = process
    share = slice(number * batch_size // processes, (number + 1) * batch_size // processes)
    for start in range(0, count, size):
        here = min(size, count - start)
        padded = np.zeros(size + 1, np.int32)
        padded[: here + 1] = tokens[start : start + here + 1]
        shape = (batch_size, context)
        weights = (np.arange(size) < here).astype(np.float32).reshape(shape)
        inputs, targets = padded[:-1].reshape(shape), padded[1:].reshape(shape)
        yield Batch(inputs[share], targets[share]), weights[share]

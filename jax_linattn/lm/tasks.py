"""Synthetic tasks that ask for what attention is good at, and a small training loop to see who learns them.

A batch is a pure function of (seed, step). `docs/limits.md` tells what comes out.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_linattn.attention import attention_weights
from jax_linattn.checks import require
from jax_linattn.lm.config import default_config
from jax_linattn.lm.model import Decoder, ModelConfig
from jax_linattn.nnx import LinearAttention

FRESH = 1 << 30  # batches from this step on are for evaluation: no training reaches it


class Batch(NamedTuple):
    """Tokens, and what should follow where it is asked."""

    inputs: np.ndarray  # int32 [B, T]
    targets: np.ndarray  # int32 [B, T], 0 where nothing is asked
    weights: np.ndarray  # float32 [B, T], 1 where something is asked


BatchAt = Callable[[int], Batch]  # of a step


# --- tasks ------------------------------------------------------------------------------------------------------------


def _check_pairs(sizes: Sequence[int], most: int, place: str) -> None:
    fit_in = all(1 <= size <= most for size in sizes)
    require(fit_in, f"sizes must be numbers of pairs from 1 to {most} for {place}, got {list(sizes)}")


def _batch_of_rows(row: Callable[..., Batch], rng: np.random.Generator, batch_size: int, sizes: Sequence[int]) -> Batch:
    rows = [row(rng, size) for size in rng.choice(sizes, batch_size)]
    return Batch(*(np.stack(column) for column in zip(*rows, strict=True)))


@dataclasses.dataclass(frozen=True)
class Recall:
    """Associative recall: S pairs of a key and its value, then keys again; asked is each one's value.

        k₁ v₁ k₂ v₂ … k_S v_S  q₁ q₂ q₃ …        q in {k₁ … k_S}, drawn anew each time

    No key and no value comes twice among the pairs. Whoever knows which values were there, but not whose they are, is
    right 1/S of the time. After Arora et al. 2023 (Zoology, MQAR), https://arxiv.org/abs/2312.04927, with the queries
    side by side.

    Args:
      num_symbols: how many keys there are, 0 … num_symbols - 1, and as many values after them.
      length: T, so that T - 2·S queries follow S pairs.
    """

    num_symbols: int
    length: int

    @property
    def vocabulary_size(self) -> int:
        return 2 * self.num_symbols

    def batch(self, seed: int, step: int, *, batch_size: int, sizes: Sequence[int]) -> Batch:
        """The batch of a step; each row's S is drawn from `sizes`.

        Raises:
          ValueError: if an S has more pairs than there are symbols, or leaves no room for a query.
        """
        most = min(self.num_symbols, (self.length - 1) // 2)
        _check_pairs(sizes, most, f"{self.num_symbols} symbols and length {self.length}")
        return _batch_of_rows(self._row, np.random.default_rng([seed, step]), batch_size, sizes)

    def _row(self, rng: np.random.Generator, size: int) -> Batch:
        keys = rng.permutation(self.num_symbols)[:size]
        values = self.num_symbols + rng.permutation(self.num_symbols)[:size]
        asked = rng.integers(0, size, self.length - 2 * size)
        pairs = np.stack([keys, values], axis=1).ravel()
        nothing = np.zeros(2 * size)
        return Batch(
            np.concatenate([pairs, keys[asked]]).astype(np.int32),
            np.concatenate([nothing, values[asked]]).astype(np.int32),
            np.concatenate([nothing, np.ones(len(asked))]).astype(np.float32),
        )


@dataclasses.dataclass(frozen=True)
class SpacedRecall:
    """Multi-query associative recall: S pairs of a key and its value, then each key once, far from the others or near.

        k₁ v₁ … k_S v_S  · · q₁ · · · q₂ · …        every second token from 2·S on may be a query; · is any symbol

    Which of the n = (T - 2·S)/2 places are queries is drawn without replacement, place i = 1 … n with probability
    ∝ i^(a-1), a = 0.01: mostly soon after the pairs, seldom late. The task of Arora et al. 2023 (Zoology, MQAR),
    https://arxiv.org/abs/2312.04927.

    Args:
      vocabulary_size: V; keys are 1 … V/2 - 1, values V/2 … V - 1, and none comes twice among the pairs.
      length: T.
    """

    vocabulary_size: int
    length: int

    def batch(self, seed: int, step: int, *, batch_size: int, sizes: Sequence[int]) -> Batch:
        """The batch of a step; each row's S is drawn from `sizes`.

        Raises:
          ValueError: if an S has more pairs than there are keys, or than there are places for queries.
        """
        most = min(self.vocabulary_size // 2 - 1, self.length // 4)
        _check_pairs(sizes, most, f"{self.vocabulary_size} symbols and length {self.length}")
        return _batch_of_rows(self._row, np.random.default_rng([seed, step]), batch_size, sizes)

    def _row(self, rng: np.random.Generator, size: int) -> Batch:
        half = self.vocabulary_size // 2
        keys = 1 + rng.permutation(half - 1)[:size]
        values = half + rng.permutation(self.vocabulary_size - half)[:size]
        near = np.arange(1, (self.length - 2 * size) // 2 + 1) ** (0.01 - 1)
        asked = 2 * size + 2 * rng.choice(len(near), size, replace=False, p=near / near.sum())
        inputs = rng.integers(0, self.vocabulary_size, self.length, np.int32)
        inputs[: 2 * size : 2], inputs[1 : 2 * size : 2], inputs[asked] = keys, values, keys
        targets, weights = np.zeros(self.length, np.int32), np.zeros(self.length, np.float32)
        targets[asked], weights[asked] = values, 1
        return Batch(inputs, targets, weights)


@dataclasses.dataclass(frozen=True)
class Copy:
    """Copying: a separator, L random symbols, the separator again; asked are the same symbols in the same order.

        inputs    #  x₁ x₂ … x_L  #   x₁ … x_{L-1}  0 …
        targets                   x₁  x₂ … x_L

    Chance is 1 / num_symbols. What the reader has copied so far it is told, so a mistake costs one symbol.

    Args:
      num_symbols: the symbols are 1 … num_symbols; the separator is 0.
      length: T; what is beyond 2·L + 1 is filled with 0 and not asked.
    """

    num_symbols: int
    length: int

    @property
    def vocabulary_size(self) -> int:
        return self.num_symbols + 1

    def batch(self, seed: int, step: int, *, batch_size: int, sizes: Sequence[int]) -> Batch:
        """The batch of a step; each row's L is drawn from `sizes`.

        Raises:
          ValueError: if an L has no room.
        """
        most = (self.length - 1) // 2
        require(
            all(1 <= size <= most for size in sizes),
            f"sizes must be lengths from 1 to {most} for sequences of {self.length}, got {list(sizes)}",
        )
        rng = np.random.default_rng([seed, step])
        inputs = np.zeros((batch_size, self.length), np.int32)
        targets, weights = np.zeros_like(inputs), np.zeros(inputs.shape, np.float32)
        for row, size in enumerate(rng.choice(sizes, batch_size)):
            symbols = rng.integers(1, self.num_symbols + 1, size)
            inputs[row, 1 : size + 1] = symbols
            inputs[row, size + 2 : 2 * size + 1] = symbols[:-1]
            targets[row, size + 1 : 2 * size + 1] = symbols
            weights[row, size + 1 : 2 * size + 1] = 1
        return Batch(inputs, targets, weights)


# --- models -----------------------------------------------------------------------------------------------------------


def build(vocabulary_size: int, *, softmax_layers: Sequence[int] = (), seed: int = 0, **options) -> Decoder:
    """A decoder.

    Args:
      vocabulary_size: V.
      softmax_layers: the layers, counted from 0, that have softmax attention whatever the others have: a hybrid.
      seed: of the parameters.
      **options: instead of the defaults in `default_config().model`.
    """
    model_options = default_config().model
    model_options.update(options)
    config = ModelConfig(vocabulary_size=vocabulary_size, **model_options)
    model = Decoder(config, rngs=nnx.Rngs(seed))
    if softmax_layers:
        softmax = Decoder(dataclasses.replace(config, attention="softmax"), rngs=nnx.Rngs(seed))
        for layer in softmax_layers:
            model.blocks[layer].attention = softmax.blocks[layer].attention
    return model


def numbers_a_head(model: Decoder) -> int | None:
    """F·E, the size of a head's state in the first linear layer; None without one: softmax attention keeps every token."""
    linear = [layer for layer, block in enumerate(model.blocks) if isinstance(block.attention, LinearAttention)]
    if not linear:
        return None
    graphdef, state = nnx.split(model)

    def cache_of(state):
        with_cache = nnx.merge(graphdef, state)
        with_cache.init_cache(1, 1)
        return nnx.state(with_cache.blocks[linear[0]].attention, nnx.Cache)

    kv = max(jax.tree.leaves(jax.eval_shape(cache_of, state)), key=lambda leaf: leaf.size)
    return kv.size // model.config.num_heads


# --- training ---------------------------------------------------------------------------------------------------------


def fit(
    model: Decoder,
    batch_at: BatchAt,
    steps: int,
    *,
    learning_rate: float | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> tuple[Decoder, np.ndarray]:
    """Trains, unless told otherwise with AdamW behind gradient clipping: a linear warm-up, then a cosine.

    Args:
      model: where to start; it is not changed.
      batch_at: the batch of a step, always of one shape.
      steps: how many.
      learning_rate: at its peak, after a tenth of the steps; it ends at a hundredth.
      optimizer: in place of a learning rate: another one.

    Returns:
      (trained model, mean loss in nats where something is asked [steps]).

    Raises:
      ValueError: on both or neither of learning_rate and optimizer.
    """
    require((learning_rate is None) != (optimizer is None), "fit takes one of learning_rate and optimizer")
    graphdef, params = nnx.split(model, nnx.Param)
    if optimizer is None:
        assert learning_rate is not None  # for type checkers
        schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, steps // 10, steps, learning_rate / 100)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))

    def loss_of(params, batch: Batch):
        logits = nnx.merge(graphdef, params)(jnp.asarray(batch.inputs))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
        return jnp.sum(losses * batch.weights) / jnp.sum(batch.weights)

    @jax.jit
    def advance(params, opt_state, batch: Batch):
        loss, gradient = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = optimizer.init(params), []
    for step in range(steps):
        params, opt_state, loss = advance(params, opt_state, batch_at(step))
        losses.append(loss)
    return nnx.merge(graphdef, params), np.asarray(jax.device_get(losses))


def accuracy(model: Decoder, batches: Sequence[Batch]) -> float:
    """The part of what is asked that the model's likeliest token answers."""
    graphdef, params = nnx.split(model)

    @jax.jit
    def count_right(params, batch: Batch):
        answers = jnp.argmax(nnx.merge(graphdef, params)(jnp.asarray(batch.inputs)), axis=-1)
        return jnp.sum((answers == batch.targets) * batch.weights)

    right = sum(float(count_right(params, batch)) for batch in batches)
    return right / sum(float(batch.weights.sum()) for batch in batches)


# --- sharp weights ----------------------------------------------------------------------------------------------------


def sharpest_weight(feature_map: Any, num_keys: int, dim: int, *, steps: int = 1000, seed: int = 0) -> float:
    """How much of its weight a query can put on a key of its own, when each of S keys has a query.

    Queries and keys are free numbers here, without a model, moved by Adam to make the mean of ln(weight + 10⁻⁶) large.

    Args:
      feature_map: φ; None for softmax attention.
      num_keys: S.
      dim: D, of queries and keys.
      steps: of Adam.
      seed: of where the numbers start.

    Returns:
      The mean over queries of the weight on their own key: 1 is perfect, 1/S what blind averaging gives.
    """

    def own_weights(query_and_key):
        query, key = query_and_key
        if feature_map is None:
            return jnp.diagonal(jax.nn.softmax(query @ key.T * dim**-0.5, axis=-1))
        return jnp.diagonal(attention_weights(query[:, None], key[:, None], feature_map=feature_map)[0])

    optimizer = optax.adam(optax.cosine_decay_schedule(0.1, steps))

    def advance(carry, _):
        numbers, opt_state = carry
        gradient = jax.grad(lambda numbers: -jnp.mean(jnp.log(own_weights(numbers) + 1e-6)))(numbers)
        updates, opt_state = optimizer.update(gradient, opt_state)
        return (optax.apply_updates(numbers, updates), opt_state), None

    @jax.jit
    def optimize(numbers):
        (numbers, _), _ = jax.lax.scan(advance, (numbers, optimizer.init(numbers)), length=steps)
        return jnp.mean(own_weights(numbers))

    return float(optimize(jax.random.normal(jax.random.key(seed), (2, num_keys, dim))))

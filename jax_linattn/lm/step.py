"""One step of training, compiled: loss, gradient, update; and the loss of text that is not trained on."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array, lax
from jax.sharding import Mesh

from jax_linattn.lm import devices
from jax_linattn.lm.batches import Batch, validation_batches
from jax_linattn.lm.config import Config
from jax_linattn.lm.data import Corpus
from jax_linattn.lm.model import Decoder, ModelConfig

BITS = 1 / math.log(2)  # a nat


class TrainState(NamedTuple):
    """All that a step changes or draws from; with the position in the data it is all that continuing needs."""

    step: Array  # int32 [], steps done
    params: Any
    opt_state: Any
    key: Array  # uint32, the data of the PRNG key that all steps' keys come from


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW behind gradient clipping; a linear warm-up, then a cosine down to a hundredth."""
    warmup_steps = min(config.warmup_steps, config.steps // 10)  # so that a short trial needs no other option
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, warmup_steps, config.steps, config.learning_rate / 100
    )
    adamw = optax.adamw(schedule, b2=0.99, weight_decay=config.weight_decay, mask=_matrices)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def _matrices(params) -> Any:
    """True for what weight decay applies to: kernels and embeddings, not biases, norms or the taps of convolutions."""

    def is_matrix(path, _) -> bool:
        names = [entry.key for entry in path]
        return names[-1] in ("kernel", "embedding") and "convolution" not in names

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def initial_state(model_config: ModelConfig, config: Config, mesh: Mesh) -> tuple[Any, TrainState]:
    """(graphdef, state before the first step), the state placed on the devices as it will stay."""
    graphdef, state = abstract_state(model_config, config, mesh)
    where = jax.tree.map(lambda leaf: leaf.sharding, state)
    return graphdef, jax.jit(functools.partial(_make_state, model_config, config), out_shardings=where)()


def abstract_state(model_config: ModelConfig, config: Config, mesh: Mesh) -> tuple[Any, TrainState]:
    """(graphdef, state): `initial_state` as shapes, dtypes and shardings; the mesh may be of devices that are not here."""
    graphdef, _ = nnx.eval_shape(functools.partial(_graphdef_and_params, model_config, config))
    state = jax.eval_shape(functools.partial(_make_state, model_config, config))
    where = devices.placement(mesh, state, shard=config.shard_parameters)
    return graphdef, jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), state, where
    )


def _make_state(model_config: ModelConfig, config: Config) -> TrainState:
    params = nnx.to_pure_dict(_graphdef_and_params(model_config, config)[1])
    key = jax.random.key_data(jax.random.key(config.seed))
    return TrainState(jnp.zeros((), jnp.int32), params, make_optimizer(config).init(params), key)


def _graphdef_and_params(model_config: ModelConfig, config: Config):
    return nnx.split(Decoder(model_config, rngs=nnx.Rngs(config.seed)), nnx.Param)


def compile_step(
    graphdef, config: Config, mesh: Mesh, state: TrainState
) -> Callable[[TrainState, Batch], tuple[TrainState, Array, Array]]:
    """Compiled: (state, batch) -> (state, mean loss in nats, norm of the unclipped gradient). The state is used up.

    It is compiled for the devices of the mesh and a state like this one, which may be abstract.
    """
    optimizer = make_optimizer(config)

    def mean_loss(params, batch: Batch, key: Array) -> Array:
        return jnp.mean(token_losses(graphdef, params, batch, key if config.model.dropout else None))

    def step(state: TrainState, batch: Batch):
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        loss, gradient = _mean_of_parts(jax.value_and_grad(mean_loss), config.accumulation, state.params, batch, key)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state, state.key), loss, optax.tree.norm(gradient)

    shape = (config.batch_size, config.context)
    tokens: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=devices.batch_sharding(mesh))
    where = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=(where, None, None)).lower(state, Batch(tokens, tokens)).compile()


def _mean_of_parts(value_and_grad, parts: int, params, batch: Batch, key: Array):
    """(loss, gradient), the mean over equal parts of the batch, of which one at a time is computed.

    Part i is made of rows i, i + parts, ...: of rows that lie on a device, as many as of those on any other.
    """
    if parts == 1:
        return value_and_grad(params, batch, key)
    batch = jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1), batch)

    def add(total, part):
        batch, number = part
        return jax.tree.map(jnp.add, total, value_and_grad(params, batch, jax.random.fold_in(key, number))), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    total, _ = lax.scan(add, zeros, (batch, jnp.arange(parts)))
    return jax.tree.map(lambda x: x / parts, total)


def token_losses(graphdef, params, batch: Batch, dropout_key: Array | None = None) -> Array:
    """-ln p(target) of each token, [B, T]."""
    logits = nnx.merge(graphdef, nnx.State(params))(jnp.asarray(batch.inputs), dropout_key=dropout_key)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)


def make_evaluate(graphdef, corpus: Corpus, config: Config, mesh: Mesh) -> Callable[[Any, int | None], float]:
    """(params, the most batches to use, None = all) -> bits a character of the validation text."""

    @jax.jit
    def weighted_sum(params, batch: Batch, weights: Array) -> Array:
        return jnp.sum(token_losses(graphdef, params, batch) * weights)

    shares = functools.partial(
        validation_batches,
        corpus.validation,
        batch_size=config.batch_size,
        context=config.context,
        process=(jax.process_index(), jax.process_count()),
    )
    count = len(corpus.validation) - 1

    def evaluate(params, limit: int | None = None) -> float:
        size = config.batch_size * config.context
        available = -(-count // size)
        stride = 1 if limit is None else -(-available // limit)
        total, targets = 0.0, 0
        for number, share in itertools.islice(enumerate(shares()), 0, None, stride):
            total += float(weighted_sum(params, *devices.split_batch(mesh, share)))
            targets += min(size, count - number * size)
        return total / targets * BITS

    return evaluate

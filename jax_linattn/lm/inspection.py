"""What a trained model's attention does with a text: its weights, and its state token by token.

Linear attention never forms its weights, and a decoding loop keeps its last state alone; both are made here, to look at.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jax_linattn import attention_weights
from jax_linattn.checks import require
from jax_linattn.lm.layers import SoftmaxAttention
from jax_linattn.lm.model import Decoder
from jax_linattn.nnx import LinearAttention
from jax_linattn.state import LinearAttentionState, without_scale

# --- weights ----------------------------------------------------------------------------------------------------------


def model_weights(model: Decoder, tokens: Array, *, mask: Array | None = None) -> list[Array]:
    """The attention weights of every layer: times the layer's values, and projected out, they are the layer's output.

    Args:
      model: with linear attention that normalises, whatever its feature map, or with softmax attention.
      tokens: int [B, T].
      mask: bool [B, T], True = a real token.

    Returns:
      [B, H, T, S] for each layer. A row sums to 1 over the keys s <= t, and is 0 where t is masked.

    Raises:
      ValueError: if a layer is of another kind, or does not normalise, so that no weights are implied.
    """
    for index, block in enumerate(model.blocks):
        require(
            isinstance(block.attention, LinearAttention | SoftmaxAttention),
            f"layer {index} is {type(block.attention).__name__}, whose weights cannot be shown; give a model with "
            "attention='linear' or 'softmax'",
        )
        require(
            getattr(block.attention, "normalize", True),
            f"layer {index} has normalize=False, so its attention implies no weights: give a model with normalize=True",
        )
    graphdef, state = nnx.split(model)
    return _model_weights(state, jnp.asarray(tokens), mask, graphdef=graphdef)


@functools.partial(jax.jit, static_argnames="graphdef")
def _model_weights(state, tokens: Array, mask: Array | None, *, graphdef) -> list[Array]:
    model = nnx.merge(graphdef, state)
    inputs = attention_inputs(model, tokens, mask=mask)
    return [layer_weights(block.attention, x, mask=mask) for block, x in zip(model.blocks, inputs, strict=True)]


def attention_inputs(model: Decoder, tokens: Array, *, mask: Array | None = None) -> list[Array]:
    """What the attention of every block is called with, [B, T, features] each."""
    x, inputs = model.embedding(tokens), []
    for block in model.blocks:
        inputs.append(block.attention_input(x, mask=mask))
        x = block(x, mask=mask)
    return inputs


def layer_weights(layer: LinearAttention | SoftmaxAttention, x: Array, *, mask: Array | None = None) -> Array:
    """The causal weights [B, H, T, S] of a layer for inputs x [B, T, features]."""
    if mask is not None:
        x = jnp.where(mask[..., None], x, 0)  # as the layers do: a NaN in a pad must not reach a projection
    query, key = layer.query(x), layer.key(x)
    if isinstance(layer, SoftmaxAttention):
        return softmax_weights(query, key, mask=mask)
    feature_map = layer._pure_feature_map()  # a learnable map's weights included
    return attention_weights(query, key, mask=mask, is_causal=True, feature_map=feature_map, eps=layer.eps)


def softmax_weights(query: Array, key: Array, *, mask: Array | None = None) -> Array:
    """softmax over s <= t of q_t·k_s / √D, for query and key [B, T, H, D]: [B, H, T, S], in float32 or better.

    A masked token, False in mask [B, T], is no key, and its row is 0.
    """
    logits = jnp.einsum("bthd,bshd->bhts", query, key, preferred_element_type=jnp.promote_types(query.dtype, jnp.float32))
    batch, _, length, _ = logits.shape
    mask = jnp.ones((batch, length), bool) if mask is None else mask
    visible = jnp.tril(jnp.ones((length, length), bool))[None] & mask[:, None, :] & mask[:, :, None]
    # `where` counts what is hidden as 0, and makes a row that sees nothing one of zeros and not of NaNs.
    return jax.nn.softmax(logits * query.shape[-1] ** -0.5, axis=-1, where=visible[:, None]) * visible[:, None]


def spread(weights: Array) -> Array:
    """How evenly a query looks at what it can see: exp(entropy of row t) / (t + 1), from 1/(t + 1), one key, to 1, all.

    weights: causal, [..., T, S] -> [..., T].
    """
    entropy = -jnp.sum(jax.scipy.special.xlogy(weights, weights), axis=-1)
    return jnp.exp(entropy) / (1 + jnp.arange(weights.shape[-2]))


# --- states -----------------------------------------------------------------------------------------------------------


class StateTrace(NamedTuple):
    """What is measured of a state after each token; every field [B, T, N], N the heads of the state."""

    kv_norm: Array  # |S_t|, Frobenius
    key_sum_norm: Array  # |Z_t|
    effective_rank: Array  # exp(entropy of the singular values of S_t over their sum), 0 for S_t = 0
    change: Array  # |S_t - S_{t-1}| / |S_t|, 0 where nothing changed


def trace_states(model: Decoder, tokens: Array, *, mask: Array | None = None) -> list[StateTrace]:
    """Decodes a text token by token, and measures the state of every layer after each.

        S_t = S_{t-1} + φ(k_t) v_tᵀ,  Z_t = Z_{t-1} + φ(k_t)

    Args:
      model: with linear attention; it is not changed.
      tokens: int [B, T].
      mask: bool [B, T], True = a real token.

    Returns:
      A `StateTrace` for each layer. The effective rank is that of Roy and Vetterli 2007, "The effective rank: a measure of
      effective dimensionality": k for k equal singular values, at most min(F, E).

    Raises:
      ValueError: if a layer is of another kind.
    """
    for index, block in enumerate(model.blocks):
        keeps = "which keeps every key" if isinstance(block.attention, SoftmaxAttention) else "whose state cannot be shown"
        require(
            isinstance(block.attention, LinearAttention),
            f"layer {index} is {type(block.attention).__name__}, {keeps}; give a model with attention='linear'",
        )
    graphdef, state = nnx.split(model)
    tokens = jnp.asarray(tokens)
    mask = jnp.ones(tokens.shape, bool) if mask is None else jnp.asarray(mask)
    return _trace_states(state, tokens, mask, graphdef=graphdef)


@functools.partial(jax.jit, static_argnames="graphdef")
def _trace_states(state, tokens: Array, mask: Array, *, graphdef) -> list[StateTrace]:
    model = nnx.merge(graphdef, state)
    batch, length = tokens.shape
    model.init_cache(batch, length)
    graphdef, cache, rest = nnx.split(model, nnx.Cache, ...)

    def step(cache, inputs):
        token, is_real = inputs
        model = nnx.merge(graphdef, cache, rest)
        before = _states(cache, model)  # read first: the call may write into the cache that it was merged from
        model(token[:, None], mask=is_real[:, None], decode=True)
        cache = nnx.state(model, nnx.Cache)
        return cache, [measure(*pair) for pair in zip(before, _states(cache, model), strict=True)]

    _, traces = lax.scan(step, cache, (tokens.T, mask.T))
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), traces)


def full_rank(model: Decoder) -> int:
    """min(F, E): the largest rank that the state of a head can have, in the layer where that is most."""
    graphdef, state = nnx.split(model)

    def empty_states(state):
        model = nnx.merge(graphdef, state)
        model.init_cache(1, 1)
        return _states(nnx.state(model, nnx.Cache), model)

    return max(min(state.kv.shape[-2:]) for state in jax.eval_shape(empty_states, state))


def _states(cache, model: Decoder) -> list[LinearAttentionState]:
    """The state of each layer in the caches of a model."""
    caches = nnx.to_pure_dict(cache)
    return [caches[f"block_{layer}"]["attention"]["cached_state"] for layer in range(len(model.blocks))]


def measure(before: LinearAttentionState, after: LinearAttentionState) -> StateTrace:
    """What one token did to a state: every field [B, N]."""
    before, after = without_scale(before), without_scale(after)
    kv_norm = jnp.linalg.norm(after.kv, axis=(-2, -1))
    difference = jnp.linalg.norm(after.kv - before.kv, axis=(-2, -1))
    return StateTrace(
        kv_norm=kv_norm,
        key_sum_norm=jnp.linalg.norm(after.key_sum, axis=-1),
        effective_rank=effective_rank(after.kv),
        change=jnp.where(kv_norm > 0, difference / jnp.where(kv_norm > 0, kv_norm, 1), 0),
    )


def effective_rank(matrices: Array) -> Array:
    """exp(-Σ p_i log p_i) with p the singular values over their sum: [..., F, E] -> [...]; 0 for a matrix of zeros."""
    values = jnp.linalg.svd(matrices, compute_uv=False)
    total = jnp.sum(values, axis=-1, keepdims=True)
    p = values / jnp.where(total > 0, total, 1)
    return jnp.where(total[..., 0] > 0, jnp.exp(-jnp.sum(jax.scipy.special.xlogy(p, p), axis=-1)), 0)

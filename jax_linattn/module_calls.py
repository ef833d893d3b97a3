"""What the Flax modules share: pure functions between a module's projections and `linear_attention`.

Axes: B batch, T query time, S key time, D head dim; ``batch…`` is any number of leading axes, made into one B.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_linattn.attention import attention_weights, causal_linear_attention, linear_attention, linear_attention_step
from jax_linattn.checks import require
from jax_linattn.state import LinearAttentionState


class Inputs(NamedTuple):
    """What a module is called with, in the layout of `linear_attention`, masked tokens cleaned."""

    query: Array  # [B, T, features]
    key: Array  # [B, S, features]
    value: Array  # [B, S, features]
    mask: Array | None  # bool [B, S]
    segment_ids: Any  # int [B, T], or a pair, or None
    batch_shape: tuple[int, ...]
    is_self: bool  # keys and values come from the queries' input


class Options(NamedTuple):
    """How a module attends."""

    feature_map: Any
    is_causal: bool
    normalize: bool
    eps: float
    precision: Any
    chunk_size: int | None
    implementation: str | None

    def rule_of_weights(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("feature_map", "eps", "precision")}

    def rule(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("feature_map", "normalize", "eps", "precision")}

    def form(self) -> dict[str, Any]:
        return {"chunk_size": self.chunk_size, "implementation": self.implementation}


# --- from a module's arguments to inputs ------------------------------------------------------------------------------


def prepare_inputs(inputs_q, inputs_k, inputs_v, mask, segment_ids, *, is_causal: bool) -> Inputs:
    """Fills in what is left out, as Flax does, makes one batch axis, and puts zeros where a token is masked.

    Cleaning comes before the projections: afterwards a NaN in a pad would still reach the gradient of their kernels, as
    0 · NaN. In self-attention and in causal attention the mask speaks of the queries' tokens too.
    """
    require(
        inputs_k is not None or inputs_v is None,
        "inputs_k must be given with inputs_v; for equal keys and values pass inputs_k alone",
    )
    is_self = all(x is None or x is inputs_q for x in (inputs_k, inputs_v))
    inputs_k = inputs_q if inputs_k is None else inputs_k
    inputs_v = inputs_k if inputs_v is None else inputs_v
    shapes = f"inputs_q {inputs_q.shape}, inputs_k {inputs_k.shape}, inputs_v {inputs_v.shape}"
    require(min(x.ndim for x in (inputs_q, inputs_k, inputs_v)) >= 2, f"inputs must be [batch…, T, features], got {shapes}")
    batch_shape, key_length = inputs_q.shape[:-2], inputs_k.shape[-2]
    require(
        inputs_k.shape[:-2] == batch_shape and inputs_v.shape[:-1] == inputs_k.shape[:-1],
        f"inputs must have the same batch axes, and keys and values the same length, got {shapes}",
    )
    mask = _token_mask(mask, batch_shape, key_length)
    if mask is not None:
        require(
            not is_causal or inputs_q.shape[-2] == key_length,
            f"causal attention needs a key for each query (T == S), got {shapes}",
        )
        inputs_q = _clean(inputs_q, mask) if is_self or is_causal else inputs_q
        inputs_k, inputs_v = _clean(inputs_k, mask), _clean(inputs_v, mask)
        mask = _one_batch(mask, batch_shape)
    query, key, value = (_one_batch(x, batch_shape) for x in (inputs_q, inputs_k, inputs_v))
    return Inputs(query, key, value, mask, _segments(segment_ids, batch_shape), batch_shape, is_self)


def _clean(x: Array, mask: Array) -> Array:
    return jnp.where(mask[..., None], x, jnp.zeros_like(x))


def _one_batch(x: Array, batch_shape: tuple[int, ...]) -> Array:
    return x.reshape(math.prod(batch_shape), *x.shape[len(batch_shape) :])


def _token_mask(mask, batch_shape: tuple[int, ...], length: int) -> Array | None:
    """A mask of tokens as bool [batch…, S]."""
    if mask is None:
        return None
    shape = np.shape(mask)
    accepted = (
        f"mask must be bool with True for a real token, of shape [batch…, S] = {(*batch_shape, length)} or "
        f"[batch…, 1, 1, S]; got {getattr(mask, 'dtype', type(mask).__name__)} {shape}. For a causal mask use "
        "is_causal=True, for packed documents segment_ids; flax's make_attention_mask takes dtype=bool"
    )
    require(getattr(mask, "dtype", None) == jnp.bool_, accepted)
    if shape == (*batch_shape, length):
        return jnp.asarray(mask)
    require(len(shape) == len(batch_shape) + 3 and shape[-3:] == (1, 1, length), accepted)
    require(all(got in (1, want) for got, want in zip(shape, batch_shape, strict=False)), accepted)
    return jnp.broadcast_to(jnp.reshape(mask, (*shape[:-3], length)), (*batch_shape, length))


def _segments(segment_ids, batch_shape: tuple[int, ...]):
    def flatten(ids):
        fits = np.ndim(ids) == len(batch_shape) + 1 and np.shape(ids)[:-1] == batch_shape
        require(fits, f"segment_ids must be int [batch…, T] with batch {batch_shape}, got shape {np.shape(ids)}")
        return _one_batch(jnp.asarray(ids), batch_shape)

    return jax.tree.map(flatten, segment_ids)


# --- from projections to an output ------------------------------------------------------------------------------------


def attend(query: Array, key: Array, value: Array, inputs: Inputs, options: Options) -> Array:
    """Attention over whole sequences: projections [B, T, heads, D] to [B, T, heads, D]."""
    query, key, value = one_dtype(query, key, value)
    return linear_attention(
        query,
        key,
        value,
        mask=inputs.mask,
        segment_ids=inputs.segment_ids,
        is_causal=options.is_causal,
        **options.rule(),
        **options.form(),
    )


def advance(
    state: LinearAttentionState, query: Array, key: Array, value: Array, inputs: Inputs, options: Options
) -> tuple[LinearAttentionState, Array]:
    """Attention that continues from a state: any number of tokens; one token goes through the step."""
    query, key, value = one_dtype(query, key, value)
    batch, length = query.shape[:2]
    require(
        state.kv.shape[0] == batch,
        f"the cache holds a state for a batch of {state.kv.shape[0]}, but the inputs have a batch of {batch}: make a "
        "cache for this batch size, or pick its rows with jax.tree.map(lambda x: x[rows], cache)",
    )
    if length != 1:
        return causal_linear_attention(query, key, value, state=state, mask=inputs.mask, **options.rule(), **options.form())
    mask = None if inputs.mask is None else inputs.mask[:, 0]
    state, output = linear_attention_step(state, query[:, 0], key[:, 0], value[:, 0], mask=mask, **options.rule())
    return state, output[:, None]


def weights_to_sow(query: Array, key: Array, inputs: Inputs, options: Options) -> Array:
    """The weights [batch…, H, T, S], formed for looking at."""
    check_weights(options)
    query, key = one_dtype(query, key)
    weights = attention_weights(
        query,
        key,
        mask=inputs.mask,
        segment_ids=inputs.segment_ids,
        is_causal=options.is_causal,
        **options.rule_of_weights(),
    )
    return weights.reshape(*inputs.batch_shape, *weights.shape[1:])


def restore_output(output: Array, inputs: Inputs, *, is_causal: bool) -> Array:
    """[B, T, features] to [batch…, T, features]; when causal, 0 for a masked token, whatever the output's bias."""
    if is_causal and inputs.mask is not None:
        output = _clean(output, inputs.mask)
    return output.reshape(*inputs.batch_shape, *output.shape[1:])


def one_dtype(*arrays: Array) -> list[Array]:
    dtype = arrays[0].dtype
    if any(x.dtype != dtype for x in arrays):
        dtype = jnp.result_type(*arrays)
    return [x.astype(dtype) for x in arrays]


# --- checks -----------------------------------------------------------------------------------------------------------


def check_sizes(num_heads: int, num_kv_heads: int, qkv_features: int) -> int:
    """Returns the head dim."""
    sizes = f"num_heads={num_heads}, num_kv_heads={num_kv_heads} and qkv_features={qkv_features}"
    require(min(num_heads, num_kv_heads, qkv_features) >= 1, f"{sizes} must be at least 1 each")
    require(qkv_features % num_heads == 0, f"qkv_features must be divisible by num_heads = {num_heads}, got {qkv_features}")
    require(num_heads % num_kv_heads == 0, f"num_kv_heads must divide num_heads = {num_heads}, got {num_kv_heads}")
    return qkv_features // num_heads


def check_dropout(dropout_rate: float, deterministic: bool | None) -> None:
    """Dropout acts on weights, and linear attention never forms them."""
    require(
        dropout_rate == 0 or bool(deterministic),
        f"dropout_rate={dropout_rate} drops attention weights, which linear attention never forms: pass "
        "deterministic=True, or dropout_rate=0 and drop the layer's output instead",
    )


def check_weights(options: Options) -> None:
    require(options.normalize, "sow_weights needs normalize=True: without a normaliser no attention weights are implied")


def check_decode(inputs: Inputs, *, is_causal: bool, sow_weights: bool) -> None:
    """What decoding from a state can do."""
    require(is_causal, "decode=True needs is_causal=True: a state holds the tokens so far")
    require(inputs.is_self, "decode=True is self-attention alone: leave inputs_k and inputs_v out")
    require(
        inputs.segment_ids is None,
        "segment_ids cannot be used with decode=True: start a new document with an empty cache",
    )
    require(not sow_weights, "sow_weights cannot be used with decode=True: the state keeps no single keys to weigh")


# --- parameters of the learnable maps ---------------------------------------------------------------------------------


def hedgehog_projection(head_dim: int, num_features: int | None) -> int:
    """F/2, the columns of Hedgehog's kernel."""
    require(num_features is None or num_features % 2 == 0, f"num_features must be even for Hedgehog, got {num_features}")
    return head_dim if num_features is None else num_features // 2


def identity_init(key, shape: tuple[int, ...], dtype=jnp.float32) -> Array:
    """The identity for each head; takes a PRNG key as every initialiser does."""
    del key
    return jnp.broadcast_to(jnp.eye(*shape[-2:], dtype=dtype), shape)


def check_map_heads(x: Array, kernel: Array) -> None:
    """A learnable map has weights for so many heads of such a size."""
    require(
        x.shape[-2:] == kernel.shape[:2],
        f"this feature map is for [..., heads, D] with (heads, D) = {kernel.shape[:2]}, got {x.shape}; queries and "
        "keys with different numbers of heads need a map each: FeatureMap(query=..., key=...)",
    )


t2r_init = jax.nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=(0,))

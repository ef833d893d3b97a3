"""What the layers share: checks, inputs without pads, heads, norms, and attention that continues from a cached state.

A layer is an `nnx.Module` with `__call__(x [B, T, features], *, mask, segment_ids, decode)` and `init_cache(input_shape,
dtype)`. A masked token is no token: its input is zeroed before anything is projected, and its output is 0.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jax_linattn import feature_maps
from jax_linattn.attention import CAUSAL_FORMS, causal_linear_attention, init_state, linear_attention_step
from jax_linattn.checks import check_one_of, check_positive_int, key_mask, require
from jax_linattn.dtypes import accumulator_dtype
from jax_linattn.nnx.cache import get_value, set_value
from jax_linattn.state import LinearAttentionState


def check_options(num_heads: int, chunk_size: int | None, implementation: str | None, **widths: int) -> None:
    """Checks what every constructor takes: `widths` are named sizes that the heads share evenly."""
    for name, size in {"num_heads": num_heads, **widths}.items():
        check_positive_int(name, size)
    for name, width in widths.items():
        require(width % num_heads == 0, f"{name} must be divisible by num_heads = {num_heads}, got {width}")
    check_positive_int("chunk_size", chunk_size, or_none=True)
    check_one_of("implementation", implementation, [None, *CAUSAL_FORMS])


def clean_input(x: Array, features: int, mask) -> tuple[Array, Array | None]:
    """(x [B, T, features] with zeros where a token is masked, mask as bool [B, T] or None)."""
    require(
        np.ndim(x) == 3 and x.shape[-1] == features,
        f"x must be [B, T, features] with features = {features}, got shape {np.shape(x)}",
    )
    require(jnp.issubdtype(x.dtype, jnp.floating), f"x must be of a floating dtype, got {x.dtype}")
    mask = key_mask(mask, *x.shape[:2])
    return clean(x, mask), mask


def clean(x: Array, mask: Array | None) -> Array:
    """x [B, T, …] with zeros where a token is masked."""
    return x if mask is None else jnp.where(mask.reshape(*mask.shape, *[1] * (x.ndim - 2)), x, jnp.zeros_like(x))


def split_heads(x: Array, num_heads: int) -> Array:
    """[B, T, heads·D] to [B, T, heads, D]."""
    return x.reshape(*x.shape[:-1], num_heads, x.shape[-1] // num_heads)


def merge_heads(x: Array) -> Array:
    """[B, T, heads, D] to [B, T, heads·D]."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def wide(x: Array) -> Array:
    """x in the dtype of sums."""
    return x.astype(accumulator_dtype(x.dtype))


def project_wide(linear: nnx.Linear, x: Array) -> Array:
    """The projection of x in the dtype of sums: what a log decay is made of is not rounded to 16 bits."""
    kernel = linear.kernel[...]
    dtype = jnp.result_type(x, kernel) if linear.dtype is None else linear.dtype
    total = accumulator_dtype(dtype)
    y = jnp.matmul(x.astype(dtype), kernel.astype(dtype), preferred_element_type=total)
    return y if linear.bias is None else y + linear.bias[...].astype(total)[None, None]


def group_norm(x: Array, epsilon: float) -> Array:
    """x [..., D] with mean 0 and variance 1 over D, in the dtype of sums; no parameters."""
    x = wide(x)
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)


class RMSNorm(nnx.Module):
    """x / rms(x) · scale over the last axis, in the dtype of sums whatever x is, which `nnx.RMSNorm` would round."""

    def __init__(self, features: int, epsilon: float, param_dtype: Any):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones((features,), param_dtype))

    def __call__(self, x: Array) -> Array:
        """x [..., features]."""
        x = wide(x)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        return x * jnp.broadcast_to(self.scale[...].astype(x.dtype), x.shape)


def attend(
    query: Array,
    key: Array,
    value: Array,
    *,
    cache: nnx.Cache[LinearAttentionState] | None,
    mask: Array | None,
    segment_ids: Array | None,
    **rule: Any,
) -> Array:
    """Causal linear attention [B, T, heads, …] by `rule`, the keywords of `causal_linear_attention`.

    With a cache it continues from the state in it and replaces it; one token takes a step.
    """
    if cache is None:
        return causal_linear_attention(query, key, value, mask=mask, segment_ids=segment_ids, **rule)[1]
    require(
        segment_ids is None,
        "segment_ids cannot be used with decode=True: start a new document with an empty cache",
    )
    state = get_value(cache)
    check_batch(state.kv, query)
    if query.shape[1] == 1:
        rule.pop("chunk_size", None)  # one token has no chunks, and all forms share its step
        rule.pop("implementation", None)
        log_decay = rule.pop("log_decay", None)
        log_decay = log_decay if log_decay is None or log_decay.ndim == 1 else log_decay[:, 0]
        mask = None if mask is None else mask[:, 0]
        token = (x[:, 0] for x in (query, key, value))
        state, output = linear_attention_step(state, *token, mask=mask, log_decay=log_decay, **rule)
        output = output[:, None]
    else:
        state, output = causal_linear_attention(query, key, value, state=state, mask=mask, **rule)
    set_value(cache, state)
    return output


def check_batch(cached: Array, x: Array) -> None:
    """That what is cached is of the batch size of x."""
    require(
        cached.shape[0] == x.shape[0],
        f"the cache holds a state for a batch of {cached.shape[0]}, but the input has a batch of {x.shape[0]}: "
        "call init_cache for this batch size",
    )


def cache_dtype(layer: Any, dtype) -> Any:
    """The dtype of what `layer` caches for inputs of `dtype`."""
    require(jnp.issubdtype(dtype, jnp.floating), f"dtype must be a floating one, got {dtype}")
    return layer.dtype or jnp.promote_types(dtype, layer.param_dtype)


def batch_of(input_shape: tuple[int, ...], layer: Any) -> int:
    """B of an `init_cache`'s input_shape."""
    require(
        np.ndim(input_shape) == 1 and len(input_shape) == 3 and input_shape[-1] == layer.features,
        f"input_shape must be (B, T, features) with features = {layer.features}, got {input_shape}",
    )
    return input_shape[0]


def state_cache(
    batch: int, num_key: int, key_dim: int, num_value: int, value_dim: int, dtype, feature_map=feature_maps.identity
) -> nnx.Cache[LinearAttentionState]:
    """A cache with the state that has seen no token."""
    key = jax.ShapeDtypeStruct((batch, num_key, key_dim), dtype)
    value = jax.ShapeDtypeStruct((batch, num_value, value_dim), dtype)
    return nnx.Cache(init_state(key, value, feature_map=feature_map))


def cache_of(layer: nnx.Module, name: str, decode: bool) -> Any:
    """The layer's cache of that name if it decodes, else None."""
    if not decode:
        return None
    cache = getattr(layer, name, None)
    require(cache is not None, f"decode=True needs a cache: call init_cache on the {type(layer).__name__} first")
    return cache

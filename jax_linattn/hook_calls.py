"""Linear attention behind the ``attention_fn=`` hook of Flax's own attention modules: what Linen and NNX share."""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from jax_linattn import feature_maps, module_calls
from jax_linattn.attention import attention_weights, linear_attention
from jax_linattn.checks import require


def check_options(options: module_calls.Options, module_class: type) -> None:
    """A function has no place for parameters, so it takes no learnable maps."""
    maps = feature_maps.split(options.feature_map)
    is_learnable = [isinstance(x, module_class) or (isinstance(x, type) and issubclass(x, module_class)) for x in maps]
    require(
        not any(is_learnable),
        "feature_map must be a function without parameters: an attention_fn has no place for them. For learnable maps "
        f"use LinearAttention; got {options.feature_map!r}",
    )


def attend(
    query: Array,
    key: Array,
    value: Array,
    options: module_calls.Options,
    *,
    bias: Array | None,
    mask: Array | None,
    dropout_rate: float,
    deterministic: bool,
    dtype: Any,
    sow: Any,
) -> Array:
    """Linear attention as Flax's modules call an attention function.

    Args:
      query: [batch…, T, H, D].
      key: [batch…, S, K, D].
      value: [batch…, S, V, E].
      options: how to attend; a single causal query with a mask over more keys than one is a decoding step: the mask
        says which keys came before it.
      bias: None.
      mask: float or bool, not 0 = attend: it hides keys, so it broadcasts to [batch…, 1, 1, S].
      dropout_rate, deterministic: weights are never formed, so none can be dropped.
      dtype: of the computation; None = that of the inputs.
      sow: None, or a function that takes the attention weights [batch…, H, T, S].

    Returns:
      [batch…, T, H, E].
    """
    require(bias is None, "bias cannot be used: linear attention forms no logits to add it to")
    module_calls.check_dropout(dropout_rate, deterministic)
    query, key, value = (x if dtype is None else x.astype(dtype) for x in module_calls.one_dtype(query, key, value))
    batch_shape = query.shape[:-3]
    require(
        query.ndim == key.ndim == value.ndim and key.shape[:-3] == value.shape[:-3] == batch_shape,
        "query, key and value must have the same batch axes before [T, heads, dim], got shapes "
        f"{query.shape}, {key.shape} and {value.shape}",
    )
    mask = _key_mask(mask, batch_shape, query.shape[-3], key.shape[-3])
    query, key, value = (x.reshape(math.prod(batch_shape), *x.shape[-3:]) for x in (query, key, value))
    if options.is_causal and query.shape[1] == 1 < key.shape[1]:
        require(mask is not None, "a causal query on its own needs a mask that says which keys came before it")
        options = options._replace(is_causal=False)
    hidden = {"mask": mask, "is_causal": options.is_causal}
    if sow is not None:
        module_calls.check_weights(options)
        weights = attention_weights(query, key, **hidden, **options.rule_of_weights())
        sow(weights.reshape(*batch_shape, *weights.shape[1:]))
    output = linear_attention(query, key, value, **hidden, **options.rule(), **options.form())
    return output.reshape(*batch_shape, *output.shape[1:])


def _key_mask(mask, batch_shape: tuple[int, ...], query_length: int, key_length: int) -> Array | None:
    """A mask that hides keys, as bool [B, S]."""
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    shape = (1,) * (len(batch_shape) + 3 - mask.ndim) + mask.shape
    accepted = (
        "mask must be float or bool and hide keys for all queries and heads alike: [batch…, 1, 1, S] with "
        f"S = {key_length} and batch {batch_shape}; got {mask.dtype} {mask.shape}. Instead of a causal mask use "
        "as_attention_fn(is_causal=True); instead of a padding mask [batch…, 1, T, S] pass the mask of the keys, "
        "make_attention_mask(jnp.ones((batch, 1)), valid)"
    )
    require(mask.dtype == jnp.bool_ or jnp.issubdtype(mask.dtype, jnp.floating), accepted)
    require(len(shape) == len(batch_shape) + 3 and shape[-3:] == (1, 1, key_length), accepted)
    require(all(got in (1, want) for got, want in zip(shape, batch_shape, strict=False)), accepted)
    mask = jnp.broadcast_to(mask.reshape(*shape[:-3], key_length) != 0, (*batch_shape, key_length))
    return mask.reshape(math.prod(batch_shape), key_length)

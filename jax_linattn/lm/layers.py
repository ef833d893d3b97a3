"""What a decoder block is made of, beside the layers of `jax_linattn.layers`: softmax attention, MLP.

Layers with a memory of the past keep it in `nnx.Cache` variables that `init_cache(input_shape, dtype)` makes, and read
and advance it when called with ``decode=True``: with prompts of any length, then single tokens. `mask` is bool [B, T]
with True for a real token; a masked token's output row is 0, and it is no token to any other. `dtype` is that of the
computation; parameters are float32.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jax import Array
from jax.nn.initializers import Initializer, lecun_normal

from jax_linattn.checks import key_mask, require
from jax_linattn.layers.common import cache_of

lecun = lecun_normal()


class SoftmaxAttention(nnx.Module):
    """Causal softmax attention, for comparison: `nnx.LinearAttention`'s parameters, a cache with a maximum length."""

    def __init__(
        self,
        num_heads: int,
        features: int,
        *,
        out_kernel_init: Initializer = lecun,
        dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        require(features % num_heads == 0, f"num_heads={num_heads} must divide the width {features}")
        heads = (num_heads, features // num_heads)
        linear = functools.partial(nnx.LinearGeneral, dtype=dtype, rngs=rngs)
        self.query = linear(features, heads)
        self.key = linear(features, heads)
        self.value = linear(features, heads)
        self.out = linear(heads, features, axis=(-2, -1), kernel_init=out_kernel_init)

    def init_cache(self, input_shape: tuple[int, ...], dtype=jnp.float32) -> None:
        """The cache for inputs [B, T, D]: room for T tokens in all."""
        batch, length, _ = input_shape
        num_heads, head_dim = self.query.kernel.shape[-2:]
        # Heads before time: what a head reads for a token then lies side by side.
        self.cached_key = nnx.Cache(jnp.zeros((batch, num_heads, length, head_dim), dtype))
        self.cached_value = nnx.Cache(jnp.zeros((batch, num_heads, length, head_dim), dtype))
        self.cached_mask = nnx.Cache(jnp.zeros((batch, length), bool))
        self.cache_index = nnx.Cache(jnp.zeros((), jnp.int32))

    def __call__(self, x: Array, *, mask: Array | None = None, decode: bool = False) -> Array:
        """x [B, T, D] -> [B, T, D]."""
        batch, length, _ = x.shape
        mask = key_mask(mask, batch, length)
        mask = jnp.ones((batch, length), bool) if mask is None else mask
        x = jnp.where(mask[..., None], x, 0)
        query, key, value = self.query(x), self.key(x), self.value(x)
        if decode:
            y = self._attend_with_cache(query, key, value, mask)
        else:
            y = jax.nn.dot_product_attention(query, key, value, mask=mask[:, None, None], is_causal=True)
        return jnp.where(mask[..., None], self.out(y), 0)

    def _attend_with_cache(self, query, key, value, mask) -> Array:
        cache_of(self, "cached_key", decode=True)  # or an error
        capacity, length = self.cached_mask.shape[1], query.shape[1]
        require(length <= capacity, f"the cache has room for {capacity} tokens, got {length}: give init_cache more")
        start = self.cache_index[...]
        key, value = jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)
        for cache, new, axis in [(self.cached_key, key, 2), (self.cached_value, value, 2), (self.cached_mask, mask, 1)]:
            cache[...] = jax.lax.dynamic_update_slice_in_dim(cache[...], new.astype(cache.dtype), start, axis=axis)
        self.cache_index[...] = start + length
        not_later = jnp.arange(capacity) <= start + jnp.arange(length)[:, None]
        visible = self.cached_mask[...][:, None, None] & not_later[None, None]
        key, value = self.cached_key[...], self.cached_value[...]
        logits = jnp.einsum("bthd,bhsd->bhts", query, key, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(visible, logits * query.shape[-1] ** -0.5, -jnp.inf), axis=-1)
        weights = jnp.where(visible, weights, 0)  # a row that sees nothing is NaN, and no token
        y = jnp.einsum("bhts,bhsd->bthd", weights.astype(value.dtype), value)
        # Past its end the cache would be overwritten without a sign; only values can tell inside a compiled loop.
        return jnp.where(start + length <= capacity, y, jnp.nan)


class MLP(nnx.Module):
    """Two layers with GELU between them."""

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        out_kernel_init: Initializer = lecun,
        dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.up = nnx.Linear(features, hidden, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(hidden, features, kernel_init=out_kernel_init, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """x [..., D] -> [..., D]."""
        return self.down(jax.nn.gelu(self.up(x)))

"""Based's two kinds of attention: Taylor linear attention over everything, exact softmax over the last few tokens.

Arora et al. 2024, https://arxiv.org/abs/2402.18668.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Dtype, Initializer
from jax import Array

from jax_linattn import feature_maps
from jax_linattn.attention import Implementation
from jax_linattn.checks import check_positive_int, integers, require
from jax_linattn.compaction import compact_tokens
from jax_linattn.dtypes import accumulator_dtype
from jax_linattn.forms.tokens import count_runs
from jax_linattn.layers.common import (
    attend,
    batch_of,
    cache_dtype,
    cache_of,
    check_batch,
    check_options,
    clean,
    clean_input,
    state_cache,
)


class BasedLinearAttention(nnx.Module):
    """Linear attention whose weights are exp(s) to second order, with queries and keys smaller than values.

        o_t = Σ_{s<=t} (1 + u_ts + u_ts²/2) v_s / Σ_{s<=t} (1 + u_ts + u_ts²/2),   u_ts = q_t·k_s / √D

    A state head holds F = 1 + D + D(D+1)/2 features: small D keeps it small. `init_cache` makes the cache for decoding.

    Args:
      features: width of inputs and outputs.
      num_heads: H.
      feature_dim: D, of queries and keys in a head.
      value_features: H·E, all heads' values together; None = features.
      use_bias: of the projections.
      chunk_size, implementation: as in `causal_linear_attention`.
      dtype: of the computation; None = that of inputs and parameters.
      param_dtype: of the parameters.
      kernel_init, out_kernel_init: of the projections; out_… None = the same.
      rngs: for the parameters.

    Raises:
      ValueError: naming the argument, what it got and what would be right.
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        feature_dim: int = 16,
        value_features: int | None = None,
        use_bias: bool = False,
        chunk_size: int | None = None,
        implementation: Implementation | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        out_kernel_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        check_positive_int("features", features)
        value_features = features if value_features is None else value_features
        check_options(num_heads, chunk_size, implementation, value_features=value_features)
        check_positive_int("feature_dim", feature_dim)
        self.features, self.num_heads, self.feature_dim = features, num_heads, feature_dim
        self.head_dim = value_features // num_heads
        self.chunk_size, self.implementation = chunk_size, implementation
        self.dtype, self.param_dtype = dtype, param_dtype
        how = {"use_bias": use_bias, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        linear = functools.partial(nnx.LinearGeneral, **how)
        self.query = linear(features, (num_heads, feature_dim), kernel_init=kernel_init)
        self.key = linear(features, (num_heads, feature_dim), kernel_init=kernel_init)
        self.value = linear(features, (num_heads, self.head_dim), kernel_init=kernel_init)
        heads = (num_heads, self.head_dim)
        self.out = linear(heads, features, axis=(-2, -1), kernel_init=out_kernel_init or kernel_init)

    def __call__(
        self, x: Array, *, mask: Array | None = None, segment_ids: Array | None = None, decode: bool = False
    ) -> Array:
        """Attends to all tokens so far.

        Args:
          x: [B, T, features].
          mask: bool [B, T], True = a real token; a masked one is no token, and its output is 0.
          segment_ids: int [B, T], runs of equal ids that do not see each other; not with decode.
          decode: continue from the cache, and keep what comes after.

        Returns:
          [B, T, features].

        Raises:
          ValueError: naming the argument, what it got and what would be right.
        """
        x, mask = clean_input(x, self.features, mask)
        y = attend(
            self.query(x),
            self.key(x),
            self.value(x),
            cache=cache_of(self, "cached_state", decode),
            mask=mask,
            segment_ids=segment_ids,
            feature_map=feature_maps.taylor,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )
        return clean(self.out(y), mask)

    def init_cache(self, input_shape: tuple[int, ...], dtype: Dtype = jnp.float32) -> None:
        """Starts decoding anew, with a state that has seen no token.

        Args:
          input_shape: [B, T, features]; of it only B matters.
          dtype: of the inputs.
        """
        dtype = cache_dtype(self, dtype)
        heads = (self.num_heads, self.feature_dim, self.num_heads, self.head_dim)
        self.cached_state = state_cache(batch_of(input_shape, self), *heads, dtype, feature_maps.taylor)


class SlidingWindowAttention(nnx.Module):
    """Softmax attention over the last W tokens: exact recall nearby, in time and memory linear in T.

        o_t = Σ_{t-W<s<=t} exp(q_t·k_s / √D) v_s / Σ_{t-W<s<=t} exp(q_t·k_s / √D)

    where s and t count real tokens: pads are taken out first, so that the window is of W tokens whatever is masked.
    Computed in blocks of W tokens, each with the keys of its own block and the one before. Decoding keeps the last W keys
    and values: `init_cache` makes room for them, and there is no maximum length. Parameters are those of
    `nnx.LinearAttention` and of `flax.nnx.MultiHeadAttention`.

    Args:
      features: width of inputs and outputs.
      num_heads: H.
      window: W, tokens that a token sees, itself among them.
      use_bias: of the projections.
      dtype: of the computation; None = that of inputs and parameters. Weights are normalised in float32.
      param_dtype: of the parameters.
      kernel_init, out_kernel_init: of the projections; out_… None = the same.
      rngs: for the parameters.

    Raises:
      ValueError: naming the argument, what it got and what would be right.
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        window: int = 64,
        use_bias: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        out_kernel_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        check_options(num_heads, None, None, features=features)
        check_positive_int("window", window)
        self.features, self.num_heads, self.window = features, num_heads, window
        self.head_dim = features // num_heads
        self.dtype, self.param_dtype = dtype, param_dtype
        how = {"use_bias": use_bias, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        heads = (num_heads, self.head_dim)
        linear = functools.partial(nnx.LinearGeneral, **how)
        self.query = linear(features, heads, kernel_init=kernel_init)
        self.key = linear(features, heads, kernel_init=kernel_init)
        self.value = linear(features, heads, kernel_init=kernel_init)
        self.out = linear(heads, features, axis=(-2, -1), kernel_init=out_kernel_init or kernel_init)

    def __call__(
        self, x: Array, *, mask: Array | None = None, segment_ids: Array | None = None, decode: bool = False
    ) -> Array:
        """Attends to the last W tokens.

        Args:
          x: [B, T, features].
          mask: bool [B, T], True = a real token; a masked one is no token, and its output is 0.
          segment_ids: int [B, T], runs of equal ids that do not see each other; not with decode.
          decode: continue from the cache, and keep what comes after.

        Returns:
          [B, T, features].

        Raises:
          ValueError: naming the argument, what it got and what would be right.
        """
        x, mask = clean_input(x, self.features, mask)
        batch, length, _ = x.shape
        if segment_ids is not None:
            require(not decode, "segment_ids cannot be used with decode=True: start a new document with an empty cache")
            segment_ids = integers("segment_ids", segment_ids, (batch, length), "[B, T]")
        caches = self._caches(x, decode)
        query, key, value = self.query(x), self.key(x), self.value(x)
        if x.size == 0:
            return clean(self.out(query), mask)
        compact = compact_tokens(mask)
        real = jnp.ones((batch, length), bool) if mask is None else compact.gather(mask)
        runs = None if segment_ids is None else compact.gather(count_runs(segment_ids, segment_ids[:, 0]))
        before = self._empty(batch, key.dtype) if caches is None else [cache[...] for cache in caches]
        now = (compact.gather(key), compact.gather(value), real)
        history = [jnp.concatenate([old.astype(new.dtype), new], axis=1) for old, new in zip(before, now, strict=True)]
        if caches is not None:
            for cache, of_all in zip(caches, history, strict=True):
                cache[...] = compact.last(of_all, self.window)
        y = windowed_attention(compact.gather(query), history[0], history[1], history[2], runs)
        return clean(self.out(compact.restore(y)), mask)

    def init_cache(self, input_shape: tuple[int, ...], dtype: Dtype = jnp.float32) -> None:
        """Starts decoding anew, with room for W tokens.

        Args:
          input_shape: [B, T, features]; of it only B matters.
          dtype: of the inputs.
        """
        dtype = cache_dtype(self, dtype)
        key, value, mask = self._empty(batch_of(input_shape, self), dtype)
        self.cached_key, self.cached_value, self.cached_mask = nnx.Cache(key), nnx.Cache(value), nnx.Cache(mask)

    def _empty(self, batch: int, dtype) -> list[Array]:
        """Keys, values and whether they are there, of W tokens before the first."""
        shape = (batch, self.window, self.num_heads, self.head_dim)
        return [jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(shape[:2], bool)]

    def _caches(self, x: Array, decode: bool):
        """Keys, values and whether they are there, oldest first; None where nothing is decoded."""
        if not decode:
            return None
        caches = [cache_of(self, name, decode) for name in ("cached_key", "cached_value", "cached_mask")]
        check_batch(caches[0], x)
        return caches


def windowed_attention(query: Array, key: Array, value: Array, mask: Array, runs: Array | None = None) -> Array:
    """Softmax attention of T tokens to the last W of a history that begins W tokens earlier.

    In blocks of L = min(W, T) tokens: logits are [B, H, ⌈T/L⌉, L, W+L] and never [T, T].

    Args:
      query: [B, T, H, D], T >= 1.
      key: [B, W+T, H, D].
      value: [B, W+T, H, E].
      mask: bool [B, W+T]: which of them are there.
      runs: int [B, T], the run that a token belongs to, for packed documents: it sees no other, nor what came before;
        None = one run.

    Returns:
      [B, T, H, E] in the dtype of value; rows that see no key mean nothing, and are finite.
    """
    length, window = query.shape[1], key.shape[1] - query.shape[1]
    block = min(length, window)
    padding = -length % block

    def blocks(x):
        """x [B, T, …] to [B, n, L, …]."""
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(x.shape[0], -1, block, *x.shape[2:])

    def blocks_with_past(x):
        """x [B, W+T, …] to [B, n, W+L, …]: each block and the W tokens before it."""
        if length == block:
            return x[:, None]
        x = blocks(x)
        return jnp.concatenate([x[:, :-1], x[:, 1:]], axis=2)

    q = blocks(query)
    k, v, seen = (blocks_with_past(x) for x in (key, value, mask))
    offset = jnp.arange(window + block)[None] - jnp.arange(block)[:, None]  # W for a token's own key
    visible = ((offset > 0) & (offset <= window))[None, None] & seen[:, :, None]
    if runs is not None:
        run_of_keys = blocks_with_past(jnp.pad(runs, [(0, 0), (window, 0)], constant_values=-1))
        visible = visible & (blocks(runs)[..., None] == run_of_keys[:, :, None])
    wide = accumulator_dtype(q.dtype)
    logits = jnp.einsum("bnlhd,bnmhd->bhnlm", q, k, preferred_element_type=wide) * q.shape[-1] ** -0.5
    # Finite, and below any logit: a row that sees nothing would be NaN, and its gradient everything's.
    logits = jnp.where(visible[:, None], logits, jnp.finfo(wide).min / 2)
    weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    y = jnp.einsum("bhnlm,bnmhe->bnlhe", weights, v, preferred_element_type=wide)
    return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :length].astype(value.dtype)

"""Multi-scale retention, the layer of RetNet."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Dtype, Initializer
from jax import Array

from jax_linattn import feature_maps
from jax_linattn.attention import Implementation
from jax_linattn.checks import check_bool, require
from jax_linattn.dtypes import accumulator_dtype
from jax_linattn.layers.common import (
    attend,
    batch_of,
    cache_dtype,
    cache_of,
    check_batch,
    check_options,
    clean,
    clean_input,
    group_norm,
    merge_heads,
    split_heads,
    state_cache,
)
from jax_linattn.layers.rotary import count_positions, rotate
from jax_linattn.nnx.cache import get_value, set_value


class MultiScaleRetention(nnx.Module):
    """Multi-scale retention: a fixed decay a head, rotary position, a norm a head and a swish gate.

        S_t = γ_h S_{t-1} + k̃_t v_tᵀ,  o_t = D^-½ q̃_tᵀ S_t,  γ_h = 1 - 2^(-5-h),  h = 0 … H-1
        y_t = W_O (swish(W_G x_t) ⊙ GroupNorm_h(o_t))

    where q̃_t and k̃_t are q_t and k_t turned by the angle t θ_i in each pair i of features (2i, 2i+1), with θ from 1 down
    to 10^-4 in equal ratios, as in the authors' code. Only distances matter, so a packed segment need not start at 0; pads
    are not counted. GroupNorm takes mean and variance over the features of one head and has no parameters, as the paper
    has it (the authors' code later leaves out the mean). Sun et al. 2023, https://arxiv.org/abs/2307.08621.

    Parameters, all without bias: query and key [features, features], value and gate [features, value_features], out
    [value_features, features].

    Args:
      features: width of inputs and outputs; D = features / num_heads.
      num_heads: H.
      value_features: H·E, all heads' values together; None = features. The paper has 2·features.
      rotary: turn queries and keys; needs an even D.
      epsilon: added to the variance.
      chunk_size, implementation: as in `linear_attention`.
      dtype: of the computation; None = that of inputs and parameters. Sums over time, norms and angles are float32
        whatever it is (float64 for float64).
      param_dtype: of the parameters.
      kernel_init, out_kernel_init: of the projections; out_… None = as the others.
      rngs: for the parameters.

    Raises:
      ValueError: naming the argument, what it got and what would be right.
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        value_features: int | None = None,
        rotary: bool = True,
        epsilon: float = 1e-6,
        chunk_size: int | None = None,
        implementation: Implementation | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        out_kernel_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        value_features = features if value_features is None else value_features
        check_options(num_heads, chunk_size, implementation, features=features, value_features=value_features)
        check_bool("rotary", rotary)
        head_dim = features // num_heads
        require(not rotary or head_dim % 2 == 0, f"rotary=True needs an even features / num_heads, got {head_dim}")
        self.features = features
        self.num_heads = num_heads
        self.value_features = value_features
        self.rotary = rotary
        self.epsilon = epsilon
        self.chunk_size = chunk_size
        self.implementation = implementation
        self.dtype, self.param_dtype = dtype, param_dtype
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.query = linear(features, features, kernel_init=kernel_init)
        self.key = linear(features, features, kernel_init=kernel_init)
        self.value = linear(features, value_features, kernel_init=kernel_init)
        self.gate = linear(features, value_features, kernel_init=kernel_init)
        self.out = linear(value_features, features, kernel_init=out_kernel_init or kernel_init)

    def __call__(
        self, x: Array, *, mask: Array | None = None, segment_ids: Array | None = None, decode: bool = False
    ) -> Array:
        """Retention over x.

        Args:
          x: [B, T, features].
          mask: bool [B, T], True = a real token; a masked one's output is 0, and what it holds changes nothing.
          segment_ids: int [B, T], runs of equal ids that do not see each other. Not with decode.
          decode: continue from the cache of `init_cache`, and keep what comes after.

        Returns:
          [B, T, features].

        Raises:
          ValueError: naming the argument, what it got and what would be right.
        """
        cache = cache_of(self, "cached_state", decode)
        x, mask = clean_input(x, self.features, mask)
        query, key, value = (split_heads(layer(x), self.num_heads) for layer in (self.query, self.key, self.value))
        position = cache_of(self, "cached_position", decode)
        start = jnp.zeros(x.shape[:1], jnp.int32) if position is None else get_value(position)
        check_batch(start, x)
        places, after = count_positions(start, mask, x.shape[1])
        if self.rotary:
            angles = 10000.0 ** -np.linspace(0, 1, query.shape[-1] // 2)
            query, key = rotate(query, places, angles), rotate(key, places, angles)
        log_decay = np.log1p(-(2.0 ** -(5.0 + np.arange(self.num_heads))))
        output = attend(
            query,
            key,
            value,
            cache=cache,
            mask=mask,
            segment_ids=segment_ids,
            feature_map=feature_maps.identity,
            normalize=False,
            scale=query.shape[-1] ** -0.5,
            log_decay=jnp.asarray(log_decay, accumulator_dtype(query.dtype)),
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )
        if position is not None:
            set_value(position, after)
        output = merge_heads(group_norm(output, self.epsilon))
        output = output * jax.nn.silu(self.gate(x).astype(output.dtype))
        return clean(self.out(output.astype(value.dtype)), mask)

    def init_cache(self, input_shape: tuple[int, ...], dtype: Dtype = jnp.float32) -> None:
        """Starts decoding anew, with a state that has seen no token.

        Args:
          input_shape: [B, T, features]; of it only B matters, the state has no length.
          dtype: of the inputs: the state is float32, and float64 where the computation is.
        """
        dtype = cache_dtype(self, dtype)
        batch, heads = batch_of(input_shape, self), self.num_heads
        dims = heads, self.features // heads, heads, self.value_features // heads
        self.cached_state = state_cache(batch, *dims, dtype)
        self.cached_position = nnx.Cache(jnp.zeros((batch,), jnp.int32))

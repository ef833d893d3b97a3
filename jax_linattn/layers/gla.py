"""Gated linear attention: a decay of each feature that the input decides."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer
from jax import Array

from jax_linattn import feature_maps
from jax_linattn.attention import Implementation
from jax_linattn.checks import check_positive_int, require
from jax_linattn.dtypes import accumulator_dtype
from jax_linattn.layers.common import (
    RMSNorm,
    attend,
    batch_of,
    cache_dtype,
    cache_of,
    check_options,
    clean,
    clean_input,
    merge_heads,
    project_wide,
    split_heads,
    state_cache,
)


class GatedLinearAttention(nnx.Module):
    """Gated linear attention (GLA): a data-dependent decay a feature, an RMS norm a head and a swish gate.

        S_t = Diag(α_t) S_{t-1} + k_t v_tᵀ,  o_t = D^-½ q_tᵀ S_t,  α_t = sigmoid(W₂ W₁ x_t + b)^(1/τ)
        y_t = W_O (swish(W_G x_t + b_G) ⊙ RMSNorm_h(o_t))

    RMSNorm_h is over the features of one head, with one learned scale for all heads. Log decays are computed in float32
    whatever the dtype. Yang et al. 2024, https://arxiv.org/abs/2312.06635.

    Parameters: query and key [features, key_features], value [features, value_features], decay_down [features, gate_rank]
    and out [value_features, features] without bias; decay_up [gate_rank, key_features] and gate [features, value_features]
    with one; norm.scale [E].

    Args:
      features: width of inputs and outputs.
      num_heads: H.
      key_features: H·D, all heads' queries together; None = features / 2.
      value_features: H·E; None = features.
      gate_rank: of W₂ W₁.
      gate_temperature: τ; the larger, the closer decays start to 1.
      epsilon: added to the mean square.
      chunk_size, implementation: as in `linear_attention`.
      dtype: of the computation; None = that of inputs and parameters. Sums over time, log decays and the norm are float32
        whatever it is (float64 for float64).
      param_dtype: of the parameters.
      kernel_init, out_kernel_init: of the projections; out_… None = as the others.
      bias_init: of b and b_G.
      rngs: for the parameters.

    Raises:
      ValueError: naming the argument, what it got and what would be right.
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        key_features: int | None = None,
        value_features: int | None = None,
        gate_rank: int = 16,
        gate_temperature: float = 16.0,
        epsilon: float = 1e-6,
        chunk_size: int | None = None,
        implementation: Implementation | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = default_bias_init,
        rngs: nnx.Rngs,
    ):
        check_positive_int("features", features)
        key_features = features // 2 if key_features is None else key_features
        value_features = features if value_features is None else value_features
        widths = {"key_features": key_features, "value_features": value_features}
        check_options(num_heads, chunk_size, implementation, **widths)
        check_positive_int("gate_rank", gate_rank)
        require(gate_temperature > 0, f"gate_temperature must be above 0, got {gate_temperature}")
        self.features = features
        self.num_heads = num_heads
        self.key_features = key_features
        self.value_features = value_features
        self.gate_temperature = gate_temperature
        self.chunk_size = chunk_size
        self.implementation = implementation
        self.dtype, self.param_dtype = dtype, param_dtype
        linear = functools.partial(
            nnx.Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs
        )
        wide_dtype = None if dtype is None else accumulator_dtype(dtype)
        self.query = linear(features, key_features)
        self.key = linear(features, key_features)
        self.value = linear(features, value_features)
        self.decay_down = linear(features, gate_rank, dtype=wide_dtype)
        self.decay_up = linear(gate_rank, key_features, use_bias=True, bias_init=bias_init, dtype=wide_dtype)
        self.gate = linear(features, value_features, use_bias=True, bias_init=bias_init)
        self.norm = RMSNorm(value_features // num_heads, epsilon, param_dtype)
        self.out = linear(value_features, features, kernel_init=out_kernel_init or kernel_init)

    def __call__(
        self, x: Array, *, mask: Array | None = None, segment_ids: Array | None = None, decode: bool = False
    ) -> Array:
        """Gated linear attention over x.

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
        log_decay = jax.nn.log_sigmoid(project_wide(self.decay_up, self.decay_down(x))) / self.gate_temperature
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
            log_decay=split_heads(log_decay, self.num_heads),
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )
        output = merge_heads(self.norm(output))
        output = output * jax.nn.silu(self.gate(x).astype(output.dtype))
        return clean(self.out(output.astype(value.dtype)), mask)

    def init_cache(self, input_shape: tuple[int, ...], dtype: Dtype = jnp.float32) -> None:
        """Starts decoding anew, with a state that has seen no token.

        Args:
          input_shape: [B, T, features]; of it only B matters, the state has no length.
          dtype: of the inputs: the state is float32, and float64 where the computation is.
        """
        dtype = cache_dtype(self, dtype)
        heads = self.num_heads
        dims = heads, self.key_features // heads, heads, self.value_features // heads
        self.cached_state = state_cache(batch_of(input_shape, self), *dims, dtype)

"""HGRN2: a gated linear RNN whose keys are what its forget gates leave open."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Dtype, Initializer
from jax import Array

from jax_linattn import feature_maps
from jax_linattn.attention import Implementation
from jax_linattn.checks import require
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
    wide,
)
from jax_linattn.nnx.feature_maps import Constant


class HGRN2(nnx.Module):
    """HGRN2: forget gates with a lower bound a layer, and as keys what they forget.

        S_t = Diag(f_t) S_{t-1} + (1 - f_t) v_tᵀ,  o_t = q_tᵀ S_t,  q = swish(W_Q x),  v = W_I x
        f_t = β + (1 - β) sigmoid(W_F x_t),        y_t = W_O RMSNorm(o_t)

    The norm is over all heads' features together, with a learned scale. Neither log f nor 1 - f is a difference of rounded
    numbers, so both are exact where gates are nearly open or nearly shut. Qin et al. 2024,
    https://arxiv.org/abs/2404.07904.

    Parameters, all without bias: query, forget, value and out [features, features], norm.scale [features].

    Args:
      features: width of inputs and outputs; D = E = features / num_heads.
      num_heads: H.
      lower_bound: β in [0, 1), a number or an array [features], kept as it is. The paper learns the bounds of all layers
        together: a model that does so holds the parameters, and passes a row of `lower_bounds` with each call.
      epsilon: added to the mean square.
      chunk_size, implementation: as in `linear_attention`.
      dtype: of the computation; None = that of inputs and parameters. Sums over time, gates and the norm are float32
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
        lower_bound: Any = 0.0,
        epsilon: float = 1e-6,
        chunk_size: int | None = None,
        implementation: Implementation | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        out_kernel_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        check_options(num_heads, chunk_size, implementation, features=features)
        self.features = features
        self.num_heads = num_heads
        bound = _checked_bound(lower_bound, features)
        # A number is structure, as fixed decays are: a model with it has parameters alone.
        is_number = isinstance(lower_bound, int | float)
        self.lower_bound: Any = float(lower_bound) if is_number else Constant(bound)
        self.chunk_size = chunk_size
        self.implementation = implementation
        self.dtype, self.param_dtype = dtype, param_dtype
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        linear = functools.partial(nnx.Linear, features, features, use_bias=False, rngs=rngs, **dtypes)
        self.query = linear(kernel_init=kernel_init)
        self.forget = linear(kernel_init=kernel_init)
        self.value = linear(kernel_init=kernel_init)
        self.norm = RMSNorm(features, epsilon, param_dtype)
        self.out = linear(kernel_init=out_kernel_init or kernel_init)

    def __call__(
        self,
        x: Array,
        *,
        mask: Array | None = None,
        segment_ids: Array | None = None,
        decode: bool = False,
        lower_bound: Array | None = None,
    ) -> Array:
        """HGRN2 over x.

        Args:
          x: [B, T, features].
          mask: bool [B, T], True = a real token; a masked one's output is 0, and what it holds changes nothing.
          segment_ids: int [B, T], runs of equal ids that do not see each other. Not with decode.
          decode: continue from the cache of `init_cache`, and keep what comes after.
          lower_bound: β in [0, 1), [] or [features], with gradients; None = the constructor's.

        Returns:
          [B, T, features].

        Raises:
          ValueError: naming the argument, what it got and what would be right.
        """
        cache = cache_of(self, "cached_state", decode)
        x, mask = clean_input(x, self.features, mask)
        own = self.lower_bound if isinstance(self.lower_bound, float) else self.lower_bound[...]
        bound = _checked_bound(own if lower_bound is None else lower_bound, self.features)
        key, log_decay = _gates(project_wide(self.forget, x), bound)
        query, value = jax.nn.silu(self.query(x)), self.value(x)
        projected = (query, key.astype(query.dtype), value, log_decay)
        query, key, value, log_decay = (split_heads(y, self.num_heads) for y in projected)
        output = attend(
            query,
            key,
            value,
            cache=cache,
            mask=mask,
            segment_ids=segment_ids,
            feature_map=feature_maps.identity,
            normalize=False,
            log_decay=log_decay,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )
        output = self.norm(merge_heads(output))
        return clean(self.out(output.astype(value.dtype)), mask)

    def init_cache(self, input_shape: tuple[int, ...], dtype: Dtype = jnp.float32) -> None:
        """Starts decoding anew, with a state that has seen no token.

        Args:
          input_shape: [B, T, features]; of it only B matters, the state has no length.
          dtype: of the inputs: the state is float32, and float64 where the computation is.
        """
        dtype = cache_dtype(self, dtype)
        heads, dim = self.num_heads, self.features // self.num_heads
        self.cached_state = state_cache(batch_of(input_shape, self), heads, dim, heads, dim, dtype)


def lower_bounds(logits: Array) -> Array:
    """The lower bounds of all layers, which rise from 0 in the first and stay below 1.

        β_ℓ = Σ_{0 < j <= ℓ} p_j,  p = softmax(logits) over layers

    Args:
      logits: [L, features], learned by the model.

    Returns:
      [L, features] in float32 (float64 for float64).

    Raises:
      ValueError: on another rank.

    Example:
      >>> lower_bounds(jnp.zeros((4, 1))).ravel()
      Array([0.  , 0.25, 0.5 , 0.75], dtype=float32)
    """
    require(jnp.ndim(logits) == 2, f"logits must be [L, features], got shape {jnp.shape(logits)}")
    shares = jax.nn.softmax(wide(logits), axis=0)
    return jnp.cumsum(shares.at[0].set(0), axis=0)


def _gates(logit: Array, bound: Array) -> tuple[Array, Array]:
    """(1 - f, log f) of logits [B, T, features] and a bound, [] or [features]."""
    bound = jnp.broadcast_to(bound.astype(logit.dtype), logit.shape)
    return (1 - bound) * jax.nn.sigmoid(-logit), log_forget(logit, bound)


@jax.custom_jvp
def log_forget(logit: Array, bound: Array) -> Array:
    """log(β + (1 - β) sigmoid(z)) to a few ulp for every z, and with the exact derivatives, β = 0 included.

    Args:
      logit: z, float32 or float64.
      bound: β in [0, 1), of its shape and dtype.

    Returns:
      An array of that shape and dtype.
    """
    forgotten = (1 - bound) * jax.nn.sigmoid(-logit)  # 1 - f
    # Near f = 1 from 1 - f, which is exact there; elsewhere from two shares of one sign, f = sigmoid(z) + β sigmoid(-z).
    shares = jnp.logaddexp(jax.nn.log_sigmoid(logit), jnp.log(bound) + jax.nn.log_sigmoid(-logit))
    return jnp.where(forgotten < 0.5, jnp.log1p(-jnp.minimum(forgotten, 0.5)), shares)


@log_forget.defjvp
def _log_forget_jvp(primals, tangents):
    logit, bound = primals
    log_f = log_forget(logit, bound)
    by_logit = (1 - bound) * jax.nn.sigmoid(-logit) * jnp.exp(jax.nn.log_sigmoid(logit) - log_f)
    # The derivative by β, (1 - sigmoid(z)) / f, may pass the largest float where f is tiny; bounded, 0 times it is 0.
    largest = jnp.asarray(0.9 * np.log(float(jnp.finfo(logit.dtype).max)), logit.dtype)
    by_bound = jnp.exp(jnp.minimum(jax.nn.log_sigmoid(-logit) - log_f, largest))
    return log_f, by_logit * tangents[0] + by_bound * tangents[1]


def _checked_bound(bound: Any, features: int) -> Array:
    """As an array; the range is checked of what is no array of jax."""
    shape = jnp.shape(bound)
    require(shape in {(), (features,)}, f"lower_bound must be a number or [features] = ({features},), got shape {shape}")
    if not isinstance(bound, Array):
        bound = np.asarray(bound, np.float64)
        require(np.all((bound >= 0) & (bound < 1)), f"lower_bound must be in [0, 1), got {bound}")
    return jnp.asarray(bound)

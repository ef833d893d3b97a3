"""Mamba-2's mixer: a state space layer that is gated linear attention."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Dtype, Initializer
from jax import Array

from jax_linattn import feature_maps
from jax_linattn.attention import Implementation
from jax_linattn.checks import check_positive_int, require
from jax_linattn.layers.common import (
    attend,
    batch_of,
    cache_dtype,
    cache_of,
    check_options,
    clean,
    clean_input,
    merge_heads,
    split_heads,
    state_cache,
    wide,
)
from jax_linattn.layers.convolution import ShortConvolution


class Mamba2(nnx.Module):
    """Structured state space duality with a scalar decay a head.

        z, x, B, C, Δ = in_proj(u);   x, B, C = silu(convolution(x, B, C));   Δ = softplus(Δ + dt_bias)
        S_t = exp(Δ_t A) S_{t-1} + B_t (Δ_t x_t)ᵀ,   A = -exp(A_log)
        y_t = C_tᵀ S_t + D ⊙ x_t;   output = out_proj(norm(y ⊙ silu(z)))

    which is linear attention without a normaliser: queries C and keys B of G heads, values Δ·x of N heads, log decay Δ·A.
    Keys are shared between heads and not copied. The norm divides by the root mean square over the heads of a group. Δ, the
    decays, the norm and the sums over time are float32 (float64 for float64).
    Dao and Gu 2024, https://arxiv.org/abs/2405.21060.

    Decoding keeps the convolution's last inputs and a `LinearAttentionState`: `init_cache` makes both, of constant size.

    Weights of `Mamba2Mixer` in Hugging Face transformers fit as they are, transposed where PyTorch keeps [out, in]:

        in_proj.weight [2·N·E + 2·G·F + N, features]   in_proj.kernel, its transpose; columns in order z, x, B, C, Δ
        conv1d.weight [N·E + 2·G·F, 1, W]              convolution.kernel [W, N·E + 2·G·F] = weight[:, 0].T
        conv1d.bias                                    convolution.bias
        dt_bias, A_log, D [N]                          the same names
        norm.weight [N·E]                              norm.scale
        out_proj.weight [features, N·E]                out_proj.kernel, its transpose
        in_proj.bias, out_proj.bias                    the same names, with use_bias=True

    with num_heads, head_dim, state_dim = state_size, num_groups = n_groups, convolution_width = conv_kernel, dt_limit =
    time_step_limit and epsilon = layer_norm_epsilon of its config. Its hidden_act must be silu. (Older releases of
    transformers normalise over all heads, whatever n_groups; with one group there is no difference.)

    Args:
      features: width of inputs and outputs.
      num_heads: N, heads of x.
      head_dim: E; None = 2 · features / num_heads, the paper's expansion.
      state_dim: F, of a key and a query.
      num_groups: G, heads of keys and queries, which divides N.
      convolution_width: W, tokens.
      dt_limit: Δ is clipped to this range.
      dt_range: between these Δ starts without inputs, log-uniformly.
      use_bias: of the two projections.
      use_convolution_bias: of the convolution.
      epsilon: added to the mean square in the norm.
      chunk_size, implementation: as in `causal_linear_attention`.
      dtype: of the computation; None = that of inputs and parameters.
      param_dtype: of the parameters.
      kernel_init, out_kernel_init: of in_proj and out_proj; out_… None = the same.
      rngs: for the parameters.

    Raises:
      ValueError: naming the argument, what it got and what would be right.
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        state_dim: int = 128,
        num_groups: int = 1,
        convolution_width: int = 4,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        dt_range: tuple[float, float] = (1e-3, 0.1),
        use_bias: bool = False,
        use_convolution_bias: bool = True,
        epsilon: float = 1e-5,
        chunk_size: int | None = None,
        implementation: Implementation | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        out_kernel_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        check_options(num_heads, chunk_size, implementation)
        sizes = {"features": features, "state_dim": state_dim, "num_groups": num_groups}
        for name, size in {**sizes, "convolution_width": convolution_width}.items():
            check_positive_int(name, size)
        check_positive_int("head_dim", head_dim, or_none=True)
        inner = 2 * features if head_dim is None else num_heads * head_dim
        require(
            inner % num_heads == 0,
            f"num_heads must divide 2 · features = {2 * features}, got {num_heads}; or give head_dim",
        )
        require(num_heads % num_groups == 0, f"num_groups must divide num_heads = {num_heads}, got {num_groups}")
        _check_range("dt_limit", dt_limit, lambda least, most: 0 <= least <= most, "0 <= least <= most")
        _check_range("dt_range", dt_range, lambda least, most: 0 < least <= most < math.inf, "0 < least <= most < inf")
        self.features, self.num_heads, self.head_dim = features, num_heads, inner // num_heads
        self.state_dim, self.num_groups = state_dim, num_groups
        self.dt_limit = tuple(map(float, dt_limit))
        self.chunk_size, self.implementation = chunk_size, implementation
        self.dtype, self.param_dtype = dtype, param_dtype

        keys = num_groups * state_dim
        how = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        linear = {"use_bias": use_bias, **how}
        self.in_proj = nnx.Linear(features, 2 * inner + 2 * keys + num_heads, kernel_init=kernel_init, **linear)
        self.convolution = ShortConvolution(inner + 2 * keys, convolution_width, use_bias=use_convolution_bias, **how)
        decay_key, dt_key = rngs.params(), rngs.params()
        rates = jax.random.uniform(decay_key, (num_heads,), param_dtype, minval=1, maxval=16)
        self.A_log = nnx.Param(jnp.log(rates))
        self.dt_bias = nnx.Param(_inverse_softplus_of_log_uniform(dt_key, (num_heads,), param_dtype, dt_range))
        self.D = nnx.Param(jnp.ones((num_heads,), param_dtype))
        self.norm = GroupRMSNorm(inner, num_groups, epsilon, param_dtype)
        self.out_proj = nnx.Linear(inner, features, kernel_init=out_kernel_init or kernel_init, **linear)

    def __call__(
        self, x: Array, *, mask: Array | None = None, segment_ids: Array | None = None, decode: bool = False
    ) -> Array:
        """Mixes tokens.

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
        cache = cache_of(self, "cached_state", decode)
        z, x, key, query, dt = self._project(x, mask, segment_ids, decode)
        dt = jax.nn.softplus(wide(dt) + self.dt_bias[...].astype(wide(dt).dtype)[None, None])
        if self.dt_limit != (0.0, math.inf):
            dt = jnp.clip(dt, *self.dt_limit)
        y = attend(
            query,
            key,
            (wide(x) * dt[..., None]).astype(x.dtype),
            cache=cache,
            mask=mask,
            segment_ids=segment_ids,
            log_decay=dt * -jnp.exp(self.A_log[...].astype(dt.dtype))[None, None],
            feature_map=feature_maps.identity,
            normalize=False,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )
        y = wide(y) + wide(x) * self.D[...].astype(dt.dtype)[None, None, :, None]
        y = self.norm(merge_heads(y) * jax.nn.silu(wide(z)))
        return clean(self.out_proj(y.astype(x.dtype)), mask)

    def init_cache(self, input_shape: tuple[int, ...], dtype: Dtype = jnp.float32) -> None:
        """Starts decoding anew, with a state that has seen no token.

        Args:
          input_shape: [B, T, features]; of it only B matters.
          dtype: of the inputs.
        """
        dtype = cache_dtype(self, dtype)
        batch = batch_of(input_shape, self)
        self.convolution.init_cache((batch, 1, self.convolution.kernel.shape[1]), dtype)
        self.cached_state = state_cache(batch, self.num_groups, self.state_dim, self.num_heads, self.head_dim, dtype)

    def _project(self, x: Array, mask, segment_ids, decode: bool) -> tuple[Array, ...]:
        """(z [B, T, N·E], x [B, T, N, E], key and query [B, T, G, F], Δ [B, T, N] before its bias)."""
        inner, keys = self.num_heads * self.head_dim, self.num_groups * self.state_dim
        z, x, dt = jnp.split(self.in_proj(x), [inner, 2 * inner + 2 * keys], axis=-1)
        x = jax.nn.silu(self.convolution(x, mask=mask, segment_ids=segment_ids, decode=decode))
        x, key, query = jnp.split(x, [inner, inner + keys], axis=-1)
        key, query = split_heads(key, self.num_groups), split_heads(query, self.num_groups)
        return z, split_heads(x, self.num_heads), key, query, dt


class GroupRMSNorm(nnx.Module):
    """x [..., features] over its root mean square in each of some equal groups of features, times a learned scale."""

    def __init__(self, features: int, num_groups: int, epsilon: float, param_dtype: Dtype = jnp.float32):
        self.num_groups, self.epsilon = num_groups, epsilon
        self.scale = nnx.Param(jnp.ones((features,), param_dtype))

    def __call__(self, x: Array) -> Array:
        """In the dtype of sums."""
        groups = split_heads(wide(x), self.num_groups)
        groups = groups * jax.lax.rsqrt(jnp.mean(jnp.square(groups), axis=-1, keepdims=True) + self.epsilon)
        return merge_heads(groups) * self.scale[...].astype(groups.dtype).reshape([1] * (x.ndim - 1) + [-1])


def _check_range(name: str, limits: tuple[float, float], holds: Callable[[float, float], bool], accepted: str) -> None:
    require(np.shape(limits) == (2,) and holds(*limits), f"{name} must be (least, most) with {accepted}, got {limits}")


def _inverse_softplus_of_log_uniform(key, shape: tuple[int, ...], dtype, limits: tuple[float, float]) -> Array:
    """b with softplus(b) = Δ, log-uniform between the limits: b = log(exp(Δ) - 1) = Δ + log(1 - exp(-Δ))."""
    dt = jnp.exp(jax.random.uniform(key, shape, dtype, minval=math.log(limits[0]), maxval=math.log(limits[1])))
    return dt + jnp.log(-jnp.expm1(-dt))

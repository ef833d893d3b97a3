"""Lightning attention, the linear layer of TransNormerLLM and MiniMax-01."""

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
    split_heads,
    state_cache,
)


class LightningAttention(nnx.Module):
    """Lightning attention: silu on queries, keys and values, a fixed decay a head, one RMS norm, a sigmoid gate.

        S_t = γ_h S_{t-1} + k_t v_tᵀ,  o_t = q_tᵀ S_t,   q, k, v = silu(W x)
        y_t = W_O (sigmoid(W_G x_t) ⊙ RMSNorm(o_t)),     ln γ_h = -(8/H) (1 - ℓ/L) h

    with heads h = 0 … H-1 and layers ℓ = 0 … L-1, so that the first head forgets nothing and later layers forget less. The
    norm is over all heads' features together, with a learned scale. What a token adds is not decayed at that token.
    Qin et al. 2023, https://arxiv.org/abs/2307.14995; 2024, https://arxiv.org/abs/2401.04658; MiniMax 2025,
    https://arxiv.org/abs/2501.08313.

    Published decays differ. MiniMax-01 has ln γ_h = -2^(-8(h+1)/H) (1 - ℓ/(L-1+1e-5) + 1e-5), which is
    `minimax_decay(num_heads, layer, num_layers)`: pass it, or any other, as `decay`.

    Parameters, all without bias: query, key, value and gate [features, H·D], norm.scale [H·D], out [H·D, features]. Weights
    of Hugging Face's MiniMaxLightningAttention, [outputs, inputs] as PyTorch has them, go to:

        qkv_proj.weight.reshape(H, 3, D, features): [:, i].reshape(H·D, features).T is the kernel of query, key, value
        output_gate.weight.T  gate.kernel
        norm.weight           norm.scale
        out_proj.weight.T     out.kernel

    Args:
      features: width of inputs and outputs.
      num_heads: H.
      head_dim: D; None = features / num_heads.
      layer: ℓ, from 0.
      num_layers: L.
      decay: float [H], ln γ_h <= 0 instead of the formula's; layer and num_layers then mean nothing.
      epsilon: added to the mean square.
      chunk_size, implementation: as in `linear_attention`.
      dtype: of the computation; None = that of inputs and parameters. Sums over time and the norm are float32 whatever it
        is (float64 for float64).
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
        head_dim: int | None = None,
        layer: int = 0,
        num_layers: int = 1,
        decay: Any = None,
        epsilon: float = 1e-6,
        chunk_size: int | None = None,
        implementation: Implementation | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        out_kernel_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        check_positive_int("features", features)
        check_positive_int("head_dim", head_dim, or_none=True)
        check_options(num_heads, chunk_size, implementation, **({"features": features} if head_dim is None else {}))
        head_dim = features // num_heads if head_dim is None else head_dim
        self.features = features
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.log_decay = _checked(decay, num_heads) if decay is not None else _log_decay(num_heads, layer, num_layers)
        self.chunk_size = chunk_size
        self.implementation = implementation
        self.dtype, self.param_dtype = dtype, param_dtype
        inner = num_heads * head_dim
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.query = linear(features, inner, kernel_init=kernel_init)
        self.key = linear(features, inner, kernel_init=kernel_init)
        self.value = linear(features, inner, kernel_init=kernel_init)
        self.gate = linear(features, inner, kernel_init=kernel_init)
        self.norm = RMSNorm(inner, epsilon, param_dtype)
        self.out = linear(inner, features, kernel_init=out_kernel_init or kernel_init)

    def __call__(
        self, x: Array, *, mask: Array | None = None, segment_ids: Array | None = None, decode: bool = False
    ) -> Array:
        """Lightning attention over x.

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
        projected = (jax.nn.silu(layer(x)) for layer in (self.query, self.key, self.value))
        query, key, value = (split_heads(y, self.num_heads) for y in projected)
        output = attend(
            query,
            key,
            value,
            cache=cache,
            mask=mask,
            segment_ids=segment_ids,
            feature_map=feature_maps.identity,
            normalize=False,
            log_decay=jnp.asarray(self.log_decay, accumulator_dtype(query.dtype)),
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )
        output = self.norm(merge_heads(output))
        output = output * jax.nn.sigmoid(self.gate(x).astype(output.dtype))
        return clean(self.out(output.astype(value.dtype)), mask)

    def init_cache(self, input_shape: tuple[int, ...], dtype: Dtype = jnp.float32) -> None:
        """Starts decoding anew, with a state that has seen no token.

        Args:
          input_shape: [B, T, features]; of it only B matters, the state has no length.
          dtype: of the inputs: the state is float32, and float64 where the computation is.
        """
        dtype = cache_dtype(self, dtype)
        heads, dim = self.num_heads, self.head_dim
        self.cached_state = state_cache(batch_of(input_shape, self), heads, dim, heads, dim, dtype)


def minimax_decay(num_heads: int, layer: int, num_layers: int) -> np.ndarray:
    """The log decays of MiniMax-01: ln γ_h = -2^(-8(h+1)/H) (1 - ℓ/(L-1+1e-5) + 1e-5), h = 0 … H-1.

    Args:
      num_heads: H.
      layer: ℓ, from 0; it counts layers of every kind.
      num_layers: L, of every kind.

    Returns:
      float64 [H].
    """
    _check_layer(layer, num_layers)
    share = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    return -(2.0 ** (-8 * np.arange(1, num_heads + 1) / num_heads)) * share


def _log_decay(num_heads: int, layer: int, num_layers: int) -> tuple[float, ...]:
    _check_layer(layer, num_layers)
    return tuple(-8 / num_heads * (1 - layer / num_layers) * h for h in range(num_heads))


def _check_layer(layer: int, num_layers: int) -> None:
    check_positive_int("num_layers", num_layers)
    require(isinstance(layer, int | np.integer), f"layer must be a whole number, got {layer!r}")
    require(0 <= layer < num_layers, f"layer must be from 0 to num_layers - 1 = {num_layers - 1}, got {layer}")


def _checked(decay: Any, num_heads: int) -> tuple[float, ...]:
    """As floats, so that it is part of the layer's structure and nothing trains it."""
    shape = np.shape(decay)
    require(shape == (num_heads,), f"decay must be [H] = ({num_heads},), the log decay of each head, got shape {shape}")
    decay = np.asarray(decay, np.float64)
    require(np.all(decay <= 0), f"decay must hold natural logs of decays, <= 0, got {decay}")
    return tuple(map(float, decay))

"""The short convolution as a layer: a sense of position without a maximum length."""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jax import Array
from jax.nn.initializers import variance_scaling

from jax_linattn.checks import check_positive_int, require
from jax_linattn.convolution import causal_convolution, init_convolution_state
from jax_linattn.layers.common import cache_of, check_batch


class ShortConvolution(nnx.Module):
    """`causal_convolution` with a learned kernel, and its last W-1 inputs as cache.

        y_t = bias + Σ_{j < W} kernel_{W-1-j} ⊙ x_{t-j}

    Args:
      features: D, size of the inputs' last axis.
      width: W, tokens that a channel sees.
      use_bias: add a learned bias.
      dtype: of the computation; None = that of inputs and parameters. Sums are float32 whatever it is.
      param_dtype: of the parameters `kernel` [W, D] and `bias` [D].
      rngs: for the parameters.

    Raises:
      ValueError: naming the argument, what it got and what would be right.
    """

    def __init__(
        self,
        features: int,
        width: int = 4,
        *,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        for name, size in {"features": features, "width": width}.items():
            check_positive_int(name, size)
        self.dtype = dtype
        taps_as_fan_in = variance_scaling(1.0, "fan_in", "normal", in_axis=0, out_axis=(), batch_axis=1)
        self.kernel = nnx.Param(taps_as_fan_in(rngs.params(), (width, features), param_dtype))
        self.bias = nnx.Param(jnp.zeros((features,), param_dtype)) if use_bias else nnx.data(None)

    def init_cache(self, input_shape: tuple[int, ...], dtype: Dtype = jnp.float32) -> None:
        """Starts decoding anew.

        Args:
          input_shape: [B, T, D]; the cache's size does not depend on T.
          dtype: of the inputs.
        """
        inputs = jax.ShapeDtypeStruct(input_shape, self._dtype(dtype))
        self.cached_inputs = nnx.Cache(init_convolution_state(inputs, self.kernel.shape[0]))

    def __call__(
        self, x: Array, *, mask: Array | None = None, segment_ids: Array | None = None, decode: bool = False
    ) -> Array:
        """Each channel's last W tokens, weighted.

        Args:
          x: [B, T, D].
          mask: bool [B, T], True = a real token; a masked one is no token, and its output is 0.
          segment_ids: int [B, T], runs of equal ids that do not see each other; not with decode.
          decode: continue from the cache, and keep what comes after.

        Returns:
          [B, T, D].

        Raises:
          ValueError: naming the argument, what it got and what would be right.
        """
        require(
            not decode or segment_ids is None,
            "segment_ids cannot be used with decode=True: start a new document with an empty cache",
        )
        cache = cache_of(self, "cached_inputs", decode)
        state = None if cache is None else cache[...]
        if state is not None:
            check_batch(state, x)
        dtype = self._dtype(x.dtype)
        bias = None if self.bias is None else self.bias[...].astype(dtype)
        state, y = causal_convolution(
            x.astype(dtype), self.kernel[...].astype(dtype), bias, state=state, mask=mask, segment_ids=segment_ids
        )
        if cache is not None:
            cache[...] = state
        return y

    def _dtype(self, of_inputs: Dtype) -> Dtype:
        return self.dtype or jnp.promote_types(of_inputs, self.kernel.dtype)

"""Linear attention for the ``attention_fn=`` hook of `flax.nnx.MultiHeadAttention`."""

import functools
from collections.abc import Callable
from typing import Any

from flax import nnx
from jax import Array

from jax_linattn import feature_maps, hook_calls, module_calls
from jax_linattn.attention import Implementation
from jax_linattn.checks import require


def as_attention_fn(
    feature_map: Any = feature_maps.elu_plus_one,
    *,
    is_causal: bool = False,
    normalize: bool = True,
    eps: float = 0.0,
    implementation: Implementation | None = None,
    chunk_size: int | None = None,
) -> Callable[..., Array]:
    """A function for ``flax.nnx.MultiHeadAttention(attention_fn=...)``.

    The function takes masks of keys, float or bool, that broadcast to [batch…, 1, 1, S]; a float mask means what it
    means in Flax: not 0 = attend. It decodes from Flax's key-value cache too; that cache grows with the maximum length,
    and `LinearAttention` has one that does not.

    Args:
      feature_map: φ, without parameters of its own.
      is_causal: attend to keys at or before the query alone. A call with ``is_causal=True`` does so too.
      normalize, eps, implementation, chunk_size: as in `linear_attention`.

    Raises:
      ValueError: on a learnable map; the function raises it on a bias, on any mask but those above, and on dropout that
        is not deterministic.
    """
    options = module_calls.Options(feature_map, is_causal, normalize, eps, None, chunk_size, implementation)
    hook_calls.check_options(options, nnx.Module)

    def linear_attention_fn(
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: nnx.Module | None = None,
        is_causal: bool = False,
        input_positions: Array | None = None,
    ) -> Array:
        del broadcast_dropout, dropout_rng  # nothing is dropped: a rate above 0 raises unless deterministic
        require(input_positions is None, "input_positions cannot be used: linear attention applies no positions")
        return hook_calls.attend(
            query,
            key,
            value,
            # NNX passes is_causal=False whenever its call does not say otherwise.
            options._replace(is_causal=options.is_causal or is_causal, precision=precision),
            bias=bias,
            mask=mask,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            dtype=dtype,
            sow=None if module is None else functools.partial(module.sow, nnx.Intermediate, "attention_weights"),
        )

    return linear_attention_fn

"""Linear attention for the ``attention_fn=`` hook of `flax.linen.MultiHeadDotProductAttention`."""

import functools
from collections.abc import Callable
from typing import Any

from flax import linen as nn
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
    """A function for ``flax.linen.MultiHeadDotProductAttention(attention_fn=...)``.

    The function takes masks of keys, float or bool, that broadcast to [batch…, 1, 1, S]; a float mask means what it
    means in Flax: not 0 = attend. It decodes from Flax's key-value cache too; that cache grows with the maximum length,
    and `LinearAttention` has one that does not.

    Args:
      feature_map: φ, without parameters of its own.
      is_causal: attend to keys at or before the query alone: Linen's module has no such option, and a causal mask is
        refused.
      normalize, eps, implementation, chunk_size: as in `linear_attention`.

    Raises:
      ValueError: on a learnable map; the function raises it on a bias, on any mask but those above, on dropout that is
        not deterministic, and on einsums of the module's own.
    """
    options = module_calls.Options(feature_map, is_causal, normalize, eps, None, chunk_size, implementation)
    hook_calls.check_options(options, nn.Module)

    # Linen passes on only what it finds by name in the signature, so what cannot be heeded is named too, and refused.
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
        module: nn.Module | None = None,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> Array:
        del broadcast_dropout, dropout_rng  # nothing is dropped: a rate above 0 raises unless deterministic
        del force_fp32_for_softmax  # true either way: sums and the division are float32
        require(
            qk_attn_weights_einsum is None and attn_weights_value_einsum is None,
            "qk_attn_weights_einsum_cls and attn_weights_value_einsum_cls cannot be used: no weights are formed",
        )
        return hook_calls.attend(
            query,
            key,
            value,
            options._replace(precision=precision),
            bias=bias,
            mask=mask,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            dtype=dtype,
            sow=None if module is None else functools.partial(module.sow, "intermediates", "attention_weights"),
        )

    return linear_attention_fn

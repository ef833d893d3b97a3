"""Linear attention for Flax Linen."""

from jax_linattn.linen.attention import LinearAttention
from jax_linattn.linen.attention_fn import as_attention_fn
from jax_linattn.linen.feature_maps import T2R, Hedgehog

__all__ = ["T2R", "Hedgehog", "LinearAttention", "as_attention_fn"]

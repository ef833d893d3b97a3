"""Linear attention for Flax NNX."""

from jax_linattn.nnx.attention import LinearAttention
from jax_linattn.nnx.attention_fn import as_attention_fn
from jax_linattn.nnx.feature_maps import T2R, Constant, Hedgehog

__all__ = ["T2R", "Constant", "Hedgehog", "LinearAttention", "as_attention_fn"]

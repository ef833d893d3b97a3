"""Linear attention for JAX: exact in every form, on CPU, GPU and TPU."""

from jax_linattn import feature_maps
from jax_linattn.attention import (
    attention_weights,
    causal_linear_attention,
    init_state,
    linear_attention,
    linear_attention_step,
)
from jax_linattn.feature_maps import FeatureMap
from jax_linattn.selection import select_implementation
from jax_linattn.state import LinearAttentionState

__version__ = "0.1.0"

__all__ = [
    "FeatureMap",
    "LinearAttentionState",
    "attention_weights",
    "causal_linear_attention",
    "feature_maps",
    "init_state",
    "linear_attention",
    "linear_attention_step",
    "select_implementation",
]

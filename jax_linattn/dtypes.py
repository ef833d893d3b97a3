"""The dtype of everything that is summed over time."""

import jax.numpy as jnp


def accumulator_dtype(dtype) -> jnp.dtype:
    """float64 for float64, float32 for all else: 16-bit running sums stall after a few hundred tokens."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)

"""Rotary position: queries and keys turned by angles that grow with the token's place, so that products see distances."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_linattn.dtypes import accumulator_dtype


def count_positions(start: Array, mask: Array | None, length: int) -> tuple[Array, Array]:
    """Places of tokens, counting those that the mask leaves.

    Args:
      start: int32 [B], tokens before these.
      mask: bool [B, T], True = a real token, or None.
      length: T.

    Returns:
      (places int32 [B, T], tokens before the next ones int32 [B]). The place of a masked token means nothing.
    """
    if mask is None:
        places = start[:, None] + jnp.arange(length, dtype=start.dtype)[None]
        return places, start + jnp.asarray(length, start.dtype)
    counted = start[:, None] + jnp.cumsum(mask, axis=1, dtype=start.dtype)
    return counted - 1, start + jnp.sum(mask, axis=1, dtype=start.dtype)


def rotate(x: Array, places: Array, angles: np.ndarray) -> Array:
    """Turns each pair (x_{2i}, x_{2i+1}) by angles_i a place.

        x' = x_{2i} cos(n θ_i) - x_{2i+1} sin(n θ_i),  y' = x_{2i} sin(n θ_i) + x_{2i+1} cos(n θ_i)

    The angle is counted in 2^-32 turns by whole numbers that wrap as turns do. So the product of a query and a key
    depends on their distance alone, to rounding, at any place; float32 angles would lose a digit with every ten times.

    Args:
      x: [B, T, heads, D], D even.
      places: int32 [B, T], n.
      angles: float64 [D/2], θ in radians.

    Returns:
      [B, T, heads, D] in the dtype of x; computed in float32, or float64 for float64.
    """
    dtype = accumulator_dtype(x.dtype)
    if dtype == jnp.float64:
        turned = places.astype(dtype)[..., None] * jnp.asarray(angles, dtype)[None, None]
    else:
        step = np.round(np.asarray(angles) / (2 * np.pi) % 1 * 2.0**32).astype(np.uint64).astype(np.uint32)
        turns = places.astype(jnp.uint32)[..., None] * jnp.asarray(step)[None, None]
        turned = lax.bitcast_convert_type(turns, jnp.int32).astype(dtype) * jnp.asarray(2 * np.pi / 2.0**32, dtype)
    cos, sin = jnp.cos(turned)[:, :, None], jnp.sin(turned)[:, :, None]
    even, odd = x[..., ::2].astype(dtype), x[..., 1::2].astype(dtype)
    pairs = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return pairs.reshape(x.shape).astype(x.dtype)

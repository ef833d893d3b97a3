"""Sequences without their masked tokens: for what counts neighbours, as short convolutions and sliding windows do.

Real tokens move to the front, in their order, so that neighbours are neighbours whatever pads stood between them; results
move back to where their tokens are.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Compaction(NamedTuple):
    """Where real tokens go and come from; every field None where nothing is masked."""

    mask: Array | None  # bool [B, T]
    order: Array | None  # int [B, T], for each place the token that moves there

    def gather(self, x: Array) -> Array:
        """x [B, T, …] with real tokens first and zeros after them."""
        if self.mask is None or self.order is None:
            return x
        return jnp.take_along_axis(jnp.where(_like(self.mask, x), x, jnp.zeros_like(x)), _like(self.order, x), axis=1)

    def restore(self, y: Array) -> Array:
        """y [B, T, …], of real tokens first, with every token's row where the token is, and zeros where one is masked."""
        if self.mask is None:
            return y
        rank = jnp.maximum(jnp.cumsum(self.mask, axis=1) - 1, 0)
        return jnp.where(_like(self.mask, y), jnp.take_along_axis(y, _like(rank, y), axis=1), jnp.zeros_like(y))

    def last(self, history: Array, size: int) -> Array:
        """The last `size` real tokens of history [B, size+T, …], which is what came before T compact ones and these."""
        if self.mask is None:
            return history[:, history.shape[1] - size :]
        place = self.mask.sum(axis=1)[:, None] + jnp.arange(size)[None]
        return jnp.take_along_axis(history, _like(place, history), axis=1)


def compact_tokens(mask: Array | None) -> Compaction:
    """From mask, bool [B, T] with True for a real token, or None."""
    # The sort is stable: real tokens keep their order.
    return Compaction(mask, None if mask is None else jnp.argsort(~mask, axis=1, stable=True))


def _like(x: Array, other: Array) -> Array:
    """x [B, T] with axes of size 1 up to the rank of other."""
    return x.reshape(*x.shape, *[1] * (other.ndim - 2))

"""The state of causal linear attention: what a sequence leaves behind, of a size that does not depend on its length."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class LinearAttentionState(NamedTuple):
    """The running sums S = Σ φ(k) vᵀ and Z = Σ φ(k), up to a factor exp(log_scale) a head.

    float32, or float64 for float64 inputs. Batch leads in every leaf, so ``jax.tree.map(lambda x: x[beams], state)``
    reorders, repeats or drops rows.
    """

    kv: Array  # [B, N, F, E]: S
    key_sum: Array  # [B, N, F]: Z, kept also when nothing is normalised
    log_scale: Array  # [B, N]: true sums are leaf · exp(log_scale); 0 for ordinary maps


def empty_state(batch: int, num_heads: int, num_features: int, value_dim: int, dtype) -> LinearAttentionState:
    return LinearAttentionState(
        kv=jnp.zeros((batch, num_heads, num_features, value_dim), dtype),
        key_sum=jnp.zeros((batch, num_heads, num_features), dtype),
        log_scale=jnp.zeros((batch, num_heads), dtype),
    )


def without_scale(state: LinearAttentionState) -> LinearAttentionState:
    """The same state with log_scale 0: what forms without a running scale go on from."""
    factor = jnp.exp(state.log_scale)
    return LinearAttentionState(
        state.kv * factor[..., None, None],
        state.key_sum * factor[..., None],
        vary_with(jnp.zeros_like(state.log_scale), state.log_scale),
    )


NOTHING = -1e30  # the log_scale of sums over no key: finite, so that differences are numbers, and far below any key's


def mark_empty(state: LinearAttentionState) -> LinearAttentionState:
    """The state with log_scale NOTHING where it is empty: 0 would be a scale, beside which smaller keys vanish."""
    used = jnp.any(state.key_sum != 0, axis=-1) | jnp.any(state.kv != 0, axis=(-2, -1))
    return state._replace(log_scale=jnp.where(used, state.log_scale, NOTHING))


def unmark_empty(state: LinearAttentionState) -> LinearAttentionState:
    """The state with log_scale 0 where it is still empty."""
    return state._replace(log_scale=jnp.where(state.log_scale > NOTHING / 2, state.log_scale, 0))


def vary_with(tree, *sources):
    """Gives the leaves of `tree` the varying axes of all arrays in `sources`, so that they can be a scan's carry.

    Inside `shard_map` zeros made here are the same on every device, and a carry must vary as the loop's results do.
    """
    scalars = [
        lax.stop_gradient(leaf[(slice(0, 1),) * leaf.ndim].reshape(()))
        for leaf in jax.tree.leaves(sources)
        if isinstance(leaf, Array) and leaf.size and _varying_axes(leaf)
    ]

    def vary(x):
        for scalar in scalars:
            x = jnp.where(jnp.zeros((), bool), scalar.astype(x.dtype), x)
        return x

    return jax.tree.map(vary, tree)


def _varying_axes(x: Array):
    """The axes of `shard_map` that x varies over; the name of the attribute differs between versions of jax."""
    kind = jax.typeof(x)
    return getattr(kind, "vma", None) or getattr(getattr(kind, "manual_axis_type", None), "varying", None)

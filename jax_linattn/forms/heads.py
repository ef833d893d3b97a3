"""How heads share the work: every product becomes one batched matrix product, and in common cases nothing is copied.

G groups of one key head each; in a group, either `r` query heads read one state head, or one query head reads `b` state
heads. So H = G·r, K = G, N = G·b and M = G·r·b, after what does not divide so has been repeated.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jax_linattn.forms.tokens import Rule, Tokens, decays_per_feature, has_scale
from jax_linattn.state import LinearAttentionState


class Sums(NamedTuple):
    """S and Z with their heads grouped."""

    kv: Array  # […, G, F, b·E]
    key_sum: Array  # […, G, b, F]


class Heads(NamedTuple):
    """The grouping of one call."""

    groups: int  # G
    queries: int  # r
    values: int  # b

    @classmethod
    def of(cls, num_query: int, num_key: int, num_value: int, *, own_keys: bool = False) -> "Heads":
        """The grouping of H, K and V heads; with `own_keys` every state head is a group, since its keys are its own.

        Grouped queries (K = V < H) and more value heads than key heads (H = K < V) share keys without a copy. Where
        queries and values both outnumber the keys, keys are repeated to the smaller of the two; queries and values fewer
        than the keys are repeated to them; so is everything where the numbers do not divide one another.
        """
        num_state = max(num_key, num_value)
        if num_query >= num_state:
            return cls(num_state, num_query // num_state, 1)
        if own_keys:
            return cls(num_state, 1, 1)
        groups = max(num_query, num_key)
        divide = num_state % groups == groups % num_query == groups % num_key == 0
        return cls(groups, 1, num_state // groups) if divide else cls(num_state, 1, 1)

    @classmethod
    def of_tokens(cls, rule: Rule, tokens: Tokens) -> "Heads":
        """The grouping of these tokens' heads. Decay a feature and running scales make keys their state head's own."""
        num_heads = tokens.query.shape[-2], tokens.key.shape[-2], tokens.value.shape[-2]
        return cls.of(*num_heads, own_keys=decays_per_feature(tokens) or has_scale(rule, tokens))

    @property
    def outputs(self) -> int:
        """M, the heads of the output."""
        return self.groups * self.queries * self.values

    def group_queries(self, q: Array) -> Array:
        """[…, T, H, F] to […, G, r·T, F]."""
        q = jnp.moveaxis(repeat_heads(q, self.groups * self.queries), -2, -3)
        return q.reshape(*q.shape[:-3], self.groups, self.queries * q.shape[-2], q.shape[-1])

    def group_keys(self, k: Array) -> Array:
        """[…, S, K, F] to […, G, S, F]."""
        return jnp.moveaxis(repeat_heads(k, self.groups), -2, -3)

    def group_values(self, v: Array) -> Array:
        """[…, S, V, E] to […, G, S, b·E]."""
        v = repeat_heads(v, self.groups * self.values)
        return jnp.moveaxis(v.reshape(*v.shape[:-2], self.groups, -1), -2, -3)

    def group_decays(self, x: Array) -> Array:
        """[…, T, N] to […, G, b, T]."""
        x = x.reshape(*x.shape[:-1], self.groups, self.values)
        return jnp.moveaxis(x, -3, -1)

    def split_queries(self, q: Array) -> Array:
        """[…, G, r·T, X] to […, G, r, T, X]."""
        return q.reshape(*q.shape[:-2], self.queries, q.shape[-2] // self.queries, q.shape[-1])

    def times_time(self, q: Array, factor: Array) -> Array:
        """Grouped queries […, G, r·T, X] times […, G, T, 1 or X]."""
        return (self.split_queries(q) * factor[..., None, :, :]).reshape(q.shape)

    def times_values(self, x: Array, factor: Array) -> Array:
        """Rows of queries or values, […, G, r·T or T, b·X], times […, G, T, b]; 0 where the factor is, whatever x."""
        split = x.reshape(*x.shape[:-2], -1, *factor.shape[-2:], x.shape[-1] // self.values)
        factor = factor[..., None, :, :, None]
        return jnp.where(factor == 0, 0, split * factor).reshape(x.shape)

    def weigh_values(self, rule: Rule, weights: Array, v: Array, ones: Array | None = None) -> tuple[Array, Array]:
        """Weights […, G, b or 1, r·C, S] times values […, G, S, b·E], as […, G, r·C, b·E]; and times ones […, G, b, S] or
        just summed, as […, G, r·C, b or 1]."""
        weighed = weights if ones is None else weights * ones[..., None, :]
        denominator = jnp.swapaxes(jnp.sum(weighed, axis=-1), -1, -2)
        if weights.shape[-3] == 1:
            return rule.einsum("...xc,...ce->...xe", weights[..., 0, :, :], v), denominator
        v = v.reshape(*v.shape[:-1], self.values, -1)
        numerator = rule.einsum("...vxc,...cve->...xve", weights, v)
        return numerator.reshape(*numerator.shape[:-2], -1), denominator

    def group_scales(self, scales: Sequence[Array | None]) -> Array | None:
        """The sum of logs […, T or 1, H or N], of which any may be None, as rows […, G, r·T, b]."""
        rows = sum_scales(scales, self.outputs)
        if rows is None:
            return None
        rows = rows.reshape(*rows.shape[:-1], self.groups, self.queries, self.values)
        rows = jnp.moveaxis(rows, -4, -2)  # […, G, r, T, b]
        return rows.reshape(*rows.shape[:-3], -1, self.values)

    def ungroup_outputs(self, o: Array) -> Array:
        """[…, G, r·T, b, E] to […, T, M, E]."""
        o = o.reshape(*o.shape[:-3], self.queries, o.shape[-3] // self.queries, *o.shape[-2:])
        o = jnp.moveaxis(o, -3, -5)
        return o.reshape(*o.shape[:-4], self.outputs, o.shape[-1])

    def where_time(self, mask: Array, q: Array) -> Array:
        """Grouped queries […, G, r·T, X], 0 where mask […, T or 1, X or 1] is False."""
        return jnp.where(mask[..., None, None, :, :], self.split_queries(q), 0).reshape(q.shape)

    def where_visible(self, visible: Array, weights: Array) -> Array:
        """Weights […, G, b or 1, r·T, S], 0 where visible […, T, S] is False."""
        return jnp.where(visible[..., None, None, None, :, :], self.split_queries(weights), 0).reshape(weights.shape)

    def group_state(self, state: LinearAttentionState) -> Sums:
        """kv [B, N, F, E] and key_sum [B, N, F], grouped."""
        batch, _, features, value_dim = state.kv.shape
        kv = state.kv.reshape(batch, self.groups, self.values, features, value_dim)
        kv = jnp.moveaxis(kv, 2, 3).reshape(batch, self.groups, features, self.values * value_dim)
        return Sums(kv, state.key_sum.reshape(batch, self.groups, self.values, features))

    def ungroup_state(self, sums: Sums, log_scale: Array) -> LinearAttentionState:
        """The inverse of `group_state`."""
        batch, features, num_heads = sums.kv.shape[0], sums.kv.shape[-2], self.groups * self.values
        kv = sums.kv.reshape(batch, self.groups, features, self.values, -1)
        kv = jnp.moveaxis(kv, 3, 2).reshape(batch, num_heads, features, -1)
        return LinearAttentionState(kv, sums.key_sum.reshape(batch, num_heads, features), log_scale)


def repeat_heads(x: Array, num_heads: int) -> Array:
    """[…, heads, F] to […, num_heads, F], each head repeated in place."""
    assert num_heads % x.shape[-2] == 0, (num_heads, x.shape)
    return x if x.shape[-2] == num_heads else jnp.repeat(x, num_heads // x.shape[-2], axis=-2)


def sum_scales(scales: Sequence[Array | None], num_heads: int) -> Array | None:
    """The sum of logs […, heads], each for fewer heads or as many, as […, num_heads]; None for no logs."""
    total = None
    for scale in scales:
        if scale is not None:
            scale = repeat_heads(scale[..., None], num_heads)[..., 0]
            total = scale if total is None else total + scale
    return total

"""How heads share the work: every product becomes one batched matrix product, and nothing is copied to more heads.

G groups of one key head each; a group has `a` query groups, and in each either `r` query heads that read one state head,
or one query head that reads `b` state heads. So H = G·a·r, N = G·a·b and M = G·a·r·b.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jax_linattn.forms.tokens import Tokens
from jax_linattn.state import LinearAttentionState


class Sums(NamedTuple):
    """S and Z with their heads grouped."""

    kv: Array  # […, G, a, F, b·E]
    key_sum: Array  # […, G, a, b, F]


class Heads(NamedTuple):
    """The grouping of one call."""

    groups: int
    per_group: int
    queries: int
    values: int

    @classmethod
    def of(cls, num_query: int, num_key: int, num_value: int) -> "Heads":
        """The grouping of H, K and V heads.

        Key heads lead it. Queries that are fewer than key heads, or do not divide by them, and values that are fewer than
        key heads, are repeated when they are grouped.
        """
        num_state = max(num_key, num_value)
        values_per_key = num_state // num_key
        if num_query >= num_state:
            return cls(num_key, values_per_key, num_query // num_state, 1)
        if num_query % num_key == 0:
            return cls(num_key, num_query // num_key, 1, num_state // num_query)
        if num_key % num_query == 0:
            return cls(num_key, 1, 1, values_per_key)
        return cls(num_key, values_per_key, 1, 1)

    @classmethod
    def of_tokens(cls, tokens: Tokens) -> "Heads":
        """The grouping of these tokens' heads."""
        return cls.of(tokens.query.shape[-2], tokens.key.shape[-2], tokens.value.shape[-2])

    @property
    def num_query(self) -> int:
        return self.groups * self.per_group * self.queries

    @property
    def num_state(self) -> int:
        return self.groups * self.per_group * self.values

    def group_queries(self, q: Array) -> Array:
        """[…, T, H, F] to […, G, a, r·T, F]."""
        q = jnp.moveaxis(repeat_heads(q, self.num_query), -2, -3)
        return q.reshape(*q.shape[:-3], self.groups, self.per_group, self.queries * q.shape[-2], q.shape[-1])

    def group_keys(self, k: Array) -> Array:
        """[…, S, K, F] to […, G, S, F]."""
        return jnp.moveaxis(k, -2, -3)

    def group_values(self, v: Array) -> Array:
        """[…, S, V, E] to […, G, a, S, b·E]."""
        v = repeat_heads(v, self.num_state)
        v = v.reshape(*v.shape[:-2], self.groups, self.per_group, self.values * v.shape[-1])
        return jnp.moveaxis(v, -4, -2)

    def ungroup_outputs(self, o: Array) -> Array:
        """[…, G, a, r·T, b, E] to […, T, M, E]."""
        o = o.reshape(*o.shape[:-3], self.queries, o.shape[-3] // self.queries, *o.shape[-2:])
        o = jnp.moveaxis(o, -3, -6)
        return o.reshape(*o.shape[:-5], math.prod(o.shape[-5:-1]), o.shape[-1])

    def where_time(self, mask: Array, q: Array) -> Array:
        """Grouped queries […, G, a, r·T, X], 0 where mask […, T or 1, X or 1] is False."""
        split = q.reshape(*q.shape[:-2], self.queries, q.shape[-2] // self.queries, q.shape[-1])
        return jnp.where(mask[..., None, None, None, :, :], split, 0).reshape(q.shape)

    def group_state(self, state: LinearAttentionState) -> Sums:
        """kv [B, N, F, E] and key_sum [B, N, F], grouped."""
        batch, _, features, value_dim = state.kv.shape
        kv = state.kv.reshape(batch, self.groups, self.per_group, self.values, features, value_dim)
        kv = jnp.moveaxis(kv, 3, 4).reshape(batch, self.groups, self.per_group, features, self.values * value_dim)
        return Sums(kv, state.key_sum.reshape(batch, self.groups, self.per_group, self.values, features))

    def ungroup_state(self, sums: Sums, log_scale: Array) -> LinearAttentionState:
        """The inverse of `group_state`."""
        batch, num_heads, features = sums.kv.shape[0], self.num_state, sums.kv.shape[-2]
        kv = sums.kv.reshape(batch, self.groups, self.per_group, features, self.values, -1)
        kv = jnp.moveaxis(kv, 4, 3).reshape(batch, num_heads, features, -1)
        return LinearAttentionState(kv, sums.key_sum.reshape(batch, num_heads, features), log_scale)


def repeat_heads(x: Array, num_heads: int) -> Array:
    """[…, heads, F] to […, num_heads, F], each head repeated in place."""
    return x if x.shape[-2] == num_heads else jnp.repeat(x, num_heads // x.shape[-2], axis=-2)

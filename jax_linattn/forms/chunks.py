"""Attention inside chunks, and between chunks through the sums that each leaves behind: all forms but the recurrent.

Letters of the products: n chunks, b batch, g groups of heads (`heads.py`), c keys of a chunk, f features; x the r·C queries
of a group, e the b·E values of a group, v its b state heads.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from jax_linattn.forms.heads import Heads, Sums
from jax_linattn.forms.ratio import finish
from jax_linattn.forms.tokens import Rule, Tokens, clean, key_features, query_features

Prefix = Callable[[Sums, Array | None, Sums], tuple[Sums, Sums]]


def attend(
    tokens: Tokens, sums: Sums, run: Array | None, rule: Rule, heads: Heads, prefix: Prefix
) -> tuple[Sums, Array | None, Array]:
    """Causal attention over n chunks of C tokens.

    Args:
      tokens: every array [n, B, C, …].
      sums: S and Z before the first chunk, without an axis n.
      run: the run that they belong to, [B], or None.
      rule: how tokens become an output.
      heads: how the heads are grouped.
      prefix: from each chunk's own sums [n, B, …], whether they continue what came before (bool [n, B] or None), and
        the sums before all, gives the sums before each chunk [n, B, …] and after the last.

    Returns:
      (sums after the last chunk, its run, output [n, B, C, M, E]).
    """
    q = heads.group_queries(query_features(rule, tokens))
    k = heads.group_keys(key_features(rule, tokens))
    v = heads.group_values(clean(tokens.value, tokens.key_mask))
    visible = jnp.tril(jnp.ones((1, 1, k.shape[-2], k.shape[-2]), bool))
    k_left, q_before, keep, continues = k, q, None, None
    if run is not None:
        runs = tokens.key_segment  # [n, B, C]
        visible = visible & (runs[..., :, None] == runs[..., None, :])
        before, last = jnp.concatenate([run[None], runs[:-1, :, -1]]), runs[..., -1]  # [n, B]
        keep, run = before == last, last[-1]
        k_left = jnp.where((runs == last[..., None])[..., None, :, None], k, 0)
        continues = (runs == before[..., None])[..., None]  # [n, B, C, 1]: whether a token sees the sums before its chunk
        q_before = heads.where_time(continues, q)
    weights = heads.where_time(visible, rule.einsum("nbgxf,nbgcf->nbgxc", q, k))
    sums_before, sums = prefix(key_value_sums(rule, k_left, v, heads), keep, sums)
    read_kv, read_key_sum = read(rule, q_before, sums_before), read_normalizer(rule, q_before, sums_before)
    if continues is not None:  # once more: 0 · inf of another segment's overflow is not 0
        read_kv, read_key_sum = heads.where_time(continues, read_kv), heads.where_time(continues, read_key_sum)
    numerator = rule.einsum("nbgxc,nbgce->nbgxe", weights, v) + read_kv
    denominator = jnp.sum(weights, axis=-1)[..., None] + read_key_sum
    return sums, run, output(rule, numerator, denominator, tokens, heads)


def key_value_sums(rule: Rule, k: Array, v: Array, heads: Heads) -> Sums:
    """S and Z of grouped keys [n, B, G, C, F] and values [n, B, G, C, b·E], over C."""
    key_sum = jnp.broadcast_to(jnp.sum(k, axis=-2)[..., None, :], (*k.shape[:3], heads.values, k.shape[-1]))
    return Sums(rule.einsum("nbgcf,nbgce->nbgfe", k, v), key_sum)


def read(rule: Rule, q: Array, sums: Sums) -> Array:
    """φ(q)ᵀS: [n, B, G, r·C, b·E]."""
    return rule.einsum("nbgxf,nbgfe->nbgxe", q, sums.kv)


def read_normalizer(rule: Rule, q: Array, sums: Sums) -> Array:
    """φ(q)ᵀZ: [n, B, G, r·C, b]."""
    return rule.einsum("nbgxf,nbgvf->nbgxv", q, sums.key_sum)


def output(rule: Rule, numerator: Array, denominator: Array, tokens: Tokens, heads: Heads) -> Array:
    """The output [n, B, C, M, E] of grouped sums [n, B, G, r·C, b·E] and [n, B, G, r·C, b]."""
    numerator = numerator.reshape(*denominator.shape[:-1], heads.values, -1)
    o = heads.ungroup_outputs(finish(rule, numerator, jnp.broadcast_to(denominator, numerator.shape[:-1])))
    return clean(o, tokens.query_mask).astype(tokens.query.dtype)


def follow(own: Sums, keep: Array | None, sums: Sums) -> Sums:
    """The sums after one chunk: its own, on top of those before it where they belong to the same run."""

    def add(own, before):
        if keep is not None:
            before = jnp.where(keep.reshape(*keep.shape, *[1] * (own.ndim - keep.ndim)), before, 0)
        return before + own

    return Sums(*map(add, own, sums))


def prefix_in_turn(own: Sums, keep: Array | None, sums: Sums) -> tuple[Sums, Sums]:
    """One chunk after another."""

    def after(sums, chunk):
        own, keep = chunk
        return follow(own, keep, sums), sums

    sums, sums_before = lax.scan(after, sums, (own, keep))
    return sums_before, sums

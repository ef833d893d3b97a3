"""Attention inside chunks, and between chunks through the sums that each leaves behind: all forms but the recurrent.

Letters of the products: n chunks, b batch, g groups of heads (`heads.py`), c keys of a chunk, f features; x the r·C queries
of a group, e the b·E values of a group, v its b state heads.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_linattn.forms import scale
from jax_linattn.forms.decay import DecayPerFeature, DecayPerHead, NoDecay
from jax_linattn.forms.heads import Heads, Sums, repeat_heads
from jax_linattn.forms.ratio import finish
from jax_linattn.forms.tokens import (
    Rule,
    Tokens,
    clean,
    decays_per_feature,
    has_scale,
    initial_carry,
    key_features,
    log_decays,
    query_features,
)
from jax_linattn.state import LinearAttentionState, unmark_empty

Prefix = Callable[[Sums, Array | None, Sums], tuple[Sums, Sums]]


class Carry(NamedTuple):
    """What goes from chunk to chunk."""

    sums: Sums
    run: Array | None  # [B]: which run of equal ids the sums belong to
    log_scale: Array | None  # [B, N]: what they are relative to, where keys have a scale


def start(rule: Rule, tokens: Tokens, state: LinearAttentionState, heads: Heads) -> Carry:
    state, run = initial_carry(rule, tokens, state)
    return Carry(heads.group_state(state), run, state.log_scale if has_scale(rule, tokens) else None)


def end(carry: Carry, heads: Heads) -> LinearAttentionState:
    if carry.log_scale is not None:
        return unmark_empty(heads.ungroup_state(carry.sums, carry.log_scale))
    batch, num_heads = carry.sums.kv.shape[0], heads.groups * heads.values
    return heads.ungroup_state(carry.sums, jnp.zeros_like(carry.sums.key_sum, shape=(batch, num_heads)))


def attend(tokens: Tokens, carry: Carry, rule: Rule, heads: Heads, prefix: Prefix) -> tuple[Carry, Array]:
    """Causal attention over n chunks of C tokens.

    Args:
      tokens: every array [n, B, C, …].
      carry: what comes before the first chunk, without an axis n.
      rule: how tokens become an output.
      heads: how the heads are grouped.
      prefix: from each chunk's own sums [n, B, …], the share of what came before that is left after it (as `follow` takes
        it), and the sums before all, gives the sums before each chunk [n, B, …] and after the last.

    Returns:
      (what comes after the last chunk, output [n, B, C, M, E]).
    """
    q, k, decay, query_scale, key_scale = features(tokens, carry, rule, heads)
    log_scale = None if key_scale is None else key_scale[-1, :, -1]
    q, k, v, ones = decay.start(q, k, heads.group_values(clean(tokens.value, tokens.key_mask)))
    visible = jnp.tril(jnp.ones((1, 1, k.shape[-2], k.shape[-2]), bool))
    k_left, q_before, left, continues, run = k, q, decay.total, None, carry.run
    if run is not None:
        runs = tokens.key_segment  # [n, B, C]
        visible = visible & (runs[..., :, None] == runs[..., None, :])
        before, last = jnp.concatenate([run[None], runs[:-1, :, -1]]), runs[..., -1]  # [n, B]
        keep, run = (before == last)[..., None, None, None], last[-1]
        left = keep.astype(k.dtype) if left is None else jnp.where(keep, left, 0)
        k_left = jnp.where((runs == last[..., None])[..., None, :, None], k, 0)
        continues = (runs == before[..., None])[..., None]  # [n, B, C, 1]: whether a token sees the sums before its chunk
        q_before = heads.where_time(continues, q)
    weights = heads.where_visible(visible, decay.weights(rule, q, k))
    sums_before, sums = prefix(decay.sums(rule, k_left, v, ones), left, carry.sums)
    read_kv, read_key_sum = decay.read(rule, q_before, sums_before)
    if continues is not None:  # once more: 0 · inf of another segment's overflow is not 0
        read_kv, read_key_sum = heads.where_time(continues, read_kv), heads.where_time(continues, read_key_sum)
    numerator, denominator = heads.weigh_values(rule, weights, v, ones)
    scales = [query_scale, key_scale, decay.row_logs]
    o = output(rule, numerator + read_kv, denominator + read_key_sum, tokens, heads, scales)
    return Carry(shrink(sums, decay.at_end), run, log_scale), o


def features(tokens: Tokens, carry: Carry, rule: Rule, heads: Heads):
    """What `attend` starts from.

    Returns:
      (φ(q) [n, B, G, r·C, F], φ(k) [n, B, G, C, F], how they decay, and the logs of what queries and keys are relative to:
      [n, B, C, H] and [n, B, C, N], or None).
    """
    (q, query_scale), (k, key_scale) = query_features(rule, tokens), key_features(rule, tokens)
    log_decay, per_feature = log_decays(tokens), decays_per_feature(tokens)
    if key_scale is not None and carry.log_scale is not None:
        k, log_decay, key_scale = _relative(k, key_scale, log_decay, tokens, carry.run, carry.log_scale)
    elif log_decay is not None:
        log_decay = _forget_at_starts(log_decay, tokens, carry.run)
    if log_decay is None:
        decay = NoDecay(heads)
    else:
        decay = DecayPerFeature.of(heads, log_decay) if per_feature else DecayPerHead.of(heads, log_decay)
    return heads.group_queries(q), heads.group_keys(k), decay, query_scale, key_scale


def relative_to_largest(k: Array, key_scale: Array, before: Array) -> tuple[Array, Array]:
    """Keys [n, B, C, K, F] relative to the largest of their scales [n, B, C, K] and of `before` [B, N], and that scale."""
    k, key_scale = _repeat_keys(k, key_scale, before.shape[-1])
    after = lax.stop_gradient(jnp.maximum(before, jnp.max(key_scale, axis=(0, 2))))
    return k * jnp.exp(key_scale - after[None, :, None])[..., None], after


def _repeat_keys(k: Array, key_scale: Array, num_heads: int) -> tuple[Array, Array]:
    return repeat_heads(k, num_heads), repeat_heads(key_scale[..., None], num_heads)[..., 0]


def _relative(k: Array, key_scale: Array, log_decay: Array | None, tokens: Tokens, run: Array | None, before: Array):
    """(keys relative to the running scale, the decay that this makes, the running scale after each token)."""
    k, key_scale = _repeat_keys(k, key_scale, before.shape[-1])
    per_feature = decays_per_feature(tokens)
    log_decay = jnp.zeros_like(key_scale) if log_decay is None else log_decay
    log_decay = _forget_at_starts(log_decay, tokens, run)
    largest = jnp.max(log_decay, axis=-1) if per_feature else log_decay
    before, after = scale.after_tokens(before, key_scale, largest)
    move = before - after
    return k * jnp.exp(key_scale - after)[..., None], log_decay + (move[..., None] if per_feature else move), after


def _forget_at_starts(log_decay: Array, tokens: Tokens, run: Array | None) -> Array:
    """Log decays [n, B, C, …], -inf where another run of ids begins; `run` is the one before the first chunk."""
    if run is None:
        return log_decay
    runs = tokens.key_segment
    last_of_chunks = jnp.concatenate([run[None], runs[:-1, :, -1]])
    previous = jnp.concatenate([last_of_chunks[..., None], runs[..., :-1]], axis=-1)
    starts = (runs != previous).reshape(*runs.shape, *[1] * (log_decay.ndim - runs.ndim))
    return jnp.where(starts, -jnp.inf, log_decay)


def output(
    rule: Rule,
    numerator: Array,
    denominator: Array,
    tokens: Tokens,
    heads: Heads,
    scales: list[Array | None],
) -> Array:
    """The output [n, B, C, M, E] of grouped sums.

    Args:
      rule: how sums become an output.
      numerator: φ(q)ᵀS, [n, B, G, r·C, b·E].
      denominator: φ(q)ᵀZ, [n, B, G, r·C, b].
      tokens: for their masks and dtype.
      heads: how the heads are grouped.
      scales: logs of what the sums are relative to, each [n, B, C or 1, H or N], or None.
    """
    numerator = numerator.reshape(*denominator.shape[:-1], heads.values, -1)
    log_scale = heads.group_scales(scales)
    o = heads.ungroup_outputs(finish(rule, numerator, jnp.broadcast_to(denominator, numerator.shape[:-1]), log_scale))
    return clean(o, tokens.query_mask).astype(tokens.query.dtype)


def follow(own: Sums, left: Array | None, sums: Sums) -> Sums:
    """The sums after one chunk: its own, on top of what is left of those before it."""
    return jax.tree.map(jnp.add, shrink(sums, left), own)


def shrink(sums: Sums, left: Array | None) -> Sums:
    """What is left of sums. For a key_sum […, b, F], `left` is […, b or 1, F or 1], or None for all; 0 is nothing, whatever
    the sums."""
    if left is None:
        return sums
    num_values = sums.key_sum.shape[-2]
    kv = sums.kv.reshape(*sums.kv.shape[:-1], num_values, sums.kv.shape[-1] // num_values)  # […, F, b, E]
    left_kv = jnp.swapaxes(left, -1, -2)[..., None]
    kv = jnp.where(left_kv == 0, 0, kv * left_kv).reshape(sums.kv.shape)
    return Sums(kv, jnp.where(left == 0, 0, sums.key_sum * left))


def prefix_in_turn(own: Sums, left: Array | None, sums: Sums) -> tuple[Sums, Sums]:
    """One chunk after another."""

    def after(sums, chunk):
        own, left = chunk
        return follow(own, left, sums), sums

    sums, sums_before = lax.scan(after, sums, (own, left))
    return sums_before, sums

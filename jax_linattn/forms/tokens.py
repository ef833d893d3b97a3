"""What every form starts from: tokens, the rule that reads them, and their features.

Axes: B batch, T query time, S key time, D query/key head dim, F feature dim, E value head dim, C chunk length;
heads: H query, K key, V value, N = max(K, V) state heads, M = max(H, N) output heads.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_linattn import feature_maps
from jax_linattn.dtypes import accumulator_dtype
from jax_linattn.state import NOTHING, LinearAttentionState, mark_empty, vary_with, without_scale


class Tokens(NamedTuple):
    """Queries, keys and values before φ, with what hides them. Batch leads, time is axis 1; one token has no time axis,
    and of a block (`forms/blocks.py`) every array is [n, B, C, …].
    Where a pass is over queries or keys alone, the other side's fields are None.

    In causal forms `query_segment` is `key_segment`, a count of the runs of equal ids: 0 is the run that the carried
    state belongs to, and None means that all belong to it.
    """

    query: Any  # [B, T, H, D]
    key: Any  # [B, S, K, D]
    value: Any  # [B, S, V, E]
    query_mask: Array | None = None  # bool [B, T]
    key_mask: Array | None = None  # bool [B, S]
    query_segment: Any = None  # int32 [B, T], or None
    key_segment: Any = None  # int32 [B, S], or None
    log_decay: Any = None  # [B, T, N] or [B, T, N, F], or None; in causal forms alone

    def queries(self) -> "Tokens":
        return self._replace(key=None, value=None, key_mask=None, key_segment=None)

    def keys(self) -> "Tokens":
        return self._replace(query=None, query_mask=None, query_segment=None)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["feature_map", "scale"],
    meta_fields=["normalize", "eps", "precision"],
)
@dataclasses.dataclass(frozen=True)
class Rule:
    """How tokens become an output: everything that is the same for all of them."""

    feature_map: Any
    scale: Any  # a number or a scalar array; None = 1
    normalize: bool
    eps: float
    precision: Any

    def einsum(self, *args) -> Array:
        return jnp.einsum(*args, precision=self.precision)


def clean(x: Array, mask: Array | None, fill: float = 0) -> Array:
    """x in the dtype of sums, and `fill` where a token is masked: what a pad holds, NaN and inf included, ends here."""
    x = x.astype(accumulator_dtype(x.dtype))
    return x if mask is None else jnp.where(mask[..., None, None], x, fill)


# What maps are given in place of a masked token. Not 0: a map that divides by a norm or a sum has no derivative there, and
# 0 · NaN would reach the gradients of everything else.
FILL = 1


def key_features(rule: Rule, tokens: Tokens) -> tuple[Array, Array | None]:
    """φ(k) [..., K, F], 0 for a masked token, and the log of the scale that is apart, [..., K], there NOTHING."""
    _, key_map = feature_maps.split(rule.feature_map)
    features, log_scale = _apart(key_map(clean(tokens.key, tokens.key_mask, FILL)))
    if log_scale is not None and tokens.key_mask is not None:
        log_scale = jnp.where(tokens.key_mask[..., None], log_scale, NOTHING)
    return clean(features, tokens.key_mask), log_scale


def query_features(rule: Rule, tokens: Tokens) -> tuple[Array, Array | None]:
    """φ(q) [..., H, F] and the log of the scale that is apart, [..., H].

    Where the exact normaliser takes a row's size out again, there is no scale, and rows are brought to size 1 by a power
    of two.
    """
    query_map, _ = feature_maps.split(rule.feature_map)
    features, log_scale = _apart(query_map(clean(tokens.query, tokens.query_mask, FILL)))
    if rule.normalize and rule.eps == 0:
        return features * _inverse_power_of_two(jnp.max(jnp.abs(features), axis=-1, keepdims=True)), None
    return features, log_scale


def _apart(features) -> tuple[Array, Array | None]:
    return features if isinstance(features, tuple) else (features, None)


def has_scale(rule: Rule, tokens: Tokens) -> bool:
    """Whether key features come with a scale of their own."""
    _, key_map = feature_maps.split(rule.feature_map)
    dtype = accumulator_dtype(tokens.key.dtype)
    return isinstance(jax.eval_shape(key_map, jax.ShapeDtypeStruct((1, *tokens.key.shape[-2:]), dtype)), tuple)


def log_decays(tokens: Tokens) -> Array | None:
    """The log decay of each token in the dtype of sums; 0 for a masked one, which is no token."""
    log_decay = tokens.log_decay
    if log_decay is None:
        return None
    log_decay = log_decay.astype(accumulator_dtype(tokens.key.dtype))
    if tokens.key_mask is None:
        return log_decay
    return jnp.where(
        tokens.key_mask.reshape(*tokens.key_mask.shape, *[1] * (log_decay.ndim - tokens.key_mask.ndim)), log_decay, 0
    )


def decays_per_feature(tokens: Tokens) -> bool:
    return tokens.log_decay is not None and tokens.log_decay.ndim == tokens.key.ndim


def _inverse_power_of_two(x: Array) -> Array:
    """2^-⌊log₂ x⌋, exact and without a gradient, for x >= 0; the nearest normal float where that is none."""
    x = lax.stop_gradient(x)
    bits = {4: jnp.uint32, 8: jnp.uint64}[x.dtype.itemsize]
    mantissa_bits = jnp.finfo(x.dtype).nmant
    largest = (1 << (8 * x.dtype.itemsize - 1 - mantissa_bits)) - 2  # the exponent field of the largest finite floats
    exponent = lax.bitcast_convert_type(x, bits) >> bits(mantissa_bits)
    inverse = bits(largest) - jnp.clip(exponent, bits(0), bits(largest - 1))
    return lax.bitcast_convert_type(inverse << bits(mantissa_bits), x.dtype)


def initial_carry(rule: Rule, tokens: Tokens, state: LinearAttentionState):
    """(state, run): the carry before the first token; `run` is the [B] index of the run the state belongs to, or None."""
    runs = tokens.key_segment
    run = None if runs is None else vary_with(jnp.zeros_like(runs[:, 0]), runs)  # as the runs that follow it vary
    return vary_with(enter_state(rule, tokens, state), tokens, rule), run


def enter_state(rule: Rule, tokens: Tokens, state: LinearAttentionState) -> LinearAttentionState:
    """The state as forms go on from it: with a running scale where keys have one, and without elsewhere.

    `unmark_empty` is its counterpart.
    """
    return mark_empty(state) if has_scale(rule, tokens) else without_scale(state)


def count_runs(segment_ids: Array, first: Array) -> Array:
    """Which run of equal ids each token is in, [B, T]; run 0 is the one with the id `first` [B] before all tokens."""
    previous = jnp.concatenate([first[:, None], segment_ids[:, :-1]], axis=1)
    return jnp.cumsum(segment_ids != previous, axis=1, dtype=jnp.int32)

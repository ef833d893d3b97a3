"""The quadratic form: the T×S weights as they stand. For very short sequences, for tests, and for looking at."""

import jax
import jax.numpy as jnp
from jax import Array

from jax_linattn.forms import chunks
from jax_linattn.forms.decay import NoDecay
from jax_linattn.forms.heads import Heads, Sums
from jax_linattn.forms.ratio import finish
from jax_linattn.forms.tokens import Rule, Tokens, clean, decays_per_feature, has_scale, key_features, query_features
from jax_linattn.state import LinearAttentionState


def causal(tokens: Tokens, state: LinearAttentionState, rule: Rule, chunk_size: int) -> tuple[LinearAttentionState, Array]:
    """One chunk as long as the sequence; `chunk_size` plays no part."""
    del chunk_size
    heads = Heads.of_tokens(rule, tokens)
    one_chunk = jax.tree.map(lambda x: x[None], tokens)
    carry, output = chunks.attend(one_chunk, chunks.start(rule, tokens, state, heads), rule, heads, _no_prefix)
    return chunks.end(carry, heads), output[0]


def bidirectional(tokens: Tokens, state: LinearAttentionState, rule: Rule, chunk_size: int) -> Array:
    """All weights at once, of the empty `state`'s heads; `chunk_size` plays no part."""
    del chunk_size
    heads = Heads.of_tokens(rule, tokens)
    weights, scales = _weights(tokens, state, rule, heads, is_causal=False)
    tokens = jax.tree.map(lambda x: x[None], tokens)
    v = heads.group_values(clean(tokens.value, tokens.key_mask))
    return chunks.output(rule, *heads.weigh_values(rule, weights, v), tokens, heads, scales)[0]


def row_weights(tokens: Tokens, state: LinearAttentionState, rule: Rule, is_causal: bool) -> Array:
    """The weights of each query's row, normalised: [B, M, T, S] with the state heads of the empty `state`.

    The values in `tokens` are not read.
    """
    num_heads = state.key_sum.shape[1]
    own_keys = decays_per_feature(tokens) or has_scale(rule, tokens)
    heads = Heads.of(tokens.query.shape[-2], tokens.key.shape[-2], num_heads, own_keys=own_keys)
    num_outputs = heads.groups * heads.queries * heads.values
    shape = (tokens.query.shape[0], num_outputs, tokens.query.shape[1], tokens.key.shape[1])
    if 0 in shape:
        return jnp.zeros(shape, tokens.query.dtype)
    weights, scales = _weights(tokens, state, rule, heads, is_causal)
    log_scale = heads.group_scales(scales)  # [1, B, G, r·T, b]
    log_scale = None if log_scale is None else jnp.swapaxes(log_scale, -1, -2)
    weights = finish(rule, weights, jnp.sum(weights, axis=-1), log_scale).reshape(shape)  # from [1, B, G, b, r·T, S]
    if tokens.query_mask is not None:
        weights = jnp.where(tokens.query_mask[:, None, :, None], weights, 0)
    return weights.astype(tokens.query.dtype)


def _weights(tokens: Tokens, state: LinearAttentionState, rule: Rule, heads: Heads, is_causal: bool):
    """(φ(q)·φ(k) with its decay [1, B, G, b or 1, r·T, S], 0 where a query does not see a key; and the logs of what queries
    and keys are relative to, for `Heads.group_scales`)."""
    carry = chunks.start(rule, tokens, state, heads)
    tokens = jax.tree.map(lambda x: x[None], tokens)
    visible = jnp.ones((1, 1, 1, 1), bool)
    if is_causal:
        q, k, decay, *scales = chunks.features(tokens, carry, rule, heads)
        scales.append(decay.row_logs)
        q, k, _, ones = decay.start(q, k, jnp.zeros((*k.shape[:-1], heads.values), k.dtype))
        visible = jnp.tril(jnp.ones((1, 1, k.shape[-2], k.shape[-2]), bool))
    else:
        (q, query_scale), (k, key_scale) = query_features(rule, tokens), key_features(rule, tokens)
        if key_scale is not None and carry.log_scale is not None:
            k, largest = chunks.relative_to_largest(k, key_scale, carry.log_scale)
            key_scale = largest[None, :, None]
        q, k, decay, ones = heads.group_queries(q), heads.group_keys(k), NoDecay(heads), None
        scales = [query_scale, key_scale]
    if tokens.key_segment is not None:
        visible = visible & (tokens.query_segment[..., :, None] == tokens.key_segment[..., None, :])
    weights = decay.weights(rule, q, k)
    weights = weights if ones is None else weights * ones[..., None, :]
    return heads.where_visible(visible, weights), scales


def _no_prefix(own: Sums, left: Array | None, sums: Sums) -> tuple[Sums, Sums]:
    """What lies before the one chunk, and after it."""
    own, left = jax.tree.map(lambda x: x[0], (own, left))
    return jax.tree.map(lambda x: x[None], sums), chunks.follow(own, left, sums)

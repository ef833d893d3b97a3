"""The quadratic form: the T×S weights as they stand. For very short sequences, for tests, and for looking at."""

import jax
import jax.numpy as jnp
from jax import Array

from jax_linattn.forms import chunks
from jax_linattn.forms.heads import Heads, Sums
from jax_linattn.forms.ratio import divide
from jax_linattn.forms.tokens import Rule, Tokens, clean, initial_carry, key_features, query_features
from jax_linattn.state import LinearAttentionState


def causal(tokens: Tokens, state: LinearAttentionState, rule: Rule, chunk_size: int) -> tuple[LinearAttentionState, Array]:
    """One chunk as long as the sequence; `chunk_size` plays no part."""
    del chunk_size
    heads = Heads.of_tokens(tokens)
    state, run = initial_carry(rule, tokens, state)
    one_chunk = jax.tree.map(lambda x: x[None], tokens)
    sums, _, output = chunks.attend(one_chunk, heads.group_state(state), run, rule, heads, _no_prefix)
    return heads.ungroup_state(sums, state.log_scale), output[0]


def bidirectional(tokens: Tokens, state: LinearAttentionState, rule: Rule, chunk_size: int) -> Array:
    """All weights at once; the empty `state` and `chunk_size` play no part."""
    del state, chunk_size
    heads = Heads.of_tokens(tokens)
    tokens = jax.tree.map(lambda x: x[None], tokens)
    weights = _weights(tokens, rule, heads, is_causal=False)
    v = heads.group_values(clean(tokens.value, tokens.key_mask))
    numerator = rule.einsum("nbgxs,nbgse->nbgxe", weights, v)
    return chunks.output(rule, numerator, jnp.sum(weights, axis=-1)[..., None], tokens, heads)[0]


def row_weights(tokens: Tokens, rule: Rule, is_causal: bool) -> Array:
    """The weights of each query's row, normalised: [B, max(H, K), T, S]. The values in `tokens` are not read."""
    num_query, num_key = tokens.query.shape[-2], tokens.key.shape[-2]
    heads = Heads.of(num_query, num_key, num_key)
    tokens = jax.tree.map(lambda x: x[None], tokens)
    weights = _weights(tokens, rule, heads, is_causal)[0]  # [B, G, r·T, S]
    weights = weights.reshape(weights.shape[0], max(num_query, num_key), tokens.query.shape[2], weights.shape[-1])
    weights = divide(weights, jnp.sum(weights, axis=-1, keepdims=True) + rule.eps)
    if tokens.query_mask is not None:
        weights = jnp.where(tokens.query_mask[0, :, None, :, None], weights, 0)
    return weights.astype(tokens.query.dtype)


def _weights(tokens: Tokens, rule: Rule, heads: Heads, is_causal: bool) -> Array:
    """φ(q)·φ(k) [1, B, G, r·T, S], 0 where a query does not see a key."""
    q = heads.group_queries(query_features(rule, tokens))
    k = heads.group_keys(key_features(rule, tokens))
    weights = rule.einsum("nbgxf,nbgsf->nbgxs", q, k)
    if is_causal:
        weights = heads.where_time(jnp.tril(jnp.ones((1, 1, k.shape[-2], k.shape[-2]), bool)), weights)
    if tokens.key_segment is not None:
        weights = heads.where_time(tokens.query_segment[..., :, None] == tokens.key_segment[..., None, :], weights)
    return weights


def _no_prefix(own: Sums, keep: Array | None, sums: Sums) -> tuple[Sums, Sums]:
    """What lies before the one chunk, and after it."""
    own, keep = jax.tree.map(lambda x: x[0], (own, keep))
    return jax.tree.map(lambda x: x[None], sums), chunks.follow(own, keep, sums)

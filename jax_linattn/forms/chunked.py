"""The chunked form: matrix products inside a chunk, a running state between chunks. The default for training."""

import jax
import jax.numpy as jnp
from jax import Array

from jax_linattn.forms import chunks
from jax_linattn.forms.blocks import Blocks
from jax_linattn.forms.decay import NoDecay
from jax_linattn.forms.heads import Heads
from jax_linattn.forms.tokens import (
    Rule,
    Tokens,
    clean,
    count_runs,
    decays_per_feature,
    key_features,
    query_features,
)
from jax_linattn.selection import select_chunks_per_block
from jax_linattn.state import LinearAttentionState


def causal(tokens: Tokens, state: LinearAttentionState, rule: Rule, chunk_size: int) -> tuple[LinearAttentionState, Array]:
    """Blocks of a few chunks in turn; the chunks of a block run in parallel, and a gradient keeps a state a block."""
    heads = Heads.of_tokens(rule, tokens)
    per_block = select_chunks_per_block(
        state.kv.shape, chunk_size, backend=jax.default_backend(), decay_per_feature=decays_per_feature(tokens)
    )
    blocks = Blocks.of(tokens, chunk_size, per_block)

    def attend_block(carry, block):
        return chunks.attend(blocks.read(block, carry.run), carry, rule, heads, chunks.prefix_in_turn)

    carry, output = blocks.loop(
        blocks.recompute(attend_block), chunks.start(rule, tokens, state, heads), (heads.outputs, state.kv.shape[-1])
    )
    return chunks.end(carry, heads), output


def bidirectional(tokens: Tokens, state: LinearAttentionState, rule: Rule, chunk_size: int) -> Array:
    """One pass over the keys for S and Z, on top of the empty `state`; one over the queries to read them."""
    if tokens.key_segment is not None:
        return _bidirectional_by_segment(tokens, state, rule, chunk_size)
    heads = Heads.of_tokens(rule, tokens)
    no_decay = NoDecay(heads)
    block_length = chunk_size * select_chunks_per_block(state.kv.shape, chunk_size, backend=jax.default_backend())

    keys, queries = (Blocks.of_one_chunk(side, block_length) for side in (tokens.keys(), tokens.queries()))

    def sum_block(before, block):
        tokens = keys.read(block)
        k, key_scale = key_features(rule, tokens)
        after = before
        if key_scale is not None:
            k, after = chunks.relative_to_largest(k, key_scale, before)
        v = heads.group_values(clean(tokens.value, tokens.key_mask))
        own = no_decay.sums(rule, heads.group_keys(k), v)
        return jax.tree.map(lambda x: jnp.sum(x, axis=0), own), after

    def add_block(carry, block):
        own, after = keys.recompute(sum_block)(carry.log_scale, block)
        left = None if after is None else jnp.exp(carry.log_scale - after)[..., None, None]
        return carry._replace(sums=chunks.follow(own, left, carry.sums), log_scale=after), None

    def read_block(carry, block):
        tokens = queries.read(block)
        q, query_scale = query_features(rule, tokens)
        numerator, denominator = no_decay.read(rule, heads.group_queries(q), carry.sums)
        return carry, chunks.output(rule, numerator, denominator, tokens, heads, [query_scale, carry.log_scale])

    # The sums are added to outside what is recomputed: a gradient then needs no copy of them for each block.
    carry, _ = keys.loop(add_block, chunks.start(rule, tokens, state, heads))
    carry = chunks.Carry(*jax.tree.map(lambda x: x[None], tuple(carry)))
    if carry.log_scale is not None:
        carry = carry._replace(log_scale=carry.log_scale[:, :, None])  # for every row
    _, output = queries.loop(queries.recompute(read_block), carry, (heads.outputs, state.kv.shape[-1]))
    return output


def _bidirectional_by_segment(tokens: Tokens, state: LinearAttentionState, rule: Rule, chunk_size: int) -> Array:
    """Causal attention over keys and queries in one row, sorted by segment, each segment's keys before its queries.

    So every query finds all keys of its segment before it, whatever the order of the segments on the two sides.
    """
    num_queries, num_keys = tokens.query.shape[1], tokens.key.shape[1]
    segments = jnp.concatenate([tokens.key_segment, tokens.query_segment], axis=1)
    order = jnp.argsort(segments, axis=1, stable=True)

    def in_order(x, before=0, after=0):
        x = jnp.pad(x, [(0, 0), (before, after)] + [(0, 0)] * (x.ndim - 2))
        return _take_time(x, order)

    query_mask = jnp.ones((len(order), num_queries), bool) if tokens.query_mask is None else tokens.query_mask
    key_mask = jnp.ones((len(order), num_keys), bool) if tokens.key_mask is None else tokens.key_mask
    segments = _take_time(segments, order)
    runs = count_runs(segments, segments[:, 0])
    row = Tokens(
        query=in_order(tokens.query, before=num_keys),
        key=in_order(tokens.key, after=num_queries),
        value=in_order(tokens.value, after=num_queries),
        query_mask=in_order(query_mask, before=num_keys),
        key_mask=in_order(key_mask, after=num_queries),
        query_segment=runs,
        key_segment=runs,
    )
    _, output = causal(row, state, rule, chunk_size)
    return _take_time(output, jnp.argsort(order, axis=1)[:, num_keys:])


def _take_time(x: Array, index: Array) -> Array:
    """x [B, T, …] at index [B, …], row by row."""
    return jax.vmap(lambda x, index: jnp.take(x, index, axis=0))(x, index)

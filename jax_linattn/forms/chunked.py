"""The chunked form: matrix products inside a chunk, a running state between chunks. The default for training."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_linattn.forms import chunks
from jax_linattn.forms.heads import Heads
from jax_linattn.forms.tokens import (
    Rule,
    Tokens,
    chunks_first,
    clean,
    count_runs,
    initial_carry,
    key_features,
    pad_time,
    query_features,
    time_from_chunks,
    tokens_length,
)
from jax_linattn.state import LinearAttentionState

CHUNKS_PER_BLOCK = 8


def causal(tokens: Tokens, state: LinearAttentionState, rule: Rule, chunk_size: int) -> tuple[LinearAttentionState, Array]:
    """A scan over blocks of a few chunks; the chunks of a block run in parallel, and a gradient stores a state a block."""
    heads = Heads.of_tokens(tokens)
    state, run = initial_carry(rule, tokens, state)

    def attend_block(carry, tokens):
        sums, run = carry
        sums, run, output = chunks.attend(tokens, sums, run, rule, heads, chunks.prefix_in_turn)
        return (sums, run), output

    (sums, _), outputs = _scan(attend_block, (heads.group_state(state), run), _blocks(tokens, chunk_size))
    return heads.ungroup_state(sums, state.log_scale), _time_from_blocks(outputs, tokens)


def bidirectional(tokens: Tokens, state: LinearAttentionState, rule: Rule, chunk_size: int) -> Array:
    """One pass over the keys for S and Z, on top of the empty `state`; one over the queries to read them."""
    if tokens.key_segment is not None:
        return _bidirectional_by_segment(tokens, state, rule, chunk_size)
    heads = Heads.of_tokens(tokens)
    state, _ = initial_carry(rule, tokens, state)
    block_length = chunk_size * CHUNKS_PER_BLOCK

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def sum_block(tokens):
        k = heads.group_keys(key_features(rule, tokens))
        v = heads.group_values(clean(tokens.value, tokens.key_mask))
        return jax.tree.map(lambda x: jnp.sum(x, axis=0), chunks.key_value_sums(rule, k, v, heads))

    def read_block(sums, tokens):
        q = heads.group_queries(query_features(rule, tokens))
        numerator, denominator = chunks.read(rule, q, sums), chunks.read_normalizer(rule, q, sums)
        return sums, chunks.output(rule, numerator, denominator, tokens, heads)

    def add_block(sums, tokens):
        return jax.tree.map(jnp.add, sums, sum_block(tokens)), None

    # The sums are added to outside the checkpoint: a gradient then needs no copy of them for each block.
    sums, _ = lax.scan(add_block, heads.group_state(state), _blocks(tokens.keys(), block_length, chunks_per_block=1))
    sums = jax.tree.map(lambda x: x[None], sums)
    _, outputs = _scan(read_block, sums, _blocks(tokens.queries(), block_length, chunks_per_block=1))
    return _time_from_blocks(outputs, tokens.queries())


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


def _blocks(tokens: Tokens, chunk_size: int, chunks_per_block: int = CHUNKS_PER_BLOCK) -> Tokens:
    """[B, T, …] to [blocks, n, B, C, …], padded: as few blocks as can be, and as little padding for that."""
    num_chunks = -(-tokens_length(tokens) // chunk_size)
    num_blocks = -(-num_chunks // chunks_per_block)
    chunks_per_block = -(-num_chunks // num_blocks)
    tokens = chunks_first(pad_time(tokens, chunk_size * chunks_per_block), chunk_size)
    return jax.tree.map(lambda x: x.reshape(num_blocks, chunks_per_block, *x.shape[1:]), tokens)


def _time_from_blocks(outputs: Array, tokens: Tokens) -> Array:
    """[blocks, n, B, C, …] to [B, T, …]."""
    return time_from_chunks(outputs.reshape(-1, *outputs.shape[2:]), tokens_length(tokens))


def _scan(body, carry, blocks):
    """A scan whose gradient keeps the carries between blocks and nothing from inside them."""
    if jax.tree.leaves(blocks)[0].shape[0] == 1:
        carry, output = body(carry, jax.tree.map(lambda x: x[0], blocks))
        return carry, output[None]
    return lax.scan(jax.checkpoint(body, prevent_cse=False), carry, blocks)

"""The associative form: a prefix scan over chunks, of logarithmic depth. With chunk_size=1, the textbook's."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_linattn.forms import chunks
from jax_linattn.forms.heads import Heads, Sums
from jax_linattn.forms.tokens import Rule, Tokens, chunks_first, initial_carry, pad_time, time_from_chunks, tokens_length
from jax_linattn.state import LinearAttentionState


def causal(tokens: Tokens, state: LinearAttentionState, rule: Rule, chunk_size: int) -> tuple[LinearAttentionState, Array]:
    """All chunks at once; what goes between them is found by `lax.associative_scan`. Holds (T/C)·F·E numbers."""
    heads = Heads.of_tokens(tokens)
    state, run = initial_carry(rule, tokens, state)
    in_chunks = chunks_first(pad_time(tokens, chunk_size), chunk_size)
    sums, _, outputs = chunks.attend(in_chunks, heads.group_state(state), run, rule, heads, prefix_in_parallel)
    return heads.ungroup_state(sums, state.log_scale), time_from_chunks(outputs, tokens_length(tokens))


def prefix_in_parallel(own: Sums, keep: Array | None, sums: Sums) -> tuple[Sums, Sums]:
    """As `chunks.prefix_in_turn`, with the sums before all as the first element of the scan."""

    def combine(left, right):
        (left_sums, left_keep), (right_sums, right_keep) = left, right
        keep = None if right_keep is None else left_keep & right_keep
        return chunks.follow(right_sums, right_keep, left_sums), keep

    elements = jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), sums, own)
    if keep is not None:
        keep = jnp.concatenate([jnp.ones_like(keep[:1]), keep])
    prefixes, _ = lax.associative_scan(combine, (elements, keep))
    return jax.tree.map(lambda x: x[:-1], prefixes), jax.tree.map(lambda x: x[-1], prefixes)

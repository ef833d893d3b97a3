"""The associative form: a prefix scan over chunks, of logarithmic depth. With chunk_size=1, the textbook's."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_linattn.forms import chunks
from jax_linattn.forms.blocks import Blocks
from jax_linattn.forms.heads import Heads, Sums
from jax_linattn.forms.tokens import Rule, Tokens
from jax_linattn.state import LinearAttentionState


def causal(tokens: Tokens, state: LinearAttentionState, rule: Rule, chunk_size: int) -> tuple[LinearAttentionState, Array]:
    """All chunks at once; what goes between them is found by `lax.associative_scan`. Holds (T/C)·F·E numbers."""
    heads = Heads.of_tokens(rule, tokens)
    blocks = Blocks.of(tokens, chunk_size)

    def attend_all(carry, block):
        return chunks.attend(blocks.read(block), carry, rule, heads, prefix_in_parallel)

    carry, output = blocks.loop(attend_all, chunks.start(rule, tokens, state, heads))
    return chunks.end(carry, heads), output


def prefix_in_parallel(own: Sums, left: Array | None, sums: Sums) -> tuple[Sums, Sums]:
    """As `chunks.prefix_in_turn`, with the sums before all as the first element of the scan."""

    def combine(earlier, later):
        (earlier_sums, earlier_left), (later_sums, later_left) = earlier, later
        left = None if later_left is None else earlier_left * later_left
        return chunks.follow(later_sums, later_left, earlier_sums), left

    elements = jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), sums, own)
    if left is not None:
        left = jnp.concatenate([jnp.ones_like(left[:1]), left])
    prefixes, _ = lax.associative_scan(combine, (elements, left))
    return jax.tree.map(lambda x: x[:-1], prefixes), jax.tree.map(lambda x: x[-1], prefixes)

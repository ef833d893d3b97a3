"""The recurrent form: the seed's loop, one token after another. Decoding is its step."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_linattn.forms.heads import repeat_heads
from jax_linattn.forms.ratio import finish
from jax_linattn.forms.tokens import (
    Rule,
    Tokens,
    chunks_first,
    clean,
    initial_carry,
    key_features,
    pad_time,
    query_features,
    time_from_chunks,
    tokens_length,
)
from jax_linattn.state import LinearAttentionState


def causal(
    tokens: Tokens, state: LinearAttentionState, rule: Rule, chunk_size: int | None
) -> tuple[LinearAttentionState, Array]:
    """`lax.scan` of `step`. Blocks of tokens are checkpointed, so a gradient stores a state a block, not a token."""
    length = tokens_length(tokens)
    block = min(length, chunk_size or _block_length(length))

    def step_in_run(carry, token):
        state, run = carry
        if run is not None:
            state, run = _restart(state, run != token.key_segment), token.key_segment
        state, output = step(state, token, rule)
        return (state, run), output

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def scan_block(carry, tokens):
        return lax.scan(step_in_run, carry, tokens)

    time_first = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 1), chunks_first(pad_time(tokens, block), block))
    (state, _), outputs = lax.scan(scan_block, initial_carry(rule, tokens, state), time_first)
    return state, time_from_chunks(jnp.moveaxis(outputs, 1, 2), length)


def step(state: LinearAttentionState, token: Tokens, rule: Rule) -> tuple[LinearAttentionState, Array]:
    """One token: S += φ(k) vᵀ, Z += φ(k), o = φ(q)ᵀS / φ(q)ᵀZ.

    Args:
      state: the sums before the token.
      token: query [B, H, D], key [B, K, D], value [B, V, E], masks [B].
      rule: how tokens become an output.

    Returns:
      (state, output [B, M, E]).
    """
    batch, num_heads = state.log_scale.shape
    k = repeat_heads(key_features(rule, token), num_heads)
    v = repeat_heads(clean(token.value, token.key_mask), num_heads)
    state = state._replace(kv=state.kv + k[..., :, None] * v[..., None, :], key_sum=state.key_sum + k)
    num_outputs = max(num_heads, token.query.shape[-2])
    q = repeat_heads(query_features(rule, token), num_outputs).reshape(
        batch, num_heads, num_outputs // num_heads, k.shape[-1]
    )
    output = finish(rule, rule.einsum("bnrf,bnfe->bnre", q, state.kv), rule.einsum("bnrf,bnf->bnr", q, state.key_sum))
    output = output.reshape(batch, num_outputs, -1)
    return state, clean(output, token.query_mask).astype(token.value.dtype)


def _restart(state: LinearAttentionState, where: Array) -> LinearAttentionState:
    return jax.tree.map(lambda x: jnp.where(where.reshape(-1, *[1] * (x.ndim - 1)), 0, x), state)


def _block_length(length: int) -> int:
    """About √T: as many states between blocks as inside one, rounded to a power of two, 16 to 256."""
    return min(256, max(16, 1 << round((length - 1).bit_length() / 2)))

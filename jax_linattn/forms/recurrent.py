"""The recurrent form: the formula's own loop, one token after another. Decoding is its step."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_linattn.forms.blocks import Blocks
from jax_linattn.forms.heads import repeat_heads, sum_scales
from jax_linattn.forms.ratio import finish
from jax_linattn.forms.scale import after_token
from jax_linattn.forms.tokens import (
    Rule,
    Tokens,
    clean,
    decays_per_feature,
    initial_carry,
    key_features,
    log_decays,
    query_features,
)
from jax_linattn.state import NOTHING, LinearAttentionState, unmark_empty


def causal(
    tokens: Tokens, state: LinearAttentionState, rule: Rule, chunk_size: int | None
) -> tuple[LinearAttentionState, Array]:
    """`lax.scan` of `step`. Blocks of tokens are checkpointed, so a gradient stores a state a block, not a token."""
    # Chunks of one token, so that time leads in a block; `chunk_size` is here how many tokens a block has.
    blocks = Blocks.of(tokens, 1, chunk_size or _block_length(tokens.key.shape[1]))

    def step_in_run(carry, token):
        state, run = carry
        if run is not None:
            state, run = _restart(state, run != token.key_segment), token.key_segment
        state, output = step(state, token, rule)
        return (state, run), output

    def scan_block(carry, block):
        _, run = carry
        time_first = jax.tree.map(lambda x: x[:, :, 0], blocks.read(block, run))
        carry, output = lax.scan(step_in_run, carry, time_first)
        return carry, output[:, :, None]

    num_outputs, value_dim = max(state.kv.shape[1], tokens.query.shape[2]), state.kv.shape[-1]
    start = initial_carry(rule, tokens, state)
    (state, _), output = blocks.loop(blocks.recompute(scan_block), start, (num_outputs, value_dim))
    return unmark_empty(state), output


def step(state: LinearAttentionState, token: Tokens, rule: Rule) -> tuple[LinearAttentionState, Array]:
    """One token: S = a S + φ(k) vᵀ, Z = a Z + φ(k), o = φ(q)ᵀS / φ(q)ᵀZ.

    Args:
      state: the sums before the token, as `enter_state` gives them.
      token: query [B, H, D], key [B, K, D], value [B, V, E], masks [B].
      rule: how tokens become an output.

    Returns:
      (state, output [B, M, E]).
    """
    batch, num_heads = state.log_scale.shape
    (k, key_scale), (q, query_scale) = key_features(rule, token), query_features(rule, token)
    k, v = (repeat_heads(x, num_heads) for x in (k, clean(token.value, token.key_mask)))
    log_decay = log_decays(token)
    if log_decay is not None and not decays_per_feature(token):
        log_decay = log_decay[..., None]  # [B, N, F or 1]
    if key_scale is not None:
        key_scale = repeat_heads(key_scale[..., None], num_heads)
        before = state.log_scale[..., None]
        after = after_token(before, key_scale, 0 if log_decay is None else jnp.max(log_decay, axis=-1, keepdims=True))
        log_decay = before - after if log_decay is None else log_decay + (before - after)
        k, state = k * jnp.exp(key_scale - after), state._replace(log_scale=after[..., 0])
    kv, key_sum = state.kv, state.key_sum
    if log_decay is not None:
        left = jnp.exp(log_decay)
        kv, key_sum = kv * left[..., None], key_sum * left
    state = state._replace(kv=kv + k[..., :, None] * v[..., None, :], key_sum=key_sum + k)
    num_outputs = max(num_heads, q.shape[-2])
    rows = (batch, num_heads, num_outputs // num_heads)
    q = repeat_heads(q, num_outputs).reshape(*rows, q.shape[-1])
    log_scale = sum_scales([query_scale, None if key_scale is None else state.log_scale], num_outputs)
    log_scale = None if log_scale is None else log_scale.reshape(rows)
    numerator, denominator = rule.einsum("bnrf,bnfe->bnre", q, state.kv), rule.einsum("bnrf,bnf->bnr", q, state.key_sum)
    output = finish(rule, numerator, denominator, log_scale).reshape(batch, num_outputs, v.shape[-1])
    return state, clean(output, token.query_mask).astype(token.value.dtype)


def _restart(state: LinearAttentionState, where: Array) -> LinearAttentionState:
    def restart(x, new):
        return jnp.where(where.reshape(-1, *[1] * (x.ndim - 1)), new, x)

    return LinearAttentionState(restart(state.kv, 0), restart(state.key_sum, 0), restart(state.log_scale, NOTHING))


def _block_length(length: int) -> int:
    """About √T: as many states between blocks as inside one, rounded to a power of two, 16 to 256."""
    return min(256, max(16, 1 << round((length - 1).bit_length() / 2)))

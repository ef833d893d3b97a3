"""The running scale: what keeps sums of exponential features near 1, whatever the size of keys, and strictly causal.

A key map may give features with a scale apart: the true ones are features · exp(log_scale). The sums are then kept relative
to exp(m_t), per state head, with m the largest log_scale so far, decayed as the sums are:

    m_t = max(m_{t-1} + log a_t, log_scale_t)

So a key enters with exp(log_scale_t - m_t) <= 1, and what came before is left with exp(m_{t-1} + log a_t - m_t) <= 1: a
decay like any other. The choice of m changes no result, so it is a constant to every derivative.
"""

import jax.numpy as jnp
from jax import Array, lax


def after_token(before: Array, log_scale: Array, log_decay: Array | float = 0.0) -> Array:
    """m_t from m_{t-1}."""
    return lax.stop_gradient(jnp.maximum(before + log_decay, log_scale))


def after_tokens(before: Array, log_scale: Array, log_decay: Array) -> tuple[Array, Array]:
    """The running scale of n chunks of C tokens.

    Args:
      before: m before them, [B, N].
      log_scale: of the keys, [n, B, C, N].
      log_decay: of the tokens, the same shape; -inf starts anew.

    Returns:
      (m before each token, m after it), [n, B, C, N].
    """
    in_time = lambda x: jnp.moveaxis(x, 2, 1).reshape(-1, *before.shape)
    scale, decay = (lax.stop_gradient(in_time(x)) for x in (log_scale, log_decay))
    scale = scale.at[0].max(lax.stop_gradient(before) + decay[0])

    def combine(left, right):
        (left_scale, left_decay), (right_scale, right_decay) = left, right
        return after_token(left_scale, right_scale, right_decay), left_decay + right_decay

    after, _ = lax.associative_scan(combine, (scale, decay))
    sequence = jnp.concatenate([before[None], after])
    num_chunks, _, length, _ = log_scale.shape
    in_chunks = lambda x: jnp.moveaxis(x.reshape(num_chunks, length, *before.shape), 2, 1)
    return in_chunks(sequence[:-1]), in_chunks(after)

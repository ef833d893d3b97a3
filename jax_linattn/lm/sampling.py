"""From logits to a token: temperature, top-k, top-p. All three are numbers to a compiled program, not parts of it."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_linattn.checks import check_positive_int, require


class Sampling(NamedTuple):
    """How tokens are drawn, as `sampling` makes it."""

    temperature: np.ndarray  # float32 []; 0 = the likeliest token
    top_k: np.ndarray  # int32 []
    top_p: np.ndarray  # float32 []; infinite = off


def sampling(temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> Sampling:
    """Checked options of `sample`.

    Args:
      temperature: tokens are drawn from softmax(logits / temperature); 0 = the likeliest.
      top_k: draw from the k likeliest tokens alone; of equally likely ones the smaller token comes first. None = off.
      top_p: draw from the fewest likeliest tokens whose probabilities add up to at least p. None or 1 = off.
        With top_k as well: from the tokens that both leave. Probabilities are those at this temperature.

    Raises:
      ValueError: naming the argument, what it got and what would be right.
    """
    fits = _is_number(temperature) and 0 <= temperature <= np.finfo(np.float32).max
    require(fits, f"temperature must be at least 0 and a finite float32, got {temperature!r}")
    check_positive_int("top_k", top_k, or_none=True)
    require(
        top_p is None or (_is_number(top_p) and 0 < top_p <= 1),
        f"top_p must be above 0 and at most 1, or None, got {top_p!r}",
    )
    most = np.iinfo(np.int32).max
    return Sampling(
        temperature=np.asarray(temperature, np.float32),
        top_k=np.asarray(most if top_k is None else min(top_k, most), np.int32),
        # Rounding lets sums reach 1 before the last token, so "all" is no sum.
        top_p=np.asarray(np.inf if top_p is None or top_p == 1 else top_p, np.float32),
    )


def _is_number(value) -> bool:
    is_real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return is_real and math.isfinite(value)


def sample(key: Array, logits: Array, how: Sampling) -> Array:
    """One token, int32 [], from logits [V] of any float dtype; computed in float32.

    The token is argmax(logits / temperature + noise) over the tokens that top-k and top-p leave (Gumbel-max), and the
    noise belongs to the token, not to its rank: logits that differ by rounding alone give the same draw.
    """
    logits = logits.astype(jnp.float32)
    scaled = (logits - logits.max()) / jnp.maximum(how.temperature, jnp.finfo(jnp.float32).tiny)
    restricts = (how.top_k < logits.size) | jnp.isfinite(how.top_p)
    scaled = jax.lax.cond(restricts, _restrict, lambda scaled, _: scaled, scaled, how)
    drawn = jax.random.categorical(key, scaled)
    return jnp.where(how.temperature > 0, drawn, jnp.argmax(logits)).astype(jnp.int32)


def _restrict(scaled: Array, how: Sampling) -> Array:
    """-inf for the tokens that top-k or top-p leave out."""
    likeliest_first = jnp.argsort(scaled, descending=True, stable=True)
    probabilities = jax.nn.softmax(scaled)[likeliest_first]
    likelier = jnp.cumsum(probabilities) - probabilities  # the probability of all before it: exactly 0 for the first
    keep = (jnp.arange(scaled.size) < how.top_k) & (likelier < how.top_p)
    keep = keep.at[0].set(True)  # also where top_p is so small that it is 0 in float32
    return jnp.full_like(scaled, -jnp.inf).at[likeliest_first].set(jnp.where(keep, scaled[likeliest_first], -jnp.inf))

"""The division by the normaliser, exact over the whole range of float32, and differentiable any number of times."""

import jax
import jax.numpy as jnp
from jax import Array

from jax_linattn.feature_maps import saturating_exp
from jax_linattn.forms.tokens import Rule


def finish(rule: Rule, numerator: Array, denominator: Array, log_scale: Array | None = None) -> Array:
    """The output of sums: numerator / (denominator + eps), or scale · numerator.

    Args:
      rule: says which.
      numerator: φ(q)ᵀS, [..., E].
      denominator: φ(q)ᵀZ, [...]; not read when nothing is normalised.
      log_scale: both are to be multiplied by its exponential, [...]; None = 0. It cancels in the exact ratio.
    """
    if rule.normalize:
        eps = rule.eps if log_scale is None or rule.eps == 0 else rule.eps * saturating_exp(-log_scale)
        return divide(numerator, (denominator + eps)[..., None])
    if log_scale is not None:
        numerator = numerator * saturating_exp(log_scale)[..., None]
    return numerator if rule.scale is None else numerator * jnp.asarray(rule.scale, numerator.dtype)


@jax.custom_jvp
def divide(numerator: Array, denominator: Array) -> Array:
    """numerator / denominator, and 0 with derivative 0 where the denominator is 0.

    Its derivative is written (ṅ - o·ḋ) / d: the textbook's d² leaves the float range when d is below 2^-63, and the
    gradient with it. The rule uses this function itself, so it holds for every order and, being a jvp, in both modes.
    """
    denominator = jnp.broadcast_to(denominator, numerator.shape)
    is_zero = denominator == 0
    return jnp.where(is_zero, 0, numerator / jnp.where(is_zero, 1, denominator))


@divide.defjvp
def _divide_jvp(primals, tangents):
    numerator, denominator = primals
    numerator_dot, denominator_dot = tangents
    output = divide(numerator, denominator)
    return output, divide(numerator_dot - output * denominator_dot, denominator)

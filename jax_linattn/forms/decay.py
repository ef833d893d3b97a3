"""What is left of a token at later ones of its chunk: all of it, a share a head, or a share a feature.

Three kinds of one protocol, over n chunks of C tokens with grouped heads (`heads.py`; letters as in `chunks.py`):

  weights(rule, q, k)          [n, B, G, b or 1, r·C, C]: what a query reads of each key of its chunk; meant for s <= t alone
  read(rule, q, sums)          φ(q)ᵀS [n, B, G, r·C, b·E] and φ(q)ᵀZ [n, B, G, r·C, b] of the sums before the chunk
  key_value_sums(rule, k, v)   S and Z that the chunk adds, as they are at its end
  total                        the share of the sums before that is left at its end, [n, B, G, b or 1, F or 1]; None = all

Token s is left at t with a_{s+1} ⋯ a_t, a = exp(log_decay). Only such products of factors at most 1 are ever formed, each
from its own factors: no quotient, and no difference of cumulative sums. So strong decay loses no digits, what underflows
is 0 to rounding, and a = 0 forgets exactly.

Their gradient takes another way. With L_t = log a_1 + … + log a_t the product is exp(L_t - L_s), so its derivatives, of every
order, are those of exp(L_t - L°_t) / exp(L_s - L°_s) times itself as a constant, where L° is the value of L. That factor is
1, and it is applied to queries and keys, where its derivative costs C·F numbers and not C².
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_linattn.forms.heads import Heads, Sums
from jax_linattn.forms.tokens import Rule

LEAF = 4  # tokens: below this, products in halves cost more than they save
LOWEST = -1e4  # a log decay whose exponential is 0 in float64 too: what -inf counts as where logs are summed


class NoDecay(NamedTuple):
    """Everything stays."""

    heads: Heads
    total: None = None

    def weights(self, rule: Rule, q: Array, k: Array) -> Array:
        return rule.einsum("nbgxf,nbgcf->nbgxc", q, k)[:, :, :, None]

    def read(self, rule: Rule, q: Array, sums: Sums) -> tuple[Array, Array]:
        return rule.einsum("nbgxf,nbgfe->nbgxe", q, sums.kv), rule.einsum("nbgxf,nbgvf->nbgxv", q, sums.key_sum)

    def key_value_sums(self, rule: Rule, k: Array, v: Array) -> Sums:
        key_sum = jnp.broadcast_to(jnp.sum(k, axis=-2)[..., None, :], (*k.shape[:3], self.heads.values, k.shape[-1]))
        return Sums(rule.einsum("nbgcf,nbgce->nbgfe", k, v), key_sum)


class DecayPerHead(NamedTuple):
    """A factor a token and state head: keys, and their products with queries, are shared as without decay."""

    heads: Heads
    between: Array  # [n, B, G, b, C, C]: what is left of token s at t, a constant; 0 for s > t
    unit: Array  # [n, B, G, b, C]: 1, with the derivative of exp(L)
    from_start: Array  # [n, B, G, b, C]: what is left of the sums before the chunk at each token
    to_end: Array  # [n, B, G, b, C]: what is left of each token at the chunk's end

    @classmethod
    def of(cls, heads: Heads, log_decay: Array) -> "DecayPerHead":
        """Of log decays [n, B, C, N]."""
        log_decay = heads.group_decays(log_decay)
        unit = _unit(log_decay, axis=-1)
        length = log_decay.shape[-1]
        levels = _products(jnp.exp(lax.stop_gradient(log_decay))[..., None], smallest=1)
        flat = [tuple(x.reshape(*log_decay.shape[:-1], -1) for x in level) for level in levels]
        padded = flat[0][0].shape[-1]
        between = jnp.eye(padded, dtype=unit.dtype)[None, None, None, None]
        for of_pair, (start, end) in zip(_pairs_by_level(padded), flat, strict=False):
            between = jnp.where(of_pair, start[..., :, None] * end[..., None, :], between)
        start, end = flat[-1]
        return cls(
            heads,
            between[..., :length, :length],
            unit,
            start[..., :length] * unit,
            end[..., :length] * (unit[..., -1:] / unit),
        )

    @property
    def total(self) -> Array:
        return self.from_start[..., -1:]

    def weights(self, rule: Rule, q: Array, k: Array) -> Array:
        between = self.between
        if self.heads.values == 1:
            unit = self.unit[..., 0, :, None]
            q, k = self.heads.times_time(q, unit), k / unit
        else:  # queries and keys are shared by heads of different decay
            between = between * (self.unit[..., :, None] / self.unit[..., None, :])
        weights = self.heads.split_queries(rule.einsum("nbgxf,nbgcf->nbgxc", q, k))  # [n, B, G, r, C, C]
        weights = weights * between  # of r and b one is 1
        return weights.reshape(*weights.shape[:3], self.heads.values, -1, weights.shape[-1])

    def read(self, rule: Rule, q: Array, sums: Sums) -> tuple[Array, Array]:
        numerator, denominator = NoDecay(self.heads).read(rule, q, sums)
        left = jnp.swapaxes(self.from_start, -1, -2)  # [n, B, G, C, b]
        return self.heads.times_values(numerator, left), self.heads.times_values(denominator, left)

    def key_value_sums(self, rule: Rule, k: Array, v: Array) -> Sums:
        v = self.heads.times_values(v, jnp.swapaxes(self.to_end, -1, -2))
        return Sums(rule.einsum("nbgcf,nbgce->nbgfe", k, v), rule.einsum("nbgvc,nbgcf->nbgvf", self.to_end, k))


class DecayPerFeature(NamedTuple):
    """A factor a token, state head and feature. One group a state head.

    Products in halves: of a pair of blocks, what a query of the second reads of a key of the first is
    (φ(q) ⊙ a_m ⋯ a_t) · (φ(k) ⊙ a_{s+1} ⋯ a_{m-1}), m the second's first token: one matrix product a pair, on
    log₂(C / LEAF) levels. Blocks of LEAF tokens are summed directly.
    """

    heads: Heads
    decay: Array  # [n, B, G, C, F], a constant, as are the levels
    levels: list[tuple[Array, Array]]  # of `_products`
    unit: Array  # [n, B, G, C, F]: 1, with the derivative of exp(L)

    @classmethod
    def of(cls, heads: Heads, log_decay: Array) -> "DecayPerFeature":
        """Of log decays [n, B, C, N, F]."""
        log_decay = heads.group_keys(log_decay)
        decay = jnp.exp(lax.stop_gradient(log_decay))
        return cls(heads, decay, _products(decay, smallest=LEAF), _unit(log_decay, axis=-2))

    @property
    def total(self) -> Array:
        return self._from_start()[..., -1:, :]

    def weights(self, rule: Rule, q: Array, k: Array) -> Array:
        q, length = self.heads.split_queries(q), k.shape[-2]  # [n, B, G, r, C, F]
        weights = self._leaves(q, k)
        q = _pad(q * self.unit[:, :, :, None], LEAF)
        k = _pad(k / self.unit, LEAF)
        for start, end in self.levels[:-1]:
            half = start.shape[-2]
            q_second = _blocks(q, 2 * half)[..., half:, :] * start[:, :, :, None, 1::2]
            k_first = _blocks(k, 2 * half)[..., :half, :] * end[..., ::2, :, :]
            lower_left = rule.einsum("nbgrptf,nbgpsf->nbgrpts", q_second, k_first)
            upper = jnp.concatenate([weights[..., ::2, :, :], jnp.zeros_like(lower_left)], axis=-1)
            lower = jnp.concatenate([lower_left, weights[..., 1::2, :, :]], axis=-1)
            weights = jnp.concatenate([upper, lower], axis=-2)
        weights = weights[..., 0, :length, :length]  # [n, B, G, r, C, C]
        return weights.reshape(*weights.shape[:3], 1, -1, length)

    def read(self, rule: Rule, q: Array, sums: Sums) -> tuple[Array, Array]:
        return NoDecay(self.heads).read(rule, self.heads.times_time(q, self._from_start()), sums)

    def key_value_sums(self, rule: Rule, k: Array, v: Array) -> Sums:
        left = self.levels[-1][1][..., 0, : k.shape[-2], :] * (self.unit[..., -1:, :] / self.unit)
        return NoDecay(self.heads).key_value_sums(rule, k * left, v)

    def _from_start(self) -> Array:
        return self.levels[-1][0][..., 0, : self.unit.shape[-2], :] * self.unit

    def _leaves(self, q: Array, k: Array) -> Array:
        """The weights inside blocks of LEAF tokens, [n, B, G, r, blocks, LEAF, LEAF]."""
        decay, unit = (_blocks(_pad(x, LEAF, 1), LEAF)[:, :, :, None] for x in (self.decay, self.unit))
        q, k = _blocks(_pad(q, LEAF), LEAF), _blocks(_pad(k, LEAF), LEAF)[:, :, :, None]
        diagonals = [jnp.sum(q * k, axis=-1)]  # of the keys 0, 1, … tokens back
        q, k = q * unit, k / unit
        for back in range(1, LEAF):
            q, k = q[..., 1:, :], k[..., :-1, :] * decay[..., back:, :]
            diagonals.append(jnp.sum(q * k, axis=-1))
        zero = jnp.zeros_like(diagonals[0][..., 0])
        rows = [[diagonals[t - s][..., s] if s <= t else zero for s in range(LEAF)] for t in range(LEAF)]
        return jnp.stack([jnp.stack(row, axis=-1) for row in rows], axis=-2)


def _unit(log_decay: Array, axis: int) -> Array:
    """exp(L - L°), L the running sum of the logs: 1, with the derivatives of exp(L) relative to itself."""
    logs = jnp.cumsum(jnp.maximum(log_decay, LOWEST), axis=axis)
    return jnp.exp(logs - lax.stop_gradient(logs))


def _products(decay: Array, smallest: int) -> list[tuple[Array, Array]]:
    """What blocks of `smallest` tokens leave, of twice as many, and so on to one block of all.

    Args:
      decay: factors […, C, X]; C is filled up with ones.
      smallest: tokens of the first level's blocks, a power of two.

    Returns:
      For each level (start, end), […, blocks, tokens, X]: the product of the factors from the block's first token up to
      each token, and of those after it up to the block's last.
    """
    blocks = _blocks(_pad(decay, smallest, 1), smallest)
    rows = [blocks[..., t, :] for t in range(smallest)]
    starts, ends = [rows[0]], [jnp.ones_like(rows[0])]
    for t in range(1, smallest):
        starts.append(starts[-1] * rows[t])
        ends.insert(0, ends[0] * rows[-t])
    start, end = jnp.stack(starts, axis=-2), jnp.stack(ends, axis=-2)
    levels = [(start, end)]
    while start.shape[-3] > 1:
        first_start, second_start = start[..., ::2, :, :], start[..., 1::2, :, :]
        first_end, second_end = end[..., ::2, :, :], end[..., 1::2, :, :]
        start = jnp.concatenate([first_start, second_start * first_start[..., -1:, :]], axis=-2)
        end = jnp.concatenate([first_end * second_start[..., -1:, :], second_end], axis=-2)
        levels.append((start, end))
    return levels


def _pairs_by_level(length: int) -> list[np.ndarray]:
    """For each level, which (t, s) have t in the second and s in the first block of a pair, bool [1, 1, 1, 1, length, length]."""
    t, s = np.arange(length)[:, None], np.arange(length)[None, None, None, None, None, :]
    levels = range(length.bit_length() - 1)
    return [(t >> level == (s >> level) + 1) & ((t >> level) % 2 == 1) for level in levels]


def _pad(x: Array, multiple: int, fill: float = 0) -> Array:
    """x […, C, X] with C filled up to `multiple` times a power of two."""
    length = x.shape[-2]
    padding = multiple * (1 << (-(-length // multiple) - 1).bit_length()) - length
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, padding), (0, 0)], constant_values=fill) if padding else x


def _blocks(x: Array, size: int) -> Array:
    """[…, C, X] to […, C/size, size, X]."""
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])

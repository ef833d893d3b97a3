"""What is left of a token at later ones: all of it, a share a head, or a share a feature.

Three kinds of one protocol, over n chunks of C tokens with grouped heads (`heads.py`; letters as in `chunks.py`):

  start(q, k, v)               the same with what the derivative of the decay needs, and the ones that are summed beside v
                               for the normaliser, [n, B, G, b, C], or None for ones
  row_logs                     what is to be added to the log of each row's scale, [n, B, C, N], or None
  weights(rule, q, k)          [n, B, G, b or 1, r·C, C]: what a query reads of each key of its chunk; right for s <= t
  read(rule, q, sums)          φ(q)ᵀS [n, B, G, r·C, b·E] and φ(q)ᵀZ [n, B, G, r·C, b] of the sums before the chunk
  sums(rule, k, v, ones)       S and Z that the chunk adds, as they are at its end
  total                        the share of the sums before that is left at its end, [n, B, G, b or 1, F or 1]; None = all
  at_end                       a last factor on the sums after all chunks, [B, G, b or 1, F or 1], or None

Token s is left at t with a_{s+1} ⋯ a_t, a = exp(log_decay). Only such products are ever formed, each at most 1 and never
as a quotient. Per feature they are made of their own factors; per head they are exponentials of differences of running
sums, kept in parts so that the differences are exact. So strong decay loses no digits of what is left, what underflows is
0 to rounding, and a = 0 forgets exactly. (Per feature each factor is rounded on its own: what log decays below 2^-25 a
token add up to over thousands of tokens is lost in float32.) A run of equal ids begins with a decay of 0, whatever its
first token's own.

The products are constants to every derivative, which goes another way. With L_t = log a_1 + … + log a_t, and L° the same
number as a constant, the product is itself times exp(L_t - L°_t) / exp(L_s - L°_s). Both factors are 1 and have the right
derivatives, of every order; they belong to one token each, so they go to the query and to the key (`logs` is L - L°, which
is 0): a gradient costs C·F numbers a chunk and not C². What a token reads of itself goes out of the two again, with its
rounding errors: where keys are shared by heads of different decay, the factors go to the row of the output and to the
value, with the same effect. Where a token forgets all, L begins anew, so that nothing after it reaches what is before it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_linattn.forms.heads import Heads, Sums
from jax_linattn.forms.tokens import Rule


class NoDecay(NamedTuple):
    """Everything stays."""

    heads: Heads
    total: None = None
    row_logs: None = None
    at_end: None = None

    def start(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array, None]:
        return q, k, v, None

    def weights(self, rule: Rule, q: Array, k: Array) -> Array:
        return rule.einsum("nbgxf,nbgcf->nbgxc", q, k)[:, :, :, None]

    def read(self, rule: Rule, q: Array, sums: Sums) -> tuple[Array, Array]:
        return rule.einsum("nbgxf,nbgfe->nbgxe", q, sums.kv), rule.einsum("nbgxf,nbgvf->nbgxv", q, sums.key_sum)

    def sums(self, rule: Rule, k: Array, v: Array, ones: Array | None = None) -> Sums:
        del ones
        key_sum = jnp.broadcast_to(jnp.sum(k, axis=-2)[..., None, :], (*k.shape[:3], self.heads.values, k.shape[-1]))
        return Sums(rule.einsum("nbgcf,nbgce->nbgfe", k, v), key_sum)


class DecayPerHead(NamedTuple):
    """A factor a token and state head: keys, and their products with queries, are shared as without decay."""

    heads: Heads
    between: Array  # [n, B, G, b, C, C]: what is left of token s at t; 0 for s > t
    from_start: Array  # [n, B, G, b, C]: what is left of the sums before the chunk at each token
    to_end: Array  # [n, B, G, b, C]: what is left of each token at the chunk's end
    logs: Array  # [n, B, G, C, b]: L - L°

    @classmethod
    def of(cls, heads: Heads, log_decay: Array) -> "DecayPerHead":
        """Of log decays [n, B, C, N]."""
        log_decay = heads.group_decays(log_decay)
        parts = _exact_running_sums(lax.stop_gradient(log_decay))  # each [n, B, G, b, C]
        between = sum(x[..., :, None] - x[..., None, :] for x in parts)
        visible = jnp.tri(log_decay.shape[-1], dtype=bool)
        return cls(
            heads,
            jnp.exp(jnp.where(visible, between, -jnp.inf)),
            jnp.exp(sum(parts)),
            jnp.exp(sum(x[..., -1:] - x for x in parts)),
            _logs(jnp.swapaxes(log_decay, -1, -2)),
        )

    @property
    def total(self) -> Array:
        return self.from_start[..., -1:]

    @property
    def at_end(self) -> Array:
        return jnp.exp(self.logs[-1, ..., -1, :, None])

    @property
    def row_logs(self) -> Array | None:
        if self.heads.values == 1:
            return None
        return jnp.moveaxis(self.logs, -2, -3).reshape(*self.logs.shape[:2], self.logs.shape[-2], -1)

    def start(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array, Array | None]:
        unit = jnp.exp(-self.logs)
        if self.heads.values == 1:
            return self.heads.times_time(q, jnp.exp(self.logs)), k * unit, v, None
        return q, k, self.heads.times_values(v, unit), jnp.swapaxes(unit, -1, -2)  # keys are shared by several decays

    def weights(self, rule: Rule, q: Array, k: Array) -> Array:
        weights = self.heads.split_queries(rule.einsum("nbgxf,nbgcf->nbgxc", q, k))  # [n, B, G, r, C, C]
        weights = weights * self.between  # of r and b one is 1
        return weights.reshape(*weights.shape[:3], self.heads.values, -1, weights.shape[-1])

    def read(self, rule: Rule, q: Array, sums: Sums) -> tuple[Array, Array]:
        numerator, denominator = NoDecay(self.heads).read(rule, q, sums)
        left = jnp.swapaxes(self.from_start, -1, -2)  # [n, B, G, C, b]
        return self.heads.times_values(numerator, left), self.heads.times_values(denominator, left)

    def sums(self, rule: Rule, k: Array, v: Array, ones: Array | None) -> Sums:
        v = self.heads.times_values(v, jnp.swapaxes(self.to_end, -1, -2))
        left = self.to_end if ones is None else self.to_end * ones
        return Sums(rule.einsum("nbgcf,nbgce->nbgfe", k, v), rule.einsum("nbgvc,nbgcf->nbgvf", left, k))


class DecayPerFeature(NamedTuple):
    """A factor a token, state head and feature. One group a state head.

    Products in halves: of a pair of blocks, what a query of the second reads of a key of the first is
    (φ(q) ⊙ a_m ⋯ a_t) · (φ(k) ⊙ a_{s+1} ⋯ a_{m-1}), m the second's first token: one matrix product a pair, on log₂ C
    levels, from blocks of one token on.
    """

    heads: Heads
    levels: list[tuple[Array, Array]]  # of `_products`
    logs: Array  # [n, B, G, C, F]: L - L°
    row_logs: None = None  # rows have a factor a feature: it is on the queries

    @classmethod
    def of(cls, heads: Heads, log_decay: Array) -> "DecayPerFeature":
        """Of log decays [n, B, C, N, F]."""
        log_decay = heads.group_keys(log_decay)
        decay = jnp.exp(lax.stop_gradient(log_decay))
        return cls(heads, _products(decay), _logs(log_decay))

    @property
    def total(self) -> Array:
        return self._from_start()[..., -1:, :]

    @property
    def at_end(self) -> Array:
        return jnp.exp(self.logs[-1, ..., -1:, :])

    def start(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array, None]:
        return self.heads.times_time(q, jnp.exp(self.logs)), k * jnp.exp(-self.logs), v, None

    def weights(self, rule: Rule, q: Array, k: Array) -> Array:
        q, k, length = _pad(self.heads.split_queries(q)), _pad(k), k.shape[-2]  # [n, B, G, r, C, F] and without r
        weights = jnp.sum(q * k[:, :, :, None], axis=-1)[..., None, None]  # [n, B, G, r, blocks, tokens, tokens]
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

    def sums(self, rule: Rule, k: Array, v: Array, ones: Array | None) -> Sums:
        to_end = self.levels[-1][1][..., 0, : k.shape[-2], :]
        return NoDecay(self.heads).sums(rule, k * to_end, v, ones)

    def _from_start(self) -> Array:
        return self.levels[-1][0][..., 0, : self.logs.shape[-2], :]


@jax.custom_jvp
def _logs(log_decay: Array) -> Array:
    """L - L° for L the running sum of log decays [n, B, G, C, X] over all n chunks: zeros, with the derivatives of L."""
    return jnp.where(jnp.zeros((), bool), log_decay, 0)  # as it varies over the axes of `shard_map`


@_logs.defjvp
def _logs_jvp(primals, tangents):
    (log_decay,), (tangent,) = primals, tangents
    forgets = jnp.exp(log_decay) == 0
    return _logs(log_decay), _sums_since(forgets, jnp.where(forgets, 0, tangent))


def _sums_since(restarts: Array, x: Array) -> Array:
    """The sums of x over time up to each token, from the last restart on: of [n, B, G, C, X], over all n chunks.

    What comes after a restart has no part in what comes before it, be it inf, and its rounding errors have none.
    """
    length = x.shape[-2]
    sums, goes_on = _blocks(_pad(x), 1), _blocks(_pad(~restarts, True), 1)  # […, blocks, tokens, X]
    while sums.shape[-3] > 1:
        first, second, goes_on_first, goes_on_second = *_pairs(sums), *_pairs(goes_on)
        second = second + jnp.where(goes_on_second, first[..., -1:, :], 0)
        sums = jnp.concatenate([first, second], axis=-2)
        goes_on = jnp.concatenate([goes_on_first, goes_on_second & goes_on_first[..., -1:, :]], axis=-2)
    sums, goes_on = sums[..., 0, :length, :], goes_on[..., 0, :length, :]

    def combine(earlier, later):
        (earlier_sums, earlier_goes_on), (later_sums, later_goes_on) = earlier, later
        return later_sums + jnp.where(later_goes_on, earlier_sums, 0), earlier_goes_on & later_goes_on

    after_chunks, _ = lax.associative_scan(combine, (sums[..., -1:, :], goes_on[..., -1:, :]))
    before_chunks = jnp.concatenate([jnp.zeros_like(after_chunks[:1]), after_chunks[:-1]])
    return sums + jnp.where(goes_on, before_chunks, 0)


def _pairs(x: Array) -> tuple[Array, Array]:
    """The first and the second block of each pair, of […, blocks, tokens, X]."""
    return x[..., ::2, :, :], x[..., 1::2, :, :]


def _products(decay: Array) -> list[tuple[Array, Array]]:
    """What blocks of one token leave, of two, of four, and so on to one block of all.

    Args:
      decay: factors […, C, X]; C is filled up to a power of two with ones.

    Returns:
      For each level (start, end), […, blocks, tokens, X]: the product of the factors from the block's first token up to
      each token, and of those after it up to the block's last.
    """
    start = _pad(decay, 1)[..., None, :]
    end = jnp.ones_like(start)
    levels = [(start, end)]
    while start.shape[-3] > 1:
        first_start, second_start, first_end, second_end = *_pairs(start), *_pairs(end)
        start = jnp.concatenate([first_start, second_start * first_start[..., -1:, :]], axis=-2)
        end = jnp.concatenate([first_end * second_start[..., -1:, :], second_end], axis=-2)
        levels.append((start, end))
    return levels


def _exact_running_sums(log_decay: Array) -> list[Array]:
    """The running sums over the last axis, of numbers <= 0, in parts to be added: all parts but the last have no rounding
    error, nor have their differences, and the last is small.

    Each log decay is rounded to a multiple of such a step that all their sum still fits the dtype's digits; the next part
    is made of what that leaves, at most half a step each, until that is little enough for its sum to need no exactness.
    """
    length, digits = log_decay.shape[-1], jnp.finfo(log_decay.dtype).nmant
    bound = {23: 2.0**7, 52: 2.0**10}[digits]  # no need to be exact below: the exponential is 0
    rest, parts = jnp.maximum(log_decay, -bound), []
    while bound * length > 2**-4:  # what is left sums up to more: its rounding error would show
        step = bound * 2.0 ** ((length - 1).bit_length() - digits)
        part = jnp.round(rest / step) * step
        rest, bound = rest - part, step / 2
        parts.append(part)
    return [lax.associative_scan(jnp.add, part, axis=-1) for part in (*parts, rest)]


def _pad(x: Array, fill: float = 0) -> Array:
    """x […, C, X] with C filled up to a power of two."""
    length = x.shape[-2]
    padding = (1 << (length - 1).bit_length()) - length
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, padding), (0, 0)], constant_values=fill) if padding else x


def _blocks(x: Array, size: int) -> Array:
    """[…, C, X] to […, C/size, size, X]."""
    return x.reshape(*x.shape[:-2], x.shape[-2] // size, size, x.shape[-1])

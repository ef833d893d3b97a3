"""Feature maps φ: what replaces the softmax, so that φ(q)·φ(k) is the weight of a key.

A feature map is a callable ``[..., heads, D] -> [..., heads, F]`` that treats every axis but the last two
independently; elementwise maps take any rank. Where queries and keys are mapped differently, `FeatureMap(query=...,
key=...)` holds the two. Maps are computed in float32 for 16-bit inputs and return the dtype that they were given.

A map may return ``(features, log_scale)`` with features of size about 1 and ``log_scale [..., heads]``: the true features
are ``features · exp(log_scale)``. The forms then keep their sums relative to a running maximum of the keys' scales, so that
keys of any size are exact and nothing depends on later ones; a query's scale cancels where the exact normaliser is.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_linattn.dtypes import accumulator_dtype

Map = Callable[[Array], Any]


def _in_float32(function):
    """Computes a map in float32 for 16-bit inputs, and returns the dtype that came in."""

    @functools.wraps(function)
    def wrapped(x: Array) -> Array:
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"x must be a floating-point array, got {x.dtype}")
        return function(x.astype(accumulator_dtype(x.dtype))).astype(x.dtype)

    return wrapped


# --- maps of one value at a time ---------------------------------------------------------------------------------------


@_in_float32
def elu_plus_one(x: Array) -> Array:
    """φ(x) = x + 1 for x > 0, exp(x) otherwise: elu(x) + 1 without its cancellation, so exp(x) to rounding below 0.

    Positive everywhere, F = D. The default. Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236.

    >>> elu_plus_one(jnp.array([-20.0, 0.0, 2.0]))
    Array([2.0611537e-09, 1.0000000e+00, 3.0000000e+00], dtype=float32)
    """
    return jnp.maximum(x, 0) + jnp.exp(jnp.minimum(x, 0))


@_in_float32
def relu(x: Array) -> Array:
    """φ(x) = max(x, 0), F = D. A row without positive features has no weight: its normalised output is 0."""
    return jax.nn.relu(x)


@_in_float32
def relu_squared(x: Array) -> Array:
    """φ(x) = max(x, 0)², F = D. Hua et al. 2022 (FLASH), https://arxiv.org/abs/2202.10447."""
    return jnp.square(jax.nn.relu(x))


@_in_float32
def softplus(x: Array) -> Array:
    """φ(x) = log(1 + exp(x)), F = D: smooth, positive, and exp(x) to rounding for very negative x."""
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


@_in_float32
def exp(x: Array) -> Array:
    """φ(x) = exp(x), F = D.

    In attention queries and keys of any size are exact: their largest feature is kept apart as a scale. Called by itself, a
    value above log(3.4e38) = 88.7 (709.7 in float64) saturates at the largest float, with derivative 0.
    """
    return saturating_exp(x)


def _exp_apart(x: Array) -> tuple[Array, Array]:
    """exp(x) as (features of size at most 1, log_scale)."""
    largest = jax.lax.stop_gradient(jnp.max(x, axis=-1))
    return jnp.exp(x - largest[..., None]), largest


@_in_float32
def softmax(x: Array) -> Array:
    """φ(x) = softmax(x) over the features of one token, F = D: positive, and sums to one whatever the size of x.

    As for the queries of efficient attention, Shen et al. 2021, https://arxiv.org/abs/1812.01243.
    """
    return jax.nn.softmax(x, axis=-1)


@_in_float32
def identity(x: Array) -> Array:
    """φ(x) = x, F = D. Weights may be negative or sum to zero: use it with ``normalize=False``."""
    return x


# --- maps of one vector ------------------------------------------------------------------------------------------------


@_in_float32
def taylor(x: Array) -> Array:
    """φ(x)·φ(y) = 1 + s + s²/2 with s = x·y/√D: the exponential kernel to second order.

    φ(x) = [1, x/D^¼, (x_i x_j c_ij / √D) for i <= j] with c_ii = 1/√2 and c_ij = 1. The products are symmetric, so each is
    kept once: F = 1 + D + D(D+1)/2, half of the D² of the plain form. Always positive: 1 + s + s²/2 >= 1/2.
    Arora et al. 2024 (Based), https://arxiv.org/abs/2402.18668.
    """
    dim = x.shape[-1]
    x = x * dim**-0.25
    row, column = np.triu_indices(dim)
    constant = np.where(row == column, 0.5**0.5, 1.0).astype(x.dtype)
    products = x[..., row] * x[..., column] * jnp.broadcast_to(constant, (*x.shape[:-1], row.size))
    return jnp.concatenate([jnp.ones_like(x[..., :1]), x, products], axis=-1)


@dataclasses.dataclass(frozen=True)
class DPFP:
    """The map that `dpfp` returns; two of the same ν are equal, so that compiled code is found again."""

    nu: int = 1

    def __call__(self, x: Array) -> Array:
        return _in_float32(self._products)(x)

    def _products(self, x: Array) -> Array:
        r = jnp.concatenate([jax.nn.relu(x), jax.nn.relu(-x)], axis=-1)
        return jnp.concatenate([r * jnp.roll(r, shift, axis=-1) for shift in range(1, self.nu + 1)], axis=-1)


def dpfp(nu: int = 1) -> DPFP:
    """Deterministic parameter-free projection: φ(x) = [r ⊙ roll(r, 1), …, r ⊙ roll(r, ν)], r = [relu(x), relu(-x)].

    F = 2·D·ν, non-negative and sparse, with φ(x)·φ(-x) = 0. Schlag, Irie, Schmidhuber 2021,
    https://arxiv.org/abs/2102.11174.

    Args:
      nu: how many shifts; use ν < D: a shift by D gives zeros, and longer ones repeat products.

    Raises:
      ValueError: if ν is not a positive whole number.
    """
    return DPFP(_positive_int("nu", nu))


# --- random features ---------------------------------------------------------------------------------------------------

FavorKind = Literal["positive", "hyperbolic", "trig"]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["projection"], meta_fields=["kind"])
@dataclasses.dataclass(frozen=True, eq=False)  # compared and hashed as an object: arrays can be neither
class FavorPlus:
    """The random feature map of `favor_plus`: ``projection [F', D]`` is a leaf, drawn once.

    Called, it gives the plain features, whose products estimate exp(x·y/√D) without bias. `query` and `key` give the same
    features with each row's size apart, as ``(features, log_scale)``, which is what attention takes.
    """

    projection: Array
    kind: FavorKind = "positive"

    def __call__(self, x: Array) -> Array:
        return _in_float32(self._unscaled)(x)

    def query(self, x: Array) -> tuple[Array, Array]:
        features, log_scale = self._scaled(x.astype(accumulator_dtype(x.dtype)))
        return features.astype(x.dtype), log_scale

    key = query

    def _scaled(self, x: Array) -> tuple[Array, Array]:
        dim = self.projection.shape[-1]
        if x.shape[-1] != dim:
            raise ValueError(f"this favor_plus map was drawn for head dim {dim}, got {x.shape[-1]}")
        x = x * x.shape[-1] ** -0.25
        u = jnp.einsum("...d,fd->...f", x, self.projection.astype(x.dtype), precision="highest")
        half_square = jnp.sum(jnp.square(x), axis=-1) / 2
        if self.kind == "trig":
            features, log_scale = jnp.concatenate([jnp.sin(u), jnp.cos(u)], axis=-1), half_square
        else:
            u = u if self.kind == "positive" else jnp.concatenate([u, -u], axis=-1)
            largest = jax.lax.stop_gradient(jnp.max(u, axis=-1))
            features, log_scale = jnp.exp(u - largest[..., None]), largest - half_square
        count = u.shape[-1]  # F' terms are averaged; 2·F' for the hyperbolic pairs
        return features * count**-0.5, log_scale

    def _unscaled(self, x: Array) -> Array:
        features, log_scale = self._scaled(x)
        return features * saturating_exp(log_scale)[..., None]


def favor_plus(
    key: Array,
    dim: int,
    num_features: int,
    *,
    kind: FavorKind = "positive",
    orthogonal: bool = True,
    dtype: Any = jnp.float32,
) -> FavorPlus:
    """Random features for the exponential kernel: E[φ(x)·φ(y)] = exp(x·y/√D), the softmax kernel.

    With x scaled by D^-¼ and rows w of the projection drawn from N(0, I):

      "positive"    φ(x) = exp(w·x - |x|²/2) / √F'                     F = F'
      "hyperbolic"  φ(x) = exp(±w·x - |x|²/2) / √(2F')                 F = 2F'
      "trig"        φ(x) = exp(|x|²/2) [sin(w·x), cos(w·x)] / √F'      F = 2F', weights may be negative

    Choromanski et al. 2021 (Performer, FAVOR+), https://arxiv.org/abs/2009.14794. No maximum is taken over other tokens,
    so causal attention stays strictly causal, and the projection is drawn here and never again: for fresh features call
    this function with a new key.

    In attention the size of each row is kept apart, so queries and keys of any size are exact for these features. Called by
    itself the map is float32 as it stands: the positive kinds vanish for |x|²/(2√D) beyond about 87, "trig" saturates.

    Args:
      key: a PRNG key.
      dim: D, the head dim of queries and keys.
      num_features: F', the rows of the projection.
      kind: the estimator, as above.
      orthogonal: draw the rows in orthogonal blocks of D, each row still N(0, I): a smaller error for the same F'.
      dtype: of the projection.

    Returns:
      A `FavorPlus` pytree with the leaf ``projection [F', D]``.

    Raises:
      ValueError: on an unknown kind, or a dim or num_features that is not a positive whole number.
    """
    _positive_int("dim", dim)
    _positive_int("num_features", num_features)
    if kind not in FavorKind.__args__:
        raise ValueError(f"kind must be one of {list(FavorKind.__args__)}, got {kind!r}")
    draw = _orthogonal_gaussian if orthogonal else jax.random.normal
    return FavorPlus(draw(key, (num_features, dim), accumulator_dtype(dtype)).astype(dtype), kind)


def _orthogonal_gaussian(key: Array, shape: tuple[int, int], dtype) -> Array:
    """Rows that are orthogonal within each block of D, every row distributed as N(0, I)."""
    num_rows, dim = shape
    block_key, norm_key = jax.random.split(key)
    blocks = jax.random.normal(block_key, (-(-num_rows // dim), dim, dim), dtype)
    q, r = jnp.linalg.qr(blocks)
    # QR alone fixes the signs of R's diagonal its own way, which is not Haar-distributed; making it positive is.
    q = q * jnp.where(jnp.diagonal(r, axis1=-2, axis2=-1) < 0, -1.0, 1.0).astype(dtype)[:, None, :]
    directions = jnp.swapaxes(q, -1, -2).reshape(-1, dim)[:num_rows]
    norms = jnp.linalg.norm(jax.random.normal(norm_key, shape, dtype), axis=-1, keepdims=True)
    return directions * norms


# --- learnable maps: the mathematics of the modules in `linen` and `nnx` --------------------------------------------------


def hedgehog(x: Array, kernel: Array, bias: Array) -> Array:
    """φ(x) = [softmax(xW + b), softmax(-xW - b)] with one W a head: x [..., heads, D], kernel [heads, D, F/2], F = 2·F/2.

    Zhang et al. 2024, https://arxiv.org/abs/2402.04347.
    """
    y = _project(x, kernel, bias)
    return jnp.concatenate([jax.nn.softmax(y, axis=-1), jax.nn.softmax(-y, axis=-1)], axis=-1).astype(x.dtype)


def t2r(x: Array, kernel: Array, bias: Array) -> Array:
    """φ(x) = relu(xW + b) with one W a head: x [..., heads, D], kernel [heads, D, F], bias [heads, F].

    Kasai et al. 2021, https://arxiv.org/abs/2103.13076.
    """
    return jax.nn.relu(_project(x, kernel, bias)).astype(x.dtype)


def _project(x: Array, kernel: Array, bias: Array) -> Array:
    dtype = accumulator_dtype(x.dtype)
    y = jnp.einsum("...hd,hdf->...hf", x.astype(dtype), kernel.astype(dtype))
    return y + jnp.broadcast_to(bias.astype(dtype), y.shape)


# --- maps for queries and keys ----------------------------------------------------------------------------------------


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class FeatureMap:
    """Two maps, where queries and keys are mapped differently; a pytree of whatever arrays the two hold."""

    query: Map
    key: Map

    def tree_flatten(self):
        return (as_pytree(self.query), as_pytree(self.key)), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def split(feature_map) -> tuple[Map, Map]:
    """The maps of the queries and of the keys, as attention applies them: of the exponential ones, with scales apart."""
    if isinstance(feature_map, FeatureMap):
        return split(feature_map.query)[0], split(feature_map.key)[1]
    if isinstance(feature_map, FavorPlus):
        return feature_map.query, feature_map.key
    if feature_map is exp or (isinstance(feature_map, jax.tree_util.Partial) and feature_map.func is exp):
        return _exp_apart, _exp_apart
    return feature_map, feature_map


def as_pytree(feature_map):
    """The same map as a pytree, whose leaves are its arrays: a plain function becomes one without leaves."""
    return jax.tree_util.Partial(feature_map) if jax.tree_util.all_leaves([feature_map]) else feature_map


def is_own(feature_map) -> bool:
    """Whether the map is one of this file's: known to depend on its arguments and leaves alone."""
    if isinstance(feature_map, FeatureMap):
        return is_own(feature_map.query) and is_own(feature_map.key)
    if isinstance(feature_map, jax.tree_util.Partial) and not feature_map.keywords:
        return is_own(feature_map.func)
    return isinstance(feature_map, FavorPlus | DPFP) or any(feature_map is own for own in _BY_NAME.values())


_BY_NAME: dict[str, Map] = {
    "elu_plus_one": elu_plus_one,
    "relu": relu,
    "relu_squared": relu_squared,
    "softplus": softplus,
    "exp": exp,
    "softmax": softmax,
    "identity": identity,
    "taylor": taylor,
    "dpfp_1": DPFP(1),
    "dpfp_2": DPFP(2),
    "dpfp_3": DPFP(3),
}


def get(name: str) -> Map:
    """The map of a name, for configs: `elu_plus_one`, …, `taylor`, `dpfp_1`, `dpfp_2`, `dpfp_3`.

    Raises:
      ValueError: on any other name, with the list of names.
    """
    if name not in _BY_NAME:
        raise ValueError(f"unknown feature map {name!r}; the names are {sorted(_BY_NAME)}")
    return _BY_NAME[name]


def saturating_exp(x: Array) -> Array:
    """exp(x), the largest float where that would overflow: inf would make NaN out of every zero tangent."""
    limit = np.nextafter(np.log(jnp.finfo(x.dtype).max).astype(x.dtype), np.array(0, x.dtype))
    return jnp.exp(jnp.minimum(x, limit))


def _positive_int(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be a positive whole number, got {value!r}")
    return int(value)

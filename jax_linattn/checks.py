"""Checks of what users pass in. Each error names the argument, what it got, and what would be right."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, dtypes

from jax_linattn import feature_maps
from jax_linattn.dtypes import accumulator_dtype
from jax_linattn.state import LinearAttentionState


def require(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


def check_one_of(name: str, value, choices) -> None:
    require(value in choices, f"{name} must be one of {list(choices)}, got {value!r}")


def check_bool(name: str, value) -> None:
    require(isinstance(value, bool), f"{name} must be True or False, got {value!r}")


def check_positive_int(name: str, value, *, or_none: bool = False) -> None:
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    expected = "a positive whole number or None" if or_none else "a positive whole number"
    require((or_none and value is None) or (is_int and value >= 1), f"{name} must be {expected}, got {value!r}")


def check_heads(num_query: int, num_key: int, num_value: int) -> None:
    """K and V divide N = max(K, V), and of H and N the smaller divides the larger."""
    counts = f"query has {num_query} heads, key {num_key} and value {num_value}"
    require(min(num_query, num_key, num_value) > 0, f"{counts}: there must be at least one of each")
    num_state = max(num_key, num_value)
    require(
        num_state % num_key == 0 and num_state % num_value == 0,
        f"{counts}: of key and value heads the smaller number must divide the larger",
    )
    require(
        max(num_query, num_state) % min(num_query, num_state) == 0,
        f"{counts}: of query heads and max(key, value) heads the smaller number must divide the larger. "
        "The axes are [batch, time, heads, dim]",
    )


def sequences(query, key, value, *, same_length: bool, batched: bool = False) -> tuple[tuple[Array, Array, Array], bool]:
    """Checks query [B, T, H, D], key [B, S, K, D], value [B, S, V, E]; adds B where it is missing, and says whether."""
    ranks = {4: "[B, T, heads, dim]"} if batched else {4: "[B, T, heads, dim]", 3: "unbatched [T, heads, dim]"}
    query, key, value = _vectors(query, key, value, ranks)
    unbatched = query.ndim == 3
    if unbatched:
        query, key, value = query[None], key[None], value[None]
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    require(
        query.shape[0] == key.shape[0] == value.shape[0],
        f"query, key and value must have the same batch size, got {shapes}",
    )
    require(key.shape[1] == value.shape[1], f"key and value must have the same length, got {shapes}")
    require(
        not same_length or query.shape[1] == key.shape[1],
        f"causal attention needs a key for each query (T == S), got {shapes}; cross attention is not causal",
    )
    return (query, key, value), unbatched


def one_token(query, key, value) -> tuple[Array, Array, Array]:
    """Checks query [B, H, D], key [B, K, D], value [B, V, E]."""
    query, key, value = _vectors(query, key, value, {3: "[B, heads, dim] (one token has no axis of time)"})
    require(
        query.shape[0] == key.shape[0] == value.shape[0],
        f"query, key and value must have the same batch size, got query {query.shape}, key {key.shape}, "
        f"value {value.shape}",
    )
    return query, key, value


def _vectors(query, key, value, ranks: dict[int, str]) -> tuple[Array, Array, Array]:
    """What holds for one token and for many: ranks, dtypes, dims and heads."""
    arrays = []
    for name, x in {"query": query, "key": key, "value": value}.items():
        x = _array(name, x)
        wanted = " or ".join(f"{rank} axes {axes}" for rank, axes in ranks.items())
        require(x.ndim in ranks, f"{name} must have {wanted}, got shape {x.shape}")
        require(jnp.issubdtype(x.dtype, jnp.floating), f"{name} must be a floating-point array, got {x.dtype}")
        arrays.append(x)
    query, key, value = arrays
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    require(query.ndim == key.ndim == value.ndim, f"query, key and value must have the same rank, got {shapes}")
    require(
        query.dtype == key.dtype == value.dtype,
        f"query, key and value must share one dtype, got {query.dtype}, {key.dtype} and {value.dtype}",
    )
    require(query.shape[-1] == key.shape[-1], f"query and key must have the same head dim, got {shapes}")
    require(min(query.shape[-1], value.shape[-1]) > 0, f"head dims must be at least 1, got {shapes}")
    check_heads(query.shape[-2], key.shape[-2], value.shape[-2])
    return query, key, value


def _array(name: str, x) -> Array:
    require(hasattr(x, "dtype") and hasattr(x, "shape"), f"{name} must be an array, got {type(x).__name__}")
    return x if isinstance(x, Array) else jnp.asarray(x)


def keys_and_values(key, value) -> None:
    """Checks what `init_state` takes: arrays or shapes of one token or a sequence."""
    for name, x in {"key": key, "value": value}.items():
        require(
            hasattr(x, "dtype") and hasattr(x, "shape") and len(x.shape) in (3, 4),
            f"{name} must be an array or jax.ShapeDtypeStruct [B, heads, dim] or [B, T, heads, dim], got "
            f"{getattr(x, 'shape', type(x).__name__)}",
        )
        require(jnp.issubdtype(x.dtype, jnp.floating), f"{name} must be floating-point, got {x.dtype}")
    require(
        key.shape[:-2] == value.shape[:-2] and key.dtype == value.dtype,
        f"key and value must have the same batch, length and dtype, got {key.dtype} {key.shape} and "
        f"{value.dtype} {value.shape}",
    )
    num_key, num_value = key.shape[-2], value.shape[-2]
    require(
        min(num_key, num_value) > 0 and max(num_key, num_value) % min(num_key, num_value) == 0,
        f"of the {num_key} key heads and {num_value} value heads the smaller number must divide the larger",
    )


def add_batch(argument):
    """A leading axis for an optional argument of an unbatched call; what is no array is left for its own check to name."""
    if isinstance(argument, tuple):
        return tuple(map(add_batch, argument))
    return jnp.asarray(argument)[None] if isinstance(argument, list | int) or hasattr(argument, "shape") else argument


def key_mask(mask, batch: int, length: int) -> Array | None:
    """A mask of keys as bool [B, S]."""
    if mask is None:
        return None
    accepted = (
        f"mask must be bool with True for a real token, of shape [B, S] = {(batch, length)} or [B or 1, 1, 1, S]; got "
        f"{getattr(mask, 'dtype', type(mask).__name__)} {np.shape(mask)}. "
        "For a causal mask use is_causal=True, for packed documents segment_ids"
    )
    require(hasattr(mask, "dtype") and mask.dtype == jnp.bool_, accepted)
    mask = jnp.asarray(mask)
    require(mask.shape in {(batch, length), (batch, 1, 1, length), (1, 1, 1, length)}, accepted)
    return jnp.broadcast_to(mask.reshape(mask.shape[0], length), (batch, length))


def integers(name: str, x, shape: tuple[int, ...], meaning: str) -> Array:
    """An array of whole numbers of just this shape."""
    got = f"got {getattr(x, 'dtype', type(x).__name__)} {np.shape(x)}"
    message = f"{name} must be an integer array of shape {meaning} = {shape}, {got}"
    require(hasattr(x, "dtype") or isinstance(x, list | int), message)
    dtype = dtypes.canonicalize_dtype(int)  # one dtype, so that ids of different arrays compare
    if isinstance(x, np.ndarray) and x.dtype.kind in "iu" and x.size:
        fits = np.iinfo(dtype).min <= x.min() and x.max() <= np.iinfo(dtype).max
        require(fits, f"{name} must fit {dtype}, got values from {x.min()} to {x.max()}")
    x = jnp.asarray(x)
    require(jnp.issubdtype(x.dtype, jnp.integer) and x.shape == shape, message)
    return x.astype(dtype)


def length_mask(name: str, lengths, batch: int, length: int) -> Array | None:
    """Positions before each row's length, as bool [B, length]."""
    if lengths is None:
        return None
    lengths = integers(name, lengths, (batch,), "[B]")
    return jnp.arange(length, dtype=lengths.dtype)[None, :] < lengths[:, None]


def segments(segment_ids, batch: int, query_length: int, key_length: int, is_causal: bool):
    """(query ids [B, T], key ids [B, S]), or (None, None)."""
    if segment_ids is None:
        return None, None
    if isinstance(segment_ids, tuple):
        require(
            not is_causal and len(segment_ids) == 2,
            "segment_ids must be one int array [B, T]; not causal it may be a pair (query ids [B, T], key ids [B, S]); "
            f"got a tuple of {len(segment_ids)}",
        )
        query_ids, key_ids = segment_ids
        return (
            integers("segment_ids[0]", query_ids, (batch, query_length), "[B, T]"),
            integers("segment_ids[1]", key_ids, (batch, key_length), "[B, S]"),
        )
    require(
        query_length == key_length,
        "segment_ids must be a pair (query ids [B, T], key ids [B, S]) where the lengths differ, got one array",
    )
    ids = integers("segment_ids", segment_ids, (batch, query_length), "[B, T]")
    return ids, ids


def log_decay(log_decay, leading: tuple[int, ...], num_heads: int, axes: str, unbatched: bool = False) -> Array | None:
    """Log decay as [*leading, N] or [*leading, N, X]; X is for `check_decayed_features`.

    Args:
      log_decay: what was passed, or None.
      leading: (B, T), or (B,) for one token.
      num_heads: N.
      axes: the letters of (*leading, N), for the error.
      unbatched: whether it was passed without B.
    """
    if log_decay is None:
        return None
    shape, dtype = np.shape(log_decay), getattr(log_decay, "dtype", None)
    passed = leading[1:] if unbatched else leading
    letters = axes.replace("B, ", "") if unbatched else axes
    accepted = (
        f"log_decay must be a floating-point array per head, [N] = ({num_heads},) or {letters} = {(*passed, num_heads)}, "
        f"or per feature, {letters[:-1]}, F], N being the larger number of key and value heads; got "
        f"{dtype or type(log_decay).__name__} {shape}; other shapes by jnp.broadcast_to"
    )
    require(dtype is not None and jnp.issubdtype(dtype, jnp.floating), accepted)
    full = (*passed, num_heads)
    require(shape in {(num_heads,), full} or shape[:-1] == full, accepted)
    log_decay = jnp.asarray(log_decay)
    if shape == (num_heads,):
        return jnp.broadcast_to(log_decay, (*leading, num_heads))
    return log_decay[None] if unbatched else log_decay


def check_decayed_features(log_decay: Array | None, rank: int, num_features: int) -> None:
    """That a decay per feature, which has the rank of the keys, is of as many features as φ gives."""
    if log_decay is not None and log_decay.ndim == rank:
        got = f"the feature map gives F = {num_features}, got log_decay {log_decay.shape}"
        require(log_decay.shape[-1] == num_features, f"log_decay per feature must be [..., N, F]; {got}")


def token_mask(mask, batch: int) -> Array | None:
    """The mask of one step, bool [B]."""
    if mask is None:
        return None
    got = f"got {getattr(mask, 'dtype', type(mask).__name__)} {np.shape(mask)}"
    fits = getattr(mask, "dtype", None) == jnp.bool_ and np.shape(mask) == (batch,)
    require(fits, f"mask must be bool [B] = ({batch},) with True for a real token, {got}")
    return jnp.asarray(mask)


def check_rule(feature_map, normalize, eps, scale) -> None:
    check_bool("normalize", normalize)
    is_number = isinstance(eps, int | float | np.number) and not isinstance(eps, bool)
    require(is_number and eps >= 0, f"eps must be a number >= 0 that is known when compiling, got {eps!r}")
    require(eps == 0 or normalize, f"eps is added to the normaliser, so it needs normalize=True; got eps={eps!r}")
    check_feature_map(feature_map)
    if scale is None:
        return
    require(not normalize, f"scale needs normalize=False: it cancels in a normalised output; got scale={scale!r}")
    is_real = isinstance(scale, int | float) or jnp.issubdtype(getattr(scale, "dtype", object), jnp.floating)
    require(
        is_real and jnp.ndim(scale) == 0,
        f"scale must be a real number or a scalar array, got {type(scale).__name__} of shape {np.shape(scale)}",
    )


def check_feature_map(feature_map, part: str = "feature_map") -> None:
    """That it can be called, both sides of a `FeatureMap` too."""
    if isinstance(feature_map, feature_maps.FeatureMap):
        check_feature_map(feature_map.query, f"{part}.query")
        check_feature_map(feature_map.key, f"{part}.key")
        return
    hint = "; feature_maps.get(name) gives the function of a name" if isinstance(feature_map, str) else ""
    hint = "; make an instance of the class first" if isinstance(feature_map, type) else hint
    makes_a_map = any(feature_map is maker for maker in (feature_maps.dpfp, feature_maps.favor_plus))
    hint = "; that function makes one: dpfp(2), favor_plus(key, dim, num_features)" if makes_a_map else hint
    require(
        callable(feature_map) and not isinstance(feature_map, type) and not makes_a_map,
        f"{part} must be a function [..., heads, D] -> [..., heads, F] or a FeatureMap, got {feature_map!r}{hint}",
    )


def check_features(feature_map, heads: Iterable[tuple[str, int]], dim: int, dtype) -> int:
    """Traces the maps on one token, checks what they return, and gives F.

    Args:
      feature_map: as a pytree, see `feature_maps.as_pytree`.
      heads: ("query", H) and ("key", K), or the last alone.
      dim: D.
      dtype: of queries and keys.
    """
    heads, dtype = tuple(heads), accumulator_dtype(dtype)
    if not feature_maps.is_own(feature_map):
        return _trace_features(lambda _: feature_map, (), heads, dim, dtype)
    leaves, structure = jax.tree.flatten(feature_map)
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    return _trace_own_features(structure, shapes, heads, dim, dtype)


@functools.lru_cache(maxsize=256)
def _trace_own_features(structure, shapes, heads, dim: int, dtype) -> int:
    """Remembered, so that a decoding loop outside `jit` does not trace the map at every token."""
    return _trace_features(structure.unflatten, shapes, heads, dim, dtype)


def _trace_features(make_map, leaves, heads: tuple[tuple[str, int], ...], dim: int, dtype) -> int:
    sizes = {}
    for name, num_heads in heads:
        token = jax.ShapeDtypeStruct((1, num_heads, dim), dtype)
        side = ("query", "key").index(name)
        apply = lambda leaves, x, side=side: feature_maps.split(make_map(leaves))[side](x)
        result = jax.eval_shape(apply, leaves, token)
        phi = result[0] if isinstance(result, tuple) else result
        require(
            not isinstance(result, tuple) or (len(result) == 2 and jnp.shape(result[1]) == jnp.shape(phi)[:-1]),
            f"feature_map must give {name} features [..., {num_heads}, F] or (features, log_scale [..., {num_heads}]), "
            f"got {result}",
        )
        fits = getattr(phi, "ndim", None) == 3 and phi.shape[:2] == token.shape[:2] and phi.dtype == token.dtype
        require(
            fits and phi.shape[-1] > 0,
            f"feature_map must map {name} {token.dtype} [..., {num_heads}, {dim}] to [..., {num_heads}, F >= 1] of the "
            f"same dtype; for {token.shape} it gave {phi}",
        )
        sizes[name] = phi.shape[-1]
    require(len(set(sizes.values())) == 1, f"feature_map gives different numbers of features: {sizes}")
    return sizes["key"]


def check_state(state, empty: LinearAttentionState) -> None:
    """That a state fits these inputs, whose empty state has the shapes and dtypes of `empty`."""
    check_state_type(state)
    for name, want in empty._asdict().items():
        leaf = getattr(state, name)
        require(
            jnp.shape(leaf) == want.shape and jnp.result_type(leaf) == want.dtype,
            f"state.{name} must be {want.dtype} {want.shape} for these inputs, got {jnp.result_type(leaf)} "
            f"{jnp.shape(leaf)}; init_state makes one that fits",
        )


def check_state_type(state) -> None:
    require(
        isinstance(state, LinearAttentionState),
        f"state must be a LinearAttentionState, as init_state makes it, got {type(state).__name__}",
    )

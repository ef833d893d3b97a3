"""What both Flax modules are held to: situations, and a layer's output by hand, from its parameters and the oracle."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle

FEATURES, HEADS = 6, 4


class Layer(NamedTuple):
    """A layer and a call of it."""

    attributes: dict  # of the module
    batch_shape: tuple[int, ...] = (2,)
    length: int = 7
    key_length: int | None = None  # None: self-attention
    mask: str | None = None  # "left" pads, tokens missing in the "middle", or the 4-axis mask of keys, "keys"
    segments: bool = False


LAYERS = {
    "self": Layer({"qkv_features": 12}),
    "causal": Layer({"qkv_features": 12, "is_causal": True, "implementation": "chunked", "chunk_size": 3}),
    "grouped": Layer({"qkv_features": 12, "num_kv_heads": 2, "is_causal": True, "out_features": 5}, mask="middle"),
    "cross": Layer({"qkv_features": 8, "num_kv_heads": 1}, length=4, key_length=6, mask="keys"),
    "packed": Layer({"qkv_features": 8, "is_causal": True, "normalize": False}, segments=True),
    "packed_cross": Layer({"qkv_features": 8, "eps": 0.1}, key_length=9, segments=True),
    "masked_self": Layer({"qkv_features": 8, "use_bias": False}, batch_shape=(1,), mask="left"),
    "many_batch_axes": Layer({"qkv_features": 8, "is_causal": True}, batch_shape=(2, 1, 3), mask="left", segments=True),
    "no_batch_axis": Layer({"qkv_features": 8, "is_causal": True}, batch_shape=(), mask="middle"),
}


def draw(layer: Layer) -> tuple[tuple, dict]:
    """Positional and keyword arguments of the call."""
    rng = np.random.default_rng(0)
    inputs = (rng.standard_normal((*layer.batch_shape, layer.length, FEATURES)).astype(np.float32),)
    key_length = layer.length if layer.key_length is None else layer.key_length
    if layer.key_length is not None:
        inputs += (rng.standard_normal((*layer.batch_shape, key_length, FEATURES)).astype(np.float32),)
    hiding = {}
    if layer.mask is not None:
        mask = np.ones((*layer.batch_shape, key_length), bool)
        mask[..., {"left": slice(0, 2), "middle": slice(2, 4), "keys": slice(-2, None)}[layer.mask]] = False
        hiding["mask"] = mask.reshape(*layer.batch_shape, 1, 1, key_length) if layer.mask == "keys" else mask
    if layer.segments:
        ids = [np.broadcast_to(np.arange(n) // 4, (*layer.batch_shape, n)) for n in (layer.length, key_length)]
        hiding["segment_ids"] = ids[0] if layer.key_length is None else tuple(ids)
    return inputs, hiding


def by_hand(
    params: dict,
    attributes: dict,
    inputs_q,
    inputs_k=None,
    *,
    mask=None,
    segment_ids=None,
    maps=(oracle.elu_plus_one, oracle.elu_plus_one),
) -> np.ndarray:
    """What the layer must give: masked inputs zeroed, projections, the oracle, the output projection, in float64."""
    is_causal = attributes.get("is_causal", False)
    batch_shape, length = inputs_q.shape[:-2], inputs_q.shape[-2]
    key_length = length if inputs_k is None else inputs_k.shape[-2]

    def flat(x):
        return x.reshape(math.prod(batch_shape), *x.shape[len(batch_shape) :])

    mask = None if mask is None else mask.reshape(-1, key_length)
    if segment_ids is not None:
        segment_ids = tuple(map(flat, segment_ids)) if isinstance(segment_ids, tuple) else flat(segment_ids)
    x_q = flat(inputs_q).astype(np.float64)
    x_k = x_q if inputs_k is None else flat(inputs_k).astype(np.float64)
    if mask is not None:
        x_k = np.where(mask[..., None], x_k, 0)
        x_q = x_k if inputs_k is None else x_q
    query, key, value = project(params, "query", x_q), project(params, "key", x_k), project(params, "value", x_k)
    seen = oracle.visible(len(x_q), length, key_length, is_causal, mask=mask, segment_ids=segment_ids)
    rule = {name: attributes[name] for name in ("normalize", "eps") if name in attributes}
    output, _, _ = oracle.attention(query, key, value, None, None, seen, feature_map=maps, **rule)
    output = np.einsum("bthd,hdf->btf", output, params["out"]["kernel"]) + params["out"].get("bias", 0)
    if is_causal and mask is not None:
        output = np.where(mask[..., None], output, 0)
    return output.reshape(*batch_shape, *output.shape[1:])


def learned_maps(params: dict):
    """Hedgehog for queries and T2R for keys, as their papers read."""

    def affine(x, name):
        return np.einsum("bthd,hdf->bthf", x, params[name]["kernel"]) + params[name]["bias"]

    def hedgehog(x):
        y = affine(x, "query_feature_map")
        return np.concatenate([oracle.softmax(y), oracle.softmax(-y)], axis=-1)

    def t2r(x):
        return np.maximum(affine(x, "key_feature_map"), 0)

    return hedgehog, t2r


def project(params: dict, name: str, x: np.ndarray) -> np.ndarray:
    """[B, T, features] to [B, T, heads, D]."""
    kernel = np.asarray(params[name]["kernel"], np.float64)
    return np.einsum("btf,fhd->bthd", x, kernel) + np.asarray(params[name].get("bias", 0), np.float64)


def softmax_by_hand(params: dict, x: np.ndarray) -> np.ndarray:
    """What Flax's own module gives with these parameters."""
    query, key, value = (project(params, name, x.astype(np.float64)) for name in ("query", "key", "value"))
    weights = oracle.softmax(np.einsum("bthd,bshd->bhts", query, key) / query.shape[-1] ** 0.5)
    return np.einsum("bhts,bshd,hdf->btf", weights, value, params["out"]["kernel"]) + params["out"]["bias"]


def quick_normal(key, shape, dtype=np.float32):
    """A normal initialiser of fan-in size that compiles nothing; what it gives depends on the key."""
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    return jnp.asarray(rng.standard_normal(shape) * 0.5, dtype)


def ragged(lengths, total: int) -> np.ndarray:
    """The mask of left-padded rows, bool [B, T]."""
    return np.arange(total)[None, :] >= total - np.asarray(lengths)[:, None]

"""Learnable feature maps as Linen modules, and what makes any map fit for the forms."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jax import Array

from jax_linattn import feature_maps, module_calls


class Hedgehog(nn.Module):
    """φ(x) = [softmax(xW + b), softmax(-xW - b)], with one W and b a head; W starts as the identity, b as zeros.

    Shapes come from the first call: x [..., heads, D] gives kernel [heads, D, F/2] and bias [heads, F/2].
    Zhang et al. 2024, https://arxiv.org/abs/2402.04347.

    Attributes:
      num_features: F, even; None = 2·D.
      param_dtype: of the parameters.
    """

    num_features: int | None = None
    param_dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        num_heads, head_dim = x.shape[-2:]
        half = module_calls.hedgehog_projection(head_dim, self.num_features)
        kernel = self.param("kernel", module_calls.identity_init, (num_heads, head_dim, half), self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros_init(), (num_heads, half), self.param_dtype)
        return feature_maps.hedgehog(x, kernel, bias)


class T2R(nn.Module):
    """φ(x) = relu(xW + b), with one W and b a head; W starts as LeCun normal, b as zeros.

    Shapes come from the first call: x [..., heads, D] gives kernel [heads, D, F] and bias [heads, F].
    Kasai et al. 2021, https://arxiv.org/abs/2103.13076.

    Attributes:
      num_features: F; None = D.
      param_dtype: of the parameters.
    """

    num_features: int | None = None
    param_dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        num_heads, head_dim = x.shape[-2:]
        features = head_dim if self.num_features is None else self.num_features
        kernel = self.param("kernel", module_calls.t2r_init, (num_heads, head_dim, features), self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros_init(), (num_heads, features), self.param_dtype)
        return feature_maps.t2r(x, kernel, bias)


def bind(owner: nn.Module, feature_map, query_token: Array, key_token: Array):
    """A map of `owner`'s as a pytree of its arrays: the forms call it inside scans, where a scope may not be touched.

    Args:
      owner: the module, in its compact method; children and variables are made in it.
      feature_map: a map; a module in it is a template, copied for queries and for keys.
      query_token: zeros [1, H, D], in the dtype that maps are called with.
      key_token: zeros [1, K, D].
    """
    if isinstance(feature_map, nn.Module):
        feature_map = feature_maps.FeatureMap(query=feature_map, key=feature_map)
    if not isinstance(feature_map, feature_maps.FeatureMap):
        return _constant(owner, feature_map, "feature_map")
    return feature_maps.FeatureMap(
        query=_bind_one(owner, feature_map.query, "query_feature_map", query_token),
        key=_bind_one(owner, feature_map.key, "key_feature_map", key_token),
    )


def _bind_one(owner: nn.Module, feature_map, name: str, token: Array):
    feature_map = _unwrap(feature_map)
    if not isinstance(feature_map, nn.Module):
        return _constant(owner, feature_map, name)
    module = feature_map.copy(name=name)
    if owner.is_mutable_collection("params"):
        module(token)  # made inside a scan, parameters would be tracers that outlive it
    return jax.tree_util.Partial(functools.partial(_apply, module.clone(parent=None)), module.variables)


def _unwrap(feature_map):
    """Takes off the `Partial` that a `FeatureMap` puts around a module when a transform of Linen's flattens it."""
    is_wrapper = isinstance(feature_map, jax.tree_util.Partial) and not feature_map.args and not feature_map.keywords
    return feature_map.func if is_wrapper else feature_map


def _apply(module: nn.Module, variables, x: Array) -> Any:
    return module.apply(variables, x)


def _constant(owner: nn.Module, feature_map, name: str):
    """A map whose arrays are saved and restored with the model, in the collection "constants", not in "params".

    Where a model is applied without that collection, the arrays that the map was made with serve.
    """
    if jax.tree_util.all_leaves([feature_map]) or not jax.tree.leaves(feature_map):
        return feature_map
    if not owner.has_variable("constants", name) and not owner.is_mutable_collection("constants"):
        return feature_map
    leaves, treedef = jax.tree_util.tree_flatten_with_path(feature_map)
    names = [jax.tree_util.keystr(path, simple=True, separator="_") for path, _ in leaves]
    saved = owner.variable("constants", name, lambda: dict(zip(names, (leaf for _, leaf in leaves), strict=True))).value
    return jax.tree_util.tree_unflatten(treedef, [saved[name] for name in names])

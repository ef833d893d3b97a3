"""Learnable feature maps as NNX modules, and what makes any map fit for the forms."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jax import Array

from jax_linattn import feature_maps, module_calls


class Constant(nnx.Variable):
    """An array of a feature map that is saved and restored with the model and not trained, such as a projection."""


class Hedgehog(nnx.Module):
    """φ(x) = [softmax(xW + b), softmax(-xW - b)], with one W and b a head; W starts as the identity, b as zeros.

    Zhang et al. 2024, https://arxiv.org/abs/2402.04347.

    Args:
      num_heads: heads of what it maps: H for queries, K for keys.
      head_dim: D.
      num_features: F, even; None = 2·D.
      param_dtype: of the parameters.
      rngs: taken as every module takes it; nothing is drawn.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_features: int | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        del rngs
        half = module_calls.hedgehog_projection(head_dim, num_features)
        self.kernel = nnx.Param(module_calls.identity_init(None, (num_heads, head_dim, half), param_dtype))
        self.bias = nnx.Param(jnp.zeros((num_heads, half), param_dtype))

    def __call__(self, x: Array) -> Array:
        kernel, bias = self.kernel[...], self.bias[...]
        module_calls.check_map_heads(x, kernel)
        return feature_maps.hedgehog(x, kernel, bias)


class T2R(nnx.Module):
    """φ(x) = relu(xW + b), with one W and b a head; W starts as LeCun normal, b as zeros.

    Kasai et al. 2021, https://arxiv.org/abs/2103.13076.

    Args:
      num_heads: heads of what it maps: H for queries, K for keys.
      head_dim: D.
      num_features: F; None = D.
      param_dtype: of the parameters.
      rngs: for the kernel.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_features: int | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        features = head_dim if num_features is None else num_features
        self.kernel = nnx.Param(module_calls.t2r_init(rngs.params(), (num_heads, head_dim, features), param_dtype))
        self.bias = nnx.Param(jnp.zeros((num_heads, features), param_dtype))

    def __call__(self, x: Array) -> Array:
        kernel, bias = self.kernel[...], self.bias[...]
        module_calls.check_map_heads(x, kernel)
        return feature_maps.t2r(x, kernel, bias)


# --- between modules and pure functions -------------------------------------------------------------------------------


def is_module_class(feature_map) -> bool:
    """Whether the map is still to be made."""
    cls = feature_map.func if isinstance(feature_map, functools.partial) else feature_map
    return isinstance(cls, type) and issubclass(cls, nnx.Module)


def as_attribute(feature_map, num_heads: int, head_dim: int, rngs: nnx.Rngs):
    """A map as Flax keeps it in a module: data, with its arrays as `Constant`s, or static where it holds none."""
    if is_module_class(feature_map):
        return feature_map(num_heads, head_dim, rngs=rngs)
    if isinstance(feature_map, nnx.Module) or jax.tree_util.all_leaves([feature_map]):
        return feature_map
    return nnx.data(jax.tree.map(Constant, feature_map))


def as_pure_function(feature_map):
    """A map as a pytree of its arrays: the forms call it inside scans, where variables may not be touched."""
    if not isinstance(feature_map, nnx.Module):
        is_constant = lambda x: isinstance(x, Constant)
        return jax.tree.map(lambda x: x[...] if is_constant(x) else x, feature_map, is_leaf=is_constant)
    graphdef, state = nnx.split(feature_map)
    return jax.tree_util.Partial(functools.partial(_call_merged, graphdef), state)


def _call_merged(graphdef, state, x: Array) -> Array:
    return nnx.merge(graphdef, state)(x)

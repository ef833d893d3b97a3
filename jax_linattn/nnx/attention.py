"""Linear attention as a Flax NNX module, a drop-in for `flax.nnx.MultiHeadAttention`."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike
from jax import Array

from jax_linattn import feature_maps, module_calls
from jax_linattn.attention import Implementation, init_state
from jax_linattn.checks import require
from jax_linattn.nnx.cache import get_value, set_value
from jax_linattn.nnx.feature_maps import as_attribute, as_pure_function, is_module_class
from jax_linattn.state import LinearAttentionState

default_bias_init = nnx.initializers.zeros_init()


class LinearAttention(nnx.Module):
    """Multi-head linear attention.

        o_t = φ(q_t)ᵀ (Σ_s φ(k_s) v_sᵀ) / φ(q_t)ᵀ (Σ_s φ(k_s)),   q, k, v = projections of the inputs

    Its constructor, parameters and calls are those of `flax.nnx.MultiHeadAttention`; parameters of one load into the
    other. With ``decode=True`` it keeps a `LinearAttentionState` in `cached_state`, an `nnx.Cache` of constant size,
    made by `init_cache`: a call continues from it with any number of tokens.

    Args:
      num_heads: H, heads of queries.
      in_features: size of the inputs' last axis.
      qkv_features: H·D, size of the projected queries; None = in_features.
      out_features: size of the output's last axis; None = in_features.
      in_kv_features: last axis of inputs_k and inputs_v; None = in_features.
      num_kv_heads: K, heads of keys and values, which divides H; None = H.
      feature_map: φ: a function or pytree from `feature_maps`; a learnable map as an `nnx.Module` subclass such as
        `Hedgehog`, or a `functools.partial` of one, called as ``cls(heads, head_dim, rngs=rngs)`` for queries and for
        keys; one instance, for both; or `FeatureMap(query=..., key=...)` of these. Arrays of a map that is no module,
        such as a `favor_plus` projection, are kept as `Constant`s: saved with the model, and no parameters.
      is_causal: attend to tokens at or before the query alone.
      normalize: divide by the sum of weights.
      eps: added to that sum.
      chunk_size, implementation: as in `linear_attention`.
      dtype: of the computation; None = that of inputs and parameters. Sums over time are float32 whatever it is.
      param_dtype: of the parameters.
      broadcast_dropout, dropout_rate, deterministic: weights are never formed, so a rate above 0 is an error unless
        deterministic.
      precision: of matrix products, as in `jax.lax.dot_general`.
      kernel_init, out_kernel_init, bias_init, out_bias_init, use_bias: of the projections; out_… None = as the others.
      decode: whether calls continue from `cached_state`. Needs is_causal.
      normalize_qk: layer-normalise queries and keys.
      rngs: for the parameters.
      keep_rngs: taken for Flax's sake; nothing random happens in a call.

    Raises:
      ValueError: naming the argument, what it got and what would be right.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        *,
        in_kv_features: int | None = None,
        num_kv_heads: int | None = None,
        feature_map: Any = feature_maps.elu_plus_one,
        is_causal: bool = False,
        normalize: bool = True,
        eps: float = 0.0,
        chunk_size: int | None = None,
        implementation: Implementation | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        broadcast_dropout: bool = True,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = default_bias_init,
        out_bias_init: Initializer | None = None,
        use_bias: bool = True,
        decode: bool | None = None,
        normalize_qk: bool = False,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
    ):
        del keep_rngs
        self.num_heads = num_heads
        self.in_features = in_features
        self.qkv_features = in_features if qkv_features is None else qkv_features
        self.out_features = in_features if out_features is None else out_features
        self.in_kv_features = in_features if in_kv_features is None else in_kv_features
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = module_calls.check_sizes(self.num_heads, self.num_kv_heads, self.qkv_features)
        self.is_causal = is_causal
        self.normalize = normalize
        self.eps = eps
        self.chunk_size = chunk_size
        self.implementation = implementation
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.broadcast_dropout = broadcast_dropout
        self.dropout_rate = dropout_rate
        self.deterministic = deterministic
        self.precision = precision
        self.use_bias = use_bias
        self.decode = decode
        self.normalize_qk = normalize_qk

        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        linear = functools.partial(nnx.LinearGeneral, use_bias=use_bias, precision=precision, rngs=rngs, **dtypes)
        project = functools.partial(linear, kernel_init=kernel_init, bias_init=bias_init)
        self.query = project(self.in_features, (self.num_heads, self.head_dim))
        self.key = project(self.in_kv_features, (self.num_kv_heads, self.head_dim))
        self.value = project(self.in_kv_features, (self.num_kv_heads, self.head_dim))
        norm = functools.partial(nnx.LayerNorm, self.head_dim, use_bias=False, rngs=rngs, **dtypes)
        self.query_ln = norm() if normalize_qk else nnx.data(None)
        self.key_ln = norm() if normalize_qk else nnx.data(None)
        self.out = linear(
            (self.num_heads, self.head_dim),
            self.out_features,
            axis=(-2, -1),
            kernel_init=out_kernel_init or kernel_init,
            bias_init=out_bias_init or bias_init,
        )
        self._set_feature_map(feature_map, rngs)
        self.cached_state: nnx.Cache[LinearAttentionState] | None = nnx.data(None)

    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        mask: Array | None = None,
        segment_ids: Any = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool | None = None,
    ) -> Array:
        """Attends from inputs_q to inputs_k and inputs_v.

        Args:
          inputs_q: [batch…, T, features].
          inputs_k: [batch…, S, features]; None = inputs_q.
          inputs_v: [batch…, S, features]; None = inputs_k.
          mask: bool, True = a real token: [batch…, S] or [batch…, 1, 1, S]. Masked inputs are zeroed before they are
            projected; in causal attention the token's output is 0 too.
          segment_ids: int [batch…, T], runs of equal ids that do not see each other; not causal also a pair (query ids,
            key ids). Not with decode.
          deterministic: must be true if the module has a dropout rate; None = the attribute.
          rngs: taken for Flax's sake; nothing random happens in a call.
          sow_weights: form the attention weights [batch…, H, T, S] and sow them as `nnx.Intermediate`.
          decode: continue from `cached_state`, and keep what comes after; None = the attribute.
          is_causal: None = the attribute.

        Returns:
          [batch…, T, out_features].

        Raises:
          ValueError: naming the argument, what it got and what would be right.
        """
        del rngs
        module_calls.check_dropout(self.dropout_rate, self.deterministic if deterministic is None else deterministic)
        decode = self.decode if decode is None else decode
        is_causal = self.is_causal if is_causal is None else is_causal
        inputs = module_calls.prepare_inputs(inputs_q, inputs_k, inputs_v, mask, segment_ids, is_causal=is_causal)
        query, key, value = self.query(inputs.query), self.key(inputs.key), self.value(inputs.value)
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)
        options = self._options(is_causal)
        if decode:
            module_calls.check_decode(inputs, is_causal=is_causal, sow_weights=sow_weights)
            require(self.cached_state is not None, "decode=True needs a cache: call init_cache(input_shape) first")
            state, output = module_calls.advance(get_value(self.cached_state), query, key, value, inputs, options)
            set_value(self.cached_state, state)
        else:
            output = module_calls.attend(query, key, value, inputs, options)
        if sow_weights:
            self.sow(nnx.Intermediate, "attention_weights", module_calls.weights_to_sow(query, key, inputs, options))
        return module_calls.restore_output(self.out(output), inputs, is_causal=is_causal)

    def init_cache(self, input_shape: tuple[int, ...], dtype: Dtype = jnp.float32) -> None:
        """Starts decoding anew, with a state that has seen no token.

        Args:
          input_shape: [batch…, T, features]; of it only the batch matters, the state has no length.
          dtype: of the computation: the state is float32, and float64 for float64.
        """
        token = (math.prod(input_shape[:-2]), self.num_kv_heads, self.head_dim)
        token = jax.ShapeDtypeStruct(token, dtype)
        self.cached_state = nnx.Cache(init_state(token, token, feature_map=self._pure_feature_map()))

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
    ) -> None:
        """Called by ``nnx.view``.

        Args:
          deterministic: the attribute.
          decode: the attribute.
          batch_size: starts decoding anew, as `init_cache` does.
        """
        self.deterministic = self.deterministic if deterministic is None else deterministic
        self.decode = self.decode if decode is None else decode
        if batch_size is not None:
            batch_shape = (batch_size,) if isinstance(batch_size, int) else batch_size
            self.init_cache((*batch_shape, 1, self.in_features), self.dtype or jnp.float32)

    def _options(self, is_causal: bool) -> module_calls.Options:
        return module_calls.Options(
            feature_map=self._pure_feature_map(),
            is_causal=is_causal,
            normalize=self.normalize,
            eps=self.eps,
            precision=self.precision,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )

    def _set_feature_map(self, feature_map, rngs: nnx.Rngs) -> None:
        """One map for both, or, where they differ, one for queries and one for keys."""
        if is_module_class(feature_map):
            feature_map = feature_maps.FeatureMap(query=feature_map, key=feature_map)
        if isinstance(feature_map, feature_maps.FeatureMap):
            self.feature_map = nnx.data(None)
            self.query_feature_map = as_attribute(feature_map.query, self.num_heads, self.head_dim, rngs)
            self.key_feature_map = as_attribute(feature_map.key, self.num_kv_heads, self.head_dim, rngs)
        else:
            self.feature_map = as_attribute(feature_map, self.num_heads, self.head_dim, rngs)
            self.query_feature_map = self.key_feature_map = nnx.data(None)

    def _pure_feature_map(self):
        if self.feature_map is not None:
            return as_pure_function(self.feature_map)
        return feature_maps.FeatureMap(
            query=as_pure_function(self.query_feature_map), key=as_pure_function(self.key_feature_map)
        )

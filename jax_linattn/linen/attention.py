"""Linear attention as a Flax Linen module, a drop-in for `flax.linen.MultiHeadDotProductAttention`."""

import functools
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike
from jax import Array

from jax_linattn import feature_maps, module_calls
from jax_linattn.attention import Implementation, init_state
from jax_linattn.dtypes import accumulator_dtype
from jax_linattn.linen.feature_maps import bind


class LinearAttention(nn.Module):
    """Multi-head linear attention.

        o_t = φ(q_t)ᵀ (Σ_s φ(k_s) v_sᵀ) / φ(q_t)ᵀ (Σ_s φ(k_s)),   q, k, v = projections of the inputs

    Its attributes, parameters and calls are those of `flax.linen.MultiHeadDotProductAttention`; parameters of one load
    into the other. With ``decode=True`` it keeps a `LinearAttentionState` of constant size in the collection "cache":
    a call with ``mutable=["cache"]`` continues from it with any number of tokens. `init` makes an empty one; a call
    without one starts from nothing.

    Attributes:
      num_heads: H, heads of queries.
      dtype: of the computation; None = that of inputs and parameters. Sums over time are float32 whatever it is.
      param_dtype: of the parameters.
      qkv_features: H·D, size of the projected queries; None = the features of inputs_q.
      out_features: size of the output's last axis; None = the features of inputs_q.
      broadcast_dropout, dropout_rate, deterministic: weights are never formed, so a rate above 0 is an error unless
        deterministic.
      precision: of matrix products, as in `jax.lax.dot_general`.
      kernel_init, out_kernel_init, bias_init, out_bias_init, use_bias: of the projections; out_… None = as the others.
      decode: whether calls continue from the cache. Needs is_causal.
      normalize_qk: layer-normalise queries and keys.
      feature_map: φ: a function or pytree from `feature_maps`; a learnable map such as ``Hedgehog()``, a template that
        is copied for queries and for keys; or `FeatureMap(query=..., key=...)` of these. Arrays of a map that is no
        module, such as a `favor_plus` projection, are kept in the collection "constants", so that they are saved with
        the model; applied without that collection, it uses those of the attribute.
      num_kv_heads: K, heads of keys and values, which divides H; None = H.
      is_causal: attend to tokens at or before the query alone.
      normalize: divide by the sum of weights.
      eps: added to that sum.
      chunk_size, implementation: as in `linear_attention`.
    """

    num_heads: int
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    qkv_features: int | None = None
    out_features: int | None = None
    broadcast_dropout: bool = True
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    precision: PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = nn.initializers.zeros_init()
    out_bias_init: Initializer | None = None
    use_bias: bool = True
    decode: bool = False
    normalize_qk: bool = False
    feature_map: Any = feature_maps.elu_plus_one
    num_kv_heads: int | None = None
    is_causal: bool = False
    normalize: bool = True
    eps: float = 0.0
    chunk_size: int | None = None
    implementation: Implementation | None = None

    @nn.compact
    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        mask: Array | None = None,
        segment_ids: Any = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        sow_weights: bool = False,
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
          dropout_rng: taken for Flax's sake; nothing random happens in a call.
          sow_weights: form the attention weights [batch…, H, T, S] and sow them in the collection "intermediates".

        Returns:
          [batch…, T, out_features].

        Raises:
          ValueError: naming the argument, what it got and what would be right.
        """
        del dropout_rng
        module_calls.check_dropout(self.dropout_rate, self.deterministic if deterministic is None else deterministic)
        inputs = module_calls.prepare_inputs(inputs_q, inputs_k, inputs_v, mask, segment_ids, is_causal=self.is_causal)
        query, key, value = module_calls.one_dtype(*self._project(inputs))
        options = self._options(query, key)
        if self.decode:
            module_calls.check_decode(inputs, is_causal=self.is_causal, sow_weights=sow_weights)
            empty = functools.partial(init_state, key, value, feature_map=options.feature_map)
            cached_state = self.variable("cache", "cached_state", empty)
            state, output = module_calls.advance(cached_state.value, query, key, value, inputs, options)
            if not self.is_initializing():
                cached_state.value = state
        else:
            output = module_calls.attend(query, key, value, inputs, options)
        if sow_weights:
            self.sow("intermediates", "attention_weights", module_calls.weights_to_sow(query, key, inputs, options))
        output = self._dense(
            "out",
            self.out_features or inputs.query.shape[-1],
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
        )(output)
        return module_calls.restore_output(output, inputs, is_causal=self.is_causal)

    def _project(self, inputs: module_calls.Inputs) -> tuple[Array, Array, Array]:
        """[B, T, features] to [B, T, heads, D], for queries, keys and values."""
        num_kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        qkv_features = self.qkv_features or inputs.query.shape[-1]
        head_dim = module_calls.check_sizes(self.num_heads, num_kv_heads, qkv_features)
        init: dict[str, Any] = {"kernel_init": self.kernel_init, "bias_init": self.bias_init}
        query = self._dense("query", (self.num_heads, head_dim), **init)(inputs.query)
        key = self._dense("key", (num_kv_heads, head_dim), **init)(inputs.key)
        value = self._dense("value", (num_kv_heads, head_dim), **init)(inputs.value)
        if self.normalize_qk:
            norm = functools.partial(nn.LayerNorm, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype)
            query, key = norm(name="query_ln")(query), norm(name="key_ln")(key)
        return query, key, value

    def _dense(self, name: str, features, axis: Any = -1, **init: Any) -> nn.DenseGeneral:
        return nn.DenseGeneral(
            features,
            axis=axis,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            name=name,
            **init,
        )

    def _options(self, query: Array, key: Array) -> module_calls.Options:
        tokens = (jnp.zeros((1, *x.shape[-2:]), accumulator_dtype(x.dtype)) for x in (query, key))
        return module_calls.Options(
            feature_map=bind(self, self.feature_map, *tokens),
            is_causal=self.is_causal,
            normalize=self.normalize,
            eps=self.eps,
            precision=self.precision,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )

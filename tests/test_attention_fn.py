"""The functions for the `attention_fn=` hook of Flax's own modules, in Linen and in NNX."""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_cases import FEATURES, HEADS, by_hand, quick_normal
from tolerance import assert_close

from jax_linattn import feature_maps, linen
from jax_linattn import nnx as linattn_nnx

SIZES = {"qkv_features": 8}
QUICK = {"kernel_init": quick_normal, "bias_init": quick_normal}


class Linen(NamedTuple):
    """Flax's Linen module around a function."""

    module: nn.Module
    variables: dict

    as_attention_fn = staticmethod(linen.as_attention_fn)
    learnable = linen.Hedgehog()

    @classmethod
    def make(cls, attention_fn, **attributes):
        module = nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn, **{**SIZES, **attributes})
        x = jnp.zeros((1, 2, FEATURES))
        shapes = jax.eval_shape(functools.partial(module.init, deterministic=True), jax.random.key(0), x)["params"]
        rng = np.random.default_rng(0)
        params = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape) / 2, x.dtype), shapes)
        return cls(module, {"params": params})

    def params(self):
        return self.variables["params"]

    def __call__(self, *args, **kwargs):
        return self.module.apply(self.variables, *args, **kwargs)

    def weights(self, x):
        _, changed = self.module.apply(self.variables, x, sow_weights=True, mutable=["intermediates"])
        return changed["intermediates"]["attention_weights"][0]

    def decode(self, x, **kwargs):
        """Token by token, with Flax's own cache."""
        module = self.module.clone(decode=True)
        cache = jax.eval_shape(module.init, jax.random.key(0), x)["cache"]
        cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache)
        step = jax.jit(functools.partial(module.apply, mutable=["cache"], **kwargs))
        outputs = []
        for t in range(x.shape[-2]):
            output, changed = step({**self.variables, "cache": cache}, x[..., t : t + 1, :])
            cache = changed["cache"]
            outputs.append(output)
        return jnp.concatenate(outputs, axis=-2)


class NNX(NamedTuple):
    """Flax's NNX module around a function."""

    module: nnx.Module

    as_attention_fn = staticmethod(linattn_nnx.as_attention_fn)
    learnable = linattn_nnx.Hedgehog

    @classmethod
    def make(cls, attention_fn, **attributes):
        attributes = {**SIZES, **QUICK, "decode": False, **attributes}
        return cls(nnx.MultiHeadAttention(HEADS, FEATURES, attention_fn=attention_fn, rngs=nnx.Rngs(0), **attributes))

    def params(self):
        return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(self.module, nnx.Param)))

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def weights(self, x):
        if hasattr(nnx, "capture"):
            _, sown = nnx.capture(nnx.Intermediate)(lambda module: module(x, sow_weights=True))(self.module)
            return jax.tree.leaves(sown)[0]
        self.module(x, sow_weights=True)
        return jax.tree.leaves(nnx.pop(self.module, nnx.Intermediate))[0]

    def decode(self, x, **kwargs):
        """Token by token, with Flax's own cache."""
        self.module.init_cache(x.shape)
        graphdef, state = nnx.split(self.module)

        @jax.jit
        def step(state, token):
            module = nnx.merge(graphdef, state)
            output = module(token, decode=True, **kwargs)
            return nnx.state(module), output

        outputs = []
        for t in range(x.shape[-2]):
            state, output = step(state, x[..., t : t + 1, :])
            outputs.append(output)
        return jnp.concatenate(outputs, axis=-2)


both = pytest.mark.parametrize("api", [Linen, NNX], ids=["linen", "nnx"])


def inputs(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((*shape, FEATURES)), jnp.float32)


def flax_key_mask(valid) -> jax.Array:
    """A mask of keys as Flax makes it, float32 [batch…, 1, 1, S]."""
    return nn.make_attention_mask(jnp.ones((*valid.shape[:-1], 1)), valid)


@both
@pytest.mark.parametrize("is_causal", [False, True])
def test_attends_as_by_hand(api, is_causal):
    """Self-attention with Flax's mask of keys, or none, and the same without the module."""
    module = api.make(api.as_attention_fn(is_causal=is_causal))
    x, valid = inputs(2, 5), np.arange(5) >= np.array([[0], [2]])
    attributes = {"is_causal": is_causal}
    assert_close(module(x), by_hand(module.params(), attributes, np.asarray(x)))
    float_mask = flax_key_mask(jnp.asarray(valid))
    assert float_mask.dtype == jnp.float32
    output = module(x, mask=float_mask)
    np.testing.assert_array_equal(module(x, mask=float_mask.astype(bool)), output)
    seen = by_hand(module.params(), attributes, np.asarray(x), mask=valid)
    # By hand masked inputs are zeroed before the projections, and here there is no such place: only keys are hidden.
    assert_close(output[valid], seen[valid])


@both
def test_cross_attention_over_many_batch_axes(api):
    module = api.make(api.as_attention_fn(eps=0.1, implementation="chunked", chunk_size=2))
    x, y = inputs(2, 3, 4), inputs(2, 3, 5)
    one_batch = by_hand(module.params(), {"eps": 0.1}, np.asarray(x), np.asarray(y))
    assert_close(module(x, y), one_batch)
    mask = np.ones((2, 1, 1, 1, 5), bool)
    mask[1, ..., 3:] = False
    kept = by_hand(module.params(), {"eps": 0.1}, np.asarray(x), np.asarray(y), mask=np.repeat(mask, 3, axis=1))
    assert_close(module(x, y, mask=jnp.asarray(mask)), kept)


@both
@pytest.mark.parametrize("name", ["elu_plus_one", "favor_plus"])
def test_decodes_from_flax_cache(api, name):
    """Its cache is full of zeros, and φ(0) = 1: the mask of what is written keeps them out."""
    favor = feature_maps.favor_plus(jax.random.key(0), 2, 4)
    feature_map = {"elu_plus_one": feature_maps.elu_plus_one, "favor_plus": favor}[name]
    module, x = api.make(api.as_attention_fn(feature_map, is_causal=True)), inputs(2, 1, 5)
    whole = module(x)
    assert_close(module.decode(x), whole)
    hidden = jnp.asarray(np.arange(5) != 1).reshape(1, 1, 1, 1, 5)
    masked = module.decode(x, mask=jnp.broadcast_to(hidden, (2, 1, 1, 1, 5)))
    assert_close(masked[..., 2:, :], module(x, mask=hidden)[..., 2:, :])


def test_nnx_causal_call():
    """NNX says is_causal in the call: either place is enough."""
    module, x = NNX.make(linattn_nnx.as_attention_fn()), inputs(1, 4)
    try:
        output = module(x, is_causal=True)
    except TypeError:
        pytest.skip("this Flax has no is_causal in the call")
    assert_close(output, by_hand(module.params(), {"is_causal": True}, np.asarray(x)))
    assert_close(NNX.make(linattn_nnx.as_attention_fn(is_causal=True))(x, is_causal=False), output)
    assert_close(module.decode(x, is_causal=True), output)


@both
def test_weights_are_sown_on_request(api):
    module, x = api.make(api.as_attention_fn(is_causal=True)), inputs(2, 1, 4)
    weights = np.asarray(module.weights(x))
    assert weights.shape == (2, 1, HEADS, 4, 4)
    assert not np.any(np.triu(weights, 1))
    params = module.params()
    value = np.einsum("abtf,fhd->abthd", x, params["value"]["kernel"]) + np.asarray(params["value"]["bias"])
    output = np.einsum("abhts,abshd,hdf->abtf", weights, value, params["out"]["kernel"])
    assert_close(module(x), output + np.asarray(params["out"]["bias"]))
    with pytest.raises(ValueError, match="normalize=True"):
        api.make(api.as_attention_fn(normalize=False)).weights(x)


@both
def test_dtype_is_the_modules(api):
    module = api.make(api.as_attention_fn(), dtype=jnp.bfloat16)
    assert module(inputs(1, 3)).dtype == jnp.bfloat16
    q = jnp.ones((3, 2, 4))
    assert api.as_attention_fn()(q, q, q, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    mixed = api.as_attention_fn()(q, q.astype(jnp.bfloat16), q)
    assert (mixed.shape, mixed.dtype) == (q.shape, q.dtype)


@both
def test_dropout_raises_unless_deterministic(api):
    x = inputs(1, 3)
    module = api.make(api.as_attention_fn(), dropout_rate=0.5)
    rngs = {"rngs": {"dropout": jax.random.key(0)} if api is Linen else nnx.Rngs(0)}
    with pytest.raises(ValueError, match=r"dropout_rate=0\.5"):
        module(x, deterministic=False, **rngs)
    assert_close(module(x, deterministic=True), api.make(api.as_attention_fn())(x))


REFUSED_MASKS = {
    "causal": nn.make_causal_mask(jnp.ones((2, 4))),
    "padding": nn.make_attention_mask(jnp.ones((2, 4)), jnp.ones((2, 4))),
    "heads": jnp.ones((2, HEADS, 1, 4), bool),
    "two_axes": jnp.ones((2, 4), bool),
    "keys": jnp.ones((2, 1, 1, 3), bool),
    "batch": jnp.ones((3, 1, 1, 4), bool),
    "rank": jnp.ones((1, 2, 1, 1, 4), bool),
    "integers": jnp.ones((2, 1, 1, 4), int),
}


@both
@pytest.mark.parametrize("name", REFUSED_MASKS)
def test_other_masks_are_refused(api, name):
    q = jnp.ones((2, 4, HEADS, 2))
    with pytest.raises(ValueError, match=r"Instead of a causal mask use as_attention_fn\(is_causal=True\)"):
        api.as_attention_fn()(q, q, q, mask=REFUSED_MASKS[name])


@both
def test_a_mask_for_all_rows_needs_no_batch_axes(api):
    q = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, HEADS, 2)), jnp.float32)
    keep = jnp.array([1.0, 0.0, 1.0, 1.0])
    masks = [keep, keep.reshape(1, 1, 4), keep.reshape(1, 1, 1, 4)]
    outputs = [api.as_attention_fn()(q, q, q, mask=mask) for mask in masks]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[0], outputs[2])
    assert np.any(outputs[0] != api.as_attention_fn()(q, q, q))


@both
def test_nothing_is_silently_ignored(api):
    q, fn = jnp.ones((2, 4, HEADS, 2)), api.as_attention_fn(is_causal=True)
    with pytest.raises(ValueError, match="bias"):
        fn(q, q, q, bias=jnp.zeros((2, HEADS, 4, 4)))
    with pytest.raises(ValueError, match="which keys came before"):
        fn(q[:, :1], q, q)
    with pytest.raises(ValueError, match="T == S"):
        fn(q[:, :2], q, q)
    with pytest.raises(ValueError, match="batch axes"):
        fn(q, q[:1], q[:1])
    with pytest.raises(ValueError, match="LinearAttention"):
        api.as_attention_fn(api.learnable)
    with pytest.raises(ValueError, match="normalize"):
        api.as_attention_fn(normalize=False, eps=0.1)(q, q, q)
    with pytest.raises(TypeError):
        fn(q, q, q, some_new_option=1)
    if api is NNX:
        with pytest.raises(ValueError, match="input_positions"):
            fn(q, q, q, input_positions=jnp.arange(4))
    else:
        with pytest.raises(ValueError, match="einsum"):
            api.make(fn, qk_attn_weights_einsum_cls=lambda: jnp.einsum)

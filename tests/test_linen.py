"""The Linen module: parameters, situations by hand, masks, decoding, transforms, learnable and random maps, errors."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from harness import count_compilations, x64
from layer_cases import FEATURES, HEADS, LAYERS, by_hand, draw, learned_maps, ragged, softmax_by_hand
from tolerance import assert_close

from jax_linattn import FeatureMap, LinearAttentionState, feature_maps
from jax_linattn.linen import T2R, Hedgehog, LinearAttention


def layer(**attributes) -> LinearAttention:
    return LinearAttention(HEADS, **{"qkv_features": 8, **attributes})


def inputs(*shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((*shape, FEATURES)), dtype)


def init(module, *args, seed: int = 0, **kwargs):
    """What `init` gives, of the same structure and with parameters drawn here: nothing is compiled."""
    variables = jax.eval_shape(functools.partial(module.init, **kwargs), jax.random.key(0), *args)
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape) / 2, x.dtype), variables["params"])
    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), variables.get("cache", {}))
    return {"params": params, "cache": cache} if cache else {"params": params}


@functools.partial(jax.jit, static_argnums=(0, 3))
def _apply(module, variables, args, mutable, arrays):
    return module.apply(variables, *args, mutable=list(mutable), **arrays)


def apply(module, variables, *args, **arrays):
    """The output, compiled."""
    return _apply(module, variables, args, (), arrays)[0]


def decode(module, variables, x, **arrays):
    """The output and the variables after it."""
    output, changed = _apply(module, variables, (x,), ("cache",), arrays)
    return {**variables, **changed}, output


def to_numpy(tree) -> dict:
    return jax.tree.map(np.asarray, tree)


# --- parameters -------------------------------------------------------------------------------------------------------


def test_parameters_load_into_flax_and_from_flax():
    attributes = {"qkv_features": 12, "out_features": FEATURES}
    ours, theirs = LinearAttention(HEADS, **attributes), nn.MultiHeadDotProductAttention(HEADS, **attributes)
    x = inputs(2, 5)
    ours_variables, theirs_variables = init(ours, x), init(theirs, x, seed=1)
    assert jax.tree.map(jnp.shape, ours_variables) == jax.tree.map(jnp.shape, theirs_variables)
    expected = by_hand(to_numpy(theirs_variables["params"]), {}, np.asarray(x))
    assert_close(apply(ours, theirs_variables, x), expected)
    expected = softmax_by_hand(to_numpy(ours_variables["params"]), np.asarray(x))
    assert_close(apply(theirs, ours_variables, x), expected)


def test_same_seed_gives_flax_parameters():
    attributes = {"normalize_qk": True, "use_bias": False, "param_dtype": jnp.bfloat16}
    x = inputs(1, 2), inputs(1, 3)
    ours, theirs = (
        jax.jit(cls(2, **attributes).init)(jax.random.key(0), *x)
        for cls in (LinearAttention, nn.MultiHeadDotProductAttention)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


# --- every situation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_by_hand(name):
    case = LAYERS[name]
    module = layer(**case.attributes)
    args, hiding = draw(case)
    variables = init(module, *args, **hiding)
    expected = by_hand(to_numpy(variables["params"]), case.attributes, *args, **hiding)
    assert_close(apply(module, variables, *args, **hiding), expected, what=name)


def value_and_gradients(module, variables, x, mask=None):
    """The output, and the gradients of the parameters under a loss that looks at the tokens that are not masked."""

    def loss(params):
        output = module.apply({**variables, "params": params}, x, mask=mask)
        seen = output if mask is None else jnp.where(mask[..., None], output, 0)
        return jnp.sum(jnp.sin(seen)), output

    gradients, output = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
    return output, to_numpy(gradients)


def test_pads_of_nan_change_nothing():
    """Left pads: the other tokens' output, and every parameter's gradient, are those of the rows by themselves.

    Not causal; the causal case is among the tests of NNX, and the code is the same.
    """
    with x64():
        module = layer(normalize_qk=True, param_dtype=jnp.float64)
        lengths, x = (3, 5), inputs(2, 5, dtype=jnp.float64)
        mask = jnp.asarray(ragged(lengths, 5))
        padded = jnp.where(mask[..., None], x, jnp.nan)
        variables = init(module, x)
        output, gradients = value_and_gradients(module, variables, padded, mask)
        alone = [value_and_gradients(module, variables, x[row : row + 1, 5 - n :]) for row, n in enumerate(lengths)]
        for row, n in enumerate(lengths):
            assert_close(output[row, 5 - n :], alone[row][0][0])
        expected = jax.tree.map(jnp.add, alone[0][1], alone[1][1])
        jax.tree.map(lambda a, b: assert_close(a, b, floor=0.1), gradients, expected)


def test_16_bit_computation_keeps_float32_sums():
    module = layer(dtype=jnp.bfloat16, is_causal=True, decode=True)
    variables, output = decode(module, init(module, inputs(2, 1)), inputs(2, 3))
    assert output.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(variables["cache"])} == {jnp.dtype("float32")}


# --- decoding ---------------------------------------------------------------------------------------------------------

MAPS = {
    "elu_plus_one": lambda: feature_maps.elu_plus_one,
    "hedgehog": Hedgehog,
    "t2r_pair": lambda: FeatureMap(query=T2R(num_features=3), key=T2R(num_features=3)),
    "favor_plus": lambda: feature_maps.favor_plus(jax.random.key(0), 2, 5),
}


@pytest.mark.parametrize("name", MAPS)
def test_decoding_is_the_whole_run(name):
    """A left-padded prompt, single tokens, then several at once: as each row by itself, in one go."""
    lengths, prompt, x = (2, 4), 4, inputs(2, 9)
    form = "chunked" if name == "elu_plus_one" else "quadratic"
    module = Whole(layer(feature_map=MAPS[name](), num_kv_heads=2, is_causal=True, implementation=form))
    decoder = module.clone(attend=module.attend.clone(decode=True))
    mask = jnp.asarray(ragged(lengths, prompt))
    variables, output = decode(decoder, init(decoder, x), x[:, :prompt], mask=mask)
    outputs = [output]
    for part in (slice(4, 5), slice(5, 6), slice(6, 9)):
        variables, output = decode(decoder, variables, x[:, part])
        outputs.append(output)
    outputs = jnp.concatenate(outputs, axis=1)
    for row, length in enumerate(lengths):
        whole = apply(module, variables, x[row : row + 1, prompt - length :])
        assert_close(outputs[row, prompt - length :], whole[0])


class Whole(nn.Module):
    """A model around a layer, as models are: the layer's parameters and cache lie a level down."""

    attend: LinearAttention

    def __call__(self, x, **hiding):
        return self.attend(x, **hiding)


def test_the_cache_is_one_state_of_constant_size():
    """`init` makes it and does not advance it; a call without one starts from nothing."""
    module = layer(num_kv_heads=2, is_causal=True, decode=True)
    variables = jax.jit(module.init)(jax.random.key(0), inputs(3, 5))
    state = variables["cache"]["cached_state"]
    assert isinstance(state, LinearAttentionState)
    shapes = {"kv": (3, 2, 2, 2), "key_sum": (3, 2, 2), "log_scale": (3, 2)}
    assert {name: leaf.shape for name, leaf in state._asdict().items()} == shapes
    assert not any(jnp.any(leaf) for leaf in state)
    after, output = decode(module, variables, inputs(3, 20))
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, variables)
    without, output_without = decode(module, {"params": variables["params"]}, inputs(3, 20))
    jax.tree.map(np.testing.assert_array_equal, (after, output), (without, output_without))


def test_a_step_is_compiled_once():
    module = layer(is_causal=True, decode=True)
    tokens = inputs(2, 6)
    variables, _ = decode(module, init(module, tokens), tokens[:, :1])
    rest = [jax.block_until_ready(tokens[:, i : i + 1]) for i in range(1, 6)]
    assert count_compilations(lambda: [decode(module, variables, token) for token in rest]) == 0


# --- transforms -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    attend: LinearAttention

    @nn.compact
    def __call__(self, x, _):
        return x + self.attend.copy(name="layer")(x), None


def stack(decode: bool) -> nn.Module:
    """Three layers by nn.scan, with nn.remat inside."""
    maps = FeatureMap(query=Hedgehog(), key=feature_maps.favor_plus(jax.random.key(0), 3, 6))
    attend = LinearAttention(2, feature_map=maps, is_causal=True, decode=decode, parent=None)
    axes = {"params": 0, "cache": 0}
    scan = nn.scan(nn.remat(Block, prevent_cse=False), variable_axes=axes, split_rngs={"params": True}, length=3)
    return scan(attend)


def test_stacked_layers_decode():
    """Layers by nn.scan are the layers one after the other; their stacked caches decode, and start empty."""
    x, whole, decoder = inputs(2, 6), stack(decode=False), stack(decode=True)
    variables = jax.jit(decoder.init)(jax.random.key(0), x, None)
    cache = variables["cache"]
    assert jax.tree.leaves(cache)[0].shape == (3, 2, 2, 6, 3)
    assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(cache))
    expected, _ = jax.jit(whole.apply)({"params": variables["params"]}, x, None)
    one_by_one, block = x, Block(whole.attend)
    for i in range(3):
        params = jax.tree.map(lambda leaf, i=i: leaf[i], variables["params"])
        one_by_one, _ = _apply(block, {"params": params}, (one_by_one, None), (), {})[0]
    assert_close(expected, one_by_one)
    outputs = []
    for part in (slice(0, 4), slice(4, 5), slice(5, 6)):
        (output, _), changed = _apply(decoder, {**variables, "cache": cache}, (x[:, part], None), ("cache",), {})
        cache = changed["cache"]
        outputs.append(output)
    assert_close(jnp.concatenate(outputs, axis=1), expected)


# --- learnable and random maps ----------------------------------------------------------------------------------------


def test_learnable_maps_start_as_said():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 3, 6)), jnp.float32)
    hedgehog, t2r = Hedgehog(), T2R(num_features=9)
    output, variables = jax.jit(hedgehog.init_with_output)(jax.random.key(0), x)
    assert_close(output, jnp.concatenate([jax.nn.softmax(x), jax.nn.softmax(-x)], axis=-1))
    assert jax.tree.map(jnp.shape, variables["params"]) == {"kernel": (3, 6, 6), "bias": (3, 6)}
    output, variables = jax.jit(t2r.init_with_output)(jax.random.key(0), x)
    assert output.shape == (2, 5, 3, 9)
    assert_close(output, np.maximum(np.einsum("bthd,hdf->bthf", x, variables["params"]["kernel"]), 0))
    assert jax.eval_shape(T2R().init, jax.random.key(0), x)["params"]["kernel"].shape == (3, 6, 6)


def test_learnable_maps_learn_in_every_form():
    """One set of weights a head, for queries and for keys, and the same gradient through scans and checkpoints."""
    with x64():
        x = inputs(1, 19, dtype=jnp.float64)
        wide = {"param_dtype": jnp.float64}
        maps = FeatureMap(query=Hedgehog(**wide), key=T2R(num_features=4, **wide))
        options = {"feature_map": maps, "num_kv_heads": 2, "is_causal": True, **wide}
        forms = [{"implementation": "quadratic"}, {"implementation": "chunked", "chunk_size": 1}]
        with jax.checking_leaks():
            jax.eval_shape(layer(**options, **forms[1]).init, jax.random.key(0), x)
        variables = init(layer(**options), x)
        (output, expected), (_, actual) = (value_and_gradients(layer(**options, **form), variables, x) for form in forms)
        params = to_numpy(variables["params"])
        assert_close(output, by_hand(params, {"is_causal": True}, np.asarray(x), maps=learned_maps(params)))
        jax.tree.map(lambda a, b: assert_close(a, b, floor=0.1), actual, expected)
    assert actual["query_feature_map"]["kernel"].shape[0] == HEADS
    assert actual["key_feature_map"]["kernel"].shape[0] == 2
    for name in ("query_feature_map", "key_feature_map"):
        assert all(np.any(leaf) for leaf in jax.tree.leaves(actual[name]))


def test_random_features_are_saved_but_no_parameters():
    x = inputs(2, 5)
    first, second = (layer(feature_map=feature_maps.favor_plus(jax.random.key(seed), 2, 5)) for seed in (0, 1))
    variables = jax.jit(first.init)(jax.random.key(0), x)
    assert set(variables["params"]) == {"query", "key", "value", "out"}
    output = apply(first, variables, x)
    params = {"params": variables["params"]}
    assert_close(apply(first, params, x), output)
    assert np.any(np.abs(apply(second, params, x) - output) > 0.01)
    empty = jax.tree.map(np.zeros_like, variables)
    restored = serialization.from_bytes(empty, serialization.to_bytes(variables))
    np.testing.assert_array_equal(apply(second, restored, x), output)


# --- options and errors -----------------------------------------------------------------------------------------------


def test_dropout_of_weights_raises():
    x = inputs(1, 3)
    module = layer(dropout_rate=0.5)
    with pytest.raises(ValueError, match=r"dropout_rate=0\.5"):
        init(module, x)
    variables = init(module, x, deterministic=True)
    with pytest.raises(ValueError, match=r"dropout_rate=0\.5"):
        module.apply(variables, x, deterministic=False, rngs={"dropout": jax.random.key(0)})
    assert_close(module.apply(variables, x, deterministic=True), layer().apply(variables, x))


def test_weights_are_sown_on_request():
    module, x = layer(is_causal=True), inputs(2, 3, 5)
    variables = init(module, x)
    output, changed = jax.jit(functools.partial(module.apply, mutable=["intermediates"]))(variables, x)
    assert not changed
    sowing = functools.partial(module.apply, sow_weights=True, mutable=["intermediates"])
    _, changed = jax.jit(sowing)(variables, x)
    (weights,) = changed["intermediates"]["attention_weights"]
    assert weights.shape == (2, 3, HEADS, 5, 5)
    params = to_numpy(variables["params"])
    value = np.einsum("abtf,fhd->abthd", x, params["value"]["kernel"]) + params["value"]["bias"]
    by_weights = np.einsum("abhts,abshd,hdf->abtf", weights, value, params["out"]["kernel"]) + params["out"]["bias"]
    assert_close(output, by_weights)


def _decoded(x, batch: int = 2, *args, **kwargs):
    module = layer(is_causal=True, decode=True)
    return module.apply(init(module, inputs(batch, 1)), x, *args, **kwargs, mutable=["cache"])


ERRORS = {
    "is_causal=True": lambda x: init(layer(decode=True), x),
    "batch of 3": lambda x: _decoded(x, 3),
    "self-attention": lambda x: _decoded(x, 2, x + 1),
    "segment_ids": lambda x: _decoded(x, segment_ids=jnp.zeros((2, 4), int)),
    "sow_weights": lambda x: _decoded(x, sow_weights=True),
    "normalize=True": lambda x: init(layer(normalize=False), x, sow_weights=True),
    "is_causal=True, for packed": lambda x: init(layer(), x, mask=jnp.ones((2, 1, 4, 4), bool)),
    "mask must be bool": lambda x: init(layer(), x, mask=jnp.ones((2, 4))),
    "inputs_k": lambda x: init(layer(), x, None, x),
    "qkv_features": lambda x: init(layer(qkv_features=9), x),
    "num_kv_heads": lambda x: init(layer(num_kv_heads=3), x),
    "num_features": lambda x: init(Hedgehog(num_features=5), x),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_say_what_is_wrong(message):
    with pytest.raises(ValueError, match=message):
        ERRORS[message](inputs(2, 4))

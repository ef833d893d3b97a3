"""The NNX module: parameters, situations by hand, masks, decoding, transforms, learnable and random maps, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from harness import count_compilations, x64
from layer_cases import FEATURES, HEADS, LAYERS, by_hand, draw, learned_maps, quick_normal, ragged, softmax_by_hand
from tolerance import assert_close

from jax_linattn import FeatureMap, LinearAttentionState, feature_maps
from jax_linattn.nnx import T2R, Hedgehog, LinearAttention

QUICK = {"kernel_init": quick_normal, "bias_init": quick_normal}


def layer(seed: int = 0, **attributes) -> LinearAttention:
    return LinearAttention(HEADS, FEATURES, rngs=nnx.Rngs(seed), **{"qkv_features": 8, **QUICK, **attributes})


def inputs(*shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((*shape, FEATURES)), dtype)


def pure(state) -> dict:
    return jax.tree.map(np.asarray, nnx.to_pure_dict(state))


def params_of(module) -> dict:
    return pure(nnx.state(module, nnx.Param))


def load(module, saved: dict) -> None:
    """Puts a pure dict of arrays, all of the module's or its parameters alone, into the module."""
    state = nnx.state(module)
    nnx.replace_by_pure_dict(state, saved)
    nnx.update(module, state)


def sown(module, *args, **kwargs) -> jax.Array:
    """The attention weights that a call sows, in old and new Flax."""
    if hasattr(nnx, "capture"):
        _, intermediates = nnx.capture(nnx.Intermediate)(lambda m: m(*args, **kwargs, sow_weights=True))(module)
        return jax.tree.leaves(intermediates)[0]
    module(*args, **kwargs, sow_weights=True)
    return jax.tree.leaves(nnx.pop(module, nnx.Intermediate))[0]


def run(function, module, *args, **kwargs):
    """function(module, …), compiled as by `nnx.jit` but quickly: what the module keeps moves on."""
    flags = {name: value for name, value in kwargs.items() if isinstance(value, bool)}
    arrays = {name: value for name, value in kwargs.items() if name not in flags and value is not None}
    graphdef, state = nnx.split(module)
    state, output = _run(function, graphdef, tuple(flags.items()), state, args, arrays)
    nnx.update(module, state)
    return output


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(function, graphdef, flags, state, args, arrays):
    module = nnx.merge(graphdef, state)
    output = function(module, *args, **arrays, **dict(flags))
    return nnx.state(module), output


def call(module, *args, **kwargs):
    return run(LinearAttention.__call__, module, *args, **kwargs)


def value_and_gradients(module, x, mask=None):
    """The output, and the gradients of the parameters under a loss that looks at the tokens that are not masked."""
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    def loss(params):
        output = nnx.merge(graphdef, params, rest)(x, mask=mask)
        seen = output if mask is None else jnp.where(mask[..., None], output, 0)
        return jnp.sum(jnp.sin(seen)), output

    gradients, output = jax.jit(jax.grad(loss, has_aux=True))(params)
    return output, pure(gradients)


# --- parameters -------------------------------------------------------------------------------------------------------


def test_parameters_load_into_flax_and_from_flax():
    attributes = {"qkv_features": 12, "out_features": FEATURES, "dtype": jnp.float32, "decode": False, **QUICK}
    ours = LinearAttention(HEADS, FEATURES, rngs=nnx.Rngs(0), **attributes)
    theirs = nnx.MultiHeadAttention(HEADS, FEATURES, rngs=nnx.Rngs(1), **attributes)
    ours_params, theirs_params, x = params_of(ours), params_of(theirs), inputs(2, 5)
    assert jax.tree.map(jnp.shape, ours_params) == jax.tree.map(jnp.shape, theirs_params)
    load(ours, theirs_params)
    load(theirs, ours_params)
    assert_close(call(ours, x), by_hand(theirs_params, {}, np.asarray(x)))
    assert_close(theirs(x), softmax_by_hand(ours_params, np.asarray(x)))


def test_same_seed_gives_flax_parameters():
    attributes = {"normalize_qk": True, "use_bias": False, "in_kv_features": 3, "param_dtype": jnp.bfloat16}
    ours = params_of(LinearAttention(2, 8, rngs=nnx.Rngs(0), **attributes))
    theirs = params_of(nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), **attributes))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


# --- every situation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_by_hand(name):
    case = LAYERS[name]
    module = layer(**case.attributes)
    args, hiding = draw(case)
    expected = by_hand(params_of(module), case.attributes, *args, **hiding)
    assert_close(call(module, *args, **hiding), expected, what=name)


def test_pads_of_nan_change_nothing():
    """Left pads: the other tokens' output, and every parameter's gradient, are those of the rows by themselves.

    Causal; the other case is among the tests of Linen, and the code is the same.
    """
    with x64():
        module = layer(is_causal=True, normalize_qk=True, param_dtype=jnp.float64)
        lengths, x = (3, 5), inputs(2, 5, dtype=jnp.float64)
        mask = jnp.asarray(ragged(lengths, 5))
        padded = jnp.where(mask[..., None], x, jnp.nan)
        output, gradients = value_and_gradients(module, padded, mask)
        alone = [
            value_and_gradients(module, x[row : row + 1, 5 - n :], jnp.ones((1, n), bool)) for row, n in enumerate(lengths)
        ]
        for row, n in enumerate(lengths):
            assert_close(output[row, 5 - n :], alone[row][0][0])
        expected = jax.tree.map(jnp.add, alone[0][1], alone[1][1])
        jax.tree.map(lambda a, b: assert_close(a, b, floor=0.1), gradients, expected)
        assert not jnp.any(output[~mask])


def test_16_bit_computation_keeps_float32_sums():
    module = layer(dtype=jnp.bfloat16, is_causal=True)
    module.init_cache((2, 1, FEATURES), jnp.bfloat16)
    output = call(module, inputs(2, 3), decode=True)
    assert output.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(module, nnx.Cache))} == {jnp.dtype("float32")}


# --- decoding ---------------------------------------------------------------------------------------------------------

MAPS = {
    "elu_plus_one": lambda: feature_maps.elu_plus_one,
    "hedgehog": lambda: Hedgehog,
    "pair": lambda: FeatureMap(query=Hedgehog(HEADS, 2), key=functools.partial(T2R, num_features=4)),
    "favor_plus": lambda: feature_maps.favor_plus(jax.random.key(0), 2, 5),
}


@pytest.mark.parametrize("name", MAPS)
def test_decoding_is_the_whole_run(name):
    """A left-padded prompt, single tokens, then several at once: as each row by itself, in one go."""
    lengths, prompt, x = (2, 4), 4, inputs(2, 9)
    form = "chunked" if name == "elu_plus_one" else "quadratic"
    module = layer(feature_map=MAPS[name](), num_kv_heads=2, is_causal=True, implementation=form)
    module.init_cache(x.shape)
    mask = jnp.asarray(ragged(lengths, prompt))
    outputs = [call(module, x[:, :prompt], mask=mask, decode=True)]
    outputs += [call(module, x[:, part], decode=True) for part in (slice(4, 5), slice(5, 6), slice(6, 9))]
    outputs = jnp.concatenate(outputs, axis=1)
    for row, length in enumerate(lengths):
        whole = call(module, x[row : row + 1, prompt - length :])
        assert_close(outputs[row, prompt - length :], whole[0])
    module.init_cache(x.shape)
    assert_close(call(module, x, decode=True), call(module, x), what="after init_cache the past is forgotten")


def test_the_cache_is_one_state_of_constant_size():
    module = layer(num_kv_heads=2, is_causal=True, decode=True)
    module.init_cache((3, 1, FEATURES))
    shapes = {"kv": (3, 2, 2, 2), "key_sum": (3, 2, 2), "log_scale": (3, 2)}
    for _ in range(2):
        state = LinearAttentionState(*jax.tree.leaves(nnx.state(module, nnx.Cache)))
        assert {name: leaf.shape for name, leaf in state._asdict().items()} == shapes
        call(module, inputs(3, 20))
    assert jnp.all(state.key_sum > 0)


def test_a_step_is_compiled_once():
    """Under `nnx.jit`, which carries the cache in and out."""
    module, x = layer(is_causal=True), inputs(2, 6)
    module.init_cache(x.shape)
    step = nnx.jit(lambda module, token: module(token, decode=True))
    tokens = [jax.block_until_ready(x[:, i : i + 1]) for i in range(6)]
    outputs = [step(module, tokens[0])]
    assert count_compilations(lambda: outputs.extend(step(module, token) for token in tokens[1:])) == 0
    assert_close(np.concatenate(outputs, axis=1), call(module, x))


def test_split_and_merge_between_steps():
    module, x = layer(is_causal=True), inputs(2, 4)
    module.init_cache(x.shape)
    graphdef, params, cache = nnx.split(module, nnx.Param, nnx.Cache)

    @jax.jit
    def step(cache, token):
        module = nnx.merge(graphdef, params, cache)
        output = module(token, decode=True)
        return nnx.state(module, nnx.Cache), output

    outputs = []
    for i in range(4):
        cache, output = step(cache, x[:, i : i + 1])
        outputs.append(output)
    assert_close(jnp.concatenate(outputs, axis=1), call(module, x))


def test_views_decode():
    if not hasattr(nnx, "view"):
        pytest.skip("this Flax has no nnx.view")
    module, x = layer(is_causal=True, dropout_rate=0.1), inputs(3, 4)
    view = nnx.view(module, deterministic=True, decode=True, batch_size=3)
    assert_close(call(view, x), call(module, x, deterministic=True))
    assert (module.decode, module.deterministic, module.cached_state) == (None, None, None)


# --- transforms -------------------------------------------------------------------------------------------------------


def test_stacked_layers_decode():
    """Layers made by vmap, run by scan, with remat inside: as one after the other; the stacked caches decode."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs):
        maps = FeatureMap(query=Hedgehog(2, 3, rngs=rngs), key=feature_maps.favor_plus(jax.random.key(0), 3, 6))
        return LinearAttention(2, FEATURES, feature_map=maps, is_causal=True, rngs=rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def apply(layer, x):
        return x + nnx.remat(lambda layer, x: layer(x))(layer, x)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def step(layer, x):
        return x + layer(x, decode=True)

    layers, x = make(nnx.Rngs(0)), inputs(2, 6)
    expected = run(apply, layers, x)
    one_by_one, (graphdef, state) = x, nnx.split(layers)
    for i in range(3):
        one_by_one += call(nnx.merge(graphdef, jax.tree.map(lambda leaf, i=i: leaf[i], state)), one_by_one)
    assert_close(expected, one_by_one)
    nnx.vmap(lambda layer: layer.init_cache(x.shape))(layers)
    outputs = [run(step, layers, x[:, part]) for part in (slice(0, 4), slice(4, 5), slice(5, 6))]
    assert_close(jnp.concatenate(outputs, axis=1), expected)


# --- learnable and random maps ----------------------------------------------------------------------------------------


def test_learnable_maps_start_as_said():
    x = inputs(2, 5, 3)
    hedgehog, t2r = Hedgehog(3, FEATURES, rngs=nnx.Rngs(0)), T2R(3, FEATURES, num_features=9, rngs=nnx.Rngs(0))
    expected = jnp.concatenate([jax.nn.softmax(x), jax.nn.softmax(-x)], axis=-1)
    assert_close(hedgehog(x), expected)
    assert hedgehog.kernel.shape == (3, FEATURES, FEATURES)
    assert t2r(x).shape == (2, 5, 3, 9)
    assert_close(t2r(x), np.maximum(np.einsum("bthd,hdf->bthf", x, t2r.kernel[...]), 0))
    spread = T2R(50, 40, rngs=nnx.Rngs(0)).kernel[...]
    assert abs(float(jnp.std(spread)) * 40**0.5 - 1) < 0.02  # LeCun: variance 1/D for each head


def test_learnable_maps_learn_in_every_form():
    """One set of weights a head, for queries and for keys, and the same gradient through scans and checkpoints."""
    with x64():
        x = inputs(1, 19, dtype=jnp.float64)
        wide = {"param_dtype": jnp.float64}
        query_map, key_map = Hedgehog(HEADS, 2, **wide), T2R(2, 2, num_features=4, rngs=nnx.Rngs(0), **wide)
        maps = FeatureMap(query=query_map, key=key_map)
        options = {"feature_map": maps, "num_kv_heads": 2, "is_causal": True, **wide}
        forms = [{"implementation": "quadratic"}, {"implementation": "chunked", "chunk_size": 1}]
        modules = [layer(**options, **form) for form in forms]
        (output, expected), (_, actual) = (value_and_gradients(module, x) for module in modules)
        params = params_of(modules[0])
        assert_close(output, by_hand(params, {"is_causal": True}, np.asarray(x), maps=learned_maps(params)))
        jax.tree.map(lambda a, b: assert_close(a, b, floor=0.1), actual, expected)
    assert actual["query_feature_map"]["kernel"].shape[0] == HEADS
    assert actual["key_feature_map"]["kernel"].shape[0] == 2
    for name in ("query_feature_map", "key_feature_map"):
        assert all(np.any(leaf) for leaf in jax.tree.leaves(actual[name]))


def test_one_instance_is_shared():
    shared = Hedgehog(HEADS, 2, rngs=nnx.Rngs(0))
    module = layer(feature_map=shared)
    assert module.feature_map is shared
    assert_close(call(module, inputs(1, 3)), call(layer(feature_map=Hedgehog), inputs(1, 3)))
    with pytest.raises(ValueError, match="FeatureMap"):
        layer(feature_map=shared, num_kv_heads=2)(inputs(1, 3))


def test_random_features_are_saved_but_no_parameters():
    x = inputs(2, 5)
    first, second = (layer(feature_map=feature_maps.favor_plus(jax.random.key(seed), 2, 5)) for seed in (0, 1))
    assert "feature_map" not in params_of(first)
    assert np.any(call(first, x) != call(second, x))
    load(second, pure(nnx.state(first)))
    np.testing.assert_array_equal(call(first, x), call(second, x))


# --- options and errors -----------------------------------------------------------------------------------------------


def test_dropout_of_weights_raises():
    x = inputs(1, 3)
    module = layer(dropout_rate=0.5)
    with pytest.raises(ValueError, match=r"dropout_rate=0\.5"):
        module(x)
    with pytest.raises(ValueError, match=r"dropout_rate=0\.5"):
        module(x, deterministic=False, rngs=nnx.Rngs(0))
    assert_close(call(module, x, deterministic=True), call(layer(), x))
    assert_close(call(layer(dropout_rate=0.5, deterministic=True), x), call(layer(), x))


def test_weights_are_sown_on_request():
    module, x = layer(num_kv_heads=2), inputs(2, 3, 5)
    weights = sown(module, x, is_causal=True)
    assert weights.shape == (2, 3, HEADS, 5, 5)
    assert_close(jnp.sum(weights, axis=-1), np.ones((2, 3, HEADS, 5)))
    value = np.repeat(module.value(x), 2, axis=-2)
    output = module.out(jnp.asarray(np.einsum("abhts,abshd->abthd", weights, value)))
    assert_close(call(module, x, is_causal=True), output)
    assert not jax.tree.leaves(nnx.state(module, nnx.Intermediate))


def test_calls_override_attributes():
    x = inputs(1, 4)
    expected = call(layer(is_causal=True), x)
    assert_close(call(layer(), x, is_causal=True), expected)
    assert_close(call(layer(is_causal=True, decode=True), x, decode=False), expected)
    assert_close(layer()(x, x), call(layer(), x))


def _cached(batch: int = 2, **attributes):
    module = layer(**{"is_causal": True, "decode": True, **attributes})
    module.init_cache((batch, 1, FEATURES))
    return module


ERRORS = {
    "is_causal=True": lambda x: _cached(is_causal=False)(x),
    "init_cache": lambda x: layer(is_causal=True, decode=True)(x),
    "batch of 3": lambda x: _cached(3)(x),
    "self-attention": lambda x: _cached()(x, x + 1),
    "segment_ids": lambda x: _cached()(x, segment_ids=jnp.zeros((2, 4), int)),
    "sow_weights": lambda x: _cached()(x, sow_weights=True),
    "normalize=True": lambda x: layer(normalize=False)(x, sow_weights=True),
    "is_causal=True, for packed": lambda x: layer()(x, mask=jnp.ones((2, 1, 4, 4), bool)),
    "mask must be bool": lambda x: layer()(x, mask=jnp.ones((2, 4))),
    "inputs_k": lambda x: layer()(x, None, x),
    "T == S": lambda x: layer(is_causal=True)(x, x[:, :2], mask=jnp.ones((2, 2), bool)),
    "same batch axes": lambda x: layer()(x, x[:1]),
    "batch…, T, features": lambda x: layer()(x[0, 0]),
    "segment_ids must": lambda x: layer()(x, segment_ids=jnp.zeros(4, int)),
    "qkv_features": lambda x: layer(qkv_features=9),
    "num_kv_heads": lambda x: layer(num_kv_heads=3),
    "num_features": lambda x: Hedgehog(2, 4, num_features=5),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_say_what_is_wrong(message):
    with pytest.raises(ValueError, match=message):
        ERRORS[message](inputs(2, 4))

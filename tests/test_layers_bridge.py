"""The named layers in Linen, through Flax's bridge: the same outputs, gradients and decoding, as docs/layers.md tells."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from layer_checks import FEATURES, HEADS, inputs, pure, quick_normal
from tolerance import assert_close

from jax_linattn.layers import HGRN2, Mamba2

OPTIONS = {"state_dim": 3, "chunk_size": 4}


def decoder(features, num_heads, *, batch_size, rngs, **options):
    layer = Mamba2(features, num_heads, rngs=rngs, **options)
    layer.init_cache((batch_size, 1, features))
    return layer


def test_outputs_gradients_and_decoding():
    layer = Mamba2(FEATURES, HEADS, kernel_init=quick_normal, rngs=nnx.Rngs(0), **OPTIONS)
    graphdef, params = nnx.split(layer)
    x, mask = inputs(2, 7), np.arange(7)[None] >= np.array([[0], [2]])
    bridged = nnx.bridge.ToLinen(Mamba2, args=(FEATURES, HEADS), kwargs=OPTIONS)

    @jax.jit
    def by_nnx(params):
        loss = lambda params: jnp.sum(jnp.sin(nnx.merge(graphdef, params)(x, mask=mask)))
        return nnx.merge(graphdef, params)(x, mask=mask), jax.grad(loss)(params)

    @jax.jit
    def by_linen(params):
        loss = lambda params: jnp.sum(jnp.sin(bridged.apply({"params": params}, x, mask=mask)))
        return bridged.apply({"params": params}, x, mask=mask), jax.grad(loss)(params)

    output, gradients = by_nnx(params)
    linen_output, linen_gradients = by_linen(pure(params))
    assert_close(linen_output, output)
    expected = pure(gradients)
    assert jax.tree.structure(linen_gradients) == jax.tree.structure(expected)
    jax.tree.map(lambda actual, expected: assert_close(actual, expected, gradient=True), linen_gradients, expected)

    decoding = nnx.bridge.ToLinen(decoder, args=(FEATURES, HEADS), kwargs={**OPTIONS, "batch_size": 2})
    variables = decoding.init(jax.random.key(0), x[:, :1])
    assert jax.tree.structure(variables["params"]) == jax.tree.structure(expected)

    @jax.jit
    def step(params, cache, x, mask):
        variables = {"params": params, "cache": cache}
        y, kept = decoding.apply(variables, x, mask=mask, decode=True, mutable=["cache"])
        return y, kept["cache"]

    y, cache = step(pure(params), variables["cache"], x[:, :5], mask[:, :5])
    outputs = [y]
    for t in (5, 6):
        y, cache = step(pure(params), cache, x[:, t : t + 1], mask[:, t : t + 1])
        outputs.append(y)
    assert_close(np.concatenate(outputs, axis=1), output)


def test_a_constant_is_a_collection_of_its_own():
    bound = np.linspace(0, 0.9, FEATURES)
    options = {"lower_bound": bound}
    layer, x = HGRN2(FEATURES, HEADS, rngs=nnx.Rngs(0), **options), inputs(1, 5)
    bridged = nnx.bridge.ToLinen(HGRN2, args=(FEATURES, HEADS), kwargs=options)
    variables = bridged.init(jax.random.key(1), x)
    assert "lower_bound" not in variables["params"]
    variables = {**variables, "params": pure(nnx.state(layer, nnx.Param))}
    assert_close(jax.jit(bridged.apply)(variables, x), jax.jit(lambda x: layer(x))(x))

"""The decoder: causal, the same in one call and token by token, and blind to pads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lm_models import CONFIG, KINDS, model_of


@functools.cache
def compiled(kind: str):
    """(whole, advance, empty cache): logits in one call, and (cache, logits) from a cache."""
    model = model_of(kind)
    graphdef, params = nnx.split(model)
    decoding = nnx.merge(graphdef, params)
    decoding.init_cache(3, 16)
    decoding_graphdef, cache, rest = nnx.split(decoding, nnx.Cache, ...)

    def whole(tokens, mask=None):
        return nnx.merge(graphdef, params)(tokens, mask=mask)

    def advance(cache, tokens, mask=None):
        model = nnx.merge(decoding_graphdef, cache, rest)
        logits = model(tokens, mask=mask, decode=True)
        return nnx.state(model, nnx.Cache), logits

    return jax.jit(whole), jax.jit(advance), cache


def tokens_of(length: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, 11, (3, length)), jnp.int32)


def assert_same(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_then_steps_equal_the_whole(kind):
    whole, advance, cache = compiled(kind)
    tokens = tokens_of(9)
    shapes = [leaf.shape for leaf in jax.tree.leaves(cache)]
    parts = []
    for begin, end in [(0, 5), (5, 6), (6, 7), (7, 9)]:
        cache, logits = advance(cache, tokens[:, begin:end])
        parts.append(logits)
    assert_same(jnp.concatenate(parts, axis=1), whole(tokens))
    assert [leaf.shape for leaf in jax.tree.leaves(cache)] == shapes


@pytest.mark.parametrize("kind", KINDS)
def test_padded_prompts_equal_each_alone(kind):
    """Pads left, right and in the middle, in a first and in a continued call: real tokens are as without them."""
    whole, advance, cache = compiled(kind)
    tokens = tokens_of(9)
    mask = np.ones((3, 9), bool)
    mask[0, :3], mask[1, 4:6], mask[2, 7:] = False, False, False
    at_once = whole(tokens, mask)
    cache, first = advance(cache, tokens[:, :5], jnp.asarray(mask[:, :5]))
    _, rest = advance(cache, tokens[:, 5:], jnp.asarray(mask[:, 5:]))
    in_parts = jnp.concatenate([first, rest], axis=1)
    for row in range(3):
        length = int(mask[row].sum())
        alone = jnp.zeros((3, 9), jnp.int32).at[:, :length].set(tokens[row, mask[row]])  # what follows is the future
        expected = whole(alone)[row, :length]
        assert_same(at_once[row, mask[row]], expected)
        assert_same(in_parts[row, mask[row]], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_depend_on_the_past_alone(kind):
    """By gradients: of the logits at t with respect to every embedded token."""
    graphdef, params = nnx.split(model_of(kind))
    tokens = tokens_of(6)[:1]

    def from_embedded(x):
        model = nnx.merge(graphdef, params)
        for block in model.blocks:
            x = block(x)
        return jnp.sum(jnp.sin(model.norm(x)[0]), axis=-1)  # [T]

    x = model_of(kind).embedding(tokens)
    jacobian = jax.jit(jax.jacrev(from_embedded))(x)  # [T, 1, T, D]
    depends = np.abs(np.asarray(jacobian)[:, 0]).max(axis=-1) > 0
    np.testing.assert_array_equal(depends, np.tril(np.ones((6, 6), bool)))


def test_a_full_softmax_cache_is_seen():
    _, advance, cache = compiled("softmax")
    tokens = tokens_of(5)
    for _ in range(3):
        cache, _ = advance(cache, tokens)
    cache, last = advance(cache, tokens[:, :1])
    assert np.all(np.isfinite(last)), "16 tokens fit"
    assert np.all(np.isnan(advance(cache, tokens[:, :1])[1])), "the 17th does not"
    with pytest.raises(ValueError, match="room for 16 tokens, got 17"):
        advance(cache, tokens_of(17))


def test_errors():
    for change, message in [
        ({"attention": "sofmax"}, r"model.attention must be one of \['linear', 'softmax', 'retnet', .*\], got 'sofmax'"),
        ({"feature_map": "elu"}, "unknown feature map 'elu'"),
        ({"num_heads": 5}, "model.num_heads must divide model.width, got 5 heads and width 12"),
        ({"num_layers": 0}, "model.num_layers must be a positive whole number"),
    ]:
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(CONFIG, **change)
    model = model_of("linear")
    with pytest.raises(ValueError, match="tokens must be an integer array"):
        model(jnp.zeros((1, 3)))
    with pytest.raises(ValueError, match="call init_cache"):
        model(jnp.zeros((1, 3), jnp.int32), decode=True)

"""The decoder: causal, the same in one call and token by token, and blind to pads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from harness import count_compilations, quick_jit

from jax_linattn.lm.generate import generate, pad_prompts, sample
from jax_linattn.lm.model import Decoder, ModelConfig

CONFIG = ModelConfig(
    vocabulary_size=11,
    attention="linear",
    feature_map="elu_plus_one",
    normalize=True,
    num_layers=2,
    num_heads=2,
    width=12,
    mlp_width=16,
    convolution_width=4,
    tied_embedding=True,
)
KINDS = {
    "linear": CONFIG,
    "softmax": dataclasses.replace(CONFIG, attention="softmax", tied_embedding=False),
    "hedgehog": dataclasses.replace(CONFIG, feature_map="hedgehog", num_layers=1),
}


@functools.cache
def model_of(kind: str) -> Decoder:
    """A model whose parameters have all moved from where they start, so that zeros and ones hide nothing."""
    graphdef, params = nnx.split(Decoder(KINDS[kind], rngs=nnx.Rngs(0)), nnx.Param)
    rng = np.random.default_rng(0)
    moved = jax.tree.map(lambda p: p + 0.3 * rng.standard_normal(p.shape).astype(np.float32), nnx.to_pure_dict(params))
    return nnx.merge(graphdef, nnx.State(moved))


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

    return quick_jit(whole), quick_jit(advance), cache


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
    jacobian = quick_jit(jax.jacrev(from_embedded))(x)  # [T, 1, T, D]
    depends = np.abs(np.asarray(jacobian)[:, 0]).max(axis=-1) > 0
    np.testing.assert_array_equal(depends, np.tril(np.ones((6, 6), bool)))


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_generation_is_greedy_decoding_of_the_whole(kind):
    """Prompts of unequal length in one batch: every token is the likeliest after all before it."""
    prompts = [np.array([1, 2, 3, 4, 5]), np.array([7]), np.array([3, 9])]
    tokens, mask = pad_prompts(prompts)
    written = np.asarray(generate(model_of(kind), tokens, 4, mask=mask, temperature=0))
    whole, *_ = compiled(kind)
    for row, prompt in enumerate(prompts):
        text = np.concatenate([prompt, written[row]])
        padded = jnp.zeros((3, 9), jnp.int32).at[:, : len(text)].set(text.astype(np.int32))
        likeliest = np.asarray(whole(padded)[row].argmax(axis=-1))
        np.testing.assert_array_equal(written[row], likeliest[len(prompt) - 1 : len(text) - 1])


def test_generation_compiles_once_and_leaves_the_model_alone():
    model = model_of("linear")
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    tokens = tokens_of(4)
    first = generate(model, tokens, 7, key=jax.random.key(0))

    def again():
        return generate(model, tokens + 1, 7, temperature=0.5, key=jax.random.key(1))

    again()  # what is not the model's own, such as the making of keys
    assert count_compilations(again) == 0
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(model)), before)
    assert first.shape == (3, 7)
    np.testing.assert_array_equal(first, generate(model, tokens, 7, key=jax.random.key(0)))
    assert not np.array_equal(first, generate(model, tokens, 7, key=jax.random.key(1)))


def test_sampling():
    logits = jnp.log(jnp.array([0.5, 0.3, 0.2]))
    keys = jax.random.split(jax.random.key(0), 4000)
    draws = jax.jit(jax.vmap(sample, in_axes=(0, None, None)))
    for temperature, expected in [(1.0, [0.5, 0.3, 0.2]), (0.5, [25 / 38, 9 / 38, 4 / 38]), (0.0, [1, 0, 0])]:
        frequencies = np.bincount(draws(keys, logits, jnp.float32(temperature)), minlength=3) / 4000
        np.testing.assert_allclose(frequencies, expected, atol=0.03)


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
        ({"attention": "sofmax"}, r"model.attention must be one of \['linear', 'softmax'\], got 'sofmax'"),
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
    with pytest.raises(ValueError, match="key must be a PRNG key unless temperature is 0"):
        generate(model, jnp.zeros((1, 3), jnp.int32), 2)
    with pytest.raises(ValueError, match="temperature must be at least 0, got -1"):
        generate(model, jnp.zeros((1, 3), jnp.int32), 2, temperature=-1, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"prompts must be \[B, T >= 1\]"):
        generate(model, jnp.zeros((1, 0), jnp.int32), 2, temperature=0)
    with pytest.raises(ValueError, match="none of them empty"):
        pad_prompts([np.array([1]), np.array([], int)])

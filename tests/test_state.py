"""Splitting a sequence anywhere and carrying the state changes nothing.

Field cases 14 (prefill, then steps), 24 (a chunk and one token more), 29, 33 (segment by segment), 34 (8 tokens, then 4),
36 (the initial state is used, with its gradient; also in `test_forms`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CAUSAL_FORMS, IN_BLOCKS, Form, runs
from harness import normal, state_of, x64
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_close

from jax_linattn import (
    FeatureMap,
    LinearAttentionState,
    causal_linear_attention,
    feature_maps,
    init_state,
    linear_attention_step,
)

pytestmark = pytest.mark.key

B, T, H, K, V, D, E = 2, 12, 4, 2, 2, 3, 5
PIECES = (1, 2, 3, 5)  # the lengths that are compiled
RULES = {"normalized": {}, "unnormalized": {"normalize": False, "scale": 0.5}}


def _tokens(length=T, dtype=np.float64, seed=0):
    return normal(seed, (B, length, H, D), (B, length, K, D), (B, length, V, E), dtype=dtype)


def _start(dtype=np.float64):
    kv, key_sum = normal(1, (B, K, D, E), (B, K, D), dtype=dtype)
    return state_of(kv, abs(key_sum))


@functools.cache
def _attend(form: Form, rule: str):
    @jax.jit
    def attend(state, tokens, hiding):
        return causal_linear_attention(*tokens, state=state, **hiding, **form.options(), **RULES[rule])

    return attend


def _in_pieces(attend, state, tokens, hiding, lengths):
    """Calls for one piece after another. Each is told to which segment the state belongs."""
    outputs, start = [], 0
    for length in lengths:
        piece = slice(start, start + length)
        here = {name: x[:, piece] for name, x in hiding.items() if name != "state_segment_ids"}
        if "segment_ids" in hiding:
            ids = hiding["segment_ids"]
            here["state_segment_ids"] = hiding["state_segment_ids"] if start == 0 else ids[:, start - 1]
        state, output = attend(state, [x[:, piece] for x in tokens], here)
        outputs.append(output)
        start += length
    return state, np.concatenate(outputs, axis=1)


def _assert_same(got, want, **how):
    for name, a, b in zip(("state", "output"), got, want, strict=True):
        jax.tree.map(lambda a, b, name=name: assert_close(a, b, what=name, **how), a, b)


def _pieces(left: int = T):
    """Lengths from PIECES that add up to T."""
    if left == 0:
        return st.just(())
    return st.sampled_from([n for n in PIECES if n <= left]).flatmap(
        lambda n: _pieces(left - n).map(lambda rest: (n, *rest))
    )


@pytest.mark.parametrize("form", IN_BLOCKS, ids=str)
@given(lengths=_pieces(), seed=st.integers(0, 999))
@settings(max_examples=12)
def test_random_splits_masks_and_segments(form, lengths, seed):
    rng = np.random.default_rng(seed)
    ids = runs(rng, B, T)
    hiding = {
        "mask": rng.random((B, T)) < 0.7,
        "segment_ids": ids,
        "state_segment_ids": rng.integers(0, 2, B).astype(np.int32),
    }
    with x64():
        attend, state, tokens = _attend(form, "normalized"), _start(), _tokens()
        _assert_same(_in_pieces(attend, state, tokens, hiding, lengths), attend(state, tokens, hiding))


@pytest.mark.parametrize("rule", RULES)
def test_prompt_then_single_tokens(rule):
    """Field cases 14 and 34: a prompt of 8 continues, token by token, and equals the whole."""

    @jax.jit
    def step(state, token, mask):
        return linear_attention_step(state, *token, mask=mask, **RULES[rule])

    with x64():
        attend = _attend(Form("chunked", 2), rule)
        tokens, mask = _tokens(), np.random.default_rng(2).random((B, T)) < 0.7
        whole = attend(_start(), tokens, {"mask": mask})
        state, prompt = attend(_start(), [x[:, :8] for x in tokens], {"mask": mask[:, :8]})
        outputs = [prompt]
        for t in range(8, T):
            state, output = step(state, [x[:, t] for x in tokens], mask[:, t])
            outputs.append(output[:, None])
        _assert_same((state, np.concatenate(outputs, axis=1)), whole)


def test_a_chunk_and_one_token_more():
    """Field case 24: padding to a chunk leaves no trace in the state."""
    form = Form("chunked", 64)
    with x64():
        tokens = _tokens(65)
        whole = _attend(form, "normalized")(_start(), tokens, {})
        _assert_same(_in_pieces(_attend(form, "normalized"), _start(), tokens, {}, (64, 1)), whole)


@functools.cache
def _gradients_in_pieces(form, pieces):
    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients(state, tokens):
        outputs, start = [], 0
        for length in pieces:
            piece = [x[:, start : start + length] for x in tokens]
            state, output = causal_linear_attention(*piece, state=state, **form.options())
            outputs.append(output)
            start += length
        return jnp.sum(jnp.sin(jnp.concatenate(outputs, axis=1))) + sum(jnp.sum(jnp.cos(x)) for x in state[:2])

    return gradients(_start(), _tokens(7))


@pytest.mark.parametrize("form", IN_BLOCKS, ids=str)
def test_gradients_go_through_the_state(form):
    with x64():
        got, want = _gradients_in_pieces(form, (3, 4)), _gradients_in_pieces(Form("quadratic", None), (7,))
    jax.tree.map(lambda a, b: assert_close(a, b, gradient=True), got, want)


def test_a_masked_step_leaves_the_state_alone():
    token = [x[:, 0] for x in _tokens(dtype=np.float32)]
    state = _start(np.float32)
    after, output = linear_attention_step(state, *token, mask=jnp.array([True, False]))
    assert not np.any(output[1])
    assert np.all(np.any(output[0], axis=-1))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], b[1]), after, state)


def test_no_state_is_the_empty_state():
    tokens = [jnp.asarray(x) for x in _tokens(dtype=np.float32)]
    with_none = causal_linear_attention(*tokens)
    with_empty = causal_linear_attention(*tokens, state=init_state(*tokens[1:]))
    jax.tree.map(np.testing.assert_array_equal, with_none, with_empty)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_init_state(dtype):
    """From one token or a sequence, arrays or shapes: float32, or float64 for float64."""
    with x64():
        token = jnp.ones((B, K, D), dtype), jnp.ones((B, V * 2, E), dtype)
        sequence = jnp.ones((B, T, K, D), dtype), jnp.ones((B, T, V * 2, E), dtype)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in sequence]
        for key, value in (token, sequence, shapes):
            state = init_state(key, value, feature_map=feature_maps.dpfp(2))
            assert isinstance(state, LinearAttentionState)
            assert [x.shape for x in state] == [(B, 4, 4 * D, E), (B, 4, 4 * D), (B, 4)]
            assert {str(x.dtype) for x in state} == {"float64" if dtype == "float64" else "float32"}
            assert not any(np.any(x) for x in state)


def test_state_is_a_pytree_that_reorders_beams():
    tokens = [jnp.asarray(x) for x in _tokens(dtype=np.float32)]
    state, _ = causal_linear_attention(*tokens)
    beams = jnp.array([1, 1, 0])
    moved = jax.tree.map(lambda x: x[beams], state)
    token = [jnp.asarray(x[:, 0])[beams] for x in _tokens(dtype=np.float32, seed=5)]
    _, output = linear_attention_step(moved, *token)
    _, unmoved = linear_attention_step(state, *(jnp.asarray(x[:, 0]) for x in _tokens(dtype=np.float32, seed=5)))
    np.testing.assert_allclose(output[0], unmoved[1], rtol=1e-6)
    np.testing.assert_allclose(output[2], unmoved[0], rtol=1e-6)
    assert len(jax.tree.leaves(state)) == 3


@pytest.mark.parametrize("form", CAUSAL_FORMS, ids=str)
def test_key_sum_is_kept_when_nothing_is_normalized(form):
    """The state of an unnormalised call continues in a normalised one."""
    tokens = [jnp.asarray(x) for x in _tokens(5, np.float32)]
    unnormalized, _ = causal_linear_attention(*tokens, normalize=False, **form.options())
    normalized, _ = causal_linear_attention(*tokens)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), unnormalized, normalized)
    assert not np.any(normalized.log_scale)


def test_two_maps_share_one_state():
    """The state has the features of the key map; the query map has none in it."""
    maps = FeatureMap(query=feature_maps.exp, key=feature_maps.softplus)
    tokens = [jnp.asarray(x) for x in _tokens(5, np.float32)]
    state, _ = causal_linear_attention(*tokens, feature_map=maps)
    other, _ = causal_linear_attention(*tokens, feature_map=feature_maps.softplus)
    jax.tree.map(np.testing.assert_array_equal, state, other)


def test_log_scale_belongs_to_the_sums():
    """True sums are leaf · exp(log_scale): the same state in other units gives the same outputs."""
    query, key, value = (jnp.asarray(x) for x in normal(0, *[(2, 5, 2, 3)] * 3))
    state, _ = causal_linear_attention(query, key, value)
    kv, key_sum, log_scale = state
    factor = jnp.exp(log_scale - 1.5)
    other = LinearAttentionState(kv * factor[..., None, None], key_sum * factor[..., None], log_scale + 1.5)
    after, output = causal_linear_attention(query, key, value, state=other, normalize=False)
    expected_after, expected = causal_linear_attention(query, key, value, state=state, normalize=False)
    for got, want in zip((*after, output), (*expected_after, expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    _, stepped = linear_attention_step(other, query[:, 0], key[:, 0], value[:, 0], normalize=False)
    np.testing.assert_allclose(stepped, expected[:, 0], rtol=1e-5, atol=1e-5)

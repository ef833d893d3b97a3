"""No finite value at time > t changes o_t by a bit, through any public entry point.

Field cases 17 (a maximum over future keys), 27 (`causal=True` ignored in one entry point).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CAUSAL_FORMS, ONE_OF_EACH, runs
from harness import normal

from jax_linattn import attention_weights, causal_linear_attention, feature_maps, linear_attention

pytestmark = pytest.mark.key

B, T, H, D, E = 2, 11, 2, 3, 4


def _tokens():
    return [jnp.asarray(x) for x in normal(0, (B, T, H, D), (B, T, H, D), (B, T, H, E))]


def _maps():
    return {
        "elu_plus_one": feature_maps.elu_plus_one,
        "favor_plus": feature_maps.favor_plus(jax.random.key(0), D, 8),
        "identity": feature_maps.identity,
    }


def _assert_past_is_unchanged(function, tokens, time_axis=1, size=1.0):
    """Replaces all tokens after t, for each t, and compares the bits of what comes out up to t."""
    before = np.asarray(function(*tokens))
    noise = [jnp.asarray(x) * size for x in normal(1, *(x.shape for x in tokens))]
    for t in range(T - 1):
        is_past = (np.arange(T) <= t)[None, :, None, None]
        after = np.asarray(function(*(jnp.where(is_past, x, y) for x, y in zip(tokens, noise, strict=True))))
        past = [np.take(x, np.arange(t + 1), axis=time_axis) for x in (before, after)]
        np.testing.assert_array_equal(*past, err_msg=f"output up to {t}")


@pytest.mark.parametrize("name", _maps())
@pytest.mark.parametrize("form", CAUSAL_FORMS, ids=str)
def test_the_future_changes_no_bit(form, name):
    @jax.jit
    def attend(q, k, v):
        options = {"normalize": False} if name == "identity" else {}
        return causal_linear_attention(q, k, v, feature_map=_maps()[name], **options, **form.options())[1]

    _assert_past_is_unchanged(attend, _tokens(), size=1000.0)


def _with_a_huge_token(form, segment_ids=None):
    """Outputs without, and for each t > 0 and for key and value the outputs with, 1e38 at time t."""

    @jax.jit
    def attend(q, k, v):
        return linear_attention(q, k, v, is_causal=True, segment_ids=segment_ids, **form.options())

    tokens = _tokens()
    before = np.asarray(attend(*tokens))
    for t in range(1, T):
        for i in (1, 2):
            changed = list(tokens)
            changed[i] = tokens[i].at[:, t].set(1e38)
            yield t, before, np.asarray(attend(*changed))


@pytest.mark.parametrize("form", CAUSAL_FORMS, ids=str)
def test_a_future_key_or_value_of_any_size_changes_no_bit(form):
    """1e38 overflows every sum that it enters; it must enter none of the past's."""
    for t, before, after in _with_a_huge_token(form):
        np.testing.assert_array_equal(before[:, :t], after[:, :t], err_msg=f"token {t}")


@pytest.mark.parametrize("form", CAUSAL_FORMS, ids=str)
def test_a_key_or_value_of_any_size_changes_no_bit_of_another_segment(form):
    ids = runs(np.random.default_rng(3), B, T)
    for t, before, after in _with_a_huge_token(form, ids):
        others = ids != ids[:, t : t + 1]
        np.testing.assert_array_equal(before[others], after[others], err_msg=f"token {t}")


@pytest.mark.parametrize("chosen", [{}, {"implementation": "chunked"}], ids=["default", "chunked"])
def test_every_entry_point(chosen):
    functions = {
        "linear_attention": functools.partial(linear_attention, is_causal=True, **chosen),
        "causal_linear_attention": lambda *tokens: causal_linear_attention(*tokens, **chosen)[1],
    }
    for function in functions.values():
        _assert_past_is_unchanged(jax.jit(function), _tokens())
    unbatched = jax.jit(lambda q, k, v: linear_attention(q[0], k[0], v[0], is_causal=True, **chosen)[None])
    _assert_past_is_unchanged(unbatched, _tokens())
    weights = jax.jit(lambda q, k: attention_weights(q, k, is_causal=True))
    _assert_past_is_unchanged(weights, _tokens()[:2], time_axis=2)


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=str)
def test_the_past_has_no_gradient_from_the_future(form):
    """∂o_t/∂(token s) is exactly 0 for s > t, and not for s <= t."""

    def attend(k, v):
        q = _tokens()[0][:1]
        return jnp.sum(linear_attention(q, k, v, is_causal=True, **form.options()), axis=(0, 2, 3))

    _, k, v = (x[:1] for x in _tokens())
    for jacobian in jax.jit(jax.jacrev(attend, argnums=(0, 1)))(k, v):
        depends = np.any(np.asarray(jacobian)[:, 0] != 0, axis=(-2, -1))
        depends[0, 0] = True  # one key alone has weight 1, whatever it is
        np.testing.assert_array_equal(depends, np.tril(np.ones((T, T), bool)))


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=str)
def test_overflow_leaves_the_gradients_of_the_past(form):
    """Sums that overflow from t on, for each t, leave the gradients of what comes before what they are without: also where
    a block reads the last tokens of the one before once more."""
    length = 17
    q, k, v = normal(3, (1, length, H, D), (1, length, H, D), (1, length, H, E))
    is_past = np.arange(length) < np.arange(1, length)[:, None]  # [rows, T]
    is_past = is_past[..., None, None]

    @jax.jit
    def gradients(v):
        def loss(q, k, v):
            output = linear_attention(q, k, v, is_causal=True, normalize=False, **form.options())
            return jnp.sum(jnp.where(is_past, output, 0) ** 2)

        rows = [jnp.broadcast_to(x, v.shape[:-1] + x.shape[-1:]) for x in (q, k)]
        return [jnp.where(is_past, x, 0) for x in jax.grad(loss, argnums=(0, 1, 2))(*rows, v)]

    v = np.broadcast_to(v, (length - 1, *v.shape[1:]))
    got, want = gradients(np.where(is_past, v, np.float32(3e38))), gradients(np.where(is_past, v, 0))
    for name, x, y in zip("qkv", got, want, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)


def test_not_causal_sees_the_future():
    """The switch does something: the same call without it changes."""
    q, k, v = _tokens()
    changed = v.at[:, -1].set(5.0)
    assert np.all(linear_attention(q, k, v)[:, 0] != linear_attention(q, k, changed)[:, 0])

"""`attention_weights`: the weights that linear attention implies. They sum to one, and times the values are the output.

Field case 13: v = identity gives a row-stochastic lower triangle.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import BIDIRECTIONAL_FORMS, CAUSAL_FORMS, runs
from harness import normal, x64
from tolerance import assert_close

from jax_linattn import attention_weights, causal_linear_attention, feature_maps, linear_attention

B, T, S, H, K, D, E = 2, 11, 7, 4, 2, 3, 5


def _tokens(key_length=T):
    shapes = [(B, T, H, D), (B, key_length, K, D), (B, key_length, K, E)]
    return [jnp.asarray(x) for x in normal(0, *shapes, dtype=np.float64)]


def _hiding(key_length, is_causal):
    rng = np.random.default_rng(5)
    ids = runs(rng, B, T), runs(rng, B, key_length)
    return {
        "mask": jnp.asarray(rng.random((B, key_length)) < 0.7),
        "segment_ids": ids[0] if is_causal else ids,
        "query_seq_lengths": np.array([T, T - 2]),
        "key_value_seq_lengths": np.array([key_length - 1, key_length]),
    }


CALLS = pytest.mark.parametrize(("key_length", "is_causal"), [(T, True), (T, False), (S, False)], ids=str)


@CALLS
@pytest.mark.parametrize("hidden", [False, True], ids=["all_seen", "some_hidden"])
def test_weights_times_values_are_the_output(key_length, is_causal, hidden):
    with x64():
        q, k, v = _tokens(key_length)
        options = {"is_causal": is_causal, **(_hiding(key_length, is_causal) if hidden else {})}
        weights, output = jax.jit(
            lambda q, k, v: (attention_weights(q, k, **options), linear_attention(q, k, v, **options))
        )(q, k, v)
    weights = np.asarray(weights)
    assert weights.shape == (B, H, T, key_length)
    assert_close(np.einsum("bhts,bshe->bthe", weights, np.repeat(np.asarray(v), H // K, axis=2)), output)
    seen = oracle.visible(B, T, key_length, is_causal, **{k: v for k, v in options.items() if k != "is_causal"})
    visible = seen.key & seen.row[:, :, None]
    np.testing.assert_array_equal(weights > 0, np.broadcast_to(visible[:, None], weights.shape))
    has_key = np.broadcast_to(visible.any(axis=-1)[:, None], weights.shape[:-1])
    np.testing.assert_allclose(np.sum(weights, axis=-1), has_key, atol=1e-14)


@pytest.mark.parametrize("form", CAUSAL_FORMS, ids=str)
def test_identity_values_show_a_lower_triangle(form):
    """Without `attention_weights`, from each form itself."""
    with x64():
        q, k, _ = _tokens()
        identity = jnp.broadcast_to(jnp.eye(T)[None, :, None], (B, T, K, T))
        _, weights = jax.jit(lambda *x: causal_linear_attention(*x, **form.options()))(q, k, identity)
        assert_close(jnp.moveaxis(weights, 2, 1), attention_weights(q, k, is_causal=True))
    weights = np.asarray(weights)
    assert not np.any(np.triu(np.moveaxis(weights, 2, 1), 1))
    np.testing.assert_allclose(np.sum(weights, axis=-1), 1, atol=1e-14)


@pytest.mark.parametrize("form", BIDIRECTIONAL_FORMS, ids=str)
def test_identity_values_show_the_weights(form):
    with x64():
        q, k, _ = _tokens(S)
        identity = jnp.broadcast_to(jnp.eye(S)[None, :, None], (B, S, K, S))
        weights = jax.jit(lambda *x: linear_attention(*x, **form.options()))(q, k, identity)
        assert_close(jnp.moveaxis(weights, 2, 1), attention_weights(q, k))


def test_eps_and_maps():
    """With eps the rows sum to less than one; any map may be used; unbatched input gives unbatched weights."""
    q, k, v = (x.astype(np.float32) for x in normal(0, (B, T, H, D), (B, T, K, D), (B, T, K, E)))
    weights = attention_weights(jnp.asarray(q), jnp.asarray(k), eps=0.5, feature_map=feature_maps.softplus)
    output = linear_attention(q, k, v, eps=0.5, feature_map=feature_maps.softplus)
    np.testing.assert_allclose(np.einsum("bhts,bshe->bthe", weights, np.repeat(v, 2, axis=2)), output, rtol=1e-5, atol=1e-6)
    assert np.all(np.sum(weights, axis=-1) < 1)
    one = attention_weights(jnp.asarray(q[0]), jnp.asarray(k[0]), mask=jnp.arange(T) > 2)
    assert one.shape == (H, T, T)
    assert not np.any(one[..., :3])
    np.testing.assert_allclose(np.sum(one, axis=-1), 1, rtol=1e-6)

"""Sampling: the distributions that temperature, top-k and top-p say, and draws that belong to tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_linattn.lm.sampling import sample, sampling

LOGITS = np.log([0.1, 0.4, 0.2, 0.2, 0.1])
many_draws = jax.jit(jax.vmap(sample, in_axes=(0, None, None)))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.2, 0.1]),
        ({"temperature": 0.5}, [1 / 26, 16 / 26, 4 / 26, 4 / 26, 1 / 26]),
        ({"temperature": 0.0}, [0, 1, 0, 0, 0]),
        ({"temperature": 1e-40}, [0, 1, 0, 0, 0]),
        ({"top_k": 1}, [0, 1, 0, 0, 0]),
        ({"top_k": 2}, [0, 2 / 3, 1 / 3, 0, 0]),  # of the two with 0.2 the first
        ({"top_k": 4}, [1 / 9, 4 / 9, 2 / 9, 2 / 9, 0]),
        ({"top_k": 10**12}, [0.1, 0.4, 0.2, 0.2, 0.1]),
        ({"top_p": 1e-30}, [0, 1, 0, 0, 0]),
        ({"top_p": 1e-50}, [0, 1, 0, 0, 0]),
        ({"top_p": 0.39}, [0, 1, 0, 0, 0]),
        ({"top_p": 0.41}, [0, 2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.79}, [0, 1 / 2, 1 / 4, 1 / 4, 0]),
        ({"top_p": 0.81}, [1 / 9, 4 / 9, 2 / 9, 2 / 9, 0]),
        ({"top_p": 1.0}, [0.1, 0.4, 0.2, 0.2, 0.1]),
        ({"top_p": 0.6, "temperature": 0.5}, [0, 1, 0, 0, 0]),  # 16/26 > 0.6: the temperature comes first
        ({"top_p": 0.5, "top_k": 3}, [0, 2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.9, "top_k": 2}, [0, 2 / 3, 1 / 3, 0, 0]),
    ],
)
def test_frequencies(rule, expected):
    keys = jax.random.split(jax.random.key(0), 4000)
    draws = np.asarray(many_draws(keys, jnp.asarray(LOGITS, jnp.float32), sampling(**rule)))
    frequencies = np.bincount(draws, minlength=5) / 4000
    np.testing.assert_allclose(frequencies, expected, atol=0.03)
    np.testing.assert_array_equal(frequencies[np.equal(expected, 0)], 0)


def test_draws_are_those_of_categorical():
    """Also from bfloat16 logits, in float32; and what is left out moves no other draw."""
    keys = jax.random.split(jax.random.key(0), 500)
    logits = jnp.asarray(np.random.default_rng(0).standard_normal(40), jnp.bfloat16)
    wide = logits.astype(jnp.float32)
    draws = many_draws(keys, logits, sampling(0.7))
    np.testing.assert_array_equal(draws, jax.vmap(jax.random.categorical, (0, None))(keys, (wide - wide.max()) / 0.7))
    restricted = many_draws(keys, logits, sampling(0.7, top_k=10))
    kept = np.isin(draws, np.argsort(-np.asarray(wide), kind="stable")[:10])
    np.testing.assert_array_equal(restricted[kept], draws[kept])
    assert 0 < kept.sum() < 500

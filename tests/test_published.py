"""Figures that the seed chapters print, and what they say of sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_linattn
from jax_linattn import feature_maps


def test_mean_difference_of_causal_and_not():
    rng = np.random.RandomState(42)
    query, key = (rng.randn(32, 16).astype(np.float32) * 0.5 for _ in range(2))
    value = rng.randn(32, 16).astype(np.float32)
    query, key, value = (jnp.asarray(x)[:, None, :] for x in (query, key, value))
    causal, full = (
        jax_linattn.linear_attention(query, key, value, is_causal=is_causal, eps=1e-6) for is_causal in (True, False)
    )
    difference = float(jnp.mean(jnp.abs(causal - full)))
    assert f"{difference:.4f}" == "0.2188"
    assert difference == pytest.approx(0.21875632, abs=2e-7)


@pytest.mark.parametrize(
    ("feature_map", "numerator", "denominator"),
    [(feature_maps.identity, 140, 6), (feature_maps.elu_plus_one, 390, 18)],
    ids=["identity", "elu_plus_one"],
)
def test_worked_numbers(feature_map, numerator, denominator):
    query = jnp.full((1, 1, 1), 2.0)
    key = jnp.array([0.5, 1.0, 1.5])[:, None, None]
    value = jnp.array([10.0, 20.0, 30.0])[:, None, None]
    attend = lambda **how: jax_linattn.linear_attention(query, key, value, feature_map=feature_map, **how).item()
    assert attend(normalize=False) == pytest.approx(numerator, rel=1e-6)
    assert attend() == pytest.approx(numerator / denominator, rel=1e-6)


def test_worked_softmax_number_is_what_favor_estimates():
    """softmax over q·k gives 25.75; features of D = 1 need no scaling, so many of them come close."""
    query = jnp.full((1, 1, 1), 2.0)
    key = jnp.array([0.5, 1.0, 1.5])[:, None, None]
    value = jnp.array([10.0, 20.0, 30.0])[:, None, None]
    exact = jax.nn.softmax(2.0 * key[:, 0, 0]) @ value[:, 0, 0]
    assert f"{exact:.2f}" == "25.75"
    random_map = feature_maps.favor_plus(jax.random.key(0), 1, 100_000, kind="trig")
    assert jax_linattn.linear_attention(query, key, value, feature_map=random_map).item() == pytest.approx(25.75, abs=0.3)


def test_element_counts():
    """The aggregate is D×E whatever the length: n=128, d=64 is 4 times smaller than the matrix, 1,024 tokens 256 times."""
    for length, ratio in [(128, 4), (1024, 256), (8192, 16384)]:
        keys = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)
        aggregate = jax_linattn.init_state(keys, keys).kv
        assert aggregate.shape == (1, 1, 64, 64)
        assert length * length / aggregate.size == ratio
    assert aggregate.size == 4096

"""Feature maps: accurate in every dtype, without NaN in their gradients, with the kernels that they promise.

Field cases 1, 2, 3 (elu + 1), 4 (gradients at 0), 15 to 20 (random features, DPFP, signed features).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import x64

import jax_linattn
from jax_linattn import feature_maps

ELEMENTWISE = ["elu_plus_one", "relu", "relu_squared", "softplus", "exp", "identity"]
BY_NAME = [*ELEMENTWISE, "softmax", "taylor", "dpfp_1", "dpfp_2", "dpfp_3"]
DTYPES = ["float16", "bfloat16", "float32", "float64"]
FAVOR_KINDS = ["positive", "hyperbolic", "trig"]

EXACT = {
    "elu_plus_one": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    "relu": lambda x: np.maximum(x, 0),
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
    "softplus": lambda x: np.logaddexp(x, 0),
    "exp": np.exp,
    "identity": lambda x: x,
}


def _in_ulp(got, exact: np.ndarray, dtype) -> np.ndarray:
    """The error in units of the last place of `dtype`, where the exact value is a normal number of it."""
    info = jnp.finfo(dtype)
    normal = (np.abs(exact) >= float(info.tiny)) & (np.abs(exact) <= float(info.max))
    ulp = np.exp2(np.floor(np.log2(np.abs(exact[normal])))) * float(info.eps)
    return np.abs(np.asarray(got).astype(np.float64)[normal] - exact[normal]) / ulp


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_accurate(name, dtype):
    with x64(dtype == "float64"):
        x = jnp.asarray(np.concatenate([np.linspace(-80, 60, 2801), [-8, -6, -17, -20, 0]]), dtype)
        exact = EXACT[name](np.asarray(x).astype(np.float64))
        got = feature_maps.get(name)(x)
        assert got.dtype == x.dtype
        errors = _in_ulp(got, exact, x.dtype)
        assert errors.size > 400
        assert errors.max() <= (4 if name == "softplus" else 2)  # softplus adds the rounding of log1p to that of exp


@pytest.mark.parametrize("x", [-8.0, -17.0, -20.0, -40.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_elu_plus_one_and_its_gradient_are_exp_below_zero(x, dtype):
    x = jnp.asarray(x, dtype)
    exact = np.exp(float(x))
    assert float(feature_maps.elu_plus_one(x)) == pytest.approx(exact, rel=2 * float(jnp.finfo(dtype).eps))
    assert float(jax.grad(feature_maps.elu_plus_one)(x)) == pytest.approx(exact, rel=2 * float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention_over_one_token_returns_its_value(dtype):
    for x in (-8.0, -17.0, -60.0, 3.0):
        query = jnp.full((1, 1, 2, 3), x, dtype)
        value = jnp.arange(8, dtype=dtype).reshape(1, 1, 2, 4) / 7
        output = jax_linattn.linear_attention(query, query, value)
        # A product and a quotient round once each; rounding to 16 bits takes that away.
        np.testing.assert_allclose(output, value, rtol=0 if dtype == "bfloat16" else 2.4e-7)


def _all_maps():
    maps = [(name, feature_maps.get(name)) for name in BY_NAME]
    return maps + [(f"favor_{kind}", feature_maps.favor_plus(jax.random.key(1), 4, 6, kind=kind)) for kind in FAVOR_KINDS]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("name", "feature_map"), _all_maps(), ids=lambda x: x if isinstance(x, str) else "")
def test_no_nan_in_values_and_gradients(name, feature_map, dtype):
    """Both modes: a forward derivative multiplies zero tangents with every slope, so an infinite one would show."""
    rows = [[size] * 4 for size in (0.0, 100.0, -100.0, 1e4, -1e4)] + [[0.0, 1e4, -100.0, 3.0]]
    x = jnp.asarray(rows, dtype)[:, None, :]
    assert not np.isnan(np.asarray(feature_map(x), np.float32)).any()

    def reverse(x):
        return jax.grad(lambda x: jnp.mean(feature_map(x).astype(jnp.float32)))(x)

    with jax.debug_nans(True):
        assert not np.isnan(np.asarray(jax.jit(reverse)(x), np.float32)).any(), name
        assert not np.isnan(np.asarray(jax.jit(jax.jacfwd(feature_map))(x), np.float32)).any(), name


def test_taylor_kernel():
    with x64():
        x, y = jax.random.normal(jax.random.key(0), (2, 50, 1, 7), jnp.float64) * 2
        s = jnp.sum(x * y, axis=-1) / 7**0.5
        kernel = jnp.sum(feature_maps.taylor(x) * feature_maps.taylor(y), axis=-1)
        np.testing.assert_allclose(kernel, 1 + s + s**2 / 2, rtol=1e-12)
        assert feature_maps.taylor(x).shape[-1] == 1 + 7 + 7 * 8 // 2


@pytest.mark.parametrize("nu", [1, 2, 3])
def test_dpfp(nu):
    x = jax.random.normal(jax.random.key(0), (20, 3, 5))
    features, opposite = feature_maps.dpfp(nu)(x), feature_maps.dpfp(nu)(-x)
    assert features.shape == (20, 3, 2 * 5 * nu)
    assert jnp.all(features >= 0)
    np.testing.assert_array_equal(jnp.sum(features * opposite, axis=-1), 0)
    # Written out from the paper: r = [relu(x), relu(-x)], the product of each entry with the one `shift` before it.
    r = np.concatenate([np.maximum(x, 0), np.maximum(-np.asarray(x), 0)], axis=-1)
    by_hand = [r[..., i] * r[..., (i - shift) % 10] for shift in range(1, nu + 1) for i in range(10)]
    np.testing.assert_allclose(features, np.stack(by_hand, axis=-1), rtol=1e-6)


def test_dpfp_of_one_negative_number():
    np.testing.assert_array_equal(feature_maps.dpfp(1)(jnp.array([[-1.0, 0.0]])), [[0, 0, 0, 0]])
    np.testing.assert_array_equal(feature_maps.dpfp(1)(jnp.array([[-1.0, 2.0]])), [[0, 0, 2, 0]])


def test_signed_features_that_sum_to_zero_are_finite():
    query = jnp.array([1.0, -1.0, 0.0]).reshape(1, 1, 1, 3)
    key = jnp.ones((1, 1, 1, 3))
    attend = lambda q: jnp.sum(jax_linattn.linear_attention(q, key, key, feature_map=feature_maps.identity))
    assert attend(query) == 0
    np.testing.assert_array_equal(jax.grad(attend)(query), 0)


# --- FAVOR+ -----------------------------------------------------------------------------------------------------------

DIM = ROWS = 16
DRAWS = 20_000


@functools.lru_cache
def _kernel_draws(kind: str, orthogonal: bool) -> np.ndarray:
    """φ(q)·φ(k) for many projections; q and k are scaled so that the kernel is exp(q·k)."""
    scale = DIM**0.25
    q, k = _q_and_k()

    @jax.jit
    def estimate(key):
        random_map = feature_maps.favor_plus(key, DIM, ROWS, kind=kind, orthogonal=orthogonal)
        return jnp.sum(random_map(q * scale) * random_map(k * scale))

    return np.asarray(jax.lax.map(estimate, jax.random.split(jax.random.key(3), DRAWS), batch_size=2000), np.float64)


def _q_and_k():
    q, k = np.random.default_rng(5).standard_normal((2, DIM)).astype(np.float32)
    return q / np.linalg.norm(q) / 2, k / np.linalg.norm(k) / 2


@pytest.mark.parametrize("kind", FAVOR_KINDS)
def test_favor_error_is_that_of_lemma_2(kind):
    """Choromanski et al. 2021, Lemma 2, at |q| = |k| = 1/2 and m = d = 16; field case 15: bands, not one lucky seed."""
    q, k = _q_and_k()
    kernel, plus, minus = np.exp(q @ k), np.sum((q + k) ** 2), np.sum((q - k) ** 2)
    positive = np.exp(plus) * kernel**2 * (1 - np.exp(-plus)) / ROWS
    expected = {
        "positive": positive,
        "hyperbolic": (1 - np.exp(-plus)) * positive / 2,
        "trig": np.exp(plus) * kernel**-2 * (1 - np.exp(-minus)) ** 2 / (2 * ROWS),
    }[kind]
    squared = np.square(_kernel_draws(kind, False) - kernel)
    standard_error = squared.std() / DRAWS**0.5
    assert abs(squared.mean() - expected) < 4 * standard_error
    assert standard_error < 0.04 * expected


@pytest.mark.parametrize("kind", FAVOR_KINDS)
@pytest.mark.parametrize("orthogonal", [False, True])
def test_favor_is_unbiased(kind, orthogonal):
    q, k = _q_and_k()
    estimates = _kernel_draws(kind, orthogonal)
    assert abs(estimates.mean() - np.exp(q @ k)) < 3 * estimates.std() / DRAWS**0.5


def test_orthogonal_favor_is_under_its_bound():
    """Theorem 2: MSE <= MSE₊ - 2(m-1)/(m(d+2)) (SM - exp(-(|q|² + |k|²)/2))²."""
    q, k = _q_and_k()
    kernel, plus = np.exp(q @ k), np.sum((q + k) ** 2)
    independent = np.exp(plus) * kernel**2 * (1 - np.exp(-plus)) / ROWS
    gain = 2 * (ROWS - 1) / (ROWS * (DIM + 2)) * (kernel - np.exp(-(q @ q + k @ k) / 2)) ** 2
    squared = np.square(_kernel_draws("positive", True) - kernel)
    assert squared.mean() - 2 * squared.std() / DRAWS**0.5 < independent - gain
    assert squared.mean() < independent


@pytest.mark.parametrize("num_rows", [1, 5, 16, 40])
def test_orthogonal_blocks(num_rows):
    """Field case 16: m below d, equal to it, and no multiple of it; rows of a block orthogonal, marginals N(0, I)."""
    draw = jax.jit(jax.vmap(lambda key: feature_maps.favor_plus(key, DIM, num_rows).projection))
    projections = np.asarray(draw(jax.random.split(jax.random.key(0), 2000)))
    assert projections.shape == (2000, num_rows, DIM)
    for start in range(0, num_rows, DIM):
        block = projections[:100, start : start + DIM]
        products = block @ block.swapaxes(1, 2)
        off_diagonal = products - products * np.eye(block.shape[1])
        assert np.abs(off_diagonal).max() < 1e-4
    # Means, variances and the fourth moment of every coordinate, each within 5 standard errors of those of N(0, 1).
    assert np.abs(projections.mean(0)).max() < 5 / 2000**0.5
    assert np.abs((projections**2).mean(0) - 1).max() < 5 * (2 / 2000) ** 0.5
    assert np.abs((projections**4).mean(0) - 3).max() < 5 * (96 / 2000) ** 0.5


def test_favor_is_a_pytree_of_its_projection():
    random_map = feature_maps.favor_plus(jax.random.key(0), 4, 6)
    (leaf,) = jax.tree.leaves(random_map)
    assert leaf is random_map.projection
    assert leaf.shape == (6, 4)
    x = jnp.ones((1, 3, 2, 4))
    np.testing.assert_array_equal(random_map(x), random_map(x))  # field case 18: drawn once
    again = feature_maps.favor_plus(jax.random.key(1), 4, 6)
    assert not np.array_equal(random_map(x), again(x))


@pytest.mark.parametrize("kind", FAVOR_KINDS)
def test_favor_features_per_row(kind):
    random_map = feature_maps.favor_plus(jax.random.key(0), 4, 6, kind=kind)
    x = jax.random.normal(jax.random.key(1), (3, 2, 4))
    features, log_scale = random_map.query(x)
    assert features.shape == (3, 2, 6 if kind == "positive" else 12)
    np.testing.assert_allclose(features * jnp.exp(log_scale)[..., None], random_map(x), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["positive", "hyperbolic"])
def test_favor_takes_queries_of_any_size(kind):
    """A query far outside float32's exp still averages: over equal keys it gets the mean of the values."""
    random_map = feature_maps.favor_plus(jax.random.key(0), 4, 32, kind=kind)
    query = jnp.array([1e3, -2e3, 3e3, 50.0]).reshape(1, 1, 1, 4) * jnp.ones((1, 6, 1, 1))
    key = jnp.ones((1, 6, 1, 4)) / 2
    value = jnp.arange(12.0).reshape(1, 6, 1, 2)
    output = jax_linattn.linear_attention(query, key, value, feature_map=random_map, is_causal=True)
    np.testing.assert_allclose(output[0, -1, 0], value.mean((0, 1, 2)), rtol=1e-5)


def test_favor_is_strictly_causal():
    """Field case 17: no maximum over keys; one that is 1000 times larger later leaves the past as it was."""
    random_map = feature_maps.favor_plus(jax.random.key(0), 4, 8)
    query, key, value = jax.random.normal(jax.random.key(1), (3, 1, 9, 2, 4))
    attend = lambda key: jax_linattn.linear_attention(query, key, value, feature_map=random_map, is_causal=True)
    np.testing.assert_array_equal(attend(key)[:, :6], attend(key.at[:, 6].mul(1000.0))[:, :6])


def test_favor_reaches_softmax_attention():
    query, key, value = jax.random.normal(jax.random.key(1), (3, 1, 12, 2, 4)) / 2
    random_map = feature_maps.favor_plus(jax.random.key(0), 4, 4096, kind="trig")
    exact = jax.nn.dot_product_attention(query, key, value)
    output = jax_linattn.linear_attention(query, key, value, feature_map=random_map)
    np.testing.assert_allclose(output, exact, atol=0.02)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: feature_maps.get("elu"), "unknown feature map 'elu'.*elu_plus_one"),
        (lambda: feature_maps.dpfp(0), "nu must be a positive whole number, got 0"),
        (lambda: feature_maps.dpfp(1.5), "nu .*got 1.5"),
        (lambda: feature_maps.favor_plus(jax.random.key(0), 0, 4), "dim .*got 0"),
        (lambda: feature_maps.favor_plus(jax.random.key(0), 4, -1), "num_features .*got -1"),
        (lambda: feature_maps.favor_plus(jax.random.key(0), 4, 4, kind="cosine"), "kind .*positive.*got 'cosine'"),
        (lambda: feature_maps.elu_plus_one(jnp.arange(3)), "x must be a floating-point array, got int32"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()

"""With eps=0, values and gradients are those of the exact ratio while the sum of φ(k) is a normal float32.

Field cases 1 (attention over one token returns its value), 6 and 8 (float16), 7 (an absolute eps biases small normalisers),
13 (v = ones gives ones), 20 (signed features that sum to zero), 28 (nothing to see), 43 (Hessians).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ONE_OF_EACH, Form
from harness import attend, normal, x64
from tolerance import assert_close

from jax_linattn import FeatureMap, feature_maps, linear_attention
from jax_linattn.forms.ratio import divide

B, T, H, D, E = 1, 9, 2, 3, 4
BIDIRECTIONAL = [Form("quadratic", None), Form("chunked", 1)]
EVERY_FORM = [*((form, True) for form in ONE_OF_EACH), *((form, False) for form in BIDIRECTIONAL)]
every_form = pytest.mark.parametrize(
    ("form", "is_causal"), EVERY_FORM, ids=lambda x: str(x) if isinstance(x, Form) else ("causal" if x else "both_ways")
)


def _tokens(seed=0, dtype=np.float32):
    return normal(seed, (B, T, H, D), (B, T, H, D), (B, T, H, E), dtype=dtype)


def _scaled(x, power):
    return feature_maps.elu_plus_one(x) * power


@functools.cache
def _values_and_gradients(form, is_causal, eps=0.0):
    """(tokens, a factor on φ(q), one on φ(k)) -> (output, gradients)."""

    @jax.jit
    def function(tokens, query_power, key_power):
        feature_map = FeatureMap(
            query=jax.tree_util.Partial(_scaled, power=query_power), key=jax.tree_util.Partial(_scaled, power=key_power)
        )

        def loss(tokens):
            (output, *_) = attend(form, is_causal, feature_map, {"eps": eps}, tokens, {})
            return jnp.sum(jnp.sin(output)), output

        (_, output), gradients = jax.value_and_grad(loss, has_aux=True)(tokens)
        return output, gradients

    return function


@every_form
def test_a_factor_on_all_features_changes_nothing(form, is_causal):
    """Factors of 2^-60 … 2^60 on φ(k), on φ(q), and on both."""
    function = _values_and_gradients(form, is_causal)
    one = np.float32(1)
    want = function(_tokens(), one, one)
    for exponents in ((-60, 0), (60, 0), (0, -60), (0, 60), (-60, -60), (60, 60), (60, -60)):
        got = function(_tokens(), *(np.float32(2.0**n) for n in exponents))
        np.testing.assert_array_equal(got[0], want[0], err_msg=f"values, {exponents}")
        jax.tree.map(functools.partial(assert_close, gradient=True, what=f"{exponents}"), got[1], want[1])


@every_form
def test_small_features_have_the_oracles_ratio(form, is_causal):
    """Field case 7. Queries and keys all about -40 or -80: φ = exp(x), so a shift of all of them changes nothing."""
    q, k, v = (x.astype(np.float64) for x in _tokens())
    function = _values_and_gradients(form, is_causal)
    one = np.float32(1)
    shifted = [(np.float32(np.round(x * 8) / 8 + shift)) for x, shift in ((q, 0), (k, 0)) for shift in (-40, -80)]
    results = [function([shifted[i], shifted[2 + i], np.float32(v)], one, one) for i in range(2)]
    for got, want in zip(*results, strict=True):
        jax.tree.map(functools.partial(assert_close, gradient=True), got, want)


def test_an_eps_that_biases_and_none():
    """Keys all -20: the values' plain mean; with the seed's eps 1e-6 the formula's [0.09, 0.14]."""
    q, k = jnp.zeros((1, 2, 1, 4)), jnp.full((1, 2, 1, 4), -20.0)
    v = jnp.array([[1.0, 2.0], [3.0, 4.0]])[None, :, None]
    for form in ("quadratic", "chunked"):
        exact = linear_attention(q, k, v, implementation=form)
        np.testing.assert_allclose(exact[0, 0, 0], [2, 3], rtol=1e-6)
        weight = 2 * 4 * np.exp(-20.0)
        biased = linear_attention(q, k, v, eps=1e-6, implementation=form)
        np.testing.assert_allclose(biased[0, 0, 0], np.array([2, 3]) * weight / (weight + 1e-6), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_one_token_returns_its_value(dtype):
    """Field case 1, for keys and queries of any size: 16-bit values exactly, float32 to the rounding of w·v/w."""
    sizes = jnp.array([-80.0, -20.0, -8.0, 0.0, 8.0, 3e4], dtype)[:, None, None, None]
    x = jnp.broadcast_to(sizes, (6, 1, 1, 3))
    v = jnp.asarray(normal(0, (6, 1, 1, 4))[0], dtype)
    ulps = 2 if dtype == "float32" else 0
    for form in ("quadratic", "recurrent", "associative", "chunked"):
        output = linear_attention(x, x, v, is_causal=True, implementation=form)
        assert np.all(np.abs(np.float64(output) / np.float64(v) - 1) <= ulps * 2.0**-23)
    np.testing.assert_allclose(np.float64(linear_attention(x, x, v)), np.float64(v), rtol=ulps * 2.0**-23)


@every_form
def test_values_of_ones_give_ones(form, is_causal):
    """Field case 13: the weights of a row sum to one."""
    q, k, v = (jnp.asarray(x) for x in _tokens())
    output = linear_attention(q, k, jnp.ones_like(v), is_causal=is_causal, **form.options())
    np.testing.assert_allclose(output, 1, rtol=3e-7)


@every_form
def test_a_denominator_of_zero(form, is_causal):
    """relu of negative keys: 0 with zero gradients and no NaN on the way; later keys bring the output back."""
    q, k, v = (jnp.asarray(x) for x in _tokens())
    k = k.at[:, :4].set(-1.0)
    q = q.at[:, -1].set(-1.0)

    def loss(tokens):
        options = {"feature_map": feature_maps.relu, "is_causal": is_causal, **form.options()}
        output = linear_attention(*tokens, **options)
        return jnp.sum(output), output

    with jax.debug_nans(True):
        (_, output), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))([q, k, v])
    empty = np.zeros(T, bool) | (np.arange(T) == T - 1)
    empty |= (np.arange(T) < 4) & is_causal
    assert not np.any(np.asarray(output)[:, empty])
    assert np.any(np.asarray(output)[:, ~empty])
    assert not np.any(np.asarray(gradients[0])[:, empty])
    assert not np.any(np.asarray(gradients[1])[:, :4])


def test_signed_features_that_sum_to_zero():
    """Field case 20: finite, and 0 where the weights cancel."""
    q = jnp.array([1.0, 1.0]).reshape(1, 1, 1, 2)
    k = jnp.array([[1.0, -1.0], [2.0, -2.0]]).reshape(1, 2, 1, 2)
    for form in ("quadratic", "chunked"):
        output, gradient = jax.value_and_grad(
            lambda k, form=form: jnp.sum(linear_attention(q, k, k, feature_map=feature_maps.identity, implementation=form))
        )(k)
        assert output == 0
        assert np.all(np.isfinite(gradient))


def test_the_quotient_has_every_derivative():
    """Its jvp holds to third order, in both modes, and for denominators whose square leaves float32."""
    with x64():
        n, d = jnp.array([[0.3, -1.2]]), jnp.array([[0.7]])
        plain = lambda n, d: jnp.sum(jnp.sin(n / jnp.broadcast_to(d, n.shape)))
        ours = lambda n, d: jnp.sum(jnp.sin(divide(n, d)))
        both = (0, 1)
        derivatives = lambda f: jax.jit(
            lambda *x: (
                jax.grad(f, both)(*x),
                jax.hessian(f, both)(*x),
                jax.jacrev(jax.jacrev(f, both), both)(*x),
                jax.jacfwd(jax.hessian(f, both), both)(*x),
            )
        )
        jax.tree.map(assert_close, derivatives(ours)(n, d), derivatives(plain)(n, d))
    tiny = jnp.float32(2.0**-100)
    gradient = jax.grad(lambda d: divide(jnp.array([3 * tiny]), d[None])[0])(tiny)
    np.testing.assert_allclose(gradient, -3 * 2.0**100, rtol=1e-6)
    zero = jax.hessian(lambda d: jnp.sum(divide(jnp.ones(2), d)))(jnp.zeros(1))
    assert not np.any(zero)


def test_huge_queries():
    """φ(q) of 1e38 a feature: its sums overflow, but the ratio does not need them."""
    q, k, v = (jnp.asarray(x) for x in _tokens())
    for form, is_causal in EVERY_FORM:
        options = {"is_causal": is_causal, **form.options()}
        output = linear_attention(jnp.full_like(q, 1e38), k, v, **options)
        want = linear_attention(jnp.full_like(q, 1.0), k, v, **options)
        assert_close(output, want)

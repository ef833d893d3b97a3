"""Derivatives of first and second order, in both modes, beside finite differences and the oracle.

First derivatives in every argument are beside the oracle's in `test_forms`; here are the orders and modes.
Field cases 12, 35, 36, 43 (nothing blocks jvp and Hessians).
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import ONE_OF_EACH, Case, Form, Shape, draw
from harness import attend, quick_jit, x64
from jax.test_util import check_grads
from tolerance import assert_close, relative_rms

from jax_linattn import feature_maps, init_state, linear_attention_step

pytestmark = pytest.mark.key

BIDIRECTIONAL = [Form("quadratic", None), Form("chunked", 1)]
SMALL = Shape(1, 3, 2, 2, 1, 1, 1, 2)
CLOSE = {"atol": 1e-6, "rtol": 1e-6, "eps": 1e-5}  # of finite differences in float64


def _loss(form, is_causal, rule, problem):
    def loss(arguments):
        results = attend(form, is_causal, feature_maps.elu_plus_one, rule, arguments, {})
        return sum(jnp.sum(jnp.sin(x) * w) for x, w in zip(results, problem.cotangents, strict=True))

    return loss


@pytest.mark.parametrize(
    ("form", "is_causal"),
    [*((form, True) for form in ONE_OF_EACH), (BIDIRECTIONAL[1], False)],
    ids=lambda x: str(x) if isinstance(x, Form) else ("causal" if x else "both_ways"),
)
def test_second_order_in_both_modes(form, is_causal):
    """Finite differences of first and of second derivatives, forward and reverse, in every argument."""
    problem = draw(Case("check_grads", SMALL, is_causal, with_state=is_causal))
    with x64():
        loss = _loss(form, is_causal, {}, problem)
        arguments = [jnp.asarray(x) for x in problem.arguments]
        check_grads(jax.jit(lambda *x: loss(x)), arguments, order=2, modes=("fwd", "rev"), **CLOSE)


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=str)
def test_hessian(form):
    """Every second derivative, beside central differences of the oracle's gradients: they are good to about 1e-9."""
    case = Case("hessian", SMALL, True)
    problem = draw(case)
    sizes = [x.size for x in problem.arguments]
    flat = np.concatenate([x.ravel() for x in problem.arguments])

    def unflatten(x):
        parts = x[: flat.size], *np.cumsum(sizes)[:-1]
        return [part.reshape(y.shape) for part, y in zip(np.split(parts[0], parts[1:]), problem.arguments, strict=True)]

    seen = oracle.visible(SMALL.batch, SMALL.length, SMALL.length, True)

    def oracle_gradient(x):
        def results(q, k, v, kv, key_sum, seen):
            outputs = oracle.attention(q, k, v, kv, key_sum, seen, feature_map=oracle.elu_plus_one)
            return [np.sin(y) for y in outputs]

        return np.concatenate([g.ravel() for g in oracle.gradients(results, unflatten(x), seen, problem.cotangents)])

    step = 1e-5
    want = np.stack(
        [(oracle_gradient(flat + d) - oracle_gradient(flat - d)) / (2 * step) for d in step * np.eye(flat.size)]
    )
    with x64():

        def loss(x):
            starts = [0, *itertools.accumulate(sizes)]
            arguments = [x[a:b].reshape(y.shape) for a, b, y in zip(starts, starts[1:], problem.arguments, strict=False)]
            return _loss(form, True, {}, problem)(arguments)

        got = quick_jit(jax.hessian(loss))(flat)
    assert relative_rms(got, want) < 1e-8
    np.testing.assert_allclose(got, got.T, atol=1e-12)


@pytest.mark.parametrize("normalize", [True, False])
def test_step(normalize):
    """The step by itself: in the state too, and in a scale that is an array."""
    case = Case("check_grads", SMALL, True)
    tokens, (kv, key_sum) = draw(case).arguments[:3], draw(case).arguments[3:]
    with x64():
        state = init_state(*(jnp.asarray(x) for x in tokens[1:]))

        @jax.jit
        def loss(q, k, v, kv, key_sum, scale):
            options = {} if normalize else {"normalize": False, "scale": scale}
            after, output = linear_attention_step(state._replace(kv=kv, key_sum=key_sum), q, k, v, **options)
            return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.cos(after.kv)) + jnp.sum(jnp.cos(after.key_sum))

        arguments = [*(jnp.asarray(x[:, 0]) for x in tokens), jnp.asarray(kv), jnp.asarray(key_sum), jnp.array(0.7)]
        check_grads(loss, arguments, order=2, modes=("fwd", "rev"), **CLOSE)


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=str)
def test_a_scale_has_a_gradient(form):
    """`scale` may be a traced scalar: the output is linear in it."""
    problem = draw(Case("scale", SMALL, True))
    with x64():
        arguments = [jnp.asarray(x) for x in problem.arguments]

        @quick_jit
        def value_and_slope(scale):
            def total(scale):
                results = attend(form, True, feature_maps.elu_plus_one, {"normalize": False, "scale": scale}, arguments, {})
                return jnp.sum(results[0])

            return jax.value_and_grad(total)(scale)

        value, slope = value_and_slope(jnp.array(0.7))
        assert_close(value, 0.7 * slope)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "both_ways"])
def test_a_maps_own_parameters_have_gradients(is_causal):
    """The leaves of a map that is a pytree, equal in all forms."""
    favor = feature_maps.favor_plus(jax.random.key(1), 3, 4)
    problem = draw(Case("map leaves", Shape(1, 7, 5, 2, 1, 1, 3, 2), is_causal, with_state=False))

    def gradient(form):
        def loss(favor):
            output, *_ = attend(form, is_causal, favor, {}, problem.arguments, {})
            return jnp.sum(output * problem.cotangents[0])

        return quick_jit(jax.grad(loss))(favor).projection

    with x64():
        favor = jax.tree.map(lambda x: x.astype(jnp.float64), favor)
        forms = ONE_OF_EACH if is_causal else BIDIRECTIONAL
        want, *others = (gradient(form) for form in forms)
        assert np.all(want != 0)
        for got in others:
            assert_close(got, want, gradient=True)

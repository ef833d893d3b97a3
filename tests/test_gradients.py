"""Derivatives of first and second order, in both modes, beside finite differences and the oracle.

First derivatives in every argument are beside the oracle's in `test_forms`; here are the orders and modes.
Field cases 12, 35, 36, 43 (nothing blocks jvp and Hessians).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import ONE_OF_EACH, Case, Form, Shape, draw
from harness import attend, normal, x64
from jax.test_util import check_grads
from tolerance import assert_close, relative_rms

from jax_linattn import feature_maps, init_state, linear_attention_step

BIDIRECTIONAL = [Form("quadratic", None), Form("chunked", 1)]
SMALL = Shape(1, 3, 2, 2, 1, 1, 1, 2)
CLOSE = {"atol": 1e-6, "rtol": 1e-6, "eps": 1e-5}  # of finite differences in float64


def _loss(form, is_causal, problem):
    def loss(arguments):
        results = attend(form, is_causal, feature_maps.elu_plus_one, {}, arguments, {})
        return sum(jnp.sum(jnp.sin(x) * w) for x, w in zip(results, problem.cotangents, strict=True))

    return loss


def _problem(is_causal):
    return draw(Case("second order", SMALL, is_causal, with_state=is_causal))


def _flat(arrays):
    """All numbers in one vector, and the way back."""
    ends = np.cumsum([x.size for x in arrays])

    def unflatten(x):
        parts = (x[end - like.size : end] for end, like in zip(ends, arrays, strict=True))
        return [part.reshape(like.shape) for part, like in zip(parts, arrays, strict=True)]

    return np.concatenate([x.ravel() for x in arrays]), unflatten


@functools.cache
def _expected_hessian(is_causal):
    """Central differences of the oracle's gradients, good to about 1e-9."""
    problem = _problem(is_causal)
    flat, unflatten = _flat(problem.arguments)
    seen = oracle.visible(SMALL.batch, SMALL.length, SMALL.length if is_causal else SMALL.key_length, is_causal)

    def results(*arguments):
        *arguments, seen = arguments
        sums = arguments[3:] or (None, None)
        outputs = oracle.attention(*arguments[:3], *sums, seen, feature_map=oracle.elu_plus_one)
        return [np.sin(y) for y in outputs[: len(problem.cotangents)]]

    def gradient(x):
        parts = oracle.gradients(results, unflatten(x), seen, problem.cotangents)
        return np.concatenate([part.ravel() for part in parts])

    step = 1e-5
    return np.stack([(gradient(flat + d) - gradient(flat - d)) / (2 * step) for d in step * np.eye(flat.size)])


@pytest.mark.parametrize(
    ("form", "is_causal"),
    [*((form, True) for form in ONE_OF_EACH), *((form, False) for form in BIDIRECTIONAL)],
    ids=lambda x: str(x) if isinstance(x, Form) else ("causal" if x else "both_ways"),
)
def test_second_derivatives_in_every_mode(form, is_causal):
    """The whole Hessian, and along directions forward over forward, reverse over forward, reverse over reverse."""
    problem = _problem(is_causal)
    flat, unflatten = _flat(problem.arguments)
    u, w = normal(4, flat.shape, flat.shape, dtype=np.float64)

    def loss(x):
        return _loss(form, is_causal, problem)(unflatten(x))

    @jax.jit
    def derivatives(x):
        along_u = lambda x: jax.jvp(loss, (x,), (u,))[1]
        return (
            jax.hessian(loss)(x),
            jax.jvp(along_u, (x,), (w,))[1],
            jax.grad(along_u)(x),
            jax.grad(lambda x: jnp.vdot(jax.grad(loss)(x), u))(x),
        )

    with x64():
        hessian, forward, reverse_over_forward, reverse = derivatives(flat)
    want = _expected_hessian(is_causal)
    for got, expected in ((hessian, want), (forward, u @ want @ w), (reverse_over_forward, want @ u), (reverse, want @ u)):
        assert relative_rms(got, expected) < 1e-8


def test_check_grads():
    """The usual check, in the default form: first and second order, forward and reverse, every argument."""
    problem = _problem(is_causal=True)
    with x64():
        loss = _loss(Form("chunked", 2), True, problem)
        arguments = [jnp.asarray(x) for x in problem.arguments]
        check_grads(jax.jit(lambda *x: loss(x)), arguments, order=2, modes=("fwd", "rev"), **CLOSE)


def test_step():
    """The step by itself: in the state too, and in a scale that is an array."""
    tokens, (kv, key_sum) = _problem(True).arguments[:3], _problem(True).arguments[3:]
    with x64():
        state = init_state(*(jnp.asarray(x) for x in tokens[1:]))

        @jax.jit
        def loss(q, k, v, kv, key_sum, scale):
            state_in = state._replace(kv=kv, key_sum=key_sum)
            after, output = linear_attention_step(state_in, q, k, v)
            _, scaled = linear_attention_step(state_in, q, k, v, normalize=False, scale=scale)
            return sum(jnp.sum(jnp.sin(x)) for x in (output, scaled, after.kv, after.key_sum))

        arguments = [*(jnp.asarray(x[:, 0]) for x in tokens), jnp.asarray(kv), jnp.asarray(key_sum), jnp.array(0.7)]
        check_grads(loss, arguments, order=2, modes=("fwd", "rev"), **CLOSE)


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=str)
def test_a_scale_has_a_gradient(form):
    """`scale` may be a traced scalar: the output is linear in it."""
    problem = draw(Case("scale", SMALL, True))
    with x64():
        arguments = [jnp.asarray(x) for x in problem.arguments]

        @jax.jit
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

        return jax.jit(jax.grad(loss))(favor).projection

    with x64():
        favor = jax.tree.map(lambda x: x.astype(jnp.float64), favor)
        forms = ONE_OF_EACH if is_causal else BIDIRECTIONAL
        want, *others = (gradient(form) for form in forms)
        assert np.all(want != 0)
        for got in others:
            assert_close(got, want, gradient=True)

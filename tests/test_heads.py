"""Query, key and value heads of all numbers that divide, grouped in order, and never copied.

Field cases 48 (grouped queries; G = 1 and G = H), 50 (one head).
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case, Form, Shape, draw, expected
from harness import attend, normal, results_and_gradients, x64
from tolerance import assert_close
from tracing import largest_array

from jax_linattn import (
    attention_weights,
    causal_linear_attention,
    feature_maps,
    init_state,
    linear_attention,
    linear_attention_step,
)

B, T, S, D, E = 2, 7, 5, 3, 4
EVERY = list(itertools.product((1, 2, 4), repeat=3))
# H, K, V: grouped queries, more values, fewer queries, and the combinations where no two of the three divide.
SOME = [(6, 2, 2), (2, 2, 6), (3, 2, 6), (2, 3, 6), (2, 6, 3), (1, 6, 6), (12, 2, 6), (12, 6, 2), (4, 1, 4)]
CHUNKED = Form("chunked", 3)


def _case(heads, is_causal=True) -> Case:
    return Case(f"heads {heads}", Shape(B, T, S, *heads, D, E), is_causal, hides=("mask",), with_state=is_causal)


def _check_values(heads, form):
    case = _case(heads)
    problem = draw(case)
    with x64():
        results = jax.jit(functools.partial(attend, form, True, feature_maps.elu_plus_one, {}))(
            problem.arguments, problem.hiding
        )
    for got, want in zip(results, expected(case)[0], strict=True):
        assert_close(got, want, what=f"heads {heads}")


def _check_gradients_too(heads, form, is_causal=True):
    case = _case(heads, is_causal)
    with x64():
        results, gradients = results_and_gradients(case, form)
    for got, want in zip((*results, *gradients), itertools.chain(*expected(case)), strict=True):
        assert_close(got, want, what=f"heads {heads}")


@pytest.mark.parametrize("heads", EVERY, ids=str)
def test_every_combination(heads):
    _check_values(heads, CHUNKED)


@pytest.mark.parametrize("form", [Form("recurrent", 4), Form("associative", 3)], ids=str)
@pytest.mark.parametrize("heads", SOME, ids=str)
def test_other_forms(heads, form):
    _check_values(heads, form)


@pytest.mark.parametrize("heads", SOME, ids=str)
def test_gradients(heads):
    _check_gradients_too(heads, CHUNKED)


@pytest.mark.parametrize("form", [Form("quadratic", None), Form("chunked", 1)], ids=str)
@pytest.mark.parametrize("heads", [(6, 2, 2), (2, 3, 6), (2, 6, 3)], ids=str)
def test_bidirectional(heads, form):
    _check_gradients_too(heads, form, is_causal=False)


@pytest.mark.parametrize("heads", SOME, ids=str)
def test_step_and_init_state(heads):
    case = Case(f"heads {heads}", Shape(B, T, S, *heads, D, E), True, with_state=False)
    with x64():
        tokens = [jnp.asarray(x) for x in draw(case).arguments]
        state = init_state(*tokens[1:])
        outputs = []
        for t in range(2):
            state, output = linear_attention_step(state, *(x[:, t] for x in tokens))
            outputs.append(output)
        want_state, want = jax.jit(lambda *x: causal_linear_attention(*x, implementation="quadratic"))(
            *(x[:, :2] for x in tokens)
        )
    assert_close(np.stack(outputs, axis=1), want)
    jax.tree.map(assert_close, state, want_state)


def test_weights_have_the_larger_number_of_heads():
    q, k = normal(0, (1, T, 2, D), (1, S, 6, D))
    assert attention_weights(jnp.asarray(q), jnp.asarray(k)).shape == (1, 6, T, S)
    q, k = normal(0, (1, T, 6, D), (1, S, 2, D))
    weights = attention_weights(jnp.asarray(q), jnp.asarray(k))
    phi_q, phi_k = oracle.elu_plus_one(q[0, :, 3]), oracle.elu_plus_one(k[0, :, 1])
    want = phi_q @ phi_k.T
    np.testing.assert_allclose(weights[0, 3], want / want.sum(axis=-1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("form", [CHUNKED, Form("associative", 3), Form("quadratic", None)], ids=str)
def test_more_values_copy_neither_query_nor_key(form):
    """No array of the computation is as large as queries or keys copied to the value heads, nor the weights so copied."""
    length, dim, value_heads = 33, 48, 8

    def function(q, k, v):
        return causal_linear_attention(q, k, v, **form.options())

    shapes = [(1, length, 1, dim), (1, length, 1, dim), (1, length, value_heads, 2)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    sums = (-(-length // 3) + 2) * value_heads * dim * 2 if form.chunk_size else 0
    assert largest_array(function, *arrays) < max(length * value_heads * dim, sums + 1)
    weights = largest_array(lambda *x: linear_attention(*x, implementation="quadratic"), *arrays)
    assert weights < length * length * value_heads


@pytest.mark.parametrize("form", [CHUNKED, Form("associative", 3)], ids=str)
def test_grouped_queries_share_one_state(form):
    """The sums of keys and values are formed once a key head, not once a query head."""
    query_heads, dim = 8, 32

    def function(q, k, v):
        return causal_linear_attention(q, k, v, **form.options())

    arrays = [jax.ShapeDtypeStruct((1, 6, heads, dim), jnp.float32) for heads in (query_heads, 1, 1)]
    assert largest_array(function, *arrays) < query_heads * dim * dim

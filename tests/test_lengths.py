"""Every length works, and padding to a chunk leaves no trace.

Field cases 24, 32 (length 0; T > 65,536), 35 (tails), 37 (chunk sizes that are not powers of two), 50.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import IN_BLOCKS, ONE_OF_EACH, Case, Form, Shape, expected
from harness import normal, results_and_gradients, state_of, x64
from tolerance import assert_close

from jax_linattn import attention_weights, causal_linear_attention, linear_attention, linear_attention_step

C = 4
H, D, E = 2, 3, 5


def _check(shape: Shape, form: Form, is_causal: bool = True):
    """Values, gradients and, when causal, the state before and after, beside the oracle's."""
    case = Case(f"lengths {shape}", shape, is_causal, with_state=is_causal)
    with x64():
        results, gradients = results_and_gradients(case, form)
    want_results, want_gradients = expected(case)
    for got, want in zip(results, want_results, strict=True):
        assert_close(got, want)
    for got, want in zip(gradients, want_gradients, strict=True):
        # Of one key the weight is 1 whatever it is: the gradients of q and k are 0 but for rounding.
        assert_close(got, want, gradient=True, floor=1e-3)


@pytest.mark.parametrize("length", [1, C - 1, C, C + 1, 2 * C + 1, 37])
@pytest.mark.parametrize("form", ["recurrent", "associative", "chunked"])
def test_around_a_chunk(form, length):
    """With an initial state. 37 chunks of one token make many blocks."""
    _check(Shape(1, length, length, H, H, H, D, E), Form(form, 1 if length == 37 else C))


@pytest.mark.parametrize(
    "form",
    [
        *(Form(form, size) for form in ("associative", "chunked") for size in (1, 3, 50, 64, 67, 67 + 7)),
        *(Form("recurrent", size) for size in (1, 50, 67 + 7)),
    ],
    ids=str,
)
def test_chunk_sizes(form):
    """Field case 37: T = 67, a prime."""
    _check(Shape(1, 67, 67, 1, 1, 1, 2, 1), form)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 7), (7, 1), (8, 8), (9, 17), (31, 29)], ids=str)
def test_bidirectional(sizes):
    """T and S of 1, and around a block of 8 chunks."""
    _check(Shape(1, *sizes, H, H, H, D, E), Form("chunked", 1), is_causal=False)


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=str)
def test_length_0(form):
    """The state comes back, and its gradient with it."""
    kv, key_sum = (jnp.asarray(x) for x in normal(0, (2, H, D, E), (2, H, D)))
    tokens = [jnp.zeros((2, 0, H, D)), jnp.zeros((2, 0, H, D)), jnp.zeros((2, 0, H, E))]
    ids, mask = jnp.zeros((2, 0), jnp.int32), jnp.ones((2, 0), bool)
    hiding = {"segment_ids": ids, "state_segment_ids": jnp.zeros(2, jnp.int32), "mask": mask}

    def loss(kv, tokens):
        state, output = causal_linear_attention(*tokens, state=state_of(kv, key_sum), **hiding, **form.options())
        return jnp.sum(state.kv * kv) + jnp.sum(output), (state, output)

    (_, (state, output)), (kv_gradient, gradients) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(kv, tokens)
    np.testing.assert_array_equal(state.kv, kv)
    np.testing.assert_array_equal(state.key_sum, key_sum)
    assert output.shape == (2, 0, H, E)
    np.testing.assert_array_equal(kv_gradient, 2 * kv)
    assert [x.shape for x in gradients] == [x.shape for x in tokens]


@pytest.mark.parametrize("implementation", [None, "quadratic", "chunked"])
@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_bidirectional_length_0(sizes, implementation):
    """Without queries there is no output; queries without keys get 0."""
    (queries, keys), dtype = sizes, jnp.float32
    tokens = [jnp.ones((2, queries, H, D), dtype), jnp.ones((2, keys, H, D), dtype), jnp.ones((2, keys, H, E), dtype)]
    mask = jnp.ones((2, keys), bool)

    def loss(tokens):
        output = linear_attention(*tokens, mask=mask, implementation=implementation)
        return jnp.sum(output), output

    (_, output), gradients = jax.value_and_grad(loss, has_aux=True)(tokens)
    assert output.shape == (2, queries, H, E)
    assert not any(np.any(x) for x in (output, *gradients))
    assert attention_weights(*tokens[:2]).shape == (2, H, queries, keys)


def test_no_batch():
    tokens = [jnp.ones((0, 5, H, D)), jnp.ones((0, 5, H, D)), jnp.ones((0, 5, H, E))]
    assert linear_attention(*tokens).shape == (0, 5, H, E)
    state, output = causal_linear_attention(*tokens)
    assert output.shape == (0, 5, H, E)
    assert state.kv.shape == (0, H, D, E)
    state, output = linear_attention_step(state, *(x[:, 0] for x in tokens))
    assert output.shape == (0, H, E)
    assert state.kv.shape == (0, H, D, E)
    _, output = causal_linear_attention(*tokens, implementation="recurrent", chunk_size=2)
    assert output.shape == (0, 5, H, E)


@pytest.mark.parametrize("form", [Form("recurrent", None), Form("associative", 1024), Form("chunked", None)], ids=str)
def test_more_than_65536_tokens(form):
    """Field case 32, beside cumulative sums in float64."""
    length, dim = 65537, 4
    q, k, v = normal(0, (1, length, 1, dim), (1, length, 1, dim), (1, length, 1, 2))
    attend = jax.jit(lambda q, k, v: causal_linear_attention(q, k, v, **form.options()))
    state, output = attend(q, k, v)
    want, kv, sums = oracle.one_head(*(x[0, :, 0].astype(np.float64) for x in (q, k, v)))
    assert_close(output[0, :, 0], want, length=length)
    assert_close(state.kv[0, 0], kv, length=length)
    assert_close(state.key_sum[0, 0], sums, length=length)


@pytest.mark.parametrize("form", IN_BLOCKS, ids=str)
def test_all_ones(form):
    """Field case 50: B = T = H = D = E = 1."""
    with x64():
        one = jnp.ones((1, 1, 1, 1))
        state, output = jax.jit(lambda x: causal_linear_attention(x, x, x, **form.options()))(one)
    assert float(output.item()) == 1
    assert [float(x.item()) for x in state] == [2, 2, 0]

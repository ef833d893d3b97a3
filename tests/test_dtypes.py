"""Sums, the state and the division are float32, or float64 for float64; every dtype keeps its accuracy.

Field cases 6 (float16 sums overflow), 8 (dtype changes meaning), 41 (a 16-bit state drifts), 42 (mixed dtypes).
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import BIDIRECTIONAL_CASES, CAUSAL_CASES, ONE_OF_EACH, Case, Form, Shape, expected
from harness import normal, results_and_gradients, x64
from tolerance import assert_close
from tracing import equations

from jax_linattn import (
    LinearAttentionState,
    attention_weights,
    causal_linear_attention,
    init_state,
    linear_attention,
    linear_attention_step,
)

pytestmark = pytest.mark.key

LONGER = Shape(1, 67, 61, 2, 1, 2, 3, 2)
SHORT = [("float16", "masked"), ("bfloat16", "plain"), ("bfloat16", "segments_unnormalized")]


def _check(case: Case, form: Form, dtype: str):
    """Beside the float64 result of the rounded inputs."""
    results, gradients = results_and_gradients(case, form, dtype)
    want_results, want_gradients = expected(case, dtype)
    assert str(results[0].dtype) == dtype
    assert {str(x.dtype) for x in results[1:]} <= {"float32"}
    for got, want in zip(results, want_results, strict=True):
        assert_close(got, want)
    for got, want in zip(gradients, want_gradients, strict=True):
        assert_close(got, want, gradient=True)


@pytest.mark.parametrize(
    ("form", "is_causal"),
    [
        *((form, True) for form in (*ONE_OF_EACH, Form("chunked", 64))),
        (Form("quadratic", None), False),
        (Form("chunked", 2), False),
    ],
    ids=lambda x: str(x) if isinstance(x, Form) else ("causal" if x else "both_ways"),
)
def test_float32(form, is_causal):
    hides = ("mask", "segment_ids")
    _check(Case("float32", LONGER, is_causal, hides=hides, with_state=is_causal), form, "float32")


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=str)
@pytest.mark.parametrize(("dtype", "name"), SHORT)
def test_16_bits(dtype, name, form):
    (case,) = (case for case in CAUSAL_CASES if case.name == f"causal_{name}")
    _check(case, form, dtype)


@pytest.mark.parametrize("form", [Form("quadratic", None), Form("chunked", 1)], ids=str)
@pytest.mark.parametrize(("dtype", "name"), [("float16", "lengths"), ("bfloat16", "plain")])
def test_16_bits_both_ways(dtype, name, form):
    (case,) = (case for case in BIDIRECTIONAL_CASES if case.name == f"bidirectional_{name}")
    _check(case, form, dtype)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        (Form("recurrent", None), "float16"),
        (Form("associative", 64), "bfloat16"),
        (Form("chunked", None), "float16"),
        (Form("chunked", None), "bfloat16"),
    ],
    ids=str,
)
def test_4096_tokens(form, dtype):
    """Field case 6: Σφ(k) passes every 16-bit limit. Beside cumulative sums in float64."""
    tokens = [jnp.asarray(x, dtype) for x in normal(0, (1, 4096, 1, 3), (1, 4096, 1, 3), (1, 4096, 1, 4))]
    state, output = jax.jit(lambda *x: causal_linear_attention(*x, **form.options()))(*tokens)
    want, kv, key_sum = oracle.one_head(*(np.asarray(x[0, :, 0]).astype(np.float64) for x in tokens))
    assert_close(output[0, :, 0], want, length=4096)
    assert state.kv.dtype == state.key_sum.dtype == jnp.float32
    assert_close(state.kv[0, 0], kv, length=4096)
    assert_close(state.key_sum[0, 0], key_sum, length=4096)


def test_decoding_in_bfloat16_does_not_drift():
    """Field case 41: over 4,096 steps the error of the last outputs is that of the first, and of a rounded output."""
    tokens = [jnp.asarray(x, jnp.bfloat16) for x in normal(1, *[(4096, 2, 1, 4)] * 3)]

    @jax.jit
    def decode(tokens):
        start = init_state(tokens[1][0], tokens[2][0])
        return jax.lax.scan(lambda state, token: linear_attention_step(state, *token), start, tokens)

    _, outputs = decode(tokens)
    assert outputs.dtype == jnp.bfloat16
    for row in range(2):
        want, _, _ = oracle.one_head(*(np.asarray(x[:, row, 0]).astype(np.float64) for x in tokens))
        for part in (slice(0, 256), slice(-256, None)):
            assert_close(outputs[part, row, 0], want[part])


def test_float16_means_what_float32_means():
    """Field cases 6 and 8: keys whose features add up to more than 65,504."""
    tokens = [jnp.asarray(x, jnp.float16) for x in normal(2, *[(1, 300, 1, 4)] * 3)]
    tokens[1] = tokens[1] + jnp.float16(1000)
    half, single = (
        linear_attention(*(x.astype(dtype) for x in tokens), is_causal=True, implementation="chunked")
        for dtype in (jnp.float16, jnp.float32)
    )
    assert half.dtype == jnp.float16
    assert_close(half, single)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_16_bit_state_is_refused(dtype):
    tokens = [jnp.ones((1, 2, 1, 3), dtype)] * 3
    state = jax.tree.map(lambda x: x.astype(dtype), init_state(*tokens[1:]))
    with pytest.raises(ValueError, match=rf"state.kv must be float32 .* got {dtype}"):
        causal_linear_attention(*tokens, state=state)
    with pytest.raises(ValueError, match=r"state.kv must be float32"):
        linear_attention_step(state, *(x[:, 0] for x in tokens))


def test_a_float32_state_for_float64_tokens_is_refused():
    with x64():
        tokens = [jnp.ones((1, 2, 1, 3), jnp.float64)] * 3
        state = jax.tree.map(lambda x: x.astype(jnp.float32), init_state(*tokens[1:]))
        with pytest.raises(ValueError, match=r"state.kv must be float64 .* got float32"):
            causal_linear_attention(*tokens, state=state)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_output_dtypes(dtype):
    with x64(dtype == "float64"):
        tokens = [jnp.ones((1, 5, 2, 3), dtype)] * 3
        state, output = jax.eval_shape(causal_linear_attention, *tokens)
        assert isinstance(state, LinearAttentionState)
        outputs = [output, jax.eval_shape(linear_attention, *tokens), jax.eval_shape(attention_weights, *tokens[:2])]
        assert {str(x.dtype) for x in outputs} == {dtype}
        assert {str(x.dtype) for x in state} == {"float64" if dtype == "float64" else "float32"}


def test_precision_reaches_every_product():
    """`precision` is handed to each product of the program, in every form."""
    tokens = [jax.ShapeDtypeStruct((1, 9, 2, 3), jnp.float32)] * 3
    calls = [
        lambda *x, form=form: causal_linear_attention(*x, precision="highest", **form.options()) for form in ONE_OF_EACH
    ] + [
        lambda *x, name=name: linear_attention(*x, precision="highest", implementation=name)
        for name in ("quadratic", "chunked")
    ]
    highest = (jax.lax.Precision.HIGHEST,) * 2
    for call in calls:
        products = [e for e in equations(jax.make_jaxpr(call)(*tokens).jaxpr) if e.primitive.name == "dot_general"]
        assert products
        assert {e.params["precision"] for e in products} == {highest}

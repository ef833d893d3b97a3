"""What a gradient holds, and how large the program is, against the length. Nothing here is run.

Field cases 44 (a state a token), 45 (compile time of the associative form), 53 (loops unrolled over time).
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from cases import Form
from tracing import largest_array, program_size

from jax_linattn import causal_linear_attention, feature_maps, init_state, linear_attention, linear_attention_step

D, E = 32, 32
every_form = pytest.mark.parametrize(
    ("form", "is_causal"),
    [(Form("recurrent", None), True), (Form("chunked", None), True), (Form("chunked", None), False)],
    ids=["recurrent", "chunked", "both_ways"],
)


def _tokens(length, dim=D, value_dim=E):
    return [jax.ShapeDtypeStruct((1, length, 1, size), jnp.float32) for size in (dim, dim, value_dim)]


def _gradient(form: Form, is_causal=True, feature_map=feature_maps.elu_plus_one, **options):
    def loss(q, k, v):
        call = functools.partial(linear_attention, is_causal=is_causal, feature_map=feature_map, **form.options())
        return jnp.sum(call(q, k, v, **options))

    return jax.grad(loss, argnums=(0, 1, 2))


def _temporaries(function, *args) -> int:
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes


@every_form
def test_temporaries_of_a_gradient_are_linear(form, is_causal):
    """Linear in T with a small constant: a state a token would be 32 times what the tokens take, weights more."""
    gradient = _gradient(form, is_causal)
    bytes_at = {length: _temporaries(gradient, *_tokens(length)) for length in (2048, 8192)}
    assert bytes_at[8192] <= 4.2 * bytes_at[2048]
    of_tokens = 8192 * (2 * D + E) * 4
    assert bytes_at[8192] <= 8 * of_tokens
    assert bytes_at[8192] < 8192 * D * E * 4 / 2


@every_form
def test_a_batch_is_not_copied(form, is_causal):
    """Nothing is brought into another order, nor padded, as a whole: q, k and v of two sequences are read where they lie,
    and so are their gradients written."""
    length = 8191
    tokens = [jax.ShapeDtypeStruct((2, length, 2, size), jnp.float32) for size in (D, D, E)]
    of_tokens = 2 * length * 2 * (2 * D + E) * 4
    forward = functools.partial(linear_attention, is_causal=is_causal, **form.options())
    assert _temporaries(forward, *tokens) <= 0.3 * of_tokens
    assert _temporaries(_gradient(form, is_causal), *tokens) <= of_tokens


@every_form
@pytest.mark.parametrize(("dtype", "length"), [("float32", 4095), ("bfloat16", 4096)])
def test_no_block_touches_the_whole_sequence(form, is_causal, dtype, length):
    """Were a block's gradient, or its tangent, added to all of the sequence, the cost would be quadratic. (16-bit tokens
    are stacked in blocks; where those overlap there is one such sum.)"""
    tokens = [jax.ShapeDtypeStruct((2, length, 2, size), dtype) for size in (D, D, E)]
    attend = functools.partial(linear_attention, is_causal=is_causal, **form.options())
    for function in (_gradient(form, is_causal), lambda *x: jax.jvp(attend, x, x)):
        program = jax.jit(function).lower(*tokens).compile().as_text()
        added = re.findall(r"= \w+\[([\d,]+)\]\S* add\(", program)
        sizes = [math.prod(map(int, shape.split(","))) for shape in added]
        assert sizes
        assert max(sizes) < 2 * length * 2 * D


@every_form
def test_a_large_feature_map_is_never_held_over_time(form, is_causal):
    """F ≫ D: no T·F numbers."""
    length, dim = 16384, 16
    features = 1 + dim + dim * (dim + 1) // 2
    gradient = _gradient(form, is_causal, feature_maps.taylor)
    assert _temporaries(gradient, *_tokens(length, dim, 4)) < length * features * 4


@pytest.mark.parametrize("form", [Form("recurrent", None), Form("chunked", 64), Form("associative", 64)], ids=str)
def test_no_weights_of_all_pairs(form):
    """No array of T·S numbers, and of T·F·E none either; the associative form holds T/C·F·E, and T·C."""
    length = 4096
    largest = largest_array(_gradient(form), *_tokens(length))
    in_parallel = max(2 * length // 64 * D * E, length * 64)
    assert largest <= (in_parallel if form.implementation == "associative" else 4 * length * D)


@pytest.mark.parametrize(
    ("form", "is_causal"),
    [(Form("recurrent", 4), True), (Form("chunked", 4), True), (Form("chunked", 4), False)],
    ids=["recurrent", "chunked", "both_ways"],
)
def test_the_program_does_not_grow(form, is_causal):
    """Field case 53, with the gradient."""
    sizes = {program_size(_gradient(form, is_causal), *_tokens(length)) for length in (64, 4096)}
    assert len(sizes) == 1


def test_the_associative_program_grows_with_the_logarithm():
    sizes = [program_size(_gradient(Form("associative", 4)), *_tokens(length)) for length in (64, 512, 4096)]
    assert sizes[2] - sizes[1] <= 1.5 * (sizes[1] - sizes[0])


@pytest.mark.parametrize("form", [Form("recurrent", None), Form("chunked", None), Form("associative", None)], ids=str)
def test_default_chunks_do_not_grow_the_program(form):
    sizes = [program_size(_gradient(form), *_tokens(length)) for length in (1024, 65536)]
    assert sizes[1] <= sizes[0] * (2.5 if form.implementation == "associative" else 1)


def test_a_step_holds_a_state_and_no_more():
    """Decoding costs the same at every time: nothing in the program knows how many tokens came before."""
    tokens = _tokens(5)
    state = jax.eval_shape(init_state, *tokens[1:])
    token = [jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:]), x.dtype) for x in tokens]
    assert largest_array(linear_attention_step, state, *token) <= D * E
    after, _ = jax.eval_shape(linear_attention_step, state, *token)
    assert jax.tree.map(lambda x: x.shape, after) == jax.tree.map(lambda x: x.shape, state)


def test_the_default_for_long_sequences_is_linear():
    """Nobody gets T·S unasked: implementation=None at T = 4096, causal and not, with segments and without."""
    tokens = _tokens(4096)
    ids = jax.ShapeDtypeStruct((1, 4096), jnp.int32)
    functions = {
        "linear_attention": lambda q, k, v, ids: linear_attention(q, k, v),
        "linear_attention, segments": lambda q, k, v, ids: linear_attention(q, k, v, segment_ids=ids),
        "linear_attention, causal": lambda q, k, v, ids: linear_attention(q, k, v, is_causal=True, segment_ids=ids),
        "causal_linear_attention": lambda q, k, v, ids: causal_linear_attention(q, k, v),
    }
    for name, function in functions.items():
        assert largest_array(function, *tokens, ids) <= 4 * 4096 * D, name

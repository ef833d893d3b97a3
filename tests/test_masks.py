"""A masked token is no token, wherever it stands and whatever it holds.

Field cases 5 and 23 (left pads), 21 (B = 1), 22 (a masked token in the middle), 28 (all masked), 29 (right pads), 30 (mask
and segments both hold; also in `test_segments`). What masks do to values, state and gradients is in `test_forms` as well.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BIDIRECTIONAL_FORMS, CAUSAL_FORMS, ONE_OF_EACH, Form
from harness import attend, normal, x64
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_close

from jax_linattn import causal_linear_attention, feature_maps, linear_attention, linear_attention_step

B, T, H, D, E = 2, 11, 2, 3, 4
ELU = feature_maps.elu_plus_one
MASKS = {
    "left": np.arange(T) >= 4,
    "right": np.arange(T) < 7,
    "middle": ~np.isin(np.arange(T), (3, 4, 8)),
    "first_and_last": ~np.isin(np.arange(T), (0, T - 1)),
    "all_but_one": np.arange(T) == 5,
}


def _tokens(batch=B, length=T, dtype=np.float64):
    return normal(0, (batch, length, H, D), (batch, length, H, D), (batch, length, H, E), dtype=dtype)


@functools.cache
def _values_and_gradients(form: Form, is_causal: bool):
    """A compiled function of (tokens, mask, cotangent): (results, gradients)."""

    @jax.jit
    def function(tokens, hiding, cotangent):
        def loss(tokens):
            results = attend(form, is_causal, ELU, {}, tokens, hiding)
            return jnp.sum(results[0] * cotangent) + sum(jnp.sum(x) for x in results[1:]), results

        (_, results), gradients = jax.value_and_grad(loss, has_aux=True)(tokens)
        return results, gradients

    return function


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=str)
def test_equals_the_sequence_without_the_masked_tokens(form):
    """Two rows with masks of their own equal each row alone without its pads: outputs, state and gradients."""
    in_rows, alone = _values_and_gradients(form, True), _values_and_gradients(Form("quadratic", None), True)
    (cotangent,) = normal(1, (B, T, H, E), dtype=np.float64)
    names = list(MASKS)
    with x64():
        for one, other in zip(names, names[1:] + names[:1], strict=True):
            mask = np.stack([MASKS[one], MASKS[other]])
            results, gradients = in_rows(_tokens(), {"mask": mask}, cotangent)
            for b in range(B):
                kept = [x[b : b + 1, mask[b]] for x in (*_tokens(), cotangent)]
                want_results, want_gradients = alone(kept[:3], {}, kept[3])
                output, *sums = [np.asarray(x)[b] for x in results]
                assert not np.any(output[~mask[b]])
                assert_close(output[mask[b]], want_results[0][0], what=f"output, {one}")
                for got, want in zip(sums, want_results[1:], strict=True):
                    assert_close(got, want[0], what=f"state, {one}")
                for got, want in zip(gradients, want_gradients, strict=True):
                    assert not np.any(np.asarray(got)[b, ~mask[b]])
                    assert_close(np.asarray(got)[b, mask[b]], want[0], gradient=True, floor=1e-3, what=one)


@pytest.mark.parametrize("content", [np.nan, np.inf, -np.inf, 1e308])
@pytest.mark.parametrize("form", CAUSAL_FORMS, ids=str)
def test_what_a_masked_token_holds_changes_no_bit(form, content):
    function = _values_and_gradients(form, True)
    mask = np.stack([MASKS["middle"], MASKS["left"]])
    (cotangent,) = normal(1, (B, T, H, E), dtype=np.float64)
    with x64():
        clean = function(_tokens(), {"mask": mask}, cotangent)
        dirty = function([np.where(mask[..., None, None], x, content) for x in _tokens()], {"mask": mask}, cotangent)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


@pytest.mark.parametrize("form", BIDIRECTIONAL_FORMS, ids=str)
def test_what_a_hidden_key_or_query_holds_changes_no_bit(form):
    """Not causal: NaN in masked keys, and in queries and keys past their lengths."""
    function = _values_and_gradients(form, False)
    query_lengths, key_lengths = np.array([5, T]), np.array([T, 6])
    mask = np.stack([MASKS["middle"], MASKS["left"]])
    hiding = {"mask": mask, "query_seq_lengths": query_lengths, "key_value_seq_lengths": key_lengths}
    (cotangent,) = normal(1, (B, T, H, E))
    clean = _tokens(dtype=np.float32)
    query_seen = np.arange(T) < query_lengths[:, None]
    key_seen = mask & (np.arange(T) < key_lengths[:, None])
    seen = [query_seen, key_seen, key_seen]
    dirty = [np.where(m[..., None, None], x, np.nan).astype(np.float32) for x, m in zip(clean, seen, strict=True)]
    results, gradients = function(dirty, hiding, cotangent)
    jax.tree.map(np.testing.assert_array_equal, (results, gradients), function(clean, hiding, cotangent))
    assert not np.any(np.asarray(results[0])[~query_seen])
    for gradient, m in zip(gradients, seen, strict=True):
        assert not np.any(np.asarray(gradient)[~m])
        assert np.all(np.any(np.asarray(gradient)[m], axis=-1))


@pytest.mark.parametrize(
    ("form", "is_causal"),
    [*((form, True) for form in ONE_OF_EACH), *((form, False) for form in BIDIRECTIONAL_FORMS[:2])],
    ids=lambda x: str(x) if isinstance(x, Form) else ("causal" if x else "bidirectional"),
)
def test_no_real_token_gives_zeros(form, is_causal):
    """Field case 28: no NaN, not even on the way, forward or backward."""
    mask = np.stack([np.zeros(T, bool), MASKS["middle"]])
    with jax.debug_nans(True):
        results, gradients = _values_and_gradients(form, is_causal)(
            _tokens(dtype=np.float32), {"mask": mask}, np.ones((B, T, H, E), np.float32)
        )
    for x in (*results, *gradients):
        assert not np.any(x[0])
        assert np.any(x[1])


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "bidirectional"])
def test_batch_of_one(is_causal):
    """Field case 21: B = 1 is no special case."""
    form = Form("chunked", 2)
    mask = np.stack([MASKS["left"], MASKS["right"]])
    (cotangent,) = normal(1, (B, T, H, E), dtype=np.float64)
    function = _values_and_gradients(form, is_causal)
    with x64():
        both = function(_tokens(), {"mask": mask}, cotangent)
        one = function([x[:1] for x in _tokens()], {"mask": mask[:1]}, cotangent[:1])
    jax.tree.map(lambda a, b: assert_close(a[:1], b), both, one)


def test_mask_shapes_mean_the_same():
    tokens = [jnp.asarray(x) for x in _tokens(dtype=np.float32)]
    row = jnp.asarray(MASKS["middle"])
    masks = [jnp.stack([row, row]), jnp.stack([row, row])[:, None, None], row[None, None, None]]
    for is_causal in (False, True):
        outputs = [linear_attention(*tokens, mask=mask, is_causal=is_causal) for mask in masks]
        unbatched = linear_attention(*(x[0] for x in tokens), mask=row, is_causal=is_causal)
        for output in outputs[1:]:
            np.testing.assert_array_equal(output, outputs[0])
        np.testing.assert_allclose(unbatched, outputs[0][0], rtol=1e-5, atol=1e-6)


def test_mask_and_lengths_both_hold():
    tokens = [jnp.asarray(x) for x in _tokens(dtype=np.float32)]
    mask = jnp.asarray(np.stack([MASKS["middle"], MASKS["left"]]))
    lengths = jnp.array([6, 9])
    both = mask & (jnp.arange(T)[None] < lengths[:, None])
    for function in (linear_attention, lambda *x, **how: causal_linear_attention(*x, **how)[1]):
        a = function(*tokens, mask=mask, key_value_seq_lengths=lengths, query_seq_lengths=lengths)
        b = function(*tokens, mask=both, query_seq_lengths=lengths)
        np.testing.assert_array_equal(a, b)


@given(seed=st.integers(0, 9999), density=st.floats(0, 1))
@settings(max_examples=25)
def test_random_masks(seed, density):
    """Any mask, in chunks or token by token."""
    mask = np.random.default_rng(seed).random((B, T)) < density
    forms = [Form("chunked", 2), Form("recurrent", 4)]
    with x64():
        tokens, cotangent = _tokens(), np.ones((B, T, H, E))
        chunked, recurrent = (_values_and_gradients(form, True)(tokens, {"mask": mask}, cotangent) for form in forms)
    jax.tree.map(lambda a, b: assert_close(a, b, floor=1e-3), chunked, recurrent)


@given(lengths=st.tuples(*[st.integers(0, T + 2)] * 4))
@settings(max_examples=25)
def test_random_lengths(lengths):
    """Lengths say what masks say, in the state too: rows of any length share one compiled shape."""
    query_lengths, key_lengths = np.array(lengths[:2]), np.array(lengths[2:])
    hiding = {"query_seq_lengths": query_lengths, "key_value_seq_lengths": key_lengths}
    key_mask = np.arange(T) < key_lengths[:, None]
    rows = (np.arange(T) < query_lengths[:, None])[..., None, None]
    with x64():
        tokens, cotangent = _tokens(), np.ones((B, T, H, E))
        got, gradients = _values_and_gradients(Form("chunked", 2), True)(tokens, hiding, cotangent)
        want, want_gradients = _values_and_gradients(Form("recurrent", 4), True)(
            tokens, {"mask": key_mask}, cotangent * rows
        )
    # A mask makes a row 0 as well, so beside it the rows of masked keys are not compared.
    seen = rows & key_mask[..., None, None]
    assert_close(np.asarray(got[0]) * seen, np.asarray(want[0]) * seen, floor=1e-3)
    assert not np.any(np.asarray(got[0]) * ~rows)
    jax.tree.map(lambda a, b: assert_close(a, b, floor=1e-3), got[1:], want[1:])
    if np.all(query_lengths <= key_lengths):
        jax.tree.map(lambda a, b: assert_close(a, b, gradient=True, floor=1e-3), gradients, want_gradients)


def test_a_masked_step_may_hold_nan():
    token = [jnp.asarray(x[:, 0]) for x in _tokens(dtype=np.float32)]
    dirty = [x.at[1].set(jnp.nan) for x in token]
    state, _ = causal_linear_attention(*(jnp.asarray(x) for x in _tokens(dtype=np.float32)))
    mask = jnp.array([True, False])
    jax.tree.map(
        np.testing.assert_array_equal,
        linear_attention_step(state, *dirty, mask=mask),
        linear_attention_step(state, *token, mask=mask),
    )


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=str)
def test_pads_are_harmless_to_maps_without_a_derivative_at_zero(form):
    """x / |x| has none; a pad to a full chunk, or a masked token, may not bring its NaN into anybody's gradient."""

    def unit(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def loss(query, key, value, mask):
        how = {"feature_map": unit, "normalize": False, "is_causal": True, **form.options()}
        return jnp.sum(linear_attention(query, key, value, mask=mask, **how))

    arguments = [jnp.asarray(x) for x in normal(0, *[(1, 11, 2, 3)] * 3)]
    for mask in (None, jnp.arange(11)[None] % 3 > 0):
        for gradient in jax.jit(jax.grad(loss, (0, 1, 2)))(*arguments, mask):
            assert np.isfinite(gradient).all()

"""Packed documents equal the documents apart, gradients too.

Field cases 30 (segments and a mask of ones), 31 (the state leaks across documents), 32 (an empty segment). Random segments
in pieces are in `test_state`, gradients beside the oracle's in `test_forms`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BIDIRECTIONAL_FORMS, IN_BLOCKS, ONE_OF_EACH, Form, runs
from harness import attend, normal, state_of, x64
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_close

from jax_linattn import causal_linear_attention, feature_maps, linear_attention

T, H, D, E = 13, 2, 3, 4
LENGTHS = (4, 1, 6, 2)
IDS = np.repeat([5, 2, 9, 0], LENGTHS).astype(np.int32)[None]  # ids are names, not numbers in order
ELU = feature_maps.elu_plus_one


def _tokens(length=T, batch=1, seed=0):
    shapes = [(batch, length, H, D), (batch, length, H, D), (batch, length, H, E)]
    return normal(seed, *shapes, dtype=np.float64)


@functools.cache
def _values_and_gradients(form: Form, is_causal=True):
    @jax.jit
    def function(tokens, hiding, cotangent):
        def loss(tokens):
            results = attend(form, is_causal, ELU, {}, tokens, hiding)
            return jnp.sum(results[0] * cotangent), results

        (_, results), gradients = jax.value_and_grad(loss, has_aux=True)(tokens)
        return results, gradients

    return function


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=str)
def test_a_packed_row_equals_its_documents(form):
    """With masked tokens on both sides of a boundary, and a document that is masked as a whole."""
    mask = ~np.isin(np.arange(T), (3, 4, 5))[None]  # the end of one, all of another, the start of a third
    (cotangent,) = normal(1, (1, T, H, E), dtype=np.float64)
    alone = _values_and_gradients(Form("quadratic", None))
    with x64():
        results, gradients = _values_and_gradients(form)(_tokens(), {"segment_ids": IDS, "mask": mask}, cotangent)
        start = 0
        for length in LENGTHS:
            part = slice(start, start + length)
            tokens = [x[:, part] for x in _tokens()]
            apart, want = alone(tokens, {"mask": mask[:, part]}, cotangent[:, part])
            assert_close(results[0][:, part], apart[0], floor=1e-3)
            for got, expected in zip(gradients, want, strict=True):
                assert_close(got[:, part], expected, gradient=True, floor=1e-3)
            start += length
        for got, expected in zip(results[1:], apart[1:], strict=True):
            assert_close(got, expected, what="the state is the last document's")


@pytest.mark.parametrize("form", IN_BLOCKS, ids=str)
def test_a_document_may_begin_anywhere(form):
    """At the first token of a chunk or of a block too, and in what a last block reads once more."""
    length = 17
    ids = (np.arange(length) >= np.arange(1, length)[:, None]).astype(np.int32)  # [rows, T]: one beginning a row
    tokens, cotangent = _tokens(length, len(ids)), np.ones((len(ids), length, H, E))
    with x64():
        got, want = (
            _values_and_gradients(f)(tokens, {"segment_ids": ids}, cotangent) for f in (form, Form("quadratic", None))
        )
        jax.tree.map(functools.partial(assert_close, floor=1e-3), got, want)


@pytest.mark.parametrize("form", IN_BLOCKS, ids=str)
def test_a_mask_neither_joins_nor_splits_runs(form):
    """Field case 30. The state after a masked last document is empty, for the ids alone decide."""
    function = _values_and_gradients(form)
    cotangent = np.ones((1, T, H, E))
    with x64():
        ones = function(_tokens(), {"segment_ids": IDS, "mask": np.ones((1, T), bool)}, cotangent)
        none = function(_tokens(), {"segment_ids": IDS}, cotangent)
        jax.tree.map(assert_close, ones, none)
        last_masked = np.arange(T)[None] < T - LENGTHS[-1]
        (_, kv, key_sum), _ = function(_tokens(), {"segment_ids": IDS, "mask": last_masked}, cotangent)
    assert not np.any(np.asarray(kv))
    assert not np.any(np.asarray(key_sum))


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=str)
def test_the_segment_of_a_carried_state(form):
    """It joins the first run only if it is told to belong there; by default it does."""

    @jax.jit
    def continued(state, tokens, state_ids):
        return causal_linear_attention(
            *tokens, state=state, segment_ids=np.repeat(IDS, 2, axis=0), state_segment_ids=state_ids, **form.options()
        )

    @jax.jit
    def by_default(state, tokens):
        return causal_linear_attention(*tokens, state=state, segment_ids=np.repeat(IDS, 2, axis=0), **form.options())

    with x64():
        kv, key_sum = normal(2, (2, H, D, E), (2, H, D), dtype=np.float64)
        state, tokens = state_of(kv, abs(key_sum)), _tokens(batch=2)
        joined = by_default(state, tokens)
        empty = by_default(jax.tree.map(jnp.zeros_like, state), tokens)
        _, mixed = continued(state, tokens, np.array([IDS[0, 0], 77], np.int32))
    assert_close(mixed[0], joined[1][0])
    assert_close(mixed[1], empty[1][1])
    assert np.all(np.abs(joined[1] - empty[1])[:, : LENGTHS[0]] > 0)
    assert_close(joined[1][:, LENGTHS[0] :], empty[1][:, LENGTHS[0] :])


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=str)
def test_one_run_keeps_the_carried_state_to_the_end(form):
    with x64():
        kv, key_sum = normal(2, (1, H, D, E), (1, H, D), dtype=np.float64)
        arguments, nothing = [*_tokens(5), kv, abs(key_sum)], [*_tokens(5), 0 * kv, 0 * key_sum]
        ids = np.full((1, 5), 3, np.int32)
        function = jax.jit(lambda arguments, hiding: attend(form, True, ELU, {}, arguments, hiding))
        whole, fresh = function(arguments, {}), function(nothing, {})
        same = function(arguments, {"segment_ids": ids, "state_segment_ids": ids[:, 0]})
        other = function(arguments, {"segment_ids": ids, "state_segment_ids": ids[:, 0] + 1})
    jax.tree.map(assert_close, same, whole)
    jax.tree.map(assert_close, other, fresh)


@pytest.mark.parametrize("form", BIDIRECTIONAL_FORMS, ids=str)
def test_bidirectional_pairs_in_another_order(form):
    """Segments in another order on the two sides, and ids that stand on one side alone (a row of 0)."""
    query_ids = np.array([[7, 7, 1, 1, 1, 3, 8, 8]], np.int32)
    key_ids = np.array([[1, 1, 7, 7, 7, 4, 4, 8, 3, 3, 3]], np.int32)
    query, _, _ = _tokens(8)
    _, key, value = _tokens(11, seed=4)
    query_ids[0, -1] = 6
    mask = np.ones((1, 11), bool)
    mask[0, 1] = mask[0, 7] = False  # the one key of segment 8
    (cotangent,) = normal(1, (1, 8, H, E), dtype=np.float64)
    function = _values_and_gradients(form, False)
    with x64():
        (output,), gradients = function([query, key, value], {"segment_ids": (query_ids, key_ids), "mask": mask}, cotangent)
        output, gradients = np.asarray(output), [np.asarray(x) for x in gradients]
        for run in np.unique(query_ids):
            at, of = query_ids[0] == run, (key_ids[0] == run) & mask[0]
            if not of.any():
                assert not np.any(output[:, at])
                assert not np.any(gradients[0][:, at])
                continue
            tokens = [query[:, at], key[:, of], value[:, of]]
            (want,), want_gradients = _values_and_gradients(Form("quadratic", None), False)(tokens, {}, cotangent[:, at])
            assert_close(output[:, at], want)
            for got, expected in zip(gradients, want_gradients, strict=True):
                part = got[:, at] if got.shape[1] == 8 else got[:, of]
                assert_close(part, expected, gradient=True, floor=1e-3)
    unread = np.isin(key_ids[0], [4]) | ~mask[0]
    assert not np.any(gradients[1][:, unread])
    assert not np.any(gradients[2][:, unread])


def test_one_array_stands_for_a_pair():
    with x64():
        tokens = [jnp.asarray(x) for x in _tokens()]
        one = linear_attention(*tokens, segment_ids=IDS, implementation="quadratic")
        two = linear_attention(*tokens, segment_ids=(IDS, IDS), implementation="quadratic")
        unbatched = linear_attention(*(x[0] for x in tokens), segment_ids=(IDS[0], IDS[0]), implementation="quadratic")
    np.testing.assert_array_equal(one, two)
    assert_close(unbatched, one[0])


@given(seed=st.integers(0, 9999))
@settings(max_examples=12)
def test_random_segments_and_masks(seed):
    """Any runs, any mask: causal in chunks, in parallel and token by token; not causal both ways."""
    rng = np.random.default_rng(seed)
    hiding = {"segment_ids": runs(rng, 1, T), "mask": rng.random((1, T)) < 0.7}
    pair = {"segment_ids": (runs(rng, 1, T), runs(rng, 1, T)[:, ::-1].copy()), "mask": hiding["mask"]}
    with x64():
        tokens, cotangent = _tokens(), np.ones((1, T, H, E))
        chunked, associative, recurrent = (
            _values_and_gradients(form)(tokens, hiding, cotangent)
            for form in (Form("chunked", 2), Form("associative", 3), Form("recurrent", 4))
        )
        two = [
            _values_and_gradients(form, False)(tokens, pair, cotangent)
            for form in (Form("quadratic", None), Form("chunked", 1))
        ]
    close = functools.partial(assert_close, floor=1e-3)
    jax.tree.map(close, chunked, recurrent)
    jax.tree.map(close, associative, recurrent)
    jax.tree.map(close, *two)


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=str)
def test_overflow_stays_in_its_segment(form):
    """Finite values whose sum is no float: the next document, in this call or a later one, is exact."""
    key = jnp.ones((1, 6, 1, 2))
    value = key.at[0, :3].set(2e38)
    ids = jnp.array([[0, 0, 0, 1, 1, 1]])
    attend = lambda key, value, ids, **how: causal_linear_attention(
        key, key, value, segment_ids=ids, **how, **form.options()
    )
    _, output = attend(key, value, ids)
    np.testing.assert_array_equal(output[0, 3:], 1)
    state, _ = attend(key[:, :3], value[:, :3], ids[:, :3])
    _, output = attend(key[:, 3:], value[:, 3:], ids[:, 3:], state=state, state_segment_ids=jnp.array([0]))
    np.testing.assert_array_equal(output, 1)

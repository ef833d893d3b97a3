"""The short convolution: the oracle's sums, whatever is masked, and wherever the sequence is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import normal, x64
from tolerance import assert_close

from jax_linattn.convolution import causal_convolution, init_convolution_state

BATCH, DIM = 3, 5
compiled = jax.jit(causal_convolution)


def oracle(x, kernel, bias, state, mask, segment_ids=None):
    """The definition, a token at a time: (state, y) in float64. Where the id changes, all that was seen becomes zeros."""
    x, kernel, bias, state = (np.asarray(a, np.float64) for a in (x, kernel, bias, state))
    y, width = np.zeros(x.shape), len(kernel)
    last = np.zeros(state.shape)
    for row in range(len(x)):
        seen = list(state[row])
        for t in range(x.shape[1]):
            if segment_ids is not None and t and segment_ids[row, t] != segment_ids[row, t - 1]:
                seen = [np.zeros(x.shape[-1])] * (width - 1)
            if mask[row, t]:
                seen.append(x[row, t])
                y[row, t] = bias + sum(kernel[width - 1 - j] * seen[-1 - j] for j in range(width))
        last[row] = np.reshape(seen[len(seen) - (width - 1) :], (-1, x.shape[-1]))
    return last, y


def draw(length: int, width: int, dtype="float32"):
    x, kernel, bias, state = normal(0, (BATCH, length, DIM), (width, DIM), (DIM,), (BATCH, width - 1, DIM), dtype=dtype)
    mask = np.random.default_rng(1).random((BATCH, length)) < 0.6
    return x, kernel, bias, state, mask


@pytest.mark.parametrize(("length", "width"), [(0, 4), (1, 4), (2, 4), (3, 1), (13, 4)])
def test_equals_the_oracle(length, width):
    with x64():
        x, kernel, bias, state, mask = draw(length, width, "float64")
        expected = oracle(x, kernel, bias, state, mask)
        actual = compiled(jnp.asarray(x), kernel, bias, state=jnp.asarray(state), mask=jnp.asarray(mask))
        unmasked = compiled(jnp.asarray(x), kernel, bias, state=jnp.asarray(state))
        for got, want in zip(actual, expected, strict=True):
            assert_close(got, want, "float64")
        for got, want in zip(unmasked, oracle(x, kernel, bias, state, np.ones_like(mask)), strict=True):
            assert_close(got, want, "float64")


def test_cutting_anywhere_changes_nothing():
    x, kernel, bias, state, mask = draw(11, 4)
    whole_state, whole = compiled(jnp.asarray(x), kernel, bias, state=jnp.asarray(state), mask=jnp.asarray(mask))
    for cuts in [[0], [2, 5], list(range(1, 11))]:
        carry, parts = jnp.asarray(state), []
        for begin, end in zip([0, *cuts], [*cuts, 11], strict=True):
            part = jnp.asarray(x[:, begin:end])
            carry, y = compiled(part, kernel, bias, state=carry, mask=jnp.asarray(mask[:, begin:end]))
            parts.append(y)
        assert_close(jnp.concatenate(parts, axis=1), whole)
        np.testing.assert_array_equal(carry, whole_state)


def test_a_masked_token_is_no_token():
    """What a mask leaves gives what it gives alone, gradients too, though the masked tokens hold NaN."""
    x, kernel, bias, state, mask = draw(13, 4)
    mask[0], mask[1, :4], mask[2, 9:] = False, False, False
    x[~mask] = np.nan

    def loss(x, kernel, bias, state, mask=None):
        last, y = causal_convolution(x, kernel, bias, state=state, mask=mask)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(last)), (last, y)

    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    (_, (last, y)), (dx, dkernel, dbias, dstate) = gradient(x, kernel, bias, state, mask)
    assert np.all(np.asarray(dx)[~mask] == 0)
    assert np.all(np.asarray(y)[~mask] == 0)
    kernel_sum, bias_sum = np.zeros_like(kernel), np.zeros_like(bias)
    for row in range(BATCH):
        alone = (x[row : row + 1, mask[row]], kernel, bias, state[row : row + 1])
        (_, (last_alone, y_alone)), (dx_alone, dkernel_alone, dbias_alone, dstate_alone) = gradient(*alone)
        assert_close(np.asarray(y)[row, mask[row]], y_alone[0])
        np.testing.assert_array_equal(last[row], last_alone[0])
        assert_close(np.asarray(dx)[row, mask[row]], dx_alone[0], gradient=True)
        assert_close(dstate[row], dstate_alone[0], gradient=True)
        kernel_sum, bias_sum = kernel_sum + dkernel_alone, bias_sum + dbias_alone
    assert_close(dkernel, kernel_sum, gradient=True)
    assert_close(dbias, bias_sum, gradient=True)


IDS = np.array([[5, 5, 5, 2, 2, 2, 2, 2, 0, 0, 0], [1, 2, 3, 3, 4, 4, 4, 4, 4, 4, 5], [7] * 11], np.int32)


def test_segments_equal_the_oracle():
    """Runs shorter and longer than the taps; with a mask, which takes tokens and whole runs out and joins none."""
    with x64():
        x, kernel, bias, state, mask = draw(11, 4, "float64")
        mask[1, :3] = [True, False, True]
        for hiding in ({}, {"mask": jnp.asarray(mask)}):
            actual = compiled(
                jnp.asarray(x), kernel, bias, state=jnp.asarray(state), segment_ids=jnp.asarray(IDS), **hiding
            )
            expected = oracle(x, kernel, bias, state, mask if hiding else np.ones_like(mask), IDS)
            for got, want in zip(actual, expected, strict=True):
                assert_close(got, want, "float64")


def test_runs_go_on_where_a_packed_sequence_is_cut():
    """The state belongs to the first token's run: cut inside runs, the parts are the whole."""
    x, kernel, bias, state, mask = draw(11, 4)
    arrays = [jnp.asarray(a) for a in (x, mask, IDS)]
    arrays[2] = jnp.broadcast_to(arrays[2][:1], IDS.shape)
    whole_state, whole = compiled(arrays[0], kernel, bias, state=jnp.asarray(state), mask=arrays[1], segment_ids=arrays[2])
    carry, parts = jnp.asarray(state), []
    for begin, end in [(0, 2), (2, 6), (6, 10), (10, 11)]:
        x, mask, ids = (a[:, begin:end] for a in arrays)
        carry, y = compiled(x, kernel, bias, state=carry, mask=mask, segment_ids=ids)
        parts.append(y)
    assert_close(jnp.concatenate(parts, axis=1), whole)
    np.testing.assert_array_equal(carry, whole_state)


def test_gradients_of_packed_documents_are_those_of_each_alone():
    x, kernel, bias, _, _ = draw(11, 4)
    x[0, 3:8] = np.nan  # another document's

    def loss(x, kernel, bias, segment_ids=None):
        y = causal_convolution(x, kernel, bias, segment_ids=segment_ids)[1]
        return jnp.sum(jnp.where(jnp.isnan(y), 0, jnp.sin(y)))

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    packed = gradient(x[:1], kernel, bias, jnp.asarray(IDS[:1]))
    first, last = gradient(x[:1, :3], kernel, bias), gradient(x[:1, 8:], kernel, bias)
    assert_close(packed[0][:, :3], first[0], gradient=True)
    assert_close(packed[0][:, 8:], last[0], gradient=True)


def test_the_future_changes_nothing():
    x, kernel, bias, _, mask = draw(7, 4)

    def convolve(x):
        return causal_convolution(x, kernel, bias, mask=jnp.asarray(mask[:1]))[1]

    jacobian = jax.jit(jax.jacfwd(convolve))(x[:1])
    depends = np.any(np.asarray(jacobian) != 0, axis=(0, 2, 3, 5))  # [T of y, T of x]
    assert not np.any(np.triu(depends, 1))
    assert np.array_equal(np.diag(depends), mask[0])


def test_transforms_and_16_bits():
    x, kernel, bias, _, mask = draw(6, 4)
    x, mask = jnp.asarray(x), jnp.asarray(mask)

    def convolve(x, mask):
        return causal_convolution(x, kernel, bias, mask=mask)

    one_by_one = jax.jit(jax.vmap(lambda x, mask: convolve(x[None], mask[None])))(x, mask)
    for got, want in zip(one_by_one, jax.jit(convolve)(x, mask), strict=True):
        assert_close(got[:, 0], want)

    def step(state, token):
        return causal_convolution(token[:, None], kernel, bias, state=state)

    carry, steps = jax.lax.scan(step, init_convolution_state(x[:, 0], 4), jnp.swapaxes(x, 0, 1))
    state, whole = compiled(x, kernel, bias)
    assert_close(jnp.swapaxes(steps[:, :, 0], 0, 1), whole)
    np.testing.assert_array_equal(carry, state)

    rounded = x.astype(jnp.bfloat16)
    state, low = compiled(rounded, kernel, bias)
    assert state.dtype == low.dtype == jnp.bfloat16
    assert_close(low, compiled(rounded.astype(jnp.float32), kernel, bias)[1], "bfloat16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((2, 3), "float32")}, r"x must be .* \[B, T, D\], got float32 \(2, 3\)"),
        ({"x": jnp.zeros((2, 3, 5), int)}, "x must be a floating-point array"),
        ({"kernel": jnp.zeros((4, 6), "float32")}, r"kernel must be \[W, D\] .* D = 5, got float32 \(4, 6\)"),
        ({"bias": jnp.zeros((1, 5), "float32")}, r"bias must be \[D\] = \(5,\), got float32 \(1, 5\)"),
        ({"state": jnp.zeros((2, 4, 5), "float32")}, r"state must be float32 .* \(2, 3, 5\), got float32 \(2, 4, 5\)"),
        ({"state": jnp.zeros((2, 3, 5), jnp.bfloat16)}, "state must be float32 .* got bfloat16"),
        ({"mask": jnp.zeros((2, 3))}, "mask must be bool"),
        ({"segment_ids": jnp.zeros((2, 3))}, r"segment_ids must be an integer array of shape \[B, T\] = \(2, 3\)"),
        ({"segment_ids": jnp.zeros((2, 4), int)}, r"segment_ids must be an integer array .* got int32 \(2, 4\)"),
    ],
)
def test_errors(change, message):
    arguments = {"x": jnp.zeros((2, 3, 5), "float32"), "kernel": jnp.zeros((4, 5)), **change}
    with pytest.raises(ValueError, match=message):
        causal_convolution(arguments.pop("x"), arguments.pop("kernel"), arguments.pop("bias", None), **arguments)

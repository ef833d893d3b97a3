"""Every transform in every form, with the state as an argument and as a carry.

`hessian` and `check_grads` are in `test_gradients`, `shard_map` in `test_sharding`. Field cases 42 (carries), 43, 46.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CAUSAL_FORMS, IN_BLOCKS, ONE_OF_EACH, Form
from harness import normal, state_of, x64
from tolerance import assert_close

from jax_linattn import (
    LinearAttentionState,
    causal_linear_attention,
    feature_maps,
    init_state,
    linear_attention,
    linear_attention_step,
)

B, T, H, K, D, E = 2, 5, 2, 1, 2, 3
HIDING = {"mask": np.array([[1, 1, 0, 1, 1], [0, 1, 1, 1, 0]], bool), "segment_ids": np.array([[4, 4, 4, 1, 1]] * 2)}
BIDIRECTIONAL = [Form("quadratic", None), Form("chunked", 1)]
EVERY_FORM = [*((form, True) for form in ONE_OF_EACH), *((form, False) for form in BIDIRECTIONAL)]
every_form = pytest.mark.parametrize(
    ("form", "is_causal"), EVERY_FORM, ids=lambda x: str(x) if isinstance(x, Form) else ("causal" if x else "both_ways")
)


def _arguments(is_causal, seed=0, lead=()):
    shapes = [(B, T, H, D), (B, T, K, D), (B, T, K, E)]
    arguments = [jnp.asarray(x) for x in normal(seed, *((*lead, *shape) for shape in shapes), dtype=np.float64)]
    if not is_causal:
        return arguments
    kv, key_sum = normal(seed + 1, (*lead, B, K, D, E), (*lead, B, K, D), dtype=np.float64)
    return [*arguments, LinearAttentionState(*map(jnp.asarray, (kv, abs(key_sum), 0 * key_sum[..., 0])))]


def _attend(form, is_causal):
    def attend(*arguments):
        if not is_causal:
            return linear_attention(*arguments, **HIDING, **form.options())
        *tokens, state = arguments
        state, output = causal_linear_attention(*tokens, state=state, **HIDING, **form.options())
        return output, state.kv, state.key_sum

    return attend


@every_form
def test_jvp_linearize_vjp_and_jacobians(form, is_causal):
    """Forward and reverse mode say the same, as one compiled program."""
    attend = _attend(form, is_causal)

    @jax.jit
    def derivatives(arguments, tangents, cotangents):
        _, jvp = jax.jvp(attend, arguments, tangents)
        _, linear = jax.linearize(attend, *arguments)
        _, pullback = jax.vjp(attend, *arguments)
        return jvp, linear(*tangents), pullback(cotangents)

    with x64():
        arguments, tangents = tuple(_arguments(is_causal)), tuple(_arguments(is_causal, seed=7))
        cotangents = jax.tree.map(jnp.cos, jax.jit(attend)(*arguments))
        jvp, linear, vjp = derivatives(arguments, tangents, cotangents)
        forward = sum(jnp.sum(a * b) for a, b in zip(*map(jax.tree.leaves, (jvp, cotangents)), strict=True))
        reverse = sum(jnp.sum(a * b) for a, b in zip(*map(jax.tree.leaves, (vjp, tangents)), strict=True))
        assert_close(forward, reverse)
        jax.tree.map(assert_close, linear, jvp)


@every_form
def test_jacfwd_equals_jacrev(form, is_causal):
    attend = _attend(form, is_causal)

    def output(query, value, *rest):
        key = _arguments(is_causal)[1]
        return jax.tree.leaves(attend(query, key, value, *rest))[0][:, -2:]

    with x64():
        query, _, value, *rest = _arguments(is_causal)
        jacobians = jax.jit(lambda *x: (jax.jacfwd(output, (0, 1))(*x), jax.jacrev(output, (0, 1))(*x)))
        jax.tree.map(functools.partial(assert_close, gradient=True), *jacobians(query, value, *rest))


@every_form
def test_vmap_and_remat_of_the_gradient(form, is_causal):
    """Mapped over a new axis at the end; and recomputed from the inputs."""
    attend = _attend(form, is_causal)

    def loss(arguments):
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(attend(*arguments)))

    gradient = jax.grad(loss)
    with x64():
        stacked = _arguments(is_causal, lead=(2,))
        at_end = jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), stacked)
        mapped = jax.jit(jax.vmap(gradient, in_axes=-1))(at_end)
        recomputed = jax.jit(jax.grad(jax.checkpoint(loss)))
        apart = [recomputed(jax.tree.map(lambda x, i=i: x[i], stacked)) for i in range(2)]
    jax.tree.map(assert_close, mapped, jax.tree.map(lambda *x: np.stack(x), *apart))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_step_is_the_body_of_a_loop(dtype):
    """scan and while_loop: the same pytree, shapes, dtypes and weak types in and out. Field case 42."""
    with x64():
        tokens = [x.astype(dtype) for x in _arguments(False)]

        def body(state, token):
            return linear_attention_step(state, *token)

        def scanned(tokens):
            return jax.lax.scan(body, init_state(*tokens[1:]), [jnp.moveaxis(x, 1, 0) for x in tokens])

        def looped(tokens):
            def one(carry):
                t, state = carry
                return t + 1, body(state, [x[:, t] for x in tokens])[0]

            return jax.lax.while_loop(lambda carry: carry[0] < T, one, (0, init_state(*tokens[1:])))[1]

        state, outputs = jax.jit(scanned)(tokens)
        want_state, want = jax.jit(lambda x: causal_linear_attention(*x, implementation="recurrent"))(tokens)
        looped_state = jax.jit(looped)(tokens)
        assert outputs.dtype == tokens[2].dtype
        start = init_state(*tokens[1:])
        types = [[(x.shape, x.dtype, x.weak_type) for x in tree] for tree in (start, state, want_state, looped_state)]
        assert types[0] == types[1] == types[2] == types[3]
        assert_close(jnp.moveaxis(outputs, 0, 1), want)
    jax.tree.map(assert_close, state, want_state)
    jax.tree.map(assert_close, looped_state, want_state)


@functools.cache
def _whole():
    """The result and gradient of three pieces as one sequence."""

    def attend_whole(pieces):
        whole = [jnp.moveaxis(x, 0, 1).reshape(B, 3 * T, *x.shape[3:]) for x in pieces]
        state, output = causal_linear_attention(*whole, implementation="quadratic")
        return jnp.sum(jnp.sin(output)), state

    return jax.jit(jax.value_and_grad(attend_whole, has_aux=True))(_arguments(False, lead=(3,)))


@pytest.mark.parametrize("form", IN_BLOCKS, ids=str)
def test_the_state_is_a_carry_of_whole_calls(form):
    """A scan over pieces, with its gradient: a truncated sequence trains as one."""

    def attend_all(pieces):
        state, outputs = jax.lax.scan(
            lambda state, piece: causal_linear_attention(*piece, state=state, **form.options()),
            init_state(*(x[0] for x in pieces[1:])),
            pieces,
        )
        return jnp.sum(jnp.sin(outputs)), state

    with x64():
        got = jax.jit(jax.value_and_grad(attend_all, has_aux=True))(_arguments(False, lead=(3,)))
        jax.tree.map(assert_close, got, _whole())


@pytest.mark.parametrize("form", CAUSAL_FORMS, ids=str)
def test_types_are_the_same_in_and_out(form):
    """Weak types too: what goes in as a carry comes out as one, for every dtype, with float64 on and off."""
    for on in (False, True):
        with x64(on):
            for dtype in ("float16", "bfloat16", "float32", *(["float64"] if on else [])):
                tokens = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((B, T, H, D), (B, T, K, D), (B, T, K, E))]
                start = jax.eval_shape(init_state, *tokens[1:])
                call = functools.partial(causal_linear_attention, **form.options())
                state, output = jax.eval_shape(lambda s, *x, call=call: call(*x, state=s), start, *tokens)
                assert [(x.shape, x.dtype, x.weak_type) for x in state] == [(x.shape, x.dtype, False) for x in start]
                assert (output.shape, output.dtype, output.weak_type) == ((B, T, H, E), jnp.dtype(dtype), False)


def test_inside_jit_nothing_is_read_from_the_values():
    """Masks, lengths, ids, scale, state and map may all be traced."""

    @jax.jit
    def attend(tokens, state, mask, lengths, ids, scale, favor):
        return causal_linear_attention(
            *tokens,
            state=state,
            mask=mask,
            segment_ids=ids,
            state_segment_ids=ids[:, 0],
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            normalize=False,
            scale=scale,
            feature_map=favor,
        )

    favor = feature_maps.favor_plus(jax.random.key(0), D, 4)
    tokens = [x.astype(jnp.float32) for x in normal(0, (B, T, H, D), (B, T, K, D), (B, T, K, E))]
    state = state_of(jnp.zeros((B, K, 4, E)), jnp.zeros((B, K, 4)))
    mask, ids = (jnp.asarray(HIDING["mask"]), jnp.zeros((B, T), jnp.int32))
    _, output = attend(tokens, state, mask, jnp.array([5, 3]), ids, jnp.float32(0.5), favor)
    assert output.shape == (B, T, H, E)
    assert not np.any(np.asarray(output)[1, 3:])

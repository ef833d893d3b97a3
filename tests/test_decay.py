"""Decay, per head and per feature: S_t = a_t ⊙ S_{t-1} + φ(k_t) v_tᵀ in every form, with everything else.

Field cases 9 (γ^-i), 22 (a masked token decays nothing), 25, 35 (tails), 39 (strong gates).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import MAPS, ONE_OF_EACH, SHAPES, Form, runs
from harness import normal, state_of, x64
from tolerance import assert_close, relative_rms
from tracing import largest_array, program_size

from jax_linattn import attention_weights, causal_linear_attention, linear_attention, linear_attention_step

DEFAULT = Form("chunked", None)
KINDS = ("head", "feature")
kinds = pytest.mark.parametrize("kind", KINDS)


def log_sigmoid(x):
    return -np.logaddexp(0, -x)


# Gates by name: from standard normal numbers and fair coins to log decays.
GATES = {
    "sigmoid_10": lambda x, coin: log_sigmoid(x) / 0.1,
    "sigmoid": lambda x, coin: log_sigmoid(x),
    "sigmoid_0.1": lambda x, coin: log_sigmoid(x) / 10,
    "sigmoid_0.0625": lambda x, coin: log_sigmoid(x) / 16,
    "none": lambda x, coin: 0 * x,
    "half": lambda x, coin: np.where(coin, log_sigmoid(x), 0),
    "strong_or_weak": lambda x, coin: np.where(coin, -50, -0.01),
    "resets": lambda x, coin: np.where(coin, -np.inf, log_sigmoid(x)),
}


WITH_GRADIENTS = ("sigmoid_10", "half")  # the loop takes one run for each input number


def gates(name, kind, batch, length, heads, features, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    shape = (batch, length, heads) + ((features,) if kind == "feature" else ())
    coin = rng.random(shape) < (0.2 if name == "resets" else 0.5)
    return GATES[name](rng.standard_normal(shape), coin).astype(dtype)


# (shape, whether tokens are hidden, options)
SETTINGS = {
    "hidden": ("plain", True, {}),
    "unnormalized": ("more_values", False, {"normalize": False, "scale": 0.3}),
    "shared_keys": ("more_values", True, {}),
    "eps": ("grouped_queries", True, {"eps": 0.1}),
    "mixed": ("mixed", False, {}),
}


@functools.cache
def _problem(setting):
    name, hidden, rule = SETTINGS[setting]
    shape = SHAPES[name]
    rng, heads = np.random.default_rng(7), max(shape.key_heads, shape.value_heads)
    arguments = normal(1, *shape.sizes(True), dtype=np.float64)
    state = [rng.standard_normal((shape.batch, heads, shape.dim, shape.value_dim))]
    state.append(rng.uniform(0.5, 2, state[0].shape[:-1]))
    hiding = {}
    if hidden:
        hiding = {
            "mask": rng.random((shape.batch, shape.length)) < 0.7,
            "segment_ids": runs(rng, shape.batch, shape.length),
        }
    outputs = (shape.batch, shape.length, max(shape.query_heads, heads), shape.value_dim)
    cotangents = [rng.standard_normal(size) for size in (outputs, state[0].shape, state[1].shape)]
    return shape, heads, arguments, state, hiding, rule, cotangents


@pytest.mark.parametrize(
    ("setting", "form"),
    [*(("hidden", form) for form in ONE_OF_EACH)]
    + [(setting, Form("chunked", 5)) for setting in ("unnormalized", "shared_keys", "eps", "mixed")],
    ids=str,
)
@kinds
def test_values_and_gradients(setting, form, kind):
    """Against the loop: values, final state, and the gradients of q, k, v, the decay and the state, for every gate."""
    shape, heads, arguments, state, hiding, rule, cotangents = _problem(setting)
    feature_map, oracle_map = MAPS["elu_plus_one"]

    @jax.jit
    def run(arguments, hiding):
        def attend(q, k, v, log_decay, kv, key_sum):
            options = {**form.options(), **rule, **hiding, "log_decay": log_decay, "feature_map": feature_map}
            after, output = causal_linear_attention(q, k, v, state=state_of(kv, key_sum), **options)
            return output, after.kv, after.key_sum

        results, pullback = jax.vjp(attend, *arguments)
        return results, pullback(tuple(map(jnp.asarray, cotangents)))

    seen = oracle.visible(shape.batch, shape.length, shape.length, True, **hiding)
    wanted = functools.partial(oracle.recurrence, feature_map=oracle_map, **rule)
    for name in GATES if form.implementation == "chunked" else ("half", "resets"):
        log_decay = gates(name, kind, shape.batch, shape.length, heads, shape.dim)
        inputs = [*arguments, log_decay, *state]
        with x64():
            results, gradients = run(list(map(jnp.asarray, inputs)), hiding)
        for what, got, want in zip(("output", "kv", "key_sum"), results, wanted(*inputs, seen), strict=True):
            assert_close(got, want, what=f"{name} {what}")
        if name not in WITH_GRADIENTS:
            continue
        for what, got, want in zip(
            ("q", "k", "v", "log_decay", "kv", "key_sum"),
            gradients,
            oracle.gradients(wanted, inputs, seen, cotangents),
            strict=True,
        ):
            assert_close(got, want, gradient=True, floor=1e-3, what=f"{name} gradient of {what}")


@kinds
def test_16_bits_and_float32(kind):
    """Over several blocks, against the same in float64: float32 to 1e-5, bfloat16 q, k, v with float32 gates."""
    batch, length, heads, dim = 1, 300, 2, 16
    arrays = normal(3, *[(batch, length, heads, dim)] * 4, dtype=np.float64)

    @jax.jit
    def run(q, k, v, log_decay, cotangent):
        attend = functools.partial(linear_attention, is_causal=True, implementation="chunked")
        output, pullback = jax.vjp(lambda *args: attend(*args[:3], log_decay=args[3]), q, k, v, log_decay)
        return output, pullback(cotangent)

    for name in ("sigmoid_10", "sigmoid", "sigmoid_0.1", "sigmoid_0.0625", "none", "half", "resets"):
        log_decay = gates(name, kind, batch, length, heads, dim, dtype=np.float32)
        for dtype, bounds in (("float32", (1e-5, 1e-5, 1e-5)), ("bfloat16", (4e-3, 8e-3, 2e-2))):
            inputs = [jnp.asarray(x, dtype) for x in arrays]
            inputs.insert(3, jnp.asarray(log_decay))
            got, gradients = run(*inputs)
            with x64():
                want, wanted = run(*(jnp.asarray(np.asarray(x).astype(np.float64)) for x in inputs))
            assert relative_rms(got, want) <= bounds[0], (name, dtype)
            for what, x, y in zip(("q", "k", "v"), gradients[:3], wanted[:3], strict=True):
                assert relative_rms(x, y) <= bounds[1], (name, dtype, what)
            assert relative_rms(gradients[3], wanted[3]) <= bounds[2], (name, dtype, "log_decay")


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=str)
@kinds
def test_zero_and_minus_infinity(form, kind):
    """0 is no decay; -inf starts anew as a segment does, in values, state and gradients, and those are finite."""
    batch, length, heads, dim = 2, 13, 2, 3
    q, k, v, w = (jnp.asarray(x) for x in normal(5, *[(batch, length, heads, dim)] * 4, dtype=np.float64))
    resets = np.zeros((batch, length), bool)
    resets[0, 4] = resets[1, 9] = resets[1, 10] = True
    shape = (batch, length, heads) + ((dim,) if kind == "feature" else ())

    @jax.jit
    def run(log_decay, segment_ids):
        def attend(q, k, v, log_decay):
            options = {"log_decay": log_decay, "segment_ids": segment_ids, **form.options()}
            state, output = causal_linear_attention(q, k, v, **options)
            return output, state

        (output, state), pullback = jax.vjp(attend, q, k, v, log_decay)
        return (output, state), pullback((w, jax.tree.map(jnp.ones_like, state)))

    with x64():
        zero, one_run = jnp.zeros(shape), jnp.zeros((batch, length), int)
        mask = resets.reshape(batch, length, *[1] * (len(shape) - 2))
        by_decay = run(jnp.where(mask, -jnp.inf, zero), one_run)
        by_segment = run(zero, jnp.cumsum(jnp.asarray(resets), axis=1))
        plain = jax.jit(lambda *args: causal_linear_attention(*args, **form.options())[::-1])(q, k, v)
        no_decay = run(zero, one_run)[0]
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(by_decay))
    for got, want in zip(jax.tree.leaves(by_decay)[:-1], jax.tree.leaves(by_segment)[:-1], strict=True):
        assert_close(got, want)
    wanted = np.where(np.broadcast_to(mask, shape), 0, by_segment[1][3])  # what reaches a forgotten past is 0
    assert_close(by_decay[1][3], wanted, gradient=True)
    for got, want in zip(jax.tree.leaves(no_decay), jax.tree.leaves(plain), strict=True):
        assert_close(got, want)


@kinds
def test_strong_decay_over_many_tokens(kind):
    """-50 a token for 8,192 of them: finite, in both dtypes, and nothing but the token itself is left."""
    shape = (1, 8192, 1, 4)
    log_decay = jnp.full(shape if kind == "feature" else shape[:-1], -50.0)

    @jax.jit
    def run(*arguments):
        attend = lambda *args: linear_attention(*args[:3], log_decay=args[3], is_causal=True)
        output, pullback = jax.vjp(attend, *arguments)
        return output, pullback(output)

    for dtype in (jnp.float32, jnp.bfloat16):
        q, k, v = (jnp.asarray(x).astype(dtype) for x in normal(2, shape, shape, shape))
        output, gradients = run(q, k, v, log_decay)
        assert_close(output, v)
        assert all(np.all(np.isfinite(x.astype(jnp.float32))) for x in gradients)


@functools.cache
def _second_derivative(form, kind):
    """The gradient of the decay, and its derivative along three directions at once."""
    batch, length, heads, dim = 1, 5, 2, 2
    with x64():
        q, k, v = (jnp.asarray(x) for x in normal(8, *[(batch, length, heads, dim)] * 3, dtype=np.float64))
        log_decay = jnp.asarray(gates("sigmoid", kind, batch, length, heads, dim))
        directions = jnp.asarray(np.random.default_rng(1).standard_normal((3, *log_decay.shape)))

        def loss(log_decay):
            output = linear_attention(q, k, v, log_decay=log_decay, is_causal=True, **form.options())
            return jnp.sum(jnp.sin(output))

        return jax.jit(jax.vmap(lambda d: jax.jvp(jax.grad(loss), (log_decay,), (d,))))(directions)


@pytest.mark.parametrize("form", [form for form in ONE_OF_EACH if form.implementation != "recurrent"], ids=str)
@kinds
def test_forward_over_reverse(form, kind):
    """jvp, vmap and the second derivative of the decay agree with the recurrent form's."""
    wanted = _second_derivative(Form("recurrent", 2), kind)
    for got, want in zip(_second_derivative(form, kind), wanted, strict=True):
        assert_close(got, want, gradient=True)


@kinds
def test_splits_and_steps(kind):
    """A prompt, a few tokens at once, then single tokens: the whole."""
    batch, length, heads, dim = 2, 12, 2, 3
    q, k, v = normal(4, *[(batch, length, heads, dim)] * 3)
    log_decay = gates("half", kind, batch, length, heads, dim, dtype=np.float32)
    mask = np.random.default_rng(0).random((batch, length)) < 0.7
    attend = jax.jit(lambda *args, **options: causal_linear_attention(*args, **options))
    step = jax.jit(lambda *args, **options: linear_attention_step(*args, **options))
    want_state, want = attend(q, k, v, log_decay=log_decay, mask=mask)
    state, outputs = None, []
    for start, end in ((0, 5), (5, 9)):
        part = [x[:, start:end] for x in (q, k, v)]
        options = {"log_decay": log_decay[:, start:end], "mask": mask[:, start:end]}
        state, output = attend(*part, state=state, **options)
        outputs.append(output)
    for t in range(9, length):
        token = [x[:, t] for x in (q, k, v)]
        state, output = step(state, *token, log_decay=log_decay[:, t], mask=mask[:, t])
        outputs.append(output[:, None])
    assert_close(jnp.concatenate(outputs, axis=1), want)
    for got, wanted in zip(state, want_state, strict=True):
        assert_close(got, wanted, "float32")


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=str)
@kinds
def test_the_future_changes_no_bit(form, kind):
    batch, length, heads, dim = 1, 9, 2, 3
    q, k, v = normal(6, *[(batch, length, heads, dim)] * 3)
    log_decay = gates("half", kind, batch, length, heads, dim, dtype=np.float32)
    other = log_decay.copy()
    other[:, 6:] = -np.inf
    call = jax.jit(lambda log_decay: linear_attention(q, k, v, log_decay=log_decay, is_causal=True, **form.options()))
    before, after = call(log_decay), call(other)
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert np.any(np.asarray(before[:, 6:]) != np.asarray(after[:, 6:]))


@kinds
def test_weights(kind):
    """The weights with decay, times the values, are the output; also with fewer keys than state heads."""
    batch, length, dim = 2, 7, 3
    for num_query, num_key, num_state in ((4, 2, 2), (2, 2, 4)):
        q, k, v = normal(9, *[(batch, length, heads, dim) for heads in (num_query, num_key, num_state)])
        log_decay = gates("half", kind, batch, length, num_state, dim, dtype=np.float32)
        weights = jax.jit(lambda q, k, g: attention_weights(q, k, log_decay=g, is_causal=True))(q, k, log_decay)
        values = np.repeat(v, weights.shape[1] // num_state, axis=2)
        got = np.einsum("bhts,bshe->bthe", weights, values)
        attend = jax.jit(lambda q, k, v, g: linear_attention(q, k, v, log_decay=g, is_causal=True))
        assert_close(got, attend(q, k, v, log_decay))


def test_the_ways_to_pass_a_decay():
    """[N] for all tokens, unbatched, in another dtype."""
    batch, length, heads, dim = 2, 6, 3, 2
    q, k, v = normal(0, *[(batch, length, heads, dim)] * 3)
    per_head = np.array([-0.1, -1.0, -10.0], np.float32)
    full = np.broadcast_to(per_head, (batch, length, heads))
    want = linear_attention(q, k, v, log_decay=full, is_causal=True)
    np.testing.assert_array_equal(linear_attention(q, k, v, log_decay=per_head, is_causal=True), want)
    for decay in (per_head, full[0], np.repeat(full[0, ..., None], dim, axis=-1)):
        assert_close(linear_attention(q[0], k[0], v[0], log_decay=decay, is_causal=True), want[0])
    in_16_bits = linear_attention(q, k, v, log_decay=jnp.asarray(full, jnp.bfloat16), is_causal=True)
    assert in_16_bits.dtype == jnp.float32
    assert_close(in_16_bits, want, "bfloat16")


@pytest.mark.parametrize("form", [Form("recurrent", None), DEFAULT], ids=str)
@kinds
def test_memory_of_the_gradient(form, kind):
    """Linear in T, with no [T, C, F] or [T, F, E] numbers at once, and a program that does not grow."""
    dim = 32

    def gradient(length):
        tokens = jax.ShapeDtypeStruct((1, length, 1, dim), jnp.float32)
        log_decay = tokens if kind == "feature" else jax.ShapeDtypeStruct((1, length, 1), jnp.float32)
        call = functools.partial(linear_attention, is_causal=True, **form.options())
        loss = lambda q, k, v, log_decay: jnp.sum(call(q, k, v, log_decay=log_decay))
        return jax.grad(loss, (0, 1, 2, 3)), (tokens, tokens, tokens, log_decay)

    size_at, grown = {}, {}
    for length in (2048, 8192):
        function, arguments = gradient(length)
        size_at[length] = jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes
        grown[length] = program_size(function, *arguments)
        assert largest_array(function, *arguments) <= length * dim * 4
    assert size_at[8192] <= 4.2 * size_at[2048]
    assert size_at[8192] < 8192 * dim * dim * 4 / 2
    assert grown[2048] == grown[8192]


ERRORS = [
    ("rank", lambda q: {"log_decay": np.zeros((2, 6), np.float32)}, ["log_decay", "(2, 6)", "[N] = (3,)"]),
    ("heads", lambda q: {"log_decay": np.zeros((2, 6, 2), np.float32)}, ["log_decay", "(2, 6, 2)", "[B, T, N]"]),
    ("features", lambda q: {"log_decay": np.zeros((2, 6, 3, 5), np.float32)}, ["log_decay", "(2, 6, 3, 5)", "F = 2"]),
    ("dtype", lambda q: {"log_decay": np.zeros(3, int)}, ["log_decay", "int64", "floating-point"]),
    ("a number", lambda q: {"log_decay": -0.1}, ["log_decay", "float", "[N]"]),
    ("both ways", lambda q: {"log_decay": np.zeros(3, np.float32), "is_causal": False}, ["log_decay", "is_causal=True"]),
]


@pytest.mark.parametrize(("make", "words"), [error[1:] for error in ERRORS], ids=[error[0] for error in ERRORS])
def test_messages(make, words):
    (q,) = normal(0, (2, 6, 3, 2))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        linear_attention(q, q, q, **{"is_causal": True, **make(q)})
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("by", "form"),
    [*(("segments", form) for form in ONE_OF_EACH), ("minus_infinity", Form("chunked", 2))],
    ids=str,
)
@kinds
def test_what_comes_after_a_restart_does_not_reach_what_comes_before(kind, by, form):
    """In the decay's gradient: a loss 10⁶ times as heavy there leaves no rounding error here, and an overflow no NaN."""
    length, half = 24, 11
    q, k, v = map(jnp.asarray, normal(3, *[(1, length, 2, 4)] * 3))
    log_decay = jnp.asarray(gates("sigmoid", kind, 1, length, 2, 4, dtype=np.float32))
    if by == "minus_infinity":
        log_decay = log_decay.at[:, half].set(-jnp.inf)
    segment_ids = jnp.asarray(np.arange(length) >= half, jnp.int32)[None] if by == "segments" else None

    @jax.jit
    def gradient(weights, v):
        def loss(log_decay):
            options = {"is_causal": True, "normalize": False, "segment_ids": segment_ids, **form.options()}
            return jnp.sum(weights[None, :, None, None] * linear_attention(q, k, v, log_decay=log_decay, **options) ** 2)

        return jax.grad(loss)(log_decay)[:, :half]

    before = jnp.asarray(np.arange(length) < half, jnp.float32)
    alone = gradient(before, v)
    np.testing.assert_allclose(
        gradient(before + 1e6 * (1 - before), v), alone, rtol=1e-5, atol=1e-6 * np.max(np.abs(alone))
    )
    np.testing.assert_array_equal(gradient(before + (1 - before), v.at[:, half + 1].set(1e25)), alone)


@kinds
def test_a_nan_is_causal(kind):
    q, k, v = map(jnp.asarray, normal(3, *[(1, 9, 2, 4)] * 3))
    log_decay = jnp.asarray(gates("sigmoid", kind, 1, 9, 2, 4, dtype=np.float32))
    attend = jax.jit(lambda log_decay: linear_attention(q, k, v, is_causal=True, log_decay=log_decay, chunk_size=8))
    np.testing.assert_array_equal(attend(log_decay.at[:, 6].set(jnp.nan))[:, :6], attend(log_decay)[:, :6])

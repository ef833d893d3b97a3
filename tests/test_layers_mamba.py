"""Mamba-2's mixer and Based's two kinds of attention, against loops over time written from their papers."""

import functools
import math

import jax
import jax.numpy as jnp
import layer_checks
import numpy as np
import pytest
from flax import nnx
from layer_checks import FEATURES, HEADS, call, inputs, quick_normal
from tolerance import assert_close, relative_rms

from jax_linattn.layers.based import BasedLinearAttention, SlidingWindowAttention
from jax_linattn.layers.mamba2 import Mamba2

STATE_DIM, WINDOW = 3, 4


def moved(module):
    """The layer with every vector drawn anew: neither a bias nor a gain hides by being 0 or 1."""
    params = nnx.state(module, nnx.Param)
    rng = np.random.default_rng(1)
    draw = lambda p: p if p.ndim > 1 else p + jnp.asarray(0.5 * rng.standard_normal(p.shape), p.dtype)
    nnx.update(module, jax.tree.map(draw, params))
    return module


def layer(kind, *, heads: int = HEADS, **options):
    return moved(kind(FEATURES, heads, kernel_init=quick_normal, rngs=nnx.Rngs(0), **options))


def silu(x):
    return x / (1 + np.exp(-x))


def by_hand_mamba2(params, x, *, groups: int, limit=(0.0, math.inf)):
    """One sequence through published weights, in PyTorch's layout."""
    weights = published(params)
    num_heads = len(weights["A_log"])
    inner = len(weights["norm.weight"])
    head_dim, state_dim = inner // num_heads, STATE_DIM
    taps = weights["conv1d.weight"][:, 0]  # [channels, W]
    seen, output = [np.zeros(len(taps))] * (taps.shape[1] - 1), []
    state = np.zeros((num_heads, head_dim, state_dim))
    for u in x:
        projected = weights["in_proj.weight"] @ u + weights.get("in_proj.bias", 0)
        z, channels, dt = np.split(projected, [inner, len(projected) - num_heads])
        seen.append(channels)
        mixed = silu(sum(taps[:, -1 - j] * seen[-1 - j] for j in range(taps.shape[1])) + weights["conv1d.bias"])
        value, key, query = np.split(mixed, [inner, inner + groups * state_dim])
        y = np.zeros((num_heads, head_dim))
        for n in range(num_heads):
            group = slice((n * groups // num_heads) * state_dim, (n * groups // num_heads + 1) * state_dim)
            v = value[n * head_dim : (n + 1) * head_dim]
            step = np.clip(np.log1p(np.exp(dt[n] + weights["dt_bias"][n])), *limit)
            state[n] = np.exp(-step * np.exp(weights["A_log"][n])) * state[n] + step * np.outer(v, key[group])
            y[n] = state[n] @ query[group] + weights["D"][n] * v
        gated = (y.ravel() * silu(z)).reshape(groups, -1)
        normed = gated / np.sqrt(np.mean(gated**2, axis=1, keepdims=True) + 1e-5)
        output.append(
            weights["out_proj.weight"] @ (normed.ravel() * weights["norm.weight"]) + weights.get("out_proj.bias", 0)
        )
    return np.stack(output)


def published(params) -> dict:
    """Our parameters under the names and in the layout of `Mamba2Mixer`, as the layer's docstring says."""
    names = {"in_proj.bias": ("in_proj", "bias"), "out_proj.bias": ("out_proj", "bias"), "norm.weight": ("norm", "scale")}
    weights = {name: params[outer][inner] for name, (outer, inner) in names.items() if inner in params[outer]}
    return weights | {
        "in_proj.weight": params["in_proj"]["kernel"].T,
        "out_proj.weight": params["out_proj"]["kernel"].T,
        "conv1d.weight": params["convolution"]["kernel"].T[:, None],
        "conv1d.bias": params["convolution"]["bias"],
        **{name: params[name] for name in ("dt_bias", "A_log", "D")},
    }


def by_hand_attention(params, x, weigh):
    """One sequence; `weigh(t, s, logit)` is the weight of the key at s for the query at t, before they are normalised."""
    query, key, value = (
        np.einsum("tf,fhd->thd", x, params[name]["kernel"]) + params[name].get("bias", 0)
        for name in ("query", "key", "value")
    )
    output = np.zeros((len(x), FEATURES))
    for t in range(len(x)):
        for h in range(query.shape[1]):
            logits = [query[t, h] @ key[s, h] / query.shape[-1] ** 0.5 for s in range(t + 1)]
            weights = np.array([weigh(t, s, logit) for s, logit in enumerate(logits)])
            output[t] += weights @ value[: t + 1, h] / weights.sum() @ params["out"]["kernel"][h]
    return output + params["out"].get("bias", 0)


def exp_in_window(t, s, logit, window=WINDOW):
    return np.exp(logit) if t - s < window else 0.0


def exp_to_second_order(t, s, logit):
    return 1 + logit + logit**2 / 2


MAMBA2 = {"state_dim": STATE_DIM, "head_dim": 5}
# Name to (make, reference).
LAYERS = {
    "mamba2": (
        functools.partial(layer, Mamba2, heads=4, num_groups=2, use_bias=True, **MAMBA2),
        functools.partial(by_hand_mamba2, groups=2),
    ),
    "window": (
        functools.partial(layer, SlidingWindowAttention, window=WINDOW),
        functools.partial(by_hand_attention, weigh=exp_in_window),
    ),
    "based": (
        functools.partial(layer, BasedLinearAttention, feature_dim=3),
        functools.partial(by_hand_attention, weigh=exp_to_second_order),
    ),
}
all_layers = pytest.mark.parametrize("name", LAYERS)


@all_layers
def test_values(name):
    layer_checks.check_values(*LAYERS[name])


@all_layers
def test_decoding(name):
    layer_checks.check_decoding(LAYERS[name][0])


@all_layers
def test_pads(name):
    layer_checks.check_pads(LAYERS[name][0])


@all_layers
def test_segments(name):
    layer_checks.check_segments(LAYERS[name][0])


@all_layers
def test_gradients(name):
    layer_checks.check_gradients(LAYERS[name][0])


@all_layers
def test_bfloat16(name):
    layer_checks.check_bfloat16(LAYERS[name][0])


def test_mamba2_clips_its_step_sizes():
    limit = (0.3, 0.8)
    module, x = layer(Mamba2, dt_limit=limit, **MAMBA2), inputs(1, 5)
    params = layer_checks.params_of(module)
    expected = by_hand_mamba2(params, x[0].astype(np.float64), groups=1, limit=limit)
    assert_close(call(module, x)[0], expected)
    assert relative_rms(expected, by_hand_mamba2(params, x[0].astype(np.float64), groups=1)) > 0.01, "nothing was clipped"


def test_mamba2_starts_as_published():
    module = Mamba2(8, 512, head_dim=1, state_dim=1, kernel_init=quick_normal, rngs=nnx.Rngs(0))
    rates, steps = np.exp(module.A_log[...]), np.log1p(np.exp(module.dt_bias[...]))
    assert rates.min() >= 1
    assert rates.max() <= 16 * 1.001
    assert abs(rates.mean() - 8.5) < 0.7
    assert steps.min() >= 0.999e-3
    assert steps.max() <= 0.1001
    assert abs(np.log(steps).mean() - np.log(1e-2)) < 0.2
    assert np.all(module.D[...] == 1)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8])
def test_windows_of_any_length(length):
    """Shorter than the window, as long, longer, and twice as long: one rule."""
    module = layer(SlidingWindowAttention, window=WINDOW, use_bias=True)
    x = inputs(1, length)
    output = call(module, x)
    expected = by_hand_attention(layer_checks.params_of(module), x[0].astype(np.float64), exp_in_window)
    assert_close(output[0], expected.astype(np.float32), floor=1e-6)


def test_a_cache_of_constant_size_outlasts_the_window():
    """Prompts of every length, with pads, one after another; the window reaches over calls and over pads."""
    module = layer(SlidingWindowAttention, window=WINDOW)
    x = inputs(2, 17)
    whole = call(module, x)
    module.init_cache(x.shape)
    begin, outputs = 0, []
    for length in (1, 6, 2, 0, 4, 4):
        part, mask = np.full((2, length + 2, FEATURES), np.nan, np.float32), np.ones((2, length + 2), bool)
        mask[0, :2] = mask[1, [0, -1]] = False
        part[mask] = x[:, begin : begin + length].reshape(-1, FEATURES)
        outputs.append(call(module, part, mask=mask, decode=True)[mask].reshape(2, length, FEATURES))
        begin += length
        assert module.cached_key.shape == (2, WINDOW, HEADS, FEATURES // HEADS)
    assert_close(np.concatenate(outputs, axis=1), whole)


def test_a_window_forms_no_square_of_the_length():
    """The largest array of a training step grows with T, not with T²."""
    module = layer(SlidingWindowAttention, window=16)
    graphdef, params = nnx.split(module)

    def largest(length):
        gradient = jax.grad(lambda params, x: nnx.merge(graphdef, params)(x).sum())
        equations = jax.make_jaxpr(gradient)(params, jnp.zeros((1, length, FEATURES))).eqns
        return max(math.prod(v.aval.shape) for equation in equations for v in equation.outvars)

    assert largest(4096) <= 2 * largest(2048) <= 4096 * HEADS * 2 * 16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layer(Mamba2, heads=3), "num_heads must divide 2 · features = 16, got 3"),
        (lambda: layer(Mamba2, heads=4, num_groups=3), "num_groups must divide num_heads = 4, got 3"),
        (lambda: layer(Mamba2, dt_limit=(1.0, 0.5)), r"dt_limit must be \(least, most\) .* got \(1.0, 0.5\)"),
        (lambda: layer(Mamba2, dt_range=(0, 1)), r"dt_range must be \(least, most\) .* got \(0, 1\)"),
        (lambda: layer(Mamba2, state_dim=0), "state_dim must be a positive whole number"),
        (lambda: layer(SlidingWindowAttention, window=0), "window must be a positive whole number"),
        (lambda: layer(SlidingWindowAttention, heads=3), "features must be divisible by num_heads = 3, got 8"),
        (lambda: layer(BasedLinearAttention, feature_dim=0), "feature_dim must be a positive whole number"),
    ],
)
def test_errors_of_constructors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@all_layers
def test_errors_of_calls(name):
    module, x = LAYERS[name][0](), inputs(2, 3)
    with pytest.raises(ValueError, match=r"x must be \[B, T, features\]"):
        module(x[..., :5])
    with pytest.raises(ValueError, match="mask must be bool"):
        module(x, mask=jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="call init_cache"):
        module(x, decode=True)
    module.init_cache(x.shape)
    with pytest.raises(ValueError, match="segment_ids cannot be used with decode=True"):
        module(x, segment_ids=jnp.zeros((2, 3), int), decode=True)
    with pytest.raises(ValueError, match=r"segment_ids must be an integer array|segment_ids must be int"):
        module(x, segment_ids=jnp.zeros((2, 4), int))

"""The layers with a decay: RetNet, Lightning attention, GLA, HGRN2, each against its paper in NumPy."""

import jax
import jax.numpy as jnp
import layer_checks
import numpy as np
import pytest
from flax import nnx
from layer_checks import FEATURES, HEADS, LENGTH, call, inputs, params_of, quick_normal
from tolerance import assert_close

from jax_linattn.layers.gla import GatedLinearAttention
from jax_linattn.layers.hgrn2 import HGRN2, log_forget, lower_bounds
from jax_linattn.layers.lightning import LightningAttention, minimax_decay
from jax_linattn.layers.retnet import MultiScaleRetention
from jax_linattn.layers.rotary import rotate

EPSILON = 1e-6
BOUND = np.linspace(0, 0.9, FEATURES)  # of HGRN2; the first feature has none


def maker(cls, **attributes):
    def make(**options):
        module = cls(FEATURES, HEADS, kernel_init=quick_normal, rngs=nnx.Rngs(1), **{**attributes, **options})
        if hasattr(module, "norm"):
            scale = module.norm.scale
            scale[...] = jnp.linspace(0.5, 1.5, scale.size).astype(scale.dtype)
        return module

    return make


# --- the papers -------------------------------------------------------------------------------------------------------


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def swish(x):
    return x * sigmoid(x)


def rms_norm(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPSILON) * scale


def project(params, name, x):
    return x @ params[name]["kernel"] + params[name].get("bias", 0)


def recurrence(query, key, value, decay):
    """One head: query, key, decay [T, D], value [T, E] -> [T, E]."""
    state, outputs = np.zeros((key.shape[1], value.shape[1])), []
    for q, k, v, a in zip(query, key, value, decay, strict=True):
        state = a[:, None] * state + np.outer(k, v)
        outputs.append(q @ state)
    return np.stack(outputs)


def heads_of(x):
    return np.split(x, HEADS, axis=-1)


def retnet(params, x, rotary=True):
    query, key, value = (project(params, name, x) for name in ("query", "key", "value"))
    outputs = []
    for h, (q, k, v) in enumerate(zip(*map(heads_of, (query, key, value)), strict=True)):
        dim = q.shape[-1]
        if rotary:  # complex numbers, as the paper writes it
            theta = 10000 ** -np.linspace(0, 1, dim // 2)
            turn = np.exp(1j * np.arange(len(x))[:, None] * theta)
            turned = [(y[:, ::2] + 1j * y[:, 1::2]) * turn for y in (q, k)]
            q, k = (np.concatenate([y.real, y.imag], axis=-1) for y in turned)
        o = recurrence(q / np.sqrt(dim), k, v, np.full(k.shape, 1 - 2.0 ** (-5 - h)))
        mean, variance = o.mean(axis=-1, keepdims=True), o.var(axis=-1, keepdims=True)
        outputs.append((o - mean) / np.sqrt(variance + EPSILON))
    gate = swish(project(params, "gate", x))
    return project(params, "out", (gate * np.concatenate(outputs, axis=-1)))


def lightning(params, x, layer=1, num_layers=3):
    query, key, value = (swish(project(params, name, x)) for name in ("query", "key", "value"))
    outputs = []
    for h, (q, k, v) in enumerate(zip(*map(heads_of, (query, key, value)), strict=True)):
        decay = np.exp(-8 / HEADS * (1 - layer / num_layers) * h)
        outputs.append(recurrence(q, k, v, np.full(k.shape, decay)))
    output = rms_norm(np.concatenate(outputs, axis=-1), params["norm"]["scale"])
    return project(params, "out", (sigmoid(project(params, "gate", x)) * output))


def gla(params, x):
    query, key, value = (project(params, name, x) for name in ("query", "key", "value"))
    logits = project(params, "decay_up", project(params, "decay_down", x))
    decay = sigmoid(logits) ** (1 / 16)
    outputs = [
        rms_norm(recurrence(q / np.sqrt(q.shape[-1]), k, v, a), params["norm"]["scale"])
        for q, k, v, a in zip(*map(heads_of, (query, key, value, decay)), strict=True)
    ]
    gate = swish(project(params, "gate", x))
    return project(params, "out", (gate * np.concatenate(outputs, axis=-1)))


def hgrn2(params, x):
    query, value = swish(project(params, "query", x)), project(params, "value", x)
    forget = BOUND + (1 - BOUND) * sigmoid(project(params, "forget", x))
    per_head = zip(*map(heads_of, (query, 1 - forget, value, forget)), strict=True)
    output = np.concatenate([recurrence(*head) for head in per_head], axis=-1)
    return project(params, "out", rms_norm(output, params["norm"]["scale"]))


# --- what every layer is held to --------------------------------------------------------------------------------------

LAYERS = {
    "retnet": (maker(MultiScaleRetention, value_features=2 * FEATURES), retnet),
    "lightning": (maker(LightningAttention, layer=1, num_layers=3), lightning),
    "gla": (maker(GatedLinearAttention, bias_init=quick_normal), gla),
    "hgrn2": (maker(HGRN2, lower_bound=BOUND), hgrn2),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


@every_layer
def test_paper(name):
    layer_checks.check_values(*LAYERS[name])


@every_layer
@pytest.mark.parametrize("subject", ["decoding", "pads", "segments", "empty", "gradients", "bfloat16"])
def test_situations(name, subject):
    getattr(layer_checks, f"check_{subject}")(LAYERS[name][0])


@pytest.mark.parametrize(
    ("cls", "attributes", "named"),
    [
        *[(cls, {"num_heads": 3}, "num_heads") for cls in (MultiScaleRetention, LightningAttention, HGRN2)],
        *[(cls, {"num_heads": 0}, "num_heads") for cls in (MultiScaleRetention, GatedLinearAttention)],
        *[(cls, {"implementation": "fast"}, "implementation") for cls in (MultiScaleRetention, HGRN2)],
        *[(cls, {"chunk_size": 0}, "chunk_size") for cls in (LightningAttention, GatedLinearAttention)],
        (MultiScaleRetention, {"value_features": 9}, "value_features"),
        (MultiScaleRetention, {"num_heads": 8}, "even"),
        (MultiScaleRetention, {"rotary": 1}, "rotary"),
        (LightningAttention, {"layer": 3, "num_layers": 3}, "layer"),
        (LightningAttention, {"decay": np.zeros(3)}, "decay"),
        (LightningAttention, {"decay": np.ones(2)}, "decay"),
        (LightningAttention, {"head_dim": 0}, "head_dim"),
        (GatedLinearAttention, {"key_features": 3}, "key_features"),
        (GatedLinearAttention, {"gate_rank": 0}, "gate_rank"),
        (GatedLinearAttention, {"gate_temperature": 0}, "gate_temperature"),
        (HGRN2, {"lower_bound": 1.0}, "lower_bound"),
        (HGRN2, {"lower_bound": np.zeros(3)}, "lower_bound"),
    ],
)
def test_wrong_constructions(cls, attributes, named):
    with pytest.raises(ValueError, match=named):
        cls(**{"features": FEATURES, "num_heads": HEADS, "rngs": nnx.Rngs(0), **attributes})


@every_layer
def test_wrong_calls(name):
    module, x = LAYERS[name][0](), jnp.asarray(inputs(2, 3))
    with pytest.raises(ValueError, match="init_cache"):
        module(x, decode=True)
    module.init_cache((2, 3, FEATURES))
    for wrong, kwargs, match in [
        (x[0], {}, "x must be"),
        (x[..., :3], {}, "features"),
        (x, {"mask": jnp.ones((2, 2), bool)}, "mask"),
        (x, {"mask": jnp.ones((2, 3))}, "mask"),
        (x, {"segment_ids": jnp.zeros((2, 2), int)}, "segment_ids"),
        (x, {"segment_ids": jnp.zeros((2, 3), int), "decode": True}, "segment_ids"),
        (x[:1], {"decode": True}, "batch"),
    ]:
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(lambda x, kwargs=kwargs: module(x, **kwargs), wrong)  # nothing is computed


# --- RetNet -----------------------------------------------------------------------------------------------------------


def test_retention_without_rotary():
    module, x = maker(MultiScaleRetention, rotary=False)(), inputs(1, LENGTH)
    assert_close(call(module, x)[0], retnet(params_of(module), x[0].astype(np.float64), rotary=False))


def test_rotation_is_exact_at_any_place():
    """What a million tokens precede is turned as exactly as what none does."""
    (query, key), places, angles = inputs(2, 1, 1, 4), jnp.array([[0, 1, 500, 3000]]), 10000.0 ** -np.linspace(0, 1, 4)

    def products(start):
        turned = [rotate(jnp.asarray(x)[:, :, None, :], places + start, angles) for x in (query[0], key[0])]
        return np.einsum("btgd,bsgd->ts", *map(np.asarray, turned))

    assert_close(products(10_000_000), products(0), what="far from the start")
    turn = np.exp(1j * np.asarray(places)[0][:, None] * angles)
    q, k = ((x[0, 0, :, ::2] + 1j * x[0, 0, :, 1::2]) * turn for x in (query, key))
    assert_close(products(0), np.real(q @ k.conj().T), np.float32)


# --- Lightning attention ----------------------------------------------------------------------------------------------


def minimax(params, x, layer, num_layers):
    """MiniMax's layer from its own weights, [outputs, inputs]: a decoding step a token."""
    qkv = swish(params["qkv_proj"] @ x.T).T.reshape(len(x), HEADS, 3, -1)
    outputs = []
    for h in range(HEADS):
        slope = (1 / 2 ** (8 / HEADS)) ** (h + 1) * (1 - layer / (num_layers - 1 + 1e-5) + 1e-5)
        q, k, v = (qkv[:, h, i] for i in range(3))
        outputs.append(recurrence(q, k, v, np.full(k.shape, np.exp(-slope))))
    output = rms_norm(np.concatenate(outputs, axis=-1), params["norm"])
    return (sigmoid(x @ params["output_gate"].T) * output) @ params["out_proj"].T


def test_minimax_weights():
    dim, rng = 3, np.random.default_rng(0)
    shapes = {"qkv_proj": (HEADS * 3 * dim, FEATURES), "output_gate": (HEADS * dim, FEATURES)}
    shapes |= {"out_proj": (FEATURES, HEADS * dim), "norm": (HEADS * dim,)}
    theirs = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    make = maker(LightningAttention, head_dim=dim, decay=minimax_decay(HEADS, 2, 5))
    module, x = make(), inputs(1, LENGTH)
    qkv = theirs["qkv_proj"].reshape(HEADS, 3, dim, FEATURES)
    for i, projection in enumerate((module.query, module.key, module.value)):
        projection.kernel[...] = jnp.asarray(qkv[:, i].reshape(HEADS * dim, FEATURES).T)
    module.gate.kernel[...] = jnp.asarray(theirs["output_gate"].T)
    module.norm.scale[...] = jnp.asarray(theirs["norm"])
    module.out.kernel[...] = jnp.asarray(theirs["out_proj"].T)
    expected = minimax({name: w.astype(np.float64) for name, w in theirs.items()}, x[0].astype(np.float64), 2, 5)
    assert_close(call(module, x)[0], expected, np.float32)


# --- HGRN2 ------------------------------------------------------------------------------------------------------------


def test_lower_bounds():
    logits = inputs(3)
    shares = np.exp(logits) / np.exp(logits).sum(axis=0)
    assert_close(lower_bounds(jnp.asarray(logits)), np.stack([0 * shares[0], shares[1], shares[1] + shares[2]]))
    with pytest.raises(ValueError, match="logits"):
        lower_bounds(jnp.zeros(3))


def test_learned_bounds_take_part():
    """A bound given with the call is the constructor's, and its parameters have gradients; layer 0's bound stays 0."""
    module, x = maker(HGRN2, lower_bound=BOUND)(), jnp.asarray(inputs(2, LENGTH))
    graphdef, state = nnx.split(module)

    @jax.jit
    def output_and_gradient(logits):
        def loss(logits):
            bounds = lower_bounds(logits)
            outputs = [nnx.merge(graphdef, state)(x, lower_bound=bound) for bound in bounds]
            return jnp.sum(jnp.sin(jnp.stack(outputs))), outputs

        return jax.grad(loss, has_aux=True)(logits)

    logits = jnp.asarray(inputs(2))
    gradient, outputs = output_and_gradient(logits)
    bound = np.asarray(lower_bounds(logits)[1])
    assert_close(outputs[0], call(maker(HGRN2, lower_bound=0 * bound)(), x))
    assert_close(outputs[1], call(maker(HGRN2, lower_bound=bound)(), x))
    assert np.all(np.isfinite(gradient))
    assert np.all(np.asarray(gradient) != 0)


def test_log_forget_is_exact():
    """To a few ulp, and with finite gradients, where gates are open to 1e-30, shut to e^-300, and without a bound."""
    z, bound = np.meshgrid([-300, -90, -20, -3, -0.1, 0, 0.7, 5, 20, 60], [0, 1e-30, 1e-4, 0.3, 0.5, 0.9, 0.9999])
    z, bound = (x.ravel().astype(np.float32) for x in (z, bound))
    wide_z, wide_bound = z.astype(np.longdouble), bound.astype(np.longdouble)
    shut, opened = 1 / (1 + np.exp(wide_z)), 1 / (1 + np.exp(-wide_z))  # 1 - sigmoid, sigmoid
    forget = opened + wide_bound * shut
    forgotten = (1 - wide_bound) * shut
    expected = np.where(forget < 0.5, np.log(forget), np.log1p(-np.minimum(forgotten, 0.5)))
    by_logit, by_bound = (1 - wide_bound) * shut * opened / forget, shut / forget
    with jax.debug_nans(True):
        log_f, pull = jax.vjp(log_forget, jnp.asarray(z), jnp.asarray(bound))
        gradients = pull(jnp.ones_like(log_f))
    np.testing.assert_allclose(np.asarray(log_f), expected.astype(np.float64), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(gradients[0]), by_logit.astype(np.float64), rtol=1e-5, atol=1e-37)
    small = by_bound < 1e30
    np.testing.assert_allclose(np.asarray(gradients[1])[small], by_bound[small].astype(np.float64), rtol=1e-5, atol=1e-37)

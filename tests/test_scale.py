"""Exponential maps with a running scale: keys of any size, exact in every form, strictly causal.

Field cases 17 (a maximum over later keys), 38 (keys that grow by 20 a step).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import CAUSAL_FORMS, ONE_OF_EACH, Form
from harness import normal, x64
from tolerance import assert_close, relative_rms

from jax_linattn import attention_weights, causal_linear_attention, feature_maps, linear_attention, linear_attention_step

BATCH, LENGTH, HEADS, DIM = 1, 8, 2, 3
SLOPES = {
    "grow": np.linspace(20, 160, LENGTH),
    "fall": np.linspace(160, 20, LENGTH),
    "small": np.linspace(-300, -200, LENGTH),
    "cliff": np.repeat(
        [300, 0], LENGTH // 2
    ),  # beside the first half the second is nothing, but not in a segment of its own
}
slopes = pytest.mark.parametrize("slope", SLOPES)


def _tokens(slope, seed=0):
    q, k, v = normal(seed, *[(BATCH, LENGTH, HEADS, DIM)] * 3)
    return q, (k + SLOPES[slope][None, :, None, None]).astype(np.float32), v


def _want(q, k, v, log_decay=0.0):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    heads = [oracle.exponential(q[0, :, h], k[0, :, h], v[0, :, h], log_decay) for h in range(HEADS)]
    return np.stack(heads, axis=1)[None]


@pytest.mark.parametrize("form", CAUSAL_FORMS, ids=str)
def test_keys_of_any_size(form):
    attend = jax.jit(
        lambda q, k, v: linear_attention(q, k, v, feature_map=feature_maps.exp, is_causal=True, **form.options())
    )
    for slope in SLOPES:
        q, k, v = _tokens(slope)
        assert relative_rms(attend(q, k, v), _want(q, k, v)) <= 2e-4, slope
        assert relative_rms(attend(q + 200, k, v), _want(q + 200, k, v)) <= 2e-4, slope


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=str)
@pytest.mark.parametrize("kind", ["head", "feature"])
def test_with_decay(form, kind):
    log_decay = np.full((HEADS,), -3, np.float32)
    if kind == "feature":
        log_decay = np.full((BATCH, LENGTH, HEADS, DIM), -3, np.float32)
    options = {"feature_map": feature_maps.exp, "is_causal": True, "log_decay": log_decay, **form.options()}
    attend = jax.jit(lambda q, k, v: linear_attention(q, k, v, **options))
    for slope in SLOPES:
        q, k, v = _tokens(slope)
        assert relative_rms(attend(q, k, v), _want(q, k, v, -3.0)) <= 2e-4, slope


attend = jax.jit(lambda q, k, v, mask: causal_linear_attention(q, k, v, mask=mask, feature_map=feature_maps.exp))
step = jax.jit(lambda *args, mask: linear_attention_step(*args, mask=mask, feature_map=feature_maps.exp))


@functools.partial(jax.jit, static_argnums=5)
def packed_attention(q, k, v, mask, ids, form):
    options = {"mask": mask, "segment_ids": ids, "feature_map": feature_maps.exp, **form.options()}
    return linear_attention(q, k, v, is_causal=True, **options)


@slopes
def test_splits_and_steps(slope):
    """The state carries its scale: a prompt, then tokens; with a masked token and a segment between."""
    q, k, v = _tokens(slope)
    mask = np.ones((BATCH, LENGTH), bool)
    mask[0, [0, 5]] = False
    k[0, 5] = np.nan
    whole_state, whole = attend(q, k, v, mask=mask)
    state, first = attend(q[:, :4], k[:, :4], v[:, :4], mask=mask[:, :4])
    outputs = [first]
    for t in range(4, LENGTH):
        state, output = step(state, q[:, t], k[:, t], v[:, t], mask=mask[:, t])
        outputs.append(output[:, None])
    assert relative_rms(jnp.concatenate(outputs, axis=1), whole) <= 2e-4
    np.testing.assert_allclose(state.log_scale, whole_state.log_scale, rtol=1e-6)
    assert relative_rms(state.kv, whole_state.kv) <= 2e-4
    ids = np.repeat([[0, 1]], LENGTH // 2, axis=1)
    _, apart = attend(q[:, 4:], k[:, 4:], v[:, 4:], mask=mask[:, 4:])
    for form in ONE_OF_EACH[1:]:
        packed = packed_attention(q, k, v, mask, ids, form)
        assert relative_rms(packed[:, 4:], apart) <= 2e-4


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=str)
def test_a_later_key_changes_no_bit(form):
    q, k, v = _tokens("grow")
    other = k.copy()
    other[:, 5:] *= 1000
    attend = jax.jit(lambda k: linear_attention(q, k, v, feature_map=feature_maps.exp, is_causal=True, **form.options()))
    np.testing.assert_array_equal(attend(k)[:, :5], attend(other)[:, :5])


@pytest.mark.parametrize("form", [Form("quadratic", None), Form("chunked", 1)], ids=str)
def test_both_ways(form):
    """Not causal: every query sees all keys; the last causal row is the same."""
    run = jax.jit(lambda *args: linear_attention(*args, feature_map=feature_maps.exp, **form.options()))
    for slope in SLOPES:
        q, k, v = _tokens(slope)
        last = np.broadcast_to(q[:, -1:], q.shape)
        want = np.broadcast_to(_want(last, k, v)[:, -1:], v.shape)
        assert relative_rms(run(last, k, v), want) <= 2e-4
    weights = attention_weights(q, k, feature_map=feature_maps.exp)
    assert_close(jnp.sum(weights, axis=-1), np.ones(weights.shape[:-1]), "float32")


@pytest.mark.parametrize("kind", ["positive", "hyperbolic"])
def test_random_features(kind):
    """FAVOR+ of keys with |x|² / (2√D) far beyond 88: float32 agrees with float64, in values and gradients."""
    with x64():
        random_map = feature_maps.favor_plus(jax.random.key(0), DIM, 16, kind=kind, dtype=jnp.float64)
    q, k, v, w = (x.astype(np.float64) for x in normal(1, *[(BATCH, LENGTH, HEADS, DIM)] * 4))
    k = k * np.linspace(1, 15, LENGTH)[:, None, None]

    @jax.jit
    def run(random_map, q, k, v, w):
        attend = lambda q, k, v: linear_attention(q, k, v, feature_map=random_map, is_causal=True, implementation="chunked")
        output, pullback = jax.vjp(attend, q, k, v)
        return output, pullback(w)

    with x64():
        want = run(random_map, *map(jnp.asarray, (q, k, v, w)))
    got = run(
        jax.tree.map(lambda x: x.astype(jnp.float32), random_map), *(jnp.asarray(x, jnp.float32) for x in (q, k, v, w))
    )
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_rms(x, y) <= 2e-4


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=str)
def test_gradients(form):
    """Of keys above 88, in float32 against float64, and through a state with its scale."""
    q, k, v = normal(2, *[(BATCH, LENGTH, HEADS, DIM)] * 3)
    k = k + np.linspace(100, 104, LENGTH, dtype=np.float32)[:, None, None]  # where earlier keys still count

    def loss(q, k, v):
        state, first = causal_linear_attention(q[:, :3], k[:, :3], v[:, :3], feature_map=feature_maps.exp, **form.options())
        _, rest = causal_linear_attention(
            q[:, 3:], k[:, 3:], v[:, 3:], state=state, feature_map=feature_maps.exp, **form.options()
        )
        return jnp.sum(jnp.sin(first)) + jnp.sum(jnp.sin(rest))

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    with x64():
        want = jax.jit(
            jax.grad(
                lambda *args: jnp.sum(
                    jnp.sin(
                        linear_attention(*args, feature_map=feature_maps.exp, is_causal=True, implementation="recurrent")
                    )
                ),
                (0, 1, 2),
            )
        )(*(jnp.asarray(x, jnp.float64) for x in (q, k, v)))
    for x, y in zip(gradient(q, k, v), want, strict=True):
        assert relative_rms(x, y) <= 2e-4


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=str)
def test_eps_and_no_normalizer(form):
    """eps is added to the true denominator, and an output without one has the true size."""
    q, k, v = normal(3, *[(BATCH, LENGTH, HEADS, DIM)] * 3)
    phi = lambda x: np.exp(x.astype(np.float64))
    weights = np.tril(np.einsum("bthf,bshf->bhts", phi(q), phi(k)))
    numerator = np.einsum("bhts,bshe->bthe", weights, v.astype(np.float64))
    denominator = weights.sum(axis=-1).transpose(0, 2, 1)[..., None] + 0.7
    options = {"feature_map": feature_maps.exp, "is_causal": True, **form.options()}

    @jax.jit
    def run(q, k, v):
        unnormalized = linear_attention(q, k, v, normalize=False, scale=2.0, **options)
        return linear_attention(q, k, v, eps=0.7, **options), unnormalized

    with_eps, unnormalized = run(q, k, v)
    assert_close(with_eps, numerator / denominator)
    assert_close(unnormalized, 2 * numerator)

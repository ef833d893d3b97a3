"""Inside `shard_map`, over batch and heads, every form is what it is outside; the state is a carry there.

Eight virtual devices of one CPU (see conftest). Field case 42.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ONE_OF_EACH, Form
from harness import normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tolerance import assert_close

from jax_linattn import (
    LinearAttentionState,
    causal_linear_attention,
    feature_maps,
    init_state,
    linear_attention,
    linear_attention_step,
)

B, T, H, K, D, E = 4, 11, 4, 2, 3, 5
TOKENS = P("data", None, "model")
STATE = LinearAttentionState(P("data", "model"), P("data", "model"), P("data", "model"))
HIDING = {"mask": P("data"), "segment_ids": P("data")}


@pytest.fixture(scope="module")
def mesh():
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def _tokens():
    return [jnp.asarray(x) for x in normal(0, (B, T, H, D), (B, T, K, D), (B, T, K, E))]


def _hiding():
    rng = np.random.default_rng(1)
    ids = np.cumsum(rng.random((B, T)) < 0.2, axis=1).astype(np.int32)
    return {"mask": jnp.asarray(rng.random((B, T)) < 0.8), "segment_ids": jnp.asarray(ids)}


def _gradients_and_results(attend):
    """The gradient is taken outside of the map, through it."""

    def loss(tokens, *rest):
        results = attend(tokens, *rest)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(results)), results

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def _causal(form):
    def attend(tokens, hiding):
        state = init_state(*tokens[1:])
        return causal_linear_attention(*tokens, state=state, **hiding, **form.options())

    return attend


def _both_ways(form, segmented):
    def attend(tokens, hiding):
        hiding = hiding if segmented else {"mask": hiding["mask"]}
        return linear_attention(*tokens, **hiding, **form.options())

    return attend


@functools.cache
def _outside(is_causal, segmented=True):
    """What the quadratic form gives on one device."""
    form = Form("quadratic", None)
    attend = _causal(form) if is_causal else _both_ways(form, segmented)
    return _gradients_and_results(attend)(_tokens(), _hiding())


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=str)
def test_causal(mesh, form):
    """With an initial state made inside, a mask, segments, and gradients."""
    sharded = jax.shard_map(_causal(form), mesh=mesh, in_specs=([TOKENS] * 3, HIDING), out_specs=(STATE, TOKENS))
    jax.tree.map(assert_close, _gradients_and_results(sharded)(_tokens(), _hiding()), _outside(True))


@pytest.mark.parametrize("form", [Form("quadratic", None), Form("chunked", 1)], ids=str)
@pytest.mark.parametrize("segmented", [False, True], ids=["mask", "segments"])
def test_bidirectional(mesh, form, segmented):
    attend = _both_ways(form, segmented)
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=([TOKENS] * 3, HIDING), out_specs=TOKENS)
    jax.tree.map(assert_close, _gradients_and_results(sharded)(_tokens(), _hiding()), _outside(False, segmented))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_step_is_a_scan_body_inside(mesh, dtype):
    """The carry of `init_state` varies over the axes that its keys and values vary over."""

    def decode(tokens):
        time_first = [jnp.moveaxis(x, 1, 0) for x in tokens]
        state, outputs = jax.lax.scan(lambda s, x: linear_attention_step(s, *x), init_state(*tokens[1:]), time_first)
        return state, jnp.moveaxis(outputs, 0, 1)

    tokens = [x.astype(dtype) for x in _tokens()]
    sharded = jax.shard_map(decode, mesh=mesh, in_specs=([TOKENS] * 3,), out_specs=(STATE, TOKENS))
    got, want = (jax.jit(f)(tokens) for f in (sharded, decode))
    jax.tree.map(assert_close, got, want)


@pytest.mark.parametrize("form", [Form("recurrent", 4), Form("chunked", 2)], ids=str)
def test_what_varies_differently(mesh, form):
    """Keys split over heads only and values over the batch too; no state; a map whose leaves vary."""
    favor = feature_maps.favor_plus(jax.random.key(0), D, 4)
    projections = jnp.stack([favor.projection, 2 * favor.projection])

    def attend(query, key, value, projection):
        own = feature_maps.FavorPlus(projection[0])
        return causal_linear_attention(query, key, value, feature_map=own, **form.options())

    query, key, value = _tokens()
    key = jnp.broadcast_to(key[:1], key.shape)
    local_key = jax.shard_map(
        lambda q, k, v, p: attend(q, jnp.broadcast_to(k, (q.shape[0], *k.shape[1:])), v, p),
        mesh=mesh,
        in_specs=(TOKENS, P(None, None, "model"), TOKENS, P("model")),
        out_specs=(STATE, TOKENS),
    )
    got = jax.jit(local_key)(query, key[:1], value, projections)

    def heads(x, i):
        return x[:, :, i * x.shape[2] // 2 : (i + 1) * x.shape[2] // 2]

    halves = [jax.jit(attend)(heads(query, i), heads(key, i), heads(value, i), projections[i : i + 1]) for i in range(2)]
    for i, (state, output) in enumerate(halves):
        assert_close(heads(got[1], i), output)
        jax.tree.map(lambda a, b, i=i: assert_close(a[:, i : i + 1], b), got[0], state)


def test_automatic_sharding(mesh):
    """Without `shard_map`: sharded inputs under jit."""
    tokens = [jax.device_put(x, NamedSharding(mesh, TOKENS)) for x in _tokens()]
    attend = functools.partial(causal_linear_attention, implementation="chunked", chunk_size=2)
    got, want = jax.jit(attend)(*tokens), jax.jit(attend)(*_tokens())
    jax.tree.map(assert_close, got, want)

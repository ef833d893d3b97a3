"""Programs are compiled once a shape: under `jit`, and in calls without it.

Field case 46 (a retrace for every length; 100 decode steps).
"""

import jax
import jax.numpy as jnp
import numpy as np
from harness import count_compilations, normal

from jax_linattn import (
    FeatureMap,
    attention_weights,
    causal_linear_attention,
    feature_maps,
    init_state,
    linear_attention,
    linear_attention_step,
)

B, T, H, D, E = 1, 6, 2, 3, 4


def _tokens(seed, length=T):
    return [jnp.asarray(x) for x in normal(seed, (B, length, H, D), (B, length, H, D), (B, length, H, E))]


def test_the_counter_counts():
    function = jax.jit(lambda x: jnp.sin(x) * 3)
    assert count_compilations(function, np.ones(7, np.float32)) == 1
    assert count_compilations(function, np.zeros(7, np.float32)) == 0


def _calls():
    favor = feature_maps.favor_plus(jax.random.key(0), D, 4)
    two = lambda: FeatureMap(query=feature_maps.exp, key=feature_maps.softplus)
    mask = jnp.ones((B, T), bool)
    return {
        "linear_attention": lambda *x: linear_attention(*x),
        "chunked": lambda *x: linear_attention(*x, is_causal=True, implementation="chunked", mask=mask),
        "causal_linear_attention": lambda *x: causal_linear_attention(*x, implementation="recurrent"),
        "attention_weights": lambda q, k, v: attention_weights(q, k),
        "a map with leaves": lambda *x: linear_attention(*x, feature_map=favor),
        "two maps, made anew": lambda *x: linear_attention(*x, feature_map=two()),
        "dpfp, made anew": lambda *x: linear_attention(*x, feature_map=feature_maps.dpfp(1)),
        "a scale": lambda *x: linear_attention(*x, normalize=False, scale=0.5),
    }


def test_eager_calls_compile_once():
    for name, call in _calls().items():
        call(*_tokens(0))
        assert count_compilations(call, *_tokens(1)) == 0, name


def test_another_scale_is_no_other_program():
    call = lambda scale: linear_attention(*_tokens(0), normalize=False, scale=scale)
    assert not np.array_equal(call(0.25), call(0.125))
    assert count_compilations(call, 0.0625) == 0


def test_100_decode_steps_compile_once():
    """Jitted, and eager."""
    tokens = _tokens(0, 100)
    for step in (jax.jit(linear_attention_step), linear_attention_step):
        state = init_state(*tokens[1:])
        state, _ = step(state, *(x[:, 0] for x in tokens))
        rows = [[x[:, t] for x in tokens] for t in range(100)]

        def decode(state=state, step=step, rows=rows):
            for row in rows[1:]:
                state, _ = step(state, *row)
            return state

        assert count_compilations(decode) == 0


def test_foreign_maps_are_read_anew():
    """A map that is not ours may read what changes between calls: an eager call sees the change."""
    power = {"value": 1.0}

    def changing(x):
        return jnp.exp(x) ** power["value"]

    first = linear_attention(*_tokens(0), feature_map=changing)
    power["value"] = 2.0
    second = linear_attention(*_tokens(0), feature_map=changing)
    assert not np.array_equal(first, second)
    favor = [feature_maps.favor_plus(jax.random.key(seed), D, 4) for seed in (0, 1)]
    outputs = [linear_attention(*_tokens(0), feature_map=x) for x in favor]
    assert not np.array_equal(*outputs)

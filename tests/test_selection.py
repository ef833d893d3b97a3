"""Which form `implementation=None` is: a function of sizes alone, that can be read."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import normal
from tracing import equations, largest_array

from jax_linattn import causal_linear_attention, linear_attention, select_implementation
from jax_linattn.selection import select_chunk_size, select_chunks_per_block


def _choose(query_length, key_length=None, features=64, value_dim=64):
    return select_implementation(query_length, key_length or query_length, features, value_dim)


def test_short_is_quadratic_and_long_is_chunked():
    assert _choose(8) == "quadratic"
    assert _choose(1) == "quadratic"
    assert _choose(8, features=2, value_dim=2) == "chunked"
    for length in (129, 1000, 10**6):
        assert _choose(length, features=10**4, value_dim=10**4) == "chunked"
        assert _choose(1, length, features=10**4, value_dim=10**4) == "chunked"


def test_it_is_monotonic_and_pure():
    """Longer never turns back to quadratic; the same arguments give the same answer; the result is a known form."""
    choices = [_choose(length) for length in range(1, 400)]
    assert choices == sorted(choices, reverse=True)
    assert choices == [_choose(length) for length in range(1, 400)]
    assert set(choices) == {"quadratic", "chunked"}
    assert len(inspect.getsource(select_implementation).splitlines()) < 40


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
def test_chunk_size(backend):
    for length in (1, 2, 63, 64, 65, 1000):
        assert 1 <= select_chunk_size(length, backend=backend) <= min(length, 128)
    assert select_chunk_size(10**6, backend=backend) == (128 if backend == "tpu" else 64)


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
def test_chunks_per_block(backend):
    """Between 1 and 8; on a CPU not more than its cache holds, unless the states would outgrow the tokens."""
    of = functools.partial(select_chunks_per_block, backend=backend)
    for batch, heads, dim in itertools.product((1, 3, 64), (1, 8), (1, 64, 512)):
        for decay_per_feature in (False, True):
            assert 1 <= of((batch, heads, dim, dim), 64, decay_per_feature=decay_per_feature) <= 8
    if backend == "cpu":
        assert of((1, 1, 64, 64), 64) == 8
        assert of((2, 4, 64, 64), 64) == of((8, 1, 64, 64), 64) == 4
        assert of((2, 4, 64, 64), 32, decay_per_feature=True) == 2
        assert of((64, 16, 64, 64), 64) == 1
        assert of((64, 16, 2145, 64), 64) == 5


def test_none_is_what_it_says():
    """The default of each function gives bit for bit what the form that is chosen gives."""
    for length in (5, 200):
        q, k, v = (jnp.asarray(x) for x in normal(0, *[(1, length, 2, 8)] * 3))
        for is_causal in (True, False):
            chosen = _choose(length, features=8, value_dim=8)
            default = linear_attention(q, k, v, is_causal=is_causal)
            named = linear_attention(q, k, v, is_causal=is_causal, implementation=chosen)
            np.testing.assert_array_equal(default, named)
        _, default = causal_linear_attention(q, k, v)
        _, named = causal_linear_attention(q, k, v, implementation=_choose(length, features=8, value_dim=8))
        np.testing.assert_array_equal(default, named)


def test_a_name_is_never_replaced():
    """Each form is the program that its name says, at any length: weights, a scan over tokens, a scan over chunks."""
    tokens = [jax.ShapeDtypeStruct((1, 512, 1, 4), jnp.float32)] * 3

    def trace(name):
        return lambda *x: causal_linear_attention(*x, implementation=name)

    def scan_lengths(name):
        program = jax.make_jaxpr(trace(name))(*tokens).jaxpr
        return [e.params["length"] for e in equations(program) if e.primitive.name == "scan"]

    assert largest_array(trace("quadratic"), *tokens) == 512 * 512
    assert scan_lengths("quadratic") == scan_lengths("associative") == []
    assert int(np.prod(scan_lengths("recurrent"))) == 512
    assert scan_lengths("chunked")
    assert max(scan_lengths("chunked")) <= 512 // 64

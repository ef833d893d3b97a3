"""What the contestants must give: the formulas in NumPy float64, over all pairs of tokens. A wrong answer has no time."""

import importlib

import jax
import numpy as np
from benchmarks.contestants import Contestant

LENGTH = 256
TOLERANCE = 2e-4  # of the largest number, for float32


def check(name: str, contestant: Contestant, heads: int, dim: int) -> None:
    """Raises AssertionError if the contestant is wrong on a short sequence of that many heads of that size."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((1, LENGTH, heads, dim)).astype(np.float32) for _ in range(3))
    if contestant.uses_torch:
        torch = importlib.import_module("torch")
        got = contestant.attend(*map(torch.from_numpy, (query, key, value))).numpy()
    else:
        got = np.asarray(jax.jit(contestant.attend)(query, key, value))
    want = np.einsum("bhts,bshe->bthe", FORMULAS[contestant.formula](query, key), value)
    error = np.max(np.abs(got - want)) / np.max(np.abs(want))
    assert error <= TOLERANCE, f"{name} is off by {error:.1e} of the largest number"


# The weights [B, H, T, S] of queries and keys [B, T, H, D].


def _unnormalized(query, key):
    return np.tril(np.einsum("bthd,bshd->bhts", query.astype(np.float64), key.astype(np.float64)))


def _elu_plus_one(query, key):
    weights = _unnormalized(*(np.where(x > 0, x + 1, np.exp(x.astype(np.float64))) for x in (query, key)))
    return weights / np.sum(weights, axis=-1, keepdims=True)


def _mlstm(query, key):
    weights = _unnormalized(query, key)
    return weights / np.maximum(np.abs(np.sum(weights, axis=-1, keepdims=True)), 1)


def _softmax(query, key):
    logits = _unnormalized(query, key) / np.sqrt(query.shape[-1])
    weights = np.tril(np.exp(logits - np.max(logits, axis=-1, keepdims=True)))
    return weights / np.sum(weights, axis=-1, keepdims=True)


FORMULAS = {"unnormalized": _unnormalized, "elu_plus_one": _elu_plus_one, "mlstm": _mlstm, "softmax": _softmax}

"""The one table of forms and shapes. A new form is one row of `CAUSAL_FORMS`; a new situation one row of the cases.

Axes: B batch, T query time, S key time, D query/key head dim, F feature dim, E value head dim, C chunk length;
heads: H query, K key, V value, N = max(K, V), M = max(H, N).
"""

import dataclasses
import functools
import zlib
from typing import Any, NamedTuple

import numpy as np
import oracle

from jax_linattn import FeatureMap, feature_maps


class Form(NamedTuple):
    implementation: str
    chunk_size: int | None

    def __str__(self):
        return self.implementation + ("" if self.chunk_size is None else f"_{self.chunk_size}")

    def options(self) -> dict:
        return {"implementation": self.implementation, "chunk_size": self.chunk_size}


# Chunks of 2 make several blocks of several chunks of the shapes below, chunks of 5 one block; neither divides T. Of 17
# tokens, the last block of chunks of 2 begins 3 tokens early: more than a chunk.
CAUSAL_FORMS = [
    Form("quadratic", None),
    Form("recurrent", 4),
    Form("associative", 1),
    Form("associative", 3),
    Form("chunked", 2),
    Form("chunked", 5),
]
BIDIRECTIONAL_FORMS = [Form("quadratic", None), Form("chunked", 1), Form("chunked", 64)]
ONE_OF_EACH = [Form("quadratic", None), Form("recurrent", 4), Form("associative", 3), Form("chunked", 2)]
IN_BLOCKS = ONE_OF_EACH[1:]


class Shape(NamedTuple):
    """B, T, S, H, K, V, D, E. S is for attention that is not causal."""

    batch: int
    length: int
    key_length: int
    query_heads: int
    key_heads: int
    value_heads: int
    dim: int
    value_dim: int

    def sizes(self, is_causal: bool):
        """The shapes of query, key and value."""
        key_length = self.length if is_causal else self.key_length
        return (
            (self.batch, self.length, self.query_heads, self.dim),
            (self.batch, key_length, self.key_heads, self.dim),
            (self.batch, key_length, self.value_heads, self.value_dim),
        )


SHAPES = {
    "plain": Shape(2, 17, 11, 3, 3, 3, 4, 5),
    "grouped_queries": Shape(2, 17, 23, 6, 2, 2, 3, 4),
    "more_values": Shape(1, 17, 7, 2, 2, 4, 3, 5),
    "few_queries": Shape(2, 18, 13, 1, 3, 3, 2, 4),
    "mixed": Shape(3, 13, 10, 2, 1, 6, 4, 5),
    "ones": Shape(2, 17, 11, 1, 1, 1, 1, 1),
}

# The package's map beside the oracle's.
MAPS = {
    "elu_plus_one": (feature_maps.elu_plus_one, oracle.elu_plus_one),
    "relu_squared": (feature_maps.relu_squared, oracle.relu_squared),
    "softplus": (feature_maps.softplus, oracle.softplus),
    "identity": (feature_maps.identity, oracle.identity),
    "dpfp_2": (feature_maps.dpfp(2), oracle.dpfp_2),
    "softmax_and_softplus": (
        FeatureMap(query=feature_maps.softmax, key=feature_maps.softplus),
        (oracle.softmax, oracle.softplus),
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One situation: a shape, a map, what hides tokens, and how the sums become an output."""

    name: str
    shape: Shape
    is_causal: bool
    feature_map: str = "elu_plus_one"
    hides: tuple[str, ...] = ()
    rule: tuple[tuple[str, Any], ...] = ()
    with_state: bool = True

    def __str__(self):
        return self.name


def _causal(name, shape="plain", feature_map="elu_plus_one", hides=(), with_state=True, **rule) -> Case:
    return Case(f"causal_{name}", SHAPES[shape], True, feature_map, tuple(hides), tuple(rule.items()), with_state)


def _bidirectional(name, shape="plain", feature_map="elu_plus_one", hides=(), **rule) -> Case:
    return Case(f"bidirectional_{name}", SHAPES[shape], False, feature_map, tuple(hides), tuple(rule.items()), False)


CAUSAL_CASES = [
    _causal("plain", with_state=False),
    _causal("eps", "grouped_queries", "softplus", eps=0.1),
    _causal("unnormalized", "mixed", "identity", normalize=False, scale=0.3),
    _causal("masked", "more_values", hides=["mask"]),
    _causal("two_maps_masked", "grouped_queries", "softmax_and_softplus", hides=["mask"]),
    _causal("segments", "few_queries", hides=["segment_ids", "state_segment_ids"]),
    _causal("lengths", "ones", "softplus", hides=["query_seq_lengths", "key_value_seq_lengths"], eps=0.1),
    _causal(
        "everything",
        "mixed",
        "dpfp_2",
        hides=["mask", "segment_ids", "state_segment_ids", "query_seq_lengths", "key_value_seq_lengths"],
        eps=0.01,
    ),
    _causal("segments_unnormalized", "plain", "relu_squared", hides=["mask", "segment_ids"], normalize=False),
]
BIDIRECTIONAL_CASES = [
    _bidirectional("plain"),
    _bidirectional("eps", "grouped_queries", "softplus", eps=0.1),
    _bidirectional("unnormalized", "mixed", "identity", normalize=False, scale=0.3),
    _bidirectional("masked", "more_values", "dpfp_2", hides=["mask"]),
    _bidirectional("masked_4d", "few_queries", "softmax_and_softplus", hides=["mask_4d"]),
    _bidirectional("segments", "grouped_queries", hides=["segment_ids"]),
    _bidirectional("lengths", "ones", "softplus", hides=["query_seq_lengths", "key_value_seq_lengths"], eps=0.1),
    _bidirectional(
        "everything", "mixed", hides=["mask", "segment_ids", "query_seq_lengths", "key_value_seq_lengths"], eps=0.01
    ),
]


# --- the numbers of a case --------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """What a form is given, in NumPy: float arrays, arrays that hide tokens, and the directions of the gradient."""

    arguments: tuple[np.ndarray, ...]  # query, key, value, and with a state kv and key_sum
    hiding: dict[str, Any]
    rule: dict[str, Any]
    cotangents: tuple[np.ndarray, ...]  # of output, and in causal cases kv and key_sum


def draw(case: Case, dtype="float64") -> Problem:
    """The numbers of a case, rounded to `dtype`; those of the state to the dtype of sums."""
    rng, shape = np.random.default_rng(zlib.crc32(case.name.encode())), case.shape
    sum_dtype = "float64" if dtype == "float64" else "float32"
    sizes = shape.sizes(case.is_causal)
    arguments = [rng.standard_normal(size).astype(dtype) for size in sizes]
    state_heads = max(shape.key_heads, shape.value_heads)
    features = num_features(case)
    sums = [(shape.batch, state_heads, features, shape.value_dim), (shape.batch, state_heads, features)]
    if case.is_causal and case.with_state:
        arguments += [rng.standard_normal(sums[0]).astype(sum_dtype), rng.uniform(0.5, 2, sums[1]).astype(sum_dtype)]
    out_heads = max(shape.query_heads, state_heads)
    cotangents = [rng.standard_normal((shape.batch, shape.length, out_heads, shape.value_dim)).astype(dtype)]
    if case.is_causal:
        cotangents += [rng.standard_normal(size).astype(sum_dtype) for size in sums]
    hiding = {name.removesuffix("_4d"): _hiding(name, case, rng) for name in case.hides}
    return Problem(tuple(arguments), hiding, dict(case.rule), tuple(cotangents))


def num_features(case: Case) -> int:
    _, maps = MAPS[case.feature_map]
    key_map = maps[1] if isinstance(maps, tuple) else maps
    return key_map(np.zeros((1, case.shape.dim))).shape[-1]


def _hiding(name: str, case: Case, rng: np.random.Generator):
    batch, num_queries = case.shape.batch, case.shape.length
    num_keys = num_queries if case.is_causal else case.shape.key_length
    if name.startswith("mask"):
        mask = rng.random((batch, num_keys)) < 0.6
        mask[0, 0] = mask[-1, -1] = False
        return mask[:, None, None, :] if name.endswith("4d") else mask
    if name == "segment_ids" and case.is_causal:
        return runs(rng, batch, num_queries)
    if name == "segment_ids":  # ids in another order on the two sides, some of them on one side alone
        return runs(rng, batch, num_queries), runs(rng, batch, num_keys)[:, ::-1].copy()
    if name == "state_segment_ids":  # the first run's id (0) in all rows but the first
        return np.where(np.arange(batch) == 0, 9, 0).astype(np.int32)
    length = {"query_seq_lengths": num_queries, "key_value_seq_lengths": num_keys}[name]
    return rng.integers(length // 2, length + 1, batch).astype(np.int32)


def runs(rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """Runs of equal ids from 0 on, [B, length], new ones with probability 1/3."""
    return np.cumsum((rng.random((batch, length)) < 1 / 3) & (np.arange(length) > 0), axis=1).astype(np.int32)


@functools.lru_cache(maxsize=64)
def expected(case: Case, dtype="float64") -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The oracle's results and gradients of a case: (output, and when causal kv and key_sum), one of each argument."""
    problem, shape = draw(case, dtype), case.shape
    seen = oracle.visible(
        shape.batch, *(size[1] for size in shape.sizes(case.is_causal)[:2]), case.is_causal, **problem.hiding
    )
    arguments = [x.astype(np.float64) for x in problem.arguments]

    def attend(query, key, value, *rest):
        kv, key_sum, seen = rest if len(rest) == 3 else (None, None, *rest)
        results = oracle.attention(
            query, key, value, kv, key_sum, seen, feature_map=MAPS[case.feature_map][1], **problem.rule
        )
        return results if case.is_causal else results[:1]

    cotangents = [x.astype(np.float64) for x in problem.cotangents]
    return list(attend(*arguments, seen)), oracle.gradients(attend, arguments, seen, cotangents)

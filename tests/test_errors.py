"""Every mistake raises a ValueError that names the argument, what it got, and what would be right.

Field cases 26 (a mask of the wrong kind is silently ignored), 47 ([B, H, T, D] for [B, T, H, D]), 48 (heads that do not
divide), 49 (causal cross attention), 10 (a scale that would not be used).
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_linattn import (
    FeatureMap,
    attention_weights,
    causal_linear_attention,
    feature_maps,
    init_state,
    linear_attention,
    linear_attention_step,
)

B, T, S, H, K, D, E = 2, 5, 3, 4, 2, 6, 7
Q, KEY, V = np.ones((B, T, H, D), np.float32), np.ones((B, T, K, D), np.float32), np.ones((B, T, K, E), np.float32)
STATE = init_state(jnp.asarray(KEY), jnp.asarray(V))


def whole(q=Q, k=KEY, v=V, **options):
    return linear_attention(q, k, v, **options)


def causal(q=Q, k=KEY, v=V, **options):
    return causal_linear_attention(q, k, v, **options)


def step(q=Q[:, 0], k=KEY[:, 0], v=V[:, 0], state=STATE, **options):
    return linear_attention_step(state, q, k, v, **options)


def weights(q=Q, k=KEY, **options):
    return attention_weights(q, k, **options)


def init(k=KEY, v=V, **options):
    return init_state(k, v, **options)


# One row: a name, the call, and what the message must hold.
CASES = [
    # ranks, lengths, batch
    ("rank 5", lambda: whole(Q[None]), ["query", "4 axes [B, T, heads, dim]", "3 axes", "(1, 2, 5, 4, 6)"]),
    ("rank 2", lambda: whole(Q, KEY[0, 0]), ["key", "(2, 6)"]),
    ("mixed ranks", lambda: whole(Q, KEY[0], V), ["query, key and value", "same rank", "(5, 2, 6)"]),
    ("unbatched causal", lambda: causal(Q[0], KEY[0], V[0]), ["query", "4 axes", "(5, 4, 6)"]),
    ("a sequence in a step", lambda: step(Q), ["query", "3 axes [B, heads, dim]", "(2, 5, 4, 6)"]),
    ("batches differ", lambda: whole(Q[:1]), ["batch size", "(1, 5, 4, 6)", "(2, 5, 2, 6)"]),
    ("batches differ in a step", lambda: step(Q[:1, 0]), ["batch size", "(1, 4, 6)"]),
    ("key and value lengths", lambda: whole(v=V[:, :S]), ["key and value", "same length", "(2, 3, 2, 7)"]),
    ("causal cross attention", lambda: whole(k=KEY[:, :S], v=V[:, :S], is_causal=True), ["T == S", "(2, 3, 2, 6)"]),
    ("causal lengths", lambda: causal(Q[:, :S]), ["T == S", "(2, 3, 4, 6)"]),
    ("causal weights", lambda: weights(Q[:, :S], is_causal=True), ["T == S"]),
    # dims and heads
    ("head dims", lambda: whole(Q[..., :4]), ["query and key", "head dim", "(2, 5, 4, 4)", "(2, 5, 2, 6)"]),
    ("no head dim", lambda: whole(Q[..., :0], KEY[..., :0]), ["head dim", "at least 1"]),
    ("H = 3, G = 2", lambda: whole(Q[:, :, :3]), ["query has 3 heads, key 2 and value 2", "divide", "[batch, time"]),
    ("K and V", lambda: whole(v=np.ones((B, T, 3, E), np.float32)), ["key 2 and value 3", "divide"]),
    ("no heads", lambda: whole(Q[:, :, :0]), ["query has 0 heads", "at least one"]),
    # dtypes
    ("integers", lambda: whole(Q.astype(int)), ["query", "floating-point", "int"]),
    ("mixed dtypes", lambda: whole(v=V.astype(np.float16)), ["share one dtype", "float32", "float16"]),
    ("a list", lambda: whole(Q.tolist()), ["query", "array", "list"]),
    ("no array", lambda: whole(None), ["query", "array", "NoneType"]),
    ("a complex key", lambda: whole(k=KEY.astype(np.complex64)), ["key", "complex64"]),
    # masks
    (
        "a [T, T] mask",
        lambda: whole(mask=np.tril(np.ones((T, T), bool))),
        ["mask", "(5, 5)", "[B, S]", "is_causal=True"],
    ),
    ("an additive mask", lambda: whole(mask=np.zeros((B, T), np.float32)), ["mask", "bool", "float32 (2, 5)"]),
    ("an integer mask", lambda: causal(mask=np.ones((B, T), np.int32)), ["mask", "bool", "int32"]),
    ("a full mask", lambda: whole(mask=np.ones((B, 1, T, T), bool)), ["mask", "(2, 1, 5, 5)", "segment_ids"]),
    ("a mask a head", lambda: whole(mask=np.ones((B, H, 1, T), bool)), ["mask", "(2, 4, 1, 5)"]),
    ("a short mask", lambda: whole(mask=np.ones((B, T - 1), bool)), ["mask", "(2, 4)"]),
    ("a mask without batch", lambda: whole(mask=np.ones(T, bool)), ["mask", "(5,)"]),
    ("a mask as a list", lambda: whole(mask=[[True] * T] * B), ["mask", "list"]),
    ("a mask of weights", lambda: weights(mask=np.ones((B, T), int)), ["mask", "int"]),
    ("a step's mask", lambda: step(mask=np.ones((B, 1), bool)), ["mask", "[B] = (2,)", "(2, 1)"]),
    ("a step's float mask", lambda: step(mask=np.ones(B, np.float32)), ["mask", "bool", "float32"]),
    # segments and lengths
    ("float ids", lambda: whole(segment_ids=np.ones((B, T), np.float32)), ["segment_ids", "integer", "float32"]),
    ("ids of another shape", lambda: causal(segment_ids=np.ones((B, T - 1), int)), ["segment_ids", "[B, T]", "(2, 4)"]),
    ("a causal pair", lambda: whole(is_causal=True, segment_ids=(np.ones((B, T), int),) * 2), ["segment_ids", "pair"]),
    ("a pair in causal", lambda: causal(segment_ids=(np.ones((B, T), int),) * 2), ["segment_ids", "one int array"]),
    ("three", lambda: whole(segment_ids=(np.ones((B, T), int),) * 3), ["segment_ids", "pair", "3"]),
    (
        "one array for two lengths",
        lambda: whole(k=KEY[:, :S], v=V[:, :S], segment_ids=np.ones((B, T), int)),
        ["segment_ids", "pair", "lengths differ"],
    ),
    (
        "key ids of another shape",
        lambda: whole(k=KEY[:, :S], v=V[:, :S], segment_ids=(np.ones((B, T), int), np.ones((B, T), int))),
        ["segment_ids[1]", "[B, S]", "(2, 3)"],
    ),
    ("state ids alone", lambda: causal(state_segment_ids=np.ones(B, int)), ["state_segment_ids", "needs segment_ids"]),
    (
        "state ids of another shape",
        lambda: causal(state_segment_ids=np.ones((B, 1), int), segment_ids=np.ones((B, T), int)),
        ["state_segment_ids", "[B]", "(2, 1)"],
    ),
    ("query lengths", lambda: whole(query_seq_lengths=np.ones(3, int)), ["query_seq_lengths", "[B] = (2,)", "(3,)"]),
    (
        "float lengths",
        lambda: whole(key_value_seq_lengths=np.ones(B, np.float32)),
        ["key_value_seq_lengths", "integer", "float32"],
    ),
    ("one length", lambda: causal(key_value_seq_lengths=3), ["key_value_seq_lengths", "[B]", "()"]),
    # options
    ("a form's name", lambda: whole(implementation="flash"), ["implementation", "'quadratic', 'chunked'", "'flash'"]),
    ("a causal form", lambda: whole(implementation="recurrent"), ["implementation", "'recurrent'"]),
    ("a causal form's name", lambda: causal(implementation="xla"), ["implementation", "'associative'", "'xla'"]),
    ("chunks of 0", lambda: causal(chunk_size=0), ["chunk_size", "positive whole number", "0"]),
    ("chunks of 2.0", lambda: causal(chunk_size=2.0), ["chunk_size", "2.0"]),
    ("chunks of True", lambda: whole(chunk_size=True), ["chunk_size", "True"]),
    ("is_causal as a number", lambda: whole(is_causal=1), ["is_causal", "True or False", "1"]),
    ("normalize as a name", lambda: causal(normalize="sum"), ["normalize", "True or False", "'sum'"]),
    ("a negative eps", lambda: whole(eps=-1e-6), ["eps", ">= 0", "-1e-06"]),
    ("an eps without a sum", lambda: step(normalize=False, eps=1e-6), ["eps", "normalize=True"]),
    ("a traced eps", lambda: jax.jit(lambda eps: whole(eps=eps))(0.1), ["eps", "known when compiling"]),
    ("a scale that cancels", lambda: whole(scale=2.0), ["scale", "normalize=False", "2.0"]),
    ("a scale of 1 that cancels", lambda: step(scale=1), ["scale", "normalize=False"]),
    ("a scale a head", lambda: causal(normalize=False, scale=np.ones(H)), ["scale", "(4,)"]),
    ("decay, both ways", lambda: whole(log_decay=np.zeros(K, np.float32)), ["log_decay", "is_causal=True"]),
    # feature maps
    ("a map's name", lambda: whole(feature_map="relu"), ["feature_map", "'relu'", "feature_maps.get"]),
    (
        "a map of another dtype",
        lambda: whole(feature_map=lambda x: x.astype(jnp.bfloat16)),
        ["feature_map", "same dtype"],
    ),
    ("a map that drops an axis", lambda: causal(feature_map=lambda x: x[..., 0]), ["feature_map", "[..., 4, F"]),
    ("a map that mixes heads", lambda: step(feature_map=lambda x: x[..., :1, :]), ["feature_map"]),
    (
        "two maps that do not fit",
        lambda: whole(feature_map=FeatureMap(query=feature_maps.relu, key=feature_maps.dpfp(1))),
        ["feature_map", "features", "6", "12"],
    ),
    # states
    ("a tuple for a state", lambda: causal(state=tuple(STATE)), ["state", "LinearAttentionState", "tuple"]),
    ("no state", lambda: step(state=None), ["state", "LinearAttentionState", "NoneType"]),
    (
        "a state of another batch",
        lambda: causal(state=jax.tree.map(lambda x: x[:1], STATE)),
        ["state.kv", "(2, 2, 6, 7)"],
    ),
    (
        "a state of other features",
        lambda: causal(state=STATE, feature_map=feature_maps.dpfp(1)),
        ["state.kv", "(2, 2, 12"],
    ),
    (
        "a state of 16 bits",
        lambda: step(state=jax.tree.map(lambda x: x.astype(jnp.bfloat16), STATE)),
        ["state.kv", "float32", "bfloat16"],
    ),
    ("a wrong key_sum", lambda: causal(state=STATE._replace(key_sum=STATE.kv)), ["state.key_sum", "(2, 2, 6)"]),
    ("a wrong log_scale", lambda: causal(state=STATE._replace(log_scale=jnp.zeros(2))), ["state.log_scale", "(2, 2)"]),
    # init_state
    ("init from rank 2", lambda: init(KEY[0, 0]), ["key", "[B, heads, dim]", "(2, 6)"]),
    ("init from no array", lambda: init(v=None), ["value", "NoneType"]),
    ("init from integers", lambda: init(KEY.astype(int)), ["key", "floating-point", "int"]),
    ("init of two batches", lambda: init(KEY[:1]), ["key and value", "(1, 5, 2, 6)"]),
    ("init of two dtypes", lambda: init(KEY.astype(np.float16)), ["key and value", "float16", "float32"]),
    ("init of heads", lambda: init(v=np.ones((B, T, 3, E), np.float32)), ["key", "value", "2", "3", "divide"]),
]


@pytest.mark.parametrize(("call", "words"), [row[1:] for row in CASES], ids=[row[0] for row in CASES])
def test_message(call, words):
    with pytest.raises(ValueError, match=r"\w") as error:
        call()
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"


def test_heads_where_time_should_be():
    """Field case 47. [B, H, T, D] passes where it happens to fit, but (8, 1000, 512) and a real slip do not."""
    slipped = [np.ones((2, heads, 100, 16), np.float32) for heads in (8, 2, 2)]
    with pytest.raises(ValueError, match=re.escape("causal attention needs a key for each query (T == S)")):
        causal(*slipped)
    with pytest.raises(ValueError, match="head dim"):
        whole(*(np.ones((8, 1000, size), np.float32) for size in (512, 511, 512)))
    with pytest.raises(ValueError, match=r"batch|rank|axes"):
        causal(*(np.ones((8, 1000, 512), np.float32) for _ in range(3)))


def test_unknown_arguments_are_no_silent_options():
    for function in (whole, causal, step, weights):
        with pytest.raises(TypeError, match="dropout_rate"):
            function(dropout_rate=0.1)
    with pytest.raises(TypeError):
        linear_attention(Q, KEY, V, np.ones((B, T), bool))  # the fourth of jax.nn.dot_product_attention is a bias


def test_nothing_is_read_to_the_host():
    """Values are documented, not checked: every argument may be traced, and a length beyond T is no error."""
    lengths = np.array([100, -1])
    output = jax.jit(lambda n: whole(query_seq_lengths=n, key_value_seq_lengths=n))(lengths)
    assert np.any(output[0])
    assert not np.any(output[1])

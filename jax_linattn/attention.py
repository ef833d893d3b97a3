"""The public functions: check, bring to one layout, choose a form."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, dtypes

from jax_linattn import checks, feature_maps
from jax_linattn.dtypes import accumulator_dtype
from jax_linattn.forms import associative, chunked, quadratic, recurrent
from jax_linattn.forms.heads import repeat_heads
from jax_linattn.forms.tokens import Rule, Tokens, count_runs, decays_per_feature, enter_state
from jax_linattn.selection import select_chunk_size, select_implementation
from jax_linattn.state import LinearAttentionState, empty_state, unmark_empty, vary_with

Implementation = Literal["quadratic", "recurrent", "associative", "chunked"]

CAUSAL_FORMS = {
    "quadratic": quadratic.causal,
    "recurrent": recurrent.causal,
    "associative": associative.causal,
    "chunked": chunked.causal,
}
BIDIRECTIONAL_FORMS = {
    "quadratic": quadratic.bidirectional,
    "chunked": chunked.bidirectional,
}


class Hiding(NamedTuple):
    """The optional arguments that hide tokens from one another, as they were passed."""

    mask: Any
    segment_ids: Any
    query_seq_lengths: Any
    key_value_seq_lengths: Any
    state_segment_ids: Any = None


def linear_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | None = None,
    is_causal: bool = False,
    feature_map: Any = feature_maps.elu_plus_one,
    normalize: bool = True,
    eps: float = 0.0,
    scale: float | Array | None = None,
    log_decay: Array | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    chunk_size: int | None = None,
    precision: Any = None,
    implementation: Implementation | None = None,
) -> Array:
    """Linear attention over a whole sequence.

        o_t = φ(q_t)ᵀ (Σ_s φ(k_s) v_sᵀ) / φ(q_t)ᵀ (Σ_s φ(k_s))

    with the sums over all keys s, or over s <= t when causal; linear in T and S, and the same result in every form.
    Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236.

    Sums over time and the division are float32 (float64 for float64 inputs), whatever the inputs. With ``eps=0`` values
    and gradients are those of the exact ratio, however small the sum of φ(k), while φ(k)·v stays a normal float and
    v / Σφ(k) a finite one; a query that sees no key gets 0. 16-bit inputs are computed with in float32, and the output is
    rounded once.

    Args:
      query: [B, T, H, D], or unbatched [T, H, D].
      key: [B, S, K, D]. K and V divide N = max(K, V); of H and N the smaller divides the larger.
      value: [B, S, V, E]. The three share one float dtype.
      mask: bool, True = a real token: [B, S] or [B or 1, 1, 1, S]; unbatched [S]. It removes keys; when causal it removes
        the token, whose output row is 0 too. What a removed token holds, NaN included, changes nothing.
      is_causal: attend to keys at or before the query alone; needs T == S.
      feature_map: φ, from `feature_maps` or your own; applied inside the form, a chunk at a time.
      normalize: divide by the sum of weights.
      eps: added to that sum; the exact ratio needs none.
      scale: with ``normalize=False`` alone, a factor on the output; None = 1.
      log_decay: causal only, the natural log of the decay a_t of each token, <= 0 (documented, not checked): per head [N]
        or [B, T, N], or per feature [B, T, N, F], in any float dtype; unbatched without B. Token s counts a_{s+1} ⋯ a_t at
        t, in both sums; -inf forgets all before the token. A masked token decays nothing.
      segment_ids: int [B, T], runs of equal ids that do not come back (not checked; causal, a returning id would be a new
        run): a query sees keys with its id alone, so packed documents stay apart. Not causal: also a pair (query ids
        [B, T], key ids [B, S]). Unbatched without B.
      query_seq_lengths: int [B], unbatched []: output rows from here on are 0, whatever their queries hold. (Not causal, a
        mask is of keys alone: a NaN in the query of a pad is this argument's to hide.)
      key_value_seq_lengths: int [B], unbatched []: keys from here on are removed.
      chunk_size: C, tokens a chunk (a block, in the recurrent form; of no meaning in the quadratic one); None chooses. It
        changes speed and memory alone.
      precision: of matrix products, as in `jax.lax.dot_general`; None is JAX's default, which for float32 on a TPU means
        products of bfloat16 parts: ask for "highest" to have float32.
      implementation: a form, "quadratic", "recurrent", "associative" or "chunked" (not causal: "quadratic" or "chunked");
        None chooses by `select_implementation`.

    Returns:
      [B, T, max(H, N), E] in the dtype of value; unbatched without B.

    Raises:
      ValueError: naming the argument, what it got and what would be right.

    Example:
      >>> x = jax.random.normal(jax.random.key(0), (1, 100, 4, 16))
      >>> linear_attention(x, x, x, is_causal=True).shape
      (1, 100, 4, 16)
    """
    checks.check_bool("is_causal", is_causal)
    _check_implementation(implementation, is_causal)
    (query, key, value), unbatched = checks.sequences(query, key, value, same_length=is_causal)
    hiding = Hiding(mask, segment_ids, query_seq_lengths, key_value_seq_lengths)
    hiding = Hiding(*map(checks.add_batch, hiding)) if unbatched else hiding
    rule = _rule(feature_map, normalize, eps, scale, precision)
    tokens = _tokens(query, key, value, hiding, is_causal, log_decay, unbatched)
    if is_causal:
        _, output = _causal(tokens, None, rule, chunk_size, implementation)
    else:
        output = _bidirectional(tokens, rule, chunk_size, implementation)
    return output[0] if unbatched else output


def causal_linear_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    state: LinearAttentionState | None = None,
    state_segment_ids: Array | None = None,
    mask: Array | None = None,
    feature_map: Any = feature_maps.elu_plus_one,
    normalize: bool = True,
    eps: float = 0.0,
    scale: float | Array | None = None,
    log_decay: Array | None = None,
    segment_ids: Array | None = None,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    chunk_size: int | None = None,
    precision: Any = None,
    implementation: Implementation | None = None,
) -> tuple[LinearAttentionState, Array]:
    """Causal linear attention that continues from a state and returns the one after it.

        S_t = a_t ⊙ S_{t-1} + φ(k_t) v_tᵀ,  Z_t = a_t ⊙ Z_{t-1} + φ(k_t),  o_t = φ(q_t)ᵀ S_t / φ(q_t)ᵀ Z_t

    or o_t = scale · φ(q_t)ᵀ S_t with ``normalize=False``; a_t = exp(log_decay_t), 1 without one.

    Splitting a sequence anywhere and carrying the state changes
    nothing. Arguments not listed are those of `linear_attention`; input is batched.

    Args:
      query: [B, T, H, D].
      key: [B, T, K, D].
      value: [B, T, V, E].
      state: what came before, from an earlier call or `init_state`; None = nothing.
      state_segment_ids: int [B], the run that the state belongs to; None = that of the first token. With segment_ids.
      segment_ids: int [B, T]: S and Z restart where the id changes, from the ids alone, mask or not.

    Returns:
      (state after the last token, output [B, T, max(H, N), E]).

    Raises:
      ValueError: naming the argument, what it got and what would be right.
    """
    _check_implementation(implementation, is_causal=True)
    (query, key, value), _ = checks.sequences(query, key, value, same_length=True, batched=True)
    rule = _rule(feature_map, normalize, eps, scale, precision)
    hiding = Hiding(mask, segment_ids, query_seq_lengths, key_value_seq_lengths, state_segment_ids)
    tokens = _tokens(query, key, value, hiding, True, log_decay)
    return _causal(tokens, state, rule, chunk_size, implementation)


def linear_attention_step(
    state: LinearAttentionState,
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | None = None,
    feature_map: Any = feature_maps.elu_plus_one,
    normalize: bool = True,
    eps: float = 0.0,
    scale: float | Array | None = None,
    log_decay: Array | None = None,
    precision: Any = None,
) -> tuple[LinearAttentionState, Array]:
    """One token of `causal_linear_attention`: constant time and memory, fit to be the body of a loop.

    Args:
      state: the sums so far, from `init_state`, an earlier step or `causal_linear_attention`.
      query: [B, H, D].
      key: [B, K, D].
      value: [B, V, E].
      mask: bool [B]; a row with False keeps its state and gets 0.
      log_decay: of this token, [N], [B, N] or [B, N, F].
      feature_map, normalize, eps, scale, precision: as in `linear_attention`.

    Returns:
      (state, output [B, max(H, N), E]).

    Raises:
      ValueError: naming the argument, what it got and what would be right.
    """
    query, key, value = checks.one_token(query, key, value)
    rule = _rule(feature_map, normalize, eps, scale, precision)
    mask = checks.token_mask(mask, query.shape[0])
    log_decay = checks.log_decay(log_decay, query.shape[:1], max(key.shape[-2], value.shape[-2]), "[B, N]")
    tokens = Tokens(query, key, value, query_mask=mask, key_mask=mask, log_decay=log_decay)
    checks.check_state_type(state)
    return _compiled(_step, rule)(tokens, _checked_state(state, tokens, rule), rule)


def init_state(key: Any, value: Any, *, feature_map: Any = feature_maps.elu_plus_one) -> LinearAttentionState:
    """The state before any token.

    Args:
      key: one token [B, K, D] or a sequence [B, T, K, D], as array or `jax.ShapeDtypeStruct`; of arrays the varying axes
        of `shard_map` are taken over.
      value: [B, V, E] or [B, T, V, E].
      feature_map: φ.

    Returns:
      Zeros, float32, or float64 for float64 inputs.

    Raises:
      ValueError: naming the argument, what it got and what would be right.
    """
    checks.keys_and_values(key, value)
    checks.check_feature_map(feature_map)
    feature_map = feature_maps.as_pytree(feature_map)
    num_heads, dtype = max(key.shape[-2], value.shape[-2]), dtypes.canonicalize_dtype(key.dtype)
    features = checks.check_features(feature_map, [("key", key.shape[-2])], key.shape[-1], dtype)
    state = empty_state(key.shape[0], num_heads, features, value.shape[-1], accumulator_dtype(dtype))
    return vary_with(state, key, value, feature_map)


def attention_weights(
    query: Array,
    key: Array,
    *,
    mask: Array | None = None,
    is_causal: bool = False,
    feature_map: Any = feature_maps.elu_plus_one,
    eps: float = 0.0,
    log_decay: Array | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    precision: Any = None,
) -> Array:
    """The row-normalised weights that linear attention implies and never forms; to look at, and for tests.

    Its arguments are those of `linear_attention`, and the weights times the values are its output.

    Returns:
      [B, max(H, N), T, S] in the dtype of query, N = K, or as many heads as log_decay has; unbatched without B. A query
      that sees no key has a row of 0.

    Raises:
      ValueError: naming the argument, what it got and what would be right.
    """
    checks.check_bool("is_causal", is_causal)
    (query, key, _), unbatched = checks.sequences(query, key, key, same_length=is_causal)
    hiding = Hiding(mask, segment_ids, query_seq_lengths, key_value_seq_lengths)
    hiding = Hiding(*map(checks.add_batch, hiding)) if unbatched else hiding
    rule = _rule(feature_map, True, eps, None, precision)
    value = key  # not read: it stands for as many state heads as the decay has
    if log_decay is not None and np.ndim(log_decay) > 0:
        per_feature = log_decay.ndim == key.ndim - unbatched
        num_heads, num_key = log_decay.shape[-2 if per_feature else -1], key.shape[-2]
        value = repeat_heads(key, num_heads) if num_heads > num_key and num_heads % num_key == 0 else key
    tokens = _tokens(query, key, value, hiding, is_causal, log_decay, unbatched)
    weights = quadratic.row_weights(tokens, _checked_state(None, tokens, rule), rule, is_causal)
    return weights[0] if unbatched else weights


# --- from arguments to tokens and rule --------------------------------------------------------------------------------


def _check_implementation(implementation, is_causal: bool) -> None:
    if not is_causal and implementation in CAUSAL_FORMS and implementation not in BIDIRECTIONAL_FORMS:
        raise ValueError(
            f"implementation={implementation!r} needs is_causal=True; without it use {list(BIDIRECTIONAL_FORMS)}"
        )
    checks.check_one_of("implementation", implementation, [None, *(CAUSAL_FORMS if is_causal else BIDIRECTIONAL_FORMS)])


def _rule(feature_map, normalize, eps, scale, precision) -> Rule:
    checks.check_rule(feature_map, normalize, eps, scale)
    return Rule(feature_maps.as_pytree(feature_map), scale, normalize, float(eps), precision)


def _tokens(query, key, value, hiding: Hiding, is_causal: bool, log_decay=None, unbatched: bool = False) -> Tokens:
    """Everything that hides tokens, as one mask of queries, one of keys, and segments; and their decay."""
    batch, query_length, key_length = *query.shape[:2], key.shape[1]
    mask = checks.key_mask(hiding.mask, batch, key_length)
    key_mask = _both(mask, checks.length_mask("key_value_seq_lengths", hiding.key_value_seq_lengths, batch, key_length))
    query_mask = checks.length_mask("query_seq_lengths", hiding.query_seq_lengths, batch, query_length)
    if is_causal:
        query_mask = _both(mask, query_mask)
    query_segment, key_segment = checks.segments(hiding.segment_ids, batch, query_length, key_length, is_causal)
    first = hiding.state_segment_ids
    if first is not None:
        checks.require(hiding.segment_ids is not None, "state_segment_ids needs segment_ids")
        first = checks.integers("state_segment_ids", first, (batch,), "[B]")
    if is_causal and query_segment is not None and query_length:
        query_segment = key_segment = count_runs(query_segment, query_segment[:, 0] if first is None else first)
    if log_decay is not None:
        checks.require(is_causal, "log_decay needs is_causal=True: without an order of time nothing decays")
        log_decay = checks.log_decay(log_decay, key.shape[:2], max(key.shape[2], value.shape[2]), "[B, T, N]", unbatched)
    return Tokens(query, key, value, query_mask, key_mask, query_segment, key_segment, log_decay)


def _both(a: Array | None, b: Array | None) -> Array | None:
    return b if a is None else a if b is None else a & b


def _checked_state(state: LinearAttentionState | None, tokens: Tokens, rule: Rule) -> LinearAttentionState:
    """The state, which fits tokens and rule; the empty one for None."""
    batch, num_query, num_key = tokens.query.shape[0], tokens.query.shape[-2], tokens.key.shape[-2]
    num_value, value_dim = tokens.value.shape[-2:]
    heads, dtype = (("query", num_query), ("key", num_key)), tokens.key.dtype
    features = checks.check_features(rule.feature_map, heads, tokens.key.shape[-1], dtype)
    checks.check_decayed_features(tokens.log_decay, tokens.key.ndim, features)
    empty = functools.partial(empty_state, batch, max(num_key, num_value), features, value_dim, accumulator_dtype(dtype))
    if state is None:
        return empty()
    checks.check_state(state, jax.eval_shape(empty))
    return state


# --- from tokens and rule to a form -----------------------------------------------------------------------------------


def _causal(tokens: Tokens, state, rule: Rule, chunk_size, implementation) -> tuple[LinearAttentionState, Array]:
    state = _checked_state(state, tokens, rule)
    chunk_size, implementation = _choose(tokens, state, chunk_size, implementation)
    if 0 in tokens.query.shape[:2]:
        return state, _empty_output(tokens)
    return _compiled(CAUSAL_FORMS[implementation], rule)(tokens, state, rule, chunk_size)


def _bidirectional(tokens: Tokens, rule: Rule, chunk_size, implementation) -> Array:
    state = _checked_state(None, tokens, rule)
    chunk_size, implementation = _choose(tokens, state, chunk_size, implementation)
    if 0 in (*tokens.query.shape[:2], tokens.key.shape[1]):
        return _empty_output(tokens)
    return _compiled(BIDIRECTIONAL_FORMS[implementation], rule)(tokens, state, rule, chunk_size)


def _choose(tokens: Tokens, state: LinearAttentionState, chunk_size, implementation) -> tuple[Any, str]:
    checks.check_positive_int("chunk_size", chunk_size, or_none=True)
    query_length, key_length = tokens.query.shape[1], tokens.key.shape[1]
    implementation = implementation or select_implementation(query_length, key_length, *state.kv.shape[-2:])
    longest = max(query_length, key_length, 1)
    if chunk_size is not None:
        return min(chunk_size, longest), implementation
    if implementation == "recurrent":
        return None, implementation  # it chooses its own blocks
    per_feature = decays_per_feature(tokens)
    return select_chunk_size(longest, backend=jax.default_backend(), decay_per_feature=per_feature), implementation


def _empty_output(tokens: Tokens) -> Array:
    num_heads = max(tokens.query.shape[-2], tokens.key.shape[-2], tokens.value.shape[-2])
    return jnp.zeros((*tokens.query.shape[:2], num_heads, tokens.value.shape[-1]), tokens.value.dtype)


def _step(tokens, state, rule):
    state, output = recurrent.step(enter_state(rule, tokens, state), tokens, rule)
    return unmark_empty(state), output


def _compiled(form, rule: Rule):
    """The form as one compiled function, kept between calls; a foreign map may read what changes between them."""
    return _jit(form) if feature_maps.is_own(rule.feature_map) else form


@functools.cache
def _jit(form):
    return jax.jit(form, static_argnames=() if form is _step else ("chunk_size",))

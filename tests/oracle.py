"""The oracle: linear attention as its formula reads, in NumPy loops, and its gradients by complex steps.

    o_t = φ(q_t)ᵀ (Σ_s φ(k_s) v_sᵀ) / φ(q_t)ᵀ (Σ_s φ(k_s)),   s over the keys that t sees

Nothing here is shared with the package. Loops run over heads, queries and keys; the batch alone is an array axis, on which
`gradients` lays out one perturbed copy of the problem for each input number. Axes: see `cases`.
"""

from typing import NamedTuple

import numpy as np

# --- feature maps, for real and complex numbers ------------------------------------------------------------------------


def _positive(x):
    return np.where(x.real > 0, x, 0)


def elu_plus_one(x):
    return np.where(x.real > 0, x + 1, np.exp(np.where(x.real > 0, 0, x)))


def relu_squared(x):
    return _positive(x) ** 2


def softplus(x):
    return np.log(1 + np.exp(x))


def identity(x):
    return x


def softmax(x):
    return np.exp(x) / np.sum(np.exp(x), axis=-1, keepdims=True)


def dpfp_2(x):
    r = np.concatenate([_positive(x), _positive(-x)], axis=-1)
    columns = range(r.shape[-1])
    return np.stack([r[..., i] * r[..., i - shift] for shift in (1, 2) for i in columns], axis=-1)


# --- who sees whom ----------------------------------------------------------------------------------------------------


class Visible(NamedTuple):
    """What masks, segments and lengths say, spelled out."""

    key: np.ndarray  # bool [B, T, S]: query t sees key s
    state: np.ndarray  # bool [B, T]: query t sees the carried state
    row: np.ndarray  # bool [B, T]: False = the output row is 0
    token: np.ndarray  # bool [B, S]: False = the key does not exist
    last: np.ndarray  # bool [B, S]: the key is in the state that is handed on
    state_lasts: np.ndarray  # bool [B]: the carried state is, too
    starts: np.ndarray  # bool [B, S]: the key's run is another than that of what comes before it


def visible(
    batch: int,
    num_queries: int,
    num_keys: int,
    is_causal: bool,
    *,
    mask=None,
    segment_ids=None,
    state_segment_ids=None,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
) -> Visible:
    """Goes through all pairs of a query and a key, and asks of each what the contract says."""
    one_run = np.zeros((batch, max(num_queries, num_keys, 1)), int)
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    query_ids, key_ids = (one_run if ids is None else np.asarray(ids) for ids in pair)
    first_ids = key_ids[:, :1].ravel() if state_segment_ids is None else np.asarray(state_segment_ids)
    token = np.ones((batch, num_keys), bool) if mask is None else np.asarray(mask).reshape(-1, num_keys)
    token = np.array(np.broadcast_to(token, (batch, num_keys)))
    row = token.copy() if is_causal else np.ones((batch, num_queries), bool)
    for b in range(batch):
        if key_value_seq_lengths is not None:
            token[b, key_value_seq_lengths[b] :] = False
        if query_seq_lengths is not None:
            row[b, query_seq_lengths[b] :] = False
    sees = np.zeros((batch, num_queries, num_keys), bool)
    for b, t, s in np.ndindex(sees.shape):
        sees[b, t, s] = token[b, s] and query_ids[b, t] == key_ids[b, s] and (s <= t or not is_causal)
    state = query_ids[:, :num_queries] == first_ids[:, None]
    last_ids = key_ids[:, num_keys - 1] if num_keys else first_ids
    lasts = token & (key_ids == last_ids[:, None])[:, :num_keys]
    starts = key_ids[:, :num_keys] != np.concatenate([first_ids[:, None], key_ids[:, : max(num_keys - 1, 0)]], axis=1)
    return Visible(sees, state, row, token, lasts, first_ids == last_ids, starts)


# --- the loops --------------------------------------------------------------------------------------------------------


def attention(query, key, value, kv, key_sum, seen: Visible, *, feature_map, normalize=True, eps=0.0, scale=1.0):
    """The output [B, T, M, E], and the sums that are handed on: kv [B, N, F, E] and key_sum [B, N, F].

    `kv` and `key_sum` are the sums before the first token, or None. `feature_map` is one function or a pair.
    """
    query_map, key_map = feature_map if isinstance(feature_map, tuple) else (feature_map, feature_map)
    batch, num_queries, num_query_heads, _ = query.shape
    num_keys, num_key_heads, num_value_heads = key.shape[1], key.shape[2], value.shape[2]
    num_state_heads = max(num_key_heads, num_value_heads)
    num_heads = max(num_query_heads, num_state_heads)
    phi_q = query_map(np.where(seen.row[..., None, None], query, 0))
    phi_k = key_map(np.where(seen.token[..., None, None], key, 0))
    value = np.where(seen.token[..., None, None], value, 0)
    kind = np.result_type(phi_q, phi_k, value, np.float64)
    output = np.zeros((batch, num_queries, num_heads, value.shape[-1]), kind)
    for m in range(num_heads):
        n = m * num_state_heads // num_heads
        k, v = phi_k[:, :, n * num_key_heads // num_state_heads], value[:, :, n * num_value_heads // num_state_heads]
        q = phi_q[:, :, m * num_query_heads // num_heads]
        for t in range(num_queries):
            numerator, denominator = np.zeros((batch, value.shape[-1]), kind), np.zeros(batch, kind)
            if kv is not None:
                from_state = np.where(seen.state[:, t, None], q[:, t], 0)
                numerator += np.einsum("bf,bfe->be", from_state, kv[:, n])
                denominator += np.sum(from_state * key_sum[:, n], axis=-1)
            for s in np.flatnonzero(seen.key[:, t].any(axis=0)):
                weight = np.where(seen.key[:, t, s], np.sum(q[:, t] * k[:, s], axis=-1), 0)
                numerator += weight[:, None] * v[:, s]
                denominator += weight
            if normalize:
                denominator = denominator + eps
                empty = denominator == 0
                numerator = np.where(empty[:, None], 0, numerator / np.where(empty, 1, denominator)[:, None])
            output[:, t, m] = np.where(seen.row[:, t, None], numerator if normalize else scale * numerator, 0)
    new_kv = np.zeros((batch, num_state_heads, phi_k.shape[-1], value.shape[-1]), kind)
    new_key_sum = np.zeros((batch, num_state_heads, phi_k.shape[-1]), kind)
    for n in range(num_state_heads):
        k, v = phi_k[:, :, n * num_key_heads // num_state_heads], value[:, :, n * num_value_heads // num_state_heads]
        if kv is not None:
            new_kv[:, n] += np.where(seen.state_lasts[:, None, None], kv[:, n], 0)
            new_key_sum[:, n] += np.where(seen.state_lasts[:, None], key_sum[:, n], 0)
        for s in range(num_keys):
            k_s = np.where(seen.last[:, s, None], k[:, s], 0)
            new_kv[:, n] += k_s[:, :, None] * v[:, s, None, :]
            new_key_sum[:, n] += k_s
    return output, new_kv, new_key_sum


def recurrence(
    query, key, value, log_decay, kv, key_sum, seen: Visible, *, feature_map, normalize=True, eps=0.0, scale=1.0
):
    """Causal attention with decay, token by token: S = a S + φ(k) vᵀ, Z = a Z + φ(k); results as `attention`.

    `log_decay` is [B, T, N] or [B, T, N, F].
    """
    batch, length, num_query_heads, _ = query.shape
    num_key_heads, num_value_heads = key.shape[2], value.shape[2]
    num_state_heads = kv.shape[1]
    num_heads = max(num_query_heads, num_state_heads)
    phi_q = feature_map(np.where(seen.row[..., None, None], query, 0))
    phi_k = feature_map(np.where(seen.token[..., None, None], key, 0))
    value = np.where(seen.token[..., None, None], value, 0)
    decay = np.exp(log_decay if log_decay.ndim == 4 else log_decay[..., None])
    kind = np.result_type(phi_q, phi_k, value, decay, kv, np.float64)
    kv, key_sum = kv.astype(kind), key_sum.astype(kind)
    output = np.zeros((batch, length, num_heads, value.shape[-1]), kind)
    for t in range(length):
        kv = np.where(seen.starts[:, t, None, None, None], 0, kv)
        key_sum = np.where(seen.starts[:, t, None, None], 0, key_sum)
        for n in range(num_state_heads):
            k, v = phi_k[:, t, n * num_key_heads // num_state_heads], value[:, t, n * num_value_heads // num_state_heads]
            kept = seen.token[:, t, None]
            a, k = np.where(kept, decay[:, t, n], 1), np.where(kept, k, 0)
            kv[:, n] = a[..., None] * kv[:, n] + k[:, :, None] * v[:, None, :]
            key_sum[:, n] = a * key_sum[:, n] + k
        for m in range(num_heads):
            n, q = m * num_state_heads // num_heads, phi_q[:, t, m * num_query_heads // num_heads]
            numerator, denominator = np.einsum("bf,bfe->be", q, kv[:, n]), np.sum(q * key_sum[:, n], axis=-1) + eps
            empty = denominator == 0
            quotient = np.where(empty[:, None], 0, numerator / np.where(empty, 1, denominator)[:, None])
            output[:, t, m] = np.where(seen.row[:, t, None], quotient if normalize else scale * numerator, 0)
    return output, kv, key_sum


def exponential(q, k, v, log_decay=0.0):
    """Causal attention with φ = exp in log space, one head [T, D], [T, D], [T, E]: any size of q and k."""
    output = np.zeros((len(q), v.shape[-1]))
    for t in range(len(q)):
        logs = q[t] + k[: t + 1]  # [s, F]: the log of each product of features
        logs = logs + log_decay * (t - np.arange(t + 1))[:, None]
        weights = np.exp(logs - logs.max()).sum(axis=-1)
        output[t] = weights @ v[: t + 1] / weights.sum()
    return output


def one_head(q, k, v):
    """Causal attention of long sequences [T, D], [T, D], [T, E] by cumulative sums: (output, S_T, Z_T)."""
    phi_q, phi_k = elu_plus_one(q), elu_plus_one(k)
    kv, key_sum = np.cumsum(phi_k[:, :, None] * v[:, None, :], axis=0), np.cumsum(phi_k, axis=0)
    output = np.einsum("tf,tfe->te", phi_q, kv) / np.einsum("tf,tf->t", phi_q, key_sum)[:, None]
    return output, kv[-1], key_sum[-1]


def gradients(function, arguments, seen: Visible, cotangents, step: float = 1e-30) -> list[np.ndarray]:
    """The gradient of Σ ⟨result, cotangent⟩ for each argument, row by row, by Im f(x + i·h) / h: no cancellation.

    `function(*arguments, seen)` returns arrays; its batch rows must not mix. Masked numbers may be NaN.
    """
    result = [np.zeros(x.shape) for x in arguments]
    sizes = [x[0].size for x in arguments]
    for b in range(arguments[0].shape[0]):
        copies, offset, total = [], 0, sum(sizes)
        for x, size in zip(arguments, sizes, strict=True):
            copy = np.repeat(x[b : b + 1].astype(complex), total, axis=0).reshape(total, size)
            copy[np.arange(offset, offset + size), np.arange(size)] += 1j * step
            copies.append(copy.reshape(total, *x.shape[1:]))
            offset += size
        seen_copies = Visible(*(np.repeat(x[b : b + 1], total, axis=0) for x in seen))
        outputs = function(*copies, seen_copies)
        slopes = sum(
            np.sum((y.imag / step * w[b]).reshape(total, -1), axis=1) for y, w in zip(outputs, cotangents, strict=True)
        )
        for i, part in enumerate(np.split(slopes, np.cumsum(sizes)[:-1])):
            result[i][b] = part.reshape(result[i].shape[1:])
    return result

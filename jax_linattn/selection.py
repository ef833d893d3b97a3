"""Which form, and which chunk length, when the caller leaves it open. Plain functions of sizes, to be read and tested."""

QUADRATIC_AT_MOST = 128  # tokens; the weights of longer sequences are never formed unasked


def select_implementation(query_length: int, key_length: int, num_features: int, value_dim: int) -> str:
    """The form that `implementation=None` stands for.

    Quadratic while all T·S weights cost fewer multiplications than going through the state does, and T and S are short;
    chunked otherwise. So far the same for causal attention and not, and on every backend.

    Args:
      query_length: T.
      key_length: S.
      num_features: F.
      value_dim: E.

    Returns:
      A name that `implementation` takes.
    """
    through_weights = query_length * key_length * (num_features + value_dim)
    through_state = (query_length + key_length) * num_features * value_dim
    short = max(query_length, key_length) <= QUADRATIC_AT_MOST
    return "quadratic" if short and through_weights <= through_state else "chunked"


def select_chunk_size(length: int, *, backend: str, decay_per_feature: bool = False) -> int:
    """C, the tokens of a chunk, for `length` tokens: 64, or 128 where products come in tiles of 128.

    With a decay per feature 32: what is done by products in halves grows with log₂ C.
    """
    chunk_size = 32 if decay_per_feature else 128 if backend == "tpu" else 64
    return max(1, min(length, chunk_size))


def select_chunks_per_block(
    state_shape: tuple[int, ...], chunk_size: int, *, backend: str, decay_per_feature: bool = False
) -> int:
    """The chunks that the chunked form computes side by side, and those between two states kept for a gradient.

    On a CPU what stays in the cache: 512 KiB of each array, and a quarter of that with a decay per feature, which holds
    more beside the tokens. Few enough chunks make many states to keep; they are to be at most twice the size of q, k and
    v. On a TPU 2 chunks: its compiler writes out the products of a block one by one, and takes time for each.

    Args:
      state_shape: of S, [B, N, F, E].
      chunk_size: C.
      backend: what `jax.default_backend()` says.
      decay_per_feature: whether there is one.
    """
    if backend != "cpu":
        return 2 if backend == "tpu" else 4 if decay_per_feature else 8
    batch, heads, num_features, value_dim = state_shape
    chunk_bytes = 4 * batch * heads * chunk_size * max(num_features, value_dim)
    cached = 2 ** (17 if decay_per_feature else 19) // max(1, chunk_bytes)
    kept = num_features // (6 * chunk_size)
    return min(max(1, cached, kept), 8)

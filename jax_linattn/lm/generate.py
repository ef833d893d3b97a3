"""Writing with a model: a prompt of any length in one call, then pieces of text in constant memory.

`prefill` is compiled once a power of two of prompt length, `write` once: what changes between calls (length, sampling,
position) is no part of either program. Softmax models have a cache with an end, so for them both are compiled once a
power of two of capacity as well.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from jax_linattn.checks import key_mask, require
from jax_linattn.lm.data import Vocabulary
from jax_linattn.lm.model import Decoder
from jax_linattn.lm.sampling import Sampling, sample, sampling

PIECE_LENGTH = 32


class Carry(NamedTuple):
    """What goes from token to token."""

    cache: Any  # the model's, as nnx.State
    logits: Array  # [B, V], of the token that comes next
    position: Array  # int32 [], how many tokens are written


# --- tokens -----------------------------------------------------------------------------------------------------------


def generate(
    model: Decoder,
    prompts,
    length: int,
    *,
    mask=None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Array | None = None,
) -> Array:
    """Continues prompts.

    Token t of a row is drawn with fold_in(the row's key, t), so that each row is what its prompt gives alone with that
    key, up to rounding of the logits. Calls from Python only: not inside `jax.jit`.

    Args:
      model: is not changed; a cache that it holds is not used.
      prompts: int [B, T], T >= 1.
      length: how many tokens to write.
      mask: bool [B, T], True = a real token: prompts of unequal length are padded on the left, as `pad_prompts` does.
      temperature: as `sampling` takes it.
      top_k: likewise.
      top_p: likewise.
      key: a PRNG key, of which row b takes fold_in(key, b), or keys [B], one a row; needed unless temperature is 0. Of
        JAX's default kind, threefry: others do not draw row by row.

    Returns:
      int32 [B, length].

    Raises:
      ValueError: naming the argument, what it got and what would be right.
    """
    how = {"mask": mask, "temperature": temperature, "top_k": top_k, "top_p": top_p, "key": key}
    pieces = list(stream(model, prompts, length, **how))
    return jax.device_put(np.concatenate([np.zeros((len(prompts), 0), np.int32), *pieces], axis=1))


def stream(
    model: Decoder,
    prompts,
    length: int,
    *,
    mask=None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Array | None = None,
    piece_length: int = PIECE_LENGTH,
) -> Iterator[np.ndarray]:
    """What `generate` returns, piece by piece as it is written: int32 [B, piece_length], the last one shorter.

    Arguments are those of `generate`, and are checked before the first piece is asked for.
    """
    tokens, mask = _check_prompts(prompts, mask, model.config.vocabulary_size)
    is_count = isinstance(length, int | np.integer) and not isinstance(length, bool)
    require(is_count and length >= 0, f"length must be a whole number, at least 0, got {length!r}")
    require(piece_length >= 1, f"piece_length must be at least 1, got {piece_length}")
    how = sampling(temperature, top_k, top_p)
    keys = _row_keys(key, len(tokens), is_greedy=temperature == 0)
    return _pieces(model, tokens, mask, int(length), keys, how, piece_length)


def _pieces(model, tokens, mask, length: int, keys, how: Sampling, piece_length: int) -> Iterator[np.ndarray]:
    if length == 0:
        return
    tokens, mask = _pad_left(tokens, mask, _power_of_two(tokens.shape[1]))
    room = tokens.shape[1] + -(-length // piece_length) * piece_length
    graphdef, cache, rest = with_empty_cache(model, len(tokens), _power_of_two(room))
    carry = prefill(graphdef, rest, cache, tokens, mask)
    for start in range(0, length, piece_length):
        carry, piece = write(graphdef, rest, carry, keys, how, piece_length=piece_length)
        yield np.asarray(piece)[:, : length - start]


# --- compiled parts ---------------------------------------------------------------------------------------------------


def with_empty_cache(model: Decoder, batch_size: int, capacity: int) -> tuple[Any, Any, Any]:
    """(graphdef, cache, all other variables) of a model that decodes; capacity matters to softmax attention alone."""
    model = nnx.merge(*nnx.split(model))
    model.init_cache(batch_size, capacity)
    graphdef, cache, rest = nnx.split(model, nnx.Cache, ...)
    return graphdef, cache, rest


@functools.partial(jax.jit, static_argnames="graphdef", donate_argnames="cache")
def prefill(graphdef, rest, cache, tokens: Array, mask: Array | None) -> Carry:
    """Prompts int [B, T] through a model as `with_empty_cache` gives it; the cache's buffers are used up."""
    return _forward(graphdef, rest, cache, tokens, mask, jnp.zeros((), jnp.int32))


@functools.partial(jax.jit, static_argnames=("graphdef", "piece_length"), donate_argnames="carry")
def write(graphdef, rest, carry: Carry, keys: Array, how: Sampling, *, piece_length: int) -> tuple[Carry, Array]:
    """The next tokens, int32 [B, piece_length]; the carry's buffers are used up. keys: [B]."""

    def step(carry: Carry, _):
        draw_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, carry.position)
        tokens = jax.vmap(sample, in_axes=(0, 0, None))(draw_keys, carry.logits, how)
        return _forward(graphdef, rest, carry.cache, tokens[:, None], None, carry.position + 1), tokens

    carry, tokens = lax.scan(step, carry, length=piece_length)
    return carry, tokens.T


def _forward(graphdef, rest, cache, tokens: Array, mask: Array | None, position: Array) -> Carry:
    model = nnx.merge(graphdef, cache, rest)
    logits = model(tokens, mask=mask, decode=True)
    return Carry(nnx.state(model, nnx.Cache), logits[:, -1], position)


# --- prompts and keys -------------------------------------------------------------------------------------------------


def pad_prompts(prompts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts of unequal length as one batch, padded on the left: (tokens int32 [B, T], mask bool [B, T]).

    Raises:
      ValueError: if there is none, or an empty one among them.
    """
    require(len(prompts) > 0 and min(map(len, prompts)) > 0, "prompts must be at least one, and none of them empty")
    longest = max(map(len, prompts))
    rows = [_pad_left(np.asarray(p, np.int32)[None], np.ones((1, len(p)), bool), longest) for p in prompts]
    return np.concatenate([tokens for tokens, _ in rows]), np.concatenate([mask for _, mask in rows])


def _pad_left(tokens: np.ndarray, mask: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    pads = ((0, 0), (length - tokens.shape[1], 0))
    return np.pad(tokens, pads), np.pad(mask, pads)


def _power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()


def _check_prompts(prompts, mask, vocabulary_size: int) -> tuple[np.ndarray, np.ndarray]:
    prompts = np.asarray(prompts)
    fits = prompts.ndim == 2 and prompts.size > 0 and prompts.dtype.kind in "iu"
    require(fits, f"prompts must be an integer array [B >= 1, T >= 1], got {prompts.dtype} {prompts.shape}")
    low, high = prompts.min(), prompts.max()
    require(
        low >= 0 and high < vocabulary_size,
        f"prompts must be tokens from 0 to {vocabulary_size - 1}, got numbers from {low} to {high}",
    )
    mask = np.ones(prompts.shape, bool) if mask is None else np.asarray(key_mask(mask, *prompts.shape))
    require(mask[:, -1].all(), "mask must be True for each prompt's last token: pads stand on the left, see pad_prompts")
    return prompts.astype(np.int32), mask


def _row_keys(key: Array | None, batch: int, *, is_greedy: bool) -> Array:
    """Keys [B]."""
    require(key is not None or is_greedy, "key must be a PRNG key unless temperature is 0, got None")
    key = jax.random.key(0) if key is None else key
    shape = jnp.shape(key)
    is_key = isinstance(key, Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    require(
        is_key and shape in {(), (batch,)},
        f"key must be a PRNG key, as jax.random.key makes it, or an array of them [B] = ({batch},), got "
        f"{getattr(key, 'dtype', type(key).__name__)} {shape}",
    )
    return _fold_in_rows(key, np.arange(batch)) if shape == () else key


_fold_in_rows = jax.jit(jax.vmap(jax.random.fold_in, in_axes=(None, 0)))


# --- text -------------------------------------------------------------------------------------------------------------


def continue_texts(
    model: Decoder,
    vocabulary: Vocabulary,
    prompts: Sequence[str],
    length: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> list[str]:
    """What a model writes after each prompt, `length` characters: what each prompt gives alone with seed + its index.

    Raises:
      ValueError: if a prompt is empty, or holds a character that the vocabulary lacks; as `generate`.
    """
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    pieces = stream_texts(model, vocabulary, prompts, length, **how)
    return ["".join(texts) for texts in zip([""] * len(prompts), *pieces, strict=True)]


def stream_texts(
    model: Decoder,
    vocabulary: Vocabulary,
    prompts: Sequence[str],
    length: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Iterator[list[str]]:
    """What `continue_texts` returns, piece by piece as it is written. Arguments are checked before the first piece."""
    tokens, mask = pad_prompts([vocabulary.encode(prompt) for prompt in prompts])
    last = seed + len(prompts) - 1
    require(seed >= 0 and last < 2**32, f"seed must be from 0 to 2³² - 1, one more for each prompt, got {seed} … {last}")
    keys = jnp.stack([jax.random.key(seed + row, impl="threefry2x32") for row in range(len(prompts))])
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    pieces = stream(model, tokens, length, mask=mask, key=keys, **how)
    return ([vocabulary.decode(row) for row in piece] for piece in pieces)

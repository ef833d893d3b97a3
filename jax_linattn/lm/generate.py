"""Writing with a model: a prompt of any length in one call, then one token at a time in constant memory."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from jax_linattn.checks import require
from jax_linattn.lm.data import Vocabulary
from jax_linattn.lm.model import Decoder


def generate(
    model: Decoder,
    prompts: Array,
    length: int,
    *,
    mask: Array | None = None,
    temperature: float | Array = 1.0,
    key: Array | None = None,
) -> Array:
    """Continues prompts.

    The prompts go through the model in one call; then a compiled loop draws a token and feeds it back. What the loop
    carries is the model's cache, whose size does not depend on the length where attention is linear.

    Args:
      model: is not changed; a cache that it holds is not used.
      prompts: int [B, T], T >= 1.
      length: how many tokens to write.
      mask: bool [B, T], True = a real token: prompts of unequal length are padded on the left, as `pad_prompts` does.
      temperature: tokens are drawn from softmax(logits / temperature); 0 = the likeliest.
      key: a PRNG key; needed unless temperature is 0. A row's draws depend on its place in the batch alone.

    Returns:
      int32 [B, length].

    Raises:
      ValueError: naming the argument, what it got and what would be right.
    """
    require(jnp.ndim(prompts) == 2 and prompts.shape[1] > 0, f"prompts must be [B, T >= 1], got {jnp.shape(prompts)}")
    require(length >= 0, f"length must be at least 0, got {length}")
    known = isinstance(temperature, int | float)
    require(not known or temperature >= 0, f"temperature must be at least 0, got {temperature}")
    require(key is not None or (known and temperature == 0), "key must be a PRNG key unless temperature is 0, got None")
    key = jax.random.key(0) if key is None else key
    graphdef, state = nnx.split(model)
    temperature = jnp.asarray(temperature, jnp.float32)
    return _generate(state, jnp.asarray(prompts), mask, temperature, key, graphdef=graphdef, length=length)


@functools.partial(jax.jit, static_argnames=("graphdef", "length"))
def _generate(state, prompts, mask, temperature, key, *, graphdef, length) -> Array:
    """Prefill, then a scan over single steps."""
    batch, prompt_length = prompts.shape
    model = nnx.merge(graphdef, state)
    model.init_cache(batch, prompt_length + length)
    graphdef, cache, rest = nnx.split(model, nnx.Cache, ...)

    def forward(cache, tokens, mask=None):
        """(cache, logits [B, V] after the last token)."""
        model = nnx.merge(graphdef, cache, rest)
        logits = model(tokens, mask=mask, decode=True)
        return nnx.state(model, nnx.Cache), logits[:, -1]

    def step(carry, keys):
        cache, logits = carry
        tokens = jax.vmap(sample, in_axes=(0, 0, None))(keys, logits, temperature)
        return forward(cache, tokens[:, None]), tokens

    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(batch))
    keys = jax.vmap(lambda row: jax.random.split(row, length))(keys)
    _, tokens = lax.scan(step, forward(cache, prompts, mask), jnp.swapaxes(keys, 0, 1))
    return jnp.swapaxes(tokens, 0, 1)


def sample(key: Array, logits: Array, temperature: Array) -> Array:
    """One token, int32 []: from softmax(logits / temperature), or at temperature 0 the likeliest. logits: [V]."""
    drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, jnp.finfo(logits.dtype).tiny))
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits)).astype(jnp.int32)


def pad_prompts(prompts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts of unequal length as one batch, padded on the left: (tokens int32 [B, T], mask bool [B, T]).

    Raises:
      ValueError: if there is none, or an empty one among them.
    """
    require(len(prompts) > 0 and min(map(len, prompts)) > 0, "prompts must be at least one, and none of them empty")
    length = max(map(len, prompts))
    tokens = np.zeros((len(prompts), length), np.int32)
    mask = np.zeros((len(prompts), length), bool)
    for row, prompt in enumerate(prompts):
        tokens[row, length - len(prompt) :] = prompt
        mask[row, length - len(prompt) :] = True
    return tokens, mask


def continue_texts(
    model: Decoder,
    vocabulary: Vocabulary,
    prompts: Sequence[str],
    length: int,
    *,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[str]:
    """What a model writes after each prompt, `length` characters.

    Raises:
      ValueError: if a prompt is empty, or holds a character that the vocabulary lacks.
    """
    tokens, mask = pad_prompts([vocabulary.encode(prompt) for prompt in prompts])
    key = jax.random.key(seed)
    written = generate(model, jnp.asarray(tokens), length, mask=jnp.asarray(mask), temperature=temperature, key=key)
    return [vocabulary.decode(row) for row in np.asarray(written)]

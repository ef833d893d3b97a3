"""Time in blocks: a loop over them that reads tokens where they lie and writes outputs where they belong.

What `lax.scan` takes and gives has the blocks first, so with a batch of more than one every array would be copied into
another order before it, the outputs after it, and all their gradients once more. Here [B, T, …] stays as it is. A block is
a slice of it; to the slice's place in the gradient XLA adds in place. A last block that would end after T begins earlier
instead, and what blocks before it have had already is masked.

For 16-bit numbers on a CPU XLA does not add in place but to all of [B, T, …], once a block. There blocks are stacked
beforehand and outputs afterwards, as `lax.scan` has it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_linattn.forms.tokens import Tokens
from jax_linattn.state import vary_with


class Block(NamedTuple):
    """What a loop's body is given, for `Blocks.read`."""

    index: Any
    stacked: Tokens | None = None  # its tokens, [B, L, …]; None = they are read where they lie


class Blocks(NamedTuple):
    """Tokens [B, T, …] and how their time is split: into blocks of n chunks of C tokens, together L."""

    tokens: Tokens  # padded where they are fewer than one block has
    num_tokens: int  # T, without padding
    number: int  # of blocks
    chunk_size: int  # C
    chunks: int  # n

    @classmethod
    def of(cls, tokens: Tokens, chunk_size: int, chunks_per_block: int | None = None) -> "Blocks":
        """As few blocks as can be of at most so many chunks, and as short ones for that; None: one block of all."""
        num_tokens = _length(tokens)
        num_chunks = -(-num_tokens // chunk_size)
        number = 1 if chunks_per_block is None else -(-num_chunks // chunks_per_block)
        chunks = -(-num_chunks // number)
        return cls(_pad(tokens, chunk_size * chunks), num_tokens, number, chunk_size, chunks)

    @classmethod
    def of_one_chunk(cls, tokens: Tokens, longest: int) -> "Blocks":
        """As few blocks as can be of at most so many tokens, each one chunk."""
        num_tokens = _length(tokens)
        return cls.of(tokens, -(-num_tokens // -(-num_tokens // longest)), 1)

    @property
    def length(self) -> int:
        return self.chunks * self.chunk_size

    def recompute(self, function: Callable) -> Callable:
        """The function, of which a gradient keeps the arguments and nothing from inside; unless there is one block."""
        return function if self.number == 1 else jax.checkpoint(function, prevent_cse=False)

    def read(self, block: Block, run: Array | None = None) -> Tokens:
        """A block's tokens, [n, B, C, …].

        Args:
          block: as the loop gives it.
          run: [B], the run of equal ids that the block's first new token follows: what is not new joins it.
        """
        tokens = self.tokens
        if block.stacked is not None:
            tokens = block.stacked
        elif self.number > 1:
            start = self._start(block.index)
            tokens = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, self.length, axis=1), tokens)
        new = self._new(block.index)
        if new is not None:
            tokens = tokens._replace(
                query_mask=None if tokens.query is None else _both(tokens.query_mask, new, tokens.query),
                key_mask=None if tokens.key is None else _both(tokens.key_mask, new, tokens.key),
            )
            if run is not None:
                tokens = tokens._replace(key_segment=jnp.maximum(tokens.key_segment, run[:, None]))
        return jax.tree.map(self._split, tokens)

    def loop(self, body: Callable, carry: Any, heads_and_dim: tuple[int, int] | None = None) -> tuple[Any, Any]:
        """One block after another.

        Args:
          body: (carry, block) -> (carry, output [n, B, C, M, E], or None).
          carry: what it starts from.
          heads_and_dim: M and E of the output; None = there is none.

        Returns:
          (the last carry, output [B, T, M, E], or None).
        """

        def body_with_joined_output(carry, block):
            carry, output = body(carry, block)
            return carry, None if output is None else self._join(output)

        def write(before, block):
            carry, outputs = before
            carry, output = body_with_joined_output(carry, block)
            if output is not None:
                outputs = _write(outputs, output, self._start(block.index), self._new(block.index))
            return (carry, outputs), None

        if self.number == 1:
            carry, output = body_with_joined_output(carry, Block(0))
            return carry, None if output is None else output[:, : self.num_tokens]
        blocks = Block(jnp.arange(self.number))
        if adds_in_place(self.tokens, jax.default_backend()):
            outputs = None
            if heads_and_dim is not None:
                query = self.tokens.query
                outputs = vary_with(jnp.zeros((*query.shape[:2], *heads_and_dim), query.dtype), self.tokens, carry)
            return lax.scan(write, (carry, outputs), blocks)[0]
        blocks = blocks._replace(stacked=jax.tree.map(self._stack, self.tokens))
        carry, outputs = lax.scan(body_with_joined_output, carry, blocks)
        return carry, None if outputs is None else self._unstack(outputs)

    def _start(self, index):
        """A block's first token."""
        return jnp.minimum(index * self.length, self.num_tokens - self.length)

    @property
    def _overlap(self) -> int:
        """How many tokens of the last block are not new."""
        return 0 if self.number == 1 else self.number * self.length - self.num_tokens

    def _new(self, index) -> Array | None:
        """Which tokens no block before had, [L]; None = all."""
        return self._start(index) + jnp.arange(self.length) >= index * self.length if self._overlap else None

    def _stack(self, x: Array) -> Array:
        """[B, T, …] to [number, B, L, …]."""
        if self._overlap:
            x = jnp.concatenate([x[:, : (self.number - 1) * self.length], x[:, -self.length :]], axis=1)
        return jnp.moveaxis(x.reshape(x.shape[0], self.number, self.length, *x.shape[2:]), 1, 0)

    def _unstack(self, x: Array) -> Array:
        """[number, B, L, …] to [B, T, …]."""
        x = jnp.moveaxis(x, 0, 1).reshape(x.shape[1], self.number * self.length, *x.shape[3:])
        last = (self.number - 1) * self.length
        return jnp.concatenate([x[:, :last], x[:, last + self._overlap :]], axis=1) if self._overlap else x

    def _split(self, x: Array) -> Array:
        """[B, n·C, …] to [n, B, C, …]."""
        return jnp.moveaxis(x.reshape(x.shape[0], self.chunks, self.chunk_size, *x.shape[2:]), 1, 0)

    def _join(self, x: Array) -> Array:
        """[n, B, C, …] to [B, n·C, …]."""
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], self.length, *x.shape[3:])


def adds_in_place(tokens: Tokens, backend: str) -> bool:
    """Whether XLA adds a block's gradient to all of a sequence's in place."""
    sizes = [x.dtype.itemsize for x in jax.tree.leaves(tokens) if jnp.issubdtype(x.dtype, jnp.floating)]
    return backend != "cpu" or min(sizes) >= 4


@jax.custom_jvp
def _write(whole: Array, part: Array, start: Array, new: Array | None) -> Array:
    """`whole` [B, T, M, E] with `part` [B, L, M, E] from `start` on, where `new` [L]; whole must be 0 there.

    Since it is, the derivative may add in place of replacing: the gradient of `whole` passes as it is, where otherwise 0
    would be written into it, and all of it copied for that.
    """
    if new is not None:
        part = jnp.where(new[:, None, None], part, lax.dynamic_slice_in_dim(whole, start, part.shape[1], axis=1))
    return lax.dynamic_update_slice_in_dim(whole, part, start, axis=1)


@_write.defjvp
def _write_jvp(primals, tangents):
    (*_, start, new), (whole, part, *_) = primals, tangents
    if new is not None:
        part = jnp.where(new[:, None, None], part, 0)
    return _write(*primals), whole + lax.dynamic_update_slice_in_dim(jnp.zeros_like(whole), part, start, axis=1)


def _both(mask: Array | None, new: Array, x: Array) -> Array:
    """A mask [B, L] or None, and new [L], for tokens x [B, L, …]."""
    new = jnp.broadcast_to(new, x.shape[:2])
    return new if mask is None else mask & new


def _length(tokens: Tokens) -> int:
    return jax.tree.leaves(tokens)[0].shape[1]


def _pad(tokens: Tokens, length: int) -> Tokens:
    """Masked tokens at the end where there are fewer. They stay in the last token's run."""
    padding = length - _length(tokens)
    if padding <= 0:
        return tokens

    def pad(x, **how):
        return None if x is None else jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2), **how)

    def pad_mask(mask, x):
        if x is None:
            return None
        mask = jnp.ones(x.shape[:2], bool) if mask is None else mask
        return pad(mask)

    return Tokens(
        query=pad(tokens.query),
        key=pad(tokens.key),
        value=pad(tokens.value),
        query_mask=pad_mask(tokens.query_mask, tokens.query),
        key_mask=pad_mask(tokens.key_mask, tokens.key),
        query_segment=pad(tokens.query_segment, mode="edge"),
        key_segment=pad(tokens.key_segment, mode="edge"),
        log_decay=pad(tokens.log_decay),
    )

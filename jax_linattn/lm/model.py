"""The language model: a pre-norm decoder whose attention is a choice."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.nn.initializers import Initializer, normal, variance_scaling

from jax_linattn import feature_maps
from jax_linattn.checks import check_one_of, check_positive_int, require
from jax_linattn.lm.layers import MLP, ShortConvolution, SoftmaxAttention
from jax_linattn.nnx import T2R, Hedgehog, LinearAttention

LEARNABLE_MAPS = {"hedgehog": Hedgehog, "t2r": T2R}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What a model is built from; `config.default_config().model` explains each. Wrong values are ValueErrors."""

    vocabulary_size: int
    attention: str
    feature_map: str
    normalize: bool
    num_layers: int
    num_heads: int
    width: int
    mlp_width: int
    convolution_width: int
    tied_embedding: bool

    def __post_init__(self):
        for name in ("vocabulary_size", "num_layers", "num_heads", "width", "mlp_width", "convolution_width"):
            check_positive_int(f"model.{name}", getattr(self, name))
        require(
            self.width % self.num_heads == 0,
            f"model.num_heads must divide model.width, got {self.num_heads} heads and width {self.width}",
        )
        check_one_of("model.attention", self.attention, ATTENTIONS)
        if self.feature_map not in LEARNABLE_MAPS:
            feature_maps.get(self.feature_map)

    @property
    def out_kernel_init(self) -> Initializer:
        """For what adds to the residual stream: its variance stays about one after all 2·num_layers branches."""
        return variance_scaling(1 / (2 * self.num_layers), "fan_in", "truncated_normal")


def _linear(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Module:
    name = config.feature_map
    return LinearAttention(
        config.num_heads,
        config.width,
        feature_map=LEARNABLE_MAPS[name] if name in LEARNABLE_MAPS else feature_maps.get(name),
        is_causal=True,
        normalize=config.normalize,
        out_kernel_init=config.out_kernel_init,
        rngs=rngs,
    )


def _softmax(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Module:
    return SoftmaxAttention(config.num_heads, config.width, out_kernel_init=config.out_kernel_init, rngs=rngs)


# By name: from a config to a layer with `__call__(x, *, mask, decode)` and `init_cache(input_shape, dtype)`.
ATTENTIONS: dict[str, Callable[[ModelConfig, nnx.Rngs], Any]] = {"linear": _linear, "softmax": _softmax}


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); attention sees the last few tokens of its input as well."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.convolution = ShortConvolution(config.width, config.convolution_width, rngs=rngs)
        self.attention = ATTENTIONS[config.attention](config, rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.mlp = MLP(config.width, config.mlp_width, out_kernel_init=config.out_kernel_init, rngs=rngs)

    def init_cache(self, input_shape: tuple[int, ...], dtype) -> None:
        self.convolution.init_cache(input_shape, dtype)
        self.attention.init_cache(input_shape, dtype)

    def __call__(self, x: Array, *, mask: Array | None = None, decode: bool = False) -> Array:
        h = self.attention_norm(x)
        h = h + self.convolution(h, mask=mask, decode=decode)
        x = x + self.attention(h, mask=mask, decode=decode)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """A causal language model: tokens in, logits of the next token out."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Embed(
            config.vocabulary_size, config.width, embedding_init=normal(config.width**-0.5), rngs=rngs
        )
        for layer in range(config.num_layers):
            setattr(self, f"block_{layer}", Block(config, rngs=rngs))
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        if not config.tied_embedding:
            self.head = nnx.Linear(config.width, config.vocabulary_size, use_bias=False, rngs=rngs)

    @property
    def blocks(self) -> list[Block]:
        return [getattr(self, f"block_{layer}") for layer in range(self.config.num_layers)]

    def init_cache(self, batch_size: int, max_length: int, dtype=jnp.float32) -> None:
        """Empty caches; max_length is what softmax layers make room for, in tokens, and means nothing to others."""
        for block in self.blocks:
            block.init_cache((batch_size, max_length, self.config.width), dtype)

    def __call__(self, tokens: Array, *, mask: Array | None = None, decode: bool = False) -> Array:
        """Logits of the token after each.

        Args:
          tokens: int [B, T].
          mask: bool [B, T], True = a real token.
          decode: continue from the caches, which `init_cache` makes, and advance them.

        Returns:
          [B, T, V]; rows of masked tokens mean nothing.
        """
        require(
            tokens.ndim == 2 and jnp.issubdtype(tokens.dtype, jnp.integer),
            f"tokens must be an integer array [B, T], got {tokens.dtype} {tokens.shape}",
        )
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask=mask, decode=decode)
        x = self.norm(x)
        return self.embedding.attend(x) if self.config.tied_embedding else self.head(x)


def count_parameters(params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))

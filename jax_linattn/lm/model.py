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
from jax_linattn.layers import (
    HGRN2,
    BasedLinearAttention,
    GatedLinearAttention,
    LightningAttention,
    LinearAttention,
    Mamba2,
    MultiScaleRetention,
    ShortConvolution,
    SlidingWindowAttention,
)
from jax_linattn.lm.layers import MLP, SoftmaxAttention
from jax_linattn.nnx import T2R, Hedgehog

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}  # of the computation
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
    dropout: float
    dtype: str
    remat: bool
    window: int = 64  # what models had that were saved before it could be chosen

    def __post_init__(self):
        sizes = ("vocabulary_size", "num_layers", "num_heads", "width", "mlp_width", "convolution_width", "window")
        for name in sizes:
            check_positive_int(f"model.{name}", getattr(self, name))
        require(
            self.width % self.num_heads == 0,
            f"model.num_heads must divide model.width, got {self.num_heads} heads and width {self.width}",
        )
        check_one_of("model.attention", self.attention, ATTENTIONS)
        check_one_of("model.dtype", self.dtype, DTYPES)
        require(0 <= self.dropout < 1, f"model.dropout must be at least 0 and below 1, got {self.dropout}")
        if self.feature_map not in LEARNABLE_MAPS:
            feature_maps.get(self.feature_map)
        require(
            not (self.attention == "linear" and self.normalize and self.feature_map == "identity"),
            "model.normalize must be False with model.feature_map='identity', whose weights may be negative, got True",
        )

    @property
    def out_kernel_init(self) -> Initializer:
        """For what adds to the residual stream: its variance stays about one after all 2·num_layers branches."""
        return variance_scaling(1 / (2 * self.num_layers), "fan_in", "truncated_normal")


# Makers of a layer's attention, from a config, the layer's number and rngs. The comments count parameters, in squares of
# the width w.


def _linear(config: ModelConfig, layer: int, rngs: nnx.Rngs) -> nnx.Module:  # 4
    del layer
    name = config.feature_map
    return LinearAttention(
        config.num_heads,
        config.width,
        feature_map=LEARNABLE_MAPS[name] if name in LEARNABLE_MAPS else feature_maps.get(name),
        is_causal=True,
        normalize=config.normalize,
        **_options(config, rngs),
    )


def _softmax(config: ModelConfig, layer: int, rngs: nnx.Rngs) -> nnx.Module:  # 4
    del layer
    return SoftmaxAttention(config.num_heads, config.width, **_options(config, rngs))


def _retnet(config: ModelConfig, layer: int, rngs: nnx.Rngs) -> nnx.Module:  # 5, values as wide as the model
    del layer
    return MultiScaleRetention(config.width, config.num_heads, **_options(config, rngs))


def _lightning(config: ModelConfig, layer: int, rngs: nnx.Rngs) -> nnx.Module:  # 5
    depth = {"layer": layer, "num_layers": config.num_layers}
    return LightningAttention(config.width, config.num_heads, **depth, **_options(config, rngs))


def _gla(config: ModelConfig, layer: int, rngs: nnx.Rngs) -> nnx.Module:  # 4, keys half as wide as the model
    del layer
    return GatedLinearAttention(config.width, config.num_heads, **_options(config, rngs))


def _hgrn2(config: ModelConfig, layer: int, rngs: nnx.Rngs) -> nnx.Module:  # 4
    # The paper's lower bounds rise from layer to layer. Here they stay where the paper's learned ones start.
    lower_bound = layer / config.num_layers
    return HGRN2(config.width, config.num_heads, lower_bound=lower_bound, **_options(config, rngs))


def _mamba2(config: ModelConfig, layer: int, rngs: nnx.Rngs) -> nnx.Module:  # 7 with 4 heads: x, z twice as wide
    del layer
    state_dim = 2 * config.width // config.num_heads  # as wide as a head of x
    return Mamba2(config.width, config.num_heads, state_dim=state_dim, **_options(config, rngs))


def _based(config: ModelConfig, layer: int, rngs: nnx.Rngs) -> nnx.Module:  # 4 and, with 4 heads of 32, 3
    options = _options(config, rngs)
    if layer % 2:
        return SlidingWindowAttention(config.width, config.num_heads, window=config.window, **options)
    return BasedLinearAttention(config.width, config.num_heads, **options)


def _options(config: ModelConfig, rngs: nnx.Rngs) -> dict[str, Any]:
    return {"out_kernel_init": config.out_kernel_init, "dtype": DTYPES[config.dtype], "rngs": rngs}


# By name, a layer with `__call__(x, *, mask, decode)` and `init_cache(input_shape, dtype)`.
ATTENTIONS: dict[str, Callable[[ModelConfig, int, nnx.Rngs], Any]] = {
    "linear": _linear,
    "softmax": _softmax,
    "retnet": _retnet,
    "lightning": _lightning,
    "gla": _gla,
    "hgrn2": _hgrn2,
    "mamba2": _mamba2,
    "based": _based,
}


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); attention sees the last few tokens of its input as well."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs):
        dtype = DTYPES[config.dtype]
        self.attention_norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        self.convolution = ShortConvolution(config.width, config.convolution_width, dtype=dtype, rngs=rngs)
        self.attention = ATTENTIONS[config.attention](config, layer, rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        self.mlp = MLP(config.width, config.mlp_width, out_kernel_init=config.out_kernel_init, dtype=dtype, rngs=rngs)
        self.dropout = config.dropout

    def init_cache(self, input_shape: tuple[int, ...], dtype) -> None:
        self.convolution.init_cache(input_shape, dtype)
        self.attention.init_cache(input_shape, dtype)

    def __call__(
        self, x: Array, *, mask: Array | None = None, decode: bool = False, dropout_key: Array | None = None
    ) -> Array:
        keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        h = self.attention_input(x, mask=mask, decode=decode)
        x = x + dropout(self.attention(h, mask=mask, decode=decode), self.dropout, keys[0])
        return x + dropout(self.mlp(self.mlp_norm(x)), self.dropout, keys[1])

    def attention_input(self, x: Array, *, mask: Array | None = None, decode: bool = False) -> Array:
        h = self.attention_norm(x)
        return h + self.convolution(h, mask=mask, decode=decode)


class Decoder(nnx.Module):
    """A causal language model: tokens in, logits of the next token out."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        dtype = DTYPES[config.dtype]
        init = normal(config.width**-0.5)
        self.embedding = nnx.Embed(config.vocabulary_size, config.width, embedding_init=init, dtype=dtype, rngs=rngs)
        for layer in range(config.num_layers):
            setattr(self, f"block_{layer}", Block(config, layer, rngs=rngs))
        self.norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        if not config.tied_embedding:
            self.head = nnx.Linear(config.width, config.vocabulary_size, use_bias=False, rngs=rngs)

    @property
    def blocks(self) -> list[Block]:
        return [getattr(self, f"block_{layer}") for layer in range(self.config.num_layers)]

    def init_cache(self, batch_size: int, max_length: int) -> None:
        """Empty caches; max_length is what softmax layers make room for, in tokens, and means nothing to others."""
        for block in self.blocks:
            block.init_cache((batch_size, max_length, self.config.width), DTYPES[self.config.dtype])

    def __call__(
        self, tokens: Array, *, mask: Array | None = None, decode: bool = False, dropout_key: Array | None = None
    ) -> Array:
        """Logits of the token after each.

        Args:
          tokens: int [B, T].
          mask: bool [B, T], True = a real token.
          decode: continue from the caches, which `init_cache` makes, and advance them.
          dropout_key: a PRNG key for what training drops; None = nothing is dropped.

        Returns:
          float32 [B, T, V]; rows of masked tokens mean nothing.
        """
        require(
            tokens.ndim == 2 and jnp.issubdtype(tokens.dtype, jnp.integer),
            f"tokens must be an integer array [B, T], got {tokens.dtype} {tokens.shape}",
        )
        x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            key = None if dropout_key is None else jax.random.fold_in(dropout_key, layer)
            if self.config.remat and not decode:
                x = _block_with_remat(block, x, mask, key)
            else:
                x = block(x, mask=mask, decode=decode, dropout_key=key)
        x = self.norm(x)
        kernel = self.embedding.embedding[...].T if self.config.tied_embedding else self.head.kernel[...]
        return jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)


@nnx.remat
def _block_with_remat(block: Block, x: Array, mask: Array | None, key: Array | None) -> Array:
    """The block, of which the gradient keeps the input alone and computes the rest again."""
    return block(x, mask=mask, dropout_key=key)


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """x with each number 0 with probability `rate`, and the others larger for it; x itself without a key."""
    return x if key is None or rate == 0 else nnx.Dropout(rate)(x, rngs=nnx.Rngs(dropout=key))


def count_parameters(params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))

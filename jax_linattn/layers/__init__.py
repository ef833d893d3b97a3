"""Attention layers of published models, for Flax NNX: each a module that trains on whole sequences and decodes in steps.

All are causal, are called as `layer(x, mask=…, segment_ids=…, decode=…)` and have `init_cache(input_shape, dtype)`;
`LinearAttention` has the interface of Flax's attention, and `is_causal` to choose; `ShortConvolution` is a part of others.
A masked token is no token: it changes nothing for the others, wherever it stands.
"""

from jax_linattn.layers.based import BasedLinearAttention, SlidingWindowAttention
from jax_linattn.layers.convolution import ShortConvolution
from jax_linattn.layers.gla import GatedLinearAttention
from jax_linattn.layers.hgrn2 import HGRN2
from jax_linattn.layers.lightning import LightningAttention
from jax_linattn.layers.mamba2 import Mamba2
from jax_linattn.layers.retnet import MultiScaleRetention
from jax_linattn.nnx import LinearAttention

__all__ = [
    "HGRN2",
    "BasedLinearAttention",
    "GatedLinearAttention",
    "LightningAttention",
    "LinearAttention",
    "Mamba2",
    "MultiScaleRetention",
    "ShortConvolution",
    "SlidingWindowAttention",
]

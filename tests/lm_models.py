"""Tiny models of every kind, for the tests of the model and of what it writes."""

import dataclasses
import functools

import jax
import numpy as np
from flax import nnx

from jax_linattn.lm.config import default_config
from jax_linattn.lm.model import Decoder, ModelConfig

SIZES = {"num_layers": 2, "num_heads": 2, "width": 12, "mlp_width": 16}
CONFIG = ModelConfig(vocabulary_size=11, **{**default_config().model.to_dict(), **SIZES})
KINDS = {
    "linear": CONFIG,
    "softmax": dataclasses.replace(CONFIG, attention="softmax", tied_embedding=False),
    "hedgehog": dataclasses.replace(CONFIG, feature_map="hedgehog", num_layers=1),
}


@functools.cache
def model_of(kind: str) -> Decoder:
    """A model whose parameters have all moved from where they start, so that zeros and ones hide nothing."""
    graphdef, params = nnx.split(Decoder(KINDS[kind], rngs=nnx.Rngs(0)), nnx.Param)
    rng = np.random.default_rng(0)
    moved = jax.tree.map(lambda p: p + 0.3 * rng.standard_normal(p.shape).astype(np.float32), nnx.to_pure_dict(params))
    return nnx.merge(graphdef, nnx.State(moved))

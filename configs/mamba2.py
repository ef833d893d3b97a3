"""Mamba-2: a decay a head from the input, x twice as wide. 117,388 parameters a layer beside 66,048 of linear attention."""

from jax_linattn.lm.config import default_config


def get_config():
    config = default_config()
    config.name = "mamba2"
    config.model.attention = "mamba2"
    return config

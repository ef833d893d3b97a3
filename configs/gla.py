"""Gated linear attention: a decay a feature from the input. 68,832 parameters a layer beside 66,048 of linear attention."""

from jax_linattn.lm.config import default_config


def get_config():
    config = default_config()
    config.name = "gla"
    config.model.attention = "gla"
    return config

"""RetNet's multi-scale retention: a fixed decay a head. 81,920 parameters a layer beside 66,048 of linear attention."""

from jax_linattn.lm.config import default_config


def get_config():
    config = default_config()
    config.name = "retnet"
    config.model.attention = "retnet"
    return config

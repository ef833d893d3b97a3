"""HGRN2: forget gates, and as keys what they forget. 65,664 parameters a layer beside 66,048 of linear attention."""

from jax_linattn.lm.config import default_config


def get_config():
    config = default_config()
    config.name = "hgrn2"
    config.model.attention = "hgrn2"
    return config

"""The same model as small.py with softmax attention, for comparison."""

from jax_linattn.lm.config import default_config


def get_config():
    config = default_config()
    config.name = "softmax"
    config.model.attention = "softmax"
    return config

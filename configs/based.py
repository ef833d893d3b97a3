"""Based: Taylor linear attention and sliding windows in turn, 49,152 and 65,536 parameters beside 66,048 of linear."""

from jax_linattn.lm.config import default_config


def get_config():
    config = default_config()
    config.name = "based"
    config.model.attention = "based"
    return config

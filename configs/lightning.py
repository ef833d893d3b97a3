"""Lightning attention: fixed decays, less in later layers. 82,048 parameters a layer beside 66,048 of linear attention."""

from jax_linattn.lm.config import default_config


def get_config():
    config = default_config()
    config.name = "lightning"
    config.model.attention = "lightning"
    return config

"""The learnable Hedgehog map, φ(x) = [softmax(xW + b), softmax(-xW - b)]."""

from jax_linattn.lm.config import default_config


def get_config():
    config = default_config()
    config.name = "hedgehog"
    config.model.feature_map = "hedgehog"
    return config

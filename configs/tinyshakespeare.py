"""nanoGPT's published set-up for a CPU, on the text that it uses, which --config.corpus=PATH names.

Attention is what stands after a colon, "softmax" or a feature map: --config=configs/tinyshakespeare.py:taylor
"""

from jax_linattn.lm.config import default_config


def get_config(attention="elu_plus_one"):
    config = default_config()
    config.name = f"tinyshakespeare-{attention}"
    config.corpus = "data/tinyshakespeare.txt"
    config.model.num_layers = 4
    config.model.attention = "softmax" if attention == "softmax" else "linear"
    if attention != "softmax":
        config.model.feature_map = attention
    if attention == "taylor":
        config.model.num_heads = 8  # of 16 dims, 153 features each; 32 dims would make 561
    config.context = 64
    config.batch_size = 12
    config.steps = 2000
    config.warmup_steps = 100
    config.validate_every = 250
    return config

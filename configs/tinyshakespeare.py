"""nanoGPT's published set-up for a CPU, on the text that it uses, which --config.corpus=PATH names.

Attention is what stands after a colon, a feature map or a name of config.model.attention, as in
--config=configs/tinyshakespeare.py:taylor or --config=configs/tinyshakespeare.py:gla. With elu_plus_one the model has
803,072 parameters, with the named layers within 1 % of that.
"""

from jax_linattn.lm.config import default_config

# What makes up for attention with more or fewer parameters than linear attention has.
MLP_WIDTHS = {"softmax": 512, "retnet": 448, "lightning": 448, "gla": 504, "hgrn2": 512, "mamba2": 312, "based": 544}


def get_config(attention="elu_plus_one"):
    config = default_config()
    config.name = f"tinyshakespeare-{attention}"
    config.corpus = "data/tinyshakespeare.txt"
    config.model.num_layers = 4
    if attention in MLP_WIDTHS:
        config.model.attention = attention
        config.model.mlp_width = MLP_WIDTHS[attention]
    else:
        config.model.feature_map = attention
    if attention == "taylor":
        config.model.num_heads = 8  # of 16 dims, 153 features each; 32 dims would make 561
    if attention == "based":
        config.model.window = 16  # 64 would be the whole context
    config.context = 64
    config.batch_size = 12
    config.steps = 2000
    config.warmup_steps = 100
    config.validate_every = 250
    return config

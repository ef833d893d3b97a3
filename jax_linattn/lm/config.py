"""Every option of a training run with its default; files in configs/ change some, the command line changes others."""

from typing import Any, TypeAlias

from ml_collections import ConfigDict

Config: TypeAlias = Any  # a ConfigDict; its options are attributes, which type checkers cannot see


def default_config() -> Config:
    """The default options, locked: a name that is not among them is an error."""
    config = ConfigDict()
    config.name = "small"  # the run's folder: runs/NAME
    # A run that was stopped is continued by the same command. True: a run of this name with other options, or a finished
    # one, is removed first; otherwise it is an error.
    config.overwrite = False
    config.seed = 0

    # Text: a file, or a folder of text files; "" = the Python language reference that CPython carries.
    config.corpus = ""

    config.model = ConfigDict()
    # "linear", with a feature map; "softmax"; or a layer of `jax_linattn.layers`: "retnet", "lightning", "gla", "hgrn2",
    # "mamba2"; or "based", Taylor linear attention and sliding windows in turn.
    config.model.attention = "linear"
    config.model.feature_map = "elu_plus_one"  # a name in `feature_maps`, or "hedgehog", "t2r"; linear attention alone
    config.model.normalize = True  # divide by the sum of weights; "identity" needs False
    config.model.window = 64  # tokens that a sliding window sees; "based" alone
    config.model.num_layers = 3
    config.model.num_heads = 4
    config.model.width = 128
    config.model.mlp_width = 512
    config.model.convolution_width = 4  # tokens that the short convolution sees
    config.model.tied_embedding = True  # the output layer is the embedding
    config.model.dropout = 0.0  # of what attention and MLP add, while training
    config.model.dtype = "float32"  # or "bfloat16", of the computation; parameters and sums over time are float32
    config.model.remat = False  # keep only the layers' inputs for the gradient and compute the rest again: less memory

    config.context = 128  # tokens of a training sequence
    config.batch_size = 16  # sequences a step, over all devices
    config.accumulation = 1  # parts of a batch that go through the model one after another: less memory
    config.steps = 1000
    config.learning_rate = 6e-3  # at its peak, after warm-up; a cosine down to a hundredth from there
    config.warmup_steps = 50  # at most a tenth of the steps
    config.weight_decay = 0.1  # of matrices alone
    config.clip_norm = 1.0  # of the gradient, over all parameters

    config.shard_parameters = False  # split parameters and optimizer over the devices instead of a copy on each

    config.log_every = 10  # steps
    config.checkpoint_every = 100  # steps; the last is always one
    config.keep_checkpoints = 2  # the newest
    config.validate_every = 100  # steps
    config.validation_batches = 24  # at most, spread over the validation text; at the end all of it is used

    config.sample = ConfigDict()
    config.sample.prompt = ""  # "" = the start of the first long line of the validation text
    config.sample.length = 800  # characters
    config.sample.temperature = 0.8  # 0 = the likeliest character
    return config.lock()

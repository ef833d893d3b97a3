"""Every option of a training run with its default; files in configs/ change some, the command line changes others."""

from typing import Any, TypeAlias

from ml_collections import ConfigDict

Config: TypeAlias = Any  # a ConfigDict; its options are attributes, which type checkers cannot see


def default_config() -> Config:
    """The default options, locked: a name that is not among them is an error."""
    config = ConfigDict()
    config.name = "small"  # the run's folder: runs/NAME
    config.overwrite = False  # remove an earlier run of this name
    config.seed = 0

    # Text: a file, or a folder of text files; "" = the Python language reference that CPython carries.
    config.corpus = ""

    config.model = ConfigDict()
    config.model.attention = "linear"  # or "softmax"
    config.model.feature_map = "elu_plus_one"  # a name in `feature_maps`, or "hedgehog", "t2r"; linear attention alone
    config.model.normalize = True  # divide by the sum of weights; "identity" needs False
    config.model.num_layers = 3
    config.model.num_heads = 4
    config.model.width = 128
    config.model.mlp_width = 512
    config.model.convolution_width = 4  # tokens that the short convolution sees
    config.model.tied_embedding = True  # the output layer is the embedding

    config.context = 128  # tokens of a training sequence
    config.batch_size = 16
    config.steps = 1000
    config.learning_rate = 6e-3  # at its peak, after warm-up; a cosine down to a hundredth from there
    config.warmup_steps = 50  # at most a tenth of the steps
    config.weight_decay = 0.1  # of matrices alone
    config.clip_norm = 1.0  # of the gradient, over all parameters

    config.log_every = 10  # steps
    config.validate_every = 100  # steps; a checkpoint is written there too
    config.validation_batches = 24  # at most, spread over the validation text; at the end all of it is used

    config.sample = ConfigDict()
    config.sample.prompt = ""  # "" = the start of the first long line of the validation text
    config.sample.length = 800  # characters
    config.sample.temperature = 0.8  # 0 = the likeliest character
    return config.lock()

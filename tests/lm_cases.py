"""A run so small that a test can train it."""

from pathlib import Path

import jax

from jax_linattn.lm.config import Config, default_config
from jax_linattn.lm.devices import mesh_of

TEXT = "the quick brown fox jumps over the lazy dog, and then it rests.\n" * 60


def tiny_config(tmp_path: Path) -> Config:
    corpus = tmp_path / "corpus.txt"
    if not corpus.exists():
        corpus.write_text(TEXT)
    config = default_config()
    config.corpus = str(corpus)
    config.model.update({"num_layers": 1, "num_heads": 2, "width": 16, "mlp_width": 24})
    config.update({"context": 32, "batch_size": 8, "steps": 45, "warmup_steps": 5, "learning_rate": 2e-2})
    config.update({"log_every": 5, "validate_every": 20, "checkpoint_every": 20, "validation_batches": 2})
    config.sample.update({"length": 20, "prompt": "the "})
    return config


def one_device():
    """A mesh of one of the eight devices that the tests' CPU plays."""
    return mesh_of(jax.devices()[:1])

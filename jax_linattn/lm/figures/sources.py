"""A trained model and a text for it to read, from what a user names."""

from pathlib import Path

import jax.numpy as jnp
from jax import Array

from jax_linattn.checks import check_positive_int, require
from jax_linattn.lm.checkpoint import load_model
from jax_linattn.lm.figures.style import label_of
from jax_linattn.lm.model import Decoder

DEFAULT_TEXT = "The for statement is used to iterate over the elements of a sequence. "


def model_and_text(checkpoint: str, text: str | None, text_file: str | None, length: int) -> tuple[Decoder, Array, str]:
    """(model, tokens int [1, T], the text of the tokens)."""
    check_positive_int("length", length)
    require(text is None or text_file is None, "text and text_file cannot both be given: choose one")
    if text_file is not None:
        try:
            text = Path(text_file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"text_file {text_file!r} is not UTF-8 text ({error})") from error
    text = (DEFAULT_TEXT if text is None else text)[:length]
    require(text, "text must hold at least one character, got none")
    model, vocabulary = load_model(checkpoint)
    return model, jnp.asarray(vocabulary.encode(text))[None], text


def attention_of(model: Decoder) -> str:
    config = model.config
    return "softmax attention" if config.attention == "softmax" else f"linear attention, φ = {label_of(config.feature_map)}"

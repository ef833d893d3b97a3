"""Writes with a trained model, as text comes: python scripts/generate.py --checkpoint=runs/small --prompt="The "

Several prompts (--prompt=... --prompt=...) are continued in one batch, each as it would be alone with seed, seed + 1, ...
"""

import os
import sys
from typing import Any

from absl import app, flags, logging

from jax_linattn.lm.checkpoint import load_model
from jax_linattn.lm.generate import continue_texts, stream_texts

CHECKPOINT = flags.DEFINE_string("checkpoint", "runs/small", "folder of a run, or of one of its checkpoints")
PROMPT = flags.DEFINE_multi_string("prompt", ["The "], "text to continue; may be given several times")
LENGTH = flags.DEFINE_integer("length", 500, "characters to write")
TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "0 = the likeliest character")
TOP_K = flags.DEFINE_integer("top_k", None, "draw from the k likeliest characters alone")
TOP_P = flags.DEFINE_float("top_p", None, "draw from the fewest likeliest characters that have probability p together")
SEED = flags.DEFINE_integer("seed", 0, "of the draws")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.ERROR)  # absl's default is to tell of every file that orbax writes
    try:
        write()
        sys.stdout.flush()
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        print()
        raise SystemExit(130) from None
    except BrokenPipeError:  # whoever read has seen enough; what Python flushes at its end must go somewhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write() -> None:
    model, vocabulary = load_model(CHECKPOINT.value)
    prompts = PROMPT.value
    how: dict[str, Any] = {flag.name: flag.value for flag in (TEMPERATURE, TOP_K, TOP_P, SEED)}
    if len(prompts) > 1:
        texts = continue_texts(model, vocabulary, prompts, LENGTH.value, **how)
        for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1):
            print(f"--- {number} of {len(prompts)} ---\n{prompt}{text}\n")
        return
    pieces = stream_texts(model, vocabulary, prompts, LENGTH.value, **how)
    print(prompts[0], end="", flush=True)
    for (text,) in pieces:
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    app.run(main)

"""Writes with a trained model: python scripts/generate.py --run=runs/small --prompt="The statement " """

from absl import app, flags, logging

from jax_linattn.lm.checkpoint import load_model
from jax_linattn.lm.generate import continue_texts

RUN = flags.DEFINE_string("run", "runs/small", "folder of a run")
PROMPT = flags.DEFINE_string("prompt", "The ", "text to continue")
LENGTH = flags.DEFINE_integer("length", 500, "characters to write", lower_bound=0)
TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "0 = the likeliest character", lower_bound=0.0)
SEED = flags.DEFINE_integer("seed", 0, "of the draws")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # absl's default is to tell of every file that orbax writes
    how = {"temperature": TEMPERATURE.value, "seed": SEED.value}
    try:
        model, vocabulary = load_model(RUN.value)
        (text,) = continue_texts(model, vocabulary, [PROMPT.value], LENGTH.value, **how)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    print(PROMPT.value + text)


if __name__ == "__main__":
    app.run(main)

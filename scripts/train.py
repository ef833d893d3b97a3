"""Trains a language model: python scripts/train.py --config=configs/small.py --config.steps=2000"""

from absl import app, flags, logging
from ml_collections import config_flags

from jax_linattn.lm.checkpoint import SAMPLE, run_folder
from jax_linattn.lm.train import prepare, train

CONFIG = config_flags.DEFINE_config_file(
    "config",
    "configs/small.py",
    "a file in configs/; override an option in jax_linattn/lm/config.py with --config.NAME=VALUE",
)
WORKDIR = flags.DEFINE_string("workdir", "runs", "folder of all runs")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # absl's default is to tell of every file that orbax writes
    config = CONFIG.value
    try:
        run = prepare(config, run_folder(WORKDIR.value, config.name))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    print(run.description())
    summary = train(run)
    print(f"\n{(run.folder / SAMPLE).read_text(encoding='utf-8')}\n\n{summary}")


def parse(argv):
    """The flags; a config file or an option that there is not is an error of one line."""
    try:
        return app.parse_flags_with_usage(argv)
    except (AttributeError, KeyError, OSError) as error:
        raise SystemExit(f"error: {error}; all options are in jax_linattn/lm/config.py") from None


if __name__ == "__main__":
    app.run(main, flags_parser=parse)

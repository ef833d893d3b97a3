"""Trains a language model: python scripts/train.py --config=configs/small.py --config.steps=2000"""

import sys

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from jax_linattn.lm import folder
from jax_linattn.lm.devices import is_first_process
from jax_linattn.lm.run import prepare
from jax_linattn.lm.train import Stopped, train

DEFAULT_CONFIG = "configs/small.py"
CONFIG = config_flags.DEFINE_config_file(
    "config",
    None,
    f"a file in configs/, {DEFAULT_CONFIG} by default; override an option in jax_linattn/lm/config.py with "
    "--config.NAME=VALUE",
)
WORKDIR = flags.DEFINE_string("workdir", "runs", "folder of all runs")
DISTRIBUTED = flags.DEFINE_bool("distributed", False, "one of several processes; all run the same command")
COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of the first process; found out on known clusters")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "how many there are; found out on known clusters")
PROCESS_ID = flags.DEFINE_integer("process_id", None, "this one's number, from 0; found out on known clusters")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.ERROR)  # absl's default is to tell of every file that orbax writes
    if DISTRIBUTED.value:
        jax.distributed.initialize(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value)
    config = CONFIG.value
    say = print if is_first_process() else lambda *_, **__: None
    try:
        run = prepare(config, folder.run_folder(WORKDIR.value, config.name))
        say(run.description(), flush=True)
        summary = train(run)
    except (ValueError, FloatingPointError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    except (Stopped, KeyboardInterrupt) as stop:
        say(f"\n{stop}" if str(stop) else "\nstopped; the same command goes on from the last checkpoint", file=sys.stderr)
        raise SystemExit(130) from None
    say(f"\n{(run.folder / folder.SAMPLE).read_text(encoding='utf-8')}\n\n{summary}")


def parse(argv):
    """The flags; a config file or an option that there is not is an error of one line."""
    if not any(argument.split("=")[0].lstrip("-") == "config" for argument in argv[1:]):
        argv = [argv[0], f"--config={DEFAULT_CONFIG}", *argv[1:]]
    try:
        remaining = app.parse_flags_with_usage(argv)
        _ = CONFIG.value.name  # a config file that could not be read says so only now
    except (AttributeError, KeyError, OSError) as error:
        cause = error.args[0] if error.args and isinstance(error.args[0], BaseException) else error
        reason = " ".join(str(cause.args[0] if isinstance(cause, KeyError | AttributeError) else cause).split())
        raise SystemExit(f"error: {reason}; all options are in jax_linattn/lm/config.py") from None
    return remaining


if __name__ == "__main__":
    app.run(main, flags_parser=parse)

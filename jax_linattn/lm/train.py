"""Training: everything that a run needs is prepared and checked first, then a plain loop over steps.

A run that was stopped at any moment goes on from its newest checkpoint, and is from there on the run that was not stopped.
"""

import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

from jax_linattn.checks import check_positive_int, require
from jax_linattn.lm import checkpoint, devices, report
from jax_linattn.lm import folder as folders
from jax_linattn.lm.batches import Batch, train_batches
from jax_linattn.lm.config import Config
from jax_linattn.lm.data import Corpus, load_corpus
from jax_linattn.lm.generate import continue_texts
from jax_linattn.lm.model import ModelConfig, count_parameters
from jax_linattn.lm.step import BITS, TrainState, compile_step, initial_state, make_evaluate
from jax_linattn.lm.trigram import trigram_bits


class Run(NamedTuple):
    """A run that is ready to start, or to go on."""

    config: Config
    folder: Path
    options: dict[str, Any]  # the config and the corpus' fingerprint: what makes it this run and no other
    mesh: Mesh
    corpus: Corpus
    graphdef: Any
    state: TrainState
    batches: Iterator[Batch]  # of grain: with get_state and set_state
    losses: list[Any]  # of the steps since the last line of metrics
    seconds: float  # of training so far

    def description(self) -> str:
        config, corpus, done = self.config, self.corpus, int(self.state.step)
        return (
            f"{self.folder}: {report.attention_name(config)} attention, "
            f"{count_parameters(self.state.params):,} parameters; corpus {config.corpus or 'pydoc_data.topics'}, "
            f"{len(corpus.train):,} characters to train on, {len(corpus.validation):,} to validate, "
            f"{corpus.vocabulary.size} different; "
            f"{config.steps:,} steps of {config.batch_size * config.context:,} tokens on {self.mesh.size} "
            f"{self.mesh.devices.flat[0].platform} device(s)" + (f"; going on after step {done:,}" if done else "")
        )


class Stopped(Exception):
    """Training was asked to stop, and did, with a checkpoint."""


# --- before the first step --------------------------------------------------------------------------------------------


def prepare(config: Config, folder: str | Path, *, mesh: Mesh | None = None) -> Run:
    """Reads the corpus, builds the model and claims the folder, or restores the run that was stopped in it.

    Args:
      config: as `default_config` gives.
      folder: where the run leaves its files.
      mesh: of the devices to train on, as `devices.mesh_of` makes it; None = all.

    Raises:
      ValueError: on an option or corpus that will not do, a folder that holds another run, a damaged checkpoint; nothing
        has been written then.
    """
    _check_options(config)
    mesh = devices.mesh_of() if mesh is None else mesh
    devices.check_batch_size(mesh, config.batch_size, config.accumulation)
    corpus = load_corpus(config.corpus, config.context)
    corpus.vocabulary.encode(config.sample.prompt)
    options = config.to_dict() | {"corpus_sha256": corpus.fingerprint()}
    folder = Path(folder)
    plan = folders.plan(folder, options, overwrite=config.overwrite)
    graphdef, state = initial_state(ModelConfig(vocabulary_size=corpus.vocabulary.size, **config.model), config, mesh)
    batches = train_batches(
        corpus.train,
        seed=config.seed,
        batch_size=config.batch_size,
        context=config.context,
        process=(jax.process_index(), jax.process_count()),
    )
    run = Run(config, folder, options, mesh, corpus, graphdef, state, batches, [], 0.0)
    run = _restored(run) if plan == "continue" else run
    devices.wait_for_all("the folder has been looked at")
    if devices.is_first_process():
        folders.carry_out(plan, folder, options)
        report.keep_metrics(folder / folders.METRICS, until=int(run.state.step))
    devices.wait_for_all("the folder is ready")
    return run


def _restored(run: Run) -> Run:
    """The run as its newest checkpoint has it; unchanged if it was stopped before the first."""
    if not (run.folder / folders.CHECKPOINTS).is_dir():
        return run
    with checkpoint.open_checkpoints(run.folder) as manager:
        step = manager.latest_step()
        if step is None:
            return run
        state, meta = checkpoint.restore(manager, step, run.state)
    changes = folders.changes(meta["config"], run.options)
    require(not changes, f"checkpoint {step} in {run.folder} is of a run with other options: {'; '.join(changes)}")
    run.batches.set_state(meta["data"])
    return run._replace(state=state, losses=meta["losses"], seconds=meta["seconds"])


def _check_options(config: Config) -> None:
    positive = ("context", "batch_size", "accumulation", "steps", "log_every", "validate_every", "checkpoint_every")
    for name in (*positive, "keep_checkpoints", "validation_batches"):
        check_positive_int(name, config[name])
    for name, value in {"learning_rate": config.learning_rate, "clip_norm": config.clip_norm}.items():
        require(value > 0, f"{name} must be above 0, got {value}")
    not_negative = {"seed": config.seed, "weight_decay": config.weight_decay, "warmup_steps": config.warmup_steps}
    not_negative |= {f"sample.{name}": config.sample[name] for name in ("length", "temperature")}
    for name, value in not_negative.items():
        require(value >= 0, f"{name} must be at least 0, got {value}")


# --- the loop ---------------------------------------------------------------------------------------------------------


def train(run: Run, *, progress: bool = True) -> report.Summary:
    """Trains, and leaves checkpoints, metrics, a plot and a sample in the run's folder.

    Args:
      run: as `prepare` gives; its state's buffers are used up.
      progress: show a bar on stderr.

    Raises:
      FloatingPointError: if the loss is no longer finite.
      Stopped: after Ctrl-C or SIGTERM, when the step is done and a checkpoint written; `prepare` goes on from there.
    """
    config, corpus = run.config, run.corpus
    trigram = trigram_bits(corpus.train, corpus.validation, corpus.vocabulary.size)
    evaluate = make_evaluate(run.graphdef, corpus, config, run.mesh)
    train_step = compile_step(run.graphdef, config, run.mesh, run.state)
    state, losses, seconds = run.state, run.losses, run.seconds
    progress = progress and devices.is_first_process()
    first = int(state.step) + 1
    with (
        checkpoint.open_checkpoints(run.folder, keep=config.keep_checkpoints) as checkpoints,
        tqdm(total=config.steps, initial=first - 1, disable=not progress, unit="step", dynamic_ncols=True) as bar,
        _requests_to_stop() as stop_requested,
    ):
        started = time.perf_counter()
        for step in range(first, config.steps + 1):
            state, loss, gradient_norm = train_step(state, devices.split_batch(run.mesh, next(run.batches)))
            losses.append(loss)
            is_last, stops = step == config.steps, stop_requested()
            validates = step % config.validate_every == 0 or is_last
            logs = step % config.log_every == 0 or validates
            saves = step % config.checkpoint_every == 0 or is_last or stops
            if logs or saves:
                losses = _finite(losses, step)  # waits for the devices
                seconds += time.perf_counter() - started
            if logs:
                tokens = step * config.batch_size * config.context
                line = {"step": step, "tokens": tokens, "seconds": seconds, "train_bits": float(np.mean(losses)) * BITS}
                line["gradient_norm"] = float(gradient_norm)
                if validates:
                    line["validation_bits"] = evaluate(state.params, None if is_last else config.validation_batches)
                _record(run, line)
                bar.set_postfix_str(report.postfix(line, trigram), refresh=False)
                losses = []
            if saves:
                meta = {"config": run.options, "vocabulary": corpus.vocabulary.characters, "seconds": seconds}
                meta |= {"data": run.batches.get_state(), "losses": losses}
                checkpoint.save(checkpoints, state, meta)
            if logs or saves:
                started = time.perf_counter()
            bar.update()
            if stops and not is_last:
                raise Stopped(f"stopped after step {step:,} of {config.steps:,}; the same command goes on from there")
    return _finish(run, state, trigram)


def _finite(losses: list[Any], step: int) -> list[float]:
    values = [float(loss) for loss in jax.device_get(losses)]
    if not all(map(math.isfinite, values)):
        raise FloatingPointError(
            f"the training loss is no longer finite at step {step}; a lower learning_rate or more warmup_steps may help"
        )
    return values


def _record(run: Run, line: dict[str, Any]) -> None:
    if devices.is_first_process():
        report.append_metrics(run.folder / folders.METRICS, line)


@contextlib.contextmanager
def _requests_to_stop() -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether Ctrl-C or SIGTERM has come. A second Ctrl-C acts at once.

    Not with several processes, which would have to agree on the step, nor outside the main thread, where Python has no
    signals: there a stop is sudden, and the run goes on from the last checkpoint.
    """
    if jax.process_count() > 1 or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    requests = []

    def remember(number, _):
        requests.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    earlier = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(requests)
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


# --- after the last step ----------------------------------------------------------------------------------------------


def _finish(run: Run, state: TrainState, trigram: float) -> report.Summary:
    """The sample, the plot and the summary, which is the last line of the metrics."""
    params = devices.gather(run.mesh, state.params)
    summary = _summary(run, params, trigram)
    if devices.is_first_process():
        (run.folder / folders.SAMPLE).write_text(_sample(run, params) + "\n", encoding="utf-8")
        metrics = report.read_metrics(run.folder / folders.METRICS)
        report.plot_losses(metrics, trigram, run.config.name, run.folder / folders.PLOT)
        report.append_metrics(
            run.folder / folders.METRICS, {"step": run.config.steps, "summary": dataclasses.asdict(summary)}
        )
    devices.wait_for_all("the run is finished")
    return summary


def _summary(run: Run, params: Any, trigram: float) -> report.Summary:
    """Of the last line of metrics, which all processes can read."""
    devices.wait_for_all("the last line of metrics is written")
    line = report.read_metrics(run.folder / folders.METRICS)[-1]
    names = ("tokens", "seconds", "train_bits", "validation_bits")
    return report.Summary(
        folder=str(run.folder),
        attention=report.attention_name(run.config),
        parameters=count_parameters(params),
        trigram_bits=trigram,
        **{name: line[name] for name in names},
    )


def _sample(run: Run, params: Any) -> str:
    """What the model writes, after the prompt that it was given."""
    config, vocabulary = run.config, run.corpus.vocabulary
    prompt = config.sample.prompt or _default_prompt(vocabulary.decode(run.corpus.validation[:20_000]))
    model = nnx.merge(run.graphdef, nnx.State(params))
    how = {"temperature": config.sample.temperature, "seed": config.seed}
    (written,) = continue_texts(model, vocabulary, [prompt], config.sample.length, **how)
    return prompt + written


def _default_prompt(text: str) -> str:
    """The start of the first long line that begins with a letter: prose, where there is some."""
    lines = (line for line in text.splitlines() if len(line) > 50 and line[0].isalpha())
    return next(lines, text)[:32]

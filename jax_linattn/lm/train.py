"""Training: a plain loop over steps, from the first or from where the run was stopped, to the sample and the summary.

A run that was stopped at any moment goes on from its newest checkpoint, and is from there on the run that was not stopped.
"""

import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.experimental import multihost_utils
from tqdm import tqdm

from jax_linattn.checks import require
from jax_linattn.lm import checkpoint, devices, report
from jax_linattn.lm import folder as folders
from jax_linattn.lm.config import Config
from jax_linattn.lm.generate import continue_texts
from jax_linattn.lm.model import count_parameters
from jax_linattn.lm.run import Run
from jax_linattn.lm.step import BITS, TrainState, compile_step, make_evaluate
from jax_linattn.lm.trigram import trigram_bits


class Stopped(Exception):
    """Training was asked to stop, and did, with a checkpoint."""


# --- the loop ---------------------------------------------------------------------------------------------------------


def train(run: Run, *, progress: bool = True) -> report.Summary | None:
    """Trains, and leaves checkpoints, metrics, a plot and a sample in the run's folder, which is free again then.

    Args:
      run: as `prepare` gives; its state's buffers are used up.
      progress: show a bar on stderr.

    Returns:
      How it ended; None in processes but the first.

    Raises:
      FloatingPointError: if a loss or parameter is no longer finite.
      Stopped: after Ctrl-C or SIGTERM, when the step is done and a checkpoint written; `prepare` goes on from there.
    """
    try:
        return _train(run, progress)
    finally:
        if run.lock is not None:
            run.lock.release()


def _train(run: Run, progress: bool) -> report.Summary | None:
    config, corpus = run.config, run.corpus
    trigram = trigram_bits(corpus.train, corpus.validation, corpus.vocabulary.size)
    evaluate = make_evaluate(run.graphdef, corpus, config, run.mesh)
    train_step = compile_step(run.graphdef, config, run.mesh, run.state)
    state, seconds = run.state, run.seconds
    losses: list[Any] = run.losses
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
            due = _due(config, step, stops=stop_requested(step))
            if due.log or due.save:
                losses = _finite(losses, step)  # waits for the devices
                seconds += time.perf_counter() - started
            if due.log:
                line = _line(config, step, seconds, losses, gradient_norm)
                if due.validate:
                    limit = None if step == config.steps else config.validation_batches
                    (line["validation_bits"],) = _finite([evaluate(state.params, limit)], step)
                _record(run, line)
                bar.set_postfix_str(report.postfix(line, trigram), refresh=False)
                losses = []
            if due.save:
                _save(checkpoints, run, state, losses, seconds)
            if due.log or due.save:
                started = time.perf_counter()
            bar.update()
            if due.stop:
                raise Stopped(f"stopped after step {step:,} of {config.steps:,}; the same command goes on from there")
    return _finish(run, state, trigram)


class Due(NamedTuple):
    """What is to be done after a step. The last is validated and saved, and what is validated is logged."""

    log: bool
    validate: bool
    save: bool
    stop: bool


def _due(config: Config, step: int, *, stops: bool) -> Due:
    is_last = step == config.steps
    validate = is_last or step % config.validate_every == 0
    return Due(
        log=validate or step % config.log_every == 0,
        validate=validate,
        save=is_last or stops or step % config.checkpoint_every == 0,
        stop=stops and not is_last,
    )


def _line(config: Config, step: int, seconds: float, losses: list[float], gradient_norm: Array) -> dict[str, Any]:
    """What is measured at a step, for the metrics."""
    return {
        "step": step,
        "tokens": step * config.batch_size * config.context,
        "seconds": seconds,
        "train_bits": float(np.mean(losses)) * BITS,
        "gradient_norm": float(gradient_norm),
    }


def _record(run: Run, line: dict[str, Any]) -> None:
    if devices.is_first_process():
        report.append_metrics(run.folder / folders.METRICS, line)


def _save(checkpoints, run: Run, state: TrainState, losses: list[float], seconds: float) -> None:
    if not checkpoint.all_finite(state.params):
        raise _diverged(int(state.step))
    meta = {"config": run.options, "vocabulary": run.corpus.vocabulary.characters, "seconds": seconds}
    checkpoint.save(checkpoints, state, meta | {"data": run.batches.get_state(), "losses": losses})


def _finite(losses: list[Any], step: int) -> list[float]:
    values = [float(loss) for loss in jax.device_get(losses)]
    if not all(map(math.isfinite, values)):
        raise _diverged(step)
    return values


def _diverged(step: int) -> FloatingPointError:
    return FloatingPointError(
        f"the loss or a parameter is no longer finite at step {step}; a lower learning_rate or more warmup_steps may help, "
        "under another --config.name or with --config.overwrite=True"
    )


@contextlib.contextmanager
def _requests_to_stop() -> Iterator[Callable[[int], bool]]:
    """Gives a function of the step that says whether to stop after it, as Ctrl-C or SIGTERM asks. A second Ctrl-C acts at
    once.

    Several processes stop after a step that they agree on, when any of them has got SIGTERM; JAX listens to that one there.
    Outside the main thread Python has no signals.
    """
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    if threading.current_thread() is not threading.main_thread():
        yield lambda step: False
        return
    requests = []

    def remember(number, _):
        requests.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    earlier = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda step: bool(requests)
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


# --- after the last step ----------------------------------------------------------------------------------------------


def _finish(run: Run, state: TrainState, trigram: float) -> report.Summary | None:
    """The sample, the plot and the summary, which is the last line of the metrics. The first process does it."""
    params = devices.gather(run.mesh, state.params)
    summary = None
    if devices.is_first_process():
        report.write_whole(run.folder / folders.SAMPLE, _sample(run, params) + "\n")
        metrics = report.read_metrics(run.folder / folders.METRICS)
        summary = _summary(run, params, metrics, trigram)
        report.plot_losses(metrics, trigram, run.config.name, run.folder / folders.PLOT)
        report.append_metrics(
            run.folder / folders.METRICS, {"step": run.config.steps, "summary": dataclasses.asdict(summary)}
        )
    devices.wait_for_all("the run is finished")
    return summary


def _summary(run: Run, params: Any, metrics: list[dict[str, Any]], trigram: float) -> report.Summary:
    line = metrics[-1] if metrics else {}
    names = ("tokens", "seconds", "train_bits", "validation_bits")
    require(
        line.get("step") == run.config.steps and all(name in line for name in names),
        f"{run.folder / folders.METRICS} lacks the line of the last step: put the file back, or train anew with "
        "--config.overwrite=True",
    )
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

"""A run, ready to start or to go on: its options checked, its folder claimed, its state new or restored."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
from filelock import FileLock
from jax.sharding import Mesh

from jax_linattn.checks import check_positive_int, require
from jax_linattn.lm import checkpoint, devices, report
from jax_linattn.lm import folder as folders
from jax_linattn.lm.batches import Batch, train_batches
from jax_linattn.lm.config import Config
from jax_linattn.lm.data import Corpus, load_corpus
from jax_linattn.lm.model import ModelConfig, count_parameters
from jax_linattn.lm.step import TrainState, initial_state


class Run(NamedTuple):
    """A run that is ready to start, or to go on."""

    config: Config
    folder: Path
    options: dict[str, Any]  # the config and the corpus' fingerprint: what makes it this run and no other
    mesh: Mesh
    corpus: Corpus
    graphdef: Any
    state: TrainState
    batches: grain.DatasetIterator[Batch]
    losses: list[Any]  # of the steps since the last line of metrics
    seconds: float  # of training so far
    lock: FileLock | None  # on the folder; the first process has it

    def description(self) -> str:
        config, corpus, done = self.config, self.corpus, int(self.state.step)
        return (
            f"{self.folder}: {report.attention_name(config)} attention, "
            f"{count_parameters(self.state.params):,} parameters; corpus {config.corpus or 'pydoc_data.topics'}, "
            f"{len(corpus.train):,} characters to train on, {len(corpus.validation):,} to validate, "
            f"{corpus.vocabulary.size} different; "
            f"{config.steps:,} steps of {config.batch_size * config.context:,} tokens on {self.mesh.size} "
            f"{self.mesh.devices.flat[0].platform} device(s)" + self._progress(done)
        )

    def _progress(self, done: int) -> str:
        if done == self.config.steps:
            return "; finished already"
        return f"; going on after step {done:,}" if done else ""


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
    mesh = devices.mesh_of() if mesh is None else mesh
    folder, corpus, options, problem = Path(folder), None, None, None
    try:
        corpus = _checked_corpus(config, mesh)
        options = config.to_dict() | {"corpus_sha256": corpus.fingerprint()}
        folders.plan(folder, options, overwrite=config.overwrite)
    except ValueError as error:
        problem = error
    devices.agree(options, problem)
    assert corpus is not None
    assert options is not None

    lock = folders.lock(folder) if devices.is_first_process() else None
    plan = folders.plan(folder, options, overwrite=config.overwrite)  # once more: nobody else can change it now
    model_config = ModelConfig(vocabulary_size=corpus.vocabulary.size, **config.model)
    graphdef, state = initial_state(model_config, config, mesh)
    batches = train_batches(
        corpus.train,
        seed=config.seed,
        batch_size=config.batch_size,
        context=config.context,
        process=(jax.process_index(), jax.process_count()),
    )
    run = Run(config, folder, options, mesh, corpus, graphdef, state, batches, [], 0.0, lock)
    run = _restored(run) if plan == "continue" else run
    devices.wait_for_all("the folder has been looked at")
    if devices.is_first_process():
        folders.carry_out(plan, folder, options)
        report.keep_metrics(folder / folders.METRICS, until=int(run.state.step))
    devices.wait_for_all("the folder is ready")
    return run


def _checked_corpus(config: Config, mesh: Mesh) -> Corpus:
    """The corpus, when it and all options will do."""
    _check_options(config)
    devices.check_batch_size(mesh, config.batch_size, config.accumulation)
    corpus = load_corpus(config.corpus, config.context)
    corpus.vocabulary.encode(config.sample.prompt)
    ModelConfig(vocabulary_size=corpus.vocabulary.size, **config.model)
    return corpus


def _restored(run: Run) -> Run:
    """The run as its newest checkpoint has it; unchanged if it was stopped before the first."""
    found = checkpoint.restore_newest(run.folder, run.state)
    if found is None:
        require(
            not folders.is_finished(run.folder),
            f"{run.folder} holds a finished run without its checkpoints: put them back, or train it anew with "
            "--config.overwrite=True",
        )
        return run
    state, meta = found
    changes = folders.changes(meta["config"], run.options)
    require(not changes, f"checkpoint {meta['step']} in {run.folder} is of a run with other options: {'; '.join(changes)}")
    run.batches.set_state(meta["data"])
    return run._replace(state=state, losses=meta["losses"], seconds=meta["seconds"])


def _check_options(config: Config) -> None:
    positive = ("context", "batch_size", "accumulation", "steps", "log_every", "validate_every", "checkpoint_every")
    for name in (*positive, "keep_checkpoints", "validation_batches"):
        require(config[name] is not None, f"{name} must be a positive whole number, got None")
        check_positive_int(name, config[name])
    for name, value in {"learning_rate": config.learning_rate, "clip_norm": config.clip_norm}.items():
        require(0 < value < math.inf, f"{name} must be above 0 and finite, got {value}")
    not_negative = {"seed": config.seed, "weight_decay": config.weight_decay, "warmup_steps": config.warmup_steps}
    not_negative |= {f"sample.{name}": config.sample[name] for name in ("length", "temperature")}
    for name, value in not_negative.items():
        require(0 <= value < math.inf, f"{name} must be at least 0 and finite, got {value}")
    require(config.seed < 2**32, f"seed must be below 2³², got {config.seed}")

"""Training: everything that a run needs is prepared and checked first, then a plain loop over steps."""

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from tqdm import tqdm

from jax_linattn.checks import check_positive_int, require
from jax_linattn.lm import checkpoint, report
from jax_linattn.lm.config import Config
from jax_linattn.lm.data import Batch, Corpus, TrainBatches, load_corpus, validation_batches
from jax_linattn.lm.generate import continue_texts
from jax_linattn.lm.model import Decoder, ModelConfig, count_parameters
from jax_linattn.lm.trigram import trigram_bits

BITS = 1 / math.log(2)  # a nat


class TrainState(NamedTuple):
    """All that a step changes; with the position in the data it is all that continuing needs."""

    params: Any
    opt_state: Any


class Run(NamedTuple):
    """A run that is ready to start."""

    config: Config
    folder: Path
    corpus: Corpus
    graphdef: Any
    optimizer: optax.GradientTransformation
    state: TrainState
    batches: TrainBatches

    def description(self) -> str:
        config, corpus = self.config, self.corpus
        feature_map = f" ({config.model.feature_map})" if config.model.attention == "linear" else ""
        return (
            f"{self.folder}: {config.model.attention} attention{feature_map}, "
            f"{count_parameters(self.state.params):,} parameters; corpus {config.corpus or 'pydoc_data.topics'}, "
            f"{len(corpus.train):,} characters to train on, {len(corpus.validation):,} to validate, "
            f"{corpus.vocabulary.size} different; "
            f"{config.steps:,} steps of {config.batch_size * config.context:,} tokens"
        )


def prepare(config: Config, folder: str | Path) -> Run:
    """Reads the corpus, builds the model and claims the folder.

    Args:
      config: as `default_config` gives.
      folder: where the run leaves its files.

    Raises:
      ValueError: on an option or corpus that will not do, or a folder that holds a run; nothing has been written then.
    """
    _check_options(config)
    corpus = load_corpus(config.corpus, config.context)
    corpus.vocabulary.encode(config.sample.prompt)
    model_config = ModelConfig(vocabulary_size=corpus.vocabulary.size, **config.model)
    graphdef, params = nnx.split(Decoder(model_config, rngs=nnx.Rngs(config.seed)), nnx.Param)
    params = nnx.to_pure_dict(params)
    optimizer = make_optimizer(config)
    batches = TrainBatches(corpus.train, seed=config.seed, batch_size=config.batch_size, context=config.context)
    folder = Path(folder)
    checkpoint.claim_folder(folder, overwrite=config.overwrite)
    (folder / checkpoint.CONFIG).write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    return Run(config, folder, corpus, graphdef, optimizer, TrainState(params, optimizer.init(params)), batches)


def _check_options(config: Config) -> None:
    for name in ("context", "batch_size", "steps", "log_every", "validate_every", "validation_batches"):
        check_positive_int(name, config[name])
    for name, value in {"learning_rate": config.learning_rate, "clip_norm": config.clip_norm}.items():
        require(value > 0, f"{name} must be above 0, got {value}")
    not_negative = {"seed": config.seed, "weight_decay": config.weight_decay, "warmup_steps": config.warmup_steps}
    not_negative |= {f"sample.{name}": config.sample[name] for name in ("length", "temperature")}
    for name, value in not_negative.items():
        require(value >= 0, f"{name} must be at least 0, got {value}")


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW behind gradient clipping; a linear warm-up, then a cosine down to a hundredth."""
    warmup_steps = min(config.warmup_steps, config.steps // 10)  # so that a short trial needs no other option
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, warmup_steps, config.steps, config.learning_rate / 100
    )
    adamw = optax.adamw(schedule, b2=0.99, weight_decay=config.weight_decay, mask=_matrices)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def _matrices(params) -> Any:
    """True for what weight decay applies to: kernels and embeddings, not biases, norms or the taps of convolutions."""

    def is_matrix(path, _) -> bool:
        names = [entry.key for entry in path]
        return names[-1] in ("kernel", "embedding") and "convolution" not in names

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def train(run: Run, *, progress: bool = True) -> report.Summary:
    """Trains, and leaves checkpoints, metrics, a plot and a sample in the run's folder.

    Args:
      run: as `prepare` gives; its state's buffers are used up.
      progress: show a bar on stderr.

    Raises:
      FloatingPointError: if the loss is no longer finite.
    """
    config, corpus, state = run.config, run.corpus, run.state
    trigram = trigram_bits(corpus.train, corpus.validation, corpus.vocabulary.size)
    evaluate = make_evaluate(run.graphdef, corpus, config)
    train_step = compile_step(run)
    losses, seconds, line = [], 0.0, {}
    with (
        checkpoint.open_checkpoints(run.folder) as checkpoints,
        tqdm(total=config.steps, disable=not progress, unit="step", dynamic_ncols=True) as bar,
    ):
        started = time.perf_counter()
        for step in range(1, config.steps + 1):
            state, loss, gradient_norm = train_step(state, next(run.batches))
            losses.append(loss)
            is_last = step == config.steps
            validates = step % config.validate_every == 0 or is_last
            if step % config.log_every == 0 or validates:
                train_bits = _finite_mean(losses, step) * BITS  # waits for the device
                seconds += time.perf_counter() - started
                tokens = step * config.batch_size * config.context
                line = {"step": step, "tokens": tokens, "seconds": seconds, "train_bits": train_bits}
                line["gradient_norm"] = float(gradient_norm)
                if validates:
                    line["validation_bits"] = evaluate(state.params, None if is_last else config.validation_batches)
                    _save(checkpoints, step, run, state)
                report.append_metrics(run.folder / checkpoint.METRICS, line)
                bar.set_postfix_str(report.postfix(line, trigram), refresh=False)
                losses, started = [], time.perf_counter()
            bar.update()
    return _finish(run, state, line, trigram)


def _finite_mean(losses: list[Array], step: int) -> float:
    mean = float(np.mean(jax.device_get(losses)))
    if not math.isfinite(mean):
        raise FloatingPointError(
            f"the training loss is {mean} at step {step}; a lower learning_rate or more warmup_steps may help"
        )
    return mean


def _save(checkpoints, step: int, run: Run, state: TrainState) -> None:
    meta = {
        "config": run.config.to_dict(),
        "vocabulary": run.corpus.vocabulary.characters,
        "data": run.batches.get_state(),
    }
    checkpoint.save(checkpoints, step, params=state.params, opt_state=state.opt_state, meta=meta)


def _finish(run: Run, state: TrainState, line: dict[str, Any], trigram: float) -> report.Summary:
    """The sample, the plot and the summary."""
    config, vocabulary = run.config, run.corpus.vocabulary
    prompt = config.sample.prompt or _default_prompt(vocabulary.decode(run.corpus.validation[:20_000]))
    model = nnx.merge(run.graphdef, nnx.State(state.params))
    how = {"temperature": config.sample.temperature, "seed": config.seed}
    (written,) = continue_texts(model, vocabulary, [prompt], config.sample.length, **how)
    (run.folder / checkpoint.SAMPLE).write_text(prompt + written + "\n", encoding="utf-8")
    metrics = report.read_metrics(run.folder / checkpoint.METRICS)
    report.plot_losses(metrics, trigram, config.name, run.folder / checkpoint.PLOT)
    summary = report.Summary(
        folder=str(run.folder),
        attention=config.model.attention + (f" ({config.model.feature_map})" if config.model.attention == "linear" else ""),
        parameters=count_parameters(state.params),
        tokens=line["tokens"],
        seconds=line["seconds"],
        train_bits=line["train_bits"],
        validation_bits=line["validation_bits"],
        trigram_bits=trigram,
    )
    last_line = {"step": config.steps, "summary": dataclasses.asdict(summary)}
    report.append_metrics(run.folder / checkpoint.METRICS, last_line)
    return summary


def _default_prompt(text: str) -> str:
    """The start of the first long line that begins with a letter: prose, where there is some."""
    lines = (line for line in text.splitlines() if len(line) > 50 and line[0].isalpha())
    return next(lines, text)[:32]


def compile_step(run: Run) -> Callable[[TrainState, Batch], tuple[TrainState, Array, Array]]:
    """Compiled: (state, batch) -> (state, mean loss in nats, norm of the unclipped gradient). The state is used up."""

    def mean_loss(params, batch: Batch) -> Array:
        return jnp.mean(token_losses(run.graphdef, params, batch))

    def step(state: TrainState, batch: Batch):
        loss, gradient = jax.value_and_grad(mean_loss)(state.params, batch)
        updates, opt_state = run.optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state), loss, optax.tree.norm(gradient)

    tokens = np.zeros((run.config.batch_size, run.config.context), np.int32)
    return jax.jit(step, donate_argnums=0).lower(run.state, Batch(tokens, tokens)).compile()


def token_losses(graphdef, params, batch: Batch) -> Array:
    """-ln p(target) of each token, [B, T]."""
    logits = nnx.merge(graphdef, nnx.State(params))(jnp.asarray(batch.inputs))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)


def make_evaluate(graphdef, corpus: Corpus, config: Config) -> Callable[[Any, int | None], float]:
    """(params, the most batches to use, None = all) -> bits a character of the validation text."""

    @jax.jit
    def weighted_sum(params, batch: Batch, weights: Array) -> Array:
        return jnp.sum(token_losses(graphdef, params, batch) * weights)

    def evaluate(params, limit: int | None = None) -> float:
        batches = validation_batches(corpus.validation, batch_size=config.batch_size, context=config.context)
        available = -(-(len(corpus.validation) - 1) // (config.batch_size * config.context))
        stride = 1 if limit is None else -(-available // limit)
        total = count = 0.0
        for batch, weights in itertools.islice(batches, 0, None, stride):
            total += float(weighted_sum(params, batch, weights))
            count += float(weights.sum())
        return total / count * BITS

    return evaluate

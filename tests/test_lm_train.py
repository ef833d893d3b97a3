"""A whole run, made tiny: it learns, leaves what it should, and its checkpoint gives the same model."""

import dataclasses
import json
import math
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lm_cases import one_device, tiny_config

from jax_linattn.lm import checkpoint, report
from jax_linattn.lm import folder as folders
from jax_linattn.lm import train as train_module
from jax_linattn.lm.batches import train_batches
from jax_linattn.lm.config import Config, default_config
from jax_linattn.lm.generate import continue_texts
from jax_linattn.lm.model import ModelConfig
from jax_linattn.lm.report import Summary
from jax_linattn.lm.run import Run, prepare
from jax_linattn.lm.step import _matrices, compile_step, make_evaluate, make_optimizer, token_losses
from jax_linattn.lm.train import train

ROOT = Path(__file__).parent.parent


class Finished(NamedTuple):
    """A run from beginning to end, with what it compiled, so that no test compiles it again."""

    config: Config
    folder: Path
    run: Run
    summary: Summary
    step: Callable
    evaluate: Callable


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("run")
    config, folder = tiny_config(tmp_path), tmp_path / "runs" / "tiny"
    run = prepare(config, folder, mesh=one_device())
    step = compile_step(run.graphdef, config, run.mesh, run.state)
    evaluate = make_evaluate(run.graphdef, run.corpus, config, run.mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "compile_step", lambda *_: step)
        patch.setattr(train_module, "make_evaluate", lambda *_: evaluate)
        summary = train(run, progress=False)
    return Finished(config, folder, run, summary, step, evaluate)


def test_a_run_learns_and_leaves_everything(finished):
    config, folder, summary = finished.config, finished.folder, finished.summary
    present = {path.name for path in folder.iterdir()}
    assert present == {"config.json", "metrics.jsonl", "loss.png", "sample.txt", "checkpoints", "lock"}
    fingerprint = {"corpus_sha256": finished.run.corpus.fingerprint()}
    assert json.loads((folder / "config.json").read_text()) == config.to_dict() | fingerprint
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    sample = (folder / "sample.txt").read_text()
    assert sample.startswith("the ")
    assert len(sample) == len("the ") + 20 + 1

    *lines, last = report.read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [*range(5, 46, 5)]
    assert [line["step"] for line in lines if "validation_bits" in line] == [20, 40, 45]
    assert lines[-1]["tokens"] == summary.tokens == 45 * 8 * 32
    assert lines[-1]["train_bits"] < 0.6 * lines[0]["train_bits"]
    assert last["summary"]["validation_bits"] == summary.validation_bits < 0.6 * lines[0]["train_bits"]
    assert 0 < summary.trigram_bits < 2
    assert summary.tokens_per_second > 0
    for word in ["validation bits/char", "trigram bits/char", "tokens a second", str(folder)]:
        assert word in str(summary)


def test_runs_in_a_table(finished):
    metrics = report.read_metrics(finished.folder / "metrics.jsonl")
    summary = report.read_summary(metrics)
    assert summary == finished.summary
    assert report.read_summary(metrics[:-1]) is None
    worse = dataclasses.replace(summary, folder="runs/worse", validation_bits=2.0)
    *_, best, last = report.comparison([worse, summary]).splitlines()
    assert best.startswith("| tiny | linear (elu_plus_one) |")
    assert last.startswith("| worse |")
    assert f"| {2 * math.log(2):.3f} | 2.000 |" in last


def test_the_checkpoint_is_the_model(finished):
    """Loaded anew, the last checkpoint has the validation loss that was reported, and writes the same sample."""
    model, vocabulary = checkpoint.load_model(finished.folder)
    assert vocabulary == finished.run.corpus.vocabulary
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert finished.evaluate(params) == pytest.approx(finished.summary.validation_bits, rel=1e-6)
    (written,) = continue_texts(model, vocabulary, ["the "], 20, temperature=0.8, seed=finished.config.seed)
    assert (finished.folder / "sample.txt").read_text() == f"the {written}\n"


def test_a_finished_run_is_free_and_is_not_overwritten_unasked(finished):
    """Its folder can be taken again while its `Run` still lives; the same options find it finished, others are refused."""
    config, folder = finished.config, finished.folder
    before = (folder / "metrics.jsonl").read_bytes()
    broken = config.copy_and_resolve_references()
    broken.steps = 46
    with pytest.raises(ValueError, match=r"holds a run with other options: steps: 45 → 46.*--config.overwrite=True"):
        prepare(broken, folder, mesh=one_device())
    broken.update({"overwrite": True, "corpus": "nowhere"})
    with pytest.raises(ValueError, match="does not exist"):
        prepare(broken, folder, mesh=one_device())
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert "finished already" in prepare(config, folder, mesh=one_device()).description()
    *measured, _ = before.splitlines(keepends=True)  # all but the summary, which `train` would write again
    assert (folder / "metrics.jsonl").read_bytes() == b"".join(measured)
    (folder / "metrics.jsonl").write_bytes(before)


def test_overwriting_removes_a_run_and_nothing_else(tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoints" / "7").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds files of a run, but no config.json.*--config.overwrite=True"):
        folders.plan(folder, {}, overwrite=False)
    plan = folders.plan(folder, {}, overwrite=True)
    assert plan == "replace"
    folders.carry_out(plan, folder, {})
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "notes.txt"]


def test_the_loss_is_the_cross_entropy(finished):
    run = finished.run
    model, _ = checkpoint.load_model(finished.folder)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    batch = next(train_batches(run.corpus.train, seed=0, batch_size=2, context=8))

    @jax.jit
    def logits_and_losses(params):
        return nnx.merge(run.graphdef, nnx.State(params))(batch.inputs), token_losses(run.graphdef, params, batch)

    logits, losses = (np.asarray(x, np.float64) for x in logits_and_losses(params))
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = -np.log(np.take_along_axis(p, batch.targets[..., None], axis=-1)[..., 0])
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-6)


def test_weight_decay_is_for_matrices(finished):
    decays = {
        "/".join(entry.key for entry in path)
        for path, decay in jax.tree_util.tree_leaves_with_path(_matrices(finished.run.state.params))
        if decay
    }
    attention = {f"block_0/attention/{name}/kernel" for name in ("query", "key", "value", "out")}
    assert decays == attention | {"embedding/embedding", "block_0/mlp/up/kernel", "block_0/mlp/down/kernel"}


def test_options_that_will_not_do(tmp_path):
    for name, value, message in [
        ("steps", 0, "steps must be a positive whole number"),
        ("context", 5000, "too few for sequences of 5000"),
        ("warmup_steps", -1, "warmup_steps must be at least 0"),
        ("learning_rate", 0.0, "learning_rate must be above 0"),
        ("seed", -1, "seed must be at least 0"),
        ("seed", 2**32, "seed must be below 2"),
        ("log_every", None, "log_every must be a positive whole number, got None"),
        ("model.feature_map", "identity", "model.normalize must be False with"),
        ("sample.temperature", float("inf"), "sample.temperature must be at least 0 and finite, got inf"),
        ("sample.prompt", "Ä", "lacks: 'Ä'"),
        ("sample.temperature", -1.0, "sample.temperature must be at least 0"),
        ("model.attention", "mamba", "model.attention must be one of"),
    ]:
        config = tiny_config(tmp_path)
        config.update_from_flattened_dict({name: value})
        with pytest.raises(ValueError, match=message):
            prepare(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(AttributeError):
        tiny_config(tmp_path).learning_rat = 1.0
    for name in ("", "..", "a/b"):
        with pytest.raises(ValueError, match="name must be that of a folder"):
            folders.run_folder(tmp_path, name)
    with pytest.raises(ValueError, match="holds no checkpoints"):
        checkpoint.load_model(tmp_path)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, monkeypatch):
    run = prepare(tiny_config(tmp_path), tmp_path / "run", mesh=one_device())
    nan = jnp.float32(jnp.nan)
    monkeypatch.setattr(train_module, "compile_step", lambda *_: lambda state, batch: (state, nan, nan))
    with pytest.raises(FloatingPointError, match=r"no longer finite at step 5; a lower learning_rate"):
        train(run, progress=False)


def test_parameters_that_are_not_finite_are_never_saved(tmp_path, monkeypatch):
    config = tiny_config(tmp_path)
    run = prepare(config, tmp_path / "run", mesh=one_device())
    spoilt = jax.tree.map(lambda x: x * jnp.nan, run.state.params)
    step = lambda state, batch: (state._replace(params=spoilt), jnp.float32(1), jnp.float32(1))
    monkeypatch.setattr(train_module, "compile_step", lambda *_: step)
    monkeypatch.setattr(train_module, "make_evaluate", lambda *_: lambda *_: 1.0)
    with pytest.raises(FloatingPointError, match="parameter is no longer finite"):
        train(run, progress=False)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_configs(path):
    config = runpy.run_path(str(path))["get_config"]()
    assert config.name.startswith(path.stem)
    assert ModelConfig(vocabulary_size=100, **config.model).width == 128


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--config.corpus=nowhere", "'nowhere' does not exist; give a text file or a folder of them, --config.corpus=PATH"),
        ("--config.step=3", 'Did you mean "steps" instead of "step"?; all options are in jax_linattn/lm/config.py'),
        ("--config=configs/smal.py", "'configs/smal.py'; all options are in jax_linattn/lm/config.py"),
    ],
)
def test_the_script_says_what_is_wrong(tmp_path, argument, expected):
    command = [sys.executable, "scripts/train.py", argument, f"--workdir={tmp_path}"]
    result = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.endswith(f"{expected}\n")
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_schedule_warms_up_and_falls():
    config = default_config()
    config.update({"steps": 100, "warmup_steps": 10, "learning_rate": 0.1, "weight_decay": 0.0})
    optimizer = make_optimizer(config)
    params = {"kernel": np.ones((2, 2), np.float32)}
    state, sizes = optimizer.init(params), []
    update = jax.jit(optimizer.update)
    for _ in range(100):
        updates, state = update({"kernel": np.ones((2, 2), np.float32)}, state, params)
        sizes.append(float(-updates["kernel"][0, 0]))
    assert sizes[0] == 0
    assert int(np.argmax(sizes)) == 10
    assert max(sizes) == pytest.approx(0.1, rel=1e-3)
    assert sizes[-1] < 0.002

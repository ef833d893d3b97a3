"""Training on several devices, in several processes, in parts and in 16 bits: the same losses as on one device."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lm_cases import one_device, tiny_config

from jax_linattn.lm import devices
from jax_linattn.lm import folder as folders
from jax_linattn.lm.batches import Batch
from jax_linattn.lm.config import default_config
from jax_linattn.lm.model import Decoder, ModelConfig
from jax_linattn.lm.report import read_metrics
from jax_linattn.lm.run import prepare
from jax_linattn.lm.step import compile_step, initial_state, token_losses
from jax_linattn.lm.train import train

ROOT = Path(__file__).parent.parent
STEPS = 4


def small_config(tmp_path, **changes):
    config = tiny_config(tmp_path)
    config.update({"steps": STEPS, "batch_size": 16, "warmup_steps": 0, "log_every": 1, "checkpoint_every": 2})
    config.update_from_flattened_dict(changes)
    return config


def losses_of(config, mesh) -> tuple[list[float], object]:
    """Of the first steps, on random text; and the state after them."""
    tokens = np.random.default_rng(0).integers(0, 11, (STEPS, config.batch_size, config.context + 1)).astype(np.int32)
    graphdef, state = initial_state(ModelConfig(vocabulary_size=11, **config.model), config, mesh)
    step = compile_step(graphdef, config, mesh, state)
    losses = []
    for rows in tokens:
        state, loss, _ = step(state, devices.split_batch(mesh, Batch(rows[:, :-1], rows[:, 1:])))
        losses.append(float(loss))
    return losses, state


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return losses_of(small_config(tmp_path_factory.mktemp("one")), one_device())[0]


@pytest.mark.parametrize("shard", [False, True])
def test_eight_devices(expected, tmp_path, shard):
    losses, state = losses_of(small_config(tmp_path, shard_parameters=shard, accumulation=2), devices.mesh_of())
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    leaves = jax.tree.leaves((state.params, state.opt_state))
    split = [leaf for leaf in leaves if leaf.addressable_shards[0].data.size == leaf.size // 8 > 0]
    assert all(len(leaf.sharding.device_set) == 8 for leaf in leaves)
    assert sum(leaf.size for leaf in split) > 0.9 * sum(leaf.size for leaf in leaves) if shard else not split


def test_parts_of_a_batch(expected, tmp_path):
    losses, _ = losses_of(small_config(tmp_path, accumulation=4), one_device())
    np.testing.assert_allclose(losses, expected, rtol=2e-5)


def test_sixteen_bits(expected, tmp_path):
    """Products in bfloat16; parameters, optimizer and loss in float32, and so near that learning is the same."""
    config = small_config(tmp_path, **{"model.dtype": "bfloat16", "model.remat": True})
    losses, state = losses_of(config, one_device())
    np.testing.assert_allclose(losses, expected, rtol=2e-2)
    assert losses != expected
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.params)} == {"float32"}


def test_states_are_float32_in_a_model_of_sixteen_bits():
    config = tiny_config_model(dtype="bfloat16")
    model = Decoder(config, rngs=nnx.Rngs(0))
    model.init_cache(2, 8)
    attention = jax.tree.leaves(nnx.state(model.block_0.attention, nnx.Cache))
    assert [str(leaf.dtype) for leaf in attention] == ["float32"] * 3
    convolution = jax.tree.leaves(nnx.state(model.block_0.convolution, nnx.Cache))
    assert {str(leaf.dtype) for leaf in convolution} == {"bfloat16"}


def tiny_config_model(**changes) -> ModelConfig:
    small = {"num_layers": 2, "num_heads": 2, "width": 16, "mlp_width": 64}
    return ModelConfig(vocabulary_size=11, **{**default_config().model, **small, **changes})


def test_remat_keeps_less_and_changes_nothing():
    """Loss and gradients are the same; what the forward pass keeps for the gradient is less by more than half.

    Counted in the program as it is traced: XLA on a CPU computes nothing twice, so that nothing is saved there.
    """
    tokens = np.random.default_rng(0).integers(0, 11, (2, 8, 33)).astype(np.int32)
    batch = Batch(tokens[0, :, :-1], tokens[0, :, 1:])
    results, kept = [], []
    for remat in (False, True):
        model = Decoder(tiny_config_model(remat=remat, dropout=0.5), rngs=nnx.Rngs(0))
        graphdef, params = nnx.split(model, nnx.Param)

        def loss(params, graphdef=graphdef):
            return jnp.mean(token_losses(graphdef, params, batch, jax.random.key(0)))

        params = nnx.to_pure_dict(params)
        results.append(jax.jit(jax.value_and_grad(loss))(params))
        residuals = jax.eval_shape(lambda params, loss=loss: jax.vjp(loss, params)[1], params)
        kept.append(sum(leaf.size for leaf in jax.tree.leaves(residuals)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *results)
    assert kept[1] < 0.5 * kept[0]


def test_dropout():
    model = Decoder(tiny_config_model(dropout=0.5), rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 8)))

    @jax.jit
    def logits(seed):
        model = nnx.merge(graphdef, params)
        key = jax.random.key(seed)
        return model(tokens), model(tokens, dropout_key=key), model(tokens, dropout_key=key)

    plain, dropped, again = logits(0)
    np.testing.assert_array_equal(dropped, again)
    assert not np.allclose(plain, dropped)
    assert not np.allclose(dropped, logits(1)[1])
    np.testing.assert_array_equal(plain, logits(1)[0])


def test_each_step_drops_anew(tmp_path):
    """The same batch at parameters that hardly move: only what is dropped can change the loss."""
    config = small_config(tmp_path, **{"model.dropout": 0.5, "learning_rate": 1e-12, "weight_decay": 0.0})
    graphdef, state = initial_state(ModelConfig(vocabulary_size=11, **config.model), config, one_device())
    step = compile_step(graphdef, config, one_device(), state)
    tokens = np.random.default_rng(0).integers(0, 11, (config.batch_size, config.context)).astype(np.int32)
    losses = []
    for _ in range(3):
        state, loss, _ = step(state, Batch(tokens, tokens))
        losses.append(float(loss))
    assert np.ptp(losses) > 1e-3


def test_a_batch_that_cannot_be_split(tmp_path):
    config = small_config(tmp_path, batch_size=24, accumulation=2)
    with pytest.raises(ValueError, match=r"batch_size must be a multiple of .* 8 \* 2, got 24"):
        prepare(config, tmp_path / "run", mesh=devices.mesh_of())
    assert not (tmp_path / "run").exists()


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def start_processes(workdirs: list[Path], options: list[str]) -> list[subprocess.Popen]:
    """Two processes of two devices each, of the very command."""
    port = free_port()
    return [start_process(number, port, workdir, options) for number, workdir in enumerate(workdirs)]


def outputs_of(processes: list[subprocess.Popen]) -> list[str]:
    return [process.communicate(timeout=240)[0] for process in processes]


def start_process(number: int, port: int, tmp_path: Path, options: list[str]) -> subprocess.Popen:
    command = [sys.executable, "scripts/train.py", "--config=configs/small.py", f"--workdir={tmp_path}", *options]
    command += ["--distributed", f"--coordinator=localhost:{port}", "--num_processes=2", f"--process_id={number}"]
    flags = "--xla_force_host_platform_device_count=2"
    environment = {**os.environ, "PYTHONPATH": ".", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)


def test_two_processes_train_and_go_on_as_one(tmp_path):
    """The very command, in two processes of two devices each, from a checkpoint that one process has left.

    The one process is stopped after the checkpoint of step 2; the two do the rest, with the losses of one alone.
    """
    config = small_config(tmp_path)
    whole, shared = tmp_path / "whole", tmp_path / config.name
    train(prepare(config, whole, mesh=one_device()), progress=False)
    shutil.copytree(whole, shared)
    shutil.rmtree(shared / folders.CHECKPOINTS / str(STEPS))

    processes = start_processes([tmp_path] * 2, options_of(config))
    outputs = outputs_of(processes)
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert "on 4 cpu device(s); going on after step 2" in outputs[0]
    assert "tokens a second" in outputs[0]
    assert "tokens a second" not in outputs[1]
    expected, found = (read_metrics(folder / folders.METRICS) for folder in (whole, shared))
    assert [line["step"] for line in found] == [1, 2, 3, 4, 4]
    for name in ("train_bits", "validation_bits", "gradient_norm"):
        values = [[line[name] for line in lines if name in line] for lines in (found, expected)]
        np.testing.assert_allclose(*values, rtol=2e-5)
    assert sorted(path.name for path in (shared / folders.CHECKPOINTS).iterdir()) == ["2", "4"]


def test_two_processes_stop_together(tmp_path):
    """On SIGTERM to one, after a step that both agree on, with a checkpoint of it."""
    config = small_config(tmp_path, steps=100_000, checkpoint_every=100_000, validate_every=100_000)
    folder = tmp_path / config.name
    processes = start_processes([tmp_path] * 2, options_of(config))
    until = time.monotonic() + 120
    while not read_metrics(folder / folders.METRICS) and time.monotonic() < until:
        time.sleep(0.2)
    processes[1].send_signal(signal.SIGTERM)
    outputs = outputs_of(processes)
    assert [process.returncode for process in processes] == [130, 130], "\n".join(outputs)
    (step,) = [int(path.name) for path in (folder / folders.CHECKPOINTS).iterdir()]
    assert f"stopped after step {step:,} of 100,000; the same command goes on from there" in outputs[0]
    assert read_metrics(folder / folders.METRICS)[-1]["step"] == step


def test_two_processes_that_disagree(tmp_path):
    """About what the folder holds, so that one refuses: both end, each with one line."""
    config = small_config(tmp_path)
    workdirs = [tmp_path / "first", tmp_path / "second"]
    (workdirs[1] / config.name / folders.CHECKPOINTS).mkdir(parents=True)
    outputs = outputs_of(processes := start_processes(workdirs, options_of(config)))
    assert [process.returncode for process in processes] == [1, 1], "\n".join(outputs)
    assert "error: process(es) [1] cannot go on, and say why" in outputs[0]
    assert "holds files of a run, but no config.json" in outputs[1]
    assert not (workdirs[0] / config.name).exists()


def options_of(config) -> list[str]:
    return [f"--config.{name}={value}" for name, value in folders.flat(config.to_dict()).items() if value != ""]

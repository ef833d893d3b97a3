"""Synthetic tasks: what is asked follows from what was read, and the small training loop learns what can be learned."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_linattn.feature_maps import elu_plus_one
from jax_linattn.lm import tasks
from jax_linattn.lm.layers import SoftmaxAttention
from jax_linattn.nnx import LinearAttention

TINY = {"num_layers": 1, "num_heads": 2, "width": 16, "mlp_width": 16}


def test_recall_asks_for_the_value_of_a_key():
    task = tasks.Recall(num_symbols=9, length=21)
    batch = task.batch(0, 0, batch_size=40, sizes=(1, 4, 9))
    assert [array.dtype for array in batch] == [np.int32, np.int32, np.float32]
    seen = set()
    for inputs, targets, weights in zip(*batch, strict=True):
        assert inputs.shape == targets.shape == weights.shape == (21,)
        size = int((weights == 0).sum()) // 2
        seen.add(size)
        np.testing.assert_array_equal(weights, [0] * (2 * size) + [1] * (21 - 2 * size))
        keys, values = inputs[: 2 * size : 2], inputs[1 : 2 * size : 2]
        assert len(set(keys)) == len(set(values)) == size
        assert set(keys) <= set(range(9))
        assert set(values) <= set(range(9, task.vocabulary_size))
        value_of = dict(zip(keys, values, strict=True))
        assert [value_of[key] for key in inputs[2 * size :]] == list(targets[2 * size :])
        assert not targets[: 2 * size].any()
    assert seen == {1, 4, 9}


def test_spaced_recall_asks_for_each_key_once_and_soon():
    task = tasks.SpacedRecall(vocabulary_size=21, length=41)
    batch = task.batch(0, 0, batch_size=200, sizes=(1, 4, 9))
    assert [array.dtype for array in batch] == [np.int32, np.int32, np.float32]
    places = []
    for inputs, targets, weights in zip(*batch, strict=True):
        size = int(weights.sum())
        asked = np.flatnonzero(weights)
        assert (asked >= 2 * size).all()
        assert (asked % 2 == 0).all()
        keys, values = inputs[: 2 * size : 2], inputs[1 : 2 * size : 2]
        assert set(keys) <= set(range(1, 10))
        assert set(values) <= set(range(10, 21))
        assert len(set(values)) == size
        assert sorted(inputs[asked]) == sorted(keys) == sorted(set(keys))
        value_of = dict(zip(keys, values, strict=True))
        assert [value_of[key] for key in inputs[asked]] == list(targets[asked])
        assert not targets[weights == 0].any()
        if size == 1:
            places.append(int(asked[0] - 2) // 2)
    assert 0.15 < np.mean(np.array(places) == 0) < 0.45, "19 places, weighed by i^-0.99: the first has 0.28"
    with pytest.raises(ValueError, match="sizes must be numbers of pairs from 1 to 9 for 21 symbols and length 41, got"):
        task.batch(0, 0, batch_size=1, sizes=(10,))


def test_fit_takes_one_of_a_rate_and_an_optimizer():
    task = tasks.Copy(num_symbols=2, length=5)
    model = tasks.build(task.vocabulary_size, **TINY)
    batch_at = functools.partial(task.batch, 0, batch_size=2, sizes=(2,))
    for options in ({}, {"learning_rate": 1e-2, "optimizer": optax.sgd(1e-2)}):
        with pytest.raises(ValueError, match="one of learning_rate and optimizer"):
            tasks.fit(model, batch_at, 1, **options)
    before = jax.tree.leaves(nnx.state(model, nnx.Param))
    trained, losses = tasks.fit(model, batch_at, 2, optimizer=optax.sgd(0.0))
    assert losses.shape == (2,)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.leaves(nnx.state(trained, nnx.Param)))


def test_copy_asks_for_the_string():
    task = tasks.Copy(num_symbols=5, length=20)
    batch = task.batch(0, 0, batch_size=40, sizes=(1, 6, 9))
    seen = set()
    for inputs, targets, weights in zip(*batch, strict=True):
        size = int(weights.sum())
        seen.add(size)
        string = inputs[1 : size + 1]
        assert set(string) <= set(range(1, task.vocabulary_size))
        np.testing.assert_array_equal(inputs, [0, *string, 0, *string[:-1], *[0] * (19 - 2 * size)])
        np.testing.assert_array_equal(targets, [0] * (size + 1) + [*string] + [0] * (19 - 2 * size))
        np.testing.assert_array_equal(weights, targets > 0)
    assert seen == {1, 6, 9}


@pytest.mark.parametrize(
    "task", [tasks.Recall(num_symbols=9, length=21), tasks.SpacedRecall(18, 20), tasks.Copy(num_symbols=5, length=20)]
)
def test_batches_are_a_function_of_seed_and_step(task):
    batch = functools.partial(task.batch, batch_size=3, sizes=(4,))
    for one, other in zip(batch(7, 5), batch(7, 5), strict=True):
        np.testing.assert_array_equal(one, other)
    different = [batch(7, 5), batch(8, 5), batch(7, 6), batch(7, tasks.FRESH)]
    assert len({batch.inputs.tobytes() for batch in different}) == 4


def test_sizes_that_do_not_fit():
    how = {"batch_size": 1, "sizes": (2, 5)}
    with pytest.raises(ValueError, match=r"numbers of pairs from 1 to 4 for 9 symbols and length 10, got \[2, 5\]"):
        tasks.Recall(num_symbols=9, length=10).batch(0, 0, **how)
    with pytest.raises(ValueError, match=r"from 1 to 3 for 3 symbols"):
        tasks.Recall(num_symbols=3, length=100).batch(0, 0, **how)
    with pytest.raises(ValueError, match=r"lengths from 1 to 4 for sequences of 10, got \[2, 5\]"):
        tasks.Copy(num_symbols=3, length=10).batch(0, 0, **how)


def successor(step: int) -> tasks.Batch:
    """Asked is the symbol after the one just read, on the even positions; on the others something else."""
    inputs = np.random.default_rng(step).integers(0, 6, (4, 12), np.int32)
    asked = np.broadcast_to(np.arange(12) % 2 == 0, inputs.shape)
    targets = np.where(asked, (inputs + 1) % 6, (inputs + 3) % 6).astype(np.int32)
    return tasks.Batch(inputs, targets, asked.astype(np.float32))


class QuickJax:
    """jax, that compiles as the tests do."""

    jit = staticmethod(jax.jit)

    def __getattr__(self, name):
        return getattr(jax, name)


@pytest.fixture
def quick_compilation(monkeypatch):
    monkeypatch.setattr(tasks, "jax", QuickJax())


@pytest.mark.usefixtures("quick_compilation")
def test_fit_learns_what_is_asked_and_nothing_else():
    model = tasks.build(6, **TINY)
    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    trained, losses = tasks.fit(model, successor, 60, learning_rate=3e-2)
    first = successor(0)
    graphdef, params = nnx.split(model)  # the model that came in: it was not changed
    logits = np.asarray(jax.jit(lambda params: nnx.merge(graphdef, params)(first.inputs))(params), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = -np.take_along_axis(log_p, first.targets[..., None], axis=-1)[..., 0][first.weights > 0].mean()
    np.testing.assert_allclose(losses[0], expected, rtol=1e-5)
    np.testing.assert_array_equal(before["embedding"]["embedding"], model.embedding.embedding[...])
    assert losses.shape == (60,)
    assert losses[-10:].mean() < 0.1
    fresh = successor(tasks.FRESH)
    assert tasks.accuracy(trained, [fresh]) == 1
    elsewhere = fresh._replace(weights=1 - fresh.weights)
    assert tasks.accuracy(trained, [elsewhere]) == 0
    assert tasks.accuracy(trained, [fresh, elsewhere, elsewhere]) == pytest.approx(1 / 3)


def shape_of_model(*args, **options):
    """As `tasks.build`, without numbers: quick."""
    return nnx.eval_shape(lambda: build(*args, **options))


build = tasks.build


def test_models_are_what_they_are_called():
    assert tasks.numbers_a_head(shape_of_model(6, **TINY)) == 8 * 8
    assert tasks.numbers_a_head(shape_of_model(6, **TINY, feature_map="hedgehog")) == 16 * 8
    assert tasks.numbers_a_head(shape_of_model(6, **TINY, feature_map="taylor")) == (1 + 8 + 36) * 8
    assert tasks.numbers_a_head(shape_of_model(6, **TINY, attention="softmax")) is None
    hybrid = shape_of_model(6, **{**TINY, "num_layers": 2}, softmax_layers=[0])
    assert [type(block.attention) for block in hybrid.blocks] == [SoftmaxAttention, LinearAttention]
    assert tasks.numbers_a_head(hybrid) == 8 * 8
    tokens = jnp.zeros((1, 5), jnp.int32)
    assert nnx.eval_shape(lambda model: model(tokens), hybrid).shape == (1, 5, 6)
    with pytest.raises((AttributeError, KeyError), match="widht"):
        build(6, widht=3)


@pytest.mark.usefixtures("quick_compilation")
def test_the_weight_on_one_of_many_keys():
    """Eight keys share four features; softmax attention needs none."""
    assert 0.45 < tasks.sharpest_weight(elu_plus_one, 8, 4, steps=300) < 0.51
    assert tasks.sharpest_weight(None, 8, 4, steps=300) > 0.98


@pytest.fixture
def script(monkeypatch, tmp_path):
    """scripts/limits.py as a module, its flags parsed, and the figure that it will write."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "scripts")
    import limits

    figure = tmp_path / "figure.png"
    return limits, figure


def test_the_script_measures_and_draws(script, monkeypatch, capsys):
    limits, figure = script
    best = limits.time_both(1, 4, rounds=1)
    assert all(seconds > 0 for seconds in best.values())
    monkeypatch.setattr(limits, "time_both", lambda *_, **__: best)
    monkeypatch.setattr(tasks, "build", shape_of_model)
    monkeypatch.setattr(tasks, "fit", lambda model, batch_at, steps, **_: (batch_at(0) and model, np.ones(steps)))
    monkeypatch.setattr(tasks, "accuracy", lambda model, batches: 0.25 + len(batches) / 8)
    monkeypatch.setattr(tasks, "sharpest_weight", lambda *_, **__: 0.5)
    for task, halves in {"recall": 10, "copy": 12, "sharp": 10}.items():
        limits.main([task, "--quick"] + ([f"--out={figure}"] if task != "sharp" else []))
        assert capsys.readouterr().out.count("  0.500") >= halves
    limits.main(["short", "--quick", f"--out={figure}"])
    assert f"figure: {figure}" in capsys.readouterr().out
    assert figure.read_bytes().startswith(b"\x89PNG")
    for wrong in ([], ["sharp", "--out=x"], ["short", "--steps=3"], ["recall", "--only=nobody"]):
        with pytest.raises(SystemExit):
            limits.main(wrong)

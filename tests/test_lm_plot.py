"""Pictures: the numbers in them are the model's own, and every kind of scripts/plot.py writes one."""

import importlib.util
import json
import math
import re
import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from flax import nnx
from harness import normal
from lm_models import model_of
from PIL import Image

from jax_linattn import feature_maps
from jax_linattn.lm import inspection
from jax_linattn.lm.data import Vocabulary
from jax_linattn.lm.figures import losses, maps, sources, style, weights

ROOT = Path(__file__).resolve().parent.parent


def tokens_and_mask():
    tokens = np.random.default_rng(1).integers(0, 11, (2, 7)).astype(np.int32)
    mask = np.ones((2, 7), bool)
    mask[0, :2], mask[1, 3] = False, False
    return jnp.asarray(tokens), jnp.asarray(mask)


# --- what is shown ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["softmax", "hedgehog"])
def test_weights_times_values_are_the_layers_outputs(kind):
    """A model whose attention is `model_weights` times the values, projected out, gives the model's logits."""
    graphdef, params = nnx.split(model_of(kind))
    tokens, mask = tokens_and_mask()

    def by_weights(params, tokens, mask):
        model = nnx.merge(graphdef, params)
        every = inspection.model_weights(model, tokens, mask=mask)
        x = model.embedding(tokens)
        for block, w in zip(model.blocks, every, strict=True):
            h = block.attention_norm(x)
            h = jnp.where(mask[..., None], h + block.convolution(h, mask=mask), 0)
            y = block.attention.out(jnp.einsum("bhts,bshd->bthd", w, block.attention.value(h)))
            x = x + jnp.where(mask[..., None], y, 0)
            x = x + block.mlp(block.mlp_norm(x))
        x = model.norm(x)
        tied = model.config.tied_embedding
        return every, model.embedding.attend(x) if tied else model.head(x), model(tokens, mask=mask)

    every, rebuilt, logits = jax.tree.map(np.asarray, jax.jit(by_weights)(params, tokens, mask))
    real = np.asarray(mask)
    np.testing.assert_allclose(rebuilt[real], logits[real], rtol=2e-4, atol=2e-4)

    visible = np.tril(np.ones((7, 7), bool)) & real[:, None, :] & real[:, :, None]
    for w in every:
        assert w.shape == (2, 2, 7, 7)
        assert not w[~np.broadcast_to(visible[:, None], w.shape)].any()
        np.testing.assert_allclose(w.sum(axis=-1), np.broadcast_to(real[:, None], (2, 2, 7)), atol=1e-5)


def test_states_are_the_running_sums():
    """Every measure, beside sums and singular values in NumPy, masked tokens left out."""
    graphdef, params = nnx.split(model_of("linear"))
    tokens, mask = tokens_and_mask()

    def trace(params, tokens, mask):
        """(traces, features φ(k), values) of each layer."""
        model = nnx.merge(graphdef, params)
        inputs = inspection.attention_inputs(model, tokens, mask=mask)
        layers = [block.attention for block in model.blocks]
        features = [feature_maps.elu_plus_one(layer.key(x)) for layer, x in zip(layers, inputs, strict=True)]
        values = [layer.value(x) for layer, x in zip(layers, inputs, strict=True)]
        return inspection.trace_states(model, tokens, mask=mask), features, values

    assert inspection.full_rank(model_of("linear")) == 6
    traces, every_feature, every_value = jax.jit(trace)(params, tokens, mask)
    for measured, features, values in zip(traces, every_feature, every_value, strict=True):
        features = np.asarray(features, np.float64) * np.asarray(mask)[..., None, None]
        added = np.einsum("bthf,bthe->bthfe", features, np.asarray(values, np.float64))
        s, z = added.cumsum(axis=1), features.cumsum(axis=1)
        norm = np.linalg.norm(s, axis=(-2, -1))
        np.testing.assert_allclose(measured.kv_norm, norm, rtol=1e-4)
        np.testing.assert_allclose(measured.key_sum_norm, np.linalg.norm(z, axis=-1), rtol=1e-4)
        change = np.linalg.norm(added, axis=(-2, -1)) / np.maximum(norm, 1e-30)
        np.testing.assert_allclose(measured.change, change, rtol=1e-3, atol=1e-6)
        p = np.linalg.svd(s, compute_uv=False) + 1e-30
        p /= p.sum(axis=-1, keepdims=True)
        rank = np.exp(-(p * np.log(p)).sum(axis=-1)) * (norm > 0)
        np.testing.assert_allclose(measured.effective_rank, rank, rtol=1e-3, atol=1e-6)


def test_what_has_no_weights_or_no_state_is_refused():
    tokens, _ = tokens_and_mask()
    with pytest.raises(ValueError, match="layer 0 is SoftmaxAttention, which keeps every key"):
        inspection.trace_states(model_of("softmax"), tokens)
    graphdef, params = nnx.split(model_of("linear"))
    model = nnx.merge(graphdef, params)
    model.blocks[1].attention.normalize = False
    with pytest.raises(ValueError, match="layer 1 has normalize=False, so its attention implies no weights"):
        inspection.model_weights(model, tokens)


def test_effective_rank_and_spread():
    (a,) = normal(0, (5, 1))
    matrices = np.stack([np.eye(5), np.zeros((5, 5)), a @ a.T, np.diag([3.0, 3, 3, 0, 0])]).astype(np.float32)
    np.testing.assert_allclose(jax.jit(inspection.effective_rank)(jnp.asarray(matrices)), [5, 0, 1, 3], rtol=1e-4)
    even = np.tri(4) / np.arange(1, 5)[:, None]
    np.testing.assert_allclose(
        jax.jit(inspection.spread)(jnp.asarray(np.stack([even, np.eye(4)]))), [[1] * 4, [1, 1 / 2, 1 / 3, 1 / 4]]
    )


def test_the_pattern_is_softmax_and_the_formula():
    """Queries and keys are those of np.random.seed(42), and weights φ(q_t)·φ(k_s) over their sum for s <= t."""
    linear, softmax = weights.pattern_weights("elu_plus_one", length=9, dim=4, size=0.5, seed=42)
    draw = np.random.RandomState(42).randn
    q, k = draw(9, 4) * 0.5, draw(9, 4) * 0.5
    phi = lambda x: np.where(x > 0, x + 1, np.exp(x))
    for actual, w in [(linear, phi(q) @ phi(k).T), (softmax, np.exp(q @ k.T / 2))]:
        w = np.tril(w)
        np.testing.assert_allclose(actual, w / w.sum(axis=-1, keepdims=True), rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="'identity' gives negative weights"):
        weights.pattern_weights("identity", length=9, dim=4, size=0.5, seed=42)


def test_kernel_curves():
    """Kernels that are known: cos θ, Taylor's 1 + s + s²/2 for s = √D cos θ, and the exponential itself."""
    angles, dim = np.linspace(0, np.pi, 7), 4
    query, key = maps.pairs_at(angles, dim, 5)
    np.testing.assert_allclose(np.linalg.norm(query, axis=-1), 2, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(key, axis=-1), 2, rtol=1e-5)
    s = 2 * np.cos(angles)
    for feature_map, expected in [(feature_maps.identity, s / 2), (feature_maps.taylor, (1 + s + s**2 / 2) / 5)]:
        for curve in maps.kernel_curve(feature_map, query, key):
            np.testing.assert_allclose(curve, expected, atol=1e-5)
    exact = np.exp(np.sum(query * key, axis=-1)[:, 0] / 2) / np.exp(2)
    np.testing.assert_allclose(maps.exponential_curve(angles, dim), exact, rtol=1e-4)
    np.testing.assert_allclose(maps.elementwise_curve("relu", np.array([-1.0, 2.0])), [0, 2])


METRICS = [
    {"step": 1, "tokens": 10, "seconds": 1.0, "train_bits": 5.0, "validation_bits": None},
    {"step": 2, "tokens": 20, "seconds": 2.0, "train_bits": 4.0, "validation_bits": 4.5, "new": 1},
    {"step": 3, "tokens": 30, "seconds": 3.0, "validation_bits": 4.0},
    {"step": 3, "note": "no loss here"},
]


def test_losses_are_the_metrics():
    figure = losses.draw_losses({"a": METRICS, "b": METRICS[:1]}, ["red", "blue"], unit="nats", over="tokens")
    train, validation, only_train, _ = (line.get_xydata() for line in figure.axes[0].lines)
    np.testing.assert_allclose(train, [[1e-5, 5 * math.log(2)], [2e-5, 4 * math.log(2)]])
    np.testing.assert_allclose(validation, [[2e-5, 4.5 * math.log(2)], [3e-5, 4 * math.log(2)]])
    np.testing.assert_allclose(only_train, [[1e-5, 5 * math.log(2)]])
    assert figure.axes[0].get_ylabel() == "nats a character"
    with pytest.raises(ValueError, match="run 'c' has measured no loss yet"):
        losses.draw_losses({"c": METRICS[3:]}, ["red"], unit="bits", over="steps")


def test_runs_keep_the_colours_of_their_maps_where_these_differ():
    assert losses.run_colors(["elu_plus_one", "softmax attention"]) == ["#0072b2", "#222222"]
    assert len(set(losses.run_colors(["taylor", "taylor", None]))) == 3


# --- the script -------------------------------------------------------------------------------------------------------


def load_script():
    spec = importlib.util.spec_from_file_location("plot", ROOT / "scripts" / "plot.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.fixture
def plot(monkeypatch, tmp_path):
    """Runs scripts/plot.py in a folder with runs named `linear` and `softmax`, whose checkpoints are tiny models."""
    script = load_script()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "load_model", lambda name: (model_of(name), Vocabulary(" $acefhilnt")))
    for kind, options in [("linear", {"attention": "linear", "feature_map": "exp"}), ("softmax", {"attention": "softmax"})]:
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in METRICS))
        (tmp_path / kind / "config.json").write_text(json.dumps({"model": options}))

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["plot.py", *arguments])
        script.main()

    return run


COMMANDS = {
    "pattern": ["--length=9", "--dim=4"],
    "heads": ["--checkpoint=softmax", "--text=a $hat in "],
    "maps": ["--maps=relu,dpfp_1", "--dim=3"],
    "state": ["--checkpoint=linear", "--text_file=text.txt", "--length=9"],
    "losses": ["linear", "softmax", "--unit=nats", "--over=tokens"],
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_each_kind_writes_a_picture(plot, kind, capsys):
    before = {name: matplotlib.rcParams[name] for name in style.STYLE}
    Path("text.txt").write_text("an ant ate a hat")
    plot(kind, "--out=new/picture.png", *COMMANDS[kind])
    assert capsys.readouterr().out == "new/picture.png\n"
    assert {name: matplotlib.rcParams[name] for name in style.STYLE} == before
    path = Path("new/picture.png")
    with Image.open(path) as picture:
        assert picture.width == 920
        assert 300 < picture.height < 1000
        shares = np.bincount(np.asarray(picture.convert("L")).ravel(), minlength=256) / (picture.width * picture.height)
    assert 0.3 < shares[255] < 0.99, "drawn on white"
    assert path.stat().st_size < 150_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "KIND"),
        (["patern"], "invalid choice: 'patern'"),
        (["pattern"], "required: --out"),
        (["pattern", "--out=a.png", "--lenght=3"], "--lenght=3"),
        (["pattern", "--out=a.jpg"], "out must end in one of .png, .pdf, .svg, got 'a.jpg'"),
        (["pattern", "--out=a.png", "--length=0"], "length must be a positive whole number"),
        (["pattern", "--out=a.png", "--size=0"], "size must be above 0"),
        (["pattern", "--out=a.png", "--feature_map=elu"], "unknown feature map 'elu'"),
        (["maps", "--out=a.png", "--maps="], "maps must name at least one"),
        (["maps", "--out=a.png", "--dim=1"], "dim must be at least 2"),
        (["heads", "--out=a.png", "--text="], "text must hold at least one character"),
        (["heads", "--out=a.png", "--text=a", "--text_file=b"], "choose one"),
        (["heads", "--out=a.png", "--text_file=nowhere"], "nowhere"),
        (["heads", "--out=a.png", "--checkpoint=linear", "--text=Zoo"], "'Zo'"),
        (["state", "--out=a.png", "--checkpoint=softmax", "--text=a"], "SoftmaxAttention"),
        (["losses", "--out=a.png", "nowhere"], "nowhere holds no metrics.jsonl"),
        (["losses", "--out=a.png", "linear", "linear"], "drawn once"),
    ],
)
def test_wrong_use_is_an_error_of_one_line(plot, arguments, message):
    with pytest.raises(SystemExit) as stop:
        plot(*arguments)
    text = str(stop.value)
    assert text.startswith("error: ")
    assert message in text
    assert "\n" not in text
    assert not Path("a.png").exists()


def test_the_gallery_can_be_drawn_again():
    """Its commands are ones that the script takes, and each picture that one writes is there."""
    text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    commands = [shlex.split(line)[2:] for line in text.splitlines() if line.startswith(".venv/bin/python scripts/plot.py")]
    parser = load_script().make_parser()
    drawn = {f"images/{parser.parse_args(command).out}" for command in commands}
    shown = re.findall(r"!\[[^]]+\]\((.+)\)", text)
    assert drawn == set(shown)
    assert all((ROOT / "docs" / name).is_file() for name in shown)

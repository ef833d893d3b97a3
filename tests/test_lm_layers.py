"""The decoder with every layer that has a name: decoding, pads, gradients, sizes, and what cannot be shown."""

import dataclasses
import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lm_models import CONFIG

from jax_linattn.layers import BasedLinearAttention, SlidingWindowAttention
from jax_linattn.lm import inspection
from jax_linattn.lm.config import default_config
from jax_linattn.lm.model import ATTENTIONS, Decoder, ModelConfig, count_parameters

CONFIGS = Path(__file__).parents[1] / "configs"
NAMES = [name for name in ATTENTIONS if name not in ("linear", "softmax")]  # those are in test_lm_model.py
BATCH, LENGTH, PROMPT, PADS = 2, 7, 5, 2


@functools.cache
def parts_of(name: str):
    """(graphdef, parameters) of a tiny model, drawn by NumPy: JAX would compile every initialiser.

    Based in two layers, which are its two kinds, and a window shorter than the text.
    """
    sizes = {"num_layers": 2 if name == "based" else 1, "width": 8, "mlp_width": 8, "convolution_width": 2, "window": 3}
    config = dataclasses.replace(CONFIG, attention=name, **sizes)
    # An error if there is anything but parameters, which are all that training and checkpoints keep.
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), nnx.Param)
    rng = np.random.default_rng(0)
    draw = lambda p: jnp.asarray(0.4 * rng.standard_normal(p.shape), p.dtype)
    return graphdef, nnx.State(jax.tree.map(draw, nnx.to_pure_dict(params)))


@pytest.mark.parametrize("name", NAMES)
def test_decoding_padded_prompts_is_the_whole_and_gradients_are_finite(name):
    """Two prompts, one with pads on its left, in one call and then token by token; beside the rows in one call each."""
    graphdef, params = parts_of(name)

    def loss(params, tokens):
        logits = nnx.merge(graphdef, params)(tokens)
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 0]), logits

    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 11, (BATCH, LENGTH)), jnp.int32)
    (_, whole), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, tokens)
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(gradients)):
        assert np.all(np.isfinite(leaf)), f"gradient of {jax.tree_util.keystr(path)}"
        assert np.any(leaf != 0), f"gradient of {jax.tree_util.keystr(path)}"

    model = nnx.merge(graphdef, params)
    model.init_cache(BATCH, LENGTH)
    decoding, cache, params = nnx.split(model, nnx.Cache, ...)

    @jax.jit
    def advance(cache, tokens, mask):
        model = nnx.merge(decoding, cache, params)
        logits = model(tokens, mask=mask, decode=True)
        return nnx.state(model, nnx.Cache), logits

    mask = np.ones((BATCH, PROMPT), bool)
    mask[1, :PADS] = False
    prompt = tokens[:, :PROMPT].at[1].set(jnp.roll(tokens[1, :PROMPT], PADS))
    cache, first = advance(cache, prompt, jnp.asarray(mask))
    rows = [list(first[0]), list(first[1, PADS:])]
    for step in range(LENGTH - PROMPT):
        token = jnp.stack([tokens[0, PROMPT + step], tokens[1, PROMPT - PADS + step]])[:, None]
        cache, logits = advance(cache, token, jnp.ones((BATCH, 1), bool))
        rows = [[*row, logits[number, 0]] for number, row in enumerate(rows)]
    for number, row in enumerate(rows):
        np.testing.assert_allclose(row, whole[number, : len(row)], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_shown_is_refused(name):
    tokens, model = jnp.zeros((1, 3), jnp.int32), nnx.merge(*parts_of(name))
    with pytest.raises(ValueError, match=r"layer 0 is \w+, whose weights cannot be shown; give a model with"):
        inspection.model_weights(model, tokens)
    with pytest.raises(ValueError, match=r"layer 0 is \w+, whose state cannot be shown; give a model with"):
        inspection.trace_states(model, tokens)


def test_layers_know_their_depth():
    """Of four layers, the first and last decays and all lower bounds are the papers'; Based's kinds take turns."""

    def layers(name):
        config = dataclasses.replace(CONFIG, attention=name, num_layers=4)
        return [block.attention for block in nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))).blocks]

    first, *_, last = layers("lightning")
    np.testing.assert_allclose(first.log_decay, [0, -4])
    np.testing.assert_allclose(last.log_decay, [0, -1])
    assert [layer.lower_bound for layer in layers("hgrn2")] == [0, 0.25, 0.5, 0.75]
    linear, window = BasedLinearAttention, SlidingWindowAttention
    assert [type(layer) for layer in layers("based")] == [linear, window, linear, window]


def config_of(file: str, *arguments):
    spec = importlib.util.spec_from_file_location(file, CONFIGS / f"{file}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(*arguments)


def sizes_of(config) -> tuple[int, list[int]]:
    """(parameters of the model, of each layer's attention), without making them; Tiny Shakespeare has 65 characters."""
    model_config = ModelConfig(vocabulary_size=65, **config.model)
    model = nnx.eval_shape(lambda: Decoder(model_config, rngs=nnx.Rngs(0)))
    size = lambda module: count_parameters(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    return size(model), [size(block.attention) for block in model.blocks]


@pytest.mark.parametrize("name", ["elu_plus_one", "softmax", *NAMES])
def test_models_that_are_compared_are_of_one_size(name):
    size, _ = sizes_of(config_of("tinyshakespeare", name))
    assert abs(size / 803_072 - 1) < 0.01 if name != "elu_plus_one" else size == 803_072


@pytest.mark.parametrize("name", NAMES)
def test_configs_say_their_sizes(name):
    config = config_of(name)
    assert config.model.attention == config.name == name
    assert config.model.to_dict() == default_config().model.to_dict() | {"attention": name}
    text = (CONFIGS / f"{name}.py").read_text(encoding="utf-8")
    for size in sizes_of(config)[1]:
        assert f"{size:,}" in text


def test_models_saved_before_windows_could_be_chosen():
    options = default_config().model.to_dict()
    assert (
        ModelConfig(vocabulary_size=11, **{k: v for k, v in options.items() if k != "window"}).window == options["window"]
    )

"""Layers of Hugging Face transformers beside ours with the same weights: `make test-interop`, no part of `make test`."""

import functools
import math
import os
import warnings

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_linattn.layers import LightningAttention, Mamba2
from jax_linattn.layers.lightning import minimax_decay

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import torch
        from transformers import DynamicCache, Mamba2Config, MiniMaxConfig
        from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
        from transformers.models.minimax.modeling_minimax import MiniMaxCache, MiniMaxLightningAttention
    except ImportError as error:
        message = "these tests need torch and transformers >= 5: run `make test-interop`, or pip install '.[interop]'"
        raise ImportError(message) from error

pytestmark = pytest.mark.filterwarnings("ignore")  # what others' code warns of is not ours to mend

FEATURES, LENGTH, PROMPT = 32, 75, 70
MAX_ERROR = 1e-5  # relative RMS; float32 rounding gives a few 1e-7


@pytest.mark.parametrize(
    ("num_groups", "use_bias", "dt_limit"), [(1, False, (0, math.inf)), (2, True, (0, math.inf)), (2, False, (0.1, 0.5))]
)
def test_mamba2(num_groups, use_bias, dt_limit):
    config = Mamba2Config(
        hidden_size=FEATURES,
        num_heads=8,
        head_dim=8,
        expand=2,
        state_size=16,
        n_groups=num_groups,
        conv_kernel=4,
        chunk_size=16,
        use_bias=use_bias,
        num_hidden_layers=1,
        time_step_limit=tuple(map(float, dt_limit)),
    )
    theirs = randomised(Mamba2Mixer(config, layer_idx=0))
    ours = Mamba2(
        FEATURES,
        config.num_heads,
        head_dim=config.head_dim,
        state_dim=config.state_size,
        num_groups=config.n_groups,
        convolution_width=config.conv_kernel,
        dt_limit=dt_limit,
        epsilon=config.layer_norm_epsilon,
        use_bias=use_bias,
        rngs=nnx.Rngs(0),
    )
    weights = arrays_of(theirs)
    params = {
        "in_proj": {"kernel": weights["in_proj.weight"].T},
        "convolution": {"kernel": weights["conv1d.weight"][:, 0].T, "bias": weights["conv1d.bias"]},
        "norm": {"scale": weights["norm.weight"]},
        "out_proj": {"kernel": weights["out_proj.weight"].T},
        **{name: weights[name] for name in ("dt_bias", "A_log", "D")},
    }
    if use_bias:
        params["in_proj"]["bias"], params["out_proj"]["bias"] = weights["in_proj.bias"], weights["out_proj.bias"]
    load(ours, params)
    cache = DynamicCache(config=config)
    # Their single steps do not clip Δ, their whole sequences do: with a limit only those can be the reference.
    step = (lambda x: theirs(x, cache=cache)) if dt_limit == (0, math.inf) else None
    compare(f"Mamba2, {num_groups} groups, bias {use_bias}, Δ in {dt_limit}", ours, theirs, step)


@pytest.mark.parametrize("layer", [0, 3])
def test_minimax(layer):
    config = MiniMaxConfig(
        hidden_size=FEATURES,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        num_hidden_layers=6,
        block_size=16,
        layer_types=["linear_attention"] * 6,
    )
    theirs = randomised(MiniMaxLightningAttention(config, layer_idx=layer))
    heads, inner = config.num_attention_heads, config.num_attention_heads * config.head_dim
    decay = minimax_decay(heads, layer, config.num_hidden_layers)
    ours = LightningAttention(FEATURES, heads, head_dim=config.head_dim, decay=decay, epsilon=1e-6, rngs=nnx.Rngs(0))
    weights = arrays_of(theirs)
    projections = weights["qkv_proj.weight"].reshape(heads, 3, config.head_dim, FEATURES)
    query, key, value = ({"kernel": projections[:, i].reshape(inner, FEATURES).T} for i in range(3))
    params = {
        "query": query,
        "key": key,
        "value": value,
        "gate": {"kernel": weights["output_gate.weight"].T},
        "norm": {"scale": weights["norm.weight"]},
        "out": {"kernel": weights["out_proj.weight"].T},
    }
    load(ours, params)
    attend = functools.partial(theirs, position_embeddings=None, attention_mask=None)
    cache = MiniMaxCache()
    compare(f"MiniMax, layer {layer}", ours, lambda x: attend(x)[0], lambda x: attend(x, cache=cache)[0])


def compare(name: str, ours: nnx.Module, whole, step) -> None:
    """Whole sequences, and a prompt followed by single tokens, against theirs; step None = against their whole alone."""
    x = np.random.default_rng(1).standard_normal((2, LENGTH, FEATURES)).astype(np.float32)
    with torch.no_grad():
        theirs = whole(torch.from_numpy(x)).numpy()
        parts = [x[:, :PROMPT], *(x[:, t : t + 1] for t in range(PROMPT, LENGTH))]
        their_steps = None if step is None else [step(torch.from_numpy(part)).numpy() for part in parts]
    assert 0.01 < np.std(theirs) < 100  # neither nothing nor too much: errors would tell little
    ours.init_cache(x.shape)
    call = nnx.jit(lambda layer, x, decode: layer(x, decode=decode), static_argnums=2)
    our_steps = np.concatenate([call(ours, jnp.asarray(part), True) for part in parts], axis=1)
    errors = {
        "whole": relative_rms(call(ours, jnp.asarray(x), False), theirs),
        "decoded, to their whole": relative_rms(our_steps, theirs),
    }
    if their_steps is not None:
        errors["decoded"] = relative_rms(our_steps, np.concatenate(their_steps, axis=1))
    print(f"\n{name}: " + ", ".join(f"{what} {error:.2g}" for what, error in errors.items()))
    assert max(errors.values()) <= MAX_ERROR, f"{name}: {errors}"


def relative_rms(actual, expected) -> float:
    difference, size = (np.sqrt(np.mean(np.square(x, dtype=np.float64))) for x in (actual - expected, expected))
    return float(difference / size)


def randomised(module):
    """With every parameter drawn, so that none, such as a scale of ones, could be left out unnoticed."""
    torch.manual_seed(0)
    for name, parameter in module.named_parameters():
        with torch.no_grad():
            if name.endswith("proj.weight") or name == "output_gate.weight":
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            else:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return module.eval()


def arrays_of(module) -> dict:
    return {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}


def load(layer: nnx.Module, params: dict) -> None:
    """Sets all parameters; fails where a name or a shape differs."""
    state = nnx.state(layer, nnx.Param)
    shapes = jax.tree.map(jnp.shape, nnx.to_pure_dict(state))
    assert shapes == jax.tree.map(np.shape, params)
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, params))
    nnx.update(layer, state)

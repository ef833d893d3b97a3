"""Who is compared: our forms, what a user has without them, and public peers where they are installed.

Each takes query, key, value [B, T, H, D], of the features that φ has made already, and gives causal, unnormalised linear
attention [B, T, H, D]; or softmax attention, which is another function and is here for its cost.
"""

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_linattn
from jax_linattn import feature_maps


class Contestant(NamedTuple):
    """One function that is timed."""

    attend: Callable[..., Any]
    formula: str = "unnormalized"  # of `oracle.FORMULAS`
    uses_torch: bool = False
    longest: int = 1 << 30  # more tokens than this would take too long, or too much memory


OURS = functools.partial(jax_linattn.linear_attention, is_causal=True, feature_map=feature_maps.identity, normalize=False)
OURS_NORMALIZED = functools.partial(jax_linattn.linear_attention, is_causal=True)  # elu + 1 inside


def _mamba2_jax() -> Callable:
    """State-space duality with a step of 1 and no decay."""
    ssd = importlib.import_module("mamba2_jax.modeling").ssd_forward

    def attend(query, key, value):
        batch, length, heads, _ = query.shape
        step = jnp.full((batch, length, heads), math.log(math.expm1(1)), query.dtype)
        zeros = jnp.zeros(heads)
        return ssd(value, step, zeros, key, query, 64, zeros, zeros, 0.0, 1e9)[0]

    return attend


def _jla(implementation: str) -> Callable:
    attention = importlib.import_module("jla.ops").linear_attention

    def attend(query, key, value):
        no_decay = jnp.zeros(query.shape[:3], query.dtype)
        return attention("simple_gla", query, key, value, g=no_decay, scale=1.0, impl=implementation)[0]

    return attend


def _mlstm() -> Callable:
    """Heads before time; input gates of 1 and forget gates that are open. It normalises by its own rule."""
    chunkwise = importlib.import_module("mlstm_kernels.jax.chunkwise.native").mlstm_chunkwise__native_autograd

    def attend(query, key, value):
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query * math.sqrt(query.shape[-1]), key, value))
        gate = jnp.zeros(query.shape[:3], query.dtype)
        return jnp.swapaxes(chunkwise(query, key, value, gate, gate + 40, chunk_size=64), 1, 2)

    return attend


def _torch_softmax() -> Callable:
    attention = importlib.import_module("torch").nn.functional.scaled_dot_product_attention

    def attend(query, key, value):
        return attention(*(x.transpose(1, 2) for x in (query, key, value)), is_causal=True).transpose(1, 2)

    return attend


def _torch_chunked() -> Callable:
    """The chunked form with all chunks at once."""
    torch = importlib.import_module("torch")

    def attend(query, key, value, chunk_size=64):
        batch, length, heads, _ = query.shape
        split = (batch, length // chunk_size, chunk_size, heads, -1)
        query, key, value = (x.reshape(split).transpose(2, 3) for x in (query, key, value))  # [B, n, H, C, D]
        weights = torch.tril(query @ key.transpose(-1, -2))
        sums = key.transpose(-1, -2) @ value
        output = weights @ value + query @ (torch.cumsum(sums, dim=1) - sums)
        return output.transpose(2, 3).reshape(batch, length, heads, -1)

    return attend


MAKERS: dict[str, Callable[[], Contestant]] = {
    "ours": lambda: Contestant(OURS),
    "ours, elu+1 normalised": lambda: Contestant(OURS_NORMALIZED, formula="elu_plus_one"),
    "mamba2-jax": lambda: Contestant(_mamba2_jax()),
    "jla chunked": lambda: Contestant(_jla("chunked")),
    "jla scan": lambda: Contestant(_jla("reference"), longest=1024),
    "mlstm_kernels": lambda: Contestant(_mlstm(), formula="mlstm"),
    "softmax, jax.nn": lambda: Contestant(
        functools.partial(jax.nn.dot_product_attention, is_causal=True), formula="softmax", longest=8192
    ),
    "softmax, torch": lambda: Contestant(_torch_softmax(), formula="softmax", uses_torch=True, longest=16_384),
    "chunked, torch": lambda: Contestant(_torch_chunked(), uses_torch=True),
}


def available(names: list[str]) -> tuple[dict[str, Contestant], dict[str, str]]:
    """(contestants by name, why the others are not here)."""
    found, absent = {}, {}
    for name in names:
        try:
            found[name] = MAKERS[name]()
        except (ImportError, AttributeError) as error:
            absent[name] = f"{type(error).__name__}: {error}"
    return found, absent

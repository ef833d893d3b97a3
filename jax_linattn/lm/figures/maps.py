"""Feature maps as curves: φ(x) itself, and the kernel φ(q)·φ(k) over the angle between q and k, beside exp(q·k/√D)."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jax_linattn import feature_maps
from jax_linattn.checks import check_positive_int, require
from jax_linattn.lm.figures.style import COLORS, SPARE_COLORS, WIDTH, label_of, styled

KERNEL_MAPS = ("elu_plus_one", "softplus", "relu", "relu_squared", "exp", "taylor", "dpfp_2", "favor_plus")
ELEMENTWISE = ("elu_plus_one", "softplus", "relu", "relu_squared", "exp", "identity")
FAVOR_FEATURES = 256


def maps_figure(*, maps: str, dim: int, seed: int) -> Figure:
    """Elementwise maps over x, and kernels over the angle."""
    check_positive_int("dim", dim)
    require(dim >= 2, f"dim must be at least 2, so that there are angles, got {dim}")
    names = [name for name in maps.split(",") if name]
    require(names, f"maps must name at least one map, got {maps!r}")
    chosen = {name: map_named(name, dim, seed=seed) for name in names}
    angles = np.linspace(0, np.pi, 61)
    query, key = pairs_at(angles, dim, 500, seed=seed)
    x = np.linspace(-4, 4, 401, dtype=np.float32)
    return draw_maps(
        x,
        {name: elementwise_curve(name, x) for name in ELEMENTWISE if name != "identity"},
        np.degrees(angles),
        {name: kernel_curve(feature_map, query, key) for name, feature_map in chosen.items()},
        exponential_curve(angles, dim),
        dim,
    )


# --- numbers ----------------------------------------------------------------------------------------------------------


class KernelCurve(NamedTuple):
    """cos(φ(q), φ(k)) at each angle, over random pairs: [angles] each."""

    median: np.ndarray
    low: np.ndarray  # the tenth percentile
    high: np.ndarray  # the ninetieth


def map_named(name: str, dim: int, *, seed: int = 0) -> Any:
    """The map of a name: one that `feature_maps.get` knows, or "favor_plus" with 256 positive features.

    Raises:
      ValueError: on any other name.
    """
    if name == "favor_plus":
        return feature_maps.favor_plus(jax.random.key(seed), dim, FAVOR_FEATURES)
    return feature_maps.get(name)


def elementwise_curve(name: str, x: np.ndarray) -> np.ndarray:
    """φ(x) of a map that treats every value alone.

    Raises:
      ValueError: if the map is not elementwise.
    """
    require(name in ELEMENTWISE, f"{name!r} is no elementwise map; these are: {', '.join(ELEMENTWISE)}")
    return np.asarray(feature_maps.get(name)(jnp.asarray(x)))


def pairs_at(angles: np.ndarray, dim: int, count: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random q and k, float32 [angles, count, D], of length √D as standard normal vectors have, at angles in radians."""
    q, other = np.random.default_rng(seed).standard_normal((2, len(angles), count, dim))
    q = _unit(q)
    across = _unit(other - q * np.sum(q * other, axis=-1, keepdims=True))
    k = q * np.cos(angles)[:, None, None] + across * np.sin(angles)[:, None, None]
    return (q * dim**0.5).astype(np.float32), (k * dim**0.5).astype(np.float32)


def kernel_curve(feature_map, query: np.ndarray, key: np.ndarray) -> KernelCurve:
    """φ(q)·φ(k) / (|φ(q)| |φ(k)|), which is 1 for q = k: query and key [angles, pairs, D].

    Length is taken out because maps differ in it without meaning: φ(q)'s cancels in the normaliser of attention.
    """
    # One head: a map takes [..., heads, D].
    query_features, key_features = (_unit(np.asarray(feature_map(jnp.asarray(x)[..., None, :]))) for x in (query, key))
    cosine = np.sum(query_features * key_features, axis=-1)[..., 0]
    low, median, high = np.percentile(cosine, (10, 50, 90), axis=-1)
    return KernelCurve(median, low, high)


def exponential_curve(angles: np.ndarray, dim: int) -> np.ndarray:
    """What `kernel_curve` is for φ(q)·φ(k) = exp(q·k/√D) and vectors of length √D: exp(√D (cos θ - 1))."""
    return np.exp(dim**0.5 * (np.cos(angles) - 1))


def _unit(x: np.ndarray) -> np.ndarray:
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    return x / np.where(norm > 0, norm, 1)


# --- drawing ----------------------------------------------------------------------------------------------------------


@styled
def draw_maps(
    x: np.ndarray,
    curves: Mapping[str, np.ndarray],
    degrees: np.ndarray,
    kernels: Mapping[str, KernelCurve],
    exponential: np.ndarray,
    dim: int,
) -> Figure:
    """Elementwise maps over x above; below, for each map its kernel over the angle beside the exponential one."""
    rows = math.ceil(len(kernels) / 4)
    figure = Figure(figsize=(WIDTH, 2.6 + 1.75 * rows))
    parts: Any = figure.subfigures(2, 1, height_ratios=(2.6, 1.75 * rows))
    above, below = parts
    _draw_curves(above.subplots(), x, curves)

    grid: Any = below.subplots(rows, 4, sharex=True, sharey=True, squeeze=False)
    bottom = min(-0.02, *(kernel.low.min() for kernel in kernels.values()))
    for axes, (name, kernel) in zip(grid.flat, kernels.items(), strict=False):
        color = COLORS.get(name, SPARE_COLORS[0])  # a map that is new here
        axes.fill_between(degrees, kernel.low, kernel.high, color=color, alpha=0.25, linewidth=0)
        axes.plot(degrees, kernel.median, color=color)
        axes.plot(degrees, exponential, color=COLORS["softmax attention"], linestyle="--", linewidth=1)
        axes.set_title(f"φ = {label_of(name)}", color=color, fontweight="bold")
        axes.set(xlim=(0, 180), ylim=(bottom, 1.02), xticks=(0, 60, 120, 180))
    for axes in list(grid.flat)[len(kernels) :]:
        axes.set_visible(False)
    below.supxlabel(f"angle between q and k, degrees (both of length √D, D = {dim})", fontsize=9)
    below.supylabel("φ(q)·φ(k) ∕ |φ(q)| |φ(k)|", fontsize=9)
    title = "kernel: median and 10–90 % of random pairs; dashed: softmax's exp(q·k/√D) on the same scale"
    below.suptitle(title, fontsize=9)
    return figure


def _draw_curves(axes: Axes, x: np.ndarray, curves: Mapping[str, np.ndarray]) -> None:
    top = 5.0
    for name, y in curves.items():
        inside = y <= top
        axes.plot(x[inside], y[inside], color=COLORS[name], label=label_of(name), linewidth=1.8)
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    axes.set(xlabel="x", ylabel="φ(x)", xlim=(x[0], x[-1]), ylim=(-0.15, top), title="maps of one value at a time")
    axes.legend(loc="upper left")

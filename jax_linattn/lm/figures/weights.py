"""Attention weights as heat maps: of random queries and keys, and of every head of a trained model on a text."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from jax_linattn import attention_weights
from jax_linattn.checks import check_positive_int, require
from jax_linattn.lm import inspection
from jax_linattn.lm.figures.maps import map_named
from jax_linattn.lm.figures.sources import attention_of, model_and_text
from jax_linattn.lm.figures.style import COLORS, HEAT_MAP, WIDTH, label_of, styled

# --- a pattern --------------------------------------------------------------------------------------------------------


def pattern_figure(*, feature_map: str, length: int, dim: int, size: float, seed: int) -> Figure:
    """Causal weights of random queries and keys: softmax's, and those that a feature map implies."""
    linear, softmax = pattern_weights(feature_map, length=length, dim=dim, size=size, seed=seed)
    return draw_pattern({"softmax attention": softmax, feature_map: linear})


def pattern_weights(feature_map: str, *, length: int, dim: int, size: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(linear's, softmax's) causal weights [T, T] of queries and keys from N(0, size²).

    Raises:
      ValueError: on a size that is not positive, or a map that is unknown or gives negative weights.
    """
    check_positive_int("length", length)
    check_positive_int("dim", dim)
    require(size > 0, f"size must be above 0, got {size}")
    # NumPy's older generator, whose numbers for a seed are the ones that textbooks print.
    draw = np.random.RandomState(seed).randn
    query, key = ((draw(length, dim) * size).astype(np.float32)[None, :, None] for _ in range(2))
    query, key = jnp.asarray(query), jnp.asarray(key)
    linear = attention_weights(query, key, is_causal=True, feature_map=map_named(feature_map, dim, seed=seed))
    require(jnp.all(linear >= 0), f"feature_map {feature_map!r} gives negative weights; choose one with φ(q)·φ(k) >= 0")
    return np.asarray(linear[0, 0]), np.asarray(inspection.softmax_weights(query, key)[0, 0])


@styled
def draw_pattern(weights: Mapping[str, np.ndarray]) -> Figure:
    """Causal weights [T, T] of one head, a heat map for each name, and the last query's weights as lines below."""
    figure = Figure(figsize=(WIDTH, 5.6))
    grid = figure.add_gridspec(2, len(weights), height_ratios=(3, 1.25))
    visible = np.concatenate([w[np.tril_indices_from(w)] for w in weights.values()])
    norm = LogNorm(max(visible.min(), 1e-4), 1)
    heat_maps = [figure.add_subplot(grid[0, column]) for column in range(len(weights))]
    images = [_heat_map(axes, w, norm) for axes, w in zip(heat_maps, weights.values(), strict=True)]
    for axes, name in zip(heat_maps, weights, strict=True):
        axes.set(title=label_of(name), xlabel="key position s")
    heat_maps[0].set_ylabel("query position t")
    _label_weights(figure.colorbar(images[0], ax=heat_maps, label="weight of key s for query t", shrink=0.9), norm)

    last = figure.add_subplot(grid[1, :])
    length = len(next(iter(weights.values())))
    for name, w in weights.items():
        last.plot(w[-1], color=COLORS.get(name), marker="o", markersize=3, linewidth=1.2, label=label_of(name))
    last.axhline(1 / length, color="0.6", linewidth=0.8, linestyle="--", label=f"even, 1/{length}")
    last.set(xlabel=f"key position s, for the last query (t = {length - 1})", ylabel="weight", ylim=(0, None))
    last.margins(x=0.01)
    last.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 0.98), borderaxespad=0)
    return figure


# --- heads of a model -------------------------------------------------------------------------------------------------


def heads_figure(*, checkpoint: str, text: str | None, text_file: str | None, length: int) -> Figure:
    """The weights of every head of a trained model on a text."""
    model, tokens, text = model_and_text(checkpoint, text, text_file, length)
    weights = np.stack([np.asarray(w[0], np.float32) for w in inspection.model_weights(model, tokens)])
    spreads = np.asarray(inspection.spread(jnp.asarray(weights)))
    return draw_heads(weights, spreads, text, f"{checkpoint}: weights of {attention_of(model)}")


@styled
def draw_heads(weights: np.ndarray, spreads: np.ndarray, text: str, title: str) -> Figure:
    """Weights [layers, H, T, T] of every head on a text, a row of heat maps a layer.

    Above the diagonal, where nothing can be seen, stands the mean of `spreads` [layers, H, T] from the second query on.
    """
    layers, heads, length, _ = weights.shape
    side = (WIDTH - 0.6) / heads
    figure = Figure(figsize=(WIDTH, side * layers + 1.2))
    grid: Any = figure.subplots(layers, heads, squeeze=False, sharex=True, sharey=True)
    norm = LogNorm(0.1 / length, 1)  # down to a tenth of what the last query would give every key if it were even
    images = [_heat_map(grid[place], weights[place], norm) for place in np.ndindex(layers, heads)]
    for axes, of_queries in zip(grid.flat, spreads.reshape(layers * heads, length), strict=True):
        even = of_queries[1:].mean() if length > 1 else 1.0
        axes.text(0.96, 0.95, f"{even:.0%}", transform=axes.transAxes, ha="right", va="top", color="0.25")
    for head in range(heads):
        grid[0, head].set_title(f"head {head}")
        grid[-1, head].set_xlabel("key s")
    for layer in range(layers):
        grid[layer, 0].set_ylabel(f"layer {layer}\nquery t")
    _label_characters(grid, text, side * 0.88)
    bar = figure.colorbar(images[0], ax=grid, orientation="horizontal", shrink=0.5, aspect=40, extend="min")
    bar.set_label("weight of key s for query t")
    _label_weights(bar, norm)
    figure.suptitle(f"{title}\n(%: how evenly a query looks at the characters that it sees)", fontsize=9)
    return figure


# --- heat maps --------------------------------------------------------------------------------------------------------


def _heat_map(axes: Axes, weights: np.ndarray, norm: LogNorm) -> AxesImage:
    """Causal weights; what a query cannot see stays white, and a weight below the scale has its darkest colour."""
    colors = matplotlib.colormaps[HEAT_MAP].with_extremes(bad="white")
    shown = np.where(np.tri(*weights.shape, dtype=bool), np.maximum(weights, norm.vmin or 0), np.nan)
    return axes.imshow(shown, cmap=colors, norm=norm, interpolation="nearest")


def _label_weights(bar: Colorbar, norm: LogNorm) -> None:
    ticks = [t for t in (1e-4, 1e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1) if t >= (norm.vmin or 0)]
    bar.set_ticks(ticks, labels=[f"{t:g}" for t in ticks])
    bar.minorticks_off()


def _label_characters(grid: Any, text: str, inches: float) -> None:
    """Puts the characters at the ticks of heat maps with shared axes, where they are large enough to read."""
    points = inches * 72 / len(text)
    if points < 5:
        return
    marks = {" ": "·", "\n": "↵", "\t": "⇥", "$": r"\$"}
    shown = [marks.get(character, character) for character in text]
    grid[0, 0].set_xticks(range(len(text)), shown)
    grid[0, 0].set_yticks(range(len(text)), shown)
    for axes in grid.flat:
        axes.tick_params(length=0, labelsize=min(points * 1.1, 8), labelfontfamily="DejaVu Sans Mono")

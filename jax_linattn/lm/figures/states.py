"""The state of linear attention over time, of a trained model on a text."""

from collections.abc import Sequence
from typing import Any

import jax
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jax_linattn.lm import inspection
from jax_linattn.lm.figures.sources import attention_of, model_and_text
from jax_linattn.lm.figures.style import HEAT_MAP, WIDTH, styled
from jax_linattn.lm.inspection import StateTrace

MEASURES = {
    "kv_norm": "norm of the state |S|",
    "key_sum_norm": "norm of the key sum |Z|",
    "effective_rank": "effective rank of S",
    "change": "change by one token |ΔS| ∕ |S|",
}


def state_figure(*, checkpoint: str, text: str | None, text_file: str | None, length: int) -> Figure:
    """The state of a trained model over a text."""
    model, tokens, _ = model_and_text(checkpoint, text, text_file, length)
    traces = inspection.trace_states(model, tokens)
    one = [jax.tree.map(lambda x: np.asarray(x[0]), trace) for trace in traces]
    return draw_states(one, inspection.full_rank(model), f"{checkpoint}: state of {attention_of(model)}")


@styled
def draw_states(traces: Sequence[StateTrace], full_rank: int, title: str) -> Figure:
    """The state over time, a panel a measure: a line a head, a colour a layer, the mean over its heads thick.

    Args:
      traces: one a layer, of one text: fields [T, N].
      full_rank: the largest rank that a state can have.
      title: of the figure.
    """
    figure = Figure(figsize=(WIDTH, 5.2))
    grid: Any = figure.subplots(2, 2, sharex=True)
    for axes, (field, label) in zip(grid.flat, MEASURES.items(), strict=True):
        _draw_measure(axes, [getattr(trace, field) for trace in traces], label, with_heads=field != "change")
    grid[0, 0].legend(loc="upper left", title="mean of its heads")
    for axes in grid[1]:
        axes.set_xlabel("characters read")

    for axes in grid.flat[:3]:
        axes.set_ylim(0, None)
    rank, change = grid[1]
    length = len(traces[0].change)
    rank.axhline(full_rank, color="0.6", linestyle="--", linewidth=0.8)
    rank.annotate(f"full rank, {full_rank}", (length, full_rank), ha="right", va="bottom", color="0.4", fontsize=8)
    rank.set_ylim(0, full_rank * 1.12)
    position = np.arange(1, length + 1)
    (even,) = change.plot(position, 1 / position, color="0.3", linestyle="--", linewidth=1)
    change.set_yscale("log")
    change.legend([even], ["1 ∕ t"], loc="upper right")
    figure.suptitle(title, fontsize=9)
    return figure


def _draw_measure(axes: Axes, layers: Sequence[np.ndarray], label: str, *, with_heads: bool) -> None:
    """One measure, [T, N] a layer. Without heads only the means, thin: what jumps hides one line behind another."""
    colors = matplotlib.colormaps[HEAT_MAP](np.linspace(0, 0.85, len(layers)))
    for layer, (values, color) in enumerate(zip(layers, colors, strict=True)):
        position = np.arange(1, len(values) + 1)
        if with_heads:
            axes.plot(position, values, color=color, alpha=0.35, linewidth=0.7)
        width = 1.8 if with_heads else 0.9
        axes.plot(position, values.mean(axis=-1), color=color, linewidth=width, label=f"layer {layer}")
    axes.set(ylabel=label, xlim=(0, len(layers[0])))

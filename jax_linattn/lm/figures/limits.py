"""Where linear attention loses: right answers over the size of a task, time over the length of a sequence."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from jax_linattn.lm.figures.style import COLORS, WIDTH, styled

CHANCE = {"color": COLORS["identity"], "linestyle": (0, (4, 3)), "linewidth": 1.2}
DASHES = ("-", "--", ":")


@styled
def accuracy_figure(
    sizes: Sequence[int],
    accuracies: Mapping[str, Sequence[float]],
    looks: Mapping[str, Mapping[str, Any]],
    chance: Sequence[float],
    *,
    xlabel: str,
    title: str,
    trained_to: int | None = None,
) -> Figure:
    """The part of right answers, a line a contestant.

    Args:
      sizes: of the task, x.
      accuracies: of each contestant, at each size.
      looks: keyword arguments of each contestant's line.
      chance: at each size.
      xlabel, title: of the axes.
      trained_to: beyond this size the picture is shaded; None = nowhere.
    """
    figure, axes = _log_axes(sizes)
    if trained_to is not None:
        axes.axvspan(trained_to, sizes[-1] * 1.1, color="#f2f2f2", linewidth=0, zorder=0)
        axes.text(sizes[-1] * 1.05, 0.9, "longer than trained on", ha="right", va="top", color="#666666")
    for name, values in accuracies.items():
        axes.plot(sizes, values, label=name, marker="o", markersize=4, **looks[name])
    axes.plot(sizes, chance, label="chance", **CHANCE)
    axes.set(xlabel=xlabel, ylabel="right answers", title=title, ylim=(0, 1.03))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


@styled
def ratios_figure(lengths: Sequence[int], ratios: Mapping[int, Mapping[str, Sequence[float]]]) -> Figure:
    """Time of linear attention over that of softmax attention.

    Args:
      lengths: T.
      ratios: of each batch size, what is timed to its ratios at each length.
    """
    figure, axes = _log_axes(lengths)
    colors = (COLORS["elu_plus_one"], COLORS["relu_squared"])
    for (batch_size, passes), dashes in zip(ratios.items(), DASHES, strict=False):
        for (what, values), color in zip(passes.items(), colors, strict=True):
            label = f"{what}, batch of {batch_size}"
            axes.plot(lengths, values, label=label, color=color, linestyle=dashes, marker="o", markersize=4)
    axes.axhline(1, **CHANCE | {"label": "as fast as softmax"})
    axes.set(xlabel="tokens", ylabel="time ÷ time of softmax attention", title="above the line softmax attention is faster")
    axes.set_ylim(0, None)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _log_axes(ticks: Sequence[int]) -> tuple[Figure, Any]:
    figure = Figure(figsize=(WIDTH, 4.2))
    axes: Any = figure.subplots()
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(ticks[0] / 1.1, ticks[-1] * 1.1)
    axes.grid(color="#e0e0e0", linewidth=0.7)
    axes.set_axisbelow(True)
    return figure, axes

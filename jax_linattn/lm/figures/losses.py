"""Losses of several runs in one plot."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from jax_linattn.checks import require
from jax_linattn.lm.figures.style import COLORS, SPARE_COLORS, WIDTH, styled
from jax_linattn.lm.folder import CONFIG, METRICS
from jax_linattn.lm.report import read_metrics

# A name to (label, what a bit is in it).
UNITS = {"bits": ("bits a character", 1.0), "nats": ("nats a character", math.log(2))}
# A name to (field of the metrics, label, scale).
ABSCISSAE = {
    "steps": ("step", "training steps", 1.0),
    "tokens": ("tokens", "million training tokens", 1e-6),
    "seconds": ("seconds", "seconds of training", 1.0),
}


def losses_figure(*, runs: Sequence[str], unit: str, over: str) -> Figure:
    """Training and validation losses of several runs."""
    folders = [Path(run) for run in runs]
    names = [folder.name for folder in folders]
    names = [str(folder) for folder in folders] if len(set(names)) < len(names) else names
    require(len(set(names)) == len(names), f"each run can be drawn once, got {', '.join(names)}")
    metrics = {name: _metrics(folder) for name, folder in zip(names, folders, strict=True)}
    colors = run_colors([_map_of(folder) for folder in folders])
    return draw_losses(metrics, colors, unit=unit, over=over)


def _metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / METRICS
    require(path.is_file(), f"{folder} holds no {METRICS}; give the folder of a run, as runs/NAME")
    return read_metrics(path)


def _map_of(folder: Path) -> str | None:
    """The name of a run's map among `COLORS`, as far as its config tells."""
    try:
        model = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["model"]
        return "softmax attention" if model["attention"] == "softmax" else model["feature_map"]
    except (OSError, ValueError, KeyError):
        return None


@styled
def draw_losses(runs: Mapping[str, Sequence[Mapping[str, Any]]], colors: Sequence[str], *, unit: str, over: str) -> Figure:
    """Training (faint) and validation (solid) losses of several runs.

    Args:
      runs: a name to the lines of its metrics; lines without a value are left out.
      colors: one a run.
      unit: a name in `UNITS`.
      over: a name in `ABSCISSAE`.
    """
    unit_label, factor = UNITS[unit]
    key, x_label, scale = ABSCISSAE[over]
    figure = Figure(figsize=(WIDTH, 4.2))
    axes: Any = figure.subplots()
    starts, entries = [], []
    for (name, lines), color in zip(runs.items(), colors, strict=True):
        train, validation = (_points(lines, key, field) for field in ("train_bits", "validation_bits"))
        require(len(train) or len(validation), f"run {name!r} has measured no loss yet")
        if len(train):
            axes.plot(train[:, 0] * scale, train[:, 1] * factor, color=color, alpha=0.3, linewidth=1)
        chief = validation if len(validation) else train
        (line,) = axes.plot(validation[:, 0] * scale, validation[:, 1] * factor, color=color, linewidth=1.8)
        starts.append(chief[0, 1] * factor)
        entries.append((chief[-1, 1] * factor, line, name))
    entries.sort(key=lambda entry: -entry[0])  # as the curves end, from top to bottom
    axes.legend([line for _, line, _ in entries], [f"{name}: {final:.3f}" for final, _, name in entries], loc="upper right")
    axes.set_ylim(None, max(starts) * 1.03)  # the training loss starts far above all that can be told apart
    axes.set(xlabel=x_label, ylabel=unit_label, title="validation (solid, with its last value) and training loss (faint)")
    axes.grid(alpha=0.25)
    axes.margins(x=0.01)
    return figure


def _points(lines: Sequence[Mapping[str, Any]], key: str, field: str) -> np.ndarray:
    """(key, field) of the lines that have both, float [n, 2]."""
    pairs = [(line[key], line[field]) for line in lines if line.get(field) is not None and line.get(key) is not None]
    return np.asarray(pairs, float).reshape(-1, 2)


def run_colors(names: Sequence[str | None]) -> list[str]:
    """A colour for each run from the name of its map, `COLORS`' where that tells the runs apart, else spare ones."""
    colors = [COLORS.get(name or "") for name in names]
    if None in colors or len(set(colors)) < len(colors):
        return [SPARE_COLORS[index % len(SPARE_COLORS)] for index in range(len(names))]
    return [color for color in colors if color is not None]

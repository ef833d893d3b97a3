"""Pictures of what was measured: from the JSONL of each comparison, as far as it is there."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STYLES = {
    "ours": ("#c2410c", "o", "linear attention, unnormalised"),
    "ours, elu+1 normalised": ("#f59e0b", "s", "linear attention, elu + 1, normalised"),
    "step": ("#c2410c", "o", "linear attention, elu + 1, normalised"),
    "softmax": ("#1d4ed8", "^", "softmax attention over a cache"),
    "softmax, jax.nn": ("#1d4ed8", "^", "softmax attention, jax.nn"),
    "softmax, torch": ("#0e7490", "v", "softmax attention, torch"),
}


def draw(folder: Path) -> Iterator[Path]:
    """Draws every picture whose figures are in the folder; yields their paths."""
    for name, picture in PICTURES.items():
        figures = folder / f"{name}.jsonl"
        if figures.exists():
            first, *rows = map(json.loads, figures.read_text().splitlines())
            figure = picture([row for row in rows if "absent" not in row], first)
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=120)
            plt.close(figure)
            yield path


def _curve(axes, rows: list[dict[str, Any]], contestant: str, x: str, y: str, scale: float = 1) -> None:
    points = [(row[x], row[y] * scale) for row in rows if row["contestant"] == contestant and row.get(y) is not None]
    if points:
        color, marker, label = STYLES[contestant]
        axes.loglog(*zip(*points, strict=True), color=color, marker=marker, markersize=4, label=label)


def _finish(axes, title: str, x: str, y: str) -> None:
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)


def _lengths(rows, first):
    rows = [{**row, "length": row["shape"][1]} for row in rows]
    figure, (time, memory) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    gradients = [row for row in rows if row["kind"] == "gradient"]
    for contestant in ("ours", "ours, elu+1 normalised", "softmax, jax.nn", "softmax, torch"):
        _curve(time, gradients, contestant, "length", "seconds", 1e3)
        _curve(memory, gradients, contestant, "length", "temporaries", 1e-6)
    _finish(time, "Forward and backward, B = 1, H = 8, D = 64", "tokens", "milliseconds")
    _finish(memory, "Temporaries", "tokens", "megabytes")
    time.legend()
    return figure


def _steps(rows, first):
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained", sharey=False)
    for panel, batch in zip(axes, (1, 64), strict=True):
        here = [row for row in rows if row["batch"] == batch]
        here = [{**row, "contestant": "step"} if row["contestant"] == "ours" else row for row in here]
        for contestant in ("step", "softmax"):
            _curve(panel, here, contestant, "context", "seconds", 1e6)
        _finish(panel, f"A decoded token, B = {batch}, H = 8, D = 64", "tokens before it", "microseconds")
    axes[0].legend()
    return figure


def _shapes(rows, first):
    """Roofline: work done a second against work a byte, both of the recurrence, under what the machine does at best."""
    figure, axes = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    peak, bandwidth = first["flops"] / 1e9, first["bytes"] / 1e9
    intensities = [2**n for n in range(0, 9)]
    axes.loglog(intensities, [min(peak, bandwidth * x) for x in intensities], color="#57534e", label="the machine")
    names = dict.fromkeys(row["contestant"] for row in rows if "contestant" in row)
    linear = [name for name in names if not name.startswith("softmax")]
    for number, name in enumerate(linear):
        points = []
        for row in rows:
            if row.get("contestant") == name:
                batch, length, heads, dim = row["shape"]
                work = 4 * batch * length * heads * dim * dim * (3 if row["kind"] == "gradient" else 1)
                traffic = batch * length * heads * dim * 4 * (8 if row["kind"] == "gradient" else 4)
                # Nudged aside, so that contestants of one shape do not hide one another.
                points.append((work / traffic * 1.05**number, work / row["seconds"] / 1e9))
        axes.loglog(*zip(*points, strict=True), "o", markersize=4, label=name)
    axes.set(
        title="Four shapes, forward and with gradients", xlabel="operations a byte", ylabel="GFLOP/s of the recurrence"
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


PICTURES = {"lengths": _lengths, "steps": _steps, "shapes": _shapes}

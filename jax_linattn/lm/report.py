"""What a run leaves to look at: metrics, the loss curve, the summary."""

import contextlib
import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from jax_linattn.lm.config import Config


def append_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """One more line of JSON, on disk when this returns."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(metrics) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a run so far, without one that is still being written; none if there is no file.

    Raises:
      ValueError: naming the first line that is none of ours.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.exists() else []
    return [_parsed(path, number, line) for number, line in enumerate(lines, 1) if line.endswith("\n")]


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        metrics = json.loads(line)
        if isinstance(metrics, dict) and "step" in metrics:
            return metrics
    raise ValueError(f"line {number} of {path} is damaged, {line[:40]!r}: remove that line")


def keep_metrics(path: Path, *, until: int) -> None:
    """Drops what was measured after a step, and the summary, as a run that goes on from there will measure it again."""
    kept = [line for line in read_metrics(path) if line["step"] <= until and "summary" not in line]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that at any moment it is the earlier one or the new one, and never a part of it."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def postfix(line: dict[str, Any], trigram_bits: float) -> str:
    """What the progress bar says of a line of metrics; bits a character."""
    parts = [f"train {line['train_bits']:.2f}"]
    if "validation_bits" in line:
        parts.append(f"validation {line['validation_bits']:.2f}")
    parts += [f"trigram {trigram_bits:.2f} bits/char", f"{line['tokens'] / line['seconds']:,.0f} tokens/s"]
    return " · ".join(parts)


def attention_name(config: Config) -> str:
    model = config.model
    return model.attention + (f" ({model.feature_map})" if model.attention == "linear" else "")


@dataclasses.dataclass(frozen=True)
class Summary:
    """How a run ended."""

    folder: str
    attention: str
    parameters: int
    tokens: int  # trained on
    seconds: float  # of training, without compiling and validating
    train_bits: float  # a character, mean of the last steps
    validation_bits: float  # a character, over all validation text
    trigram_bits: float  # of the baseline on the same characters

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def __str__(self) -> str:
        difference = self.trigram_bits - self.validation_bits
        rows = [
            ("attention", self.attention),
            ("parameters", f"{self.parameters:,}"),
            ("tokens trained on", f"{self.tokens:,} in {self.seconds:.0f} s"),
            ("tokens a second", f"{self.tokens_per_second:,.0f}"),
            ("training bits/char", f"{self.train_bits:.3f}"),
            ("validation bits/char", f"{self.validation_bits:.3f}"),
            ("trigram bits/char", f"{self.trigram_bits:.3f} (a table of counts, the baseline)"),
            ("against the trigram", f"{abs(difference):.3f} {'better' if difference > 0 else 'worse: train for longer'}"),
            ("files", f"{self.folder}: loss.png, sample.txt, metrics.jsonl, config.json, checkpoints"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def comparison(summaries: list[Summary]) -> str:
    """A Markdown table of runs, best first."""
    header = (
        "| run | attention | parameters | validation nats/char | bits/char | training tokens/s |\n|---|---|--:|--:|--:|--:|"
    )
    rows = [
        f"| {Path(s.folder).name} | {s.attention} | {s.parameters:,} | {s.validation_bits * math.log(2):.3f} "
        f"| {s.validation_bits:.3f} | {s.tokens_per_second:,.0f} |"
        for s in sorted(summaries, key=lambda summary: summary.validation_bits)
    ]
    return "\n".join([header, *rows])


def read_summary(metrics: list[dict[str, Any]]) -> Summary | None:
    """What a run said at its end; None before that."""
    found = [line["summary"] for line in metrics if "summary" in line]
    return Summary(**found[-1]) if found else None


def plot_losses(metrics: list[dict[str, Any]], trigram_bits: float, title: str, path: Path) -> None:
    """Training and validation bits a character over training tokens, with the trigram as a line."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes: Any = figure.subplots()
    for key, label, style in [
        ("train_bits", "training", {"color": "tab:blue", "alpha": 0.7, "linewidth": 1.2}),
        ("validation_bits", "validation", {"color": "tab:orange", "marker": "o", "markersize": 4}),
    ]:
        points = [(line["tokens"] / 1e6, line[key]) for line in metrics if key in line]
        axes.plot(*np.array(points).T, label=label, **style)
    axes.axhline(trigram_bits, color="tab:gray", linestyle="--", label=f"trigram, {trigram_bits:.2f}")
    validation = [line["validation_bits"] for line in metrics if "validation_bits" in line]
    axes.set(xlabel="million training tokens", ylabel="bits a character")
    axes.set_title(f"{title}: validation {validation[-1]:.2f}", parse_math=False)
    axes.set_ylim(0, None)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)

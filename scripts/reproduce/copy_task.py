"""Linear Transformers (Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236), Fig. 2: learning to copy.

A string of 10 symbols behind a separator, then the separator and the string again, whose symbols are asked; strings are of
half to all of the greatest length, as in the authors' code. Fig. 2 shows that linear attention comes to the loss of softmax
attention. Here too: at the end of training both are below 0.1 nats a symbol, where chance is ln 10 = 2.30, and the loss of
linear attention is at most 0.05 above softmax attention's. Every batch is new, so the loss of training is that of a test.

What is smaller than theirs, for a CPU of two cores:

                             theirs             here                --quick
    tokens                   128                33                  17
    layers, heads, width     4, 8, 256          4, 8, 64            2, 4, 32
    batch                    64                 32                  32
    updates                  10,000             1,200               600
    RAdam at                 10⁻³, then 10⁻⁴    3·10⁻³, 3·10⁻⁴      10⁻², 10⁻³
    from update              3,000              840                 420

and their sinusoids of position are replaced by this project's short convolution, 4 tokens wide. The reduction is in favour
of linear attention as far as the length goes: docs/limits.md has what becomes of longer strings.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import optax
import report
from matplotlib.figure import Figure

from jax_linattn.lm import tasks
from jax_linattn.lm.figures import style

NUM_SYMBOLS = 10
CHANCE = float(np.log(NUM_SYMBOLS))
LOW, NEAR = 0.1, 0.05  # nats
COLORS = {"softmax": style.COLORS["softmax attention"], "linear": style.COLORS["elu_plus_one"]}


class SetUp(NamedTuple):
    """What is trained, and how."""

    string: int  # symbols at most
    num_layers: int
    num_heads: int
    width: int
    steps: int
    learning_rate: float  # a tenth of it in the last 30 % of the steps
    batch_size: int = 32


FULL = SetUp(string=16, num_layers=4, num_heads=8, width=64, steps=1200, learning_rate=3e-3)
QUICK = SetUp(string=8, num_layers=2, num_heads=4, width=32, steps=600, learning_rate=1e-2)


def reproduce(options: report.Options, out: report.Report) -> None:
    set_up = QUICK if options.quick else FULL
    losses = {}
    for attention in COLORS:
        losses[attention], right = train(attention, set_up, options.seed)
        out.note(f"{attention}: loss {final(losses[attention]):.4f}, right symbols {right:.2%}")
    softmax, linear = (final(losses[name]) for name in ("softmax", "linear"))
    out.section(f"nats a symbol, mean of the last {len(losses['linear']) // 20} updates")
    for name, loss in (("softmax", softmax), ("linear", linear)):
        out.expect(name, f"{loss:.4f}", f"< {LOW:g}", loss < LOW)
    out.expect("linear - softmax", f"{linear - softmax:.4f}", f"< {NEAR:g}", linear - softmax < NEAR)
    out.save(losses_figure(losses, set_up), "copy_task")


def train(attention: str, set_up: SetUp, seed: int) -> tuple[np.ndarray, float]:
    """(the loss of each update, the part of right symbols in strings that no training saw)."""
    task = tasks.Copy(NUM_SYMBOLS, 2 * set_up.string + 1)
    model = tasks.build(
        task.vocabulary_size,
        seed=seed,
        attention=attention,
        num_layers=set_up.num_layers,
        num_heads=set_up.num_heads,
        width=set_up.width,
        mlp_width=4 * set_up.width,
    )
    sizes = range(set_up.string // 2, set_up.string + 1)
    batch_at = functools.partial(task.batch, seed, batch_size=set_up.batch_size, sizes=sizes)
    rate = optax.piecewise_constant_schedule(set_up.learning_rate, {set_up.steps * 7 // 10: 0.1})
    model, losses = tasks.fit(model, batch_at, set_up.steps, optimizer=optax.radam(rate))
    return losses, tasks.accuracy(model, [batch_at(tasks.FRESH + number) for number in range(10)])


def final(losses: np.ndarray) -> float:
    return float(losses[-len(losses) // 20 :].mean())


@style.styled
def losses_figure(losses: Mapping[str, np.ndarray], set_up: SetUp) -> Figure:
    """The loss of each update, faint, and means over 2 % of them."""
    figure = Figure(figsize=(style.WIDTH, 4))
    axes: Any = figure.subplots()
    window = set_up.steps // 50
    for name, values in losses.items():
        axes.plot(values, color=COLORS[name], alpha=0.2, linewidth=0.8)
        means = values[: len(values) // window * window].reshape(-1, window).mean(axis=1)
        axes.plot((np.arange(len(means)) + 0.5) * window, means, color=COLORS[name], linewidth=1.8, label=name)
    axes.axhline(CHANCE, color="0.6", linewidth=0.8, linestyle="--", label="chance, ln 10")
    axes.set(yscale="log", xlabel="updates", ylabel="nats a symbol")
    axes.set_title(f"copying strings of {set_up.string // 2} to {set_up.string} symbols")
    axes.grid(color="#e0e0e0", linewidth=0.7)
    axes.margins(x=0.01)
    axes.legend()
    return figure


if __name__ == "__main__":
    report.run(reproduce, __doc__)

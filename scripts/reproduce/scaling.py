"""Linear Transformers (Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236), Fig. 1: time and memory over length.

One layer of causal attention with its gradients, B = 1, H = 8, D = E = 64, float32, N from 2^9 to 2^16 tokens: softmax
attention that makes its N×N weights, as all did in 2020 (`jax.nn.dot_product_attention` on XLA), and linear attention with
elu+1 as this library chooses to compute it. In the paper's plot, with logarithmic axes, softmax attention has slope 2 and
linear attention slope 1; slopes here are those of straight lines through the logarithms of the three longest lengths. There
what does not grow with N is little: the time of a call, the memory of the block of chunks that is worked on.

Memory is what the compiled program asks for, its inputs and outputs included; nothing has to be run for it, so it is there
for every length. Time is the least of several runs in turn; softmax attention is not run from N = 2^13 on, where it
would ask for 8 GiB and more. With --quick there are few lengths and runs, and the slopes of time are held to nothing.
"""

import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import report
from matplotlib.figure import Figure

import jax_linattn
from jax_linattn.lm.figures import style

sys.path.insert(0, str(Path(__file__).parents[2]))  # the project, which holds scripts.benchmarks
from scripts.benchmarks.measure import Program, best_times, compiled, with_gradients

HEADS, DIM = 8, 64
ATTENTIONS = {
    "softmax": functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla"),
    "linear": functools.partial(jax_linattn.linear_attention, is_causal=True),
}
COLORS = {"softmax": style.COLORS["softmax attention"], "linear": style.COLORS["elu_plus_one"]}
SLOPES = {"softmax": (2, 0.2), "linear": (1, 0.1)}  # the paper's, and how near ours must be
LONGEST_RUN = 1 << 12  # of softmax attention
Curves = Mapping[str, Mapping[int, float]]  # of each attention, by length


def reproduce(options: report.Options, out: report.Report) -> None:
    powers = {"softmax": (10, 11), "linear": (12, 14)} if options.quick else dict.fromkeys(ATTENTIONS, range(9, 17))
    cases = [(name, 1 << power) for name in ATTENTIONS for power in powers[name]]
    programs = {case: program(*case, seed=options.seed) for case in cases}
    timed = {case: program for case, program in programs.items() if is_run(*case)}
    seconds = best_times(timed, rounds=2 if options.quick else 10, budget=120)
    memory = by_name({case: (program.memory or np.nan) / 2**20 for case, program in programs.items()})
    times = by_name({case: of_case * 1e3 for case, of_case in seconds.items()})
    show(out, sorted({length for _, length in cases}), {"MiB": memory, "ms": times})
    compare(out, "memory", memory, lenient=False)
    compare(out, "time", times, lenient=options.quick)
    out.save(figure({"memory, MiB": memory, "time of forward and backward, ms": times}), "scaling")


def is_run(name: str, length: int) -> bool:
    return name == "linear" or length <= LONGEST_RUN


def program(name: str, length: int, *, seed: int) -> Program:
    shape = (1, length, HEADS, DIM)
    if is_run(name, length):
        inputs = jax.random.normal(jax.random.key(seed), (4, *shape))
    else:
        inputs = [jax.ShapeDtypeStruct(shape, jnp.float32)] * 4
    return compiled(with_gradients(ATTENTIONS[name]), *inputs)


def by_name(values: Mapping[tuple[str, int], float]) -> Curves:
    return {name: {length: value for (of, length), value in sorted(values.items()) if of == name} for name in ATTENTIONS}


def show(out: report.Report, lengths: list[int], curves: Mapping[str, Curves]) -> None:
    columns = [(name, unit) for unit in curves for name in ATTENTIONS]
    out.note("\n     N" + "".join(f"{f'{name} {unit}':>13}" for name, unit in columns))
    for length in lengths:
        cells = [curves[unit][name].get(length) for name, unit in columns]
        out.note(f"{length:6}" + "".join(f"{'-':>13}" if cell is None else f"{cell:13,.1f}" for cell in cells))


def compare(out: report.Report, what: str, curves: Curves, *, lenient: bool) -> None:
    """The slope of each line; leniently, any slope will do."""
    out.section(f"slope of {what}")
    for name, (published, within) in SLOPES.items():
        lengths, values = np.array(list(curves[name].items())[-3:]).T
        slope = np.polyfit(np.log(lengths), np.log(values), 1)[0]
        label = f"{name}, N = {lengths[0]:,.0f} … {lengths[-1]:,.0f}"
        out.compare(label, float(slope), published, within=np.inf if lenient else within, digits=".2f")


@style.styled
def figure(curves: Mapping[str, Curves]) -> Figure:
    """A panel a quantity; dashed: the slopes of the paper, through the longest length of each."""
    figure = Figure(figsize=(style.WIDTH, 3.8))
    panels: Any = figure.subplots(1, len(curves))
    for axes, (title, of_names) in zip(panels, curves.items(), strict=True):
        for name, values in of_names.items():
            lengths = np.array(list(values))
            axes.loglog(lengths, list(values.values()), color=COLORS[name], marker="o", markersize=4, label=name)
            exponent = SLOPES[name][0]
            straight = values[int(lengths[-1])] * (lengths / lengths[-1]) ** exponent
            axes.loglog(lengths, straight, color=COLORS[name], linestyle=":", linewidth=1, label=f"slope {exponent}")
        ticks = sorted({length for values in of_names.values() for length in values})
        axes.set_xticks(ticks, [f"$2^{{{length.bit_length() - 1}}}$" for length in ticks])
        axes.minorticks_off()
        axes.grid(color="#e0e0e0", linewidth=0.7)
        axes.set(xlabel="tokens, N", title=title)
    panels[0].legend()
    return figure


if __name__ == "__main__":
    report.run(reproduce, __doc__)

"""Recall against the size of the state: multi-query associative recall, Arora et al. 2023 (Zoology), arXiv 2312.04927.

A list of keys and values, then its keys again among random symbols; asked is each one's value (`tasks.SpacedRecall`). A
guess among the values is right 1/S of the time. Published: softmax attention answers all, linear attention more the more
numbers its state holds, in the order

    softmax > delta rule > Taylor, DPFP > elu+1

of which this library has all but the delta rule. The paper's set-up: V = 8192, length 64 … 512, 4 … 64 pairs, 2 layers, one
head, no MLP. Here: V = 128, length 64, 4, 8 or 16 pairs in training and 16 in the test, 2 layers of width 64 with 8 heads
and a small MLP (64) and, as in all decoders of this library, a short convolution of 4 tokens before attention. That joins a
value to its key without any attention, for all contestants alike, so all are better here than there.

The learning rate is 2·10⁻² for elu+1, the best of three that were tried with 8 heads and 600 steps (0.63 right at 4·10⁻³,
0.85 at 10⁻², 0.87 at 2·10⁻²), and 10⁻² for all others, where nothing else was tried, but 5·10⁻³ for GLA: who loses has had
the better care. Layers with gates have 2 heads and 1000 steps, and leave chance late all the same: their figures tell how
soon they learn, not what fits into their states, and nothing is asked of them. HGRN2 (10⁻²) and Mamba-2 (5·10⁻³) had 0.06
by then, and with 8 heads, 10⁻² and 600 steps all four 0.03 to 0.05: those two are left out. Based is Taylor, then a sliding
window of 8 tokens.
"""

import functools
from typing import Any, NamedTuple

import jax
from flax import nnx
from matplotlib.figure import Figure
from report import Options, Report, run

from jax_linattn.lm import tasks
from jax_linattn.lm.figures.style import COLORS, WIDTH, styled
from jax_linattn.lm.model import Decoder

TASK = tasks.SpacedRecall(vocabulary_size=128, length=64)
SIZES, TESTED = (4, 8, 16), 16  # pairs
MODEL: dict[str, Any] = {"num_layers": 2, "width": 64, "mlp_width": 64}


class Contestant(NamedTuple):
    """A model to train, and how its point looks."""

    options: dict[str, Any]
    color: str
    learning_rate: float = 1e-2
    steps: int = 600


def _linear(feature_map: str, num_heads: int) -> Contestant:
    rate = 2e-2 if feature_map == "elu_plus_one" else 1e-2
    return Contestant({"feature_map": feature_map, "num_heads": num_heads}, COLORS[feature_map], rate)


def _gated(attention: str, color: str, rate: float) -> Contestant:
    return Contestant({"attention": attention, "num_heads": 2}, color, rate, steps=1000)


COMPARED = {
    "softmax": Contestant({"attention": "softmax", "num_heads": 8}, COLORS["softmax attention"]),
    "Taylor": _linear("taylor", 8),
    "DPFP-2": _linear("dpfp_2", 8),
    "elu+1": _linear("elu_plus_one", 8),
}
OTHERS = {
    "elu+1, 4 heads": _linear("elu_plus_one", 4),
    "elu+1, 1 head": _linear("elu_plus_one", 1),
    "Based": Contestant({"attention": "based", "num_heads": 8, "window": 8}, COLORS["hedgehog"]),
    "RetNet, 2 heads": _gated("retnet", COLORS["relu"], 1e-2),
    "GLA, 2 heads": _gated("gla", COLORS["relu_squared"], 5e-3),
}
ORDER = (  # better, worse, the least difference
    ("softmax", "Taylor", -0.01),
    ("softmax", "elu+1", 0.05),
    ("Taylor", "elu+1", 0.05),
    ("DPFP-2", "elu+1", 0.05),
)
QUICK, QUICK_STEPS = ("softmax", "elu+1"), 300


def numbers_kept(model: Decoder) -> int:
    """All numbers in the caches of attention, a mean over layers, after a sequence of the task's length."""
    graphdef, state = nnx.split(model)

    def caches(state):
        with_cache = nnx.merge(graphdef, state)
        with_cache.init_cache(1, TASK.length)
        return [nnx.state(block.attention, nnx.Cache) for block in with_cache.blocks]

    kept = jax.tree.leaves(jax.eval_shape(caches, state))
    return sum(leaf.size for leaf in kept) // len(model.blocks)


def right_answers(contestant: Contestant, quick: bool, seed: int) -> tuple[float, int]:
    """(the part of right answers of the trained model, numbers kept a layer)."""
    size: dict[str, Any] = MODEL | ({"num_layers": 1} if quick else {})
    model = tasks.build(TASK.vocabulary_size, seed=seed, **size, **contestant.options)
    batch_at = functools.partial(TASK.batch, seed, batch_size=16, sizes=SIZES)
    model, _ = tasks.fit(model, batch_at, contestant.steps, learning_rate=contestant.learning_rate)
    tests = [TASK.batch(seed, tasks.FRESH + step, batch_size=64, sizes=(TESTED,)) for step in range(8)]
    return tasks.accuracy(model, tests), numbers_kept(model)


@styled
def recall_figure(results: dict[str, tuple[float, int]]) -> Figure:
    figure = Figure(figsize=(WIDTH, 4.2))
    axes: Any = figure.subplots()
    for name, (accuracy, numbers) in results.items():
        marker = "o" if name in COMPARED or name.startswith("elu") else "^"
        color = (COMPARED | OTHERS)[name].color
        axes.plot(numbers, accuracy, marker, color=color, markersize=7)
        place = {"xytext": (0, -11), "textcoords": "offset points", "ha": "center", "va": "center", "fontsize": 8}
        axes.annotate(name, (numbers, accuracy), color=color, **place)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="numbers kept a layer", ylabel="right answers", ylim=(0, 1.05))
    axes.set_title(f"recall of {TESTED} pairs in {TASK.length} tokens")
    axes.grid(color="#e0e0e0", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.margins(x=0.15)
    return figure


def reproduce(options: Options, report: Report) -> None:
    contestants = COMPARED | OTHERS
    if options.quick:
        contestants = {name: contestants[name]._replace(steps=QUICK_STEPS) for name in QUICK}
    report.note(f"\nRight answers with {TESTED} pairs\n{'':44} {'numbers kept':>12} {'ours':>12}")
    results = {}
    for name, contestant in contestants.items():
        results[name] = right_answers(contestant, options.quick, options.seed)
        report.note(f"{name:44} {results[name][1]:12,} {results[name][0]:12.3f}")
    report.section("Order of right answers (published: Zoology)")
    right = {name: accuracy for name, (accuracy, _) in results.items()}
    report.expect("softmax", f"{right['softmax']:.3f}", "> .98", right["softmax"] > 0.98)
    for better, worse, least in ORDER:
        if {better, worse} <= right.keys():
            gain = right[better] - right[worse]
            report.expect(f"{better} - {worse}", f"{gain:.3f}", f"> {least}", gain > least)
    report.save(recall_figure(results), "mqar")


if __name__ == "__main__":
    run(reproduce, __doc__)

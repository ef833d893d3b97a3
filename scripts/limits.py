"""Where linear attention loses: prints a table and, but for `sharp`, draws a figure. docs/limits.md tells what they mean.

python scripts/limits.py recall     # look up values by their keys
python scripts/limits.py copy       # repeat a string
python scripts/limits.py short      # time beside softmax attention, on short sequences
python scripts/limits.py sharp      # put all weight on one key
"""

import argparse
import functools
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from benchmarks.measure import best_times, compiled, with_gradients

import jax_linattn
from jax_linattn import feature_maps
from jax_linattn.lm import tasks
from jax_linattn.lm.figures.limits import accuracy_figure, ratios_figure
from jax_linattn.lm.figures.style import COLORS, save

OPTIONS = argparse.Namespace()  # what `main` has parsed

MODEL = {"num_layers": 2, "width": 32, "mlp_width": 64}
BATCH_SIZE = 16
STEPS = 800


class Contestant(NamedTuple):
    """A model to train, and how its line looks."""

    options: dict[str, Any]
    look: dict[str, Any]
    recall_rate: float = 1e-2  # of learning: see docs/limits.md for what was tried
    copy_rate: float = 1e-2


BLUE = COLORS["elu_plus_one"]
CONTESTANTS = {
    "softmax": Contestant({"num_heads": 2, "attention": "softmax"}, {"color": COLORS["softmax attention"]}),
    "elu+1": Contestant({"num_heads": 2}, {"color": BLUE}),
    "elu+1 (4 heads of 8)": Contestant({"num_heads": 4}, {"color": BLUE, "linestyle": ":"}),
    "elu+1 (1 head of 32)": Contestant({"num_heads": 1}, {"color": BLUE, "linestyle": "--"}),
    "Hedgehog": Contestant({"num_heads": 2, "feature_map": "hedgehog"}, {"color": COLORS["hedgehog"]}, recall_rate=5e-3),
    "DPFP-2": Contestant({"num_heads": 2, "feature_map": "dpfp_2"}, {"color": COLORS["dpfp_2"]}),
    "Taylor": Contestant({"num_heads": 2, "feature_map": "taylor"}, {"color": COLORS["taylor"]}),
    "softmax then elu+1": Contestant(
        {"num_heads": 2, "softmax_layers": (0,)}, {"color": COLORS["relu"], "linestyle": "--"}
    ),
    "elu+1 then softmax": Contestant({"num_heads": 2, "softmax_layers": (1,)}, {"color": COLORS["relu"], "linestyle": ":"}),
}
COPIERS = ("softmax", "elu+1", "elu+1 (1 head of 32)", "Hedgehog", "Taylor", "softmax then elu+1")


def chosen(names: Iterable[str]) -> list[str]:
    """Whom to train, out of those that a task knows."""
    names = list(names)
    for name in OPTIONS.only or ():
        if name not in names:
            raise ValueError(f"--only has {name!r}; the names are {', '.join(names)}")
    return OPTIONS.only or names[: 2 if OPTIONS.quick else None]


def train(name: str, task: tasks.Recall | tasks.Copy, sizes: Sequence[int]):
    """(a contestant, trained; what the table says of it)."""
    contestant = CONTESTANTS[name]
    own_rate = contestant.recall_rate if isinstance(task, tasks.Recall) else contestant.copy_rate
    model = tasks.build(task.vocabulary_size, seed=OPTIONS.seed, **MODEL, **contestant.options)
    batch_at = functools.partial(task.batch, OPTIONS.seed, batch_size=BATCH_SIZE, sizes=sizes)
    steps = (OPTIONS.steps or STEPS) // (2 if OPTIONS.quick else 1)
    start = time.perf_counter()
    model, losses = tasks.fit(model, batch_at, steps, learning_rate=OPTIONS.learning_rate or own_rate)
    numbers = tasks.numbers_a_head(model)
    state = "grows" if numbers is None else f"{contestant.options['num_heads']} x {numbers}"
    return model, f"{name:20} {state:>9} {time.perf_counter() - start:6.0f} s {losses[-50:].mean():6.2f} "


def measure(model, task: tasks.Recall | tasks.Copy, size: int) -> float:
    """The part of right answers in sequences that no training saw."""
    steps = range(tasks.FRESH, tasks.FRESH + (2 if OPTIONS.quick else 8))
    return tasks.accuracy(model, [task.batch(OPTIONS.seed, step, batch_size=32, sizes=(size,)) for step in steps])


def print_header(title: str, sizes: Sequence[int]) -> None:
    print(f"{title}\n{'attention':20} {'F·E':>9} {'time':>8} {'loss':>6} " + "".join(f"{size:7}" for size in sizes))


def print_accuracies(start: str, accuracies: Sequence[float]) -> None:
    print(f"{start:46} " + "".join(f"{accuracy:7.3f}" for accuracy in accuracies), flush=True)


def recall() -> None:
    sizes = (2, 4, 8, 16, 32)
    task = tasks.Recall(num_symbols=48, length=96)
    print_header("Recall: right answers by the number of pairs", sizes)
    accuracies = {}
    for name in chosen(CONTESTANTS):
        model, start = train(name, task, sizes)
        accuracies[name] = [measure(model, task, size) for size in sizes]
        print_accuracies(start, accuracies[name])
    chance = [1 / size for size in sizes]
    print_accuracies("any value of the list", chance)
    title = "looking up values by their keys"
    looks = {name: contestant.look for name, contestant in CONTESTANTS.items()}
    finish("recall", accuracy_figure(sizes, accuracies, looks, chance, xlabel="pairs in the list", title=title))


def copy() -> None:
    sizes, longer = (4, 8, 16, 32), (64, 128)
    tasks_by_size = {size: tasks.Copy(num_symbols=16, length=2 * size + 1) for size in sizes + longer}
    print_header(f"Copy: right symbols by the string's length; trained on up to {sizes[-1]}", sizes + longer)
    accuracies = {}
    for name in chosen(COPIERS):
        model, start = train(name, tasks_by_size[sizes[-1]], sizes)
        accuracies[name] = [measure(model, task, size) for size, task in tasks_by_size.items()]
        print_accuracies(start, accuracies[name])
    chance = [1 / 16] * len(tasks_by_size)
    print_accuracies("any symbol", chance)
    looks = {name: contestant.look for name, contestant in CONTESTANTS.items()}
    axes = {"xlabel": "symbols in the string", "title": "repeating a string", "trained_to": sizes[-1]}
    finish("copy", accuracy_figure(list(tasks_by_size), accuracies, looks, chance, **axes))


def short() -> None:
    lengths = (16, 64, 256) if OPTIONS.quick else (16, 32, 64, 96, 128, 192, 256, 512)
    print(f"Time of causal linear attention (elu+1) ÷ softmax attention; H=8, D=64, float32, {jax.default_backend()}")
    print(f"{'B':>3} {'T':>5} {'linear ms':>10} {'softmax ms':>11} {'forward':>8} {'with gradients':>15}")
    ratios = {}
    for batch_size in (1, 8):
        ratios[batch_size] = {"forward": [], "with gradients": []}
        for length in lengths:
            best = time_both(batch_size, length, rounds=5 if OPTIONS.quick else 20)
            forward, both = (best["linear", kind] / best["softmax", kind] for kind in ("forward", "gradient"))
            ms = [best[name, "forward"] * 1e3 for name in ("linear", "softmax")]
            print(f"{batch_size:3} {length:5} {ms[0]:10.3f} {ms[1]:11.3f} {forward:8.2f} {both:15.2f}", flush=True)
            ratios[batch_size]["forward"].append(forward)
            ratios[batch_size]["with gradients"].append(both)
    finish("short", ratios_figure(lengths, ratios))


def sharp() -> None:
    dim, sizes = 16, (8, 16, 32, 64, 128)
    maps = {"softmax": None} | {name: feature_maps.get(name) for name in ("elu_plus_one", "dpfp_2", "taylor")}
    print(f"Mean weight of each query on its own of S keys, queries and keys free, D={dim}, by S")
    print(f"{'attention':20} {'F':>5} " + "".join(f"{size:7}" for size in sizes))
    for name, feature_map in list(maps.items())[: 2 if OPTIONS.quick else None]:
        weights = [tasks.sharpest_weight(feature_map, size, dim, seed=OPTIONS.seed) for size in sizes]
        num_features = feature_map(jnp.zeros((1, dim))).shape[-1] if feature_map else "-"
        print(f"{name:20} {num_features:>5} " + "".join(f"{weight:7.3f}" for weight in weights), flush=True)


def time_both(batch_size: int, length: int, *, rounds: int) -> dict[tuple[str, str], float]:
    """("linear" or "softmax", "forward" or "gradient") to seconds; the two in turn, so that noise hits both alike."""
    functions = {
        "linear": functools.partial(jax_linattn.linear_attention, is_causal=True),
        "softmax": functools.partial(jax.nn.dot_product_attention, is_causal=True),
    }
    *inputs, cotangent = jax.random.normal(jax.random.key(0), (4, batch_size, length, 8, 64))
    programs = {(name, "forward"): compiled(function, *inputs) for name, function in functions.items()}
    for name, function in functions.items():
        programs[name, "gradient"] = compiled(with_gradients(function), *inputs, cotangent)
    return best_times(programs, rounds)


def finish(task: str, figure) -> None:
    path = Path(OPTIONS.out or f"runs/limits_{task}.png")
    save(figure, path)
    print(f"figure: {path}")


TASKS = {"recall": recall, "copy": copy, "short": short, "sharp": sharp}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--quick", action="store_true", help="two contestants, half of the steps, fewer lengths: a trial")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and sequences")
    parser.add_argument("--steps", type=int, help=f"of training in recall and copy, {STEPS} by default")
    parser.add_argument("--learning_rate", type=float, help="in recall and copy for all, instead of each one's best")
    parser.add_argument(
        "--only", type=lambda names: names.split(","), help="whom to train in recall and copy, as in the table"
    )
    parser.add_argument("--out", help="the figure; by default runs/limits_TASK.png")
    vars(OPTIONS).update(vars(parser.parse_args(arguments)))
    no_training = () if OPTIONS.task in ("recall", "copy") else ("steps", "learning_rate", "only")
    no_figure = ("out",) if OPTIONS.task == "sharp" else ()
    unused = [f"--{name}" for name in no_training + no_figure if getattr(OPTIONS, name) is not None]
    if unused:
        parser.error(f"{OPTIONS.task} has no use for {', '.join(unused)}")
    try:
        TASKS[OPTIONS.task]()
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

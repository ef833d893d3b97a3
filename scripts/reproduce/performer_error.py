"""Performer (Choromanski et al. 2021, https://arxiv.org/abs/2009.14794): the error of random features.

With SM = exp(q·k), d dims and m rows of the projection, independent ones, the mean squared errors are exactly (Lemma 2)

    positive        MSE₊ = exp(|q+k|²) SM² (1 - exp(-|q+k|²)) / m
    hyperbolic      ½ (1 - exp(-|q+k|²)) MSE₊
    trigonometric   exp(|q+k|²) SM⁻² (1 - exp(-|q-k|²))² / (2m)

and with orthogonal rows, for positive features and m <= d, at most (Theorem 2)

    MSE₊ - 2(m-1)/(m(d+2)) · (SM - exp(-(|q|²+|k|²)/2))²

The sum of two orthogonal rows has the length of 2d normal numbers, which makes their error exact too (not in the paper)

    MSE₊ - (1 - 1/m) exp(-|q|²-|k|²) (exp(|q+k|²) - ₁F₁(d; d/2; |q+k|²/2))

For m = b·d the rows are b independent blocks: what holds for m = d is divided by b. Measured are the features of
`feature_maps.favor_plus` themselves, with projections drawn anew many times, for d = 16, |q| = |k| = ½ and two angles.
Errors are to be within 5 % of what is exact; those of orthogonal rows under the bound, but for 3 standard errors of what is
measured; and all six estimators without bias: the mean of the draws within 3 standard errors of SM.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import report
import scipy.special
from matplotlib.figure import Figure

from jax_linattn import feature_maps
from jax_linattn.lm.figures import style

DIM = 16
SIZE = 0.5  # |q| = |k|
KINDS: tuple[feature_maps.FavorKind, ...] = ("positive", "hyperbolic", "trig")
ROWS = 20_000 * DIM  # drawn at a time


class Mean(NamedTuple):
    """A mean of independent draws, and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, draws: np.ndarray) -> "Mean":
        return cls(float(draws.mean()), float(draws.std() / len(draws) ** 0.5))


class Pair(NamedTuple):
    """A query and a key."""

    degrees: int  # the angle between them
    query: np.ndarray  # [d]
    key: np.ndarray

    @property
    def kernel(self) -> float:
        return float(np.exp(self.query @ self.key))

    def error(self, kind: str, m: int) -> float:
        """Lemma 2: the mean squared error with m independent rows."""
        plus, minus = (float(np.sum(x**2)) for x in (self.query + self.key, self.query - self.key))
        positive = np.exp(plus) * self.kernel**2 * (1 - np.exp(-plus)) / m
        return {
            "positive": positive,
            "hyperbolic": (1 - np.exp(-plus)) / 2 * positive,
            "trig": np.exp(plus) * self.kernel**-2 * (1 - np.exp(-minus)) ** 2 / (2 * m),
        }[kind]

    def orthogonal(self, m: int) -> tuple[float, float]:
        """Of positive features with m orthogonal rows: (the error, what Theorem 2 says that it is at most)."""
        if m > DIM:
            error, bound = self.orthogonal(DIM)
            return error * DIM / m, bound * DIM / m
        independent, squares = self.error("positive", m), np.sum(self.query**2) + np.sum(self.key**2)
        plus = np.sum((self.query + self.key) ** 2)
        gain = (1 - 1 / m) * np.exp(-squares) * (np.exp(plus) - scipy.special.hyp1f1(DIM, DIM / 2, plus / 2))
        least_gain = 2 * (m - 1) / (m * (DIM + 2)) * (self.kernel - np.exp(-squares / 2)) ** 2
        return float(independent - gain), float(independent - least_gain)


def reproduce(options: report.Options, out: report.Report) -> None:
    sizes = (8, 16, 64) if options.quick else (4, 16, 64, 256)
    rng = np.random.default_rng(options.seed)
    pairs = [draw_pair(rng, degrees) for degrees in (60, 120)]
    keys = jax.random.split(jax.random.key(options.seed), 3 if options.quick else 20)
    estimates = {
        (m, orthogonal): drawn
        for orthogonal in (False, True)
        for m, drawn in draw_estimates(keys, pairs, sizes, orthogonal).items()
    }
    out.note(f"draws: {', '.join(f'{len(estimates[m, True]):,} for m={m}' for m in sizes)}")
    squares = {which: (drawn - [pair.kernel for pair in pairs]) ** 2 for which, drawn in estimates.items()}
    for index, pair in enumerate(pairs):
        errors = {which: [Mean.of(x[:, kind, index]) for kind in range(len(KINDS))] for which, x in squares.items()}
        compare_errors(out, pair, sizes, errors)
    check_bias(
        out, {orthogonal: estimates[DIM, orthogonal] / [pair.kernel for pair in pairs] - 1 for orthogonal in (False, True)}
    )
    out.save(errors_figure(pairs, sizes, {which: x.mean(axis=0) for which, x in squares.items()}), "performer_error")


def draw_pair(rng: np.random.Generator, degrees: int) -> Pair:
    """Two vectors of this size and angle, in any direction."""
    basis, _ = np.linalg.qr(rng.normal(size=(DIM, 2)))
    angle = np.deg2rad(degrees)
    return Pair(degrees, SIZE * basis[:, 0], SIZE * (basis @ [np.cos(angle), np.sin(angle)]))


def draw_estimates(keys, pairs: Sequence[Pair], sizes: Sequence[int], orthogonal: bool) -> dict[int, np.ndarray]:
    """Estimates of exp(q·k) for each m, one a projection: float64 [draws, kinds, pairs]."""
    # The maps estimate exp(x·y/√D).
    x, y = (jnp.asarray([getattr(pair, name) for pair in pairs], jnp.float32) * DIM**0.25 for name in ("query", "key"))

    @jax.jit
    def estimate(maps: feature_maps.FavorPlus):
        of_kinds = [dataclasses.replace(maps, kind=kind) for kind in KINDS]  # of the same rows
        return jnp.stack([jnp.sum(phi(x) * phi(y), axis=-1) for phi in of_kinds])

    estimates = {m: [] for m in sizes}
    for key in keys:
        drawn = feature_maps.favor_plus(key, DIM, ROWS, orthogonal=orthogonal)  # cut into independent maps of m rows each
        for m in sizes:
            rows = drawn.projection.reshape(-1, max(m, DIM), DIM)[:, :m]
            estimates[m].append(jax.vmap(estimate)(dataclasses.replace(drawn, projection=rows)))
    return {m: np.concatenate(parts).astype(np.float64) for m, parts in estimates.items()}


def compare_errors(
    out: report.Report, pair: Pair, sizes: Sequence[int], errors: dict[tuple[int, bool], list[Mean]]
) -> None:
    """The measured errors of one pair, by (m, orthogonal) and kind, beside Lemma 2 and Theorem 2."""
    out.section(f"mean squared error, {pair.degrees}° between q and k, SM = {pair.kernel:.3f}")
    for index, kind in enumerate(KINDS):
        for m in sizes:
            exact = pair.error(kind, m)
            out.compare(f"{kind}, m={m}", errors[m, False][index].value, exact, within=0.05 * exact, digits=".3e")
    for m in sizes:
        ours, (exact, bound) = errors[m, True][0], pair.orthogonal(m)
        out.compare(f"positive, orthogonal, m={m}", ours.value, exact, within=0.05 * exact, digits=".3e")
        out.expect(
            f"positive, orthogonal, m={m}: bound",
            f"{ours.value:.3e}",
            f"< {bound:.3e}",
            ours.value < bound + 3 * ours.error,
        )
    for index, kind in enumerate(KINDS):
        parts = ", ".join(f"{errors[m, True][index].value / pair.error(kind, m):.2f} for m={m}" for m in sizes)
        out.note(f"{kind}, orthogonal: the error of independent rows times {parts}")


def check_bias(out: report.Report, relative: dict[bool, np.ndarray]) -> None:
    """The mean of the relative errors [draws, kinds, pairs], both pairs together."""
    out.section(f"bias in standard errors, m={DIM}")
    for index, kind in enumerate(KINDS):
        for orthogonal, errors in relative.items():
            bias = Mean.of(errors[:, index].mean(axis=-1))
            name = f"{kind}, {'orthogonal' if orthogonal else 'independent'} (of {bias.error:.0e} SM)"
            out.compare(name, bias.value / bias.error, 0, within=3, digits=".2f")


@style.styled
def errors_figure(pairs: Sequence[Pair], sizes: Sequence[int], errors: dict[tuple[int, bool], np.ndarray]) -> Figure:
    """Lines: what is exact, and the bound; points: measured."""
    figure = Figure(figsize=(style.WIDTH, 4.2))
    grid: Any = figure.subplots(1, len(pairs), sharey=True)
    colors = [style.COLORS[name] for name in ("favor_plus", "taylor", "relu_squared")]
    for number, (axes, pair) in enumerate(zip(grid, pairs, strict=True)):
        for index, (kind, color) in enumerate(zip(KINDS, colors, strict=True)):
            axes.plot(sizes, [pair.error(kind, m) for m in sizes], color=color, label=f"{kind}, exact")
            for orthogonal, marker in ((False, "o"), (True, "x")):
                measured = [errors[m, orthogonal][index, number] for m in sizes]
                name = f"{kind}, {'orthogonal' if orthogonal else 'independent'} rows"
                axes.plot(sizes, measured, linestyle="", color=color, marker=marker, markersize=5, label=name)
            if kind == "positive":
                bounds = [pair.orthogonal(m)[1] for m in sizes]
                axes.plot(sizes, bounds, color=color, linestyle="--", linewidth=1, label="positive, orthogonal: bound")
        axes.set(xscale="log", yscale="log", xlabel="rows of the projection, m")
        axes.set_title(f"{pair.degrees}° between q and k, SM = {pair.kernel:.2f}")
        axes.set_xticks(sizes, [str(m) for m in sizes])
        axes.minorticks_off()
        axes.grid(color="#e0e0e0", linewidth=0.7)
    grid[0].set_ylabel("mean squared error")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


if __name__ == "__main__":
    report.run(reproduce, __doc__)

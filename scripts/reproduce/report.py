"""What the scripts of this folder share: their options, the paper's figure beside ours, plots, and the exit status."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
from matplotlib.figure import Figure

from jax_linattn.lm.figures import style

FOLDER = Path("runs/reproduce")


class Options(NamedTuple):
    """What the command line says."""

    quick: bool  # a smaller set-up, for tests: the same code, fewer sizes, draws or steps
    seed: int
    folder: Path  # of plots


class Report:
    """Prints each figure as it comes and remembers those outside their tolerance."""

    def __init__(self, options: Options):
        self._options = options
        self.failures: list[str] = []

    def section(self, title: str) -> None:
        """The head of a table of comparisons."""
        print(f"\n{title}\n{'':44} {'published':>12} {'ours':>12}  within", flush=True)

    def compare(self, what: str, ours: float, published: float, *, within: float, digits: str = ".4g") -> None:
        """A figure beside the published one.

        Args:
          what: it is.
          ours: what came out.
          published: what the paper has, or a closed form gives.
          within: the largest difference, absolute, that is not a failure; NaN is one always.
          digits: a format.
        """
        self._line(what, f"{published:{digits}}", f"{ours:{digits}}", f"{within:.2g}", abs(ours - published) <= within)

    def expect(self, what: str, ours: str, expected: str, holds: bool) -> None:
        """Something other than one figure near another: a bound, an order."""
        self._line(what, expected, ours, "", holds)

    def note(self, text: str) -> None:
        """What has no tolerance: a figure for the record."""
        print(text, flush=True)

    def save(self, figure: Figure, name: str) -> None:
        """Writes a plot, `name`.png."""
        path = self._options.folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        style.save(figure, path)
        print(f"\nplot: {path}", flush=True)

    def _line(self, what: str, expected: str, ours: str, within: str, holds: bool) -> None:
        print(f"{what:44} {expected:>12} {ours:>12}  {within:7} {'' if holds else 'OUTSIDE'}".rstrip(), flush=True)
        if not holds:
            self.failures.append(what)


def run(reproduce: Callable[[Options, Report], None], description: str | None) -> None:
    """Parses the command line, reproduces, and ends the process: with status 1 where a figure is outside its tolerance."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller set-up with the same checks")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (%(default)s)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for plots (%(default)s)")
    options = Options(**vars(parser.parse_args()))
    report = Report(options)
    start = time.perf_counter()
    print((description or "").partition("\n")[0])
    print(f"jax {jax.__version__} on {jax.default_backend()}, seed {options.seed}{', quick' if options.quick else ''}")
    reproduce(options, report)
    print(f"\n{time.perf_counter() - start:.0f} s; {len(report.failures)} outside their tolerance: ", end="")
    print(", ".join(report.failures) or "none")
    sys.exit(bool(report.failures))

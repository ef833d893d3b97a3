"""Draws what attention does, and how runs went; docs/gallery.md shows each kind.

    python scripts/plot.py pattern --out=pattern.png
    python scripts/plot.py heads --checkpoint=runs/small --text="a list of a list of a" --out=heads.png
    python scripts/plot.py maps --out=maps.png
    python scripts/plot.py state --checkpoint=runs/small --text_file=runs/small/sample.txt --out=state.png
    python scripts/plot.py losses runs/small runs/softmax --unit=nats --out=losses.png

All options of a kind: python scripts/plot.py KIND --help
"""

import argparse
import sys
from typing import NoReturn

from absl import logging

from jax_linattn.lm.figures.losses import ABSCISSAE, UNITS, losses_figure
from jax_linattn.lm.figures.maps import KERNEL_MAPS, maps_figure
from jax_linattn.lm.figures.states import state_figure
from jax_linattn.lm.figures.style import check_path, save
from jax_linattn.lm.figures.weights import heads_figure, pattern_figure


class Parser(argparse.ArgumentParser):
    """Wrong use is an error of one line."""

    def error(self, message: str) -> NoReturn:
        sys.exit(f"error: {message}; see {self.prog} --help")


def add_pattern(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--feature_map", default="elu_plus_one", help="favor_plus, or a name that feature_maps.get knows; %(default)s"
    )
    parser.add_argument("--length", type=int, default=32, help="T, tokens; %(default)s")
    parser.add_argument("--dim", type=int, default=16, help="D, of queries and keys; %(default)s")
    parser.add_argument("--size", type=float, default=0.5, help="standard deviation of queries and keys; %(default)s")
    parser.add_argument("--seed", type=int, default=42, help="%(default)s")


def add_maps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--maps", default=",".join(KERNEL_MAPS), help="whose kernels to show, separated by commas; %(default)s"
    )
    parser.add_argument("--dim", type=int, default=16, help="D, of queries and keys; %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")


def add_text(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", default="runs/small", help="folder of a run, or of one of its checkpoints; %(default)s"
    )
    parser.add_argument("--text", help="what the model reads; a sentence about the for statement")
    parser.add_argument("--text_file", help="a file to take the text from instead")


def add_heads(parser: argparse.ArgumentParser) -> None:
    add_text(parser)
    parser.add_argument("--length", type=int, default=128, help="characters of it at most; %(default)s")


def add_state(parser: argparse.ArgumentParser) -> None:
    add_text(parser)
    parser.add_argument("--length", type=int, default=512, help="characters of it at most; %(default)s")


def add_losses(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", help="folders of runs")
    parser.add_argument("--unit", choices=list(UNITS), default="bits", help="of a character's loss; %(default)s")
    parser.add_argument("--over", choices=list(ABSCISSAE), default="steps", help="%(default)s")


# A kind to (its options, from options to a figure, what it draws).
KINDS = {
    "pattern": (add_pattern, pattern_figure, "causal weights of random queries and keys, softmax's beside linear's"),
    "heads": (add_heads, heads_figure, "weights of every head of a trained model on a text"),
    "maps": (add_maps, maps_figure, "feature maps and their kernels beside exp(q·k/√D)"),
    "state": (add_state, state_figure, "the state of a trained model over a text"),
    "losses": (add_losses, losses_figure, "training and validation losses of several runs"),
}


def make_parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND", parser_class=Parser)
    for name, (add_options, _, what) in KINDS.items():
        kind = kinds.add_parser(name, help=what, description=what, allow_abbrev=False)
        kind.add_argument("--out", required=True, help="the picture to write: .png, .pdf or .svg")
        add_options(kind)
    return parser


def main() -> None:
    options = vars(make_parser().parse_args())
    logging.set_verbosity(logging.ERROR)  # else orbax tells of how it opens every checkpoint
    out, figure = options.pop("out"), KINDS[options.pop("kind")][1]
    try:
        check_path(out)
        save(figure(**options), out)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(out)


if __name__ == "__main__":
    main()

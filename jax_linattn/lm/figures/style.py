"""What all figures share: size, colours and names, and how they are written.

Figures are made without pyplot, so that nothing here changes what a user's own matplotlib is set to.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib
from matplotlib.figure import Figure
from PIL import Image

from jax_linattn.checks import require

P = ParamSpec("P")
R = TypeVar("R")

WIDTH = 8.0  # inches; with DPI a little more than the 800 pixels that a README shows
DPI = 115
SUFFIXES = (".png", ".pdf", ".svg")

HEAT_MAP = "viridis"

# One colour a map in every figure; black is softmax attention and its kernel.
COLORS = {
    "softmax attention": "#222222",
    "elu_plus_one": "#0072b2",
    "softplus": "#56b4e9",
    "relu": "#e69f00",
    "relu_squared": "#d55e00",
    "exp": "#cc79a7",
    "softmax": "#8c6d46",
    "identity": "#999999",
    "taylor": "#009e73",
    "dpfp_1": "#b5a400",
    "dpfp_2": "#8a7d00",
    "dpfp_3": "#5f5600",
    "favor_plus": "#7b3fa0",
    "hedgehog": "#a3123f",
    "t2r": "#4b6cb7",
}
SPARE_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7b3fa0", "#e69f00", "#56b4e9", "#222222", "#8c6d46")
LABELS = {
    "elu_plus_one": "elu + 1",
    "relu_squared": "relu²",
    "taylor": "Taylor",
    "dpfp_1": "DPFP, ν = 1",
    "dpfp_2": "DPFP, ν = 2",
    "dpfp_3": "DPFP, ν = 3",
    "favor_plus": "FAVOR+",
    "hedgehog": "Hedgehog",
    "t2r": "T2R",
}

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Draws in this project's style, whatever matplotlib is set to, and leaves that as it is."""
    return matplotlib.rc_context(STYLE)(draw)


def label_of(name: str) -> str:
    return LABELS.get(name, name)


def check_path(path: str | Path) -> Path:
    """The path, if its name ends as that of a picture, else a ValueError."""
    require(Path(path).suffix in SUFFIXES, f"out must end in one of {', '.join(SUFFIXES)}, got {str(path)!r}")
    return Path(path)


def save(figure: Figure, path: str | Path) -> None:
    """Writes a figure, and makes the folder that it goes to.

    Raises:
      ValueError: if the name does not end as that of a picture.
    """
    path = check_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".png":
        figure.savefig(path)
        return
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    # 256 colours are as many as a colour map has, and make a file of a third of the size. Of the ways to choose them this
    # keeps heat maps smooth: no channel is off by more than a few levels of 255.
    image = Image.open(buffer).convert("RGB")
    image.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)

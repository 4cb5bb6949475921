"""The look of the course's figures: one palette that colour-blind readers can tell apart."""

from __future__ import annotations

from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

# Okabe and Ito (2008), "Color Universal Design".
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, LIGHT = "#8C8C8C", "#E8E8E8"

SEQUENTIAL = "cividis"  # for matrices whose values have an order
MARKERS = "os^Dv*"  # so that lines differ without their colours, too

_RC: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": "medium",
    "font.size": 10,
}


def new_figure(
    width: float = 7.0, height: float = 3.2, columns: int = 1, rows: int = 1, **subplots: Any
) -> tuple[Figure, Any]:
    """A figure in the course's style, and its axes as ``Figure.subplots`` returns them.

    Args:
        width, height: inches; at 100 dots an inch, 7 wide fits a notebook.
        columns, rows: the grid of axes.
        subplots: passed on to ``Figure.subplots``.
    """
    with rc_context(_RC):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots(rows, columns, **subplots)


def plain_log_ticks(ax: Any) -> None:
    """Label a logarithmic y axis with plain numbers, and more of them where it is short.

    Args:
        ax: its data is drawn already; the labels depend on its limits.
    """
    low, high = ax.get_ylim()
    plain = FuncFormatter(lambda y, _: f"{y:g}")
    ax.yaxis.set_major_formatter(plain)
    if high / low > 300:
        ax.yaxis.set_minor_formatter(NullFormatter())
        return
    marks = (2, 5) if high / low > 6 else (2, 3, 4, 5, 6, 8)
    ax.yaxis.set_minor_locator(LogLocator(subs=marks))
    ax.yaxis.set_minor_formatter(plain)

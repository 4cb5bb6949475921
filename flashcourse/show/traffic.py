"""Bytes side by side: what was predicted, metered and read from the hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from flashcourse.show.style import BLUE, GREEN, GREY, ORANGE, VERMILION, new_figure

SERIES_COLOURS = (GREY, BLUE, VERMILION, GREEN)


def draw_bytes(
    names: Sequence[str], series: Mapping[str, Sequence[float]], title: str, log: bool = False
) -> Figure:
    """Horizontal bars: for each name one bar of each series.

    Args:
        names: what moved the bytes, top to bottom.
        series: megabytes by the way they were found, in the order of ``names``.
        log: a logarithmic axis, for bars of very different length.
    """
    figure, axes = new_figure(7.0, 1.0 + 0.28 * len(names) * (len(series) + 0.6))
    ax: Any = axes
    height = 0.8 / len(series)
    for number, (label, megabytes) in enumerate(series.items()):
        places = [row + (number - (len(series) - 1) / 2) * height for row in range(len(names))]
        colour = SERIES_COLOURS[number % len(SERIES_COLOURS)]
        bars = ax.barh(places, megabytes, height * 0.9, label=label, color=colour)
        ax.bar_label(bars, [f"{value:,.4g}" for value in megabytes], padding=3, fontsize=8)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.margins(x=0.12)
    if log:
        ax.set_xscale("log")
        smallest = min(min(megabytes) for megabytes in series.values())
        ax.set_xlim(left=smallest / 10)  # a logarithmic bar has no natural start
    ax.set_xlabel("MB moved")
    ax.set_title(title)
    ax.legend(loc="best", fontsize=9)
    return figure


def draw_time_and_flops(
    names: Sequence[str], time_share: Sequence[float], flop_share: Sequence[float], title: str
) -> Figure:
    """Each operation's share of the FLOPs beside its share of the time, both adding up to 1."""
    figure, axes = new_figure(7.0, 1.0 + 0.6 * len(names))
    ax: Any = axes
    rows = range(len(names))
    for offset, shares, label, colour in (
        (-0.2, flop_share, "share of the FLOPs", ORANGE),
        (0.2, time_share, "share of the time", BLUE),
    ):
        bars = ax.barh([r + offset for r in rows], shares, 0.36, label=label, color=colour)
        ax.bar_label(bars, [f"{share:.1%}" for share in shares], padding=3, fontsize=8)
    ax.set_yticks(rows, names)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.1)
    ax.set_title(title)
    ax.legend(loc="best", fontsize=9)
    return figure

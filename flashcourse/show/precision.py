"""Pictures of rounding: how wrong a narrow number format is, and where it overflows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from flashcourse.show.style import BLUE, GREEN, GREY, MARKERS, ORANGE, VERMILION, new_figure

CURVE_COLOURS = (BLUE, VERMILION, GREEN, ORANGE)


def draw_errors(
    x: Sequence[float], errors: Mapping[str, Sequence[float]], xlabel: str, title: str = ""
) -> Figure:
    """Errors against a quantity, both on log scales; NaN and infinity are crosses at the top.

    Args:
        x: positive values of the quantity that was varied.
        errors: for each label, one error for each x.
        xlabel: the name of the quantity, with its unit if it has one.

    Raises:
        ValueError: a curve has not one error for each x.
    """
    figure, axis = new_figure(7.0, 3.4)
    finite = [
        value for curve in errors.values() for value in curve if np.isfinite(value) and value > 0
    ]
    top = max(finite, default=1.0) * 10
    floor = min(finite, default=1e-9) / 3
    for index, (label, curve) in enumerate(errors.items()):
        if len(curve) != len(x):
            raise ValueError(f"{label} has {len(curve)} errors for {len(x)} values of {xlabel}")
        values = np.asarray(curve, dtype=float)
        colour, marker = (group[index % len(group)] for group in (CURVE_COLOURS, MARKERS))
        good = np.isfinite(values)
        shown = np.where(values > 0, values, floor)
        xs = np.asarray(x, dtype=float)
        axis.plot(xs[good], shown[good], marker=marker, color=colour, label=label)
        if not good.all():
            axis.plot(xs[~good], np.full((~good).sum(), top), "x", color=colour, markersize=9)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel(xlabel)
    axis.set_ylabel("largest error")
    axis.set_title(title)
    if any(not np.isfinite(value) for curve in errors.values() for value in curve):
        axis.axhline(top, color=GREY, linewidth=0.6, linestyle=":")
        axis.annotate(
            "× NaN or infinity",
            (0.01, top),
            xycoords=("axes fraction", "data"),
            color=GREY,
            va="bottom",
        )
        axis.set_ylim(top=top * 10)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def draw_exp_ranges(limits: Mapping[str, float]) -> Figure:
    """The largest x whose exp(x) is still finite, one bar a number format.

    Args:
        limits: for each format's name, the largest finite number it holds.
    """
    figure, axis = new_figure(7.0, 0.45 * len(limits) + 0.9)
    names = list(limits)
    values = [float(np.log(limit)) for limit in limits.values()]
    axis.barh(names, values, color=[CURVE_COLOURS[i % 4] for i in range(len(names))], height=0.6)
    for row, value in enumerate(values):
        axis.text(value, row, f" {value:.1f}", va="center")
    axis.set_xlabel("largest x with a finite exp(x)")
    axis.set_xlim(0, max(values) * 1.12)
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)
    return figure

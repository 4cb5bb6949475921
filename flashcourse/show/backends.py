"""Pictures of benchmarks and of SDPA: speeds, crossovers, masks, what a wrong clock says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from flashcourse.show.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SEQUENTIAL,
    SKY,
    VERMILION,
    new_figure,
)

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY, BLACK, GREY)
MARKERS = "osD^vPX*<>"


@dataclass(frozen=True)
class Panel:
    """One panel of :func:`draw_benchmark`.

    Attributes:
        title: what its shapes have in common.
        series: for each name, the value at each length.
    """

    title: str
    series: Mapping[str, Mapping[float, float]]


def draw_benchmark(
    panels: Sequence[Panel], ylabel: str, ceiling: float | None = None,
    names: Sequence[str] = (), ceiling_label: str = "measured matrix product",
) -> Figure:  # fmt: skip
    """Speeds against the length, a panel for each family of shapes, one look for each name.

    Args:
        panels: at least one, at most a dozen.
        ylabel: what is drawn, with its unit.
        ceiling, ceiling_label: a dashed line, in the same unit, and its name.
        names: the order in which names get their look, so that several figures agree.

    Raises:
        ValueError: there is no panel.
    """
    if not panels:
        raise ValueError("nothing to draw: no panel has a value")
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = new_figure(4.2 * columns, 3.0 * rows + 0.8, columns, rows, squeeze=False)
    names = list(dict.fromkeys([*names, *(name for p in panels for name in p.series)]))
    looks = {name: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)])
             for i, name in enumerate(names)}  # fmt: skip
    handles: dict[str, Any] = {}
    for panel, ax in zip(panels, axes.flat, strict=False):
        for name, points in panel.series.items():
            colour, marker = looks[name]
            xs = sorted(points)
            (handles[name],) = ax.plot(
                xs, [points[x] for x in xs], color=colour, marker=marker, markersize=5
            )
        lengths = sorted({x for points in panel.series.values() for x in points})
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [f"{x:g}" for x in lengths], rotation=45)
        ax.minorticks_off()
        if ceiling is not None:
            handles[ceiling_label] = ax.axhline(ceiling, color=GREY, linestyle="--", linewidth=1)
        ax.set_ylim(bottom=0)
        ax.set_title(panel.title, fontsize=9)
        ax.set_ylabel(ylabel)
    for ax in list(axes.flat)[len(panels) :]:
        ax.set_visible(False)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False
    )
    return figure


def draw_relative(
    panels: Mapping[str, Mapping[str, Mapping[str, float]]], xlabel: str, reference: str
) -> Figure:
    """Bars: how many times as fast as the reference, a panel for each of a few kinds of work.

    Args:
        panels: for each title, for each name, the value of each group. A name that lacks a group
            has no bar there.
        xlabel: what is drawn.
        reference: the name whose values are 1; a line stands there.

    Raises:
        ValueError: there is no panel.
    """
    if not panels:
        raise ValueError("nothing to draw: no panel has a value")
    names = list(dict.fromkeys(name for values in panels.values() for name in values))
    groups = list(dict.fromkeys(g for v in panels.values() for bars in v.values() for g in bars))
    thick = 0.8 / len(groups)
    height = 0.42 * len(names) + 1.1
    figure, axes = new_figure(4.6 * len(panels), height, len(panels), sharey=True, squeeze=False)
    for (title, values), ax in zip(panels.items(), axes.flat, strict=True):
        for number, group in enumerate(groups):
            shift = (number - (len(groups) - 1) / 2) * thick
            there = [(place, values[name][group]) for place, name in enumerate(names)
                     if group in values.get(name, ())]  # fmt: skip
            ax.barh(
                [place + shift for place, _ in there], [value for _, value in there], thick,
                color=COLOURS[number], label=group,
            )  # fmt: skip
            for place, value in there:
                ax.annotate(
                    f" {value:.2f}", (value, place + shift), va="center", fontsize=8,
                    annotation_clip=False,
                )  # fmt: skip
        ax.axvline(1.0, color=BLACK, linestyle="--", linewidth=1)
        ax.set_yticks(range(len(names)), names)
        ax.set_title(title)
        ax.set_xlabel(xlabel)
    axes[0, 0].invert_yaxis()
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(groups), frameon=False)
    return figure


def draw_crossover(
    lengths: Sequence[int], times: Mapping[str, Sequence[float | None]], crossover: float | None,
    ylabel: str = "milliseconds",
) -> Figure:  # fmt: skip
    """Time against length, both logarithmic, with the length where the winner changes.

    Args:
        lengths: of the sequence.
        times: milliseconds of each implementation; None where it did not run.
        crossover: the length to mark; None, or the first length, if nothing crosses in the range.

    Raises:
        ValueError: a series has not one value for each length.
    """
    figure, axes = new_figure(7.0, 3.6)
    ax: Any = axes
    for number, (name, values) in enumerate(times.items()):
        if len(values) != len(lengths):
            raise ValueError(f"{name}: {len(values)} values for {len(lengths)} lengths")
        points = [(x, y) for x, y in zip(lengths, values, strict=True) if y is not None]
        ax.plot(
            [x for x, _ in points], [y for _, y in points], label=name,
            color=COLOURS[number % len(COLOURS)], marker=MARKERS[number % len(MARKERS)],
        )  # fmt: skip
    if crossover is not None and crossover > min(lengths):
        ax.axvline(crossover, color=BLACK, linestyle="--", linewidth=1)
        right = crossover**2 > min(lengths) * max(
            lengths
        )  # the label stands where the lines do not
        ax.annotate(
            f"crossover at {crossover:.0f}", (crossover, 0.96), xycoords=("data", "axes fraction"),
            xytext=(-5 if right else 5, 0), textcoords="offset points", va="top",
            ha="right" if right else "left",
        )  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(list(lengths), [str(length) for length in lengths])
    ax.minorticks_off()
    ax.set_xlabel("sequence length")
    ax.set_ylabel(ylabel)
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def crossover_length(
    lengths: Sequence[int], first: Sequence[float], second: Sequence[float]
) -> float | None:
    """From which length ``second`` stays the faster one; None if it never does.

    Between two measured lengths the ratio is interpolated on logarithmic axes. If ``second`` wins
    everywhere, this is the first length.
    """
    ratios = [math.log(a / b) for a, b in zip(first, second, strict=True)]  # > 0: second is faster
    if not ratios or ratios[-1] <= 0:
        return None
    last = len(ratios) - 1
    while last > 0 and ratios[last - 1] > 0:
        last -= 1
    if last == 0:
        return float(lengths[0])
    below, above = ratios[last - 1], ratios[last]
    share = -below / (above - below)
    low, high = math.log(lengths[last - 1]), math.log(lengths[last])
    return math.exp(low + share * (high - low))


def draw_masks(masks: Mapping[str, Any]) -> Figure:
    """Weights of queries (rows) on keys (columns), side by side on one colour scale.

    A weight of exactly 0, a pair that does not see each other, is left white.

    Args:
        masks: for each title, a 2-dimensional array of weights from 0 to 1.
    """
    figure, axes = new_figure(2.5 * len(masks) + 0.6, 2.7, columns=len(masks), squeeze=False)
    image: Any = None
    for (title, weights), ax in zip(masks.items(), axes.flat, strict=True):
        shown = np.ma.masked_equal(np.asarray(weights, dtype=float), 0.0)
        image = ax.imshow(shown, cmap=SEQUENTIAL, vmin=0, vmax=1, aspect="equal")
        ax.set_title(title, fontsize=9)
        ax.set_xlabel("key")
        ax.set_ylabel("query")
        ax.set_xticks(range(np.asarray(weights).shape[1]))
        ax.set_yticks(range(np.asarray(weights).shape[0]))
    figure.colorbar(image, ax=axes, shrink=0.8, label="weight")
    return figure


def draw_claims(claims: Mapping[str, float], right: str, unit: str) -> Figure:
    """What several ways to measure say of one thing, as bars; the right one stands out.

    Args:
        claims: the value of each way.
        right: the name of the way to trust.
        unit: of the values.
    """
    figure, axes = new_figure(7.0, 0.5 * len(claims) + 1.0)
    ax: Any = axes
    names = list(claims)
    colours = [BLUE if name == right else ORANGE for name in names]
    ax.barh(names, [claims[name] for name in names], color=colours)
    ax.axvline(claims[right], color=BLACK, linestyle="--", linewidth=1)
    low, high = min(claims.values()), max(claims.values())
    if high > 20 * low > 0:
        ax.set_xscale("log")
        ax.set_xlim(left=low / 2)
        unit += " (logarithmic)"
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    for place, name in enumerate(names):
        ax.annotate(
            f" {claims[name]:.3g}", (claims[name], place), va="center", annotation_clip=False
        )
    return figure

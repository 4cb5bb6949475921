"""Pictures of lesson 10: what of a faster attention is left at each level."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from flashcourse.show.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    LIGHT,
    MARKERS,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    new_figure,
    plain_log_ticks,
)

COLOURS = (VERMILION, ORANGE, BLUE, GREEN, GREY, PURPLE)
Rows = Sequence[Mapping[str, Any]]  # keys "n", "phase", "way" and the value; None: it did not run


def draw_errors(errors: Mapping[str, float], limit: float | None, title: str) -> Figure:
    """Errors on a logarithmic axis, one row a name; an error of 0 has no bar and says so.

    Args:
        errors: the largest difference from the reference, by name.
        limit: what is allowed, drawn as a line.
    """
    figure, axes = new_figure(7.2, 0.9 + 0.4 * len(errors))
    ax: Any = axes
    known = [e for e in [*errors.values(), limit or 0.0] if e > 0] or [1.0]
    low, high = min(known) / 4, max(known) * 20
    for row, error in enumerate(errors.values()):
        if error > 0:
            ax.plot([low, error], [row, row], color=LIGHT, lw=6, solid_capstyle="butt")
            ax.plot([error], [row], "o", color=BLUE, ms=8)
        ax.text(max(error, low) * 1.4, row, f"{error:.1e}" if error else "0", va="center")
    if limit is not None:
        ax.axvline(limit, color=VERMILION, ls="--", lw=1, label="allowed by the accuracy rule")
        figure.legend(loc="outside lower center")
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    ax.set_yticks(range(len(errors)), list(errors))
    ax.set_ylim(len(errors) - 0.5, -0.5)
    ax.set(title=title, xlabel="largest absolute difference")
    return figure


def draw_quality(differences: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """Differences in loss, logarithmic: one row a text, one mark a way.

    Args:
        differences: by way, then by text; not negative. 0 is drawn at the left edge.
    """
    figure, axes = new_figure(7.4, 3.9)
    ax: Any = axes
    texts = list(dict.fromkeys(text for values in differences.values() for text in values))
    known = [d for values in differences.values() for d in values.values() if d > 0] or [1.0]
    low = min(known) / 3
    for number, (way, values) in enumerate(differences.items()):
        places = [texts.index(text) + (number - len(differences) / 2) * 0.12 for text in values]
        ax.plot(
            [max(d, low) for d in values.values()], places, MARKERS[number % len(MARKERS)],
            color=COLOURS[number % len(COLOURS)], label=way,
        )  # fmt: skip
    for row in range(len(texts)):
        ax.axhline(row, color=LIGHT, lw=0.8, zorder=0)
    ax.set_xscale("log")
    ax.set_yticks(range(len(texts)), texts)
    ax.set_ylim(len(texts) - 0.4, -0.6)
    ax.set(title=title, xlabel="difference in loss, nats a token (left edge: none)")
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.18), ncols=3)
    return figure


def draw_phases(rows: Rows, value: str, ylabel: str, title: str) -> Figure:
    """A panel for each phase: the value against the length, a line for each way.

    Args:
        rows: one a length, phase and way.
        value: the key to draw; where it is None, the line ends with a cross.
    """
    phases = list(dict.fromkeys(row["phase"] for row in rows if row.get(value) is not None))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    if not phases:
        raise ValueError(f"no row has a value of {value!r}")
    columns = min(2, len(phases))
    height = 2.7 * -(-len(phases) // columns) + 0.7
    figure, axes = new_figure(
        7.6, height, columns=columns, rows=-(-len(phases) // columns), squeeze=False
    )
    handles: dict[str, Any] = {}
    for phase, ax in zip(phases, axes.flat, strict=False):
        lengths = sorted({row["n"] for row in rows})
        for number, way in enumerate(ways):
            found = {
                row["n"]: row.get(value)
                for row in rows
                if row["phase"] == phase and row["way"] == way
            }
            points = [(n, y) for n, y in sorted(found.items()) if y is not None]
            if not points:
                continue
            colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
            (handles[way],) = ax.plot(*zip(*points, strict=True), color=colour, marker=marker, ms=4)
            if any(y is None for y in found.values()):
                ax.plot(*points[-1], "x", color=colour, ms=11, mew=2)
                handles["× the next length ran out of memory"] = ax.plot([], [], "x", color=BLACK)[
                    0
                ]
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=30)
        ax.xaxis.set_minor_locator(NullLocator())
        plain_log_ticks(ax)
        ax.set_title(phase, fontsize=10)
        ax.set_ylabel(ylabel)
    for ax in axes[-1]:
        ax.set_xlabel("tokens")
    for ax in list(axes.flat)[len(phases) :]:
        ax.set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    return figure


def draw_shares(shares: Mapping[str, Mapping[str, Mapping[int, float]]], title: str) -> Figure:
    """The share of attention against the length: a panel a way, a line a phase.

    Args:
        shares: by way, by phase, by length; 0 to 1.
    """
    figure, axes = new_figure(7.6, 3.2, columns=len(shares), sharey=True, squeeze=False)
    for (way, phases), ax in zip(shares.items(), axes.flat, strict=True):
        for number, (phase, points) in enumerate(phases.items()):
            xs = sorted(points)
            ax.plot(
                xs, [points[n] * 100 for n in xs], marker=MARKERS[number], ms=5,
                color=COLOURS[number], label=phase,
            )  # fmt: skip
            ax.set_xticks(xs, [f"{n:,}" for n in xs], rotation=30)
        ax.set_xscale("log", base=2)
        ax.minorticks_off()
        xs = sorted({n for points in phases.values() for n in points})
        ax.set_xticks(xs, [f"{n:,}" for n in xs], rotation=30)
        ax.set(title=way, xlabel="tokens", ylim=(0, 100))
    axes[0, 0].set_ylabel("share of attention, %")
    axes[0, 0].legend(loc="upper left", fontsize=8)
    figure.suptitle(title, fontsize=11)
    return figure


def draw_amdahl(
    speedup: Callable[[float, float], float], share: float, factor: float,
    measured: Mapping[str, tuple[float, float]] | None = None,
) -> Figure:  # fmt: skip
    """The whole's speed-up against the share of the part that got faster.

    Args:
        speedup: (share, factor) to the speed-up of the whole.
        share, factor: the point that is marked.
        measured: (share, speed-up) by name, drawn beside the curves.
    """
    figure, axes = new_figure(7.0, 3.6)
    ax: Any = axes
    xs = np.linspace(0, 0.99, 200)
    ax.plot(xs * 100, [speedup(x, float("inf")) for x in xs], color=GREY, ls=":",
            label="attention free")  # fmt: skip
    ax.plot(xs * 100, [speedup(x, factor) for x in xs], color=BLUE, label=f"{factor:g}× faster")
    now = speedup(share, factor)
    ax.plot([share * 100], [now], "o", color=VERMILION, ms=9)
    for number, (name, (x, y)) in enumerate((measured or {}).items()):
        ax.plot([x * 100], [y], MARKERS[number % len(MARKERS)], color=BLACK, label=name)
    ax.set_yscale("log", base=2)
    ax.set_ylim(0.9, max(16.0, 1.3 * now))
    ax.set_yticks([1, 2, 4, 8, 16], ["1×", "2×", "4×", "8×", "16×"])
    ax.set(
        xlabel="share of attention in the time before, %", ylabel="the whole",
        title=f"attention {factor:g}× faster, {share:.0%} of the time: the whole {now:.2f}×, "
        f"at most {speedup(share, float('inf')):.2f}×",
    )  # fmt: skip
    ax.legend(loc="upper left")
    return figure


def draw_predicted(
    lengths: Sequence[int], predicted: Mapping[str, Sequence[float | None]],
    measured: Mapping[str, Sequence[float | None]], title: str,
) -> Figure:  # fmt: skip
    """Speed-ups of the whole, predicted (dashed) and measured (marks), by way."""
    figure, axes = new_figure(7.2, 3.4)
    ax: Any = axes
    for number, way in enumerate(measured):
        colour = COLOURS[(number + 1) % len(COLOURS)]
        for values, style in ((predicted[way], "--"), (measured[way], MARKERS[number])):
            points = [(x, y) for x, y in zip(lengths, values, strict=True) if y is not None]
            kind = "predicted" if style == "--" else "measured"
            ax.plot(
                [x for x, _ in points], [y for _, y in points], style, color=colour,
                label=f"{way}, {kind}",
            )  # fmt: skip
    ax.axhline(1, color=GREY, lw=0.8)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(list(lengths), [f"{n:,}" for n in lengths])
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}×")
    ax.minorticks_off()
    ax.set(title=title, xlabel="tokens", ylabel="the whole, faster by")
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.18), ncols=2)
    return figure


def draw_survival(gains: Mapping[str, float], title: str) -> Figure:
    """How many times faster, level by level, on one axis.

    Args:
        gains: by the name of the level, from the kernel to the service.
    """
    figure, axes = new_figure(8.0, 0.9 + 0.45 * len(gains))
    ax: Any = axes
    for row, gain in enumerate(gains.values()):
        ax.barh(row, gain - 1, left=1, color=SKY if row else BLUE, height=0.65)
        ax.text(max(gain, 1), row, f" {gain:.2f}×", va="center", fontsize=9)
    ax.axvline(1, color=BLACK, lw=1)
    ax.set_yticks(range(len(gains)), list(gains), fontsize=9)
    ax.set_ylim(len(gains) - 0.5, -0.5)
    ax.set_xscale("log", base=2)
    top = max([2.0, *gains.values()])
    ax.set_xlim(min([0.8, *gains.values()]) * 0.95, top * top**0.15 * 1.1)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}×")
    ax.minorticks_off()
    ax.set(title=title)
    return figure

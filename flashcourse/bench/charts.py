"""The charts of a report: a summary, and one a direction, a panel for each family of shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashcourse.bench.grids import DIRECTIONS, Direction
from flashcourse.bench.kept import kept_ratios
from flashcourse.bench.report import Report, geometric_mean
from flashcourse.files import write_whole
from flashcourse.show.backends import Panel, draw_benchmark, draw_relative
from flashcourse.show.figure import png

MOST_PANELS = 9
REFERENCE = "SDPA FLASH"  # what most people use
LONG = 2048  # below, the time to launch counts as well


def panels(report: Report, direction: Direction) -> list[Panel]:
    """A :class:`~flashcourse.show.backends.Panel` for each family: shapes that differ in length.

    The values are TFLOP/s, or TB/s of q, k and v where every shape has one query: decoding reads.
    """
    families: dict[str, dict[str, dict[float, float]]] = {}
    reading = decoding(report)
    for shape, outcomes in report.rows:
        if direction not in shape.directions:
            continue
        series = families.setdefault(shape.family, {})
        for o in outcomes:
            if direction in o.times:
                speed = report.speed(shape, o, direction)
                if reading:
                    speed = shape.bytes_read / o.times[direction] / 1e9
                series.setdefault(o.candidate, {})[float(shape.seq_k)] = speed
    return [Panel(name, series) for name, series in families.items() if series]


def decoding(report: Report) -> bool:
    """True if every shape has one query."""
    return all(shape.seq_q == 1 for shape, _ in report.rows)


def relative(results: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """How many times as fast as :data:`REFERENCE`: by direction, candidate and head_dim.

    Geometric means over the shapes with at least :data:`LONG` keys that both were timed on, the
    fastest candidate first.

    Args:
        results: a report's JSON.
    """
    names = list(dict.fromkeys(c["name"] for row in results["rows"] for c in row["candidates"]))
    found: dict[str, dict[str, dict[str, float]]] = {}
    for direction in ("forward", "backward"):
        for name in names:
            for head_dim in sorted({row["head_dim"] for row in results["rows"]}):
                ratios = kept_ratios(
                    results, REFERENCE, direction, ours=name, head_dim=head_dim, at_least=LONG
                )
                if len(ratios) > 1:
                    bars = found.setdefault(direction, {}).setdefault(name, {})
                    bars[f"head_dim {head_dim}"] = geometric_mean(ratios)
    return {
        direction: dict(sorted(bars.items(), key=lambda entry: -max(entry[1].values())))
        for direction, bars in found.items()
    }


def write_summary(results: dict[str, Any], path: Path) -> bool:
    """The chart of :func:`relative` as PNG; False if too little was measured for one."""
    shown = relative(results)
    if any(len(bars) > 1 for bars in shown.values()):
        write_whole({path: png(draw_relative(shown, f"times as fast as {REFERENCE}", REFERENCE))})
        return True
    return False


def write_charts(report: Report, stem: Path) -> list[Path]:
    """PNG files beside ``stem``, named after what they show; returns those that were written."""
    written = []
    summary = stem.with_name(f"{stem.name}-summary.png")
    if write_summary(report.to_json(), summary):
        written.append(summary)
    reading, top = decoding(report), report.ceilings
    unit, what = ("TB/s", "measured copy") if reading else ("TFLOP/s", "measured matrix product")
    ceiling = None if top is None else (top.bandwidth if reading else top.peak_flops) / 1e12
    names = list(
        dict.fromkeys(o.candidate for _, outcomes in report.rows for o in outcomes if o.times)
    )
    for direction in DIRECTIONS:
        shown = panels(report, direction)
        for part, start in enumerate(range(0, len(shown), MOST_PANELS), 1):
            figure = draw_benchmark(
                shown[start : start + MOST_PANELS],
                ylabel=f"{direction}, {unit}", ceiling=ceiling, ceiling_label=what, names=names,
            )  # fmt: skip
            number = f"-{part}" if len(shown) > MOST_PANELS else ""
            path = stem.with_name(f"{stem.name}-{direction}{number}.png")
            write_whole({path: png(figure)})
            written.append(path)
    return written

"""The charts of a report: one a direction, a panel for each family of shapes."""

from __future__ import annotations

from pathlib import Path

from flashcourse.bench.grids import DIRECTIONS, Direction
from flashcourse.bench.report import Report, write_whole
from flashcourse.show.backends import Panel, draw_benchmark
from flashcourse.show.figure import png

MOST_PANELS = 9


def panels(report: Report, direction: Direction) -> list[Panel]:
    """A :class:`~flashcourse.show.backends.Panel` for each family with more than one length.

    Shapes that stand alone (a window, a grouped call) share one panel of bars.
    """
    families: dict[str, dict[str, dict[float, float]]] = {}
    labels: dict[str, list[str]] = {}
    for shape, outcomes in report.rows:
        if direction not in shape.directions:
            continue
        series = families.setdefault(shape.family, {})
        labels.setdefault(shape.family, []).append(str(shape))
        for o in outcomes:
            if direction in o.times:
                points = series.setdefault(o.candidate, {})
                points[float(shape.seq_k)] = report.speed(shape, o, direction)
    return [Panel(name, series) for name, series in families.items() if series]


def write_charts(report: Report, stem: Path) -> list[Path]:
    """PNG files beside ``stem``, named after the direction; returns those that were written."""
    written = []
    ceiling = report.ceilings.peak_flops / 1e12 if report.ceilings else None
    for direction in DIRECTIONS:
        shown = panels(report, direction)
        for part, start in enumerate(range(0, len(shown), MOST_PANELS), 1):
            some = shown[start : start + MOST_PANELS]
            figure = draw_benchmark(some, ylabel=f"{direction}, TFLOP/s", ceiling=ceiling)
            number = f"-{part}" if len(shown) > MOST_PANELS else ""
            path = stem.with_name(f"{stem.name}-{direction}{number}.png")
            write_whole(path, png(figure))
            written.append(path)
    return written

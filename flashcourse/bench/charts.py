"""The charts of a report: one a direction, a panel for each family of shapes."""

from __future__ import annotations

from pathlib import Path

from flashcourse.bench.grids import DIRECTIONS, Direction
from flashcourse.bench.report import Report
from flashcourse.files import write_whole
from flashcourse.show.backends import Panel, draw_benchmark
from flashcourse.show.figure import png

MOST_PANELS = 9


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


def write_charts(report: Report, stem: Path) -> list[Path]:
    """PNG files beside ``stem``, named after the direction; returns those that were written."""
    written = []
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

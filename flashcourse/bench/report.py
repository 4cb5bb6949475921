"""What was measured, as a table, as JSON and as sentences. Ratios come from one run."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from flashcourse.bench.candidates import OURS
from flashcourse.bench.grids import Direction, Shape
from flashcourse.bench.race import Outcome
from flashcourse.files import write_whole
from flashcourse.measure.ceilings import Ceilings
from flashcourse.measure.recorded import machine

FORMAT = 1


@dataclass
class Report:
    """A run of the benchmark.

    Attributes:
        command: what was typed.
        ceilings: of this machine, measured at the beginning of the run.
        rows: each shape with the outcomes of its candidates.
        seconds: how long the run took.
        left: shapes that were not begun, because the time was over.
    """

    command: str
    ceilings: Ceilings | None
    rows: list[tuple[Shape, list[Outcome]]] = field(default_factory=list)
    seconds: float = 0.0
    left: list[str] = field(default_factory=list)

    def speed(self, shape: Shape, outcome: Outcome, direction: Direction) -> float:
        """TFLOP/s of the matrix products."""
        return shape.flops(direction) / outcome.times[direction] / 1e9

    def ratios(self, other: str, direction: Direction, at_least: int = 0) -> list[float]:
        """How many times as fast as ``other`` the course's kernel is, on each shape with both.

        Args:
            at_least: leave out shapes with fewer keys.
        """
        found = []
        for shape, outcomes in self.rows:
            by_name = {o.candidate: o for o in outcomes if direction in o.times}
            if OURS in by_name and other in by_name and shape.seq_k >= at_least:
                found.append(by_name[other].times[direction] / by_name[OURS].times[direction])
        return found

    @property
    def mistakes(self) -> list[str]:
        """Results that were wrong, in words: nothing of them was timed."""
        return [
            f"{shape}: {o.candidate} is wrong: {o.reason}"
            for shape, outcomes in self.rows
            for o in outcomes
            if o.status == "wrong"
        ]

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain numbers and strings."""
        cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
        return {
            "format": FORMAT,
            "command": self.command,
            "date": datetime.date.today().isoformat(),
            "seconds": round(self.seconds, 1),
            "left": self.left,
            "machine": machine() | {"cuda": str(torch.version.cuda), "cudnn": str(cudnn)},
            "ceilings": None if self.ceilings is None else {
                "bandwidth_bytes_s": self.ceilings.bandwidth,
                "matmul_flops_s": self.ceilings.peak_flops,
                "matmul_dtype": self.ceilings.dtype,
            },
            "rows": [
                {
                    "shape": str(shape),
                    **{k: v for k, v in dataclasses.asdict(shape).items() if k != "flex"},
                    "candidates": [self._outcome(shape, o) for o in outcomes],
                }
                for shape, outcomes in self.rows
            ],
        }  # fmt: skip

    def _outcome(self, shape: Shape, outcome: Outcome) -> dict[str, Any]:
        entry: dict[str, Any] = {"name": outcome.candidate, "status": outcome.status}
        if outcome.reason:
            entry["reason"] = outcome.reason
        for direction, timing in outcome.times.items():
            entry[direction] = {
                "ms": round(float(timing), 5),
                "low_ms": round(timing.low, 5),
                "high_ms": round(timing.high, 5),
                "runs": len(timing.times),
                "tflops": round(self.speed(shape, outcome, direction), 2),
            }
            if direction in outcome.host:
                entry[direction]["host_us"] = round(outcome.host[direction], 1)
        return entry


def table(report: Report, direction: Direction) -> Table:
    """TFLOP/s of each candidate on each shape; what is not a number has its reason below."""
    names = list(dict.fromkeys(
        o.candidate for _, outcomes in report.rows for o in outcomes if direction in o.times
    ))  # fmt: skip
    title = f"{direction}: TFLOP/s, and times as fast as {OURS}"
    shown = Table(title=title, title_justify="left")
    shown.add_column("shape", no_wrap=True)
    for name in names:
        shown.add_column(name, justify="right")
    for shape, outcomes in report.rows:
        if direction not in shape.directions:
            continue
        by_name = {o.candidate: o for o in outcomes}
        ours = by_name.get(OURS)
        cells = [_cell(report, shape, by_name.get(name), ours, direction) for name in names]
        shown.add_row(str(shape), *cells)
    return shown


def _cell(
    report: Report, shape: Shape, outcome: Outcome | None, ours: Outcome | None,
    direction: Direction,
) -> str:  # fmt: skip
    if outcome is None:
        return ""
    if direction not in outcome.times:
        return {"out of memory": "memory", "left out": "–"}.get(outcome.status, outcome.status)
    speed = report.speed(shape, outcome, direction)
    text = f"{speed:.0f}" if speed >= 10 else f"{speed:.2g}"
    if ours is not None and outcome is not ours and direction in ours.times:
        text += f" ({ours.times[direction] / outcome.times[direction]:.2f}×)"
    return text


def reasons(report: Report) -> list[str]:
    """Why a candidate has no number: one line a reason, with the number of shapes."""
    found: dict[tuple[str, str, str], list[Shape]] = {}
    for shape, outcomes in report.rows:
        for o in outcomes:
            if o.status != "timed":
                found.setdefault((o.candidate, o.status, o.reason), []).append(shape)
    lines = []
    for (name, status, reason), shapes in found.items():
        where = "all shapes" if len(shapes) == len(report.rows) else (
            str(shapes[0]) if len(shapes) == 1 else f"{len(shapes)} shapes, first {shapes[0]}"
        )  # fmt: skip
        lines.append(f"{name}, {where}: {status}: {reason}")
    return lines


def summary(report: Report) -> list[str]:
    """Ratios of the course's kernel to each competitor, and its share of the ceilings."""
    lines = []
    names = dict.fromkeys(o.candidate for _, outcomes in report.rows for o in outcomes)
    for other in names:
        for direction in ("forward", "backward", "both"):
            ratios = report.ratios(other, direction)
            if other == OURS or not ratios:
                continue
            lines.append(
                f"{OURS} / {other}, {direction}: geometric mean {geometric_mean(ratios):.2f}, "
                f"lowest {min(ratios):.2f}, highest {max(ratios):.2f} of {len(ratios)} shapes"
            )
    return [*lines, *_host_times(report), *_shares(report)]


def _host_times(report: Report) -> Iterable[str]:
    """What a call costs the host; the times above do not contain it."""
    for direction in ("forward", "backward", "both"):
        found: dict[str, list[float]] = {}
        for _, outcomes in report.rows:
            for o in outcomes:
                if direction in o.host:
                    found.setdefault(o.candidate, []).append(o.host[direction])
        if found:
            told = ", ".join(f"{name} {statistics.median(us):.0f} µs" for name, us in found.items())
            yield f"until a call returns, {direction} (host, median over the shapes): {told}"


def _shares(report: Report) -> Iterable[str]:
    if report.ceilings is None:
        return
    top = report.ceilings
    yield (
        f"measured ceilings: {top.peak_flops / 1e12:.0f} TFLOP/s ({top.dtype} matrix product), "
        f"{top.bandwidth / 1e12:.2f} TB/s (device copy)"
    )
    for direction in ("forward", "backward"):
        best = [
            (report.speed(shape, o, direction) * 1e12 / top.peak_flops, o.candidate, shape)
            for shape, outcomes in report.rows
            for o in outcomes
            if direction in o.times and shape.seq_q > 1
        ]
        if best:
            share, name, shape = max(best, key=lambda entry: entry[0])
            yield f"nearest to the matrix product, {direction}: {name} with {share:.0%}, {shape}"
    reads = [
        (shape.bytes_read / (o.times["forward"] * 1e-3) / top.bandwidth, o.candidate, shape)
        for shape, outcomes in report.rows
        for o in outcomes
        if "forward" in o.times and shape.seq_q == 1
    ]
    if reads:
        share, name, shape = max(reads, key=lambda entry: entry[0])
        yield f"nearest to the copy, decoding: {name} with {share:.0%}, {shape}"


def geometric_mean(values: list[float]) -> float:
    """The mean of ratios that treats 2 and 1/2 alike.

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("a geometric mean needs at least one value, got none")
    return math.exp(statistics.fmean(map(math.log, values)))


def write_json(report: Report, path: Path) -> None:
    """The whole report as JSON. A run that is stopped leaves the file of the run before."""
    text = json.dumps(report.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
    write_whole({path: text + "\n"})

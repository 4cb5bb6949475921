"""`python -m flashcourse bench`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from flashcourse.bench.candidates import Candidate
    from flashcourse.bench.grids import Shape
    from flashcourse.bench.report import Report

GRID_HELP = "quick, paper, decode, varlen or window"
ROUNDS, WIDE = 3, 200
NO_GPU = (
    "There is no GPU here, so Triton's kernels run in its interpreter: one program after the "
    "other, in Python. Its times say nothing about the kernels, so none are printed. Run this on "
    "a GPU; the course's own results are shown in lesson 06, and what a CPU can compare (SDPA's "
    "two paths there) is timed in that lesson too."
)


def bench(
    grid: Annotated[
        str | None, typer.Option(help=f"A named set of shapes: {GRID_HELP}. Default: quick.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="A shape instead, such as B4,H32,D128,N4096,causal,bf16. Repeatable."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Candidates whose name contains this. Repeatable. Default: all."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the JSON and the charts. Default: none are written."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each candidate.")] = ROUNDS,
    tutorial: Annotated[
        Path | None,
        typer.Option(help="Triton's 06-fused-attention.py, to measure it too.", exists=True),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0, help="Begin no shape after this time; the rest is left out by name."),
    ] = None,
    tune: Annotated[
        bool, typer.Option(help="Instead, look for the fastest tiles of the course's kernels.")
    ] = False,
    tune_length: Annotated[
        int, typer.Option(min=1, help="At this length; 512 for the tiles where keys are few.")
    ] = 4096,
) -> None:
    """Compare attention kernels: correctness first, then time, in turns.

    Each candidate is checked on the very tensors it is timed on. Times are medians; only ratios
    from one run mean something. A backend that refuses and a shape that does not fit are rows with
    their reason. Exit code 1: a result was wrong. 2: nothing can be measured here.
    """
    from rich.console import Console

    from flashcourse.bench.grids import GRIDS, parse_shape
    from flashcourse.runtime import has_gpu

    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console = Console(soft_wrap=True, width=WIDE)  # a file can take the whole table
    if grid is not None and grid not in GRIDS:
        raise typer.BadParameter(f"{grid!r} is not a grid; there are {', '.join(GRIDS)}")
    if grid is not None and shape:
        raise typer.BadParameter("give --grid or --shape, not both")
    try:
        shapes = [parse_shape(text) for text in shape] if shape else GRIDS[grid or "quick"]()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    name = "shapes" if shape else (grid or "quick")
    from flashcourse.bench.candidates import all_candidates

    candidates = [
        c for c in all_candidates(tutorial)
        if not only or any(word.lower() in c.name.lower() for word in only)
    ]  # fmt: skip
    if not candidates:
        known = ", ".join(c.name for c in all_candidates())
        raise typer.BadParameter(f"no candidate matches {only}; there are: {known}")
    if not has_gpu():
        console.print(NO_GPU)
        raise typer.Exit(2)
    if tune:
        from flashcourse.bench.tune import tune as find_tiles

        find_tiles(tune_length)
        return

    from flashcourse.bench import charts, report
    from flashcourse.measure.recorded import record

    command = _typed(grid, shape, only, rounds, out, tutorial, minutes)

    def keep(partial: report.Report) -> None:
        """After every shape: a run that is cut off leaves what it has measured."""
        record(f"bench_{name}", partial.to_json(), made_by=command)
        if out is not None:
            report.write_json(partial, out / f"{name}.json")

    result = measure(shapes, candidates, command, rounds, console, minutes=minutes, keep=keep)
    for direction in ("forward", "backward", "both"):
        if any(direction in s.directions for s in shapes):
            console.print(report.table(result, direction))
    for line in [*report.reasons(result), *report.summary(result)]:
        console.print(line, markup=False, highlight=False)
    console.print(f"{len(result.rows)} shapes in {result.seconds:.0f} s")
    if result.left:
        console.print(f"not begun within {minutes:g} minutes: {'; '.join(result.left)}")
    if out is not None:
        written = [f"{name}.json", *(p.name for p in charts.write_charts(result, out / name))]
        console.print(f"written: {', '.join(written)}")
    for mistake in result.mistakes:
        console.print(mistake, style="bold red", markup=False)
    if result.mistakes:
        raise typer.Exit(1)


def _typed(
    grid: str | None, shapes: list[str] | None, only: list[str] | None, rounds: int,
    out: Path | None, tutorial: Path | None, minutes: float | None = None,
) -> str:  # fmt: skip
    """The command that makes this run, without the folders of one machine."""
    words = ["python -m flashcourse bench"]
    words += [f"--grid {grid or 'quick'}"] if not shapes else [f"--shape {s}" for s in shapes]
    words += [f"--only '{word}'" if " " in word else f"--only {word}" for word in only or ()]
    words += [f"--rounds {rounds}"] if rounds != ROUNDS else []
    words += [f"--minutes {minutes:g}"] if minutes is not None else []
    words += [f"--out {out.name}"] if out is not None else []
    words += [f"--tutorial {tutorial.name}"] if tutorial is not None else []
    return " ".join(words)


def measure(
    shapes: list[Shape], candidates: list[Candidate], command: str, rounds: int, console: Console,
    device: str = "cuda", minutes: float | None = None,
    keep: Callable[[Report], None] = lambda report: None,
) -> Report:  # fmt: skip
    """Race the candidates on every shape, with a progress bar; returns the Report.

    Args:
        minutes: begin no shape after so long; None: no limit.
        keep: called with the report after every shape.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    from flashcourse.bench.race import race
    from flashcourse.bench.report import Report
    from flashcourse.measure.ceilings import measured_ceilings

    started = time.perf_counter()
    result = Report(command, measured_ceilings() if device == "cuda" else None)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Elapsed())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("checking and timing", total=len(shapes))
        result.left = [str(shape) for shape in shapes]
        for shape in shapes:
            if minutes is not None and time.perf_counter() - started > 60 * minutes:
                break
            progress.update(task, description=str(shape))
            result.rows.append((shape, race(shape, candidates, device, rounds)))
            result.left = [str(s) for s in shapes[len(result.rows) :]]
            result.seconds = time.perf_counter() - started
            result.rows.sort(key=lambda row: (row[0].family, row[0].seq_k))
            keep(result)
            progress.advance(task)
    return result

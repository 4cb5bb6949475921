"""The command `grade`: marks for one notebook, a folder or an archive of hundreds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

out = Console(highlight=False, soft_wrap=True)
err = Console(highlight=False, soft_wrap=True, stderr=True)
INTERRUPTED = 130  # exit status, as a shell gives it


def grade(
    submissions: Annotated[
        list[Path], typer.Argument(help="Notebooks, folders of them, or zip and tar archives.")
    ],
    folder: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where the reports go.")
    ] = Path("grades"),
    lab: Annotated[
        str, typer.Option(help="The lab that was asked for, such as lab1_attention.")
    ] = "",
    seed: Annotated[
        int | None, typer.Option(min=0, help="Fixes the inputs; by default nobody can know them.")
    ] = None,
    workers: Annotated[
        int, typer.Option(min=0, help="Submissions at once; 0: one for each GPU, or one.")
    ] = 0,
    sandbox: Annotated[
        str,
        typer.Option(help="auto, bwrap, landlock, none, or a command with {command} and {folder}."),
    ] = "auto",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one question.")] = 120.0,
    memory: Annotated[float, typer.Option(min=0.5, help="GiB for one submission.")] = 4.0,
    document: Annotated[
        bool, typer.Option(help="Also run each notebook from top to bottom with nbval.")
    ] = True,
    again: Annotated[bool, typer.Option("--again", help="Mark what is marked already.")] = False,
    labs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The labs as given out; by default labs/.")
    ] = None,
) -> None:
    """Grade labs: every answer runs shut in, in a process that knows nothing of the marks."""
    from flashcourse.files import LABS, CourseError, course_root
    from flashcourse.grading.batch import Batch, BatchError
    from flashcourse.grading.limits import Limits, SandboxError, choose_sandbox
    from flashcourse.grading.marking import Settings
    from flashcourse.grading.reports import write_reports
    from flashcourse.grading.submissions import NoSuchSubmission, collect

    try:
        released = labs or course_root() / LABS
        shut_in = choose_sandbox(sandbox)
        limits = Limits(seconds=timeout, document_seconds=5 * timeout, memory=int(memory * 2**30))
        settings = Settings(-1 if seed is None else seed, shut_in, limits, document)
        found = collect(submissions)
        if not found:
            raise BatchError("there is nothing to grade in what was named")
        batch = Batch(folder, released, settings, lab or None, workers or _gpus(), again)
        out.print(f"{len(found)} submissions; isolation: {shut_in.describe()}", markup=False)
        report = _with_bar(batch, found)
        write_reports(folder, report)
    except (CourseError, BatchError, SandboxError, NoSuchSubmission, OSError) as error:
        err.print(str(error), markup=False, style="red")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        err.print("interrupted; the same command goes on where it stopped", markup=False)
        raise typer.Exit(INTERRUPTED) from None
    _show(report)
    out.print(f"reports in {folder}", markup=False)


def _gpus() -> int:
    import torch

    return max(1, torch.cuda.device_count())


def _with_bar(batch: Any, found: list[Any]) -> dict[str, Any]:
    columns = [TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()]
    with Progress(*columns, TimeElapsedColumn(), console=out, transient=True) as bar:
        task = bar.add_task("", total=len(found))

        def progress(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total, description=text[-60:])

        return batch.run(found, progress)


def _show(report: dict[str, Any]) -> None:
    """The marks at a glance; one submission with all that was found."""
    results = report["submissions"]
    if len(results) == 1:
        from flashcourse.grading.reports import gradescope

        told = gradescope(results[0])
        for test in told["tests"]:
            out.print(f"{test['name']}: {test['output']}\n", markup=False)
        if told["output"]:
            out.print(told["output"], markup=False)
    table = Table("name", "lab", "points", "mark again", "remark")
    for result in results:
        points = f"{result['points']:g} / {result['max_points']:g}" if result["outcomes"] else "–"
        again, remark = ", ".join(result["mark_again"]), result["problem"]
        table.add_row(*map(_literal, (result["name"], result["lab"], points, again, remark)))
    out.print(table)


def _literal(text: str) -> str:
    from rich.markup import escape

    return escape(text)

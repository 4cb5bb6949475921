"""The commands that look after the course's files: `notebooks`, `labs` and `colab`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flashcourse.files import (
    CourseError,
    course_root,
    differing,
    relative,
    write_whole,
)

out = Console(highlight=False, soft_wrap=True)
err = Console(highlight=False, soft_wrap=True, stderr=True)


def notebooks(
    names: Annotated[
        list[str] | None, typer.Argument(help="With --execute: numbers or names of lessons.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; say what is wrong, exit with 1.")
    ] = False,
    execute: Annotated[
        bool, typer.Option("--execute", help="Run lessons top to bottom and keep the outputs.")
    ] = False,
) -> None:
    """Stamp the generated first cell and metadata on every notebook; run lessons; check rules."""
    if (names and not execute) or (check and execute):
        raise typer.BadParameter("names go with --execute, and --execute does not go with --check")
    try:
        root = course_root()
        if execute:
            _execute(root, names or [])
        elif check:
            _check(root)
        else:
            _stamp(root)
    except CourseError as error:
        _fail(error)


def _stamp(root: Path) -> None:
    from flashcourse.course.stamp import stamped_files

    files = stamped_files(root)
    changed = differing(files)
    write_whole({path: files[path] for path in changed})
    for name in relative(changed, root):
        out.print(f"stamped {name}", markup=False)
    out.print(f"{len(files)} notebooks, {len(changed)} changed")


def _check(root: Path) -> None:
    from flashcourse.course.rules import all_problems

    found = all_problems(root)
    if found:
        raise CourseError("\n".join(found))
    out.print("every notebook keeps the rules")


def _execute(root: Path, names: list[str]) -> None:
    from flashcourse.course.execute import execute_lesson, find_lessons

    lessons = find_lessons(root, names)
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # a debugger's note on stderr
    failures = []
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    with Progress(*columns, TimeElapsedColumn(), console=out) as bar:
        for path in lessons:
            task = bar.add_task(path.stem, total=None)

            def progress(done: int, total: int, task=task) -> None:
                bar.update(task, completed=done, total=total)

            started = time.perf_counter()
            try:
                execute_lesson(root, path, progress)
                result = "saved"
            except CourseError as error:
                failures.append(f"{path.stem}: {error}")
                result = "NOT saved"
            bar.remove_task(task)
            bar.print(f"{path.stem}: {result}, {time.perf_counter() - started:.1f} s", markup=False)
    if failures:
        raise CourseError("\n".join(failures))


def labs(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 if labs/ is out of date.")
    ] = False,
) -> None:
    """Write labs/, what students receive, from solutions/."""
    from flashcourse.course.labs import lab_files, strays

    try:
        root = course_root()
        files = lab_files(root)
        changed = differing(files)
        stray = strays(root, files)
        if stray:
            raise CourseError(
                f"no source in solutions/ for {', '.join(relative(stray, root))}: delete it, or "
                "write its solution"
            )
        if check and changed:
            raise CourseError(
                f"out of date: {', '.join(relative(changed, root))}. "
                "Run `python -m flashcourse labs`."
            )
        write_whole({path: files[path] for path in changed})
        for name in relative(changed, root):
            out.print(f"wrote {name}", markup=False)
        out.print(f"{len(files)} labs, {len(changed)} changed")
    except CourseError as error:
        _fail(error)


def colab(
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the copies go.")],
) -> None:
    """Write stand-alone copies of the lessons and labs, each with the library inside it."""
    from flashcourse.course.colab import write_stand_alone

    try:
        written = write_stand_alone(course_root(), folder)
    except (CourseError, OSError) as error:
        _fail(error)
        return
    out.print(f"{len(written)} stand-alone notebooks in {folder}", markup=False)


def _fail(error: Exception) -> None:
    err.print(str(error), markup=False, style="red")
    raise typer.Exit(1)

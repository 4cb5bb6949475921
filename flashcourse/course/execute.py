"""Running a lesson from top to bottom and keeping its outputs, whole or not at all."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from flashcourse.course.colab import CELL_ID
from flashcourse.course.rules import output_problems
from flashcourse.course.stamp import clear_outputs, stamp
from flashcourse.files import (
    LESSONS,
    CourseError,
    colab_settings,
    notebook_text,
    notebooks_in,
    read_notebook,
    write_whole,
)

CELL_SECONDS = 300  # a cell that takes longer has hung; a whole lesson should take under 60

Progress = Callable[[int, int], None]  # (cells done, cells in all)


def find_lessons(root: Path, names: Sequence[str]) -> list[Path]:
    """The lessons that are meant by numbers, names or paths; all of them if none is named.

    Raises:
        CourseError: a name means no lesson, or several.
    """
    lessons = notebooks_in(root, LESSONS)
    if not lessons:
        raise CourseError(f"there are no notebooks in {root / LESSONS}")
    chosen = []
    for name in names:
        stem = f"{int(name):02}" if name.isdecimal() else Path(name).stem  # 1 is 01, not 10
        fits = [path for path in lessons if path.stem == stem]
        fits = fits or [path for path in lessons if path.stem.startswith(stem)]
        if len(fits) != 1:
            known = ", ".join(path.stem for path in fits or lessons)
            raise CourseError(f"{name!r} means {len(fits)} of the lessons; choose from: {known}")
        chosen += fits
    return chosen or lessons


def execute_lesson(root: Path, path: Path, progress: Progress = lambda done, total: None) -> float:
    """Run one lesson in a fresh kernel and save its outputs if, and only if, all went well.

    Args:
        root: the course's folder.
        path: the notebook; it runs in its own folder, as in JupyterLab.
        progress: told after every cell.

    Returns:
        the seconds it took.

    Raises:
        CourseError: a cell failed, took too long, killed its kernel, or left an output that may
            not be committed. The file is then as it was.
    """
    notebook = stamp(read_notebook(path), colab_settings(root))
    started = time.perf_counter()
    run_notebook(notebook, path.parent, progress)
    seconds = time.perf_counter() - started
    for cell in notebook.cells:
        if cell.cell_type == "code":
            _name_paths(cell, {str(root): "./", sys.prefix: "<environment>/"})
    finished = stamp(notebook, colab_settings(root))
    wrong = [
        f"cell {cell.id}: {text}"
        for cell in finished.cells
        if cell.cell_type == "code"
        for text in output_problems(cell)
    ]
    if wrong:
        raise CourseError(f"{path.name} was not saved:\n  " + "\n  ".join(wrong))
    write_whole({path: notebook_text(finished)})
    return seconds


def run_notebook(
    notebook: NotebookNode, folder: Path, progress: Progress = lambda done, total: None
) -> None:
    """Run every code cell in a fresh kernel of this environment; outputs go into the notebook.

    Raises:
        CourseError: a cell failed, took longer than :data:`CELL_SECONDS`, or killed its kernel.
    """
    clear_outputs(notebook)
    total = len(notebook.cells)
    current = {"id": CELL_ID}

    def starting(cell: NotebookNode, cell_index: int) -> None:
        current["id"] = cell.get("id", str(cell_index))
        progress(cell_index, total)

    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        coalesce_streams=True,
        record_timing=False,
        store_widget_state=False,
        on_cell_start=starting,
    )
    try:
        client.execute()
    except CellExecutionError as error:
        raise CourseError(f"cell {current['id']}: {error.ename}: {error.evalue}") from error
    except CellTimeoutError as error:
        raise CourseError(
            f"cell {current['id']}: stopped after {CELL_SECONDS} s; make it smaller"
        ) from error
    except DeadKernelError as error:
        raise CourseError(f"cell {current['id']}: the kernel died while it ran") from error
    progress(total, total)


def _name_paths(cell: NotebookNode, names: dict[str, str]) -> None:
    """Replace machine paths in the outputs: each key of ``names`` and the slash after it."""
    # The longer path first: the environment may lie inside the course's folder.
    places = sorted(names, key=len, reverse=True)
    pattern = re.compile("(" + "|".join(re.escape(place) for place in places) + r")(/|(?![\w.-]))")
    for output in cell.outputs:
        holders = [(output, key) for key in ("text", "evalue") if key in output]
        holders += [
            (output.data, kind) for kind in output.get("data", {}) if kind.startswith("text/")
        ]
        for holder, key in holders:
            holder[key] = pattern.sub(lambda match: names[match[1]], holder[key])

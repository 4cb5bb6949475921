"""From solved labs to what students receive, with nbgrader's own preprocessors."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from flashcourse.course.files import (
    LABS,
    SOLUTIONS,
    CourseError,
    colab_settings,
    notebook_text,
    notebooks_in,
    read_notebook,
)
from flashcourse.course.stamp import stamp

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
CHECK = ".check"  # the graded cell of `lab1.softmax` is `lab1.softmax.check`


def lab_files(root: Path) -> dict[Path, str]:
    """What every notebook of ``labs/`` should hold, by path.

    Raises:
        CourseError: nbgrader is missing, or a solution is not fit to be handed out.
    """
    settings = colab_settings(root)
    points = _points()
    files = {}
    for path in notebooks_in(root, SOLUTIONS):
        solution = read_notebook(path)
        wrong = source_problems(solution, points)
        if wrong:
            where = path.relative_to(root)
            raise CourseError("\n".join(f"{where}: {text}" for text in wrong))
        files[root / LABS / path.name] = notebook_text(release(stamp(solution, settings)))
    return files


def strays(root: Path, files: Mapping[Path, str]) -> list[Path]:
    """Notebooks in ``labs/`` that no solution gives."""
    return [path for path in notebooks_in(root, LABS) if path not in files]


def release(solution: NotebookNode) -> NotebookNode:
    """The lab a student receives: solutions and outputs cleared, cells locked, ids kept.

    The steps are those of ``nbgrader generate_assignment``, less the ones that write to a
    lecturer's gradebook.

    Raises:
        CourseError: nbgrader is missing or refuses the notebook.
    """
    steps = _preprocessors()
    lab = copy.deepcopy(solution)
    resources: dict[str, Any] = {}
    for step in steps:
        try:
            lab, resources = step.preprocess(lab, resources)
        except Exception as error:
            name = type(step).__name__
            raise CourseError(f"nbgrader's {name} refuses the notebook: {error}") from error
    return lab


def _preprocessors() -> list:
    try:
        from nbgrader import preprocessors as steps
    except ImportError as error:
        raise CourseError(
            f"labs are made with nbgrader, which cannot be imported ({error}): "
            "run `pip install -e .[lecturer]`"
        ) from error
    # Each logs what it raises; the error is enough.
    logging.getLogger("traitlets").setLevel(logging.CRITICAL)
    return [
        steps.LockCells(),
        steps.ClearSolutions(),
        steps.ClearOutput(),
        steps.CheckCellMetadata(),
        steps.ClearHiddenTests(),
        steps.ClearMarkScheme(),
        steps.ComputeChecksums(),
        steps.CheckCellMetadata(),
    ]


def _points() -> dict[str, float]:
    from flashcourse.grading import all_questions

    return {name: question.points for name, question in all_questions().items()}


def source_problems(solution: NotebookNode, points: Mapping[str, float]) -> list[str]:
    """What keeps a solved lab from being a source of labs; an empty list is good.

    Args:
        solution: the notebook.
        points: the points of each question that can be asked.
    """
    found: list[str] = []
    answers: list[str] = []
    graded: list[str] = []
    for cell in solution.cells:
        found += [f"cell {cell.get('id')}: {text}" for text in _cell_problems(cell, points)]
        grader = cell.metadata.get("nbgrader", {})
        if grader.get("solution"):
            answers.append(str(grader.get("grade_id")))
        if grader.get("grade"):
            graded.append(str(grader.get("grade_id")))
    found += [f"{name}: no graded cell {name}{CHECK}" for name in _unchecked(answers, graded)]
    for name in (*answers, *graded):
        if (*answers, *graded).count(name) > 1:
            found.append(f"grade_id {name!r} is used more than once")
    if not graded:
        found.append("no graded cell at all")
    return list(dict.fromkeys(found))


def _unchecked(answers: Iterable[str], graded: Iterable[str]) -> list[str]:
    checked = {name.removesuffix(CHECK) for name in graded}
    return [name for name in answers if name not in checked]


def _cell_problems(cell: NotebookNode, points: Mapping[str, float]) -> Iterator[str]:
    grader = cell.metadata.get("nbgrader")
    marked = re.match(r"# lab: (\S*)", cell.source)
    if cell.cell_type == "code" and (cell.outputs or cell.execution_count is not None):
        yield "solutions/ is kept without outputs; clear them"
    if grader is None:
        if marked:
            yield "it begins with `# lab:` and has no nbgrader metadata"
        if BEGIN in cell.source or END in cell.source:
            yield "it holds a solution region and has no nbgrader metadata"
        return
    # A cell id may not hold a dot (nbformat 4.5), so the dots of a grade_id become hyphens there.
    if str(grader.get("grade_id")).replace(".", "-") != cell.get("id"):
        yield f"its id is not its grade_id {grader.get('grade_id')!r} with hyphens for dots"
    if grader.get("schema_version") != 3:
        yield f"nbgrader's schema_version must be 3, got {grader.get('schema_version')!r}"
    if grader.get("solution"):
        yield from _answer_problems(cell, marked[1] if marked else None, points)
    elif grader.get("grade"):
        yield from _graded_problems(cell, points)


def _answer_problems(
    cell: NotebookNode, marked: str | None, points: Mapping[str, float]
) -> Iterator[str]:
    name = cell.metadata.nbgrader.get("grade_id")
    lines = [line.strip() for line in cell.source.split("\n")]
    if marked != name:
        yield f"its first line must be `# lab: {name}`"
    if lines.count(BEGIN) == 0 or lines.count(BEGIN) != lines.count(END):
        yield f"its answer must stand between `{BEGIN}` and `{END}`"
    if cell.metadata.nbgrader.get("grade"):
        yield "an answer is graded in a cell of its own; set grade to false"
    if name not in points:
        yield f"flashcourse.grading knows no question {name!r}"


def _graded_problems(cell: NotebookNode, points: Mapping[str, float]) -> Iterator[str]:
    grader = cell.metadata.nbgrader
    name = str(grader.get("grade_id"))
    question = name.removesuffix(CHECK)
    if not name.endswith(CHECK):
        yield f"a graded cell is called after its question: `<question>{CHECK}`"
    if not grader.get("locked"):
        yield "a graded cell must be locked"
    if f'check("{question}"' not in cell.source:
        yield f'it must call check("{question}", ...)'
    if question not in points:
        yield f"flashcourse.grading knows no question {question!r}"
    elif grader.get("points") != points[question]:
        yield f"it gives {grader.get('points')} points, the question {points[question]}"


def graded_cells(notebook: NotebookNode) -> list[str]:
    """The ids of the cells that nbgrader gives points for; an unsolved lab fails at these."""
    return [cell.id for cell in notebook.cells if cell.metadata.get("nbgrader", {}).get("grade")]

"""From solved labs to what students receive, with nbgrader's own preprocessors."""

from __future__ import annotations

import copy
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from flashcourse.course.stamp import stamp
from flashcourse.files import (
    LABS,
    SOLUTIONS,
    CourseError,
    colab_settings,
    notebook_text,
    notebooks_in,
    read_notebook,
)

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
CHECK = "-check"  # the cell that grades `lab1-softmax` is `lab1-softmax-check`


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
            reason = error.__context__ or error  # it wraps what it found in a general remark
            name = type(step).__name__
            raise CourseError(f"nbgrader's {name} refuses the notebook: {reason}") from error
    return lab


def _preprocessors() -> list:
    try:
        from nbgrader import preprocessors as steps
    except ImportError as error:
        raise CourseError(
            f"labs are made with nbgrader, which cannot be imported ({error}): "
            "run `python -m pip install -e '.[lecturer]'`"
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


def grade_id(question: str) -> str:
    """The nbgrader id of a question's answer cell, which is the cell's own id as well.

    Both formats allow letters, digits, hyphens and underscores, and no dot: the answer to
    ``lab1.softmax`` is the cell ``lab1-softmax``, graded by the cell ``lab1-softmax-check``.
    """
    return question.replace(".", "-")


def source_problems(solution: NotebookNode, points: Mapping[str, float]) -> list[str]:
    """What keeps a solved lab from being a source of labs; an empty list is good.

    Args:
        solution: the notebook.
        points: the points of each question that can be asked.
    """
    found: list[str] = []
    for cell in solution.cells:
        found += [f"cell {cell.get('id')}: {text}" for text in _cell_problems(cell, points)]
    marked = [cell for cell in solution.cells if cell.metadata.get("nbgrader")]
    answers = [_grade_id(cell) for cell in marked if cell.metadata.nbgrader.get("solution")]
    graded = [_grade_id(cell) for cell in marked if cell.metadata.nbgrader.get("grade")]
    for name in answers:
        if name + CHECK not in graded:
            found.append(f"{name}: there is no graded cell {name}{CHECK}")
    for name, times in Counter([*answers, *graded]).items():
        if times > 1:
            found.append(f"grade_id {name!r} is used {times} times")
    if not graded:
        found.append("there is no graded cell")
    return found


def _grade_id(cell: NotebookNode) -> str:
    return str(cell.metadata.nbgrader.get("grade_id"))


def _cell_problems(cell: NotebookNode, points: Mapping[str, float]) -> Iterator[str]:
    grader = cell.metadata.get("nbgrader")
    if cell.cell_type == "code" and (cell.outputs or cell.execution_count is not None):
        yield "solutions/ is kept without outputs: run `python -m flashcourse notebooks`"
    if grader is None:
        if cell.source.startswith("# lab:"):
            yield "it begins with `# lab:` and has no nbgrader metadata"
        if BEGIN in cell.source or END in cell.source:
            yield "it holds a solution region and has no nbgrader metadata"
        return
    if grader.get("schema_version") != 3:
        yield f"nbgrader's schema_version must be 3, got {grader.get('schema_version')!r}"
    if grader.get("solution"):
        yield from _answer_problems(cell, points)
    elif grader.get("grade"):
        yield from _graded_problems(cell, points)


def _answer_problems(cell: NotebookNode, points: Mapping[str, float]) -> Iterator[str]:
    lines = [line.strip() for line in cell.source.split("\n")]
    marked = re.fullmatch(r"# lab: (\S+)", lines[0])
    if marked is None:
        yield f"its first line must be `# lab: <grade_id>`, got {lines[0]!r}"
    else:
        question = marked[1].replace("-", ".", 1)
        yield from _identity_problems(cell, question, grade_id(question), points)
    if lines.count(BEGIN) == 0 or lines.count(BEGIN) != lines.count(END):
        yield f"its answer must stand between `{BEGIN}` and `{END}`"
    if cell.metadata.nbgrader.get("grade"):
        yield "an answer is graded in a cell of its own; set grade to false"


def _graded_problems(cell: NotebookNode, points: Mapping[str, float]) -> Iterator[str]:
    called = re.search(r"\bcheck\(\s*[\"']([^\"']+)[\"']", cell.source)
    if called is None:
        yield 'it must call check("<question>", answer)'
        return
    question = called[1]
    yield from _identity_problems(cell, question, grade_id(question) + CHECK, points)
    given = cell.metadata.nbgrader.get("points")
    if question in points and given != points[question]:
        yield f"it gives {given} points, the question {points[question]:g}"
    if not cell.metadata.nbgrader.get("locked"):
        yield "a graded cell must be locked"


def _identity_problems(
    cell: NotebookNode, question: str, expected: str, points: Mapping[str, float]
) -> Iterator[str]:
    for name, value in (("grade_id", _grade_id(cell)), ("id", cell.get("id"))):
        if value != expected:
            yield f"its {name} must be {expected!r}, got {value!r}"
    if question not in points:
        yield f"flashcourse.grading knows no question {question!r}"


def graded_cells(notebook: NotebookNode) -> list[str]:
    """The ids of the cells that nbgrader gives points for; an unsolved lab fails at these."""
    return [cell.id for cell in notebook.cells if cell.metadata.get("nbgrader", {}).get("grade")]

"""labs/ is what `python -m flashcourse labs` makes of solutions/, and bad sources are refused."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from flashcourse.course import labs
from flashcourse.files import (
    LABS,
    SOLUTIONS,
    CourseError,
    differing,
    notebook_text,
    notebooks_in,
    read_notebook,
)

ROOT = Path(__file__).parents[1]
POINTS = {"lab9.double": 2.0}
ANSWER = {"schema_version": 3, "grade_id": "lab9-double", "solution": True, "grade": False}
GRADED = {"schema_version": 3, "grade_id": "lab9-double-check", "solution": False, "grade": True}
SOURCE = '''\
# lab: lab9-double
def double(x):
    """Twice x."""
    ### BEGIN SOLUTION
    return 2 * x
    ### END SOLUTION'''


def solution() -> nbformat.NotebookNode:
    """A small solved lab that is fit to be handed out."""
    answer = {"nbgrader": {**ANSWER, "locked": False, "task": False}}
    graded = {"nbgrader": {**GRADED, "locked": True, "task": False, "points": 2}}
    return new_notebook(
        cells=[
            new_code_cell("from flashcourse.grading import check", id="imports"),
            new_code_cell(SOURCE, id="lab9-double", metadata=answer),
            new_code_cell('check("lab9.double", double)', id="lab9-double-check", metadata=graded),
        ]
    )


def test_every_lab_is_what_its_solution_gives() -> None:
    files = labs.lab_files(ROOT)
    assert len(files) == len(notebooks_in(ROOT, SOLUTIONS)) > 0
    assert differing(files) == [], "run `python -m flashcourse labs`"
    assert labs.strays(ROOT, files) == []


def test_making_them_again_gives_the_same_bytes() -> None:
    program = (
        "import hashlib; from flashcourse import files; from flashcourse.course import labs;"
        "made = labs.lab_files(files.course_root());"
        "print([(p.name, hashlib.sha256(t.encode()).hexdigest()) for p, t in made.items()])"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


@pytest.mark.parametrize(
    "name", [path.name for path in notebooks_in(ROOT, SOLUTIONS)] or ["no solutions"]
)
def test_a_lab_differs_from_its_solution_in_the_answers_alone(name: str) -> None:
    solved = read_notebook(ROOT / SOLUTIONS / name).cells
    lab = read_notebook(ROOT / LABS / name).cells
    assert [cell.id for cell in lab] == [cell.id for cell in solved]
    for before, after in zip(solved, lab, strict=True):
        if before.metadata.get("nbgrader", {}).get("solution"):
            kept, _, rest = before.source.partition("### BEGIN SOLUTION")
            assert after.source.startswith(kept)
            assert "raise NotImplementedError()" in after.source
            assert after.source.endswith(rest.rpartition("### END SOLUTION")[2])
        else:
            assert after.source == before.source


def test_release_clears_the_answer_and_locks_the_check() -> None:
    lab = labs.release(solution())
    assert [cell.id for cell in lab.cells] == ["imports", "lab9-double", "lab9-double-check"]
    assert lab.cells[1].source == (
        '# lab: lab9-double\ndef double(x):\n    """Twice x."""\n'
        "    # YOUR CODE HERE\n    raise NotImplementedError()"
    )
    assert lab.cells[2].metadata.editable is False
    assert labs.graded_cells(lab) == ["lab9-double-check"]
    assert notebook_text(lab) == notebook_text(labs.release(solution()))


def test_the_small_solution_is_sound() -> None:
    assert labs.source_problems(solution(), POINTS) == []


Cells = list[nbformat.NotebookNode]


def change(cells: Cells, index: int, **nbgrader: object) -> None:
    cells[index].metadata.nbgrader.update(nbgrader)


BREAKS: dict[str, tuple[Callable[[Cells], object], str]] = {
    "other points": (lambda c: change(c, 2, points=3), "it gives 3 points, the question 2"),
    "unknown question": (
        lambda c: c[2].update(source='check("lab9.triple", double)'),
        "knows no question 'lab9.triple'",
    ),
    "no region": (
        lambda c: c[1].update(source="# lab: lab9-double\ndef double(x): return 2 * x"),
        "between `### BEGIN SOLUTION` and",
    ),
    "half a region": (
        lambda c: c[1].update(source=SOURCE.replace("### END SOLUTION", "")),
        "between `### BEGIN SOLUTION` and",
    ),
    "no first line": (
        lambda c: c[1].update(source=SOURCE.partition("\n")[2]),
        "its first line must be `# lab: <grade_id>`, got 'def double(x):'",
    ),
    "dotted grade_id": (
        lambda c: change(c, 1, grade_id="lab9.double"),
        "its grade_id must be 'lab9-double', got 'lab9.double'",
    ),
    "other cell id": (
        lambda c: c[1].update(id="an-answer"),
        "its id must be 'lab9-double', got 'an-answer'",
    ),
    "answer without metadata": (
        lambda c: c[1].update(metadata={}),
        "begins with `# lab:` and has no nbgrader metadata",
    ),
    "no graded cell": (lambda c: c.pop(), "there is no graded cell"),
    "answer twice": (
        lambda c: c.append(copy.deepcopy(c[1])),
        "grade_id 'lab9-double' is used 2 times",
    ),
    "outputs": (
        lambda c: c[0].update(outputs=[new_output("stream", text="hello")]),
        "kept without outputs",
    ),
    "execution count": (lambda c: c[0].update(execution_count=1), "kept without outputs"),
    "unlocked": (lambda c: change(c, 2, locked=False), "must be locked"),
    "graded answer": (lambda c: change(c, 1, grade=True), "graded in a cell of its own"),
    "old schema": (lambda c: change(c, 2, schema_version=1), "must be 3, got 1"),
    "nothing checked": (lambda c: c[2].update(source="double(2)"), "it must call check("),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_source_that_would_not_work_is_refused(name: str) -> None:
    broken = solution()
    spoil, message = BREAKS[name]
    spoil(broken.cells)
    assert any(message in text for text in labs.source_problems(broken, POINTS))


def test_what_nbgrader_itself_refuses_is_explained() -> None:
    broken = solution()
    del broken.cells[2].metadata.nbgrader["points"]
    with pytest.raises(CourseError, match=r"CheckCellMetadata refuses .* does not have points"):
        labs.release(broken)


def test_without_nbgrader_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nbgrader", None)
    with pytest.raises(CourseError, match=r"pip install -e '\.\[lecturer\]'"):
        labs.release(solution())


def test_nothing_is_written_when_one_source_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labs, "_points", lambda: POINTS)
    (tmp_path / "pyproject.toml").write_text('[tool.flashcourse]\nrepository = ""\ntag = "v1"\n')
    (tmp_path / SOLUTIONS).mkdir()
    good, bad = solution(), solution()
    BREAKS["other points"][0](bad.cells)
    nbformat.write(good, tmp_path / SOLUTIONS / "lab8_good.ipynb")
    assert len(labs.lab_files(tmp_path)) == 1
    nbformat.write(bad, tmp_path / SOLUTIONS / "lab9_bad.ipynb")
    with pytest.raises(CourseError, match=r"lab9_bad.ipynb: cell lab9-double-check: it gives 3"):
        labs.lab_files(tmp_path)
    (tmp_path / LABS).mkdir()
    stray = tmp_path / LABS / "lab7_old.ipynb"
    stray.write_text("{}")
    assert labs.strays(tmp_path, {}) == [stray]

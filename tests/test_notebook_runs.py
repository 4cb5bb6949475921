"""Labs as handed out fail where they should; lessons are saved whole, or left as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook
from typer.testing import CliRunner

from flashcourse.cli import app
from flashcourse.course import commands, execute
from flashcourse.course.labs import graded_cells
from flashcourse.files import (
    LABS,
    LESSONS,
    CourseError,
    notebook_text,
    notebooks_in,
    read_notebook,
    write_whole,
)

ROOT = Path(__file__).parents[1]


def failing_cells(notebook: NotebookNode, folder: Path) -> list[str]:
    """Run a notebook past its errors; the ids of the cells that ended in one."""
    NotebookClient(
        notebook,
        timeout=120,
        allow_errors=True,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    return [
        cell.id
        for cell in notebook.cells
        if cell.cell_type == "code" and any(o.output_type == "error" for o in cell.outputs)
    ]


@pytest.mark.parametrize("path", notebooks_in(ROOT, LABS), ids=lambda path: path.stem)
def test_a_lab_as_handed_out_fails_at_its_graded_cells_alone(path: Path) -> None:
    notebook = read_notebook(path)
    expected = graded_cells(notebook)
    assert expected
    assert failing_cells(notebook, path.parent) == expected


def test_there_are_labs() -> None:
    assert notebooks_in(ROOT, LABS), "labs/ is empty: run `python -m flashcourse labs`"


def test_the_run_sees_every_failing_cell(tmp_path: Path) -> None:
    cells = [new_code_cell(text, id=f"cell-{i}") for i, text in enumerate(["1", "1 / 0", "x", "2"])]
    assert failing_cells(new_notebook(cells=cells), tmp_path) == ["cell-1", "cell-2"]


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A course of one's own, without notebooks."""
    (tmp_path / "pyproject.toml").write_text('[tool.flashcourse]\nrepository = ""\ntag = "v1"\n')
    monkeypatch.setattr(commands, "course_root", lambda: tmp_path)
    return tmp_path


def write_lesson(course: Path, name: str, *sources: str) -> Path:
    cells = [new_code_cell(source, id=f"cell-{i}") for i, source in enumerate(sources)]
    path = course / LESSONS / f"{name}.ipynb"
    write_whole({path: notebook_text(new_notebook(cells=cells))})
    return path


def test_a_lesson_is_run_stamped_and_saved(course: Path) -> None:
    path = write_lesson(
        course,
        "01_good",
        "import os, sys; print('one'); print('two')",
        f"print({str(course)!r} + '/notebooks/x', {str(course)!r}, sys.prefix + '/lib/y')",
        "os.path.basename(os.getcwd())",
    )
    result = CliRunner().invoke(app, ["notebooks", "--execute", "01"])
    assert result.exit_code == 0, result.output
    assert "01_good: saved" in result.output
    cells = read_notebook(path).cells
    assert [cell.id for cell in cells] == ["colab-setup", "cell-0", "cell-1", "cell-2"]
    assert [cell.execution_count for cell in cells] == [1, 2, 3, 4]
    assert [output.text for output in cells[1].outputs] == ["one\ntwo\n"]
    assert cells[2].outputs[0].text == "./notebooks/x ./ <environment>/lib/y\n"
    assert cells[3].outputs[0].data["text/plain"] == "'notebooks'"
    assert all(cell.metadata == {} for cell in cells)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("1 / 0", "cell cell-1: ZeroDivisionError: division by zero"),
        ("import os; os._exit(1)", "cell cell-1: the kernel died while it ran"),
        ("print('/home/ada/x')", "cell cell-1: its output holds a path of one machine"),
        ("import time; time.sleep(60)", "cell cell-1: stopped after 2 s"),
        (
            "import matplotlib.pyplot as plt; plt.plot([1]); plt.show()",
            "cell cell-1: its image/png output has no alt text",
        ),
    ],
)
def test_a_lesson_that_fails_is_left_as_it_was(
    course: Path, source: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "CELL_SECONDS", 2 if "sleep" in source else 60)
    path = write_lesson(course, "01_bad", "print(1)", source, "print(2)")
    before = path.read_bytes()
    result = CliRunner().invoke(app, ["notebooks", "--execute"])
    assert result.exit_code == 1
    assert message in result.output
    assert "01_bad: NOT saved" in result.output
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_lessons_are_found_by_number_name_or_path(course: Path) -> None:
    one, ten = write_lesson(course, "01_one", "1"), write_lesson(course, "10_ten", "1")
    assert execute.find_lessons(course, []) == [one, ten]
    for name in ("10", "10_ten", "10_ten.ipynb", "notebooks/10_ten.ipynb"):
        assert execute.find_lessons(course, [name]) == [ten]
    for name in ("1", "01"):
        assert execute.find_lessons(course, [name]) == [one]
    for name in ("2", "lesson"):
        with pytest.raises(CourseError, match="means 0 of the lessons; choose from: 01_one, 10_t"):
            execute.find_lessons(course, [name])


def test_check_says_what_to_do_and_writes_nothing(course: Path) -> None:
    path = write_lesson(course, "01_new", "1")
    before = path.read_bytes()
    result = CliRunner().invoke(app, ["notebooks", "--check"])
    assert result.exit_code == 1
    assert "notebooks/01_new.ipynb: the first cell is not the generated one" in result.output
    assert path.read_bytes() == before
    assert CliRunner().invoke(app, ["notebooks"]).exit_code == 0
    again = CliRunner().invoke(app, ["notebooks", "--check"])
    assert "first cell" not in again.output
    assert "it was not run" in again.output

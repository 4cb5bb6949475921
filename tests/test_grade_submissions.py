"""Reading trays, finding answer cells, deciding what a question needs; no answer is run here."""

from __future__ import annotations

import json
import tarfile
import zipfile
from pathlib import Path

import hostile
import pytest

from flashcourse.files import CourseError
from flashcourse.grading import submissions as reading
from flashcourse.grading.assemble import (
    Answers,
    cells_to_run,
    find_answers,
    load_labs,
    pristine_copy,
    same_code,
    used_names,
    which_lab,
    without_magics,
)
from flashcourse.grading.submissions import Cell, NoSuchSubmission, Submission, collect

LABS = load_labs(hostile.ROOT / "labs")
LAB1 = LABS["lab1_attention"]


def notebook_text(*sources: str) -> str:
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "source": source}
        for i, source in enumerate(sources)
    ]
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells})


def test_labs_know_their_questions_and_cells() -> None:
    assert [a.question for a in LAB1.asked] == [
        "lab1.softmax",
        "lab1.attention",
        "lab1.padding_mask",
    ]
    assert [a.expression for a in LAB1.asked] == ["softmax", "attention", "padding_mask"]
    assert LAB1.points == 10
    with pytest.raises(CourseError, match="no released labs"):
        load_labs(Path(__file__).parent / "plugins")


def test_every_solution_is_read_whole() -> None:
    for name, lab in LABS.items():
        (submission,) = collect([hostile.ROOT / "solutions" / f"{name}.ipynb"])
        assert which_lab(submission, LABS) is lab
        answers = find_answers(submission, lab)
        assert answers.notes == []
        assert list(answers.sources) == list(lab.stubs)
        for asked in lab.asked:
            assert asked.cell in cells_to_run(lab, asked, answers)


def test_every_released_lab_holds_no_answer() -> None:
    for name, lab in LABS.items():
        (submission,) = collect([hostile.ROOT / "labs" / f"{name}.ipynb"])
        assert find_answers(submission, lab).sources == {}


def test_a_pristine_copy_differs_in_the_answers_alone() -> None:
    (submission,) = collect([hostile.ROOT / "solutions" / "lab1_attention.ipynb"])
    copy = pristine_copy(LAB1, find_answers(submission, LAB1))
    for cell, released in zip(copy.cells, LAB1.notebook.cells, strict=True):
        answer = cell.id in LAB1.stubs
        assert (cell.source != released.source) == answer


def test_a_tray_of_all_kinds(tmp_path: Path) -> None:
    text = notebook_text("# lab: lab1-softmax\nx = 1")
    (tmp_path / "ana.ipynb").write_text(text)
    (tmp_path / "ben").mkdir()
    (tmp_path / "ben" / "lab1.ipynb").write_text(text)
    (tmp_path / "ben" / ".ipynb_checkpoints").mkdir()
    (tmp_path / "ben" / ".ipynb_checkpoints" / "lab1.ipynb").write_text("old")
    (tmp_path / "ben" / "plot.png").write_bytes(b"png")
    (tmp_path / "cleo").mkdir()
    (tmp_path / "cleo" / "essay.docx").write_bytes(b"PK")
    with zipfile.ZipFile(tmp_path / "dan.zip", "w") as archive:
        archive.writestr("deep/er/lab1.ipynb", text)
        archive.writestr("__MACOSX/deep/._lab1.ipynb", "x")
    (tmp_path / "eve.pdf").write_bytes(b"%PDF-1.4")
    found = {s.name: s for s in collect([tmp_path])}
    assert set(found) == {"ana", "ben/lab1", "cleo", "dan/lab1", "eve.pdf"}
    assert [name for name, s in found.items() if s.problem] == ["cleo", "eve.pdf"]
    assert "no notebook" in found["cleo"].problem
    archive_of_all = tmp_path.parent / "tray.tar.gz"
    with tarfile.open(archive_of_all, "w:gz") as tar:
        tar.add(tmp_path, arcname=".")
    assert {s.name for s in collect([archive_of_all])} == set(found)
    with pytest.raises(NoSuchSubmission, match="does not exist"):
        collect([tmp_path / "nobody.ipynb"])


def test_two_of_one_name_stay_two(tmp_path: Path) -> None:
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "lab.ipynb").write_text(notebook_text("x"))
    names = [s.name for s in collect([tmp_path / "a" / "lab.ipynb", tmp_path / "b" / "lab.ipynb"])]
    assert names == ["lab", "lab (2)"]


def test_limits_of_size_and_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_NOTEBOOK", 1000)
    monkeypatch.setattr(reading, "MAX_ARCHIVE_FILES", 5)
    (tmp_path / "big.ipynb").write_text(notebook_text("x" * 2000))
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as archive:
        for number in range(6):
            archive.writestr(f"{number}.ipynb", notebook_text("x"))
    big, many = collect([tmp_path])
    assert "larger than" in big.problem
    assert "more than 5 files" in many.problem


def answer(source: str, **more: str) -> Cell:
    return Cell("code", f"# lab: lab1-softmax\n{source}", **more)


def test_of_several_cells_the_last_changed_one_counts() -> None:
    stub = LAB1.stubs["lab1-softmax"]
    cells = [answer("a = 1"), answer("a = 2"), Cell("code", stub), Cell("code", stub + "\n# note")]
    found = find_answers(Submission("s", "s", cells), LAB1)
    assert found.sources["lab1-softmax"].endswith("a = 2")
    assert "4 cells of this name" in " ".join(found.notes)


def test_names_by_metadata_mark_and_id() -> None:
    by_metadata = Cell("code", "a = 1", grade_id="lab1-softmax")
    by_dotted_mark = Cell("code", "\n#lab:  lab1.attention \nb = 1")
    by_id = Cell("code", "c = 1", cell_id="lab1-padding_mask")
    found = find_answers(Submission("s", "s", [by_id, by_metadata, by_dotted_mark]), LAB1)
    assert list(found.sources.values()) == ["a = 1", by_dotted_mark.source, "c = 1"]


def test_only_what_an_answer_needs_is_run() -> None:
    lab = LABS["lab3_online_softmax"]
    sources = {
        "lab3-online_softmax": "import torch\ndef helper(x): return x\ndef online_softmax(b): ...",
        "lab3-merge": "import os; os._exit(1)\ntorch = None\ndef merge(*a): ...",
        "lab3-tiled_forward": "def tiled_forward(q):\n    m = torch.zeros(1)\n    return helper(q)",
    }
    asked = next(a for a in lab.asked if a.question == "lab3.tiled_forward")
    run = cells_to_run(lab, asked, Answers(sources))
    assert list(run) == ["given", "lab3-online_softmax", "lab3-tiled_forward"]
    assert "import torch" in run["given"]
    assert "show_figure" not in run["given"]


def test_names_that_a_cell_takes_from_elsewhere() -> None:
    source = "import a\nk = 1\ndef f(x, y=z):\n    w = x + k + g(b.c)\n    return [i for i in w]"
    assert used_names(source) == {"z", "g", "b"}
    assert used_names("def broken(") == set()


def test_code_is_compared_without_comments() -> None:
    assert same_code("x = 1  # one", "\nx = 1")
    assert not same_code("x = 1", "x = 2")
    assert same_code("def broken(", "def broken(  ")


def test_magics_are_left_out() -> None:
    source, removed = without_magics("%%time\nx = 5 % 3\nif x:\n    !ls\ny = 1")
    assert removed == ["%%time", "!ls"]
    compile(source, "cell", "exec")
    assert without_magics("x = 7\\\n% 4") == ("x = 7\\\n% 4", [])


def test_slugs_are_safe_names() -> None:
    for name in ("../../x", "a b/ü.ipynb", "", "...", "x" * 500, "CON:\0"):
        made = reading.slug(name)
        assert made
        assert len(made) <= 80
        assert set(made) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
        assert not made.startswith(".")

"""The same notebooks in nbgrader itself: generate_assignment, autograde, generate_feedback.

Half a minute on a free core; nbgrader comes with ``pip install -e .[test]``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import hostile
import nbgrader as _installed  # noqa: F401  (make test installs it: missing is a fault)
import pytest
from small_lab import TESTS

LAB = "lab1_attention"
# nbgrader starts its database tool by name.
SCRIPTS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def nbgrader(course: Path, *words: str) -> str:
    """Run nbgrader in a course of its own, away from the user's settings."""
    home = course / "home"
    variables = {
        **os.environ,
        **{name: str(home) for name in ("HOME", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR")},
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "IPYTHONDIR": str(home / "ipython"),
        "OMP_NUM_THREADS": "1",
        "PATH": SCRIPTS,
        "PYTHONPATH": str(TESTS.parent),
    }
    run = subprocess.run(
        [sys.executable, "-m", "nbgrader", *words], cwd=course, env=variables,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout + run.stderr


def test_lab_1_passes_through_nbgrader_with_partial_credit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", SCRIPTS)
    (tmp_path / "home").mkdir()
    (tmp_path / "nbgrader_config.py").write_text(
        "c = get_config()\n"
        f"c.CourseDirectory.root = {str(tmp_path)!r}\n"
        "c.CourseDirectory.course_id = 'course'\n"
        "c.ExecutePreprocessor.timeout = 300\n"
        "c.IncludeHeaderFooter.header = ''\n"
    )
    source = tmp_path / "source" / LAB
    source.mkdir(parents=True)
    solution = (hostile.ROOT / "solutions" / f"{LAB}.ipynb").read_bytes()
    (source / f"{LAB}.ipynb").write_bytes(solution)
    nbgrader(tmp_path, "generate_assignment", LAB, "--create")

    released = json.loads((tmp_path / "release" / LAB / f"{LAB}.ipynb").read_text())
    given_out = json.loads((hostile.ROOT / "labs" / f"{LAB}.ipynb").read_text())
    for mine, theirs in zip(given_out["cells"], released["cells"], strict=True):
        assert mine["id"] == theirs["id"]
        assert "".join(mine["source"]) == "".join(theirs["source"])

    # One answers everything, one a single question, one nothing.
    answers = {"ana": hostile.solved(), "ben": given_out, "cleo": json.loads(json.dumps(given_out))}
    hostile.cell(answers["ben"], "lab1-attention")["source"] = hostile.cell(
        hostile.solved(), "lab1-attention"
    )["source"]
    for student, notebook in answers.items():
        place = tmp_path / "submitted" / student / LAB
        place.mkdir(parents=True)
        (place / f"{LAB}.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    nbgrader(tmp_path, "autograde", LAB, "--create")
    nbgrader(tmp_path, "generate_feedback", LAB)

    from nbgrader.api import Gradebook

    with Gradebook(f"sqlite:///{tmp_path / 'gradebook.db'}") as book:
        scores = {
            student: {
                grade.name: grade.score
                for grade in book.find_submission_notebook(LAB, LAB, student).grades
            }
            for student in answers
        }
        assert book.find_assignment(LAB).max_score == 10
    assert scores["ana"] == {
        "lab1-softmax-check": 2,
        "lab1-attention-check": 5,
        "lab1-padding_mask-check": 3,
    }
    assert scores["ben"] == {
        "lab1-softmax-check": 0,
        "lab1-attention-check": 5,
        "lab1-padding_mask-check": 0,
    }
    assert set(scores["cleo"].values()) == {0}
    for student in answers:
        assert (tmp_path / "feedback" / student / LAB / f"{LAB}.html").stat().st_size > 1000

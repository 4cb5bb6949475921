"""`grade` from the command line: marks, documents, resumption, interruption, reports.

About a minute and a half on two free cores.
"""

from __future__ import annotations

import csv
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import small_lab
from small_lab import RIGHT_ADD, RIGHT_DOUBLE

from flashcourse.grading.reports import grades_csv, gradescope, page

GRADE = [sys.executable, "-m", "flashcourse", "grade"]
SLOW = "import time\ndef double(x):\n    time.sleep(3)\n    return x + x"
DIES = "import os\ntry:\n    get_ipython()\n    os._exit(3)\nexcept NameError:\n    pass\n"
TRANSFORMER = (
    "try:\n    get_ipython().input_transformers_post.append(lambda lines: ['pass\\n'])\n"
    "except NameError:\n    pass\n"
)


def words(tmp_path: Path, *more: str) -> list[str]:
    small_lab.write(tmp_path / "labs", "lab9_small")
    out = ["--out", str(tmp_path / "out"), "--labs", str(tmp_path / "labs")]
    return [*GRADE, str(tmp_path / "tray"), *out, *more]


def grade(tmp_path: Path, *more: str) -> dict:
    run = subprocess.run(
        words(tmp_path, *more), env=small_lab.variables(), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    report["said"] = run.stdout
    return report


def by_name(report: dict) -> dict[str, dict]:
    return {result["name"]: result for result in report["submissions"]}


def statuses(result: dict) -> list[str]:
    return [outcome["status"] for outcome in result["outcomes"]]


def processes_of(folder: Path) -> list[str]:
    """Processes that have this folder among their words or variables."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in text and int(entry.name) != os.getpid():
            found.append(entry.name)
    return found


@pytest.mark.needs_triton
def test_a_batch_is_graded_and_taken_up_again(tmp_path: Path) -> None:
    tray = tmp_path / "tray"
    small_lab.write(tray, "right", double=RIGHT_DOUBLE, add=RIGHT_ADD)
    small_lab.write(tray, "squares", double="def double(x):\n    return x * x")
    small_lab.write(tray, "dies", double=DIES + RIGHT_DOUBLE, add="x = 1")
    small_lab.write(tray, "sly", double=TRANSFORMER + "def double(x):\n    return x")
    report = grade(tmp_path, "--workers", "2")
    marks = by_name(report)
    assert "4 submissions" in report["said"]
    right = marks["right"]
    assert statuses(right) == ["passed", "passed"], right
    assert (right["points"], right["max_points"], right["mark_again"]) == (4, 4, [])
    assert right["document"] == {"status": "ran", "failed_checks": [], "errors": [], "reason": ""}

    squares = marks["squares"]
    assert statuses(squares) == ["failed", "missing"]
    assert squares["outcomes"][0]["findings"][0]["mistakes"][0]["name"] == "squared"
    assert squares["document"]["status"] == "ran"
    assert squares["document"]["failed_checks"] == ["lab9-double-check", "lab9-add-check"]

    dies = marks["dies"]  # only as a document: the answer itself is right
    assert statuses(dies) == ["passed", "failed"]
    assert "NameError" in dies["outcomes"][1]["reason"]
    assert dies["document"]["status"] == "errors"
    assert any("exit status 3" in text for text in dies["document"]["errors"]), dies["document"]

    sly = marks["sly"]  # its own check cell says nothing; the marks do not come from there
    assert statuses(sly) == ["failed", "missing"]
    assert sly["document"]["failed_checks"] == []

    # Once more, with one submission changed and one more: the others are not touched.
    kept = tmp_path / "out" / "students" / "right" / "result.json"
    before = kept.stat().st_mtime_ns
    small_lab.write(tray, "squares", double=RIGHT_DOUBLE)
    small_lab.write(tray, "new", double=RIGHT_DOUBLE)
    again = grade(tmp_path, "--no-document", "--workers", "2")
    assert kept.stat().st_mtime_ns > before  # other settings: everything is marked anew
    assert again["seed"] == report["seed"]
    before = kept.stat().st_mtime_ns
    (tray / "new.ipynb").unlink()
    assert list(by_name(grade(tmp_path, "--no-document"))) == ["dies", "right", "sly", "squares"]
    assert kept.stat().st_mtime_ns == before
    assert by_name(again)["squares"]["points"] == 2
    assert processes_of(tmp_path) == []


@pytest.mark.needs_triton
def test_a_lecturer_s_own_command_shuts_answers_in(tmp_path: Path) -> None:
    small_lab.write(tmp_path / "tray", "right", double=RIGHT_DOUBLE, add=RIGHT_ADD)
    scripts = Path(sys.executable).parent
    command = f"env PATH={scripts}:/usr/bin:/bin SHUT_INTO={{folder}} {{command}}"
    report = grade(tmp_path, "--no-document", "--sandbox", command)
    assert by_name(report)["right"]["points"] == 4, report
    assert command in report["sandbox"]


def start(tmp_path: Path) -> subprocess.Popen:
    """Start grading one quick and one slow submission; return when the quick one has its marks."""
    small_lab.write(tmp_path / "tray", "a_quick", double=RIGHT_DOUBLE)
    small_lab.write(tmp_path / "tray", "b_slow", double=SLOW)
    process = subprocess.Popen(
        words(tmp_path, "--no-document"), env=small_lab.variables(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (tmp_path / "out" / "students" / "a_quick" / "result.json").exists():
        assert process.poll() is None, process.stdout.read()  # type: ignore[union-attr]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def all_gone(folder: Path) -> bool:
    deadline = time.monotonic() + 20
    while processes_of(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not processes_of(folder)


def test_interrupted_it_keeps_what_is_done_and_goes_on(tmp_path: Path) -> None:
    process = start(tmp_path)
    os.kill(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "goes on where it stopped" in said
    assert all_gone(tmp_path)
    assert not (tmp_path / "out" / ".work").exists()
    assert not (tmp_path / "out" / "report.json").exists()
    kept = tmp_path / "out" / "students" / "a_quick" / "result.json"
    before = kept.stat().st_mtime_ns
    marks = by_name(grade(tmp_path, "--no-document"))
    assert [marks[name]["points"] for name in ("a_quick", "b_slow")] == [2, 2]
    assert kept.stat().st_mtime_ns == before


@pytest.mark.skipif(
    not os.path.isdir("/proc/self"), reason="not verified on this machine: processes are not listed"
)
def test_killed_without_a_word_nothing_survives_it(tmp_path: Path) -> None:
    process = start(tmp_path)
    process.kill()
    process.wait()
    assert all_gone(tmp_path), processes_of(tmp_path)
    process.stdout.close()  # type: ignore[union-attr]


def test_two_graders_do_not_meet_and_mistakes_are_explained(tmp_path: Path) -> None:
    small_lab.write(tmp_path / "tray", "one", double=RIGHT_DOUBLE)
    (tmp_path / "out").mkdir()
    held = (tmp_path / "out" / ".lock").open("a")
    fcntl.flock(held, fcntl.LOCK_EX)
    cases = (
        (words(tmp_path), "another grader is at work"),
        (words(tmp_path, "--sandbox", "prison"), "sandbox must be auto, bwrap"),
        (words(tmp_path, "--lab", "lab8"), "there is no lab 'lab8'; there are lab9_small"),
        ([*GRADE, str(tmp_path / "nothing")], "does not exist"),
    )
    for command, message in cases:
        run = subprocess.run(
            command, env=small_lab.variables(), capture_output=True, text=True, check=False
        )
        assert run.returncode == 1
        assert message in run.stderr, run.stderr
    held.close()


def result(**changes: object) -> dict:
    """A row of the report, made by hand."""
    outcome = {
        "question": "lab9.<b>",
        "status": "failed",
        "points": 0.0,
        "max_points": 2.0,
        "reason": "",
        "checks": ["holds"],
        "findings": [
            {
                "check": "sums",
                "case": "x",
                "message": "<script>1</script>",
                "mistakes": [{"name": "twice", "explanation": "too often"}],
            }
        ],
    }
    unsure = {**outcome, "question": "lab9.u", "status": "not_verified", "points": None}
    unsure |= {"findings": [], "reason": "no GPU"}
    whole = {
        "name": "=HYPERLINK(1)",
        "lab": "lab9",
        "problem": "",
        "notes": ["a <note>"],
        "points": 0.0,
        "max_points": 4.0,
        "mark_again": ["lab9.u"],
        "outcomes": [outcome, unsure],
        "document": {"status": "ran", "failed_checks": [], "errors": [], "reason": ""},
    }
    return whole | changes


def test_a_page_shows_findings_and_nothing_runs_in_it() -> None:
    text = page(result())
    assert "<script>" not in text
    assert "&lt;script&gt;1&lt;/script&gt;" in text
    assert "known mistake — twice" in text
    assert "1 to be marked again" in text
    assert "a &lt;note&gt;" in text
    unread = page(result(problem="it is a PDF", outcomes=[], lab=""))
    assert "Not graded: it is a PDF." in unread


def test_what_must_be_marked_again_is_no_zero() -> None:
    tests = gradescope(result())["tests"]
    assert tests[0]["status"] == "failed"
    assert "status" not in tests[1]
    assert "no GPU" in tests[1]["output"]
    (row,) = csv.DictReader(grades_csv([result()]).splitlines())
    assert row["name"] == "'=HYPERLINK(1)"  # no formula for a spreadsheet
    assert (row["lab9.<b>"], row["lab9.u"], row["lab9.u status"]) == ("0", "", "not_verified")
    (row,) = csv.DictReader(grades_csv([result(problem="a PDF", outcomes=[])]).splitlines())
    assert (row["points"], row["problem"]) == ("", "a PDF")

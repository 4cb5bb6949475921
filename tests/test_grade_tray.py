"""More than sixty hostile or broken submissions in one batch: no crash, no wrong mark, no trace.

About a minute on two free cores. Run it alone with ``pytest tests/test_grade_tray.py``.
"""

from __future__ import annotations

import csv
import json
import os
import socket
from pathlib import Path

import pytest
from hostile import ROOT, Entry, tray
from hostile.attack import Attack
from hostile.attacks import ATTACKS

from flashcourse import runtime
from flashcourse.grading.batch import Batch
from flashcourse.grading.limits import Limits, choose_sandbox
from flashcourse.grading.marking import Settings
from flashcourse.grading.reports import write_reports
from flashcourse.grading.submissions import collect

SECRET = "a-secret-of-the-grader"
LIMITS = Limits(seconds=10, memory=2 * 2**30, processes=24, file_bytes=2**24)
SEED = 20261130
SANDBOX = choose_sandbox("auto")
ENTRIES = tray()


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """The graded tray: the folder around it, and its report."""
    root = tmp_path_factory.mktemp("grading")
    outside, secret = root / "outside", root / "secret.txt"
    outside.mkdir()
    secret.write_text("key")
    listener = socket.create_server(("127.0.0.1", 0))
    puts_in = {
        "{OUTSIDE}": str(outside),
        "{SECRET_FILE}": str(secret),
        "{SOLUTION}": str(ROOT / "solutions" / "lab1_attention.ipynb"),
        "{SECRET}": SECRET,
        "{PORT}": str(listener.getsockname()[1]),
    }
    place = root / "tray"
    place.mkdir()
    for entry in ENTRIES:
        entry.make(place / entry.name)
    for path in place.glob("*.ipynb"):
        if path.stem in ATTACKS:
            text = path.read_text(encoding="utf-8")
            for mark, value in puts_in.items():
                text = text.replace(mark, value)
            path.write_text(text, encoding="utf-8")
    before = {path: path.lstat().st_mtime_ns for path in _files(root)}
    with pytest.MonkeyPatch.context() as patch, listener:
        patch.setenv("FLASHCOURSE_TEST_SECRET", SECRET)
        settings = Settings(SEED, SANDBOX, LIMITS, document=False)
        # With a GPU every question starts a process of its own, and imports torch in it.
        workers = max(2, (os.cpu_count() or 2) - 2) if runtime.has_gpu() else 2
        batch = Batch(root / "out", ROOT / "labs", settings, "lab1_attention", workers=workers)
        report = batch.run(collect([place]), lambda *_: None)
        write_reports(root / "out", report)
    after = {path: path.lstat().st_mtime_ns for path in _files(root)}
    report["changed"] = sorted(str(p) for p in after.items() ^ before.items())
    return root, report


def _files(root: Path) -> list[Path]:
    return [p for p in root.rglob("*") if "out" not in p.relative_to(root).parts[:1]]


def _result(report: dict, entry: Entry) -> dict:
    """The row of an entry; an archive or a folder gives the name of what is inside."""
    stem = entry.name.removesuffix(".ipynb")
    inside = {"traversal.zip": "traversal/escaped", "links.tar.gz": "links/good"}
    start = (stem, inside.get(stem, stem), entry.name.split(".")[0])
    rows = [
        r for r in report["submissions"] if r["name"] in start or r["name"].startswith(f"{stem}/")
    ]
    assert len(rows) == 1, (entry.name, [r["name"] for r in report["submissions"]])
    return rows[0]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_submission_gets_its_mark(graded: tuple[Path, dict], entry: Entry) -> None:
    result = _result(graded[1], entry)
    softmax, *others = result["outcomes"]
    said = json.dumps(result, ensure_ascii=False)
    assert entry.says in said
    assert result["mark_again"] == []
    if entry.statuses is None:
        assert result["problem"]
        assert result["points"] == 0
        return
    if entry.name == "network.ipynb" and not (SANDBOX.namespaces or SANDBOX.kind == "bwrap"):
        pytest.skip("not verified on this machine: the network cannot be cut off")
    assert softmax["status"] in entry.statuses, said
    assert softmax["points"] == (2 if softmax["status"] == "passed" else 0)
    assert sum(outcome["points"] for outcome in others) == entry.others, said


def test_the_tray_is_large_enough() -> None:
    assert len(ENTRIES) >= 60
    assert all(isinstance(attack, Attack) for attack in ATTACKS.values())


def test_nothing_is_left_behind(graded: tuple[Path, dict]) -> None:
    root, report = graded
    assert report["changed"] == []
    allowed = {"report.json", "grades.csv", "run.json", ".lock", "students"}
    assert {path.name for path in (root / "out").iterdir()} == allowed
    for folder in (root / "out" / "students").iterdir():
        assert {p.name for p in folder.iterdir()} == {"result.json", "results.json", "report.html"}
    for place in ("/tmp", "/dev/shm", "/var/tmp", "/root"):
        for name in ("flashcourse_was_here", "flashcourse_link", "escaped.ipynb", "escaped.txt"):
            assert not os.path.lexists(os.path.join(place, name))


@pytest.mark.skipif(
    not os.path.isdir("/proc/self"), reason="not verified on this machine: processes are not listed"
)
def test_no_process_survives(graded: tuple[Path, dict]) -> None:
    root = str(graded[0]).encode()
    alive = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            if root in words and int(entry.name) != os.getpid():
                alive.append((entry.name, (entry / "cmdline").read_bytes()[:200]))
        except OSError:
            continue
    assert alive == []


def test_reports_are_whole_and_hold_no_seed(graded: tuple[Path, dict]) -> None:
    out = graded[0] / "out"
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["seed"] == SEED
    rows = list(csv.DictReader((out / "grades.csv").open(encoding="utf-8")))
    assert len(rows) == len(report["submissions"]) >= len(ENTRIES)
    for result in report["submissions"]:
        folder = out / "students" / result["folder"]
        scores = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        assert scores["score"] == result["points"]
        page = (folder / "report.html").read_text(encoding="utf-8")
        for text in (page, json.dumps(scores)):
            assert str(SEED) not in text
            assert "seed" not in text

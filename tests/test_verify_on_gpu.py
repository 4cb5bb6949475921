"""The steps that a GPU verifies: they name what exists, leave nothing out, keep what they make."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tarfile
import time
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from flashcourse.files import LESSONS, notebooks_in

ROOT = Path(__file__).parents[1]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "verify_on_gpu", ROOT / "tools" / "verify_on_gpu.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


verify = load()


def words() -> list[str]:
    return [word for step in verify.STEPS.values() for word in step.command[1:]]


def test_steps_name_what_exists() -> None:
    for word in words():
        if word.startswith("tests/"):
            assert (ROOT / word).exists(), word
        if word.startswith("flashcourse."):
            assert importlib.util.find_spec(word) is not None, word


def test_every_test_that_needs_a_gpu_is_in_a_step() -> None:
    marked = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").glob("test_*.py")
        if re.search(r"mark\.needs_gpu\b", path.read_text(encoding="utf-8"))
    ]
    assert marked
    assert set(marked) - set(words()) == set()


def test_every_lesson_is_run_and_the_first_one_last() -> None:
    lessons = [name[7:] for name in verify.STEPS if name.startswith("lesson-")]
    numbers = [path.stem[:2] for path in notebooks_in(ROOT, LESSONS)]
    assert lessons == [*numbers[1:], numbers[0]]


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "old.json").write_text("{}")
    monkeypatch.setattr(verify, "ROOT", tmp_path)
    time.sleep(0.02)
    return tmp_path


def step(name: str, program: str, seconds: int = 60, **more: object):
    return verify.Step(name, (sys.executable, "-c", program), seconds, **more)


def test_each_step_has_its_outcome_and_what_was_made_is_kept(course: Path) -> None:
    told = []
    steps = [
        step("good", "print('fine'); open('results/new.json', 'w').write('1')"),
        step("bad", "raise SystemExit(3)"),
        step("long", "import time; print('began', flush=True); time.sleep(60)", 2),
        step("beside", "import os; assert os.environ['SEEDS'] == '5'", alone=False,
             environment={"SEEDS": "5"}),
    ]  # fmt: skip
    outcomes = verify.run_steps(steps, course / "out", 5.0, told.append)
    expected = {"good": "passed", "bad": "failed", "long": "timeout", "beside": "passed"}
    assert {outcome.step: outcome.status for outcome in outcomes} == expected
    assert told == outcomes
    summary = json.loads((course / "out" / "summary.json").read_text())
    assert {row["step"]: row["status"] for row in summary} == expected
    assert (course / "out" / "long.log").read_text() == "began\n"
    with tarfile.open(course / "out" / "made.tar.gz") as archive:
        assert archive.getnames() == ["results/new.json"]


def test_what_a_step_started_ends_with_it(course: Path) -> None:
    child = "import time, pathlib; time.sleep(3); pathlib.Path('late').touch()"
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    (outcome,) = verify.run_steps([step("parent", program)], course / "out", 5.0, lambda _: None)
    assert outcome.status == "passed"
    time.sleep(3.5)
    assert not (course / "late").exists()


def test_nothing_begins_that_has_no_time(course: Path) -> None:
    steps = [step("first", "pass", 10), step("second", "pass", 600)]
    outcomes = verify.run_steps(steps, course / "out", 0.5, lambda _: None)
    assert [outcome.status for outcome in outcomes] == ["passed", "left"]


def test_unknown_steps_and_machines_without_a_gpu_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = verify.typer.Typer()
    app.command()(verify.main)
    unknown = CliRunner().invoke(app, ["papper"])
    assert unknown.exit_code == 2
    assert "papper" in unknown.output
    monkeypatch.setattr(verify.runtime, "has_gpu", lambda: False)
    refused = CliRunner().invoke(app, ["paper"])
    assert refused.exit_code == 2
    assert "no GPU" in refused.output
    listed = CliRunner().invoke(app, ["--list"])
    assert listed.exit_code == 0
    assert "right-answers" in listed.output

"""Does the notebook work as a document? nbval runs the pristine copy from top to bottom.

This gives no marks. What the notebook's own ``check`` cells say in there is the learner's
self-check; the marks come from :mod:`flashcourse.grading.marking`.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

from flashcourse import runtime
from flashcourse.files import notebook_text
from flashcourse.grading.assemble import Answers, Lab, pristine_copy
from flashcourse.grading.gate import Gate
from flashcourse.grading.limits import (
    PACKAGE,
    Limits,
    Sandbox,
    command_line,
    descendants,
    end_all,
    environment,
    memory_of,
    paused,
)
from flashcourse.grading.triton_work import UNTIMED

MAX_REPORT = 8 * 2**20
GUARD = PACKAGE.parent / "tests" / "plugins" / "nbval_guard.py"  # finds dead kernels at once


@dataclass
class Document:
    """How the notebook ran.

    Attributes:
        status: ``ran`` (errors in graded cells alone), ``errors``, ``timeout``, ``not run``.
        failed_checks: the graded cells that raised.
        errors: other cells that raised, each with what it said.
        reason: why it did not run.
    """

    status: str
    failed_checks: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    reason: str = ""


def run_document(
    lab: Lab, answers: Answers, sandbox: Sandbox, limits: Limits, folder: Path, gate: Gate
) -> Document:
    """Run a lab with a learner's answers in it, shut in like the answers themselves.

    Args:
        gate: the notebook stands still while somebody else's answer is timed on the same GPU.
    """
    if importlib.util.find_spec("nbval") is None:
        fix = "python -m pip install -e '.[lecturer]'"
        return Document("not run", reason=f"nbval is not installed: {fix}")
    folder = folder.resolve()
    place = folder / "document"
    place.mkdir(parents=True)
    notebook, report = place / f"{lab.name}.ipynb", place / "report.xml"
    copy = pristine_copy(lab, answers)
    notebook.write_text(notebook_text(copy), encoding="utf-8")
    (place / "pytest.ini").write_text("[pytest]\n")
    program = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    program += ["-p", "nbval.plugin", "-c", str(place / "pytest.ini")]
    program += ["--rootdir", str(place), f"--junitxml={report}", "--nbval-lax"]
    program += ["--nbval-current-env", f"--nbval-cell-timeout={limits.seconds:g}"]
    variables = environment(folder)
    variables[UNTIMED] = "1"
    variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # nbval alone, whatever else is installed
    if GUARD.is_file():
        (place / "nbval_guard.py").write_bytes(GUARD.read_bytes())
        program += ["-p", "nbval_guard"]
        variables["PYTHONPATH"] += f":{place}"
    program.append(str(notebook))
    words = command_line(sandbox, limits, folder, program, gpu=runtime.has_gpu())
    with gate.shared():
        ended = _run(words, folder, variables, limits, gate)
    if ended:
        return Document("timeout" if "seconds" in ended else "errors", reason=ended)
    return _read_report(report, copy)


def _run(
    words: list[str], folder: Path, variables: dict[str, str], limits: Limits, gate: Gate
) -> str:
    """Run to the end; the reason if it had to be ended."""
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env=variables,
        start_new_session=True,
    )
    deadline = time.monotonic() + limits.document_seconds
    try:
        while True:
            try:
                process.wait(0.25)
                return ""
            except subprocess.TimeoutExpired:
                family = descendants(process.pid)
            if time.monotonic() > deadline:
                return f"it did not end within {limits.document_seconds:g} seconds"
            if len(family) > limits.processes:
                return f"it started more than {limits.processes} processes"
            if memory_of(family) > limits.memory:
                return "it used too much memory"
            if gate.wanted():
                stopped = time.monotonic()
                with paused(process):
                    gate.give_way()
                deadline += time.monotonic() - stopped
    finally:
        end_all(process)


def _read_report(report: Path, notebook: object) -> Document:
    """What nbval's report says; it was written where answers can write, so it is only told."""
    try:
        if report.is_symlink() or report.stat().st_size > MAX_REPORT:
            return Document("not run", reason="nbval's report is not what it should be")
        text = report.read_text(encoding="utf-8", errors="replace")
        if "<!DOCTYPE" in text:
            return Document("not run", reason="nbval's report is not what it should be")
        cases = list(ElementTree.fromstring(text).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return Document("not run", reason="nbval left no readable report")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]  # type: ignore[attr-defined]
    document = Document("ran")
    for case in cases:
        wrong = case.find("failure") if case.find("failure") is not None else case.find("error")
        number = re.search(r"(\d+)$", case.get("name", ""))
        if wrong is None or number is None or int(number[1]) >= len(code):
            continue
        cell = code[int(number[1])]
        if cell.metadata.get("nbgrader", {}).get("grade"):
            document.failed_checks.append(cell.id)
        else:
            document.errors.append(f"{cell.id}: {_said(wrong.get('message') or '')}")
    if document.errors:
        document.status = "errors"
    elif not cases:
        document = Document("not run", reason="nbval ran no cell")
    return document


def _said(message: str) -> str:
    """The error's own line out of nbval's coloured message."""
    plain = re.sub(r"(\x1b|#x1B)\[[0-9;]*m", "", message)
    lines = [line.strip() for line in plain.split("\n") if line.strip()]
    head = next((line for line in lines if re.match(r"Cell \d+: ", line)), "")
    if lines and (not head or "caused an exception" in head):
        return lines[-1][:300]
    return head.partition(": ")[2][:300]

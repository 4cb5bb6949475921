"""Marking one submission: every question in the answers' process, every verdict in this one."""

from __future__ import annotations

import contextlib
import hashlib
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from flashcourse.grading.assemble import Answers, Asked, Lab, cells_to_run, find_answers
from flashcourse.grading.document import Document, run_document
from flashcourse.grading.gate import Gate
from flashcourse.grading.limits import Limits, Sandbox, SandboxError
from flashcourse.grading.mark import mark_observed
from flashcourse.grading.process import StartFailed, Stopped, Workshop
from flashcourse.grading.question import Case, Check, Observation, Question
from flashcourse.grading.race import run_race
from flashcourse.grading.registry import find_question
from flashcourse.grading.submissions import Submission
from flashcourse.grading.verdict import Verdict
from flashcourse.grading.wire import WireError

MARK_AGAIN = ("not_verified", "grader_error")  # these are nobody's zero


class Poisoned(RuntimeError):
    """A CUDA error happened in this process, a known mistake's for instance. It would fail all
    that follows."""


@dataclass
class Outcome:
    """What became of one question.

    Attributes:
        points: earned; None where the question has to be marked again.
        reason: why it is neither passed nor failed, or a remark.
        checks: the properties that hold.
        findings: what was wrong: ``check``, ``case``, ``message`` and ``mistakes``.
        seconds: how long it took.
    """

    question: str
    status: str
    points: float | None
    max_points: float
    reason: str = ""
    checks: list[str] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Settings:
    """How to grade; equal for a whole batch."""

    seed: int
    sandbox: Sandbox
    limits: Limits = field(default_factory=Limits)
    document: bool = True
    gate: Path | None = None  # a file that keeps measurements apart from other submissions
    share: float = 0.0  # of a GPU's memory for each process; 0 leaves it open


@dataclass
class Marks:
    """One submission's result, as it stands in the report."""

    name: str
    origin: str
    lab: str
    problem: str = ""
    notes: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    document: Document = field(default_factory=lambda: Document("not run"))

    @property
    def mark_again(self) -> list[str]:
        """The questions that have to be marked again, elsewhere or by a person."""
        return [o.question for o in self.outcomes if o.status in MARK_AGAIN]

    @property
    def points(self) -> float:
        """The points so far."""
        return sum(outcome.points or 0.0 for outcome in self.outcomes)

    @property
    def max_points(self) -> float:
        """What the lab gives."""
        return sum(outcome.max_points for outcome in self.outcomes)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, with the sums."""
        sums = {"points": self.points, "max_points": self.max_points, "mark_again": self.mark_again}
        return asdict(self) | sums


def question_seed(seed: int, question: str) -> int:
    """The seed of one question's inputs: equal for every submission of a batch."""
    digest = hashlib.sha256(f"{seed}/{question}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def mark_submission(
    submission: Submission,
    lab: Lab,
    settings: Settings,
    folder: Path,
    *,
    rivals: Rivals | None = None,
    done: Mapping[str, Outcome] = MappingProxyType({}),
    progress: Callable[[str], None] = lambda text: None,
    report: Callable[[Outcome], None] = lambda outcome: None,
) -> Marks:
    """Mark every question of a submission.

    Args:
        folder: an empty folder for what the answers write.
        rivals: what answers are timed against, kept from submission to submission.
        done: the questions marked before, in a process that is no more.
        progress: told the question at work.
        report: given every outcome as soon as it is there.

    Raises:
        Poisoned: the GPU no longer works in this process; outcomes so far were reported.
    """
    marks = Marks(submission.name, submission.origin, lab.name, submission.problem)
    if submission.problem:
        marks.outcomes = [
            Outcome(a.question, "missing", 0.0, a.points, submission.problem) for a in lab.asked
        ]
        return marks
    answers = find_answers(submission, lab)
    marks.notes = answers.notes
    gate = Gate(settings.gate)
    with contextlib.ExitStack() as stack:
        workshop = stack.enter_context(Workshop(folder, settings.sandbox, settings.limits, gate))
        if rivals is None:
            rivals = stack.enter_context(Rivals(folder / "rivals", settings))
        for asked in lab.asked:
            if asked.question in done:
                marks.outcomes.append(done[asked.question])
                continue
            progress(asked.question)
            started = time.monotonic()
            outcome = _mark_question(lab, asked, answers, settings, workshop, rivals)
            outcome.seconds = round(time.monotonic() - started, 3)
            marks.outcomes.append(outcome)
            report(outcome)
            _check_gpu()
    if settings.document:
        progress("the notebook as a document")
        limits = settings.limits
        if any(outcome.status == "timeout" for outcome in marks.outcomes):  # it will hang as well
            seconds = min(limits.document_seconds, 1.5 * limits.seconds)
            limits = replace(limits, document_seconds=seconds)
        marks.document = run_document(lab, answers, settings.sandbox, limits, folder, gate)
    return marks


def _check_gpu() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise Poisoned(str(error)) from error


def _mark_question(
    lab: Lab,
    asked: Asked,
    answers: Answers,
    settings: Settings,
    workshop: Workshop,
    rivals: Rivals,
) -> Outcome:
    if asked.cell not in answers.sources:
        reason = "the answer cell is missing or was left as it was given out"
        return Outcome(asked.question, "missing", 0.0, asked.points, reason)
    try:
        question = find_question(asked.question)
        unverified = question.needs() if question.needs else ""
        if unverified:
            return Outcome(asked.question, "not_verified", None, asked.points, unverified)
        with workshop.gate.shared():
            workshop.define(cells_to_run(lab, asked, answers), asked.expression)
        verdict = mark_observed(
            question,
            lambda check, case: _look(question, check, case, workshop, rivals),
            question_seed(settings.seed, question.id),
            workshop.gate.shared,
        )
        return _from_verdict(verdict, asked)
    except Stopped as end:
        return Outcome(asked.question, end.status, 0.0, asked.points, end.reason)
    except SandboxError:
        raise
    except (StartFailed, WireError, Exception) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        workshop.close()
        return Outcome(asked.question, "grader_error", None, asked.points, reason)
    finally:
        workshop.finish()


def _from_verdict(verdict: Verdict, asked: Asked) -> Outcome:
    findings = [
        {
            "check": finding.check,
            "case": finding.case,
            "message": finding.message,
            "mistakes": [{"name": n, "explanation": e} for n, e in finding.mistakes],
        }
        for finding in verdict.findings
    ]
    points = {"passed": asked.points, "failed": 0.0}.get(verdict.status)
    return Outcome(
        asked.question,
        verdict.status,
        points,
        asked.points,
        verdict.reason,
        list(verdict.checks),
        findings,
    )


def _look(
    question: Question, check: Check, case: Case, workshop: Workshop, rivals: Rivals
) -> Observation:
    with workshop.gate.shared():
        seen = workshop.observe(question, check, case)
    if check.race is None or seen.error:
        return seen
    with rivals.at(question, check, workshop.gate) as opponent:
        return run_race(question, check, case, seen, workshop, opponent, workshop.gate)


class Rivals:
    """Processes for the opponents of races; no learner's code is ever loaded there."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder, settings
        self._kept: dict[tuple[str, str], _Rival] = {}

    def __enter__(self) -> Rivals:
        return self

    def __exit__(self, *_: object) -> None:
        for rival in self._kept.values():
            rival.close()
        self._kept.clear()

    def processes(self) -> list[int]:
        """Their ids."""
        return [pid for rival in self._kept.values() if (pid := rival.pid()) is not None]

    @contextmanager
    def at(self, question: Question, check: Check, gate: Gate) -> Iterator[_Rival]:
        """The opponent of a check, started on the first call; a failed one is replaced."""
        key = question.id, check.name
        rival = self._kept.pop(key, None)
        if rival is None:
            folder = self.folder / str(len(self._kept))
            rival = _Rival(folder, self.settings.sandbox, self.settings.limits, gate)
            with gate.shared():
                rival.oppose(question, check)
        rival.gate = gate
        try:
            yield rival
        finally:
            if rival.pid() is not None:
                self._kept[key] = rival


class _Rival(Workshop):
    """A process whose end is the grader's fault, not the answer's."""

    def _receive(self, ended_is_fine: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
        try:
            return super()._receive(ended_is_fine)
        except Stopped as end:
            raise StartFailed(f"the process that is timed beside answers: {end.reason}") from end

"""What a check answers: a verdict with its findings, readable by a person and by a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["passed", "failed", "not_verified"]
_MARK = {"passed": "✓", "failed": "✗", "not_verified": "?"}


@dataclass(frozen=True)
class Finding:
    """One thing that was wrong.

    ``mistakes`` names the known mistakes that give exactly the numbers that came, each as
    (name, explanation). It is empty if none does: then the cause is not guessed.
    """

    check: str
    case: str
    message: str
    mistakes: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"✗ {self.check}", f"    input: {self.case}", f"    {self.message}"]
        if len(self.mistakes) == 1:
            name, explanation = self.mistakes[0]
            lines.append(f"    These are exactly the numbers of a known mistake — {name}.")
            lines.append(f"    {explanation}")
        elif self.mistakes:
            lines.append("    Each of these known mistakes gives exactly these numbers:")
            lines += [f"    – {name}: {explanation}" for name, explanation in self.mistakes]
        return "\n".join(lines)


@dataclass(frozen=True)
class Verdict:
    """The result of one question.

    Attributes:
        question: its id.
        status: ``passed``, ``failed``, or ``not_verified`` if this machine cannot tell.
        points, max_points: earned and possible; points is 0 unless the status is ``passed``.
        findings: what was wrong; empty unless the status is ``failed``.
        seed: makes the same inputs again, as ``check(..., seed=seed)``.
        checks: the names of the checks that passed.
        reason: why the answer could not be verified here, or a remark on where it passed; empty
            otherwise.
    """

    question: str
    status: Status
    points: float
    max_points: float
    findings: tuple[Finding, ...] = ()
    seed: int = 0
    checks: tuple[str, ...] = ()
    reason: str = ""

    @property
    def passed(self) -> bool:
        """True only for the status ``passed``."""
        return self.status == "passed"

    def __str__(self) -> str:
        head = f"{_MARK[self.status]} {self.question}: {self.status.replace('_', ' ')}"
        if self.status == "not_verified":
            return "\n".join(
                [
                    f"{head} on this machine — {self.reason}",
                    *(f"  ✓ {name}" for name in self.checks),
                ]
            )
        remark = f" ({self.reason})" if self.reason else ""
        lines = [f"{head}, {self.points:g} of {self.max_points:g} points{remark}"]
        lines += [f"  ✓ {name}" for name in self.checks]
        for finding in self.findings:
            lines += [f"  {line}" for line in str(finding).splitlines()]
        if self.findings:
            lines.append(f"  (the same inputs again: seed={self.seed})")
        return "\n".join(lines)


class CheckFailed(AssertionError):
    """An answer failed its check. ``verdict`` holds the details."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(f"{verdict.question} failed: see the findings above")
        self.verdict = verdict

"""Every known mistake is rejected by its question, and named: it, and no other.

In Triton's interpreter a mistake takes seconds. Without a GPU every fourth of labs 4 and later
stands for the others, which a thorough run adds.
"""

from __future__ import annotations

import pytest
from plugins.machine import THOROUGH, not_verified

from flashcourse import runtime
from flashcourse.grading import all_questions, mark

SEEDS = 5 if THOROUGH else 1


def mistakes():
    for question in all_questions().values():
        slow = int(question.id[3]) >= 4 and not runtime.has_gpu()
        for number, mistake in enumerate(question.mistakes):
            marks = [pytest.mark.thorough] if slow and number % 4 else []
            yield pytest.param(question, mistake, id=f"{question.id}: {mistake.name}", marks=marks)


@pytest.mark.parametrize(("question", "mistake"), list(mistakes()))
def test_it_is_rejected_and_named(question, mistake):
    for seed in range(SEEDS):
        verdict = mark(question, mistake.answer, seed)
        if verdict.status == "not_verified":
            not_verified(verdict.reason)
        assert verdict.status == "failed", f"seed {seed}: accepted"
        assert verdict.points == 0
        named = [name for finding in verdict.findings for name, _ in finding.mistakes]
        assert mistake.name in named, str(verdict)
        assert set(named) == {mistake.name}, f"also named: {set(named)}\n{verdict}"

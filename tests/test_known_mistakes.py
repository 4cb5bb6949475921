"""Every known mistake is rejected by its question, and named: it, and no other."""

from __future__ import annotations

import pytest

from flashcourse.grading import all_questions, mark

SEEDS = 2
MISTAKES = [(q, m) for q in all_questions().values() for m in q.mistakes]


@pytest.mark.parametrize(
    ("question", "mistake"), MISTAKES, ids=[f"{q.id}: {m.name}" for q, m in MISTAKES]
)
def test_it_is_rejected_and_named(question, mistake):
    for seed in range(SEEDS):
        verdict = mark(question, mistake.answer, seed)
        if verdict.status == "not_verified":
            pytest.skip(f"not verified on this machine: {verdict.reason}")
        assert verdict.status == "failed", f"seed {seed}: accepted"
        assert verdict.points == 0
        named = [name for finding in verdict.findings for name, _ in finding.mistakes]
        assert mistake.name in named, str(verdict)
        assert set(named) == {mistake.name}, f"also named: {set(named)}\n{verdict}"

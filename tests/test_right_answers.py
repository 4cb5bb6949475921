"""No right answer is rejected: the solutions, and answers written in other ways, on many inputs.

A thorough run (``make test THOROUGH=1``) draws 200 inputs a question; FLASHCOURSE_SEEDS says
another number.
"""

from __future__ import annotations

import os

import pytest
from plugins.machine import THOROUGH
from right_answers import other_right_answers
from solution_answers import solution_answers

from flashcourse import runtime
from flashcourse.grading import all_questions, mark

QUESTIONS = all_questions()
SEEDS = int(os.environ.get("FLASHCOURSE_SEEDS", "200" if THOROUGH else "60"))


def seeds(question_id, share=1):
    """Seeds for a question; fewer for the interpreter's kernels, which take seconds an answer."""
    slow = int(question_id[3]) >= 4 and not runtime.has_gpu()
    return range(max(1, SEEDS // share // (20 if slow else 1)))


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=lambda q: q.id)
def test_the_solution_is_never_rejected(question):
    answer = solution_answers()[question.id]
    for seed in seeds(question.id):
        verdict = mark(question, answer, seed)
        assert verdict.status != "failed", str(verdict)
        if verdict.passed:
            assert verdict.points == verdict.max_points == question.points


@pytest.mark.parametrize(
    ("question_id", "answer"),
    other_right_answers(),
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", "answer"),
)
def test_other_right_answers_are_never_rejected(question_id, answer):
    for seed in seeds(question_id, share=10):
        verdict = mark(QUESTIONS[question_id], answer, seed)
        assert verdict.status != "failed", str(verdict)

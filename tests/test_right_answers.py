"""No right answer is rejected: the solutions, and answers written in other ways, on many inputs.

A thorough run (``make test THOROUGH=1``) draws 200 inputs a question, an ordinary one 60, and a
twentieth of them where Triton interprets; FLASHCOURSE_SEEDS says another number. The parts of a
long run go to several processes: ``pytest -n 8 --dist load``, but on a GPU ``lab4.speed`` wants to
be alone: ``-n 0 -k lab4.speed``.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from plugins.machine import THOROUGH
from right_answers import other_right_answers
from solution_answers import solution_answers

from flashcourse import runtime
from flashcourse.grading import all_questions, mark

QUESTIONS = all_questions()
SEEDS = int(os.environ.get("FLASHCOURSE_SEEDS", "200" if THOROUGH else "60"))


PART = 50  # seeds of one test


def cases(answers, share=1):
    """Parameters (question, answer, seeds) from (question id, answer); None is the solution.

    Interpreted kernels take seconds an answer; there a twentieth of the seeds stands for all.
    """
    found = []
    for number, (question_id, answer) in enumerate(answers):
        slow = int(question_id[3]) >= 4 and not runtime.has_gpu()
        count = max(1, SEEDS // share // (20 if slow else 1))
        name = getattr(answer, "__name__", f"answer {number}") if answer else "solution"
        for first in range(0, count, PART):
            seeds = range(first, min(first + PART, count))
            test_id = f"{question_id}: {name}, {seeds.start} to {seeds.stop - 1}"
            found.append(pytest.param(QUESTIONS[question_id], answer, seeds, id=test_id))
    return found


def never_rejected(question, answer, seeds):
    for seed in seeds:
        verdict = mark(question, answer, seed)
        assert verdict.status != "failed", str(verdict)
        if verdict.passed:
            assert verdict.points == verdict.max_points == question.points


@pytest.mark.parametrize(("question", "answer", "seeds"), cases((name, None) for name in QUESTIONS))
def test_the_solution_is_never_rejected(question, answer, seeds):
    never_rejected(question, solution_answers()[question.id], seeds)


@pytest.mark.parametrize(("question", "answer", "seeds"), cases(other_right_answers(), share=10))
def test_other_right_answers_are_never_rejected(question, answer, seeds):
    never_rejected(question, answer, seeds)


@pytest.mark.needs_triton
def test_every_question_has_two_other_right_answers():
    counts = Counter(question_id for question_id, _ in other_right_answers())
    assert {name: counts[name] for name in QUESTIONS if counts[name] < 2} == {}

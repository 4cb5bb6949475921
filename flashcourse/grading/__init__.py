"""Graded questions: checks on fresh inputs, known mistakes, and verdicts with three states."""

from __future__ import annotations

import random

from flashcourse.grading.mark import mark
from flashcourse.grading.question import Answer, Question
from flashcourse.grading.registry import all_questions, find_question
from flashcourse.grading.verdict import CheckFailed, Finding, Verdict

__all__ = ["CheckFailed", "Finding", "Verdict", "all_questions", "check", "find_question", "mark"]


def check(
    question: str | Question,
    answer: Answer,
    *,
    raise_on_fail: bool = True,
    seed: int | None = None,
) -> Verdict:
    """Check an answer on fresh random inputs, print the verdict, and return it.

    Args:
        question: the question's id, such as ``"lab3.tiled_forward"``; or a question itself, which
            need not belong to a lab.
        answer: your function (or class), with the signature the lab states.
        raise_on_fail: raise if something failed, so that a notebook's run stops there.
        seed: repeat the inputs of an earlier verdict; fresh ones by default.

    Returns:
        the verdict: ``passed``, ``points``, ``max_points``, ``status`` and ``findings``.

    Raises:
        CheckFailed: the answer failed and ``raise_on_fail`` is True.
        ValueError: there is no such question.
        TypeError: the answer cannot be called.
    """
    asked = question if isinstance(question, Question) else find_question(question)
    if not callable(answer):
        raise TypeError(f"answer must be your function itself, got {type(answer).__name__}")
    verdict = mark(asked, answer, random.SystemRandom().getrandbits(31) if seed is None else seed)
    print(verdict)
    if verdict.status == "failed" and raise_on_fail:
        raise CheckFailed(verdict)
    return verdict

"""All questions by id, found in the files of ``flashcourse/grading/questions``."""

from __future__ import annotations

import difflib
import importlib
import os
import pkgutil
from functools import cache

from flashcourse.grading import questions
from flashcourse.grading.question import Question


@cache
def all_questions() -> dict[str, Question]:
    """Every question, in the order of the labs. A question is a module's ``QUESTION``.

    A lecturer's own questions join them: ``FLASHCOURSE_QUESTIONS`` names their modules, separated
    by spaces, which must be found on ``PYTHONPATH``.
    """
    names = [f"{questions.__name__}.{m.name}" for m in pkgutil.iter_modules(questions.__path__)]
    names += os.environ.get("FLASHCOURSE_QUESTIONS", "").split()
    found = [importlib.import_module(name).QUESTION for name in names]
    return {question.id: question for question in sorted(found, key=lambda q: q.id)}


def find_question(question_id: str) -> Question:
    """The question with this id.

    Raises:
        ValueError: there is none; the message lists the nearest ids.
    """
    known = all_questions()
    if question_id in known:
        return known[question_id]
    near = difflib.get_close_matches(str(question_id), known, n=3, cutoff=0.0)
    raise ValueError(f"there is no question {question_id!r}; near it: {', '.join(near)}")

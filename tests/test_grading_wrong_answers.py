"""Wrong answers to labs 1 to 3 that look right: each must be rejected, named or not."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import wrong_answers
from plugins.machine import THOROUGH

from flashcourse.grading import find_question, mark

SEEDS = 5 if THOROUGH else 1
TABLE = [
    (question, answer)
    for module in pkgutil.iter_modules(wrong_answers.__path__)
    for question, group in importlib.import_module(
        f"wrong_answers.{module.name}"
    ).WRONG_ANSWERS.items()
    for answer in group
]


@pytest.mark.parametrize(
    ("question", "answer"),
    TABLE,
    ids=[f"{question}: {answer.__name__}" for question, answer in TABLE],
)
def test_a_wrong_answer_is_rejected(question, answer):
    for seed in range(SEEDS):
        verdict = mark(find_question(question), answer, seed)
        assert verdict.status == "failed", f"seed {seed}: accepted"
        assert all(finding.message for finding in verdict.findings)


def test_the_table_covers_the_labs():
    assert {question[:4] for question, _ in TABLE} == {"lab1", "lab2", "lab3"}
    assert len(TABLE) >= 40

"""A hundred submissions of lab 4 in one batch: every mark as expected, every mistake named.

The batch takes a quarter of an hour on two cores, so only a thorough run does it. With more cores::

    python tests/class_of_100 --workers 14 --stop-after 560
"""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest
from class_of_100 import SIZE, papers
from class_of_100.__main__ import compare, grade

from flashcourse import runtime
from flashcourse.grading import find_question
from flashcourse.grading.limits import Limits

pytestmark = pytest.mark.needs_triton
MINUTES = 10 if runtime.has_gpu() else 30


def test_the_class_is_a_class():
    chosen = papers()
    assert len({paper.name for paper in chosen}) == len(chosen) == SIZE
    statuses = Counter(paper.forward.statuses[0] for paper in chosen)
    assert statuses["passed"] >= 40
    assert statuses["failed"] >= 40
    assert {"timeout", "crashed", "out_of_memory", "missing"} <= set(statuses)
    shown = {paper.forward.mistake for paper in chosen} - {""}
    known = {mistake.name for mistake in find_question("lab4.flash_forward").mistakes}
    assert shown <= known
    assert len(shown) >= 20


@pytest.mark.parametrize(
    "paper", papers() if runtime.triton_installed() else [], ids=lambda p: p.name
)
def test_every_cell_is_python_and_says_whose_answer_it_is(paper):
    for cell in (paper.softmax, paper.forward):
        if cell.source:
            assert cell.source.startswith("# lab: lab4-")
            if cell.name != "syntax":
                compile(cell.source, cell.name, "exec")


@pytest.mark.thorough
@pytest.mark.timeout(2 * 60 * MINUTES)
def test_a_class_is_graded_in_time_and_as_expected(tmp_path):
    workers = max(2, (os.cpu_count() or 2) - 2)
    started = time.monotonic()
    found = grade(papers(), tmp_path, workers, Limits(seconds=90), document=True, seed=1)
    minutes = (time.monotonic() - started) / 60
    strange = {
        paper.name: compare(paper, found[paper.name], runtime.has_gpu()) for paper in papers()
    }
    assert {name: wrong for name, wrong in strange.items() if wrong} == {}
    assert minutes < MINUTES

"""lab9.double: twice the input."""

from __future__ import annotations

from flashcourse.grading.draw import normal
from flashcourse.grading.judge import judge_tensor
from flashcourse.grading.question import Case, Check, Mistake, Question


def _cases(generator):
    for size in (3, 7):
        yield Case(f"x ({size},)", (normal(generator, size),))


def _judge(case, observation):
    return judge_tensor("y", observation.output, 2 * case.args[0].double(), 1e-6)


QUESTION = Question(
    "lab9.double",
    2,
    (Check("doubles every entry", _cases, _judge),),
    (Mistake("squared", "x² is 2x only at 0 and 2.", lambda x: x.square()),),
)

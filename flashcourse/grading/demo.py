"""A question of no lab: lesson 00 shows with it what a verdict looks like."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flashcourse.grading.draw import integer, normal
from flashcourse.grading.judge import judge_tensor
from flashcourse.grading.question import Case, Check, Mistake, Observation, Question


def _rectangles(generator: torch.Generator) -> Iterator[Case]:
    for _ in range(2):
        rows = integer(generator, 2, 5)
        columns = rows + integer(generator, 1, 4)
        x = normal(generator, rows, columns)
        yield Case(f"x of shape ({rows}, {columns})", (x,))


def _single_column(generator: torch.Generator) -> Iterator[Case]:
    yield Case("x of shape (3, 1)", (normal(generator, 3, 1),))


def _judge(case: Case, observation: Observation) -> str | None:
    x = case.args[0]
    return judge_tensor("mean", observation.output, x.double().mean(dim=1), 1e-5, x.dtype)


DEMO = Question(
    id="demo.row_mean",
    points=1,
    checks=(
        Check("the mean of each row", _rectangles, _judge),
        Check("a single column", _single_column, _judge),
    ),
    mistakes=(
        Mistake(
            "mean over the columns",
            "dim=0 runs down the rows and leaves one number a column.",
            lambda x: x.mean(dim=0),
        ),
        Mistake("not divided", "the sum was returned, not the mean.", lambda x: x.sum(dim=1)),
        Mistake(
            "divided by the number of rows",
            "a row has as many entries as there are columns: x.shape[1].",
            lambda x: x.sum(dim=1) / x.shape[0],
        ),
    ),
)

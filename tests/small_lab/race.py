"""lab9.race: sums of exponentials, faster than a loop over rows. A race that needs no GPU."""

from __future__ import annotations

import torch

from flashcourse.grading.draw import normal
from flashcourse.grading.judge import judge_tensor
from flashcourse.grading.question import Case, Check, Question, Race

FACTOR = 5.0  # a loop takes twenty times as long; a busy machine changes that by two


def row_by_row(x):
    """The opponent."""
    return torch.stack([torch.exp(row).sum() for row in x])


def _cases(generator):
    yield Case("x (400, 64)", (normal(generator, 400, 64),))


def _changes(generator, case, runs):
    return torch.rand(runs, 1, 64, generator=generator)


def _vary(args, change):
    return (args[0] * change,)


def _judge_sums(args, sums):
    return judge_tensor("sums", sums, args[0].double().exp().sum(dim=1), 1e-3)


def _judge(case, observation):
    output = observation.output
    message = _judge_sums(case.args, output["output"]) or output["wrong"]
    if message:
        return message
    ratio = output["plain_ms"] / output["ms"]
    return None if ratio >= FACTOR else f"{ratio:.2f} times as fast"


def _never(answer, *args):
    raise AssertionError("the grader measures from outside")


RACE = Race(
    opponent=row_by_row,
    changes=_changes,
    vary=_vary,
    digest=lambda sums: sums,
    judge_digest=_judge_sums,
    judge_output=_judge_sums,
    runs=12,
    rounds=4,
)
CHECK = Check(f"at least {FACTOR:g} times as fast", _cases, _judge, _never, race=RACE)
QUESTION = Question("lab9.race", 2, (CHECK,), ())

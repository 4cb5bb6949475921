"""lab9.add: the sum of two vectors, by a Triton kernel of one's own."""

from __future__ import annotations

import torch

from flashcourse import runtime
from flashcourse.grading.draw import normal
from flashcourse.grading.judge import judge_tensor
from flashcourse.grading.question import Case, Check, Question


def _cases(generator):
    for size in (5, 33):
        x, y = normal(generator, size), normal(generator, size)
        yield Case(f"x and y ({size},)", (x.to(runtime.device()), y.to(runtime.device())))


def _judge(case, observation):
    if not any(launch.own for launch in observation.launches):
        return "no kernel of your own was launched"
    x, y = (tensor.double() for tensor in case.args)
    return judge_tensor("out", observation.output, x + y, 1e-6, torch.float32)


def _needs():
    return "" if runtime.triton_installed() else "Triton is not installed"


QUESTION = Question("lab9.add", 2, (Check("adds", _cases, _judge),), (), needs=_needs)

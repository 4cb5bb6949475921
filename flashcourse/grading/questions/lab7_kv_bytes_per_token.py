"""lab7.kv_bytes_per_token: what one token costs in the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from flashcourse.grading.draw import integer
from flashcourse.grading.judge import judge_number, plain_number
from flashcourse.grading.question import Answer, Case, Check, Mistake, Observation, Question
from flashcourse.grading.questions.lab2_naive_bytes import describe

ARGUMENTS = ("layers", "heads_kv", "head_dim", "itemsize")


def reference(layers: int, heads_kv: int, head_dim: int, itemsize: int) -> int:
    """A key and a value of head_dim numbers, in every KV head of every layer."""
    return 2 * layers * heads_kv * head_dim * itemsize


Shape = tuple[int, int, int, int]


def _case(*models: Shape) -> Case:
    """Models that are judged together: what an answer gives for one itemsize tells its mistakes
    apart in another.
    """
    return Case("; ".join(describe(ARGUMENTS, model) for model in models), (list(models),))


def _cases(generator: torch.Generator) -> Iterator[Case]:
    models: list[Shape] = []
    for itemsize in (2, 4, 1, 8):
        layers, heads_kv = 2 * integer(generator, 5, 20) + 1, 2 * integer(generator, 2, 6) + 1
        models.append((layers, heads_kv, 2 * integer(generator, 20, 60) + 1, itemsize))
    yield _case(*models)


def _one_head(generator: torch.Generator) -> Iterator[Case]:
    yield _case(
        (integer(generator, 5, 40), 1, 2 * integer(generator, 20, 60) + 1, 8),
        (1, integer(generator, 3, 9), 2 * integer(generator, 20, 60) + 1, 2),
    )


def _call(answer: Answer, models: list[Shape]) -> list[Any]:
    return [plain_number(answer(*model)) for model in models]


def _judge(case: Case, observation: Observation) -> str | None:
    for model, actual in zip(case.args[0], observation.output, strict=True):
        message = judge_number("the number of bytes", actual, reference(*model))
        if message:
            return f"{message}, for {describe(ARGUMENTS, model)}"
    return None


def _wrong(count: Callable[[int, int, int, int], float]) -> Callable[..., int]:
    """An answer that computes ``count``, as an integer."""

    def kv_bytes_per_token(layers: int, heads_kv: int, head_dim: int, itemsize: int) -> int:
        return int(count(layers, heads_kv, head_dim, itemsize))

    return kv_bytes_per_token


QUESTION = Question(
    id="lab7.kv_bytes_per_token",
    points=1,
    checks=(
        Check("any shape of model, 1 to 8 bytes a number", _cases, _judge, _call),
        Check("one KV head, one layer", _one_head, _judge, _call),
    ),
    mistakes=(
        Mistake(
            "keys or values alone",
            "both are kept: a key and a value, so twice as many numbers.",
            _wrong(lambda layers, heads, dim, size: layers * heads * dim * size),
        ),
        Mistake(
            "one layer alone",
            "every layer has keys and values of its own.",
            _wrong(lambda layers, heads, dim, size: 2 * heads * dim * size),
        ),
        Mistake(
            "one KV head alone",
            "every KV head keeps its own key and value.",
            _wrong(lambda layers, heads, dim, size: 2 * layers * dim * size),
        ),
        Mistake(
            "numbers instead of bytes",
            "a number takes itemsize bytes.",
            _wrong(lambda layers, heads, dim, size: 2 * layers * heads * dim),
        ),
        Mistake(
            "always 2 bytes a number",
            "float32 takes 4 bytes and int8 takes 1: itemsize says it.",
            _wrong(lambda layers, heads, dim, size: 2 * layers * heads * dim * 2),
        ),
        Mistake(
            "always 4 bytes a number",
            "float16 takes 2 bytes and int8 takes 1: itemsize says it.",
            _wrong(lambda layers, heads, dim, size: 2 * layers * heads * dim * 4),
        ),
        Mistake(
            "divided by 8",
            "itemsize is in bytes, not in bits.",
            _wrong(lambda layers, heads, dim, size: 2 * layers * heads * dim * size // 8),
            (_wrong(lambda layers, heads, dim, size: 2 * layers * heads * dim * (size // 8)),),
        ),
        Mistake(
            "bits instead of bytes",
            "itemsize is in bytes already.",
            _wrong(lambda layers, heads, dim, size: 16 * layers * heads * dim * size),
        ),
        Mistake(
            "queries counted as well",
            "a query is used once and thrown away; only keys and values are needed again.",
            _wrong(lambda layers, heads, dim, size: 3 * layers * heads * dim * size),
        ),
        Mistake(
            "head_dim squared",
            "a key is a vector of head_dim numbers.",
            _wrong(lambda layers, heads, dim, size: 2 * layers * heads * dim * dim * size),
        ),
    ),
)

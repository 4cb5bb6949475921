"""lab7.kv_bytes_per_token: what one token costs in the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from flashcourse.grading.draw import integer
from flashcourse.grading.judge import call_for_number, judge_number
from flashcourse.grading.question import Case, Check, Mistake, Observation, Question

ARGUMENTS = ("layers", "heads_kv", "head_dim", "itemsize")


def reference(layers: int, heads_kv: int, head_dim: int, itemsize: int) -> int:
    """A key and a value of head_dim numbers, in every KV head of every layer."""
    return 2 * layers * heads_kv * head_dim * itemsize


def _case(*values: int) -> Case:
    return Case(", ".join(f"{n}={v}" for n, v in zip(ARGUMENTS, values, strict=True)), values)


def _cases(generator: torch.Generator) -> Iterator[Case]:
    for itemsize in (8, 2, 4, 1):  # 8 first: there no two mistakes give the same number
        layers, heads_kv = 2 * integer(generator, 5, 20) + 1, 2 * integer(generator, 2, 6) + 1
        yield _case(layers, heads_kv, 2 * integer(generator, 20, 60) + 1, itemsize)


def _one_head(generator: torch.Generator) -> Iterator[Case]:
    yield _case(integer(generator, 5, 40), 1, 2 * integer(generator, 20, 60) + 1, 8)
    yield _case(1, integer(generator, 3, 9), 2 * integer(generator, 20, 60) + 1, 8)


def _judge(case: Case, observation: Observation) -> str | None:
    return judge_number("the number of bytes", observation.output, reference(*case.args))


def _wrong(count: Callable[[int, int, int, int], float]) -> Callable[..., int]:
    """An answer that computes ``count``, as an integer."""

    def kv_bytes_per_token(layers: int, heads_kv: int, head_dim: int, itemsize: int) -> int:
        return int(count(layers, heads_kv, head_dim, itemsize))

    return kv_bytes_per_token


QUESTION = Question(
    id="lab7.kv_bytes_per_token",
    points=1,
    checks=(
        Check("any shape of model, 1 to 8 bytes a number", _cases, _judge, call_for_number),
        Check("one KV head, one layer", _one_head, _judge, call_for_number),
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

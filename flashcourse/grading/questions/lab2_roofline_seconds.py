"""lab2.roofline_seconds: the least time of a kernel on a chip with two limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from flashcourse.grading.draw import integer
from flashcourse.grading.judge import judge_number, plain_number
from flashcourse.grading.question import Answer, Case, Check, Mistake, Observation, Question
from flashcourse.grading.questions.lab2_naive_bytes import describe

ARGUMENTS = ("flops", "bytes_moved", "peak_flops", "bandwidth")


def reference(flops: float, bytes_moved: float, peak_flops: float, bandwidth: float) -> float:
    """Transfers and arithmetic overlap: the longer of the two."""
    return max(flops / peak_flops, bytes_moved / bandwidth)


def _cases(generator: torch.Generator) -> Iterator[Case]:
    """One case of five kernels: compute-bound, memory-bound, one of each a factor 1,000 up, and
    one near the ridge, where the two times are nearly equal.

    They are judged together, so that what an answer gives in one regime tells its mistakes apart
    in the other.
    """
    peak_flops = integer(generator, 50, 900) * 10**12
    bandwidth = integer(generator, 300, 4000) * 10**9
    kernels = []
    for scale, times_the_ridge in ((1, 7), (1, 0.1), (1000, 3), (1000, 0.4), (1, 1.02)):
        bytes_moved = integer(generator, 10**6, 10**7) * scale
        flops = int(bytes_moved * peak_flops / bandwidth * times_the_ridge)
        kernels.append((flops, bytes_moved, peak_flops, bandwidth))
    yield Case(
        f"a chip of {peak_flops:.3g} FLOP/s and {bandwidth:.3g} bytes/s, five kernels", (kernels,)
    )


def _call(answer: Answer, kernels: list[tuple[int, ...]]) -> list[Any]:
    return [plain_number(answer(*kernel)) for kernel in kernels]


def _judge(case: Case, observation: Observation) -> str | None:
    for kernel, actual in zip(case.args[0], observation.output, strict=True):
        message = judge_number("the time in seconds", actual, reference(*kernel), exact=False)
        if message:
            return f"{message}, for {describe(ARGUMENTS, kernel)}"
    return None


Rule = Callable[[float, float, float, float], float]


def _rule(rule: Rule) -> Rule:
    def roofline_seconds(
        flops: float, bytes_moved: float, peak_flops: float, bandwidth: float
    ) -> float:
        return rule(flops, bytes_moved, peak_flops, bandwidth)

    return roofline_seconds


QUESTION = Question(
    id="lab2.roofline_seconds",
    points=2,
    checks=(Check("compute-bound and memory-bound kernels", _cases, _judge, _call),),
    mistakes=(
        Mistake(
            "the two times added",
            "a chip computes while it loads: the longer of the two times hides the other.",
            _rule(lambda f, b, p, w: f / p + b / w),
        ),
        Mistake(
            "the shorter of the two times",
            "a kernel is done when both its arithmetic and its transfers are: the longer one "
            "decides. Whoever compares with the ridge point: above it, where flops / bytes_moved "
            "is more than peak_flops / bandwidth, that is the arithmetic.",
            _rule(lambda f, b, p, w: min(f / p, b / w)),
        ),
        Mistake(
            "the arithmetic alone",
            "a kernel below the ridge point waits for its bytes: bytes_moved / bandwidth.",
            _rule(lambda f, b, p, w: f / p),
        ),
        Mistake(
            "the transfers alone",
            "a kernel above the ridge point waits for its arithmetic: flops / peak_flops.",
            _rule(lambda f, b, p, w: b / w),
        ),
        Mistake(
            "the two rates exchanged",
            "FLOPs are divided by peak_flops and bytes by bandwidth.",
            _rule(lambda f, b, p, w: max(f / w, b / p)),
        ),
        Mistake(
            "milliseconds instead of seconds",
            "the answer is 1,000 times too large; FLOP/s and bytes/s give seconds.",
            _rule(lambda f, b, p, w: 1e3 * max(f / p, b / w)),
        ),
    ),
)

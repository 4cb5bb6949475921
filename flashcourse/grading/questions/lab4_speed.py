"""lab4.speed: the forward kernel against plain attention, on the same GPU, in the same run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from flashcourse import runtime
from flashcourse.grading.question import Answer, Case, Check, Observation, Question
from flashcourse.grading.questions import lab4_flash_forward as forward
from flashcourse.grading.triton_work import (
    as_half,
    judge_own_kernel,
    needs_matrix_units,
    needs_triton,
    where_it_ran,
)
from flashcourse.measure.timing import time_ms

FACTOR = 2.0
HEADS, LENGTH, HEAD_DIM = 16, 4096, 64
ROUNDS = 3


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The opponent: four kernels in float16, six passes over the score matrix."""
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1) @ v


def _small(generator: torch.Generator) -> Iterator[Case]:
    yield as_half(forward.draw_case(generator, 70, 150, heads=(2, 2), head_dim=HEAD_DIM))
    yield as_half(forward.draw_case(generator, 33, 33, head_dim=HEAD_DIM, is_causal=True, scale=5))
    yield as_half(forward.large_sum_case(generator))


def _judge_own_work(case: Case, observation: Observation) -> str | None:
    return judge_own_kernel(observation, tensors=4)


def _large(generator: torch.Generator) -> Iterator[Case]:
    seed = int(torch.randint(2**31, (), generator=generator))
    on_gpu = torch.Generator(runtime.device()).manual_seed(seed)
    shape = (1, HEADS, LENGTH, HEAD_DIM)
    args = tuple(
        torch.randn(shape, generator=on_gpu, device=runtime.device(), dtype=torch.float16)
        for _ in range(3)
    )
    yield Case(f"q, k and v {shape}, float16, not causal", args)


def call_timed(answer: Answer, *args: Any) -> dict[str, Any]:
    """The answer's result and time, and the time of plain attention; the rounds alternate.

    Nothing watches while time runs: no profile function, no dispatch mode.
    """
    output = answer(*args)
    profile = sys.getprofile()
    sys.setprofile(None)
    try:
        with _disable_current_modes():
            runs = {"ms": [], "plain_ms": []}  # type: dict[str, list[float]]
            for _ in range(ROUNDS):
                runs["ms"] += time_ms(lambda: answer(*args), repeats=10).times
                runs["plain_ms"] += time_ms(lambda: plain_attention(*args), repeats=10).times
    finally:
        sys.setprofile(profile)
    median = {name: sorted(times)[len(times) // 2] for name, times in runs.items()}
    return {"output": output, **median}


def _judge_speed(case: Case, observation: Observation) -> str | None:
    q, k, v = case.args
    out = observation.output["output"]
    timed = Observation(output=out, launches=observation.launches, operators=observation.operators)
    message = judge_own_kernel(timed, tensors=4) or _judge_sample(q, k, v, out)
    if message:
        return message
    ms, plain_ms = observation.output["ms"], observation.output["plain_ms"]
    if plain_ms >= FACTOR * ms:
        return None
    return (
        f"your kernel took {ms:.3f} ms and plain attention {plain_ms:.3f} ms on this GPU: "
        f"{plain_ms / ms:.2f} times as fast, and the lab asks for {FACTOR:g}. "
        "Larger tiles of queries, float16 operands in both products and no work in the loop that "
        "could stand before it are what helps first"
    )


def _judge_sample(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any) -> str | None:
    """Judge the first and the last rows of one head: the rest is the small check's task."""
    if (
        not isinstance(out, (tuple, list))
        or len(out) != 2
        or getattr(out[0], "shape", ()) != q.shape
    ):
        return f"expected out of shape {tuple(q.shape)} and lse"
    rows = [0, 1, LENGTH // 2, LENGTH - 1]
    case = Case("", (q[:, -1:, rows], k[:, -1:], v[:, -1:]))
    sample = tuple(t[:, -1:, rows] for t in out)
    return forward.judge(case, Observation(output=sample))


# A wrong kernel is not fast: these fail the check that runs everywhere.
_WRONG = (
    "the accumulator is not rescaled",
    "scale missing",
    "never divided by the sum",
    "float16 accumulator",
    "the matrix in memory",
)

QUESTION = Question(
    id="lab4.speed",
    points=4,
    checks=(
        Check("right in float16", _small, forward.judge),
        Check("by your own kernel", _small, _judge_own_work, work=True),
        Check(
            f"at least {FACTOR:g} times as fast as plain attention",
            _large,
            _judge_speed,
            call_timed,
            needs_matrix_units,
        ),
    ),
    mistakes=tuple(m for m in forward.MISTAKES if m.name in _WRONG),
    needs=needs_triton,
    right=forward.QUESTION.right,
    remark=where_it_ran,
)

"""lab4.speed: the forward kernel against plain attention, on the same GPU, in the same run.

In a notebook the check measures where the answer runs. `grade` measures from outside, as
:mod:`flashcourse.grading.race` describes.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from flashcourse import runtime
from flashcourse.grading import flash_inputs
from flashcourse.grading.judge import judge_tensor
from flashcourse.grading.question import Answer, Case, Check, Observation, Question, Race
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
    yield as_half(flash_inputs.draw_case(generator, 70, 150, heads=(2, 2), head_dim=HEAD_DIM))
    yield as_half(
        flash_inputs.draw_case(generator, 33, 33, head_dim=HEAD_DIM, is_causal=True, scale=5)
    )
    yield as_half(flash_inputs.large_sum_case(generator))


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
    out = observation.output["output"]
    timed = Observation(output=out, launches=observation.launches, operators=observation.operators)
    message = (
        judge_own_kernel(timed, tensors=4)
        or judge_rows(case.args, out)
        or observation.output.get("wrong")
    )
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


def judge_rows(args: tuple[Any, ...], output: Any) -> str | None:
    """Judge some rows of every head, the first and the last among them; the small check has the
    rest."""
    q, k, v = args
    shape = getattr(output[0], "shape", ()) if isinstance(output, (tuple, list)) else ()
    if not isinstance(output, (tuple, list)) or len(output) != 2 or shape != q.shape:
        return f"expected out of shape {tuple(q.shape)} and lse"
    if getattr(output[1], "shape", ()) != q.shape[:3]:
        return f"expected lse of shape {tuple(q.shape[:3])}"
    length = q.shape[2]
    rows = [0, length - 1, *random.SystemRandom().sample(range(length), 14)]
    sample = tuple(t[:, :, rows] for t in output)
    return forward.judge(Case("", (q[:, :, rows], k, v)), Observation(output=sample))


# How `grade` measures ---------------------------------------------------------------------------


def draw_signs(generator: torch.Generator, case: Case, runs: int) -> torch.Tensor:
    """A sign for every column of q and every run: with it all scores change."""
    q = case.args[0]
    signs = 2 * torch.randint(2, (runs, 1, 1, 1, q.shape[-1]), generator=generator) - 1
    return signs.to(q.device, q.dtype)


def change_signs(args: tuple[Any, ...], signs: torch.Tensor) -> tuple[Any, ...]:
    q, k, v = args
    return q * signs, k, v


def sum_over_queries(output: Any) -> torch.Tensor:
    """out summed over the queries, ``(batch, heads, head_dim)``: it takes every row of P."""
    return output[0].sum(dim=2, dtype=torch.float32)


def judge_sum(args: tuple[Any, ...], digest: Any) -> str | None:
    """Judge the sums over the queries by float32, one head's matrix at a time.

    A sum over n rows keeps the errors of its n roundings, √n of one in all. An answer that guesses
    how much weight each key gets, without the scores, is off by some tenths at the least.
    """
    q, k, v = args
    sums = []
    for head in range(q.shape[1]):
        q_h, k_h, v_h = (t[:, head].float() for t in (q, k, v))
        p = torch.softmax(q_h @ k_h.mT * q.shape[-1] ** -0.5, dim=-1)
        sums.append((p.sum(dim=1, keepdim=True) @ v_h)[:, 0])
    expected = torch.stack(sums, dim=1)
    rows = q.shape[2]
    return judge_tensor(
        "out summed over the queries", digest, expected, 0.05 * (rows / 4096) ** 0.5
    )


RACE = Race(
    opponent=lambda q, k, v: (plain_attention(q, k, v), None),
    changes=draw_signs,
    vary=change_signs,
    digest=sum_over_queries,
    judge_digest=judge_sum,
    judge_output=judge_rows,
)


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
            race=RACE,
        ),
    ),
    mistakes=tuple(m for m in forward.MISTAKES if m.name in _WRONG),
    needs=needs_triton,
    right=forward.QUESTION.right,
    remark=where_it_ran,
)

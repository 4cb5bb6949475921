"""lab4.flash_forward: out and lse from a Triton kernel of the learner's own."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashcourse.grading import flash_inputs
from flashcourse.grading.judge import (
    FLOAT32_EPS,
    judge_largest_tensor,
    judge_tensors,
    score_tolerance,
)
from flashcourse.grading.mistakes_flash_forward import MISTAKES, RIGHT
from flashcourse.grading.question import Answer, Case, Check, Observation, Question
from flashcourse.grading.questions import lab3_tiled_forward as lab3
from flashcourse.grading.triton_work import (
    EPS16,
    amid_nan,
    half_tolerance,
    judge_own_kernel,
    needs_triton,
    new_tensors_check,
    where_it_ran,
)

NAMES = ("out", "lse")

# What is right ------------------------------------------------------------------------------


def allowed_error(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """The error of out that any right kernel may make; the inputs lie on the CPU."""
    tolerance = half_tolerance if q.dtype == torch.float16 else score_tolerance
    return tolerance(lab3.largest_score(q.float(), k.float()), v.abs().max().item())


def judge(case: Case, observation: Observation) -> str | None:
    """Judge out and lse by the float64 result from the same inputs."""
    q, k, v = (t.detach().cpu() for t in case.args)
    is_causal = case.kwargs.get("is_causal", False)
    allowed_of_out = torch.tensor(allowed_error(q, k, v))
    if q.dtype == torch.float32:
        allowed_of_out = lab3.allowed_of_rows(q, k, v, is_causal, allowed_of_out)
    allowed = (allowed_of_out, _allowed_of_lse(q, k))
    expected = lab3.reference(q, k, v, is_causal)
    return judge_tensors(NAMES, observation.output, expected, allowed, (q.dtype, torch.float32))


def _allowed_of_lse(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The error of lse that any right kernel may make: that of the row's own scores.

    lse is float32 whatever the inputs are. A float16 q that is scaled before the product is
    rounded, and moves every score by half an eps of its terms.
    """
    sizes = lab3.row_scores(q.float(), k.float())
    rounded_q = EPS16 / 2 * sizes if q.dtype == torch.float16 else 0.0
    return 16 * FLOAT32_EPS * (4 + sizes) + rounded_q


def _judge_empty_rows(case: Case, observation: Observation) -> str | None:
    message = judge(case, observation)
    if message:
        seq_q, seq_k = case.args[0].shape[2], case.args[1].shape[2]
        return f"{message} (queries 0 to {seq_q - seq_k - 1} see no key: out 0, lse −inf)"
    return None


def _judge_scores(case: Case, observation: Observation) -> str | None:
    """Judge a case in which a large score is common to a row: its rounding cancels.

    The first entry of every k is the same, so that what is lost of it moves all scores of a row
    alike. The terms of the other entries are what is rounded, and the float32 sum.
    """
    q, k, v = (t.detach().cpu() for t in case.args)
    rest = lab3.largest_score(q[..., 1:].float(), k[..., 1:].float())
    largest = v.abs().max().item()
    size = lab3.largest_score(q.float(), k.float())
    allowed = (
        half_tolerance(rest, largest) + score_tolerance(size, largest),
        score_tolerance(size, 1.0) + lab3.moved_scores(q.double(), k.double()),
    )
    expected = lab3.reference(q, k, v, case.kwargs["is_causal"])
    return judge_tensors(NAMES, observation.output, expected, allowed, (q.dtype, torch.float32))


def call_noting_strides(answer: Answer, *args: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
    """The result, and the strides of what is not contiguous: `grade` sends tensors without them."""
    output = answer(*args, **kwargs)
    values = output if isinstance(output, (tuple, list)) else ()
    strides = [
        () if t.is_contiguous() else t.stride() for t in values if isinstance(t, torch.Tensor)
    ]
    return {"output": output, "strides": strides}


def _judge_contiguous(case: Case, observation: Observation) -> str | None:
    output = observation.output["output"]
    message = judge(case, Observation(output=output))
    if message:
        return message
    for name, tensor, strides in zip(NAMES, output, observation.output["strides"], strict=True):
        if strides:
            expected = torch.empty(tensor.shape, device="meta").stride()
            return (
                f"{name} has strides {tuple(strides)}, expected {expected}: the lab asks for new, "
                "contiguous tensors, and empty_like copies the layout of its argument. Use "
                "torch.empty(q.shape, ...)"
            )
    return None


def judge_memory(case: Case, observation: Observation) -> str | None:
    """Judge that no tensor was much larger than an input."""
    q, k = case.args[:2]
    most = 2 * max(q.numel(), k.numel())
    meaning = f"the whole score matrix has {q.shape[2]}×{k.shape[2]} numbers"
    return judge_largest_tensor(observation, most, meaning)


def _judge_own_work(case: Case, observation: Observation) -> str | None:
    return judge_own_kernel(observation, tensors=4)


def call_amid_nan(answer: Answer, *args: torch.Tensor, **kwargs: Any) -> Any:
    """Call the answer with tensors that are the front of larger ones, full of NaN.

    All heads share the memory of the first, so that a store with an input's strides stays inside
    of a new tensor: it should give wrong numbers, not end the process.
    """
    return answer(*(_front(t) if t.dim() == 4 else t for t in args), **kwargs)


def _front(tensor: torch.Tensor) -> torch.Tensor:
    padded = amid_nan(tensor)
    padded[:, 1:] = math.nan
    return padded[:, :1].expand(tensor.shape)


QUESTION = Question(
    id="lab4.flash_forward",
    points=12,
    checks=(
        Check("out and lse over many tiles", flash_inputs.tile_cases, judge),
        Check("any length: 1, primes, a block and one more", flash_inputs.ragged_cases, judge),
        Check("scores × 1, × 5 and × 40, rows far from 0", flash_inputs.scale_cases, judge),
        Check("query heads share KV heads", flash_inputs.head_cases, judge),
        Check("causal: no query sees a later key", flash_inputs.causal_cases, judge),
        Check("causal with more keys than queries", flash_inputs.longer_key_cases, judge),
        Check(
            "a query that sees no key gives 0 and −inf",
            flash_inputs.empty_row_cases,
            _judge_empty_rows,
        ),
        Check(
            "hidden keys stay hidden, whatever the scores", flash_inputs.hidden_score_cases, judge
        ),
        Check("head_dim 16 to 128, powers of two or not", flash_inputs.head_dim_cases, judge),
        Check("not causal if nothing is said", flash_inputs.default_cases, judge),
        Check("any strides", flash_inputs.layout_cases, _judge_contiguous, call_noting_strides),
        Check("nothing behind the end is used", flash_inputs.tail_cases, judge, call_amid_nan),
        Check("float16, with sums in float32", flash_inputs.half_cases, judge),
        Check("float16 in, scores in float32", flash_inputs.large_score_cases, _judge_scores),
        new_tensors_check(flash_inputs.small_cases),
        Check(
            "memory does not grow with the score matrix",
            flash_inputs.long_cases,
            judge_memory,
            work=True,
        ),
        Check(
            "your own kernel did the work", flash_inputs.own_work_cases, _judge_own_work, work=True
        ),
    ),
    mistakes=MISTAKES,
    needs=needs_triton,
    right=RIGHT,
    remark=where_it_ran,
)

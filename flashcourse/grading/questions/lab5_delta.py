"""lab5.delta: the row sum of dO ∘ O, one number a query."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flashcourse.grading.draw import integer, normal, strided
from flashcourse.grading.judge import judge_tensor
from flashcourse.grading.question import Answer, Case, Check, Mistake, Observation, Question
from flashcourse.grading.triton_work import (
    FORBIDDEN_WORK,
    amid_nan,
    from_first_entry,
    here,
    judge_own_kernel,
    needs_triton,
    new_tensors_check,
    where_it_ran,
)

EPS = torch.finfo(torch.float32).eps
FORBIDDEN = (*FORBIDDEN_WORK, "mul", "mul_", "sum", "mean", "cumsum", "norm", "linalg_vector_norm")


def _judge(case: Case, observation: Observation) -> str | None:
    out, do = (t.detach().cpu().double() for t in case.args)
    expected = (out * do).sum(dim=-1)
    allowed = 16 * EPS * max((out * do).abs().sum(dim=-1).max().item(), 1e-3)
    return judge_tensor("delta", observation.output, expected, allowed, torch.float32)


def _judge_own_work(case: Case, observation: Observation) -> str | None:
    return judge_own_kernel(observation, FORBIDDEN, tensors=3)


def _case(
    generator: torch.Generator, *shape: int, note: str = "", dtype: torch.dtype = torch.float32
) -> Case:
    out, do = (here(normal(generator, *shape, dtype=dtype)) for _ in range(2))
    name = str(dtype).removeprefix("torch.")
    described = f"out and do {shape}, {name}" + (f", {note}" if note else "")
    return Case(described, (out, do))


def _shapes(generator: torch.Generator) -> Iterator[Case]:
    yield _case(generator, 3, 5, integer(generator, 35, 64), 16)
    yield _case(generator, 1, 2, 1, 24)
    case = _case(generator, 1, 1, integer(generator, 520, 560), 111)
    out, do = case.args
    yield Case(f"{case.description}, do × 100", (out, 100 * do))
    yield _case(generator, 1, 2, 33, 128)


def _layouts(generator: torch.Generator) -> Iterator[Case]:
    for order in ((0, 2, 1, 3), (1, 3, 0, 2)):
        case = _case(
            generator, 2, 3, 19, 24, note=f"do stored with the dimensions in order {order}"
        )
        out, do = case.args
        yield Case(case.description, (out, here(strided(do.cpu(), order))))
    out, do = _case(generator, 2, 3, 19, 24).args
    yield Case(
        "both stored with head_dim first",
        tuple(here(strided(t.cpu(), (3, 0, 1, 2))) for t in (out, do)),
    )


def _call_expanded(answer: Answer, out: torch.Tensor, do: torch.Tensor) -> Any:
    """do as ``out.sum().backward()`` sends it: one number, all strides 0."""
    return answer(out, do.reshape(-1)[:1].reshape(()).expand(out.shape))


def _call_amid_nan(answer: Answer, out: torch.Tensor, do: torch.Tensor) -> Any:
    return answer(amid_nan(out), amid_nan(do))


def _expanded(generator: torch.Generator) -> Iterator[Case]:
    out, do = _case(generator, 2, 2, 21, 16).args
    yield Case("do is one number with all strides 0", (out, torch.ones_like(do)))


def _tails(generator: torch.Generator) -> Iterator[Case]:
    yield _case(generator, 1, 2, 21, 24, note="NaN in memory behind every row")


def _half(generator: torch.Generator) -> Iterator[Case]:
    yield _case(generator, 1, 2, 35, 80, dtype=torch.float16)
    case = _case(generator, 1, 2, 20, 64, dtype=torch.float16)
    out, do = (t.abs() + 40 for t in case.args)
    yield Case(f"{case.description}, sums above 65,504", (out, do))


def _small(generator: torch.Generator) -> Iterator[Case]:
    yield _case(generator, 1, 2, 7, 16)


def _ours(generator: torch.Generator) -> Iterator[Case]:
    out, do = _case(generator, 1, 2, 35, 40, dtype=torch.float16).args
    yield Case("float16, do stored by column", (out, here(strided(do.cpu(), (0, 1, 3, 2)))))


def _right(out: torch.Tensor, do: torch.Tensor) -> torch.Tensor:
    return (out.float() * do.float()).sum(dim=-1)


QUESTION = Question(
    id="lab5.delta",
    points=3,
    checks=(
        Check("a number for every query, any length and head_dim", _shapes, _judge),
        Check("do with any strides", _layouts, _judge),
        Check("do with all strides 0", _expanded, _judge, _call_expanded),
        Check("nothing behind the end is used", _tails, _judge, _call_amid_nan),
        Check("float16 in, float32 between and out", _half, _judge),
        new_tensors_check(_small),
        Check("your own kernel did the work", _ours, _judge_own_work, work=True),
    ),
    mistakes=(
        Mistake(
            "strides ignored",
            "out and do were read as if they were contiguous. do comes from autograd with any "
            "strides: pass do.stride() to the kernel.",
            lambda out, do: _right(from_first_entry(out), from_first_entry(do)),
        ),
        Mistake(
            "products in float16",
            "out and do were multiplied and summed in float16. Cast both to float32 first.",
            lambda out, do: (out * do).sum(dim=-1).float(),
        ),
        Mistake(
            "delta stored in the inputs' dtype",
            "delta is float32 whatever the inputs are: torch.empty(..., dtype=torch.float32).",
            lambda out, do: _right(out, do).to(out.dtype),
        ),
        Mistake(
            "mean instead of sum",
            "delta is the sum over head_dim.",
            lambda out, do: _right(out, do) / out.shape[-1],
        ),
        Mistake(
            "only out",
            "delta is the sum of dO ∘ O, both factors.",
            lambda out, do: out.float().sum(dim=-1),
        ),
        Mistake(
            "out squared",
            "delta is the sum of dO ∘ O, not of O ∘ O.",
            lambda out, do: _right(out, out),
        ),
        Mistake(
            "the last columns are dropped",
            "head_dim need not be a power of two: take the next larger one and mask.",
            lambda out, do: _right(
                *(t[..., : 1 << (t.shape[-1].bit_length() - 1)] for t in (out, do))
            ),
        ),
        Mistake(
            "PyTorch's sum",
            "the numbers are right, but this task asks for a kernel of yours.",
            _right,
        ),
    ),
    needs=needs_triton,
    right=_right,
    remark=where_it_ran,
)

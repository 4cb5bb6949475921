"""lab4.row_softmax: a first Triton kernel, one row a program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flashcourse.grading.draw import integer, normal, strided
from flashcourse.grading.judge import judge_tensor
from flashcourse.grading.question import Answer, Case, Check, Mistake, Observation, Question
from flashcourse.grading.triton_work import (
    EPS16,
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
FORBIDDEN = (*FORBIDDEN_WORK, "sum", "max", "amax", "aminmax", "div", "true_divide", "mul", "sub")


def _judge(case: Case, observation: Observation) -> str | None:
    x = case.args[0]
    expected = torch.softmax(x.detach().cpu().double(), dim=-1)
    return judge_tensor("p", observation.output, expected, _allowed(x, expected), x.dtype)


def _allowed(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """The error of each probability that any right answer may make.

    It is relative to the probability: the exponent is off by the rounding of both scores, or of a
    score and the row's lse, and the sum, in whatever order, by half an eps for each of its terms.
    A single finite entry has probability 1: its score cancels, up to the rounding of a product
    with log2 e. float16 adds the one rounding of the result. Absolutely, what is below the smallest
    may be lost.
    """
    x = x.detach().cpu()
    finite = torch.isfinite(x)
    scores = torch.where(finite, x, 0).double().abs().amax(dim=1, keepdim=True)
    several = 4 * EPS * (4 + scores) + EPS / 2 * x.shape[1]
    relative = torch.where(finite.sum(dim=1, keepdim=True) > 1, several, 4 * EPS * (1 + scores))
    if x.dtype == torch.float16:
        return (relative * (1 + EPS16) + EPS16 / 2) * p + 2.0**-24
    return relative * p + 1e-37


def _judge_own_work(case: Case, observation: Observation) -> str | None:
    return judge_own_kernel(observation, FORBIDDEN)


def _case(
    generator: torch.Generator, rows: int, columns: int, scale: float = 1.0, note: str = ""
) -> Case:
    x = here(normal(generator, rows, columns, scale=scale))
    return Case(f"x of shape ({rows}, {columns})" + (f", {note}" if note else ""), (x,))


def _shapes(generator: torch.Generator) -> Iterator[Case]:
    for columns in (1, 2, 31, 128, 129, integer(generator, 300, 1000)):
        yield _case(generator, integer(generator, 3, 7), columns)
    yield _case(generator, 2, integer(generator, 3000, 4095))
    yield _case(generator, 2, 4096)
    case = _case(generator, 2, 4096, note="an entry of 200 near the end")
    case.args[0][0, -9] = 200  # a maximum of the first thousands lets exp overflow
    yield case
    yield _case(generator, integer(generator, 3, 7), 1, 0.1, "near 0")


def _many_rows(generator: torch.Generator) -> Iterator[Case]:
    yield _case(generator, integer(generator, 1030, 1100), integer(generator, 3, 7))


def _far_rows(generator: torch.Generator) -> Iterator[Case]:
    case = _case(generator, 6, integer(generator, 40, 60), 5, "rows near ±300")
    x = case.args[0]
    x[::2] += 300
    x[1::2] -= 300
    yield case


def _hidden(generator: torch.Generator) -> Iterator[Case]:
    case = _case(generator, 4, integer(generator, 20, 30), note="some entries −inf")
    x = case.args[0]
    x[:, 1::3] = float("-inf")
    x[:, 0] = float("-inf")
    yield case


def _half(generator: torch.Generator) -> Iterator[Case]:
    case = _case(generator, 5, integer(generator, 700, 1000), note="float16")
    yield Case(case.description, (case.args[0].half(),))
    case = _case(generator, 2, integer(generator, 3800, 4096), 1 / 16, note="float16")
    yield Case(case.description, (case.args[0].half(),))  # in float16 a count stops at 2,048


def _layouts(generator: torch.Generator) -> Iterator[Case]:
    """First rows that share memory: a store through x's strides then stays inside of a new tensor.

    With the slice it would write behind the end and take the process with it.
    """
    windows = normal(generator, 41).unfold(0, 37, 1)
    yield Case(
        "x of shape (5, 37), strides (1, 1): overlapping windows of one sequence", (here(windows),)
    )
    case = _case(generator, 5, 37, note="stored column by column")
    yield Case(case.description, (here(strided(case.args[0].cpu(), (1, 0))),))
    case = _case(generator, 5, 37, note="a slice of a wider matrix")
    yield Case(case.description, (amid_nan(case.args[0]),))


def _call_amid_nan(answer: Answer, x: torch.Tensor) -> Any:
    """One row for all, so that a wrong store stays inside here too; NaN behind it."""
    return answer(amid_nan(x)[:1].expand(x.shape))


def _tails(generator: torch.Generator) -> Iterator[Case]:
    case = _case(
        generator,
        4,
        integer(generator, 33, 60),
        note="strides (0, 1): one row four times, NaN in memory behind it",
    )
    case.args[0][1:] = case.args[0][:1]
    yield case


def _small(generator: torch.Generator) -> Iterator[Case]:
    yield _case(generator, 3, 17)


def _ours(generator: torch.Generator) -> Iterator[Case]:
    case = _case(generator, 4, 20, 5, "rows near ±300, stored column by column")
    x = case.args[0]
    x[::2] += 300
    x[1::2] -= 300
    yield Case(case.description, (here(strided(x.cpu(), (1, 0))),))
    case = _case(generator, 3, 200, note="float16")
    yield Case(case.description, (case.args[0].half(),))


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.float(), dim=-1).to(x.dtype)


def _exp_without_maximum(x: torch.Tensor) -> torch.Tensor:
    p = torch.exp(x.float())
    return (p / p.sum(dim=1, keepdim=True)).to(x.dtype)


def _one_maximum(x: torch.Tensor) -> torch.Tensor:
    p = torch.exp(x.float() - x.float().max())
    return (p / p.sum(dim=1, keepdim=True)).to(x.dtype)


def _padded_with_zeros(x: torch.Tensor) -> torch.Tensor:
    columns = 1 << (x.shape[1] - 1).bit_length()
    padded = torch.nn.functional.pad(x.float(), (0, columns - x.shape[1]))
    return torch.softmax(padded, dim=1)[:, : x.shape[1]].to(x.dtype)


def _in_base_2(x: torch.Tensor) -> torch.Tensor:
    p = torch.exp2(x.float() - x.float().amax(dim=1, keepdim=True))
    return (p / p.sum(dim=1, keepdim=True)).to(x.dtype)


def _numerator(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x.float() - x.float().amax(dim=1, keepdim=True)).to(x.dtype)


def _over_columns(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.float(), dim=0).to(x.dtype)


def _in_order(x: torch.Tensor) -> torch.Tensor:
    return _softmax(from_first_entry(x))


QUESTION = Question(
    id="lab4.row_softmax",
    points=4,
    checks=(
        Check("every row, of any width", _shapes, _judge),
        Check("as many rows as there are", _many_rows, _judge),
        Check("rows far from 0", _far_rows, _judge),
        Check("entries of −inf get probability 0", _hidden, _judge),
        Check("float16 in and out, float32 between", _half, _judge),
        Check("any strides", _layouts, _judge),
        Check("nothing behind the end of a row is used", _tails, _judge, _call_amid_nan),
        new_tensors_check(_small),
        Check("your own kernel did the work", _ours, _judge_own_work, work=True),
    ),
    mistakes=(
        Mistake(
            "no max subtraction",
            "exp overflows above 88.7 in float32. Subtract the row's maximum first.",
            _exp_without_maximum,
        ),
        Mistake(
            "one maximum for all rows",
            "a row far below the largest one underflows to 0/0. Every row has its own maximum.",
            _one_maximum,
        ),
        Mistake(
            "lanes past the end count as 0",
            'exp(0 − m) is no small weight. Load with other=float("-inf"): it is never the maximum '
            "and adds nothing.",
            _padded_with_zeros,
        ),
        Mistake(
            "exp2 without log2 e",
            "2^x is not e^x: e^x = 2^(x · log2 e).",
            _in_base_2,
        ),
        Mistake("not divided by the sum", "a row of probabilities sums to 1.", _numerator),
        Mistake(
            "softmax over the columns",
            "the sum runs along the last dimension: a program owns one row.",
            _over_columns,
        ),
        Mistake(
            "strides ignored",
            "x was read as if it were contiguous. Pass x.stride(0) and x.stride(1) to the kernel.",
            _in_order,
        ),
        Mistake(
            "PyTorch's softmax",
            "the numbers are right, but this task asks for a kernel of yours.",
            _softmax,
        ),
    ),
    needs=needs_triton,
    right=_softmax,
    remark=where_it_ran,
)

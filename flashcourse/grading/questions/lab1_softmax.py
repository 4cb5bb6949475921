"""lab1.softmax: a softmax over the last dimension that survives large and missing scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from flashcourse.grading.draw import integer, normal, strided
from flashcourse.grading.fresh import fresh_check
from flashcourse.grading.judge import (
    FORBIDDEN_ATTENTION,
    judge_operators,
    judge_tensor,
    row_tolerance,
)
from flashcourse.grading.question import Case, Check, Mistake, Observation, Question

FORBIDDEN = (*FORBIDDEN_ATTENTION, "logsumexp")


def reference(x: torch.Tensor) -> torch.Tensor:
    """The right answer in float64; a row of -inf alone gives zeros."""
    x = x.double()
    m = x.amax(dim=-1, keepdim=True)
    p = torch.exp(x - torch.where(m == -math.inf, 0.0, m))
    l = p.sum(dim=-1, keepdim=True)
    return p / torch.where(l == 0, 1.0, l)


def _judge(case: Case, observation: Observation) -> str | None:
    x, p = case.args[0], reference(case.args[0])
    # However small a probability is, its error is relative to itself, until float32 ends.
    allowed = row_tolerance(x) * p + torch.finfo(torch.float32).tiny
    allowed = torch.where(x == -math.inf, 0.0, allowed)  # nothing is left of exp(−inf)
    message = judge_tensor("p", observation.output, p, allowed, x.dtype)
    return message or judge_operators(observation, FORBIDDEN)


def _scales(generator: torch.Generator) -> Iterator[Case]:
    for scale in (1, 5, 40):
        rows, columns = integer(generator, 3, 6), integer(generator, 7, 13)
        x = normal(generator, rows, columns, scale=scale)
        if scale == 40:
            x[0, 0] = 100.0  # exp(100) does not fit into float32
        yield Case(f"x of shape ({rows}, {columns}), normal numbers × {scale}", (x,))


def _levels(generator: torch.Generator) -> Iterator[Case]:
    columns = integer(generator, 7, 13)
    level = torch.tensor([[0.0], [300.0], [-300.0], [50.0]])
    x = normal(generator, 4, columns) + level
    yield Case(f"x of shape (4, {columns}), rows around 0, 300, −300 and 50", (x,))


def _extremes(generator: torch.Generator) -> Iterator[Case]:
    """±1,000 in one row: only the row's own maximum is a safe pivot, in float64 as well."""
    columns = integer(generator, 7, 13)
    x = torch.full((6, columns), -1000.0)
    x[1:3] = 1000.0
    one = integer(generator, 2, columns - 2)
    x[0, one], x[1, 0], x[2, -1] = 1000.0, -1000.0, -1000.0
    x[3, -1], x[4, 0] = 1000.0, 999.0
    x[4, 1] = 1000.0
    x[:5] += normal(generator, 5, columns, scale=0.3).abs() * -x[:5].sign()
    x[5] += normal(generator, columns).abs()
    yield Case(f"x of shape (6, {columns}), entries near 1,000 and −1,000", (x,))


def _shapes(generator: torch.Generator) -> Iterator[Case]:
    n = integer(generator, 5, 9)
    for shape in ((n,), (2, 3, n), (2, 2, 3, n), (3, 1)):
        yield Case(f"x of shape {shape}", (normal(generator, *shape, scale=2),))


def _missing(generator: torch.Generator) -> Iterator[Case]:
    columns = integer(generator, 6, 11)
    x = normal(generator, 3, columns, scale=3)
    x[:, 1] = -math.inf
    x[1, 3:] = -math.inf
    yield Case(f"x of shape (3, {columns}), some entries −inf", (x,))


def _single(generator: torch.Generator) -> Iterator[Case]:
    columns = integer(generator, 6, 11)
    x = torch.full((3, columns), -math.inf)
    for row in range(3):
        x[row, integer(generator, 0, columns - 1)] = float(normal(generator, 1, scale=0.3))
    yield Case(f"x of shape (3, {columns}), one entry a row is not −inf", (x,))


def _empty_rows(generator: torch.Generator) -> Iterator[Case]:
    columns = integer(generator, 6, 11)
    x = normal(generator, 4, columns, scale=3)
    x[2] = -math.inf
    yield Case(f"x of shape (4, {columns}), row 2 is −inf throughout", (x,))


def _layouts(generator: torch.Generator) -> Iterator[Case]:
    rows, columns = integer(generator, 3, 6), integer(generator, 7, 13)
    x = normal(generator, rows, columns, scale=5)
    yield Case(f"x of shape ({rows}, {columns}), a transposed view", (strided(x, (1, 0)),))


def _small(generator: torch.Generator) -> Iterator[Case]:
    yield Case("x of shape (2, 5), twice", (normal(generator, 2, 5),))


def _judge_own_work(case: Case, observation: Observation) -> str | None:
    return judge_operators(observation, FORBIDDEN)


Pivot = Callable[[torch.Tensor], torch.Tensor]


def _row_max(x: torch.Tensor) -> torch.Tensor:
    return x.amax(dim=-1, keepdim=True)


def _softmax(
    x: torch.Tensor,
    pivot: Pivot = _row_max,
    total: Pivot = lambda p: p.sum(dim=-1, keepdim=True),
    exp: Pivot = torch.exp,
) -> torch.Tensor:
    """Right by default; each mistake replaces one step."""
    m = pivot(x)
    p = exp(x - torch.where(m == -math.inf, 0.0, m))
    l = total(p)
    return p / torch.where(l == 0, 1.0, l)


def _unguarded(x: torch.Tensor) -> torch.Tensor:
    p = torch.exp(x - _row_max(x))
    return p / p.sum(dim=-1, keepdim=True)


def _no_max(x: torch.Tensor) -> torch.Tensor:
    return _softmax(x, pivot=torch.zeros_like)


def _global_max(x: torch.Tensor) -> torch.Tensor:
    return _softmax(x, pivot=lambda x: x.max())


def _largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    return _softmax(
        x, pivot=lambda x: x.abs().masked_fill(x == -math.inf, 0.0).amax(dim=-1, keepdim=True)
    )


def _first_dimension(x: torch.Tensor) -> torch.Tensor:
    return _softmax(
        x,
        pivot=lambda x: x.amax(dim=0, keepdim=True),
        total=lambda p: p.sum(dim=0, keepdim=True),
    )


def _sum_of_everything(x: torch.Tensor) -> torch.Tensor:
    return _softmax(x, total=torch.sum)


def _base_two(x: torch.Tensor) -> torch.Tensor:
    return _softmax(x, exp=torch.exp2)


def _finite_sentinel(x: torch.Tensor) -> torch.Tensor:
    return _softmax(torch.where(x == -math.inf, -1e9, x))


def _not_divided(x: torch.Tensor) -> torch.Tensor:
    return _softmax(x, total=torch.ones_like)


QUESTION = Question(
    id="lab1.softmax",
    points=2,
    checks=(
        Check("rows are exp(x) over their sum, for scores × 1, × 5 and × 40", _scales, _judge),
        Check("every row has its own maximum", _levels, _judge),
        Check("entries as large as ±1,000", _extremes, _judge),
        Check("any number of dimensions, over the last one", _shapes, _judge),
        Check("an entry of −inf gets probability 0", _missing, _judge),
        Check("a single entry gets probability 1", _single, _judge),
        Check("a row of −inf alone gives zeros", _empty_rows, _judge),
        Check("any strides", _layouts, _judge),
        fresh_check(_small),
        Check("the softmax is your own", _layouts, _judge_own_work, work=True),
    ),
    mistakes=(
        Mistake(
            "no max subtraction",
            "exp overflows to infinity above 88.7 in float32, and underflows to 0 far below: "
            "∞/∞ and 0/0 are NaN. Subtract the row's maximum first; the quotient stays the same.",
            _no_max,
        ),
        Mistake(
            "one maximum for the whole tensor",
            "a row far below the overall maximum underflows to zeros. Each row needs its own: "
            "amax over the last dimension, kept as a dimension.",
            _global_max,
        ),
        Mistake(
            "the largest magnitude subtracted instead of the maximum",
            "in a row of large negative scores everything underflows. The pivot is the maximum, "
            "sign included.",
            _largest_magnitude,
        ),
        Mistake(
            "softmax over the first dimension",
            "the columns sum to 1 instead of the rows. Maximum and sum go over dim=-1.",
            _first_dimension,
        ),
        Mistake(
            "divided by the sum of the whole tensor",
            "the whole tensor sums to 1 instead of each row. Sum over dim=-1 and keep it as a "
            "dimension.",
            _sum_of_everything,
        ),
        Mistake(
            "base 2 instead of e",
            "2^x was computed where e^x is meant. exp2 needs x multiplied with log2(e) ≈ 1.4427.",
            _base_two,
        ),
        Mistake(
            "a row of −inf gives NaN",
            "its maximum is −inf, and −inf − (−inf) is NaN. Use a finite pivot there, and divide "
            "by 1 where the sum is 0.",
            _unguarded,
        ),
        Mistake(
            "−inf replaced by a large finite number",
            "a row that consists of nothing else comes out uniform, as if it saw every key.",
            _finite_sentinel,
        ),
        Mistake(
            "the sum is not divided out",
            "the rows do not sum to 1: exp(x − max) is only the numerator.",
            _not_divided,
        ),
    ),
)

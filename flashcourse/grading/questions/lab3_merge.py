"""lab3.merge: attention over two sets of keys, joined from their outputs and log-sum-exps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from flashcourse.grading.draw import integer, normal, strided
from flashcourse.grading.fresh import fresh_check
from flashcourse.grading.judge import FLOAT32_EPS, judge_tensors, row_tolerance
from flashcourse.grading.question import Answer, Case, Check, Mistake, Observation, Question

NAMES = ("out", "lse")
FLOAT32 = (torch.float32, torch.float32)
Part = tuple[torch.Tensor, torch.Tensor]

# What is right ------------------------------------------------------------------------------


def reference(*parts: Part) -> Part:
    """The union of any number of parts, in float64."""
    outs = torch.stack([out.double() for out, _ in parts])
    lses = torch.stack([lse.double() for _, lse in parts])
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - torch.where(lse == -math.inf, 0.0, lse))
    return (weights[..., None] * outs).sum(dim=0), lse


def _allowed(parts: list[Part]) -> Part:
    """A weight exp(lse_x − lse) is off by the rounding of its exponent, relative to itself.

    Who takes 1 − w for the other weight makes an error of the last place of 1 besides. Where one
    side alone has keys, its weight is 1; where none has, everything is 0 and exact.
    """
    lses = torch.stack([lse.double() for _, lse in parts], dim=-1)
    outs = torch.stack([out.double().abs() for out, _ in parts], dim=-1)
    unit = row_tolerance(lses)
    weights = torch.exp(
        lses - torch.where(lses.isfinite(), lses, -math.inf).logsumexp(-1)[..., None]
    )
    weights = weights.nan_to_num(0.0)[..., None, :]
    several = (lses.isfinite().sum(-1) > 1)[..., None]
    out = unit * (weights * outs).sum(-1)
    return out + torch.where(several, 4 * FLOAT32_EPS * outs.sum(-1), 0.0), unit.squeeze(-1)


def _judge(case: Case, observation: Observation) -> str | None:
    out_a, lse_a, out_b, lse_b = case.args
    parts = [(out_a, lse_a), (out_b, lse_b)]
    return judge_tensors(NAMES, observation.output, reference(*parts), _allowed(parts), FLOAT32)


def _call_in_two_orders(answer: Answer, a: Part, b: Part, c: Part) -> dict[str, Any]:
    return {
        "(a + b) + c": answer(*answer(*a, *b), *c),
        "a + (c + b)": answer(*a, *answer(*c, *b)),
    }


def _judge_orders(case: Case, observation: Observation) -> str | None:
    expected, allowed = reference(*case.args), _allowed(list(case.args))
    twice = (2 * allowed[0], 2 * allowed[1])  # two merges, each with its own rounding
    for order, output in observation.output.items():
        message = judge_tensors(NAMES, output, expected, twice, FLOAT32)
        if message:
            return f"merged as {order}: {message}"
    return None


# The inputs ---------------------------------------------------------------------------------


def _part(generator: torch.Generator, shape: tuple[int, ...], lse_scale: float) -> Part:
    return normal(generator, *shape), normal(generator, *shape[:-1], scale=lse_scale)


def _shape(generator: torch.Generator) -> tuple[int, int, int, int]:
    return (2, integer(generator, 2, 3), integer(generator, 5, 9), integer(generator, 3, 8))


def _describe(shape: tuple[int, ...]) -> str:
    return f"out {shape}, lse {shape[:-1]}"


def _scales(generator: torch.Generator) -> Iterator[Case]:
    for scale in (1, 5, 40):
        shape = _shape(generator)
        a, b = _part(generator, shape, scale), _part(generator, shape, scale)
        yield Case(f"{_describe(shape)}, lse × {scale}", (*a, *b))


def _levels(generator: torch.Generator) -> Iterator[Case]:
    for size in (200.0, 1000.0):
        shape = _shape(generator)
        (out_a, lse_a), (out_b, lse_b) = (_part(generator, shape, 1.0) for _ in range(2))
        level = torch.full(shape[1:-1], size)
        level[:, ::2] = -size
        yield Case(
            f"{_describe(shape)}, lse near {size:.0f} and −{size:.0f}",
            (out_a, lse_a + level, out_b, lse_b + level),
        )


def _far_apart(generator: torch.Generator) -> Iterator[Case]:
    """One lse far above the other: a small weight counts if what it weighs is large.

    14 apart is as far as a weight can be told from the rounding of 1 − w, in float32.
    """
    shape = _shape(generator)
    (out_a, lse_a), (out_b, lse_b) = (_part(generator, shape, 0.5) for _ in range(2))
    lse_a, lse_b = lse_a * 0.1 + 7.1, lse_b * 0.1 - 7.1
    yield Case(f"{_describe(shape)}, lse 14 apart", (out_a, lse_a, out_b * 1e6, lse_b))
    yield Case(f"{_describe(shape)}, lse 14 apart", (out_b * 1e6, lse_b, out_a, lse_a))
    lse_a, lse_b = lse_a + 990, lse_b - 990
    yield Case(f"{_describe(shape)}, lse near 1,000 and −1,000", (out_a, lse_a, out_b, lse_b))
    yield Case(f"{_describe(shape)}, lse near −1,000 and 1,000", (out_b, lse_b, out_a, lse_a))


def _emptied(part: Part, where: torch.Tensor) -> Part:
    out, lse = part
    return out.masked_fill(where[..., None], 0.0), lse.masked_fill(where, -math.inf)


def _one_empty(generator: torch.Generator) -> Iterator[Case]:
    for side in ("a", "b"):
        shape = _shape(generator)
        a, b = _part(generator, shape, 0.2), _part(generator, shape, 0.2)
        where = torch.zeros(shape[:-1], dtype=torch.bool)
        where[:, :, ::2] = True
        a, b = (_emptied(a, where), b) if side == "a" else (a, _emptied(b, where))
        yield Case(f"{_describe(shape)}, every other row of {side} empty (lse −inf)", (*a, *b))


def _both_empty(generator: torch.Generator) -> Iterator[Case]:
    shape = _shape(generator)
    where = torch.zeros(shape[:-1], dtype=torch.bool)
    where[:, :, 1:3] = True
    a, b = (_emptied(_part(generator, shape, 2.0), where) for _ in range(2))
    yield Case(f"{_describe(shape)}, rows 1 and 2 empty on both sides", (*a, *b))


def _three(generator: torch.Generator) -> Iterator[Case]:
    shape = _shape(generator)
    parts = tuple(_part(generator, shape, 3.0) for _ in range(3))
    yield Case(f"three parts, each {_describe(shape)}", parts)


def _layouts(generator: torch.Generator) -> Iterator[Case]:
    shape = _shape(generator)
    (out_a, lse_a), (out_b, lse_b) = (_part(generator, shape, 2.0) for _ in range(2))
    args = strided(out_a, (0, 2, 1, 3)), strided(lse_a, (2, 0, 1)), out_b, strided(lse_b, (1, 0, 2))
    yield Case(f"{_describe(shape)}, not contiguous", args)


def _small(generator: torch.Generator) -> Iterator[Case]:
    shape = (1, 2, 3, 4)
    parts = _part(generator, shape, 1.0), _part(generator, shape, 1.0)
    yield Case(f"{_describe(shape)}, twice", (*parts[0], *parts[1]))


# The known mistakes: each leaves the right path in one place ------------------------------------

Step = Callable[..., torch.Tensor]


def _finite_max(lse_a: torch.Tensor, lse_b: torch.Tensor) -> torch.Tensor:
    m = torch.maximum(lse_a, lse_b)
    return torch.where(m == -math.inf, 0.0, m)


def _average(
    weight_a: torch.Tensor, out_a: torch.Tensor, weight_b: torch.Tensor, out_b: torch.Tensor
) -> torch.Tensor:
    total = weight_a + weight_b
    total = torch.where(total == 0, 1.0, total)
    return weight_a / total * out_a + weight_b / total * out_b


def _merge(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    pivot: Step = _finite_max,
    exp: Step = torch.exp,
    log: Step = torch.log,
    average: Step = _average,
    joined: Step = lambda lse_a, lse_b, m, log_total: m + log_total,
) -> Part:
    m = pivot(lse_a, lse_b)
    weight_a, weight_b = exp(lse_a - m), exp(lse_b - m)
    out = average(weight_a[..., None], out_a, weight_b[..., None], out_b)
    return out, joined(lse_a, lse_b, m, log(weight_a + weight_b))


def _mistake(name: str, explanation: str, **step: Any) -> Mistake:
    return Mistake(name, explanation, partial(_merge, **step))


def _weighted_by_lse(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> Part:
    _, lse = _merge(out_a, lse_a, out_b, lse_b)
    share = (lse_a / (lse_a + lse_b))[..., None]
    return share * out_a + (1 - share) * out_b, lse


def _unguarded(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> Part:
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = torch.exp(lse_a - lse), torch.exp(lse_b - lse)
    return weight_a[..., None] * out_a + weight_b[..., None] * out_b, lse


MISTAKES = (
    _mistake(
        "plain mean of the outputs",
        "each side counts with its share of the joint sum, exp(lse_x − lse), not with one half.",
        average=lambda wa, out_a, wb, out_b: (out_a + out_b) / 2,
    ),
    Mistake(
        "weights proportional to lse",
        "lse is a logarithm: the share of a is exp(lse_a) / (exp(lse_a) + exp(lse_b)).",
        _weighted_by_lse,
    ),
    _mistake(
        "weights swapped",
        "out_a must be weighted with exp(lse_a − lse).",
        average=lambda wa, out_a, wb, out_b: _average(wb, out_a, wa, out_b),
    ),
    _mistake(
        "weights not divided by their sum",
        "exp(lse_x − max) do not add up to 1; divide by their sum, or subtract the joint lse.",
        average=lambda wa, out_a, wb, out_b: wa * out_a + wb * out_b,
    ),
    _mistake(
        "lse is the larger of the two",
        "the joint sum is exp(lse_a) + exp(lse_b); its logarithm is larger than either.",
        joined=lambda lse_a, lse_b, m, log_total: torch.maximum(lse_a, lse_b),
    ),
    _mistake(
        "lse is the sum of the two",
        "logarithms add when numbers are multiplied; here the numbers are added.",
        joined=lambda lse_a, lse_b, m, log_total: lse_a + lse_b,
    ),
    _mistake(
        "lse without the maximum",
        "what was subtracted before exp must be added after log.",
        joined=lambda lse_a, lse_b, m, log_total: log_total,
    ),
    _mistake(
        "base 2 instead of base e",
        "lse is a natural logarithm. exp2 and log2 fit together, but not with it.",
        exp=torch.exp2,
        log=torch.log2,
    ),
    _mistake(
        "no max subtraction",
        "exp(200) is infinite and exp(−200) is 0 in float32. Subtract the larger lse first.",
        pivot=lambda lse_a, lse_b: torch.zeros_like(lse_a),
    ),
    Mistake(
        "NaN where both sides are empty",
        "−inf − (−inf) is NaN. Where both lse are −inf, out is 0 and lse −inf.",
        _unguarded,
    ),
)

QUESTION = Question(
    id="lab3.merge",
    points=3,
    checks=(
        Check("out and lse of the union, for lse × 1, × 5, × 40", _scales, _judge),
        Check("lse far above and below 0", _levels, _judge),
        Check("one lse far above the other", _far_apart, _judge),
        Check("an empty side changes nothing", _one_empty, _judge),
        Check("two empty sides give 0 and −inf", _both_empty, _judge),
        Check("the order does not matter", _three, _judge_orders, _call_in_two_orders),
        Check("any strides", _layouts, _judge),
        fresh_check(_small),
    ),
    mistakes=MISTAKES,
    right=_merge,
)

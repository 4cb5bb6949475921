"""Judges that questions share: each says what was expected and what came, or None."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy
import torch

from flashcourse.grading.question import Answer, Observation
from flashcourse.measure.accuracy import FLOAT32_EPS, explain_difference

FORBIDDEN_ATTENTION = (
    "scaled_dot_product_attention",
    "_scaled_dot_product",
    "_softmax",
    "_safe_softmax",
    "_log_softmax",
    "softmax",
    "log_softmax",
    "_masked_softmax",
    "_sparse_softmax",
    "logcumsumexp",
)


def score_tolerance(largest_score: float, largest_value: float) -> float:
    """The error that any right float32 attention may make, however it is written.

    A score s carries a rounding error of a few ``eps·|s|``, which becomes a relative error of its
    probability; the output is an average of values weighted with those.

    Args:
        largest_score: the largest absolute score, after scaling.
        largest_value: the largest absolute entry of what is averaged.
    """
    return 16 * FLOAT32_EPS * (4 + largest_score) * max(largest_value, 1e-3)


def row_tolerance(scores: torch.Tensor) -> torch.Tensor:
    """The error that a right float32 softmax may make in a row, relative to what it computes.

    A row of one finite score is exact up to the last places: its score cancels, whatever it is.
    An epsilon in the denominator shows there.

    Args:
        scores: ``(..., n)``; -inf where a score is hidden.

    Returns:
        ``(..., 1)``, float64; 0 for a row without a finite score.
    """
    seen = torch.isfinite(scores)
    largest = torch.where(seen, scores, 0.0).double().abs().amax(dim=-1, keepdim=True)
    count = seen.sum(dim=-1, keepdim=True)
    unit = torch.where(count == 1, 4 * FLOAT32_EPS * (1 + largest), 0.0)
    return torch.where(count > 1, 16 * FLOAT32_EPS * (4 + largest), unit)


Allowed = float | torch.Tensor


def judge_tensor(
    name: str,
    actual: Any,
    expected: torch.Tensor,
    allowed: Allowed,
    dtype: torch.dtype | None = None,
) -> str | None:
    """Judge one returned tensor: its type, dtype, shape and values.

    Args:
        name: what the tensor is called in the lab.
        expected: the right values, any precision.
        allowed: the largest absolute error that passes, for all entries or for each.
        dtype: the dtype it must have; None leaves it open.
    """
    if type(actual) not in (torch.Tensor, torch.nn.Parameter):
        return f"{name} must be a torch.Tensor, got {type(actual).__name__}"
    if dtype is not None and actual.dtype != dtype:
        return f"{name} has dtype {_dtype(actual.dtype)}, expected {_dtype(dtype)}"
    return explain_difference(name, actual, expected, allowed)


def judge_tensors(
    names: Sequence[str],
    output: Any,
    expected: Sequence[torch.Tensor],
    allowed: Sequence[Allowed],
    dtypes: Sequence[torch.dtype | None] | None = None,
) -> str | None:
    """Judge a returned tuple of tensors, in order; the first that is wrong is described."""
    listed = f"({', '.join(names)})"
    if not isinstance(output, (tuple, list)) or len(output) != len(names):
        came = f"{len(output)} values" if isinstance(output, (tuple, list)) else _kind(output)
        return f"expected the {len(names)} values {listed}, got {came}"
    dtypes = dtypes or [None] * len(names)
    for name, actual, right, error, dtype in zip(
        names, output, expected, allowed, dtypes, strict=True
    ):
        message = judge_tensor(name, actual, right, error, dtype)
        if message:
            return message
    return None


def plain_number(value: Any) -> Any:
    """NumPy's and PyTorch's scalars and fractions as Python's numbers; anything else as it is.

    A subclass of int or float becomes what it stands for, so that none of its own operators is
    asked when it is compared.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_complex():
        return value.detach().item()
    if isinstance(value, (numpy.integer, numpy.floating, numpy.bool_)):
        return value.item()
    if type(value) is Fraction:
        return value.numerator if value.denominator == 1 else float(value)
    if isinstance(value, int):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, float) else value


def call_for_number(answer: Answer, *args: Any, **kwargs: Any) -> Any:
    """Call the answer and make what it returns a plain number, if it is one."""
    return plain_number(answer(*args, **kwargs))


def judge_number(name: str, actual: Any, expected: float, *, exact: bool = True) -> str | None:
    """Judge a returned number; ``exact`` wants an integer equal to the expected one."""
    actual = plain_number(actual)
    if isinstance(actual, bool) or not isinstance(actual, (int, float)):
        return f"{name} must be a number, got {_kind(actual)}"
    if exact and isinstance(actual, float):
        return (
            f"{name} must be an integer, got the float {actual!r}: `/` makes floats, `//` does not"
        )
    if exact:
        return None if actual == expected else f"{name} is {actual:,}, expected {expected:,}"
    if abs(actual - expected) <= 1e-9 * abs(expected):
        return None
    return f"{name} is {actual:.9g}, expected {expected:.9g}"


def judge_operators(
    observation: Observation, forbidden: Sequence[str] = FORBIDDEN_ATTENTION
) -> str | None:
    """Judge that the answer did the work itself: none of the forbidden operators ran."""
    used = sorted(
        op
        for op in observation.operators
        if any(op == f or op.startswith(f + "_") for f in forbidden)
    )
    if used:
        return f"your answer called {', '.join(used)}, which does the work that is asked of you"
    return None


def judge_largest_tensor(observation: Observation, most: int, meaning: str) -> str | None:
    """Judge that no single tensor was larger than ``most`` elements.

    Args:
        meaning: what a tensor of that size would be, for the message.
    """
    if observation.largest_numel <= most:
        return None
    mebibytes = observation.largest_numel * 4 / 2**20
    shape = "×".join(str(size) for size in observation.largest_shape)
    return (
        f"you allocated a {shape} tensor ({observation.largest_numel:,} numbers, "
        f"{mebibytes:.2f} MiB in float32): {meaning}; {most:,} numbers are enough"
    )


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

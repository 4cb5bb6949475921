"""Judges that questions share: each says what was expected and what came, or None."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashcourse.grading.question import Observation
from flashcourse.measure.accuracy import explain_difference

FLOAT32_EPS = torch.finfo(torch.float32).eps
FORBIDDEN_ATTENTION = (
    "scaled_dot_product_attention",
    "_scaled_dot_product",
    "_softmax",
    "_safe_softmax",
    "_log_softmax",
    "softmax",
    "log_softmax",
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


def judge_tensor(
    name: str,
    actual: Any,
    expected: torch.Tensor,
    allowed: float,
    dtype: torch.dtype | None = None,
) -> str | None:
    """Judge one returned tensor: its type, dtype, shape and values.

    Args:
        name: what the tensor is called in the lab.
        expected: the right values, any precision.
        allowed: the largest absolute error that passes.
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
    allowed: Sequence[float],
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


def judge_number(name: str, actual: Any, expected: float, *, exact: bool = True) -> str | None:
    """Judge a returned number; ``exact`` wants an integer equal to the expected one."""
    if isinstance(actual, bool) or not isinstance(actual, (int, float)):
        return f"{name} must be a number, got {_kind(actual)}"
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
    return "None" if value is None else f"a {type(value).__name__}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

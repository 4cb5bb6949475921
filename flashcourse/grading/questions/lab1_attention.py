"""lab1.attention: the textbook formula with shared heads and a bottom-right causal mask."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from flashcourse.attention import naive_attention
from flashcourse.grading.draw import integer, normal, strided
from flashcourse.grading.fresh import fresh_check
from flashcourse.grading.judge import (
    FLOAT32_EPS,
    judge_operators,
    judge_tensor,
    score_tolerance,
)
from flashcourse.grading.mistakes_attention import MISTAKES
from flashcourse.grading.question import Answer, Case, Check, Observation, Question
from flashcourse.grading.questions.lab1_softmax import FORBIDDEN
from flashcourse.grading.questions.lab3_tiled_backward import gradient_sizes

# What is right ------------------------------------------------------------------------------


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False
) -> torch.Tensor:
    """The right answer in float64, from the inputs as they are."""
    out = naive_attention(q.double(), k.double(), v.double(), is_causal=is_causal)
    assert isinstance(out, torch.Tensor)
    return out


def largest_score(q: torch.Tensor, k: torch.Tensor) -> float:
    """An upper bound of the absolute scores: no dot product exceeds the product of the norms."""
    norms = (t.double().norm(dim=-1).max().item() for t in (q, k))
    return math.prod(norms) / q.shape[-1] ** 0.5


def _judge(case: Case, observation: Observation) -> str | None:
    q, k, v = case.args
    allowed = torch.tensor(score_tolerance(largest_score(q, k), v.abs().max().item()))
    if q.dtype != torch.float32:  # the output, and at most P besides, are rounded to it
        allowed += 2 * torch.finfo(q.dtype).eps * v.abs().max().item()
    expected = reference(q, k, v, **case.kwargs)
    seq_q, seq_k = q.shape[2], k.shape[2]
    if case.kwargs.get("is_causal"):  # a query that sees no key gives 0, and no rounding to it
        empty = torch.arange(seq_q)[:, None] < seq_q - seq_k
        allowed = torch.where(empty, 0.0, allowed)
    message = judge_tensor("out", observation.output, expected, allowed, q.dtype)
    return message or judge_operators(observation, FORBIDDEN)


def _judge_one_key(case: Case, observation: Observation) -> str | None:
    """The weight of a single key is 1: its score cancels, and nothing else may change it."""
    q, k, v = case.args
    allowed = 4 * FLOAT32_EPS * (1 + largest_score(q, k)) * v.abs().max().item()
    return judge_tensor("out", observation.output, reference(q, k, v), allowed, q.dtype)


def _judge_empty_rows(case: Case, observation: Observation) -> str | None:
    message = _judge(case, observation)
    if message:
        seq_q, seq_k = case.args[0].shape[2], case.args[1].shape[2]
        return f"{message} (queries 0 to {seq_q - seq_k - 1} see no key: zeros)"
    return None


def _call_gradients(answer: Answer, q: Any, k: Any, v: Any, do: Any, is_causal: bool) -> Any:
    out = answer(q, k, v, is_causal=is_causal)
    if not (isinstance(out, torch.Tensor) and out.requires_grad):
        return None
    return torch.autograd.grad(out, (q, k, v), do, allow_unused=True)


def _judge_gradients(case: Case, observation: Observation) -> str | None:
    if observation.output is None:
        return "out has no gradient: it is cut off from q, k and v"
    q, k, v, do, is_causal = case.args
    inputs = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out = reference(inputs[0], inputs[1], inputs[2], is_causal)
    expected = torch.autograd.grad(out, inputs, do.double())
    sizes = gradient_sizes(q, k, v, out, do, is_causal)
    for name, actual, right, size in zip(
        ("dq", "dk", "dv"), observation.output, expected, sizes, strict=True
    ):
        if actual is None:
            return f"{name} is missing: out does not depend on {name[1]}"
        allowed = 8 * score_tolerance(largest_score(q, k), right.abs().max().item())
        if q.dtype != torch.float32:  # the gradient, and at most P, dP and dS on the way to it
            allowed += 3 * torch.finfo(q.dtype).eps * size.max().item()
        message = judge_tensor(name, actual, right, allowed, q.dtype)
        if message:
            return message
    return None


def _judge_own_work(case: Case, observation: Observation) -> str | None:
    return judge_operators(observation, FORBIDDEN)


# The inputs ---------------------------------------------------------------------------------


def _inputs(
    generator: torch.Generator,
    seq_q: int,
    seq_k: int,
    heads_q: int = 2,
    heads_kv: int = 2,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], str]:
    head_dim = integer(generator, 5, 17)
    q = normal(generator, batch, heads_q, seq_q, head_dim, scale=scale, dtype=dtype)
    k = normal(generator, batch, heads_kv, seq_k, head_dim, dtype=dtype)
    v = normal(generator, batch, heads_kv, seq_k, head_dim, dtype=dtype)
    return (q, k, v), f"q {tuple(q.shape)}, k and v {tuple(k.shape)}"


def _scales(generator: torch.Generator) -> Iterator[Case]:
    for scale in (1, 5, 40):
        n = integer(generator, 9, 21)
        tensors, shapes = _inputs(generator, n, n, scale=scale)
        if scale == 40:  # one score of 100 at the least: exp(100) does not fit into float32
            tensors[0][0, 0, 0] = tensors[1][0, 0, 1] * 400 / tensors[1][0, 0, 1].norm() ** 2
        yield Case(f"{shapes}, scores × {scale}", tensors)


def _lengths(generator: torch.Generator) -> Iterator[Case]:
    for seq_q, seq_k in ((1, 9), (integer(generator, 3, 7), 13), (integer(generator, 14, 19), 5)):
        tensors, shapes = _inputs(generator, seq_q, seq_k)
        yield Case(shapes, tensors)


def _heads(generator: torch.Generator) -> Iterator[Case]:
    for heads_q, heads_kv in ((6, 2), (6, 3), (4, 1)):
        n = integer(generator, 6, 11)
        tensors, shapes = _inputs(generator, n, n, heads_q, heads_kv)
        yield Case(shapes, tensors)


def _causal_square(generator: torch.Generator) -> Iterator[Case]:
    n = integer(generator, 7, 15)
    tensors, shapes = _inputs(generator, n, n)
    yield Case(f"{shapes}, is_causal=True", tensors, {"is_causal": True})


def _causal_longer_keys(generator: torch.Generator) -> Iterator[Case]:
    seq_k = integer(generator, 8, 14)
    for seq_q in (integer(generator, 2, seq_k - 2), 1):
        tensors, shapes = _inputs(generator, seq_q, seq_k, 4, 2)
        yield Case(f"{shapes}, is_causal=True", tensors, {"is_causal": True})


def _causal_longer_queries(generator: torch.Generator) -> Iterator[Case]:
    seq_k = integer(generator, 4, 8)
    tensors, shapes = _inputs(generator, seq_k + integer(generator, 2, 6), seq_k)
    yield Case(f"{shapes}, is_causal=True", tensors, {"is_causal": True})


def _very_negative(generator: torch.Generator) -> Iterator[Case]:
    n = integer(generator, 7, 12)
    (q, k, v), shapes = _inputs(generator, n, n)
    level = (20_000 * q.shape[-1] ** 0.5) ** 0.5
    q[..., 0], k[..., 0] = level, -level
    yield Case(f"{shapes}, is_causal=True, scores near −20,000", (q, k, v), {"is_causal": True})


def _hidden(generator: torch.Generator) -> Iterator[Case]:
    """Hidden scores far below 0 with the visible ones, and far above them."""
    yield from _very_negative(generator)
    n = integer(generator, 7, 12)
    (q, k, v), shapes = _inputs(generator, n, n)
    k[:, :, -1] = 0.0
    k[:, :, -1, 0] = 60.0 * q.shape[-1] ** 0.5
    q[:, :, :-1, 0] = q[:, :, :-1, 0].abs() + 3.0  # 180 or more for a key that is hidden
    q[:, :, -1, 0] *= 0.01  # the one query that sees it
    note = "hidden scores above 150"
    yield Case(f"{shapes}, is_causal=True, {note}", (q, k, v), {"is_causal": True})


def _extremes(generator: torch.Generator) -> Iterator[Case]:
    """Scores of ±20,000 in one row: the lowest first, the highest first, and two high ones."""
    n = integer(generator, 7, 12)
    for high in ((1, n - 2), (0, 3)):
        (q, k, v), shapes = _inputs(generator, n, n)
        level = (20_000 * q.shape[-1] ** 0.5) ** 0.5
        q[..., 0], k[..., 0] = level, -level
        k[:, :, high[0], 0] = level
        k[:, :, high[1], 0] = level * (1 - 2e-4)  # 4 below the highest score
        yield Case(f"{shapes}, scores of 20,000 and −20,000 in every row", (q, k, v))


def _one_key(generator: torch.Generator) -> Iterator[Case]:
    tensors, shapes = _inputs(generator, integer(generator, 5, 9), 1, scale=0.1)
    yield Case(shapes, tensors)


def _together(generator: torch.Generator) -> Iterator[Case]:
    """One, two and three sequences, shared heads, the mask and float16, in combinations."""
    n, half = integer(generator, 6, 11), torch.float16
    for batch, heads, seq_q, seq_k, is_causal, dtype in (
        (1, (4, 2), n, n, True, half),
        (3, (2, 2), n, n + 3, True, torch.float32),
        (1, (6, 2), n, n, False, torch.float32),
        (3, (6, 3), n + 2, n, False, half),
        (1, (4, 1), n + 3, n, True, torch.float32),
        (3, (4, 2), n + 3, n, True, half),
    ):
        tensors, shapes = _inputs(generator, seq_q, seq_k, *heads, dtype=dtype, batch=batch)
        name = str(dtype).removeprefix("torch.")
        yield Case(f"{shapes}, is_causal={is_causal}, {name}", tensors, {"is_causal": is_causal})


def _layouts(generator: torch.Generator) -> Iterator[Case]:
    tensors, shapes = _inputs(generator, integer(generator, 5, 9), integer(generator, 10, 14))
    q, k, v = (strided(t, (0, 2, 1, 3)) for t in tensors)
    yield Case(f"{shapes}, stored as (batch, seq, heads, head_dim)", (q, k, v))
    q, k, v = (strided(t, (1, 3, 0, 2)) for t in tensors)
    yield Case(f"{shapes}, stored as (heads, head_dim, batch, seq)", (q, k, v))


def _plain_and_causal(generator: torch.Generator) -> Iterator[Case]:
    yield from _layouts(generator)
    yield from _causal_square(generator)


def _half(generator: torch.Generator) -> Iterator[Case]:
    yield _near_ties(generator)
    for level in (0, 500):
        n = integer(generator, 9, 21)
        (q, k, v), shapes = _inputs(generator, n, n, dtype=torch.float16)
        if level:  # float16 has steps of 0.25 there
            q[..., 0] = k[..., 0] = (level * q.shape[-1] ** 0.5) ** 0.5
        yield Case(f"{shapes}, float16, scores near {level}", (q, k, v))
    # 4,096 keys alike: above 2,048 float16 has steps of 2, so a sum of ones gets stuck there.
    q, k, v = (normal(generator, 1, 1, n, 4, dtype=torch.float16) for n in (1, 4096, 4096))
    yield Case("q (1, 1, 1, 4), k and v (1, 1, 4096, 4), float16", (q * 0, k, v.abs()))


def _near_ties(generator: torch.Generator) -> Case:
    """Keys in pairs of nearly equal scores, which the two halves of the head's numbers make.

    A q that is scaled in float16 is rounded once more, in each half by itself: the scores are some
    200, so the two of a pair are moved apart by a few hundredths.
    """
    n, half = integer(generator, 9, 21), integer(generator, 13, 27)  # 1/√head_dim is no power of 2
    q = normal(generator, 2, 2, n, half, scale=200, dtype=torch.float16)
    k = normal(generator, 2, 2, n, half, dtype=torch.float16)
    v = torch.ones(2, 2, n, 2 * half, dtype=torch.float16)
    q = torch.cat([q, q / 3], dim=-1)
    k = torch.stack([torch.cat([k, 0 * k], -1), torch.cat([0 * k, 3 * k], -1)], 3).flatten(2, 3)
    v = torch.stack([v, -v], 3).flatten(2, 3)
    shapes = f"q {tuple(q.shape)}, k and v {tuple(k.shape)}"
    return Case(f"{shapes}, float16, scores × 200 in nearly equal pairs", (q, k, v))


def _gradients(generator: torch.Generator) -> Iterator[Case]:
    seq_k, half = integer(generator, 6, 9), torch.float16
    for seq_q, is_causal, dtype in (
        (seq_k + 1, False, torch.float32),
        (seq_k - 3, True, torch.float32),
        (seq_k + 3, True, torch.float32),
        (seq_k + 1, True, half),
    ):
        tensors, shapes = _inputs(generator, seq_q, seq_k, 4, 2, dtype=dtype)
        do = normal(generator, *tensors[0].shape, dtype=dtype)
        args = (*(t.requires_grad_() for t in tensors), do, is_causal)
        name = ", float16" if dtype == half else ""
        yield Case(f"{shapes}, is_causal={is_causal}{name}, gradients of q, k and v", args)


def _small(generator: torch.Generator) -> Iterator[Case]:
    tensors, shapes = _inputs(generator, 3, 4)
    yield Case(f"{shapes}, twice", tensors)


QUESTION = Question(
    id="lab1.attention",
    points=5,
    checks=(
        Check("softmax(q kᵀ / √head_dim) v, for scores × 1, × 5 and × 40", _scales, _judge),
        Check("seq_q and seq_k may differ", _lengths, _judge),
        Check("query heads share KV heads", _heads, _judge),
        Check("causal: no query sees a later key", _causal_square, _judge),
        Check("causal with more keys than queries", _causal_longer_keys, _judge),
        Check("a query that sees no key gives zeros", _causal_longer_queries, _judge_empty_rows),
        Check("hidden keys stay hidden, whatever the scores", _hidden, _judge),
        Check("scores as large as ±20,000", _extremes, _judge),
        Check("a single key gets the weight 1", _one_key, _judge_one_key),
        Check("any batch, with shared heads, the mask and float16 together", _together, _judge),
        Check("any strides", _layouts, _judge),
        Check("float16 inputs, scores and sums in float32", _half, _judge),
        Check("gradients reach q, k and v", _gradients, _judge_gradients, _call_gradients),
        fresh_check(_small),
        Check("the attention is your own", _plain_and_causal, _judge_own_work, work=True),
    ),
    mistakes=MISTAKES,
)

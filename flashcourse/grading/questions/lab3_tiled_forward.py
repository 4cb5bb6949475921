"""lab3.tiled_forward: attention over tiles with the online softmax; out and lse."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from flashcourse.attention import naive_attention
from flashcourse.grading.draw import integer, normal, strided
from flashcourse.grading.fresh import fresh_check
from flashcourse.grading.judge import (
    FLOAT32_EPS,
    FORBIDDEN_ATTENTION,
    judge_operators,
    judge_tensors,
    score_tolerance,
)
from flashcourse.grading.mistakes_tiled_forward import MISTAKES, tiled_forward
from flashcourse.grading.question import Case, Check, Observation, Question
from flashcourse.grading.tile_work import call_watching, judge_tiles, judge_work

NAMES = ("out", "lse")
FLOAT32 = (torch.float32, torch.float32)

# What is right ------------------------------------------------------------------------------


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in float64, from the inputs as they are."""
    out = naive_attention(q.double(), k.double(), v.double(), is_causal=is_causal, return_lse=True)
    assert isinstance(out, tuple)
    return out


def row_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The largest Σ|q_i k_i| · scale of every query: what the error of its scores is relative to.

    Returns:
        ``(batch, heads_q, seq_q)``.
    """
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (q.abs() @ keys.abs().transpose(-2, -1)).amax(dim=-1) * q.shape[-1] ** -0.5


def largest_score(q: torch.Tensor, k: torch.Tensor) -> float:
    """The largest of :func:`row_scores`."""
    return row_scores(q, k).max().item()


def moved_scores(q: torch.Tensor, k: torch.Tensor) -> float:
    """How far a score moves at most if q or k is scaled, for base e or 2, in float16 (lab 4, 5)."""
    scale = q.shape[-1] ** -0.5
    moved = 0.0
    for factor in (scale, scale * math.log2(math.e)):
        lost_q, lost_k = (t - (t * factor).half().double() / factor for t in (q, k))
        moved = max(moved, largest_score(lost_q, k), largest_score(q, lost_k))
    return moved


def _judge(case: Case, observation: Observation) -> str | None:
    q, k, v = case.args
    size = largest_score(q, k)
    is_causal = case.kwargs.get("is_causal", False)
    allowed = torch.tensor(score_tolerance(size, v.abs().max().item()))
    allowed = allowed_of_rows(q, k, v, is_causal, allowed)
    expected = reference(q, k, v, is_causal)
    both = (allowed, score_tolerance(size, 1.0))
    message = judge_tensors(NAMES, observation.output, expected, both, FLOAT32)
    return message or judge_operators(observation, FORBIDDEN_ATTENTION)


def allowed_of_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, allowed: torch.Tensor
) -> torch.Tensor:
    """What a float32 out may be off by, in the rows where that is less than in ``allowed``.

    A query that sees no key gives 0, and no rounding to it. The weight of a single key is 1: its
    score cancels, and nothing else may change it.
    """
    reach = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    seen = (reach + 1).clamp(min=0) if is_causal else torch.full_like(reach, k.shape[2])
    one_key = 4 * FLOAT32_EPS * (1 + row_scores(q, k)[..., None]) * v.abs().max()
    allowed = torch.where(seen == 1, torch.minimum(one_key, allowed), allowed)
    return torch.where(seen == 0, 0.0, allowed)


def _judge_empty_rows(case: Case, observation: Observation) -> str | None:
    message = _judge(case, observation)
    if message:
        seq_q, seq_k = case.args[0].shape[2], case.args[1].shape[2]
        return f"{message} (queries 0 to {seq_q - seq_k - 1} see no key: out 0, lse −inf)"
    return None


# The inputs (the backward's question draws from them too) ---------------------------------------


def draw_case(
    generator: torch.Generator,
    seq_q: int,
    seq_k: int,
    blocks: tuple[int, int],
    *,
    heads: tuple[int, int] = (2, 2),
    batch: int = 2,
    head_dim: int | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    note: str = "",
) -> Case:
    """Normal q, k and v with these shapes, and the options of the call."""
    head_dim = head_dim or integer(generator, 6, 14)
    q = normal(generator, batch, heads[0], seq_q, head_dim, scale=scale)
    k = normal(generator, batch, heads[1], seq_k, head_dim)
    v = normal(generator, batch, heads[1], seq_k, head_dim)
    options = {"is_causal": is_causal, "block_q": blocks[0], "block_k": blocks[1]}
    described = f"q {tuple(q.shape)}, k and v {tuple(k.shape)}, " + ", ".join(
        f"{name}={value}" for name, value in options.items()
    )
    return Case(described + (f", {note}" if note else ""), (q, k, v), options)


def ragged_cases(generator: torch.Generator) -> Iterator[Case]:
    """Lengths that are no multiple of the blocks, blocks that differ, one larger than the row."""
    yield draw_case(generator, integer(generator, 17, 23), integer(generator, 33, 39), (8, 16))
    yield draw_case(generator, integer(generator, 9, 15), integer(generator, 9, 15), (8, 4))
    yield draw_case(generator, 7, integer(generator, 11, 14), (16, 32))
    yield draw_case(generator, 16, 24, (8, 8))


def scale_cases(generator: torch.Generator) -> Iterator[Case]:
    for scale in (1, 5, 40):
        n = integer(generator, 17, 29)
        case = draw_case(generator, n, n, (8, 8), scale=scale, note=f"scores × {scale}")
        if scale == 40:  # one score of 100 at the least: exp(100) does not fit into float32
            q, k, _ = case.args
            key = k[0, 0, 1]
            q[0, 0, 0] = key * 100 * q.shape[-1] ** 0.5 / (key @ key)
        yield case


def level_cases(generator: torch.Generator) -> Iterator[Case]:
    """All scores of a row near 300, near −300 or near 60."""
    note = "rows near 300, −300 and 60"
    case = draw_case(generator, 14, integer(generator, 17, 23), (8, 8), note=note)
    q, k, _ = case.args
    level = (300 * q.shape[-1] ** 0.5) ** 0.5
    q[..., 0], k[..., 0] = level, level
    q[..., 1::3, 0], q[..., 2::3, 0] = -level, level / 5
    yield case


def causal_cases(generator: torch.Generator) -> Iterator[Case]:
    for blocks in ((8, 8), (4, 8), (8, 4)):
        n = integer(generator, 18, 23)
        yield draw_case(generator, n, n, blocks, is_causal=True)


def longer_key_cases(generator: torch.Generator) -> Iterator[Case]:
    seq_q = integer(generator, 9, 13)
    yield draw_case(generator, seq_q, integer(generator, 21, 27), (4, 8), is_causal=True)
    yield draw_case(generator, 1, integer(generator, 9, 21), (4, 8), is_causal=True)


def empty_row_cases(generator: torch.Generator) -> Iterator[Case]:
    """More queries than keys: the first queries see nothing, in whole blocks and in part of one."""
    seq_k = integer(generator, 9, 11)
    yield draw_case(generator, seq_k + 11, seq_k, (4, 4), is_causal=True)
    yield draw_case(generator, seq_k + 5, seq_k, (8, 4), is_causal=True)


def low_score_cases(generator: torch.Generator) -> Iterator[Case]:
    n = integer(generator, 10, 15)
    case = draw_case(generator, n, n, (4, 4), is_causal=True, note="scores near −20,000")
    q, k, _ = case.args
    q[..., 0] = (20_000 * q.shape[-1] ** 0.5) ** 0.5
    k[..., 0] = -q[..., :1, 0]
    yield case


def extreme_cases(generator: torch.Generator) -> Iterator[Case]:
    """−20,000 in the first tile and the last, 20,000 between: no other row's pivot is safe."""
    for is_causal in (False, True):
        n = integer(generator, 13, 16)
        note = "scores of 20,000 and −20,000 in a row"
        case = draw_case(generator, n, n, (8, 4), is_causal=is_causal, note=note)
        q, k, _ = case.args
        level = (20_000 * q.shape[-1] ** 0.5) ** 0.5
        q[..., 0], k[..., 0] = level, -level
        k[:, :, 4:8, 0] = level
        yield case


def far_apart_cases(generator: torch.Generator) -> Iterator[Case]:
    """One score of a row far above the others, in its first tile and in its last.

    The others add up to parts in 10,000: more than rounding, so no tile can be skipped, and the
    sum of those before a new maximum cannot be forgotten.
    """
    for key in (0, -1):
        note = f"the {'last' if key else 'first'} key 12 above the others"
        case = draw_case(generator, 9, integer(generator, 34, 40), (8, 8), scale=0.1, note=note)
        q, k, v = case.args
        q[..., 0], k[..., 0] = 1.0, 0.0
        k[..., key, :] = 0.0
        k[..., key, 0] = 12.3 * q.shape[-1] ** 0.5
        v[..., key, :] *= 0.01  # what the others add is not hidden by it
        yield case


def one_key_cases(generator: torch.Generator) -> Iterator[Case]:
    yield draw_case(generator, integer(generator, 5, 9), 1, (4, 4), scale=0.1)


def head_cases(generator: torch.Generator) -> Iterator[Case]:
    for heads, batch, is_causal in (((6, 2), 1, False), ((6, 3), 3, False), ((4, 2), 1, True)):
        n = integer(generator, 9, 14)
        yield draw_case(generator, n, n + 3, (8, 8), heads=heads, batch=batch, is_causal=is_causal)


def _defaults(generator: torch.Generator) -> Iterator[Case]:
    """No options at all: not causal."""
    q, k, v = draw_case(generator, 5, 7, (64, 64)).args
    yield Case(f"q {tuple(q.shape)}, k and v {tuple(k.shape)}, no options", (q, k, v))


def layout_cases(generator: torch.Generator) -> Iterator[Case]:
    for order, stored in (
        ((0, 2, 1, 3), "(batch, seq, heads, head_dim)"),
        ((1, 3, 0, 2), "(heads, head_dim, batch, seq)"),
    ):
        case = draw_case(generator, 9, 13, (4, 8), heads=(4, 2))
        tensors = tuple(strided(t, order) for t in case.args)
        yield Case(f"{case.description}, stored as {stored}", tensors, case.kwargs)


def _small(generator: torch.Generator) -> Iterator[Case]:
    yield draw_case(generator, 3, 5, (2, 2), batch=1, note="twice")


def long_cases(generator: torch.Generator) -> Iterator[Case]:
    """Few queries, many keys, head_dim 1: the scores outnumber everything else.

    Even one query's scores for all keys are more than two tiles.
    """
    for blocks, is_causal in (((16, 8), False), ((8, 16), True)):
        yield draw_case(
            generator,
            16,
            integer(generator, 300, 330),
            blocks,
            heads=(1, 1),
            batch=1,
            head_dim=1,
            is_causal=is_causal,
        )


def own_work_cases(generator: torch.Generator) -> Iterator[Case]:
    """With and without a mask, with and without shared heads."""
    yield draw_case(generator, 9, 13, (8, 8))
    yield draw_case(generator, 10, 10, (4, 8), heads=(4, 2), is_causal=True)
    yield draw_case(generator, 7, 12, (4, 8), is_causal=True)


QUESTION = Question(
    id="lab3.tiled_forward",
    points=5,
    checks=(
        Check("out and lse over tiles, ragged ends included", ragged_cases, _judge),
        Check("scores × 1, × 5 and × 40", scale_cases, _judge),
        Check("rows far above and below 0", level_cases, _judge),
        Check("query heads share KV heads", head_cases, _judge),
        Check("causal: no query sees a later key", causal_cases, _judge),
        Check("causal with more keys than queries", longer_key_cases, _judge),
        Check("a query that sees no key gives 0 and −inf", empty_row_cases, _judge_empty_rows),
        Check("hidden keys stay hidden below any score", low_score_cases, _judge),
        Check("any strides", layout_cases, _judge),
        Check("scores as large as ±20,000", extreme_cases, _judge),
        Check("a single key gets the weight 1", one_key_cases, _judge),
        Check("one score far above the others", far_apart_cases, _judge),
        Check("not causal if nothing is said", _defaults, _judge),
        fresh_check(_small),
        Check("a tile of scores at a time", long_cases, judge_tiles, call_watching, work=True),
        Check("the attention is your own", own_work_cases, judge_work, call_watching, work=True),
    ),
    mistakes=MISTAKES,
    right=tiled_forward,
)

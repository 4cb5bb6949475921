"""lab3.online_softmax: the maximum and the sum of each row, from a stream that passes once."""

from __future__ import annotations

import math
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from flashcourse.grading.draw import integer, normal
from flashcourse.grading.fresh import call_twice, fresh_check
from flashcourse.grading.judge import (
    FLOAT32_EPS,
    FORBIDDEN_ATTENTION,
    judge_operators,
    judge_tensors,
    row_tolerance,
)
from flashcourse.grading.question import Answer, Case, Check, Mistake, Observation, Question

NAMES = ("m", "l")
BLOCKS_KEPT = 4  # the one at hand, the one before, and two more for a loop's loose ends
BLOCKS_MADE = 12  # numbers in tensors at once, those that were made of the block at hand included
# What people take for the maximum of nothing, beside −inf and 0.
STARTS = (
    *(-1e9, -1e10, -1e30, torch.finfo(torch.float32).min, -1e6, -1e5, -1e4, -1e3),
    *(-800.0, -500.0, -400.0, -350.0, -300.0, -200.0, -100.0, -50.0),
)
# The stream with which memory is judged. Its blocks are narrow and many: one number kept of each
# row and block is already more than BLOCKS_MADE blocks.
ROWS, WIDTH, BLOCKS = 256, 4, 80

FORBIDDEN = (*FORBIDDEN_ATTENTION, "logsumexp")

# What is right ------------------------------------------------------------------------------


def reference(blocks: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """m and l of each row in float64, from the whole row at once."""
    s = torch.cat(blocks, dim=1).double()
    m = s.amax(dim=1)
    return m, torch.exp(s - torch.where(m == -math.inf, 0.0, m)[:, None]).sum(dim=1)


def _judge(case: Case, observation: Observation) -> str | None:
    m, l = reference(case.args[0])
    # A maximum is one of the scores: only those who leave float32 on the way may round it.
    exact = FLOAT32_EPS * torch.where(m == -math.inf, 0.0, m.abs())
    error = row_tolerance(torch.cat(case.args[0], dim=1)).squeeze(-1) * l
    return judge_tensors(
        NAMES, observation.output, (m, l), (exact, error), (torch.float32,) * 2
    ) or judge_operators(observation, FORBIDDEN)


def _call_on_stream(answer: Answer, blocks: list[torch.Tensor]) -> Any:
    return answer(iter(blocks))


def _call_on_two_streams(answer: Answer, blocks: list[torch.Tensor]) -> Any:
    return call_twice(lambda blocks: answer(iter(blocks)), blocks)


def _call_counting(answer: Answer, blocks: list[torch.Tensor]) -> dict[str, Any]:
    """How many blocks the answer kept alive at once at the most, and whether Python's memory grew.

    Python's lists and numbers and NumPy's arrays are traced; PyTorch's tensors are not, they are
    watched elsewhere.
    """
    alive: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []
    most = 0

    def stream() -> Iterator[torch.Tensor]:
        nonlocal most
        for block in blocks:
            copy = block.clone()
            alive.append(weakref.ref(copy))
            yield copy
            del copy
            most = max(most, sum(reference() is not None for reference in alive))
            held.append(tracemalloc.get_traced_memory()[0])

    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        answer(stream())
    finally:
        if not was_tracing:
            tracemalloc.stop()
    # The typical step, not the sum: Python itself takes memory now and then, for its own caches.
    steps = [later - earlier for earlier, later in pairwise(held)] or [0]
    grown = median(steps) > blocks[0].numel() * blocks[0].element_size() / 5
    return {"kept": most, "grew outside tensors": grown}


def _judge_kept(case: Case, observation: Observation) -> str | None:
    blocks, kept = case.args[0], observation.output["kept"]
    forget = (
        "a stream passes once, and a block, with all that was made of it, can be forgotten as soon "
        "as it is added to m and l"
    )
    if kept > BLOCKS_KEPT:
        return f"{kept} of the {len(blocks)} blocks were held at once: {forget}"
    size = max(block.numel() for block in blocks)
    if observation.live_numel > BLOCKS_MADE * size:
        return (
            f"your tensors held {observation.live_numel:,} numbers at once, as many as "
            f"{observation.live_numel / size:.0f} blocks: {forget}"
        )
    if observation.output["grew outside tensors"]:
        return f"your lists or arrays grow with every block: {forget}"
    return None


def _judge_own_work(case: Case, observation: Observation) -> str | None:
    return judge_operators(observation, FORBIDDEN)


# The inputs ---------------------------------------------------------------------------------


def _stream(
    generator: torch.Generator, rows: int, widths: list[int], scale: float = 1.0
) -> tuple[list[torch.Tensor], str]:
    blocks = [normal(generator, rows, width, scale=scale) for width in widths]
    return blocks, f"{len(widths)} blocks of {rows} rows and {', '.join(map(str, widths))} columns"


def _widths(generator: torch.Generator, count: int) -> list[int]:
    return [integer(generator, 2, 9) for _ in range(count)]


def _scales(generator: torch.Generator) -> Iterator[Case]:
    for scale in (1, 5, 40):
        blocks, shape = _stream(generator, 3, _widths(generator, 6), scale)
        # The maximum must rise, and not in the last block alone, for a rescale to matter.
        blocks[3][:, 0] = 3.5 * scale
        blocks[4][:, 1] = 4.0 * scale
        yield Case(f"{shape}, scores × {scale}", (blocks,))


def _order(generator: torch.Generator) -> Iterator[Case]:
    """The others add a few parts in 10,000 to l: more than rounding, so no block can be skipped."""
    for where, place in (("first", 0), ("last", -1)):
        widths = [integer(generator, 18, 26) for _ in range(3)]
        blocks, shape = _stream(generator, 4, [1, *widths, 1], 0.1)
        blocks[place] += 13.2
        yield Case(f"{shape}, the largest score in the {where} block", (blocks,))
    blocks, shape = _stream(generator, 5, [integer(generator, 3, 7)])
    yield Case(shape, (blocks,))


def _levels(generator: torch.Generator) -> Iterator[Case]:
    blocks, shape = _stream(generator, 4, _widths(generator, 4))
    level = torch.tensor([[0.0], [300.0], [-300.0], [-90.0]])
    blocks = [block + level for block in blocks]
    yield Case(f"{shape}, rows around 0, 300, −300 and −90", (blocks,))


def _extremes(generator: torch.Generator) -> Iterator[Case]:
    """From −1,000 to 1,000 and back in one row: no block's own pivot is safe for the others.

    Two rows more stay near −1,000, and near 1,000, in every block.
    """
    blocks, shape = _stream(generator, 4, _widths(generator, 4))
    for index, level in enumerate((-1000.0, 1000.0, -1000.0, 999.0)):
        blocks[index] = blocks[index].abs() * -math.copysign(0.3, level) + level
        blocks[index][1] *= -1
        blocks[index][2] = -blocks[index][2].abs()
        blocks[index][3] = blocks[index][3].abs()
    yield Case(f"{shape}, blocks near 1,000 and −1,000", (blocks,))


def _single(generator: torch.Generator) -> Iterator[Case]:
    blocks, shape = _stream(generator, 3, _widths(generator, 4), 0.3)
    for row, index in enumerate((0, 1, 3)):
        score = float(blocks[index][row, 0])
        for block in blocks:
            block[row] = -math.inf
        blocks[index][row, 0] = score
    yield Case(f"{shape}, one score a row is not −inf", (blocks,))


def _hidden(generator: torch.Generator) -> Iterator[Case]:
    blocks, shape = _stream(generator, 4, _widths(generator, 5))
    for block in (blocks[0], blocks[2], blocks[4]):
        block[0] = -math.inf  # row 0: the first, a middle and the last block hidden
    for block in blocks:
        block[1] = -math.inf  # row 1 sees nothing
        block[2, 0] = -math.inf
    yield Case(f"{shape}, some of them −inf, row 1 throughout", (blocks,))


def _long(generator: torch.Generator) -> Iterator[Case]:
    blocks, _ = _stream(generator, ROWS, [WIDTH] * BLOCKS)
    yield Case(f"{BLOCKS} blocks of {ROWS} rows and {WIDTH} columns", (blocks,))


def _small(generator: torch.Generator) -> Iterator[Case]:
    blocks, shape = _stream(generator, 2, [3, 4])
    yield Case(f"{shape}, twice", (blocks,))


# The known mistakes: each leaves the right path in one place ------------------------------------

Step = Callable[..., Any]


def _row_max(s: torch.Tensor) -> torch.Tensor:
    return s.amax(dim=1)


def _finite(m: torch.Tensor) -> torch.Tensor:
    return torch.where(m == -math.inf, 0.0, m)


def _online(
    blocks: Iterator[torch.Tensor],
    *,
    start: float = -math.inf,
    largest: Step = _row_max,
    running: Step = torch.maximum,
    pivot: Step = _finite,
    summed: Step = lambda l, factor, s, p, m: factor * l + p.sum(dim=1),
) -> tuple[torch.Tensor, torch.Tensor]:
    m = l = None
    for s in blocks:
        if m is None or l is None:
            m, l = s.new_full((len(s),), start), s.new_zeros(len(s))
        m_new = running(m, largest(s))
        safe = pivot(m_new)
        p, factor = torch.exp(s - safe[:, None]), torch.exp(m - safe)
        l, m = summed(l, factor, s, p, m_new), m_new
    assert m is not None
    assert l is not None
    return m, l


def _mistake(
    name: str, explanation: str, *, starts: tuple[float, ...] = (-math.inf,), **step: Any
) -> Mistake:
    first, *others = (partial(_online, **{"start": start, **step}) for start in starts)
    return Mistake(name, explanation, first, tuple(others))


def _sum_under_block_max(
    l: torch.Tensor, factor: torch.Tensor, s: torch.Tensor, p: torch.Tensor, m: torch.Tensor
) -> torch.Tensor:
    return factor * l + torch.exp(s - _finite(_row_max(s))[:, None]).sum(dim=1)


def _sum_with_inverse_factor(
    l: torch.Tensor, factor: torch.Tensor, s: torch.Tensor, p: torch.Tensor, m: torch.Tensor
) -> torch.Tensor:
    return torch.where(l == 0, 0.0, l / factor) + p.sum(dim=1)


def _all_at_once(blocks: Iterator[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    kept = list(blocks)
    return _online(iter([torch.cat(kept, dim=1)]))


def _two_loops(blocks: Iterator[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    m, _ = _online(blocks)
    l = torch.zeros_like(m)
    for s in blocks:
        l = l + torch.exp(s - _finite(m)[:, None]).sum(dim=1)
    return m, l


MISTAKES = (
    _mistake(
        "the sum is not rescaled",
        "what was summed under the old maximum must be multiplied with exp(m_old − m_new) before "
        "the new terms are added.",
        summed=lambda l, factor, s, p, m: l + p.sum(dim=1),
    ),
    _mistake(
        "rescaled with the inverse factor",
        "the factor is exp(m_old − m_new), never above 1; exp(m_new − m_old) grows.",
        summed=_sum_with_inverse_factor,
    ),
    _mistake(
        "the new terms are rescaled too",
        "only the old sum was made under the old maximum: factor · l + p, not factor · (l + p).",
        summed=lambda l, factor, s, p, m: factor * (l + p.sum(dim=1)),
    ),
    _mistake(
        "the block's own maximum in the new terms",
        "the new terms must use the running maximum, as the rescaled old sum does.",
        summed=_sum_under_block_max,
    ),
    _mistake(
        "the maximum of the last block only",
        "m must be the largest score so far: maximum(m, the block's maximum).",
        running=lambda m, block_max: block_max,
    ),
    _mistake(
        "one maximum for all rows",
        "each row has its own maximum: amax(dim=1), not max().",
        largest=lambda s: s.amax().expand(len(s)),
    ),
    _mistake(
        "m starts at 0",
        "0 beats every negative score. The maximum of nothing is −inf.",
        start=0.0,
    ),
    _mistake(
        "m starts at a finite number",
        "a row that lies below it never gets rid of it, and a row of −inf alone has no other "
        "maximum than −inf. The maximum of nothing is −inf.",
        starts=STARTS,
    ),
    _mistake(
        "no max subtraction",
        "l is the sum of exp(s − m). The sum of exp(s) overflows above 88.7 in float32.",
        summed=lambda l, factor, s, p, m: l + torch.exp(s).sum(dim=1),
    ),
    _mistake(
        "NaN where every score so far is −inf",
        "−inf − (−inf) is NaN. Subtract a finite pivot where m is still −inf.",
        pivot=lambda m: m,
    ),
    Mistake(
        "the stream is read twice",
        "after the first loop it is empty, so the second adds nothing and l stays 0.",
        _two_loops,
    ),
    Mistake(
        "all blocks are collected first",
        "the numbers are right, but the memory grows with the row. m and l are all you need.",
        _all_at_once,
    ),
)

QUESTION = Question(
    id="lab3.online_softmax",
    points=3,
    checks=(
        Check("m and l of every row, for scores × 1, × 5, × 40", _scales, _judge, _call_on_stream),
        Check("the maximum may come in any block", _order, _judge, _call_on_stream),
        Check("rows far above and below 0", _levels, _judge, _call_on_stream),
        Check("scores as large as ±1,000", _extremes, _judge, _call_on_stream),
        Check("a single score gives l = 1", _single, _judge, _call_on_stream),
        Check("scores of −inf count nothing", _hidden, _judge, _call_on_stream),
        replace(fresh_check(_small), call=_call_on_two_streams),
        Check("one pass, block by block", _long, _judge_kept, _call_counting, work=True),
        Check("the softmax is your own", _order, _judge_own_work, _call_on_stream, work=True),
    ),
    mistakes=MISTAKES,
    right=_online,
)

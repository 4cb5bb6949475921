"""lab2.flash_bytes: HBM traffic of one fused kernel over blocks of queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from flashcourse.grading.draw import integer
from flashcourse.grading.judge import call_for_number, judge_number
from flashcourse.grading.question import Case, Check, Mistake, Observation, Question
from flashcourse.grading.questions.lab2_naive_bytes import (
    ARGUMENTS,
    THROUGH_A_FLOAT,
    describe,
    large_shapes,
    shapes,
)


def reference(
    batch: int, heads: int, seq_q: int, seq_k: int, head_dim: int, itemsize: int, block_q: int
) -> int:
    """q read once, out written once; k and v read once for every block of queries."""
    blocks = -(-seq_q // block_q)
    rows = 2 * seq_q + 2 * seq_k * blocks
    return batch * heads * rows * head_dim * itemsize


def _even(generator: torch.Generator) -> Iterator[Case]:
    for batch, heads, _, seq_k, head_dim, itemsize in shapes(generator):
        block_q = integer(generator, 20, 60)
        seq_q = block_q * integer(generator, 3, 9)
        yield _case(batch, heads, seq_q, seq_k, head_dim, itemsize, block_q)


def _ragged(generator: torch.Generator) -> Iterator[Case]:
    """A remainder below half of a block and one above, in turn."""
    for index, (batch, heads, _, seq_k, head_dim, itemsize) in enumerate(shapes(generator)):
        block_q = integer(generator, 20, 60)
        half = block_q // 2
        least, most = ((1, half - 1), (half + 1, block_q - 1))[index % 2]
        seq_q = block_q * integer(generator, 3, 9) + integer(generator, least, most)
        yield _case(batch, heads, seq_q, seq_k, head_dim, itemsize, block_q)


def _short(generator: torch.Generator) -> Iterator[Case]:
    for batch, heads, _, seq_k, head_dim, itemsize in list(shapes(generator))[:2]:
        yield _case(batch, heads, integer(generator, 3, 19), seq_k, head_dim, itemsize, 64)


def _single_rows(generator: torch.Generator) -> Iterator[Case]:
    """The bytes are 2 · itemsize times an odd number above 2²⁴, which float32 cannot hold."""
    batch, heads, seq_q, seq_k, head_dim, itemsize = next(shapes(generator))
    yield _case(batch, heads, seq_q, seq_k + 1, head_dim, itemsize, 1)


def _large(generator: torch.Generator) -> Iterator[Case]:
    """An odd number of queries and an even one of keys: the bytes are 4 times an odd number.

    Large blocks, and a large head_dim in their place: an answer may count block after block, head
    after head, and should not take minutes for it.
    """
    small, large = large_shapes(generator)
    *counts, seq_k, head_dim, itemsize = small
    yield _case(*counts, seq_k + 1, head_dim, itemsize, integer(generator, 30, 32))
    *counts, seq_k, _, itemsize = large
    head_dim, block_q = 2 * integer(generator, 4500, 5000) + 1, integer(generator, 7000, 7050)
    yield _case(*counts, seq_k + 1, head_dim, itemsize, block_q)


def _case(*values: int) -> Case:
    return Case(describe((*ARGUMENTS, "block_q"), values), values)


def _judge(case: Case, observation: Observation) -> str | None:
    return judge_number("the number of bytes", observation.output, reference(*case.args))


def _ceil(seq_q: int, block_q: int) -> float:
    return -(-seq_q // block_q)


def _wrong(
    *,
    blocks: Callable[[int, int], float] = _ceil,
    q_rows: Callable[[int, int], int] = lambda seq_q, block_q: 2 * seq_q,
    kv: int = 2,
    matrix_passes: int = 0,
    sizes: Callable[..., tuple[int, ...]] = lambda *sizes: sizes,
) -> Callable[..., int]:
    """Right by default; each mistake changes one of the counts."""

    def flash_bytes(*arguments: int) -> int:
        batch, heads, seq_q, seq_k, head_dim, itemsize, block_q = sizes(*arguments)
        rows = q_rows(seq_q, block_q) + kv * seq_k * blocks(seq_q, block_q)
        numbers = rows * head_dim + matrix_passes * seq_q * seq_k
        return round(batch * heads * numbers * itemsize)

    return flash_bytes


QUESTION = Question(
    id="lab2.flash_bytes",
    points=3,
    checks=(
        Check("block_q divides seq_q", _even, _judge, call_for_number),
        Check("a last block that is not full", _ragged, _judge, call_for_number),
        Check("fewer queries than a block has", _short, _judge, call_for_number),
        Check("blocks of one query", _single_rows, _judge, call_for_number),
        Check("more bytes than 32 bits count, or a float", _large, _judge, call_for_number),
    ),
    mistakes=(
        Mistake(
            "k and v read once",
            "the chip cannot keep them: every block of queries reads all of k and v again.",
            _wrong(blocks=lambda seq_q, block_q: 1),
        ),
        Mistake(
            "number of blocks rounded down",
            "the queries left over after the last full block are a block too, and read all of k "
            "and v. Round up: -(-seq_q // block_q).",
            _wrong(blocks=lambda seq_q, block_q: seq_q // block_q),
        ),
        Mistake(
            "number of blocks not rounded",
            "seq_q / block_q is not a whole number here. A block that is not full reads all of k "
            "and v all the same: round up.",
            _wrong(blocks=lambda seq_q, block_q: seq_q / block_q),
        ),
        Mistake(
            "k and v read once for every query",
            "a block of queries shares the tiles it loads: count blocks, not queries.",
            _wrong(blocks=lambda seq_q, block_q: seq_q),
        ),
        Mistake(
            "the padding of the last block counted",
            "rows beyond seq_q do not exist: masked loads and stores move nothing.",
            _wrong(q_rows=lambda seq_q, block_q: 2 * block_q * -(-seq_q // block_q)),
        ),
        Mistake(
            "one of q and out is not counted",
            "q is read once and out is written once: seq_q × head_dim numbers a head, each.",
            _wrong(q_rows=lambda seq_q, block_q: seq_q),
        ),
        Mistake(
            "only one of k and v counted",
            "every block of queries reads both.",
            _wrong(kv=1),
        ),
        Mistake(
            "the score matrix counted",
            "scores and probabilities of a tile stay on the chip. That is the point of the kernel.",
            _wrong(matrix_passes=2),
        ),
        Mistake(
            "itemsize left out",
            "this is the count of numbers. Each of them has itemsize bytes.",
            _wrong(sizes=lambda b, h, m, n, d, i, block: (b, h, m, n, d, 1, block)),
        ),
        Mistake(
            "heads left out",
            "every head reads its own q, k and v.",
            _wrong(sizes=lambda b, h, m, n, d, i, block: (b, 1, m, n, d, i, block)),
        ),
        replace(THROUGH_A_FLOAT, answer=lambda *sizes: int(float(reference(*sizes)))),
    ),
)

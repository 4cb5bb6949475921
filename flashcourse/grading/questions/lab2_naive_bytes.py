"""lab2.naive_bytes: HBM traffic of attention in four kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from flashcourse.grading.draw import integer
from flashcourse.grading.judge import call_for_number, judge_number
from flashcourse.grading.question import Case, Check, Mistake, Observation, Question

ARGUMENTS = ("batch", "heads", "seq_q", "seq_k", "head_dim", "itemsize")


def reference(batch: int, heads: int, seq_q: int, seq_k: int, head_dim: int, itemsize: int) -> int:
    """QKᵀ, scale, softmax and PV, each reading its inputs and writing its output once."""
    matrix = seq_q * seq_k
    product = seq_q * head_dim + seq_k * head_dim + matrix  # read q and k, write S
    scale = 2 * matrix  # read S, write S
    softmax = 2 * matrix  # read S, write P
    output = matrix + seq_k * head_dim + seq_q * head_dim  # read P and v, write out
    return batch * heads * itemsize * (product + scale + softmax + output)


def describe(names: tuple[str, ...], values: tuple[object, ...]) -> str:
    """``batch=2, heads=3, …``: a case of plain numbers in words."""
    return ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))


def shapes(generator: torch.Generator) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Equal lengths, more keys than queries, fewer, and one query; no two sizes alike.

    Every draw has numbers of 2 and of 4 bytes, a batch of 1, and results that float32 cannot hold:
    with equal lengths the bytes are 2 · itemsize times an odd number above 2²⁴.
    """
    n, more = 2 * integer(generator, 260, 400) + 1, 2 * integer(generator, 50, 450)
    sizes = (2, 4, 1, 8) if integer(generator, 0, 1) else (4, 2, 8, 1)
    for (seq_q, seq_k), itemsize in zip(
        ((n, n), (n, n + more), (n + more, n), (1, n + 1)), sizes, strict=True
    ):
        batch = 1 if itemsize == 8 else 1 + 2 * integer(generator, 1, 2)
        heads, head_dim = 2 * integer(generator, 3, 5) + 1, 2 * integer(generator, 8, 27) + 1
        yield batch, heads, seq_q, seq_k, head_dim, itemsize


def _equal(generator: torch.Generator) -> Iterator[Case]:
    yield from _cases(list(shapes(generator))[:1])


def _unequal(generator: torch.Generator) -> Iterator[Case]:
    yield from _cases(list(shapes(generator))[1:])


def large_shapes(generator: torch.Generator) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Results that 32 bits cannot hold, then some above 2⁵⁶ that a float cannot.

    With a batch, heads and a head_dim that are odd, the bytes are 4 times an odd number.
    """
    for low, high, batch, heads in ((4_000, 5_000, 1, 4), (250_000, 300_000, 300, 50)):
        n = 2 * integer(generator, low, high) + 1
        batch, heads = 2 * batch + 1, 2 * integer(generator, heads, heads + 5) + 1
        yield batch, heads, n, n, 2 * integer(generator, 60, 70) + 1, 2


def _large(generator: torch.Generator) -> Iterator[Case]:
    yield from _cases(list(large_shapes(generator)))


def _cases(drawn: list[tuple[int, int, int, int, int, int]]) -> Iterator[Case]:
    for values in drawn:
        yield Case(describe(ARGUMENTS, values), values)


def _judge(case: Case, observation: Observation) -> str | None:
    return judge_number("the number of bytes", observation.output, reference(*case.args))


def _wrong(
    *,
    passes: int = 6,
    q_rows: int = 1,
    k_rows: int = 1,
    v_rows: int = 1,
    out_rows: int = 1,
    sizes: Callable[..., tuple[int, ...]] = lambda *sizes: sizes,
) -> Callable[..., int]:
    """Right by default; each mistake changes how often something is moved, or a size."""

    def naive_bytes(*arguments: int) -> int:
        batch, heads, seq_q, seq_k, head_dim, itemsize = sizes(*arguments)
        rows = seq_q * (q_rows + out_rows) + seq_k * (k_rows + v_rows)
        return batch * heads * itemsize * (passes * seq_q * seq_k + rows * head_dim)

    return naive_bytes


THROUGH_A_FLOAT = Mistake(
    "through a float",
    "a float has 53 bits, so that the last digits of a larger count are lost. Integers multiply "
    "exactly; divide them with //.",
    lambda *sizes: int(float(reference(*sizes))),
)

QUESTION = Question(
    id="lab2.naive_bytes",
    points=3,
    checks=(
        Check("as many queries as keys", _equal, _judge, call_for_number),
        Check("unequal lengths", _unequal, _judge, call_for_number),
        Check("more bytes than 32 bits count, or a float", _large, _judge, call_for_number),
    ),
    mistakes=(
        Mistake(
            "itemsize left out",
            "this is the count of numbers. Each of them has itemsize bytes.",
            _wrong(sizes=lambda b, h, m, n, d, i: (b, h, m, n, d, 1)),
        ),
        Mistake(
            "one pass over the matrix missing",
            "the score matrix is passed over six times: S written, read and written by the scale, "
            "read by the softmax, P written, P read. You have five.",
            _wrong(passes=5),
        ),
        Mistake(
            "two passes over the matrix missing",
            "the score matrix is passed over six times: S written, read and written by the scale, "
            "read by the softmax, P written, P read. You have four. Either a kernel is missing, or "
            "kernels that read and write are counted once.",
            _wrong(passes=4),
        ),
        Mistake(
            "only the score matrix counted",
            "q, k and v are read and out is written as well.",
            _wrong(q_rows=0, k_rows=0, v_rows=0, out_rows=0),
        ),
        Mistake(
            "one of q and out is not counted",
            "the first kernel reads q and the last writes out: seq_q × head_dim numbers a head, "
            "each.",
            _wrong(out_rows=0),
        ),
        Mistake(
            "one of k and v is not counted",
            "the first kernel reads k and the last reads v: seq_k × head_dim numbers a head, each.",
            _wrong(v_rows=0),
        ),
        Mistake(
            "heads left out",
            "every head has its own q, k, v, out and its own score matrix.",
            _wrong(sizes=lambda b, h, m, n, d, i: (b, 1, m, n, d, i)),
        ),
        Mistake(
            "batch left out",
            "every sequence of the batch has its own score matrices.",
            _wrong(sizes=lambda b, h, m, n, d, i: (1, h, m, n, d, i)),
        ),
        Mistake(
            "seq_q used for both lengths",
            "the matrix is seq_q × seq_k, and k and v have seq_k rows.",
            _wrong(sizes=lambda b, h, m, n, d, i: (b, h, m, m, d, i)),
        ),
        THROUGH_A_FLOAT,
    ),
)

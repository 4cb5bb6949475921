"""lab2.attention_flops: arithmetic of the two matrix products, causal pairs counted exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from flashcourse.grading.draw import integer
from flashcourse.grading.judge import call_for_number, judge_number
from flashcourse.grading.question import Case, Check, Mistake, Observation, Question
from flashcourse.grading.questions.lab2_naive_bytes import THROUGH_A_FLOAT, describe

ARGUMENTS = ("batch", "heads", "seq_q", "seq_k", "head_dim", "is_causal")


def pairs(seq_q: int, seq_k: int, is_causal: bool) -> int:
    """Pairs of query i and key j with ``j <= i + seq_k - seq_q``, or all of them."""
    if not is_causal:
        return seq_q * seq_k
    return sum(max(0, i + seq_k - seq_q + 1) for i in range(seq_q))


def reference(
    batch: int, heads: int, seq_q: int, seq_k: int, head_dim: int, is_causal: bool
) -> int:
    """4 · head_dim a pair: a multiply and an add for each number, in QKᵀ and in PV."""
    return batch * heads * pairs(seq_q, seq_k, is_causal) * 4 * head_dim


def _cases(
    generator: torch.Generator, is_causal: bool, lengths: Iterator[tuple[int, int]]
) -> Iterator[Case]:
    for index, (seq_q, seq_k) in enumerate(lengths):  # the second time a batch of 1
        batch = 1 if index == 1 else 1 + 2 * integer(generator, 1, 2)
        heads, head_dim = 2 * integer(generator, 3, 5) + 1, 2 * integer(generator, 8, 48) + 1
        values = (batch, heads, seq_q, seq_k, head_dim, is_causal)
        yield Case(describe(ARGUMENTS, values), values)


def _full(generator: torch.Generator) -> Iterator[Case]:
    """More keys come first: 4 times an odd number above 2²⁴, which float32 cannot hold."""
    n, more = 2 * integer(generator, 110, 200) + 1, 2 * integer(generator, 10, 100)
    yield from _cases(generator, False, iter([(n, n + more), (n + more, n), (n, n)]))


def _large(generator: torch.Generator) -> Iterator[Case]:
    """4 times an odd number above 2⁵⁶, which a float cannot hold."""
    n = 2 * integer(generator, 8_000, 9_000) + 1
    heads, head_dim = 2 * integer(generator, 120, 125) + 1, 2 * integer(generator, 60, 70) + 1
    values = (2_501, heads, n, n, head_dim, False)
    yield Case(describe(ARGUMENTS, values), values)


def _causal_equal(generator: torch.Generator) -> Iterator[Case]:
    n = integer(generator, 30, 200)
    yield from _cases(generator, True, iter([(n, n), (n + 1, n + 1)]))


def _causal_more_keys(generator: torch.Generator) -> Iterator[Case]:
    n, more = integer(generator, 30, 200), integer(generator, 20, 200)
    yield from _cases(generator, True, iter([(n, n + more), (1, n)]))


def _causal_fewer_keys(generator: torch.Generator) -> Iterator[Case]:
    n, more = integer(generator, 30, 200), integer(generator, 20, 200)
    yield from _cases(generator, True, iter([(n + more, n)]))


def _judge(case: Case, observation: Observation) -> str | None:
    return judge_number("the number of FLOPs", observation.output, reference(*case.args))


def _wrong(
    *,
    a_pair: int = 4,
    causal: Callable[[int, int], float] = lambda m, n: pairs(m, n, True),
    sizes: Callable[..., tuple[int, ...]] = lambda *sizes: sizes,
) -> Callable[..., int]:
    """Right by default; each mistake changes the count of pairs or the work of one."""

    def attention_flops(*arguments: int) -> int:
        batch, heads, seq_q, seq_k, head_dim, is_causal = sizes(*arguments)
        visible = causal(seq_q, seq_k) if is_causal else seq_q * seq_k
        return int(batch * heads * a_pair * head_dim * visible)

    return attention_flops


QUESTION = Question(
    id="lab2.attention_flops",
    points=2,
    checks=(
        Check("without a mask", _full, _judge, call_for_number),
        Check("more than 32 bits count, or a float", _large, _judge, call_for_number),
        Check("causal, as many queries as keys", _causal_equal, _judge, call_for_number),
        Check("causal, more keys than queries", _causal_more_keys, _judge, call_for_number),
        Check("causal, fewer keys than queries", _causal_fewer_keys, _judge, call_for_number),
    ),
    mistakes=(
        Mistake(
            "half of the work",
            "2 · head_dim a pair: either one of the two products QKᵀ and PV is missing, or a "
            "multiply and an add are counted as one.",
            _wrong(a_pair=2),
        ),
        Mistake(
            "causal counted as exactly half",
            "the diagonal is visible, so equal lengths N have N·(N + 1)/2 pairs, not N²/2; and "
            "with unequal lengths it is not near half.",
            _wrong(causal=lambda m, n: m * n / 2),
        ),
        Mistake(
            "causal ignored",
            "pairs that the mask forbids are not counted.",
            _wrong(causal=lambda m, n: m * n),
        ),
        Mistake(
            "causal aligned to the top left",
            "query i sees key j when j <= i + seq_k - seq_q: the last query sees the last key.",
            _wrong(causal=lambda m, n: sum(min(i + 1, n) for i in range(m))),
        ),
        Mistake(
            "causal counted as if the lengths were equal",
            "N·(N + 1)/2 pairs are those of N queries and N keys. With seq_k − seq_q keys more, "
            "every query sees that many more; with fewer, the first queries see none.",
            _wrong(causal=lambda m, n: m * (m + 1) / 2),
            (_wrong(causal=lambda m, n: n * (n + 1) / 2),),
        ),
        Mistake(
            "the diagonal left out",
            "query i sees key i + seq_k - seq_q itself as well.",
            _wrong(causal=lambda m, n: sum(max(0, i + n - m) for i in range(m))),
        ),
        Mistake(
            "queries before the first key counted as negative",
            "with fewer keys than queries, the first queries see nothing: 0 pairs, not a negative "
            "number.",
            _wrong(causal=lambda m, n: m * (n - m) + m * (m + 1) / 2),
        ),
        Mistake(
            "heads left out",
            "every head does this work.",
            _wrong(sizes=lambda b, h, *others: (b, 1, *others)),
        ),
        Mistake(
            "batch left out",
            "every sequence of the batch does this work.",
            _wrong(sizes=lambda b, h, *others: (1, h, *others)),
        ),
        replace(THROUGH_A_FLOAT, answer=lambda *sizes: int(float(reference(*sizes)))),
    ),
)

"""lab1.padding_mask: which keys of a padded batch may be attended to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flashcourse.grading.draw import integer
from flashcourse.grading.question import Answer, Case, Check, Mistake, Observation, Question


def reference(lengths: torch.Tensor, seq_q: int, seq_k: int) -> torch.Tensor:
    """True where key j is one of the first ``lengths[b]``; bool ``(batch, 1, seq_q, seq_k)``."""
    return padding_mask(lengths, seq_q, seq_k)


def _judge_form(case: Case, observation: Observation) -> str | None:
    mask = observation.output
    if type(mask) is not torch.Tensor:
        return f"mask must be a torch.Tensor, got {type(mask).__name__}"
    if mask.dtype != torch.bool:
        came = str(mask.dtype).removeprefix("torch.")
        return f"mask has dtype {came}, expected bool"
    lengths, seq_q, seq_k = case.args
    expected = (lengths.shape[0], 1, seq_q, seq_k)
    if tuple(mask.shape) != expected:
        return f"mask has shape {tuple(mask.shape)}, expected (batch, 1, seq_q, seq_k) = {expected}"
    return None


def _judge(case: Case, observation: Observation) -> str | None:
    return _judge_form(case, observation) or _judge_entries(observation.output, *case.args)


def _judge_entries(mask: torch.Tensor, lengths: torch.Tensor, seq_q: int, seq_k: int) -> str | None:
    expected = reference(lengths, seq_q, seq_k)
    wrong = (mask != expected).nonzero()
    if not len(wrong):
        return None
    b, _, i, j = wrong[0].tolist()
    return (
        f"mask[{b}, 0, {i}, {j}] is {bool(mask[b, 0, i, j])}, expected "
        f"{bool(expected[b, 0, i, j])}: sequence {b} has length {int(lengths[b])}; "
        f"{len(wrong)} of {mask.numel()} entries are wrong"
    )


def _call_twice(
    answer: Answer, first: torch.Tensor, second: torch.Tensor, seq_q: int, seq_k: int
) -> list[Any]:
    """What two calls with other lengths return; the first as it is after the second."""
    return [answer(first, seq_q, seq_k), answer(second, seq_q, seq_k)]


def _judge_twice(case: Case, observation: Observation) -> str | None:
    *both, seq_q, seq_k = case.args
    for number, lengths, mask in zip(("first", "second"), both, observation.output, strict=True):
        once = Case(case.description, (lengths, seq_q, seq_k))
        message = _judge(once, Observation(mask))
        if message:
            return (
                f"two calls with equal shapes and other lengths, the {number}: {message}. A mask "
                "kept from another call is not this call's"
            )
    return None


def _case(lengths: list[int], seq_q: int, seq_k: int, dtype: torch.dtype = torch.int64) -> Case:
    name = str(dtype).removeprefix("torch.")
    return Case(
        f"lengths {lengths} ({name}), seq_q {seq_q}, seq_k {seq_k}",
        (torch.tensor(lengths, dtype=dtype), seq_q, seq_k),
    )


def _twice(generator: torch.Generator) -> Iterator[Case]:
    n = integer(generator, 5, 12)
    first = [integer(generator, 1, n - 1), n]
    second = [n, integer(generator, 1, n - 1)]
    yield Case(
        f"lengths {first}, then {second}, seq_q {n}, seq_k {n}",
        (torch.tensor(first), torch.tensor(second), n, n),
    )


def _squares(generator: torch.Generator) -> Iterator[Case]:
    for short in (0, 0, 1):  # how many keys short of n the longest sequence is
        n = integer(generator, 5, 12)
        lengths = [integer(generator, 2, n - 1), integer(generator, 2, n - 1)]
        yield _case([*lengths, n - short, 1], n, n)


def _rectangles(generator: torch.Generator) -> Iterator[Case]:
    for fewer in (True, False):
        seq_k = integer(generator, 6, 12)
        seq_q = integer(generator, 2, seq_k - 1) if fewer else integer(generator, seq_k + 1, 17)
        yield _case([integer(generator, 2, seq_k - 1), seq_k, 1], seq_q, seq_k)
    yield _case([integer(generator, 2, 7)], 1, integer(generator, 8, 11))


def _extremes(generator: torch.Generator) -> Iterator[Case]:
    n = integer(generator, 4, 9)
    yield _case([0, n, 0], n + 1, n)
    yield _case([n, integer(generator, 1, n - 1)], n, n, torch.int32)


def _large(generator: torch.Generator) -> Iterator[Case]:
    """More keys than int8 can count, and more sequences than a hand has fingers."""
    seq_k = integer(generator, 260, 300)
    lengths = [integer(generator, 0, seq_k) for _ in range(integer(generator, 6, 9))]
    yield _case([*lengths, seq_k], 3, seq_k)


def padding_mask(lengths: torch.Tensor, seq_q: int, seq_k: int) -> torch.Tensor:
    """The right answer, which each mistake below changes in one place."""
    key = torch.arange(seq_k)
    visible = key[None, :] < lengths[:, None]  # (batch, seq_k)
    return visible[:, None, None, :].repeat(1, 1, seq_q, 1)


def _inverted(lengths: torch.Tensor, seq_q: int, seq_k: int) -> torch.Tensor:
    return ~padding_mask(lengths, seq_q, seq_k)


def _one_too_many(lengths: torch.Tensor, seq_q: int, seq_k: int) -> torch.Tensor:
    return padding_mask(lengths + 1, seq_q, seq_k)


def _one_too_few(lengths: torch.Tensor, seq_q: int, seq_k: int) -> torch.Tensor:
    return padding_mask(lengths - 1, seq_q, seq_k)


def _no_head_dimension(lengths: torch.Tensor, seq_q: int, seq_k: int) -> torch.Tensor:
    return padding_mask(lengths, seq_q, seq_k)[:, 0]


def _no_query_dimension(lengths: torch.Tensor, seq_q: int, seq_k: int) -> torch.Tensor:
    return padding_mask(lengths, 1, seq_k)


def _batch_as_heads(lengths: torch.Tensor, seq_q: int, seq_k: int) -> torch.Tensor:
    return padding_mask(lengths, seq_q, seq_k).transpose(0, 1)


def _queries(lengths: torch.Tensor, seq_q: int, seq_k: int) -> torch.Tensor:
    return padding_mask(lengths, seq_k, seq_q).transpose(-2, -1)


def _both(lengths: torch.Tensor, seq_q: int, seq_k: int) -> torch.Tensor:
    return padding_mask(lengths, seq_q, seq_k) & _queries(lengths, seq_q, seq_k)


def _numbers(dtype: torch.dtype) -> Answer:
    def answer(lengths: torch.Tensor, seq_q: int, seq_k: int) -> torch.Tensor:
        return padding_mask(lengths, seq_q, seq_k).to(dtype)

    return answer


def _additive(lengths: torch.Tensor, seq_q: int, seq_k: int) -> torch.Tensor:
    mask = padding_mask(lengths, seq_q, seq_k)
    return torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))


def _left_padded(lengths: torch.Tensor, seq_q: int, seq_k: int) -> torch.Tensor:
    return padding_mask(lengths, seq_q, seq_k).flip(-1)


def _causal(lengths: torch.Tensor, seq_q: int, seq_k: int) -> torch.Tensor:
    return padding_mask(lengths, seq_q, seq_k).tril(seq_k - seq_q)


def _longest(lengths: torch.Tensor, seq_q: int, seq_k: int) -> torch.Tensor:
    return padding_mask(lengths.max().expand(lengths.shape[0]), seq_q, seq_k)


QUESTION = Question(
    id="lab1.padding_mask",
    points=3,
    checks=(
        Check("a bool tensor of shape (batch, 1, seq_q, seq_k)", _rectangles, _judge_form),
        Check("every query sees the first lengths[b] keys, and no other", _squares, _judge),
        Check("seq_q and seq_k may differ", _rectangles, _judge),
        Check("lengths 0 and seq_k, and int32 lengths", _extremes, _judge),
        Check("many sequences and many keys", _large, _judge),
        Check("every call looks at its own lengths", _twice, _judge_twice, _call_twice),
    ),
    mistakes=(
        Mistake(
            "polarity inverted",
            "True marks the padding. Here, as in SDPA, True means: may attend. "
            "(nn.MultiheadAttention's key_padding_mask has it the other way round.)",
            _inverted,
        ),
        Mistake(
            "off by one: one padding key is visible",
            "keys are counted from 0, so the last real key is lengths − 1: compare with <, not <=.",
            _one_too_many,
        ),
        Mistake(
            "off by one: the last real key is hidden",
            "key j is real if j < lengths; lengths − 1 is still real.",
            _one_too_few,
        ),
        Mistake(
            "the dimension of the heads is missing",
            "(batch, seq_q, seq_k) broadcasts the batch against the heads: wrong, or an error. "
            "Put a 1 where the heads are.",
            _no_head_dimension,
        ),
        Mistake(
            "the dimension of the queries has size 1",
            "the question asks for the whole shape, (batch, 1, seq_q, seq_k); expand costs no "
            "memory.",
            _no_query_dimension,
        ),
        Mistake(
            "batch and heads exchanged",
            "(1, batch, seq_q, seq_k) gives each head the mask of a sequence.",
            _batch_as_heads,
        ),
        Mistake(
            "queries masked instead of keys",
            "the padding must not be read, so it is hidden as a key. What a padding query "
            "computes is thrown away anyway.",
            _queries,
        ),
        Mistake(
            "queries masked as well as keys",
            "a padding query then sees no key at all, which is the way to NaN. Hide the keys only.",
            _both,
        ),
        Mistake(
            "numbers 1 and 0 instead of True and False",
            "SDPA adds a mask of floats to the scores, where 0 and 1 hide nothing, and refuses one "
            "of integers; `~` of integers is not their negation either. Return a bool tensor: a "
            "comparison makes one.",
            _numbers(torch.float32),
            tuple(
                _numbers(dtype)
                for dtype in (torch.uint8, torch.int64, torch.int32, torch.int8, torch.float16)
            ),
        ),
        Mistake(
            "an additive mask of 0 and −inf",
            "that works when it is added to the scores, but the question asks for bool.",
            _additive,
        ),
        Mistake(
            "padding taken to be on the left",
            "the real tokens come first here: keys 0 to lengths − 1.",
            _left_padded,
        ),
        Mistake(
            "causal mask mixed in",
            "the padding mask hides padding and nothing else; causality is a separate mask.",
            _causal,
        ),
        Mistake(
            "the longest length used for every sequence",
            "each sequence has its own length: compare with lengths[:, None], one row a sequence.",
            _longest,
        ),
    ),
)

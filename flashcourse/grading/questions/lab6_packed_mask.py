"""lab6.packed_mask: who sees whom in a row of several documents."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from flashcourse.grading.draw import integer
from flashcourse.grading.fresh import judge_fresh
from flashcourse.grading.question import Answer, Case, Check, Mistake, Observation, Question


def packed_mask(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The right answer, which each mistake below changes in one place."""
    document, _ = _document_and_position(cu_seqlens)
    i = torch.arange(len(document))
    return (document[:, None] == document[None, :]) & (i[None, :] <= i[:, None])


def _document_and_position(cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = cu_seqlens.diff().long()
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return document, torch.arange(len(document)) - cu_seqlens.long()[document]


def _judge(case: Case, observation: Observation) -> str | None:
    mask, cu_seqlens = observation.output, case.args[0]
    if type(mask) is not torch.Tensor:
        return f"mask must be a torch.Tensor, got {type(mask).__name__}"
    if mask.dtype != torch.bool:
        came = str(mask.dtype).removeprefix("torch.")
        return f"mask has dtype {came}, expected bool"
    expected = packed_mask(cu_seqlens)
    if mask.shape != expected.shape:
        return f"mask has shape {tuple(mask.shape)}, expected {tuple(expected.shape)}"
    wrong = (mask != expected).nonzero()
    if not len(wrong):
        return None
    i, j = wrong[0].tolist()
    document, _ = _document_and_position(cu_seqlens)
    return (
        f"mask[{i}, {j}] is {bool(mask[i, j])}, expected {bool(expected[i, j])}: query {i} is in "
        f"document {int(document[i])}, key {j} in document {int(document[j])}; {len(wrong)} of "
        f"{mask.numel()} entries are wrong"
    )


def _case(lengths: list[int], note: str = "") -> Case:
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    shown = ", ".join(map(str, offsets[:12].tolist()))
    described = f"cu_seqlens [{shown}{', …' if len(offsets) > 12 else ''}]"
    return Case(described + (f", {note}" if note else ""), (offsets,))


def _several(generator: torch.Generator) -> Iterator[Case]:
    for count in (3, 4, 5):  # of two documents, the first is all that the second may see wrongly
        yield _case([integer(generator, 2, 6) for _ in range(count)])


def _single(generator: torch.Generator) -> Iterator[Case]:
    yield _case([integer(generator, 3, 8)], "one document")
    yield _case([1, integer(generator, 2, 5), 1, 1], "documents of one token")


def _empty(generator: torch.Generator) -> Iterator[Case]:
    n = [integer(generator, 2, 5) for _ in range(3)]
    yield _case([0, n[0], 0, 0, n[1], n[2]], "empty documents")
    yield _case([n[2], n[0], n[1], 0], "an empty document at the end")


def _many(generator: torch.Generator) -> Iterator[Case]:
    """So many that their numbers do not fit into a byte."""
    count = integer(generator, 290, 310)
    yield _case([integer(generator, 1, 3) for _ in range(count)], f"{count} documents")


def _call_twice(answer: Answer, cu_seqlens: torch.Tensor) -> tuple[Any, Any]:
    """What the first call returned, and the same after a call with the documents in other order."""
    result = answer(cu_seqlens)
    kept = result.clone() if isinstance(result, torch.Tensor) else result
    answer(cu_seqlens[-1] - cu_seqlens.flip(0))
    return kept, result


def _uneven(generator: torch.Generator) -> Iterator[Case]:
    yield _case([integer(generator, 2, 4), integer(generator, 5, 6)])


def _causal_only(cu_seqlens: torch.Tensor) -> torch.Tensor:
    total = int(cu_seqlens[-1])
    return torch.ones(total, total, dtype=torch.bool).tril()


def _blocks_only(cu_seqlens: torch.Tensor) -> torch.Tensor:
    document, _ = _document_and_position(cu_seqlens)
    return document[:, None] == document[None, :]


def _by_position(cu_seqlens: torch.Tensor) -> torch.Tensor:
    _, position = _document_and_position(cu_seqlens)
    return position[None, :] <= position[:, None]


def _strict(cu_seqlens: torch.Tensor) -> torch.Tensor:
    return packed_mask(cu_seqlens).tril(-1)


def _shifted(cu_seqlens: torch.Tensor) -> torch.Tensor:
    i = torch.arange(int(cu_seqlens[-1]))
    document = torch.searchsorted(cu_seqlens.long(), i)  # left: a boundary falls to the one before
    return (document[:, None] == document[None, :]) & (i[None, :] <= i[:, None])


def _inverted(cu_seqlens: torch.Tensor) -> torch.Tensor:
    return ~packed_mask(cu_seqlens)


def _transposed(cu_seqlens: torch.Tensor) -> torch.Tensor:
    return packed_mask(cu_seqlens).mT


def _additive(cu_seqlens: torch.Tensor) -> torch.Tensor:
    mask = packed_mask(cu_seqlens)
    return torch.zeros(mask.shape).masked_fill(~mask, -math.inf)


def _earlier_documents(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """All of the document before, and the past of one's own."""
    document, _ = _document_and_position(cu_seqlens)
    apart = document[:, None] - document[None, :]
    i = torch.arange(len(document))
    return (apart >= 0) & (apart <= 1) & (i[None, :] <= i[:, None])


QUESTION = Question(
    id="lab6.packed_mask",
    points=2,
    checks=(
        Check("each token sees its document's past and itself", _several, _judge),
        Check("one document, and documents of one token", _single, _judge),
        Check("empty documents change nothing", _empty, _judge),
        Check("as many documents as there are", _many, _judge),
        Check("every call returns new tensors", _uneven, judge_fresh, _call_twice),
    ),
    mistakes=(
        Mistake(
            "causal only: earlier documents are seen",
            "a triangle over the whole row lets every document read the ones before it. The mask "
            "is block-diagonal as well.",
            _causal_only,
        ),
        Mistake(
            "the document before is seen",
            "only the same document is visible: compare for equality.",
            _earlier_documents,
        ),
        Mistake(
            "not causal inside a document",
            "the blocks are right, but a token sees its own future: j <= i as well.",
            _blocks_only,
        ),
        Mistake(
            "mask by position only",
            "positions start again in every document, so comparing them lets each document see the "
            "beginnings of all others. Compare the documents too.",
            _by_position,
        ),
        Mistake(
            "a token does not see itself", "the diagonal belongs to the mask: j <= i.", _strict
        ),
        Mistake(
            "boundaries shifted by one",
            "cu_seqlens[d] is the first token of document d, not the last of the one before. With "
            "searchsorted that is right=True.",
            _shifted,
        ),
        Mistake("True and False exchanged", "True means may attend.", _inverted),
        Mistake(
            "queries and keys exchanged",
            "rows are queries: mask[i, j] says whether i sees j.",
            _transposed,
        ),
        Mistake(
            "an additive mask of 0 and −inf",
            "that works when it is added to the scores, but the question asks for bool.",
            _additive,
        ),
    ),
)

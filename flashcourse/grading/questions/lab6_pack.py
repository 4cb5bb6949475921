"""lab6.pack: documents behind each other in one row, with everything training needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_map

from flashcourse.grading.draw import integer
from flashcourse.grading.fresh import judge_fresh
from flashcourse.grading.question import Answer, Case, Check, Mistake, Observation, Question

IGNORED = -100
MOST_ID = 60_000  # a vocabulary larger than int16 and float16 can count
KEYS = ("input_ids", "position_ids", "labels", "cu_seqlens", "max_seqlen")
Documents = list[list[int]]


def pack(documents: Documents) -> dict[str, Any]:
    """The right answer, which each mistake below changes in one place."""
    ids = torch.tensor([t for document in documents for t in document])
    positions = torch.tensor([p for document in documents for p in range(len(document))])
    lengths = torch.tensor([len(document) for document in documents])
    return {
        "input_ids": ids[None],
        "position_ids": positions[None],
        "labels": ids.masked_fill(positions == 0, IGNORED)[None],
        "cu_seqlens": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        "max_seqlen": int(lengths.max()),
    }


def _call(answer: Answer, documents: Documents) -> Any:
    """What the answer returns; any kind of dict as a plain one, NumPy's integers as Python's."""
    output = answer(documents)
    if not isinstance(output, dict):
        return output
    return {
        key: int(value) if isinstance(value, numpy.integer) else value
        for key, value in output.items()
    }


def _call_twice(answer: Answer, documents: Documents) -> tuple[Any, Any]:
    """What the first call returned, and the same after a second call with other tokens."""
    result = _call(answer, documents)
    kept = tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, result)
    answer([[token + 1 for token in document] for document in documents])
    return kept, result


def _judge_keys(*keys: str) -> Callable[[Case, Observation], str | None]:
    def judge(case: Case, observation: Observation) -> str | None:
        output, expected = observation.output, pack(*case.args)
        if type(output) is not dict:
            return f"expected a dict, got {type(output).__name__}"
        missing = [key for key in KEYS if key not in output]
        if missing:
            return f"the dict lacks {', '.join(missing)}; it has {', '.join(map(str, output))}"
        for key in keys:
            message = _judge_value(key, output[key], expected[key])
            if message:
                return message
        return None

    return judge


def _judge_value(key: str, actual: Any, expected: Any) -> str | None:
    if not isinstance(expected, torch.Tensor):
        if type(actual) is not int:
            return f"{key} must be an int, got {type(actual).__name__}"
        return None if actual == expected else f"{key} is {actual}, expected {expected}"
    if type(actual) is not torch.Tensor:
        return f"{key} must be a torch.Tensor, got {type(actual).__name__}"
    if actual.dtype != expected.dtype:
        names = [str(t.dtype).removeprefix("torch.") for t in (actual, expected)]
        return f"{key} has dtype {names[0]}, expected {names[1]}"
    if actual.shape != expected.shape:
        return f"{key} has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    wrong = (actual != expected).nonzero()
    if not len(wrong):
        return None
    where = tuple(wrong[0].tolist())
    return (
        f"{key}[{', '.join(map(str, where))}] is {int(actual[where])}, expected "
        f"{int(expected[where])}; {len(wrong)} of {actual.numel()} entries are wrong"
    )


def _case(generator: torch.Generator, lengths: list[int], note: str = "") -> Case:
    """Documents in which the tokens that begin one stand elsewhere too.

    Those of one token are all the same. So neither a token nor a document says where it stands.
    The longest begins with an odd number that neither int16 nor float16 holds; a 0 in it is a
    token like any other.
    """
    documents = [[integer(generator, 0, MOST_ID) for _ in range(length)] for length in lengths]
    single = integer(generator, 0, MOST_ID)
    longest = max(documents, key=len)
    longest[0] = 2 * integer(generator, 20_000, MOST_ID // 2) - 1
    for document in documents:
        if len(document) == 1:
            document[0] = single
    for document in documents:
        if len(document) > 1:
            other = documents[integer(generator, 0, len(documents) - 1)]
            place = integer(generator, 1, len(document) - 1)
            document[place] = other[0]
            if document is longest and len(document) > 2:
                document[1 if place > 1 else 2] = 0
    described = f"documents of {', '.join(map(str, lengths))} tokens"
    return Case(described + (f", {note}" if note else ""), (documents,))


def _several(generator: torch.Generator) -> Iterator[Case]:
    yield _case(generator, [3, *(integer(generator, 2, 9) for _ in range(3))])
    yield _case(generator, [integer(generator, 3, 6), integer(generator, 7, 12)])


def _single(generator: torch.Generator) -> Iterator[Case]:
    yield _case(generator, [integer(generator, 3, 9)])
    yield _case(generator, [1, integer(generator, 3, 6), 1, 1], "some of one token")


def _with(**changes: Callable[[dict[str, Any], Documents], Any]) -> Callable[[Documents], Any]:
    """The right answer with some values computed otherwise."""

    def answer(documents: Documents) -> dict[str, Any]:
        right = pack(documents)
        return {**right, **{key: change(right, documents) for key, change in changes.items()}}

    return answer


def _last_ignored(right: dict[str, Any], documents: Documents) -> torch.Tensor:
    labels = right["input_ids"].clone()
    labels[0, right["cu_seqlens"][1:].long() - 1] = IGNORED
    return labels


def _first_of_row_ignored(right: dict[str, Any], documents: Documents) -> torch.Tensor:
    labels = right["input_ids"].clone()
    labels[0, 0] = IGNORED
    return labels


def _shifted_labels(right: dict[str, Any], documents: Documents) -> torch.Tensor:
    labels = right["labels"].roll(-1, dims=1)
    labels[0, -1] = IGNORED
    return labels


def _from_one(right: dict[str, Any], documents: Documents) -> torch.Tensor:
    return right["position_ids"] + 1


QUESTION = Question(
    id="lab6.pack",
    points=3,
    checks=(
        Check("tokens and positions", _several, _judge_keys("input_ids", "position_ids"), _call),
        Check("labels", _several, _judge_keys("labels"), _call),
        Check("offsets and the longest", _several, _judge_keys("cu_seqlens", "max_seqlen"), _call),
        Check("one document, and documents of one token", _single, _judge_keys(*KEYS), _call),
        Check("every call returns new tensors", _single, judge_fresh, _call_twice),
    ),
    mistakes=(
        Mistake(
            "position ids not reset",
            "positions run through the whole row. They start at 0 in each document: that is how a "
            "model that gets nothing else knows where one begins.",
            _with(position_ids=lambda r, d: torch.arange(r["input_ids"].numel())[None]),
        ),
        Mistake(
            "positions from 1",
            "the first token of a document has position 0.",
            _with(position_ids=_from_one),
        ),
        Mistake(
            "boundary label kept",
            "the last token of one document is asked to predict the first of the next. That label "
            "is -100.",
            _with(labels=lambda r, d: r["input_ids"].clone()),
        ),
        Mistake(
            "only the row's first label ignored",
            "every document has a first token that nothing predicts, not only the first document.",
            _with(labels=_first_of_row_ignored),
        ),
        Mistake(
            "the last label of a document ignored",
            "labels[t] is what token t − 1 predicts: the label without a predictor is the first.",
            _with(labels=_last_ignored),
        ),
        Mistake(
            "labels already shifted",
            "the model shifts the labels itself; labels[t] belongs to input_ids[t].",
            _with(labels=_shifted_labels),
        ),
        Mistake(
            "0 as the ignored label",
            "0 is a token. The loss ignores -100.",
            _with(labels=lambda r, d: r["labels"].masked_fill(r["labels"] == IGNORED, 0)),
        ),
        Mistake(
            "cu_seqlens without the leading 0",
            "offsets begin with 0: one more entry than documents.",
            _with(cu_seqlens=lambda r, d: r["cu_seqlens"][1:]),
        ),
        Mistake(
            "cu_seqlens shifted by one",
            "cu_seqlens[d] is the index of document d's first token, cu_seqlens[-1] the total.",
            _with(cu_seqlens=lambda r, d: (r["cu_seqlens"] - 1).clamp(min=0)),
        ),
        Mistake(
            "lengths instead of offsets",
            "cu_seqlens are cumulative: 0, then the sum of the lengths so far.",
            _with(cu_seqlens=lambda r, d: torch.nn.functional.pad(r["cu_seqlens"].diff(), (1, 0))),
        ),
        Mistake(
            "cu_seqlens in int64",
            "kernels read int32 offsets.",
            _with(cu_seqlens=lambda r, d: r["cu_seqlens"].long()),
        ),
        Mistake(
            "max_seqlen of the whole row",
            "max_seqlen is the longest document. The row's length makes a kernel start programs "
            "that find nothing.",
            _with(max_seqlen=lambda r, d: r["input_ids"].numel()),
        ),
        Mistake(
            "max_seqlen of the padded batch",
            "documents × longest is what padding would have cost; nothing is padded here.",
            _with(max_seqlen=lambda r, d: len(d) * r["max_seqlen"]),
        ),
        Mistake(
            "no batch dimension",
            "the model wants (1, total): one row.",
            lambda documents: {
                k: v[0] if isinstance(v, torch.Tensor) and v.dim() == 2 else v
                for k, v in pack(documents).items()
            },
        ),
    ),
)

"""Lab 6, tasks 1 and 2: answers that are right on most inputs, or that change their input."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from right_answers.lab6 import mask_of_blocks, pack_in_a_loop

from flashcourse.grading import find_question, mark

SEEDS = range(20)


def named(verdict):
    return {name for finding in verdict.findings for name, _ in finding.mistakes}


def pack_with(**changes):
    """A right answer, with some values computed otherwise from it and the documents."""

    def answer(documents):
        right = pack_in_a_loop(documents)
        return {**right, **{key: change(right, documents) for key, change in changes.items()}}

    return answer


def labels_by_token(right, documents):
    """Ignores whatever token begins some document, wherever it stands."""
    ids = right["input_ids"]
    return torch.where(torch.isin(ids, torch.tensor([d[0] for d in documents])), -100, ids)


def offsets_by_search(right, documents):
    """Takes a document that comes twice for the first of the two."""
    firsts = right["cu_seqlens"][:-1]
    found = [int(firsts[documents.index(d)]) for d in documents]
    return torch.tensor([*found, right["input_ids"].numel()], dtype=torch.int32)


def pack_into_the_input(documents):
    right = pack_in_a_loop(documents)
    for document in documents:
        document[0] = -100
    return {**right, "labels": torch.tensor([[t for d in documents for t in d]])}


def pack_and_consume(documents):
    kept = []
    while documents:
        kept.append(documents.pop(0))
    return pack_in_a_loop(kept)


@cache
def _buffers(total):
    return torch.empty(1, total, dtype=torch.int64)


def pack_in_buffers(documents):
    """Writes every row of a length into the same memory."""
    right = pack_in_a_loop(documents)
    ids = _buffers(right["input_ids"].numel()).copy_(right["input_ids"])
    return {**right, "input_ids": ids}


@cache
def _mask_buffer(total):
    return torch.empty(total, total, dtype=torch.bool)


def mask_in_a_buffer(cu_seqlens):
    return _mask_buffer(int(cu_seqlens[-1])).copy_(mask_of_blocks(cu_seqlens))


def first_document_seen_by_all(cu_seqlens):
    mask = mask_of_blocks(cu_seqlens)
    first = cu_seqlens[cu_seqlens > 0][0]
    mask[first:, :first] = True
    return mask


def mask_by_bytes(cu_seqlens):
    """Numbers of documents in uint8: document 256 is taken for document 0."""
    numbers = torch.arange(len(cu_seqlens) - 1).to(torch.uint8)
    document = torch.repeat_interleave(numbers, cu_seqlens.diff().long())
    return (document[:, None] == document[None, :]).tril()


PACKS = {
    "0 taken for padding": (
        pack_with(
            labels=lambda right, _: right["labels"].masked_fill(right["input_ids"] == 0, -100)
        ),
        "is -100, expected 0",
    ),
    "ids through int16": (
        pack_with(input_ids=lambda right, _: right["input_ids"].short().long()),
        "input_ids[0, ",
    ),
    "ids through float16": (
        pack_with(input_ids=lambda right, _: right["input_ids"].half().long()),
        "input_ids[0, ",
    ),
    "labels by token": (pack_with(labels=labels_by_token), "labels[0, "),
    "offsets by search": (pack_with(cu_seqlens=offsets_by_search), "cu_seqlens["),
    "written into the input": (pack_into_the_input, "your answer wrote to its inputs: argument"),
    "the input consumed": (pack_and_consume, "your answer wrote to its inputs: argument number 1"),
    "rows in buffers": (pack_in_buffers, "both returned the same memory"),
    "max_seqlen as a float": (
        pack_with(max_seqlen=lambda right, _: float(right["max_seqlen"])),
        "max_seqlen must be an int, got float",
    ),
    "max_seqlen as a tensor": (
        pack_with(max_seqlen=lambda right, _: torch.tensor(right["max_seqlen"])),
        "max_seqlen must be an int, got Tensor",
    ),
    "cu_seqlens in float32": (
        pack_with(cu_seqlens=lambda right, _: right["cu_seqlens"].float()),
        "cu_seqlens has dtype float32, expected int32",
    ),
}


@pytest.mark.parametrize("name", PACKS)
def test_a_wrong_pack_is_told_and_not_misnamed(name):
    answer, message = PACKS[name]
    for seed in SEEDS:
        verdict = mark(find_question("lab6.pack"), answer, seed)
        assert verdict.status == "failed", f"seed {seed}: accepted"
        assert message in str(verdict)
        assert named(verdict) == set()


@pytest.mark.parametrize("answer", [first_document_seen_by_all, mask_in_a_buffer, mask_by_bytes])
def test_a_wrong_mask_is_rejected_and_not_misnamed(answer):
    for seed in SEEDS:
        verdict = mark(find_question("lab6.packed_mask"), answer, seed)
        assert verdict.status == "failed", f"seed {seed}: accepted"
        assert named(verdict) == set(), str(verdict)

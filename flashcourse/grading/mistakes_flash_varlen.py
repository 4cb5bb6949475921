"""The known mistakes of lab6.flash_varlen, written in PyTorch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from flashcourse.grading.mistakes_tiled_forward import MISTAKES as TILED_MISTAKES
from flashcourse.grading.mistakes_tiled_forward import ONE_MAXIMUM, tile_max, tiled_forward
from flashcourse.grading.question import Answer, Mistake
from flashcourse.grading.triton_work import (
    FLOAT16_ACCUMULATOR,
    from_first_entry,
    on_cpu,
    tiled_mistake,
)

TILES = (16, 32, 64, 128)  # the sides that a learner's tiles may have
Attend = Callable[..., torch.Tensor]


def by_document(
    attend: Attend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    offsets: Callable[[list[int]], list[int]] = list,
) -> torch.Tensor:
    """Attention of each document alone; ``attend`` gets (1, heads, length, head_dim)."""
    bounds = offsets(cu_seqlens.tolist())
    out = torch.zeros_like(q)
    q4, k4, v4 = (on_cpu(t).transpose(0, 1)[None] for t in (q, k, v))
    for first, last in itertools.pairwise(bounds):
        if last > first:
            parts = (t[:, :, first:last] for t in (q4, k4, v4))
            out[first:last] = attend(*parts)[0].transpose(0, 1).to(out.device, out.dtype)
    return out


def _attend(answer: Answer, block_q: int, block_k: int) -> Attend:
    """A tiled forward of lab 3 as causal attention without lse."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = answer(q, k, v, True, block_q, block_k)[0]
        return out

    return attend


def _adapt(answer: Answer, block_q: int, block_k: int) -> Answer:
    """A tiled forward of lab 3, on each document."""
    return partial(by_document, _attend(answer, block_q, block_k))


RIGHT = _adapt(tiled_forward, 128, 128)

# Who sees whom ----------------------------------------------------------------------------------


def _whole_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
) -> torch.Tensor:
    ends = torch.tensor([0, int(cu_seqlens[-1])])
    return RIGHT(q, k, v, ends, max_seqlen)


def _shifted(bounds: list[int]) -> list[int]:
    """Every boundary but the outer two lies one token too far."""
    last = bounds[-1]
    return [bounds[0], *(min(b + 1, last) for b in bounds[1:-1]), last]


def _masked(
    visible: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
) -> torch.Tensor:
    """Attention over the whole row with a mask made from documents and positions."""
    offsets = cu_seqlens.cpu().long()
    lengths = offsets.diff()
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = torch.arange(len(document)) - offsets[document]
    keep = visible(document, position)
    group = q.shape[1] // k.shape[1]
    q4, k4, v4 = (on_cpu(t).transpose(0, 1) for t in (q, k, v))
    k4, v4 = (t.repeat_interleave(group, dim=0) for t in (k4, v4))
    s = (q4 @ k4.mT * q.shape[-1] ** -0.5).masked_fill(~keep, float("-inf"))
    return (torch.softmax(s, -1) @ v4).transpose(0, 1).to(q.device, q.dtype)


def _by_position(document: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return position[None, :] <= position[:, None]


def _blocks_only(document: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return document[None, :] == document[:, None]


def _tile_lost(block: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The last tile of keys is hidden if it is full: seq % block is 0 then."""
    out, _ = tiled_forward(q, k, v, True)
    seq = q.shape[2]
    if seq % block == 0:
        keys = seq - block
        tail = tiled_forward(q[:, :, keys:], k[:, :, :keys], v[:, :, :keys])[0]
        out[:, :, keys:] = tail if keys else math.nan
    return out


def _filled(
    fill: float, block: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Hidden scores are a finite number, past the document's end in its last tile as well."""
    seq, group = q.shape[2], q.shape[1] // k.shape[1]
    k, v = (
        torch.nn.functional.pad(t, (0, 0, 0, -seq % block)).repeat_interleave(group, dim=1)
        for t in (k, v)
    )
    i, j = torch.arange(seq)[:, None], torch.arange(k.shape[2])
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(j > i, fill)
    s = s.masked_fill(j >= (i // block + 1) * block, -math.inf)  # tiles that are not visited
    return torch.softmax(s, -1) @ v


# What is read, and in which precision -----------------------------------------------------------


def _cut(
    limit: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
) -> torch.Tensor:
    """Only the first ``limit`` queries of each document are computed."""
    out = RIGHT(q, k, v, cu_seqlens, max_seqlen)
    for first, last in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        out[first + limit : last] = 0
    return out


def _in_order(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
) -> torch.Tensor:
    parts = (from_first_entry(t) for t in (q, k, v))
    return RIGHT(*parts, cu_seqlens, max_seqlen)


def _read_with(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """What a kernel reads with another tensor's strides; 0 where memory ends."""
    start = int(tensor.storage_offset())
    size = tensor.untyped_storage().nbytes() // tensor.element_size() - start
    last = sum((n - 1) * step for n, step in zip(tensor.shape, strides, strict=True))
    memory = tensor.as_strided((size,), (1,), start)
    memory = torch.nn.functional.pad(memory, (0, max(last + 1 - size, 0)))
    return memory.as_strided(tensor.shape, strides)


def _v_like_k(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
    out: torch.Tensor = RIGHT(q, k, _read_with(v, k.stride()), *rest)
    return out


def _all_like_q(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
    out: torch.Tensor = RIGHT(q, *(_read_with(t, q.stride()) for t in (k, v)), *rest)
    return out


def _accumulator(
    block: int, dtype: torch.dtype | None, q: torch.Tensor, *rest: Any
) -> torch.Tensor:
    """The running output in ``dtype``, or in that of q."""
    forward = partial(tiled_forward, accumulate=dtype or q.dtype)
    return by_document(_attend(forward, 128, block), q, *rest)


def _half_sum(block: int, q: torch.Tensor, *rest: Any) -> torch.Tensor:
    """For float16 inputs, l rounded to float16 in every tile of keys."""

    def rounded(factor: torch.Tensor, l: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return (factor * l + p.sum(dim=-1, keepdim=True)).half().float()

    steps: dict[str, Any] = {"new_sum": rounded} if q.dtype == torch.float16 else {}
    return by_document(_attend(partial(tiled_forward, **steps), 128, block), q, *rest)


def _rounded_scores(dtype: torch.dtype | None, q: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Scores rounded to ``dtype``, or to that of q."""
    kept = dtype or q.dtype
    forward = partial(tiled_forward, scaled=lambda s, d: (s * d**-0.5).to(kept).float())
    return by_document(_attend(forward, 128, 128), q, *rest)


def _starting_at(start: float, *, guarded: bool = False) -> Answer:
    """m starts at a number; ``guarded`` divides by 1 where the sum is 0."""
    options: dict[str, Any] = {} if guarded else {"finish": lambda o, l: o / l}
    return _adapt(partial(tiled_forward, start=start, **options), 128, 128)


def _one_maximum(*, padded: bool, **steps: Any) -> Answer:
    """All rows of a tile share it, those past the end too where it is padded."""
    return partial(tiled_forward, highest=partial(tile_max, padded=padded), **steps)


def _any_of(name: str, explanation: str, answers: Iterable[Answer]) -> Mistake:
    """One mistake with several tiles or numbers."""
    first, *others = answers
    return Mistake(name, explanation, first, tuple(others))


_OF_LAB_3 = {m.name: m for m in TILED_MISTAKES}
_FROM_LAB_3 = (
    "the accumulator is not rescaled",
    "the sum is not rescaled",
    "no max subtraction",
    "scale missing",
    "scaled twice",
    "the last keys are dropped",
    "causal off by one: a query does not see its own key",
    "KV heads tiled instead of repeated",
    "never divided by the sum",
)

MISTAKES = (
    *(tiled_mistake(m, _adapt) for m in TILED_MISTAKES if m.name in _FROM_LAB_3),
    Mistake(
        "neighbours visible",
        "the whole row was one causal sequence, so every document reads those before it. A "
        "program's keys begin at its document's first token.",
        _whole_row,
    ),
    Mistake(
        "mask by position only",
        "positions were compared and documents were not: the beginnings of all documents are seen.",
        partial(_masked, _by_position),
    ),
    Mistake(
        "not causal inside a document",
        "tokens see their own future.",
        partial(_masked, _blocks_only),
    ),
    Mistake(
        "cu_seqlens shifted by one",
        "document d begins at cu_seqlens[d], which is its own first token.",
        partial(by_document, _attend(tiled_forward, 128, 128), offsets=_shifted),
    ),
    _any_of(
        "only the first tile of each document",
        "the grid must have enough programs for the longest document: "
        "cdiv(max_seqlen, BLOCK) of them.",
        (partial(_cut, limit) for limit in TILES),
    ),
    _any_of(
        "a full last tile is dropped",
        "seq % BLOCK is 0 for a length that is a multiple of the tile, and nothing is left of the "
        "last tile. Compare the keys with the length itself.",
        (partial(by_document, partial(_tile_lost, tile)) for tile in TILES),
    ),
    Mistake(
        "m starts at 0",
        "where all scores are far below 0, every exp(s − 0) underflows. The maximum of nothing is "
        "−inf.",
        _starting_at(0.0),
        (_starting_at(0.0, guarded=True),),
    ),
    _any_of(
        ONE_MAXIMUM,
        _OF_LAB_3[ONE_MAXIMUM].explanation,
        (
            _adapt(_one_maximum(padded=padded, **finish), tile, tile)
            for tile in (32, 16, 64, 128)
            for padded in (True, False)
            for finish in ({"finish": lambda o, l: o / l}, {})
        ),
    ),
    _any_of(
        "m starts at a number that scores can lie below",
        "where all scores of a row are far below it, every exp(s − m) underflows, and the row is "
        "0/0. The maximum of nothing is −inf.",
        (
            _starting_at(start, guarded=guarded)
            for start, guarded in itertools.product((-50.0, -1e3, -1e4), (False, True))
        ),
    ),
    _any_of(
        "hidden scores filled with a finite number",
        "real scores can be lower, and then the hidden keys win. Fill with −inf.",
        (
            partial(by_document, partial(_filled, fill, tile))
            for fill, tile in itertools.product((-1e4, -1e3, -100.0, 0.0), TILES)
        ),
    ),
    _any_of(
        "float16 accumulator",
        FLOAT16_ACCUMULATOR,
        (
            partial(_accumulator, tile, dtype)
            for dtype, tile in itertools.product((None, torch.float16), TILES)
        ),
    ),
    _any_of(
        "the sum in float16",
        "l was kept in float16, or in the inputs' dtype: small weights are lost where the sum is "
        "large. m, l and o live in float32.",
        (partial(_half_sum, tile) for tile in reversed(TILES)),
    ),
    _any_of(
        "documents of a fixed length",
        "only so many tokens of a document had an output. The grid needs "
        "cdiv(max_seqlen, BLOCK) programs, however long a document is.",
        (partial(_cut, limit) for limit in (1024, 512, 256)),
    ),
    Mistake(
        "scores rounded to float16",
        "a score of 1,500 keeps no fraction in float16, and its weight is off by up to e^0.5. The "
        "product of float16 tiles is float32; leave it so until P.",
        partial(_rounded_scores, None),
        (partial(_rounded_scores, torch.float16),),
    ),
    Mistake(
        "v read with k's strides",
        "k and v may be laid out differently: v needs its own stride().",
        _v_like_k,
    ),
    Mistake(
        "k and v read with q's strides",
        "q, k and v may be laid out differently: each needs its own stride().",
        _all_like_q,
    ),
    Mistake(
        "strides ignored",
        "the inputs were read as if they were contiguous. Pass stride() of every input to the "
        "kernel.",
        _in_order,
    ),
    Mistake(
        "the right numbers from PyTorch",
        "a loop over the documents in PyTorch gives the right numbers. The question asks for "
        "your kernel, launched once.",
        RIGHT,
    ),
)

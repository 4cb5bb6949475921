"""The known mistakes of lab7.paged_decode in PyTorch: a right decode with one place changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flashcourse.grading.mistakes_tiled_forward import MISTAKES as TILED_MISTAKES
from flashcourse.grading.mistakes_tiled_forward import ONE_MAXIMUM, tile_max, tiled_forward
from flashcourse.grading.question import Answer, Mistake
from flashcourse.grading.triton_work import FLOAT16_ACCUMULATOR, from_first_entry, on_cpu

PAGE, WHOLE = 0, -1  # tiles as wide as a page, or as the sequence
TILES = (32, 16, 64, 128, PAGE)  # what a learner may have chosen
Step = Callable[..., Any]

# Attention of one sequence ----------------------------------------------------------------------


def _attend(answer: Answer, tile: int) -> Step:
    """A tiled forward of lab 3 as decode: (1, heads, 1, head_dim) from keys and values."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_size: int) -> torch.Tensor:
        width = {PAGE: page_size, WHOLE: k.shape[2]}.get(tile, tile)
        out: torch.Tensor = answer(q, k, v, False, 1, width)[0]
        return out

    return attend


def _read(pages: torch.Tensor, entries: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Slots of pages as (1, heads_kv, keys, head_dim), float32; NaN for a page that is none."""
    exists = (entries >= 0) & (entries < pages.shape[0])
    rows = on_cpu(pages[torch.where(exists, entries, 0), slots])  # (keys, heads_kv, head_dim)
    rows = torch.where(exists[:, None, None], rows, torch.nan)
    return rows.transpose(0, 1)[None]


_EXACT = _attend(tiled_forward, WHOLE)


def _decode(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    attend: Step = _EXACT,
    row: Step = lambda b, batch: b,
    length: Step = lambda lengths, b: lengths[b],
    count: Step = lambda length, page_size, columns: length,
    entry: Step = lambda entries, columns: entries,
    slot: Step = lambda keys, page_size: keys % page_size,
    values: Step = lambda k_pages, v_pages: v_pages,
    unmasked: Step | None = None,
    empty: float = 0.0,
) -> torch.Tensor:
    """Each sequence's keys and values copied behind each other, then attended to.

    ``unmasked`` says how many slots have their values read although their weight is 0.
    """
    page_size, columns = k_pages.shape[1], block_table.shape[1]
    table, lengths = block_table.cpu().long(), cache_seqlens.tolist()
    table = torch.nn.functional.pad(table, (0, 1), value=-1)  # read past its end: no page
    outs = []

    def places(b: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys = torch.arange(number)
        column = keys // page_size
        entries = table[row(b, len(lengths)), column.clamp(max=columns)]
        return entry(entries, column), slot(keys, page_size)

    for b in range(len(lengths)):
        n = max(length(lengths, b), 0)
        number = count(n, page_size, columns)
        out = torch.full(q.shape[1:], 0.0 if n else empty)[None]
        if number:
            at = places(b, number)
            k, v = _read(k_pages, *at), _read(values(k_pages, v_pages), *at)
            out = attend(on_cpu(q[b, None]), k, v, page_size)
        if unmasked is not None:
            spoilt = _read(v_pages, *places(b, unmasked(n, page_size)))
            group = q.shape[1] // k_pages.shape[2]
            out = out + (0 * spoilt).sum(dim=2, keepdim=True).repeat_interleave(group, dim=1)
        outs.append(out)
    return torch.cat(outs).to(q.device, q.dtype)


def _in_order(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> Any:
    """Reads the memory of q and the pages from the first entry on, whatever the strides say."""
    return _decode(*(from_first_entry(t) for t in (q, k, v)), *rest)


def _changed(name: str, explanation: str, **step: Any) -> Mistake:
    return Mistake(name, explanation, partial(_decode, **step))


def _of_lab3(mistake: Mistake) -> Mistake:
    first, *others = (partial(_decode, attend=_attend(mistake.answer, t)) for t in TILES)
    return Mistake(mistake.name, mistake.explanation, first, tuple(others))


def _half_accumulator(everywhere: bool, tile: int) -> Answer:
    def answer(q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        low = everywhere or q.dtype == torch.float16
        tiled = partial(tiled_forward, accumulate=torch.float16 if low else torch.float32)
        return _decode(q, *rest, attend=_attend(tiled, tile))

    return answer


def _half_accumulators() -> tuple[Answer, ...]:
    return tuple(_half_accumulator(low, tile) for low in (False, True) for tile in TILES)


def _half_sums(tile: int) -> Answer:
    """For float16 inputs, l rounded to float16 in every tile of keys."""

    def rounded(factor: torch.Tensor, l: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return (factor * l + p.sum(dim=-1, keepdim=True)).half().float()

    def answer(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        steps: dict[str, Any] = {"new_sum": rounded} if q.dtype == torch.float16 else {}
        return _decode(q, *rest, attend=_attend(partial(tiled_forward, **steps), tile))

    return answer


def _in_32_bits(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
) -> torch.Tensor:
    """A page's number times its stride has 32 bits."""
    exists = (block_table >= 0) & (block_table < len(k_pages))
    entries = torch.where(exists, block_table, 0).unique()
    pools = []
    for pages in (k_pages, v_pages):
        offsets = [_wrapped(n * pages.stride(0)) for n in entries.tolist()]
        start = pages.storage_offset()
        read = [
            pages.as_strided(pages.shape[1:], pages.stride()[1:], start + offset)
            for offset in offsets
        ]
        pools.append(torch.stack(read))
    table = torch.searchsorted(entries, torch.where(exists, block_table, 0).contiguous())
    k, v = pools
    return _decode(q, k, v, torch.where(exists, table, -1), cache_seqlens)


def _wrapped(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


def _half_scores(q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    def rounded(s: torch.Tensor, head_dim: int) -> torch.Tensor:
        return (s * head_dim**-0.5).to(q.dtype).float()

    return _decode(q, *rest, attend=_attend(partial(tiled_forward, scaled=rounded), WHOLE))


def _one_maximum(tile: int, padded: bool) -> Answer:
    """The heads that share keys are the rows of a tile, and have one maximum."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_size: int) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        rows = max(16, 1 << (group - 1).bit_length())
        q_i = q.view(1, k.shape[1], group, q.shape[3])
        highest = partial(tile_max, padded=padded)
        out, _ = tiled_forward(q_i, k, v, False, rows, tile or page_size, highest=highest)
        return out.view(q.shape)

    return partial(_decode, attend=attend)


RIGHT: Answer = _decode
_FROM_LAB_3 = (
    "the accumulator is not rescaled",
    "the sum is not rescaled",
    "m starts at 0",
    "scale missing",
    "scaled twice",
    "KV heads tiled instead of repeated",
    "divided by the sum in every tile",
    "never divided by the sum",
    "the mean of each tile's own softmax",
    "an epsilon in the denominator",
)
_FIRST, *_OTHERS = _half_accumulators()

MISTAKES = (
    _changed(
        "the last page is dropped",
        "length // page_size counts the full pages. The newest tokens lie in the one after them: "
        "round up.",
        count=lambda n, page_size, columns: n // page_size * page_size,
    ),
    _changed(
        "only the first page",
        "a sequence goes on in the page that its next table entry names.",
        count=lambda n, page_size, columns: min(n, page_size),
    ),
    _changed(
        "garbage slots scored",
        "the slots of the last page behind the sequence's end took part. Where a key's number is "
        "not below the length, its score is −inf.",
        count=lambda n, page_size, columns: -(-n // page_size) * page_size,
    ),
    _changed(
        "every column of the table is walked",
        "the table is as wide as the longest sequence needs. Entries past a sequence's last page "
        "are left over from others: loop to its own length.",
        count=lambda n, page_size, columns: columns * page_size,
    ),
    _changed(
        "every sequence as long as the longest",
        "cache_seqlens has a length for each sequence.",
        length=lambda lengths, b: max(lengths),
    ),
    _changed(
        "every sequence as long as the first",
        "cache_seqlens has a length for each sequence: load it at the program's own index.",
        length=lambda lengths, b: lengths[0],
    ),
    _changed(
        "the table is read past its end",
        "a sequence that fills its last page exactly has no page after it: length // page_size + 1 "
        "is one too many there. What the entry names may be no page, and 0 · NaN is NaN.",
        unmasked=lambda n, page_size: (n // page_size + 1) * page_size,
    ),
    _changed(
        "values of unused slots are read",
        "their weight is 0, and 0 · NaN is NaN. Mask the load of the values too, with other=0.",
        unmasked=lambda n, page_size: -(-n // page_size) * page_size,
    ),
    _changed(
        "the newest token is not seen",
        "its key and value are in the cache already: cache_seqlens counts it.",
        count=lambda n, page_size, columns: max(n - 1, 0),
    ),
    _changed(
        "one slot too many",
        "keys 0 to length − 1 exist: key < length, not key <= length.",
        count=lambda n, page_size, columns: n + 1,
    ),
    _changed(
        "the table is not used",
        "page j of a sequence lies where block_table[sequence, j] says, not at page j.",
        entry=lambda entries, columns: columns,
    ),
    _changed(
        "the first row of the table for all",
        "each sequence has its own row: move by the table's row stride.",
        row=lambda b, batch: 0,
    ),
    _changed(
        "the neighbour's row of the table",
        "row b of the table belongs to sequence b.",
        row=lambda b, batch: (b + 1) % batch,
    ),
    _changed(
        "the slot in the page is missing",
        "every key read slot 0 of its page. Key j lies in slot j % page_size.",
        slot=lambda keys, page_size: keys * 0,
    ),
    _changed(
        "slots counted through the pages",
        "in its page, key j lies in slot j % page_size, not j.",
        entry=lambda entries, columns: entries + columns,
    ),
    _changed(
        "keys in place of values",
        "the output averages v_pages; only the scores come from k_pages.",
        values=lambda k_pages, v_pages: k_pages,
    ),
    _changed(
        "an empty sequence gives NaN",
        "0 / 0. Where nothing was seen, divide by 1: the output is 0.",
        empty=torch.nan,
    ),
    *(_of_lab3(m) for m in TILED_MISTAKES if m.name in _FROM_LAB_3),
    _of_lab3(
        Mistake(
            "no max subtraction",
            "exp overflows above 88.7 in float32 and underflows far below.",
            partial(
                tiled_forward,
                pivot=torch.zeros_like,
                new_sum=lambda factor, l, p: l + p.sum(dim=-1, keepdim=True),
                new_out=lambda factor, o, pv, l: o + pv,
            ),
        )
    ),
    _of_lab3(
        Mistake(
            "scale from the padded head_dim",
            "the tile is as wide as a power of two, the head is not: head_dim ** -0.5.",
            partial(
                tiled_forward, scaled=lambda s, d: s * max(16, 1 << (d - 1).bit_length()) ** -0.5
            ),
        )
    ),
    Mistake(
        "strides ignored",
        "the inputs were read as if they were contiguous. Pass stride() of every input to the "
        "kernel; K and V may have different ones.",
        _in_order,
    ),
    Mistake(
        ONE_MAXIMUM,
        "each head has a maximum of its own: tl.max(s, 1). Where another head's is far higher, "
        "every exp(s − m) underflows; rows past the group, whose scores are 0, count as others.",
        _one_maximum(TILES[0], True),
        tuple(_one_maximum(t, p) for p in (False, True) for t in TILES),
    ),
    Mistake(
        "page offsets of 32 bits",
        "a page's number times its stride passed 2³¹ and became negative. Make the number int64 as "
        "soon as it is loaded: .to(tl.int64).",
        _in_32_bits,
    ),
    Mistake(
        "the sum in float16",
        "l was kept in float16, or in the inputs' dtype: small weights are lost where the sum is "
        "large. m, l and o live in float32.",
        _half_sums(TILES[0]),
        tuple(_half_sums(tile) for tile in TILES[1:]),
    ),
    Mistake(
        "scores rounded to float16",
        "the product was stored in the inputs' dtype: near 900 the steps of float16 are 0.5, so a "
        "weight is wrong by up to 28 %. Keep what tl.dot returns, in float32.",
        _half_scores,
    ),
    Mistake(
        "float16 accumulator",
        FLOAT16_ACCUMULATOR,
        _FIRST,
        tuple(_OTHERS),
    ),
)

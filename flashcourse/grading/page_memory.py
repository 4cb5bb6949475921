"""Where the pages of lab 7 lie: between guards of NaN, or far apart in a large pool."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import torch

from flashcourse.grading.draw import strided
from flashcourse.grading.question import Answer

BEYOND = 160  # entries and slots past the end that can be read, or as many as there are tokens
NUM_PAGES = 40_000  # more than 16 bits can number
REACH = 2**31  # elements: from here on an offset of 32 bits is negative
SPARE = 2**20  # elements, for what lies around the farthest page
_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which the module names from Python 3.13 on


def call_in_a_large_pool(
    answer: Answer,
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
) -> Any:
    """Call the answer with the same pages, far apart, as some of a large pool.

    The last page begins 2³¹ elements behind the first. An offset that has overflowed points as
    far before the pool, where there is memory too: it gives wrong numbers and does not end the
    process. Where there is no room for that the pages lie close together.
    """
    memory = _memory(2 * REACH + SPARE, q)
    last = k_pages.shape[0] - 1
    apart = (NUM_PAGES - 1) // last  # pages from one that is used to the next
    step = REACH // (apart * last) + 1
    if memory is None:
        step = k_pages[0].numel()
        memory = q.new_zeros(NUM_PAGES * step + 2 * SPARE)
    pools = []
    start = memory.numel() - NUM_PAGES * step - SPARE // 2
    for held in (k_pages, v_pages):
        size, strides = held.shape[1:], torch.empty(held.shape[1:], device="meta").stride()
        pool = memory.as_strided((apart * last + 1, *size), (step, *strides), start)
        pool[::apart] = held
        pools.append(pool)
        start += held[0].numel()
    return answer(q, *pools, block_table * apart, cache_seqlens)


def _memory(count: int, like: torch.Tensor) -> torch.Tensor | None:
    """Untouched memory for so many numbers; None where there is no room."""
    size = count * like.element_size()
    if like.is_cuda:
        if torch.cuda.mem_get_info(like.device)[0] < 2 * size:
            return None
        try:
            return torch.empty(count, dtype=like.dtype, device=like.device)
        except torch.cuda.OutOfMemoryError:  # a share of the memory, see SHARE in observe.py
            return None
    if not sys.platform.startswith("linux"):
        return None
    try:  # shared and not reserved: a limit on a process's data does not count it
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE
        return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=like.dtype)
    except OSError:
        return None


def call_between_guards(
    answer: Answer,
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
) -> torch.Tensor:
    """Call the answer with NaN in memory before and after the pages, and −1 beside the table.

    So a page −1, the page after the last and the entries after a row's last can be read, also by
    somebody who takes pages for smaller or larger than they are. They are seen in the output,
    where elsewhere they would end the process.
    """
    beyond = max(BEYOND, int(cache_seqlens.max()))
    pages = (_between_nan(held, beyond) for held in (k_pages, v_pages))
    table = torch.nn.functional.pad(block_table, (0, beyond), value=-1)  # row after row in memory
    if block_table.stride(0) < block_table.stride(1):
        table = strided(table, (1, 0))
    out: torch.Tensor = answer(q, *pages, table[:, :-beyond], cache_seqlens)
    return out


def _between_nan(pages: torch.Tensor, beyond: int) -> torch.Tensor:
    shape, stride = pages.shape, pages.stride()
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    guard = max(stride[0], pages[0].numel()) + beyond * max(stride)
    memory = pages.new_full((extent + 2 * guard,), torch.nan)
    return memory.as_strided(shape, stride, guard).copy_(pages)

"""A KV cache in pages: a sequence has as many as its tokens fill, wherever they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flashcourse.attention import naive_paged_attention, paged_attention
from flashcourse.serving.block_allocator import BlockAllocator
from flashcourse.serving.kv_cache import KVCache, KVShape, Region, Usage


@dataclass(frozen=True)
class _Where:
    """The block table ``(batch, columns)`` and the lengths ``(batch,)``, int32 on the device."""

    table: torch.Tensor
    lengths: torch.Tensor


class PagedKVCache(KVCache):
    """Memory in pages, dealt out by a :class:`~flashcourse.serving.BlockAllocator`.

    Args:
        shape: what is kept for a token.
        tokens: memory, in tokens; it is rounded down to whole pages.
        page_size: slots a page, 1 to 256.
        share_prefixes: sequences that begin with the same full pages share them.
        device: of the memory.

    Raises:
        ValueError: there is not memory for one page, or the page size is not allowed.
    """

    grows = True

    def __init__(
        self,
        shape: KVShape,
        *,
        tokens: int,
        page_size: int = 16,
        share_prefixes: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 1 <= page_size <= 256:
            raise ValueError(f"page_size must be 1 to 256, got {page_size}")
        if tokens < page_size:
            raise ValueError(f"memory for {tokens} tokens holds no page of {page_size}")
        pages = tokens // page_size
        super().__init__(shape, pages * page_size, pages * page_size, device)
        self.page_size = page_size
        self.allocator = BlockAllocator(pages, page_size, share_prefixes=share_prefixes)

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``(k_pages, v_pages)`` of a layer, ``(num_pages, page_size, heads_kv, head_dim)``."""
        size = (self.allocator.num_pages, self.page_size)
        return self.k[layer].unflatten(0, size), self.v[layer].unflatten(0, size)

    def begin(self, tokens: Sequence[int]) -> int:
        """A sequence that holds the pages found for the beginning of its tokens."""
        return self.allocator.begin(tokens)

    def extend(self, sequence: int, count: int) -> None:
        """Pages for more tokens; a shared last page is copied first.

        Raises:
            OutOfBlocks: there are too few pages.
        """
        for source, target in self.allocator.append(sequence, count):
            for held in (self.k, self.v):
                in_pages = held.unflatten(1, (self.allocator.num_pages, self.page_size))
                in_pages[:, target] = in_pages[:, source]  # all layers at once

    def publish(self, sequence: int, tokens: Sequence[int]) -> None:
        """Full pages of these tokens can be found from now on."""
        self.allocator.publish(sequence, tokens)

    def fork(self, sequence: int) -> int:
        """Nothing is copied until one of the two writes into a page that both hold."""
        return self.allocator.fork(sequence)

    def free(self, sequence: int) -> None:
        """Give the pages back."""
        self.allocator.free(sequence)

    def length(self, sequence: int) -> int:
        """Tokens in the sequence."""
        return self.allocator.length(sequence)

    def slots(self, sequence: int, start: int, stop: int) -> np.ndarray:
        """Through the block table."""
        table = np.asarray(self.allocator.block_table(sequence), dtype=np.int64)
        tokens = np.arange(start, stop)
        return table[tokens // self.page_size] * self.page_size + tokens % self.page_size

    def order(self, sequence: int) -> int:
        """Any order is as good: pages lie anywhere."""
        return 0

    def locate(self, sequences: Sequence[int], batch: int) -> _Where:
        """Block table and lengths, in one transfer."""
        tables = [self.allocator.block_table(s) for s in sequences]
        # A power of two, so that few widths occur and rows stay aligned: each new layout is
        # another plan of the kernel's launch.
        columns = 4
        while columns < max(map(len, tables)):
            columns *= 2
        start = -(-batch // 4) * 4
        packed = np.zeros(start + batch * columns, dtype=np.int32)
        packed[: len(sequences)] = [self.allocator.length(s) for s in sequences]
        rows = packed[start:].reshape(batch, columns)
        for row, table in zip(rows, tables, strict=False):
            row[: len(table)] = table
        on_device = torch.from_numpy(packed).to(self.device)
        return _Where(on_device[start:].view(batch, columns), on_device[:batch])

    def attend(
        self, layer: int, q: torch.Tensor, where: _Where, *, attention: str, scale: float | None
    ) -> torch.Tensor:
        """The paged kernel."""
        attend = paged_attention if attention == "flashcourse" else naive_paged_attention
        k, v = self.pages(layer)
        result: Any = attend(q, k, v, where.table, where.lengths, scale=scale)
        return result

    def usage(self) -> Usage:
        """Pages that are held are reserved; kept ones are not: whoever needs them gets them."""
        held = self.allocator.num_pages - self.allocator.num_free
        kept = self.allocator.num_kept
        size = self.page_size
        return Usage(self.allocator.used, held * size, kept * size, self.capacity)

    def regions(self) -> list[Region]:
        """Every page that is held, or kept for a prefix."""
        holders: dict[int, list[int]] = {page: [] for page in self.allocator.kept_pages}
        used = dict.fromkeys(holders, self.page_size)
        for sequence in self.allocator.sequences:
            length = self.allocator.length(sequence)
            for number, page in enumerate(self.allocator.block_table(sequence)):
                holders.setdefault(page, []).append(sequence)
                used[page] = min(self.page_size, length - number * self.page_size)
        return [
            Region(page * self.page_size, self.page_size, used[page], tuple(holders[page]))
            for page in sorted(holders)
        ]

"""A KV cache as it was before pages: the longest possible sequence is reserved for each."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flashcourse.attention import flash_decode, naive_decode
from flashcourse.serving.kv_cache import CacheFull, KVCache, KVShape, Region, Usage, round_up

COLUMNS = 256  # the cache is cut to a multiple of this, so that few shapes occur


@dataclass(frozen=True)
class _Where:
    """Rows of the memory, how much of them, the length of each; where sequences are no neighbours,
    also each one's row."""

    rows: slice
    longest: int
    lengths: torch.Tensor
    index: torch.Tensor | None


class ContiguousKVCache(KVCache):
    """One row of ``longest`` slots for each sequence, whatever it will use of them.

    Args:
        shape: what is kept for a token.
        tokens: memory, in tokens; it is rounded down to whole rows.
        longest: slots of a row.
        device: of the memory.

    Raises:
        ValueError: there is not memory for one row.
    """

    def __init__(
        self, shape: KVShape, *, tokens: int, longest: int, device: torch.device | str = "cpu"
    ) -> None:
        if longest < 1 or tokens < longest:
            raise ValueError(
                f"memory for {tokens} tokens holds no row of {longest}: give more, or shorter rows"
            )
        self.num_rows = tokens // longest
        super().__init__(shape, self.num_rows * longest, longest, device)
        self._free = list(range(self.num_rows))  # a heap: the lowest row first
        self._length: dict[int, int] = {}
        self._row: dict[int, int] = {}
        self._next = 0

    def begin(self, tokens: Sequence[int]) -> int:
        """A row; nothing is ever found in it."""
        if not self._free:
            raise CacheFull(f"all {self.num_rows} rows of {self.longest} slots are reserved")
        sequence = self._next
        self._next += 1
        self._row[sequence] = heapq.heappop(self._free)
        self._length[sequence] = 0
        return sequence

    def extend(self, sequence: int, count: int) -> None:
        """Use more of the row.

        Raises:
            CacheFull: the row ends.
        """
        length = self._length[sequence] + count
        if length > self.longest:
            raise CacheFull(f"{length} tokens do not fit into a row of {self.longest}")
        self._length[sequence] = length

    def publish(self, sequence: int, tokens: Sequence[int]) -> None:
        """Nothing to do: rows are not shared."""

    def fork(self, sequence: int) -> int:
        """A second row, with a copy of the first one's content."""
        length = self._length[sequence]
        copy = self.begin(())
        self._length[copy] = length
        source, target = (self._row[s] * self.longest for s in (sequence, copy))
        for held in (self.k, self.v):
            held[:, target : target + length] = held[:, source : source + length]
        return copy

    def free(self, sequence: int) -> None:
        """Give the row back."""
        heapq.heappush(self._free, self._row.pop(sequence))
        del self._length[sequence]

    def length(self, sequence: int) -> int:
        """Tokens in the row."""
        return self._length[sequence]

    def slots(self, sequence: int, start: int, stop: int) -> np.ndarray:
        """Side by side."""
        return self._row[sequence] * self.longest + np.arange(start, stop)

    def order(self, sequence: int) -> int:
        """By rows: neighbours can be read as one view of the memory."""
        return self._row[sequence]

    def locate(self, sequences: Sequence[int], batch: int) -> _Where:
        """The rows from the first to the last of the sequences."""
        rows = [self._row[s] for s in sequences]
        lengths = [self._length[s] for s in sequences]
        first, last = min(rows), max(rows) + 1
        side_by_side = rows == list(range(first, last)) and first + batch <= self.num_rows
        if side_by_side:
            last, index, values = first + batch, None, lengths + [0] * (batch - len(rows))
        else:
            index = torch.tensor([row - first for row in rows], device=self.device)
            values = [0] * (last - first)
            for row, length in zip(rows, lengths, strict=True):
                values[row - first] = length
        device_lengths = torch.tensor(values, dtype=torch.int32).to(self.device)
        longest = min(round_up(max(lengths), COLUMNS), self.longest)
        return _Where(slice(first, last), longest, device_lengths, index)

    def attend(
        self, layer: int, q: torch.Tensor, where: _Where, *, attention: str, scale: float | None
    ) -> torch.Tensor:
        """Decode over a view of the memory. Sequences that are no neighbours are put to their
        rows, and the rows between them have no length."""
        decode = flash_decode if attention == "flashcourse" else naive_decode
        k, v = (
            held[layer].unflatten(0, (self.num_rows, self.longest)).transpose(1, 2)
            for held in (self.k, self.v)
        )  # (rows, heads_kv, longest, head_dim)
        k, v = (held[where.rows, :, : where.longest] for held in (k, v))
        if where.index is None:
            return _tensor(decode(q, k, v, where.lengths, scale=scale))
        spread = q.new_zeros(k.shape[0], *q.shape[1:])
        spread.index_copy_(0, where.index, q[: len(where.index)])
        out = torch.zeros_like(q)
        found = _tensor(decode(spread, k, v, where.lengths, scale=scale))
        out[: len(where.index)] = found.index_select(0, where.index)
        return out

    def usage(self) -> Usage:
        """Every row that is given away is reserved whole."""
        used = sum(self._length.values())
        return Usage(used, len(self._row) * self.longest, 0, self.capacity)

    def regions(self) -> list[Region]:
        """The rows that are reserved."""
        rows = sorted((row, sequence) for sequence, row in self._row.items())
        return [
            Region(row * self.longest, self.longest, self._length[sequence], (sequence,))
            for row, sequence in rows
        ]


def _tensor(result: Any) -> torch.Tensor:
    """What a decode function returns without its lse."""
    return result

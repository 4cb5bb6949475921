"""Contiguous caches with another attention than the course's, to compare a service by.

They hold, reserve and write like :class:`~flashcourse.serving.ContiguousKVCache`; only what reads
the memory differs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from flashcourse.serving.contiguous_cache import ContiguousKVCache


class SdpaRows(ContiguousKVCache):
    """Read by PyTorch's SDPA with a mask over the longest row, as padded batches are.

    The query heads of a group are rows of one product, so that no key is repeated for them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.k.zero_()  # masked slots are multiplied by 0, which NaN would survive
        self.v.zero_()
        self._masked: tuple[Any, int, torch.Tensor] | None = None

    def attend(
        self, layer: int, q: torch.Tensor, where: Any, *, attention: str, scale: float | None
    ) -> torch.Tensor:
        """SDPA, whatever ``attention`` says."""
        k, v = (
            held[layer].unflatten(0, (self.num_rows, self.longest)).transpose(1, 2)
            for held in (self.k, self.v)
        )
        k, v = (held[where.rows, :, : where.longest] for held in (k, v))
        rows, seq_q, count = q, q.shape[2], q.shape[0]
        if where.index is not None:
            count = len(where.index)
            rows = q.new_zeros(k.shape[0], *q.shape[1:])
            rows.index_copy_(0, where.index, q[:count])
        grouped = rows.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
        # (rows, heads_kv, group · seq_q, head_dim), the queries of a head side by side
        mask = self._mask(where, seq_q, k.shape[2], grouped.shape[2] // seq_q)
        found = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
        found = found.unflatten(2, (-1, seq_q)).flatten(1, 2)
        if where.index is None:
            return found
        out = torch.zeros_like(q)
        out[:count] = found.index_select(0, where.index)
        return out

    def _mask(self, where: Any, seq_q: int, slots: int, group: int) -> torch.Tensor:
        """True where a query sees a slot, ``(rows, 1, group · seq_q, slots)``; once a step."""
        if self._masked is None or self._masked[0] is not where or self._masked[1] != seq_q:
            queries = torch.arange(seq_q, device=self.device)
            last = where.lengths[:, None] - seq_q + queries  # (rows, seq_q)
            seen = torch.arange(slots, device=self.device) <= last[..., None]
            self._masked = (where, seq_q, seen.repeat(1, group, 1)[:, None])
        return self._masked[2]


class NoAttentionRows(ContiguousKVCache):
    """Nothing is read: the queries come back. The tokens are meaningless, the rest of the work is
    done. What this takes is what no attention kernel can save."""

    def attend(
        self, layer: int, q: torch.Tensor, where: Any, *, attention: str, scale: float | None
    ) -> torch.Tensor:
        """``q``."""
        return q

"""Where the documents of a batch begin and end, found from what Transformers passes to attention.

Transformers describes a batch in three ways: a mask of which tokens exist, ``position_ids`` that
start again at each document, and ``cu_seq_lens``. The varlen kernel wants the last. This module
turns the first two into it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Documents:
    """The documents of a batch whose rows lie flat behind each other.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32 offsets for the varlen kernel.
        order_q, order_k: int64 indices of the flat rows ``(batch · seq)`` in the order in which the
            kernel reads them, padding left out or moved behind the last offset; None: as they lie.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    order_q: torch.Tensor | None = None
    order_k: torch.Tensor | None = None


class PackedAfterCache(ValueError):
    """New tokens hold several documents, and there are cached keys before them."""

    def __init__(self) -> None:
        super().__init__(
            "position_ids start again inside the new tokens, but the cache already holds keys, so "
            "it is not clear which document continues. Give one document a row, or pass "
            "cu_seq_lens_q and cu_seq_lens_k, or start with an empty cache."
        )


def find_documents(
    batch: int,
    seq_q: int,
    seq_k: int,
    exists: tuple[torch.Tensor, torch.Tensor] | None,
    position_ids: torch.Tensor | None,
    *,
    may_read: bool = True,
) -> Documents | None:
    """The documents of a batch; None if each row is one document without padding.

    Without a mask a document begins where ``position_ids`` do not go up by one: the rule of
    Transformers. With one, holes make positions jump, so it begins where they do not rise.

    Args:
        batch, seq_q, seq_k: sizes of the queries and keys; the queries are the last of the keys.
        exists: bool ``(batch, seq_q)`` and ``(batch, seq_k)``, which queries and keys are tokens;
            None: all.
        position_ids: ``(batch or 1, seq_q)`` or None.
        may_read: False while a graph is traced or captured: then nothing depends on values, the
            number of documents is taken to be as large as it can be, and with cached keys before
            the queries each row is taken to be one document.

    Raises:
        PackedAfterCache: documents begin inside the queries, and there are keys before them.
    """
    if exists is None:
        return _all_exist(batch, seq_q, seq_k, position_ids, may_read)
    return _some_exist(batch, seq_q, seq_k, *exists, position_ids, may_read)


def _all_exist(
    batch: int, seq_q: int, seq_k: int, position_ids: torch.Tensor | None, may_read: bool
) -> Documents | None:
    if position_ids is None or seq_q == 1 or (not may_read and seq_q != seq_k):
        return None
    begins = torch.ones(batch, seq_q, dtype=torch.bool, device=position_ids.device)
    begins[:, 1:] = position_ids.diff(dim=-1) != 1  # broadcasts one row of positions over all
    cu_seqlens = _offsets(begins.flatten(), batch * seq_q, may_read)
    if may_read:
        if cu_seqlens.numel() == batch + 1:
            return None
        if seq_q != seq_k:
            raise PackedAfterCache
    return Documents(cu_seqlens, cu_seqlens)


def _some_exist(
    batch: int,
    seq_q: int,
    seq_k: int,
    exists_q: torch.Tensor,
    exists_k: torch.Tensor,
    position_ids: torch.Tensor | None,
    may_read: bool,
) -> Documents:
    order_q, order_k = _order(exists_q, may_read), _order(exists_k, may_read)
    count_q, count_k = exists_q.sum(1), exists_k.sum(1)  # (batch,)
    if position_ids is not None and seq_q > 1 and (may_read or seq_q == seq_k):
        rows = order_q // seq_q
        positions = position_ids.expand(batch, seq_q).flatten()[order_q]
        begins = torch.ones_like(rows, dtype=torch.bool)
        begins[1:] = (rows.diff() != 0) | (positions.diff() <= 0)
        total = count_q.sum()
        if not may_read:  # what lies behind the tokens begins no document
            begins &= torch.arange(len(begins), device=begins.device) < total
        cu_seqlens = _offsets(begins, total, may_read)
        if not may_read:
            return Documents(cu_seqlens, cu_seqlens, order_q, order_k)
        if cu_seqlens.numel() - 1 > int((count_q > 0).sum()):
            if not torch.equal(count_q, count_k):
                raise PackedAfterCache
            return Documents(cu_seqlens, cu_seqlens, order_q, order_k)
    return Documents(_cumulated(count_q), _cumulated(count_k), order_q, order_k)


def _order(exists: torch.Tensor, may_read: bool) -> torch.Tensor:
    """Flat indices of the tokens in reading order; with fixed sizes, then those of the padding."""
    if may_read:
        return exists.flatten().nonzero().squeeze(1)
    return torch.argsort(~exists.flatten(), stable=True)


def _offsets(begins: torch.Tensor, total: Any, may_read: bool) -> torch.Tensor:
    """int32 offsets: the indices of ``begins``, then ``total`` (repeated to a fixed size)."""
    index = torch.arange(len(begins), device=begins.device)
    # Of fixed size: repeated offsets are empty documents, which the kernel skips.
    starts = index[begins] if may_read else torch.where(begins, index, total).sort().values
    return torch.cat([starts, torch.as_tensor(total, device=index.device).view(1)]).int()


def _cumulated(counts: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


class Remembered:
    """The last few results of :func:`find_documents`, by the identity of their tensors.

    All layers of a model get the same tensors. Finding the documents makes the CPU wait for the
    GPU, so it is done once a forward pass and not once a layer.
    """

    def __init__(self, size: int = 4) -> None:
        self._local = threading.local()
        self._size = size

    def find(
        self,
        sizes: tuple[int, int, int],
        mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
    ) -> Documents | None:
        """``find_documents`` for a mask as :func:`flashcourse_mask` makes it, remembered."""
        kept = self._local.__dict__.setdefault("kept", deque(maxlen=self._size))
        key = (sizes, _version(mask), _version(position_ids))
        for known, mask_ref, positions_ref, found in kept:
            if known == key and mask_ref() is mask and positions_ref() is position_ids:
                return found
        found = find_documents(*sizes, split_mask(mask, sizes), position_ids)
        kept.append((key, _reference(mask), _reference(position_ids), found))
        return found


def split_mask(
    mask: torch.Tensor | None, sizes: tuple[int, int, int]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(which queries exist, which keys exist) from ``(batch, seq_k + seq_q)``: keys come first."""
    if mask is None:
        return None
    seq_k = sizes[2]
    return mask[:, seq_k:], mask[:, :seq_k]


def _version(tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _reference(tensor: torch.Tensor | None) -> Any:
    return (lambda: None) if tensor is None else weakref.ref(tensor)

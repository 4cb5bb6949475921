"""The decode functions' slow twins: each sequence is cut out of the cache and attended to alone.

These are the specification of ``flash_decode`` and ``paged_attention``.
"""

from __future__ import annotations

from typing import Any

import torch

from flashcourse.attention.decode_arguments import (
    check_decode,
    check_paged,
    resolve_decode_options,
)
from flashcourse.attention.naive import DTYPES, naive_attention


def naive_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`~flashcourse.attention.naive.naive_attention`, causal, over each sequence's own slots.

    It reads ``cache_seqlens`` on the host. ``num_splits`` is checked and changes nothing.

    Args:
        q: ``(batch, heads_q, seq_q, head_dim)``, float16, bfloat16, float32 or float64; its keys
            and values are in the cache already. Query ``i`` sees the first
            ``cache_seqlens - seq_q + i + 1`` slots.
        k_cache, v_cache: ``(batch, heads_kv, capacity, head_dim)``.
        cache_seqlens: int32 ``(batch,)``, slots in use, 0 to capacity.
        (the others): see :func:`~flashcourse.attention.decode.flash_decode`.

    Returns:
        out with q's shape and dtype; with ``return_lse`` also lse ``(batch, heads_q, seq_q)``.

    Raises:
        TypeError, ValueError: an argument is not what it must be; the message says which.
    """
    check_decode(q, k_cache, v_cache, cache_seqlens, DTYPES)
    caches = [
        (k_cache[b, :, :length], v_cache[b, :, :length])
        for b, length in enumerate(cache_seqlens.tolist())
    ]
    options = {"scale": scale, "window_size": window_size, "softcap": softcap}
    out, lse = _one_by_one(q, caches, options, num_splits)
    return (out, lse) if return_lse else out


def naive_paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`naive_decode` over pages: each sequence's pages are copied behind each other first.

    Args:
        q: ``(batch, heads_q, seq_q, head_dim)``.
        k_pages, v_pages: ``(num_pages, page_size, heads_kv, head_dim)``.
        block_table: int32 ``(batch, max_pages)``; the first ``ceil(length / page_size)`` entries of
            a row are the sequence's pages in order, the rest may be anything.
        cache_seqlens: int32 ``(batch,)``.
        (the others): see :func:`~flashcourse.attention.paged.paged_attention`.

    Returns:
        out with q's shape and dtype; with ``return_lse`` also lse ``(batch, heads_q, seq_q)``.

    Raises:
        TypeError, ValueError: an argument is not what it must be; the message says which.
    """
    check_paged(q, k_pages, v_pages, block_table, cache_seqlens, DTYPES)
    page_size = k_pages.shape[1]
    caches = []
    for row, length in zip(block_table, cache_seqlens.tolist(), strict=True):
        pages = row[: -(-length // page_size)].long()
        k, v = (
            held[pages].flatten(0, 1)[:length].transpose(0, 1)  # (heads_kv, length, head_dim)
            for held in (k_pages, v_pages)
        )
        caches.append((k, v))
    options = {"scale": scale, "window_size": window_size, "softcap": softcap}
    out, lse = _one_by_one(q, caches, options, num_splits)
    return (out, lse) if return_lse else out


def _one_by_one(
    q: torch.Tensor,
    caches: list[tuple[torch.Tensor, torch.Tensor]],
    options: dict[str, Any],
    num_splits: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    resolve_decode_options(q.shape[3], **options, num_splits=num_splits)
    if not caches:
        accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=accumulate)
    results = [
        naive_attention(q[b, None], k[None], v[None], is_causal=True, return_lse=True, **options)
        for b, (k, v) in enumerate(caches)
    ]
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])

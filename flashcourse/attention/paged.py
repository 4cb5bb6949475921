"""``paged_attention``: the decode kernel over a KV cache that lies in pages."""

from __future__ import annotations

import torch

from flashcourse import runtime
from flashcourse.attention.arguments import HALF_AND_SINGLE
from flashcourse.attention.decode import attend_to_cache
from flashcourse.attention.decode_arguments import (
    check_no_gradient,
    check_paged,
    resolve_decode_options,
)


def paged_attention(
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
    """:func:`~flashcourse.attention.decode.flash_decode` through a block table.

    Slot ``n`` of sequence ``b`` is slot ``n % page_size`` of page
    ``block_table[b, n // page_size]``. Sequences may share pages. Forward only. Kwon et al. (2023),
    "Efficient Memory Management for Large Language Model Serving with PagedAttention", section 4.

    Args:
        q: ``(batch, heads_q, seq_q, head_dim)``, seq_q ≥ 1; its keys and values are in the pages
            already.
        k_pages, v_pages: ``(num_pages, page_size, heads_kv, head_dim)``, page_size 1 to 256, each
            with any strides: they may be views of one tensor.
        block_table: int32 ``(batch, max_pages)``. Only the first ``ceil(length / page_size)``
            entries of a row are read; those behind may hold anything. On a CPU the entries in use
            are checked, on a GPU they are not. The number of splits is chosen for
            ``max_pages * page_size`` keys: pass no more columns than the longest sequence uses.
        cache_seqlens: int32 ``(batch,)``, the slots in use, 0 to ``max_pages * page_size``.
        (the others): see :func:`~flashcourse.attention.decode.flash_decode`.

    Returns:
        out with q's shape and dtype; with ``return_lse`` also lse, ``(batch, heads_q, seq_q)``,
        float32, natural logarithm. A row that sees no key gives out 0 and lse ``-inf``.

    Raises:
        TypeError, ValueError: an argument is not what it must be, or requires a gradient; the
            message says which.
        flashcourse.runtime.TritonMissing: Triton is not installed.
    """
    check_paged(q, k_pages, v_pages, block_table, cache_seqlens, HALF_AND_SINGLE)
    options = resolve_decode_options(
        q.shape[3],
        scale=scale,
        window_size=window_size,
        softcap=softcap,
        num_splits=num_splits,
        return_lse=return_lse,
    )
    check_no_gradient("paged_attention", q=q, k_pages=k_pages, v_pages=v_pages)
    runtime.require_triton("paged_attention")
    k, v = k_pages.transpose(1, 2), v_pages.transpose(1, 2)  # (page, heads_kv, slot, head_dim)
    out, lse = attend_to_cache(q, k, v, block_table, cache_seqlens, options, num_splits)
    return (out, lse) if return_lse else out

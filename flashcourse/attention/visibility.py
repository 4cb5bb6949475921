"""Which key a query may see: causal and windowed masks, aligned to the bottom right.

Query ``i`` of ``seq_q`` stands at key position ``i + seq_k - seq_q``: the last query stands at the
last key. That is what a decoder needs when the first keys come from a cache. (The ``is_causal`` of
PyTorch's ``scaled_dot_product_attention`` is aligned to the top left instead.)
"""

from __future__ import annotations

import torch

from flashcourse.attention.arguments import Options


def visible_keys(
    queries: torch.Tensor, keys: torch.Tensor, seq_q: int, seq_k: int, options: Options
) -> torch.Tensor:
    """True where a query may see a key.

    Args:
        queries: indices of queries, int64 ``(num_queries,)``.
        keys: indices of keys, int64 ``(num_keys,)``.
        seq_q, seq_k: the lengths that fix the diagonal.

    Returns:
        bool ``(num_queries, num_keys)``.
    """
    offset = keys[None, :] - (queries[:, None] + seq_k - seq_q)  # 0 on the diagonal
    visible = torch.ones_like(offset, dtype=torch.bool)
    if options.left is not None:
        visible &= offset >= -options.left
    if options.right is not None:
        visible &= offset <= options.right
    return visible


def key_range(
    first_query: int, last_query: int, seq_q: int, seq_k: int, options: Options
) -> tuple[int, int]:
    """The keys ``[start, stop)`` that at least one of the queries may see; empty if stop <= start.

    Args:
        first_query, last_query: the queries of a tile, both included.
    """
    start, stop = 0, seq_k
    if options.left is not None:
        start = max(start, first_query + seq_k - seq_q - options.left)
    if options.right is not None:
        stop = min(stop, last_query + seq_k - seq_q + options.right + 1)
    return start, stop

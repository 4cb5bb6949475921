"""Checks of the decode functions' arguments, shared by the kernels and their slow twins."""

from __future__ import annotations

from typing import Any

import torch

from flashcourse.attention.arguments import (
    Options,
    check_head_dim,
    check_heads,
    check_same,
    check_tensor,
    resolve_options,
)
from flashcourse.attention.decode_tuning import MOST_SPLITS

MAX_PAGE_SIZE = 256

# Calls on a GPU that passed, by all that is checked of them: asking again would cost 10 µs a call,
# which is as long as a short sequence takes.
_passed: set[tuple[Any, ...]] = set()
MOST_PASSED = 4096


def check_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Check a call over a contiguous cache, all shapes as in ``flash_decode``.

    Raises:
        TypeError: an argument is not a tensor, or its dtype is not allowed.
        ValueError: shapes, dtypes, devices or (on a CPU) lengths do not fit together.
    """
    signature = _signature(dtypes, q, k_cache, v_cache, cache_seqlens)
    if signature in _passed:
        return
    layout = "(batch, heads_kv, capacity, head_dim)"
    _check_tensors(q, k_cache, v_cache, "k_cache", "v_cache", layout, dtypes)
    check_same("batch size", q=q.shape[0], k_cache=k_cache.shape[0], v_cache=v_cache.shape[0])
    check_same("number of heads", k_cache=k_cache.shape[1], v_cache=v_cache.shape[1])
    check_same("capacity", k_cache=k_cache.shape[2], v_cache=v_cache.shape[2])
    check_heads(q.shape[1], k_cache.shape[1])
    _check_lengths(q, cache_seqlens, k_cache.shape[2], "the capacity of k_cache")
    _pass(signature)


def check_paged(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Check a call over pages, all shapes as in ``paged_attention``.

    Raises:
        TypeError: an argument is not a tensor, or its dtype is not allowed.
        ValueError: shapes, dtypes, devices or (on a CPU) lengths and pages do not fit together.
    """
    signature = _signature(dtypes, q, k_pages, v_pages, block_table, cache_seqlens)
    if signature in _passed:
        return
    layout = "(num_pages, page_size, heads_kv, head_dim)"
    _check_tensors(q, k_pages, v_pages, "k_pages", "v_pages", layout, dtypes)
    check_same("number of pages", k_pages=k_pages.shape[0], v_pages=v_pages.shape[0])
    check_same("page_size", k_pages=k_pages.shape[1], v_pages=v_pages.shape[1])
    check_same("number of heads", k_pages=k_pages.shape[2], v_pages=v_pages.shape[2])
    check_heads(q.shape[1], k_pages.shape[2])
    num_pages, page_size = k_pages.shape[:2]
    if not 1 <= page_size <= MAX_PAGE_SIZE:
        raise ValueError(
            f"k_pages has page_size {page_size} (its second dimension); allowed are 1 to "
            f"{MAX_PAGE_SIZE}"
        )
    check_tensor("block_table", block_table, (torch.int32,))
    if block_table.dim() != 2 or block_table.shape[0] != q.shape[0]:
        raise ValueError(
            f"block_table must have shape (batch, max_pages) with q's batch of {q.shape[0]}, "
            f"got {tuple(block_table.shape)}"
        )
    check_same("device", q=q.device, block_table=block_table.device)
    capacity = block_table.shape[1] * page_size
    lengths = _check_lengths(q, cache_seqlens, capacity, "what block_table's columns can hold")
    if lengths is not None:
        for sequence, (length, row) in enumerate(zip(lengths, block_table.tolist(), strict=True)):
            for column, page in enumerate(row[: -(-length // page_size)]):
                if not 0 <= page < num_pages:
                    raise ValueError(
                        f"block_table[{sequence}, {column}] is {page}, but sequence {sequence} of "
                        f"length {length} uses that entry; pages are 0 to {num_pages - 1}"
                    )
    _pass(signature)


def resolve_decode_options(
    head_dim: int,
    *,
    scale: float | None,
    window_size: tuple[int | None, int | None] | None,
    softcap: float | None,
    num_splits: int | None,
    return_lse: bool = False,
) -> Options:
    """Check the options and fill in the defaults; decode is always causal.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option has a value that is not allowed.
    """
    if num_splits is not None:
        if not isinstance(num_splits, int) or isinstance(num_splits, bool):
            raise TypeError(f"num_splits must be an integer or None, got {num_splits!r}")
        if not 1 <= num_splits <= MOST_SPLITS:
            raise ValueError(f"num_splits must be between 1 and {MOST_SPLITS}, got {num_splits}")
    return resolve_options(
        head_dim,
        is_causal=True,
        scale=scale,
        window_size=window_size,
        softcap=softcap,
        return_lse=return_lse,
    )


def check_no_gradient(what: str, **tensors: torch.Tensor) -> None:
    """Raise ValueError if autograd would want a gradient: a detached result would hide that."""
    if not torch.is_grad_enabled():
        return
    wanting = [name for name, tensor in tensors.items() if tensor.requires_grad]
    if wanting:
        raise ValueError(
            f"{what} computes no gradient, and {' and '.join(wanting)} require"
            f"{'s' if len(wanting) == 1 else ''} one. Call it under torch.no_grad(), or train "
            "with flash_attention."
        )


def _signature(dtypes: tuple[torch.dtype, ...], *tensors: object) -> tuple[Any, ...] | None:
    """All that is checked of a call, or None where values are checked too or types are unusual."""
    if torch.compiler.is_compiling():
        return None
    parts: list[Any] = [dtypes]
    for tensor in tensors:
        if type(tensor) is not torch.Tensor or tensor.device.type == "cpu":
            return None
        parts += (tensor.shape, tensor.dtype, tensor.device)
    return tuple(parts)


def _pass(signature: tuple[Any, ...] | None) -> None:
    if signature is not None:
        if len(_passed) >= MOST_PASSED:
            _passed.clear()
        _passed.add(signature)


def _check_tensors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_name: str,
    v_name: str,
    layout: str,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    named = {"q": q, k_name: k, v_name: v}
    for name, tensor in named.items():
        check_tensor(name, tensor, dtypes)
        if tensor.dim() != 4:
            wanted = "(batch, heads_q, seq_q, head_dim)" if name == "q" else layout
            raise ValueError(
                f"{name} must have 4 dimensions {wanted}, got shape {tuple(tensor.shape)}"
            )
    check_same("dtype", **{name: tensor.dtype for name, tensor in named.items()})
    check_same("device", **{name: tensor.device for name, tensor in named.items()})
    check_same("head_dim", **{name: tensor.shape[3] for name, tensor in named.items()})
    check_head_dim(q.shape[3])
    if q.shape[2] < 1:
        raise ValueError(f"q must hold at least one query (seq_q), got shape {tuple(q.shape)}")


def _check_lengths(
    q: torch.Tensor, cache_seqlens: torch.Tensor, capacity: int, what: str
) -> list[int] | None:
    """The lengths, where reading them costs no wait."""
    check_tensor("cache_seqlens", cache_seqlens, (torch.int32,))
    if tuple(cache_seqlens.shape) != (q.shape[0],):
        raise ValueError(
            f"cache_seqlens must have shape (batch,) with q's batch of {q.shape[0]}, "
            f"got {tuple(cache_seqlens.shape)}"
        )
    check_same("device", q=q.device, cache_seqlens=cache_seqlens.device)
    if cache_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    lengths = cache_seqlens.tolist()
    for sequence, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            raise ValueError(
                f"cache_seqlens[{sequence}] is {length}; allowed are 0 to {capacity}, {what}"
            )
    return lengths

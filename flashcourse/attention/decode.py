"""``flash_decode``: new queries over a contiguous KV cache, and the way both caches share.

This module needs no Triton until a function is called.
"""

from __future__ import annotations

import torch

from flashcourse import runtime
from flashcourse.attention.arguments import HALF_AND_SINGLE, Options
from flashcourse.attention.decode_arguments import (
    check_decode,
    check_no_gradient,
    resolve_decode_options,
)


def flash_decode(
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
    """Attention of a sequence's newest queries over its KV cache, split over the keys.

    The keys and values of the new tokens are in the cache already: query ``i`` stands at slot
    ``cache_seqlens - seq_q + i`` and sees the slots up to it. Forward only. Dao, Haziza, Massa and
    Sizov (2023), "Flash-Decoding for long-context inference".

    Args:
        q: ``(batch, heads_q, seq_q, head_dim)``, seq_q ≥ 1, float16, bfloat16 or float32 (computed
            as float32, not TF32), any strides, head_dim 1 to 256. On a GPU, or on a CPU where
            Triton's interpreter runs.
        k_cache, v_cache: ``(batch, heads_kv, capacity, head_dim)``, any strides; query head ``h``
            reads KV head ``h // (heads_q // heads_kv)``. What slots past a sequence's end hold,
            NaN included, never reaches the result.
        cache_seqlens: int32 ``(batch,)``, the slots in use, 0 to capacity. On a CPU this is
            checked. On a GPU it is not, because that would make the CPU wait for the GPU: there a
            sequence with an impossible length comes back as NaN.
        scale: factor of the scores; default ``head_dim ** -0.5``.
        window_size: (left, right) of the query's own slot; left counts the slots before it that
            stay visible, -1 or None is unlimited; right changes nothing, later slots are hidden.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None is off.
        num_splits: into how many parts each sequence's keys go, 1 to 1024; default is chosen from
            the GPU, the shapes and the capacity. So pass a cache cut to about the longest sequence,
            ``k_cache[:, :, :longest]``, where you know it.
        return_lse: also return the log-sum-exp of each row's scores.

    Returns:
        out with q's shape and dtype; with ``return_lse`` also lse, ``(batch, heads_q, seq_q)``,
        float32, natural logarithm. A row that sees no key gives out 0 and lse ``-inf``.

    Raises:
        TypeError, ValueError: an argument is not what it must be, or requires a gradient; the
            message says which.
        flashcourse.runtime.TritonMissing: Triton is not installed.
    """
    check_decode(q, k_cache, v_cache, cache_seqlens, HALF_AND_SINGLE)
    options = resolve_decode_options(
        q.shape[3],
        scale=scale,
        window_size=window_size,
        softcap=softcap,
        num_splits=num_splits,
        return_lse=return_lse,
    )
    check_no_gradient("flash_decode", q=q, k_cache=k_cache, v_cache=v_cache)
    runtime.require_triton("flash_decode")
    out, lse = attend_to_cache(q, k_cache, v_cache, None, cache_seqlens, options, num_splits)
    return (out, lse) if return_lse else out


def attend_to_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor,
    options: Options,
    num_splits: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of checked arguments; ``k``, ``v`` are ``(sequence or page, heads_kv, slot,
    head_dim)``. Under ``torch.compile`` this is one opaque operator."""
    run = torch.ops.flashcourse.decode if torch.compiler.is_compiling() else _launch
    return run(
        q, k, v, block_table, cache_seqlens,
        options.scale, options.left, options.softcap, num_splits,
    )  # fmt: skip


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor,
    scale: float,
    left: int | None,
    softcap: float | None,
    num_splits: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from flashcourse.attention.decode_launch import launch_decode
    from flashcourse.attention.flash_sizes import FlashOptions

    options = FlashOptions(scale, left, 0, softcap)
    return launch_decode(q, k, v, block_table, cache_seqlens, options, num_splits)


@torch.library.custom_op("flashcourse::decode", mutates_args=())
def _decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor,
    scale: float,
    left: int | None,
    softcap: float | None,
    num_splits: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _launch(q, k, v, block_table, cache_seqlens, scale, left, softcap, num_splits)


@_decode.register_fake
def _(q, k, v, block_table, cache_seqlens, scale, left, softcap, num_splits):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)

"""From a decode call's tensors to its one or two kernel launches. Needs Triton.

Both caches come here as ``(owner, heads_kv, slot, head_dim)``, where the owner of slots is a
sequence, or a page.
"""

from __future__ import annotations

import torch

from flashcourse.attention.decode_kernels import decode_kernel, merge_splits_kernel
from flashcourse.attention.decode_tuning import choose_splits, decode_tiles, forced_decode
from flashcourse.attention.flash_launch import is_widened, layout_of, planned_once
from flashcourse.attention.flash_machine import check_machine
from flashcourse.attention.flash_plan import Launch
from flashcourse.attention.flash_sizes import FlashOptions, factors, multiprocessors, needs_int64
from flashcourse.attention.tuning import Tiles, bucket_of

MERGE_TILES = Tiles(1, 16, 4, 1)  # rows, parts at a time, warps, stages


class DecodeLaunch(Launch):
    """A :class:`Launch` whose tiles are changed in another place."""

    def advice(self) -> str:
        return (
            "Make the tiles smaller: flashcourse.attention.decode_tuning.force_decode"
            "(rows, keys, warps, stages)."
        )


def launch_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor,
    options: FlashOptions,
    num_splits: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out like q, and lse ``(batch, heads_q, seq_q)`` float32. Nothing waits for the GPU."""
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    if is_widened(q):
        wide, lse = launch_decode(
            q.float(), k.float(), v.float(), block_table, cache_seqlens, options, num_splits
        )
        return out.copy_(wide), lse
    cache_seqlens = cache_seqlens.contiguous()
    key = (
        "decode", options, num_splits, layout_of(q), layout_of(k), layout_of(v),
        None if block_table is None else layout_of(block_table),
        cache_seqlens.data_ptr() % 16 == 0, forced_decode(),
    )  # fmt: skip
    splits, decode, merge = planned_once(
        key, lambda: _plan(q, k, v, out, block_table, options, num_splits)
    )
    if merge is None:
        decode(q, k, v, out, lse, cache_seqlens, block_table)
        return out, lse
    parts = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
    part_lses = torch.empty((splits, *lse.shape), dtype=torch.float32, device=q.device)
    decode(q, k, v, parts, part_lses, cache_seqlens, block_table)
    merge(parts, part_lses, out, lse)
    return out, lse


def _plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor | None,
    options: FlashOptions,
    num_splits: int | None,
) -> tuple[int, Launch, Launch | None]:
    """The number of splits, the launch of the kernel and, if there are several, of the merge."""
    check_machine(q, "flash_decode" if block_table is None else "paged_attention")
    batch, heads, seq_q, head_dim = q.shape
    heads_kv, slots = k.shape[1:3]
    group = heads // heads_kv
    capacity = slots if block_table is None else slots * block_table.shape[1]
    longest = _longest(options, capacity, seq_q)
    tiles, programs_per_sm = decode_tiles(
        seq_q * group, head_dim, q.element_size(), block_table is not None, q.device, longest,
        batch * heads_kv < multiprocessors(q.device),
    )  # fmt: skip
    num_tiles = -(-seq_q * group // tiles.block_q)
    programs = batch * heads_kv * num_tiles
    least = 1
    if num_splits is None:
        key_tiles = max(1, -(-longest // tiles.block_k))
        num_splits, least = choose_splits(
            programs, key_tiles, tiles.block_k, multiprocessors(q.device), programs_per_sm
        )

    left = options.left
    left = None if left is None or left >= capacity - 1 else left
    scale, cap_in, cap_out = factors(options)
    num_rows = batch * heads * seq_q
    if num_splits == 1:
        out_strides = (0, *out.stride())
    else:  # parts (num_splits, batch, heads_q, seq_q, head_dim)
        rows = seq_q * head_dim
        out_strides = (num_rows * head_dim, heads * rows, rows, head_dim, 1)
    numbers = (
        *q.stride(), *k.stride(), *v.stride(), *out_strides,
        *((0, 0) if block_table is None else block_table.stride()),
        heads_kv, group, num_tiles, num_splits, least, seq_q, capacity, num_rows,
        abs(scale), left or 0, cap_in if scale >= 0 else -cap_in, cap_out,
    )  # fmt: skip
    size = {"HEAD_DIM": head_dim, "BLOCK_D": bucket_of(head_dim)}
    constants = {
        **size, "BLOCK_Q": tiles.block_q, "BLOCK_K": tiles.block_k,
        "PAGED": block_table is not None, "PAGE_SIZE": 0 if block_table is None else slots,
        "HAS_LEFT": left is not None, "SOFTCAP": options.softcap is not None,
        "NEGATE": scale < 0, "WIDE": needs_int64(tiles, k, v),
    }  # fmt: skip
    decode = DecodeLaunch(decode_kernel, "decode", tiles, programs * num_splits, numbers, constants)
    if num_splits == 1:
        return 1, decode, None
    merge = DecodeLaunch(
        merge_splits_kernel, "merge_splits", MERGE_TILES, num_rows,
        (*out.stride(), num_splits, heads, seq_q, num_rows),
        {**size, "BLOCK_SPLITS": max(16, 1 << (num_splits - 1).bit_length()),
         "CHUNK": MERGE_TILES.block_k},
    )  # fmt: skip
    return num_splits, decode, merge


def _longest(options: FlashOptions, capacity: int, seq_q: int) -> int:
    """The most keys that the queries of one sequence can see between them."""
    return capacity if options.left is None else min(capacity, options.left + seq_q)

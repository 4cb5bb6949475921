"""Numbers that a launch needs: from shapes, strides, options and the chip. Starts nothing."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from flashcourse import runtime
from flashcourse.attention.tuning import Tiles

LOG2E = math.log2(math.e)
INT32_MAX = 2**31 - 1


class FlashOptions(NamedTuple):
    """The options as the kernels take them; windows count keys, None is unlimited."""

    scale: float
    left: int | None
    right: int | None
    softcap: float | None


def tiles_of(seq: int, block: int, cu_seqlens: torch.Tensor | None) -> tuple[int, int]:
    """Programs per head, and the number of sequences (see ``locate_tile``)."""
    if cu_seqlens is None:
        return -(-seq // block), 0
    num_sequences = cu_seqlens.numel() - 1
    return seq // block + num_sequences + 1, num_sequences


def keys_seen(
    seq_q: int, seq_k: int, left: int | None, right: int | None, cu_seqlens: torch.Tensor | None
) -> float:
    """How many keys a query sees, on average (from eight of them)."""
    if cu_seqlens is not None:  # of sequences that are alike: the offsets stay on the GPU
        num_sequences = max(1, cu_seqlens.numel() - 1)
        seq_q, seq_k = -(-seq_q // num_sequences), -(-seq_k // num_sequences)
    seen = 0
    for i in range(8):
        diagonal = (2 * i + 1) * seq_q // 16 + seq_k - seq_q
        first = 0 if left is None else max(0, diagonal - left)
        last = seq_k - 1 if right is None else min(seq_k - 1, diagonal + right)
        seen += max(0, last - first + 1)
    return seen / 8


def heads_together(
    num_tiles: int, num_heads: int, others: torch.Tensor, group: int,
    left: int | None, right: int | None, cu_seqlens: torch.Tensor | None,
) -> int:  # fmt: skip
    """``section`` of ``locate_tile``: 1 where all tiles are alike, or a window makes them so.

    As many heads as share the L2 cache with what their programs walk over (a KV head is counted
    for each of its query heads), but enough to fill the GPU. Sections are as equal as
    rounding up allows: a small last one would leave multiprocessors idle.

    Args:
        num_heads: in all batches; ``num_tiles`` is of one head.
        others: one of the two tensors that a program walks over, with ``group`` heads a program.
    """
    if right is None or left is not None or cu_seqlens is not None:
        return 1
    of_one_head = 2 * group * others.shape[2] * others.shape[3] * others.element_size()
    in_cache = _l2_bytes(others.device) // 2 // max(1, of_one_head)
    to_fill = -(-4 * multiprocessors(others.device) // max(1, num_tiles))
    sections = -(-num_heads // max(1, in_cache, to_fill))
    return -(-num_heads // max(1, sections))


@functools.cache
def _l2_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return 2**20  # for the interpreter any number is right
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def window(
    options: FlashOptions, seq_q: int, seq_k: int, cu_seqlens: torch.Tensor | None
) -> tuple[int | None, int | None]:
    """The window, without sides that hide nothing, and small enough for int32."""
    left, right = options.left, options.right
    if cu_seqlens is None:  # the last query stands at the last key, the first at seq_k - seq_q
        left = None if left is not None and left >= seq_k - 1 else left
        right = None if right is not None and right >= seq_q - 1 else right
    limit = seq_q + seq_k
    return (
        None if left is None else min(left, limit),
        None if right is None else min(right, limit),
    )


def factors(options: FlashOptions, natural: bool = False) -> tuple[float, float, float]:
    """(scale in the units of scores, factor into the tanh, factor out of it in these units).

    The units are log 2, or with ``natural`` 1: see ``flash_tiles.power``.
    """
    unit = 1.0 if natural else LOG2E
    if options.softcap is None:
        return options.scale * unit, 0.0, 0.0
    return options.scale * unit, options.scale / options.softcap, options.softcap * unit


def needs_int64(tiles: Tiles, *tensors: torch.Tensor) -> bool:
    """True if an offset may not fit int32: inside one tile, or in Gluon inside one sequence."""
    block = max(tiles.block_q, tiles.block_k)
    for tensor in tensors:
        stride_n, stride_d = tensor.stride()[2:]
        rows = max(block, tensor.shape[2]) if tiles.gluon else block
        if rows * stride_n + tensor.shape[3] * stride_d > INT32_MAX:
            return True
    return False


def descriptors_fit(*tensors: torch.Tensor, all_heads: bool = False) -> bool:
    """True if the copy engine can read these tensors.

    Args:
        all_heads: one descriptor is for all batches and heads, so none may repeat another.
    """
    fit = all(map(_descriptor_fits, tensors))
    return fit and not (all_heads and any(0 in tensor.stride()[:2] for tensor in tensors))


def _descriptor_fits(tensor: torch.Tensor) -> bool:
    """True if the copy engine can read it: dense rows, base and strides multiples of 16 bytes."""
    *outer, last = tensor.stride()
    size = tensor.element_size()
    return (
        last == 1
        and tensor.shape[3] * size >= 16
        and tensor.data_ptr() % 16 == 0
        and all(stride * size % 16 == 0 for stride in outer)
        and outer[2] > 0
    )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs of one kernel run side by side, one a multiprocessor."""
    if runtime.interpreting() or device.type == "cpu":
        return 1  # the interpreter runs one after the other
    return torch.cuda.get_device_properties(device).multi_processor_count

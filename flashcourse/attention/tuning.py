"""Tile sizes of the Triton kernels, per kind of GPU, head_dim, dtype and kernel.

A table, not a search: the first call of a kernel costs one compilation and no timing runs, every
run uses the same tiles, and so gives the same bits. Where a row comes from is said beside it:

- *measured*: the fastest of ``python -m flashcourse bench --tune`` on the GPU that is named (of
  ``--tune-length 512`` where a query sees few keys);
- *by size*: the largest tiles of the measured shape that fit the chip's shared memory without
  spilling registers, as the ahead-of-time compiler reports it (``flashcourse.attention.ahead``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

Kernel = Literal["forward", "backward_q", "backward_kv"]
KERNELS: tuple[Kernel, ...] = ("forward", "backward_q", "backward_kv")
BUCKETS = (16, 32, 64, 128, 256)  # head_dim, rounded up to a power of two


@dataclass(frozen=True)
class Tiles:
    """How one kernel is cut and compiled.

    ``block_q`` queries × ``block_k`` keys a tile, ``warps`` per program, ``stages`` tiles in
    flight; ``tma``: the tiles of the loop come through Hopper's copy engine where the layout of
    the tensors allows it; ``registers``: the most a thread may use (NVIDIA), so that more programs
    share a multiprocessor; ``gluon``: the kernel scheduled by hand (``flash_*_hopper``) where the
    copy engine can read the tensors and Triton is new enough; it has stages of its own.
    """

    block_q: int
    block_k: int
    warps: int
    stages: int
    tma: bool = False
    registers: int | None = None
    gluon: bool = False


@dataclass(frozen=True)
class Chip:
    """A kind of GPU: the shared memory one block may use, in KiB, and the table it reads."""

    name: str
    shared_kib: int
    table: str


# Shared memory per block: CUDA C++ Programming Guide, table "Technical specifications per compute
# capability"; AMD CDNA 3 whitepaper (64 KiB of LDS per compute unit).
CHIPS = {
    "sm_75": Chip("T4, RTX 20", 64, "small"),
    "sm_80": Chip("A100", 163, "large"),
    "sm_86": Chip("RTX 30, A10", 99, "medium"),
    "sm_89": Chip("RTX 40, L4", 99, "medium"),
    "sm_90": Chip("H100, H200", 227, "hopper"),
    "sm_100": Chip("B200", 227, "large"),
    "sm_120": Chip("RTX 50", 99, "medium"),
    "gfx942": Chip("MI300", 64, "cdna"),
}

# The interpreter is as fast as it has few operations to interpret; unequal blocks, neither of
# them the length of most sequences, show an index that is off.
INTERPRETER = Tiles(64, 32, 4, 1)

_T = Tiles
# table → itemsize → kernel → one entry for each of BUCKETS
TABLES: dict[str, dict[int, dict[str, tuple[Tiles, ...]]]] = {
    # measured for head_dim 64 and 128 in float16 (H200, torch 2.11, Triton 3.6); the rest by size
    "hopper": {
        2: {
            "forward": (_T(64, 128, 4, 2, True), _T(64, 128, 4, 2, True),
                        _T(64, 128, 4, 2, True, 168), _T(128, 64, 4, 2, True),
                        _T(128, 32, 8, 2)),
            "backward_q": (_T(64, 64, 4, 2), _T(64, 64, 4, 2, True), _T(64, 64, 4, 2, True, 128),
                           _T(128, 64, 8, 3, True), _T(64, 32, 4, 2, True)),
            "backward_kv": (_T(64, 64, 4, 2), _T(64, 64, 4, 2, True), _T(128, 64, 4, 2, True),
                            _T(64, 64, 4, 2, True), _T(32, 64, 8, 2, True)),
        },
        4: {
            "forward": (_T(64, 32, 4, 1), _T(64, 32, 4, 1), _T(64, 32, 8, 1),
                        _T(32, 32, 8, 1), _T(32, 16, 8, 1)),
            "backward_q": (_T(32, 32, 4, 1), _T(32, 32, 4, 1), _T(32, 32, 4, 1),
                           _T(32, 16, 8, 1), _T(16, 16, 8, 1)),
            "backward_kv": (_T(32, 32, 4, 1), _T(32, 32, 4, 1), _T(32, 32, 4, 1),
                            _T(16, 32, 8, 1), _T(16, 16, 8, 1)),
        },
    },
    # by size
    "large": {
        2: {
            "forward": (_T(128, 64, 4, 2), _T(128, 64, 4, 2), _T(128, 64, 4, 2),
                        _T(128, 64, 8, 2), _T(64, 32, 4, 2)),
            "backward_q": (_T(64, 64, 4, 2), _T(64, 64, 4, 2), _T(64, 64, 4, 2),
                           _T(64, 64, 8, 2), _T(32, 32, 4, 2)),
            "backward_kv": (_T(32, 64, 4, 2), _T(32, 64, 4, 2), _T(32, 64, 4, 2),
                            _T(32, 64, 8, 2), _T(16, 64, 8, 1)),
        },
        4: {
            "forward": (_T(64, 32, 4, 1), _T(64, 32, 4, 1), _T(64, 32, 8, 1),
                        _T(32, 32, 8, 1), _T(32, 16, 8, 1)),
            "backward_q": (_T(32, 32, 4, 1), _T(32, 32, 4, 1), _T(32, 32, 4, 1),
                           _T(32, 16, 8, 1), _T(16, 16, 8, 1)),
            "backward_kv": (_T(32, 32, 4, 1), _T(32, 32, 4, 1), _T(32, 32, 4, 1),
                            _T(16, 32, 8, 1), _T(16, 16, 8, 1)),
        },
    },
    # by size: 99 KiB
    "medium": {
        2: {
            "forward": (_T(128, 32, 4, 2), _T(128, 32, 4, 2), _T(128, 32, 4, 2),
                        _T(64, 32, 4, 2), _T(32, 32, 4, 1)),
            "backward_q": (_T(64, 32, 4, 2), _T(64, 32, 4, 2), _T(64, 32, 4, 2),
                           _T(32, 32, 4, 1), _T(32, 16, 4, 1)),
            "backward_kv": (_T(32, 64, 4, 2), _T(32, 64, 4, 2), _T(32, 64, 4, 2),
                            _T(32, 64, 8, 1), _T(16, 32, 4, 1)),
        },
        4: {
            "forward": (_T(64, 32, 4, 1), _T(64, 32, 4, 1), _T(32, 32, 4, 1),
                        _T(32, 16, 8, 1), _T(16, 16, 8, 1)),
            "backward_q": (_T(32, 32, 4, 1), _T(32, 32, 4, 1), _T(32, 16, 4, 1),
                           _T(16, 16, 8, 1), _T(16, 16, 8, 1)),
            "backward_kv": (_T(32, 32, 4, 1), _T(32, 32, 4, 1), _T(16, 32, 4, 1),
                            _T(16, 16, 8, 1), _T(16, 16, 8, 1)),
        },
    },
    # by size: 64 KiB. Triton has no matrix unit for Turing, its dots are plain multiply-adds:
    # slow by design, and small tiles keep the operands in registers.
    "small": {
        2: {
            "forward": (_T(32, 32, 4, 1), _T(32, 32, 4, 1), _T(32, 32, 4, 1),
                        _T(32, 16, 8, 1), _T(16, 16, 8, 1)),
            "backward_q": (_T(32, 32, 4, 1), _T(32, 32, 4, 1), _T(32, 16, 4, 1),
                           _T(16, 16, 8, 1), _T(16, 16, 8, 1)),
            "backward_kv": (_T(32, 32, 4, 1), _T(32, 32, 4, 1), _T(16, 32, 4, 1),
                            _T(16, 16, 8, 1), _T(16, 16, 8, 1)),
        },
        4: {
            "forward": (_T(32, 32, 4, 1), _T(32, 32, 4, 1), _T(32, 16, 4, 1),
                        _T(16, 16, 4, 1), _T(16, 16, 4, 1)),
            "backward_q": (_T(32, 32, 4, 1), _T(32, 16, 4, 1), _T(16, 16, 4, 1),
                           _T(16, 16, 8, 1), _T(16, 16, 8, 1)),
            "backward_kv": (_T(32, 32, 4, 1), _T(16, 32, 4, 1), _T(16, 16, 4, 1),
                            _T(16, 16, 8, 1), _T(16, 16, 2, 1)),
        },
    },
    # by size: 64 KiB of LDS, 64 threads a warp
    "cdna": {
        2: {
            "forward": (_T(128, 64, 4, 1), _T(128, 64, 4, 1), _T(128, 64, 4, 1),
                        _T(128, 32, 4, 1), _T(64, 32, 4, 1)),
            "backward_q": (_T(64, 32, 4, 1), _T(64, 32, 4, 1), _T(64, 32, 4, 1),
                           _T(64, 32, 4, 1), _T(32, 16, 4, 1)),
            "backward_kv": (_T(32, 64, 4, 1), _T(32, 64, 4, 1), _T(32, 64, 4, 1),
                            _T(32, 64, 4, 1), _T(16, 32, 4, 1)),
        },
        4: {
            "forward": (_T(64, 32, 4, 1), _T(64, 32, 4, 1), _T(32, 32, 4, 1),
                        _T(32, 16, 8, 1), _T(16, 16, 8, 1)),
            "backward_q": (_T(32, 32, 4, 1), _T(32, 32, 4, 1), _T(32, 16, 4, 1),
                           _T(16, 16, 8, 1), _T(16, 16, 8, 1)),
            "backward_kv": (_T(32, 32, 4, 1), _T(32, 32, 4, 1), _T(16, 32, 4, 1),
                            _T(16, 16, 8, 1), _T(16, 16, 8, 1)),
        },
    },
}  # fmt: skip

# The kernels scheduled by hand, where they are faster: table → itemsize → kernel → bucket → tiles.
# measured in float16 (H200, torch 2.11, Triton 3.6)
GLUON_TABLES: dict[str, dict[int, dict[str, dict[int, Tiles]]]] = {
    "hopper": {
        2: {
            "forward": {128: _T(128, 128, 4, 2, True, None, True)},
            "backward_q": {128: _T(64, 64, 4, 2, True, None, True)},
            "backward_kv": {
                64: _T(64, 64, 4, 2, True, None, True),
                128: _T(64, 64, 4, 2, True, None, True),
            },
        }
    }
}

# Where a query sees few keys, tiles that start quickly win: no descriptors, and many programs a
# multiprocessor. table → itemsize → kernel → bucket → (up to so many keys a query, tiles)
# measured in float16 (H200, torch 2.11, Triton 3.6)
SHORT_TABLES: dict[str, dict[int, dict[str, dict[int, tuple[int, Tiles]]]]] = {
    "hopper": {
        2: {
            "forward": {
                64: (2048, _T(64, 64, 4, 3, False, 128)),
                128: (384, _T(64, 32, 4, 3)),
            },
        }
    }
}


@functools.cache
def chip_of(device: torch.device) -> str:
    """The key of :data:`CHIPS` for a GPU: its own, or the nearest below with the same design."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return "gfx942"
    return chip_of_capability(properties.major, properties.minor)


def chip_of_capability(major: int, minor: int) -> str:
    """The key of :data:`CHIPS` for a CUDA compute capability.

    Raises:
        RuntimeError: the GPU is older than Triton supports.
    """
    if major < 7:
        raise RuntimeError(
            f"this GPU has compute capability {major}.{minor}; Triton needs 7.0 or newer. "
            "naive_attention and tiled_attention run here."
        )
    known = [(75, "sm_75"), (80, "sm_80"), (86, "sm_86"), (89, "sm_89"), (90, "sm_90"),
             (100, "sm_100"), (120, "sm_120")]  # fmt: skip
    below = [name for number, name in known if number <= 10 * major + minor]
    if major == 11:  # Thor: between B200 and RTX 50 by number, but not by shared memory
        return "sm_100"
    return below[-1] if below else "sm_75"


def bucket_of(head_dim: int) -> int:
    """The padded head_dim: the next power of two, at least 16, which is what ``tl.dot`` takes."""
    return max(16, 1 << (head_dim - 1).bit_length())


def table_entry(
    chip: str,
    kernel: Kernel,
    head_dim: int,
    itemsize: int,
    gluon: bool = False,
    keys: float | None = None,
) -> Tiles:
    """The entry of the table for a chip of :data:`CHIPS`, ``itemsize`` in bytes.

    Args:
        gluon: True where the kernel scheduled by hand could run; its entry wins if there is one.
        keys: how many keys a query sees on average; :data:`SHORT_TABLES` wins if they are few.
    """
    table, bucket = CHIPS[chip].table, bucket_of(head_dim)
    if keys is not None:
        short = SHORT_TABLES.get(table, {}).get(itemsize, {}).get(kernel, {}).get(bucket)
        if short is not None and keys <= short[0]:
            return short[1]
    if gluon:
        by_hand = GLUON_TABLES.get(table, {}).get(itemsize, {}).get(kernel, {}).get(bucket)
        if by_hand is not None:
            return by_hand
    return TABLES[table][itemsize][kernel][BUCKETS.index(bucket)]


_forced: dict[str, Tiles] = {}


@contextlib.contextmanager
def force_tiles(**tiles: Tiles) -> Iterator[None]:
    """Use these tiles instead of the table's, for experiments and for making the table.

    Args:
        tiles: ``forward=``, ``backward_q=``, ``backward_kv=``; those not named stay as they are.
    """
    unknown = set(tiles) - set(KERNELS)
    if unknown:
        raise ValueError(f"unknown kernels {sorted(unknown)}; allowed are {', '.join(KERNELS)}")
    before = dict(_forced)
    _forced.update(tiles)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


def forced_tiles() -> tuple[tuple[str, Tiles], ...]:
    """What :func:`force_tiles` forces at the moment."""
    return tuple(_forced.items())


def tiles_for(
    kernel: Kernel,
    head_dim: int,
    itemsize: int,
    device: torch.device,
    gluon: bool = False,
    keys: float | None = None,
) -> Tiles:
    """The tiles a call uses: forced ones, else the table's, else (on a CPU) the interpreter's."""
    forced = _forced.get(kernel)
    # Gluon's kernels are for 16 bits; a backward of few queries also runs a float32 forward.
    if forced is not None and not (forced.gluon and itemsize != 2):
        return forced
    if device.type == "cpu":
        return INTERPRETER
    return table_entry(chip_of(device), kernel, head_dim, itemsize, gluon, keys)

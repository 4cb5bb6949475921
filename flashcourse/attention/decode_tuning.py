"""How the decode kernels are cut: rows and keys of a tile, and into how many splits the keys go.

Decode is bound by the bandwidth of memory, so a tile is as large as two programs a multiprocessor
leave room for: their loads in flight are what fills the bus. "hopper" was measured for head_dim 128
in bfloat16 (H200, torch 2.11, Triton 3.6); everything else is *by size*: chosen with the
ahead-of-time compiler, not measured.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

from flashcourse.attention.tuning import BUCKETS, CHIPS, Tiles, bucket_of, chip_of

PROGRAMS_PER_SM = 2
MAX_SPLITS = 128  # of those chosen here; a caller may ask for up to MOST_SPLITS
MOST_SPLITS = 1024
LONGEST_SPLIT = 65_536  # keys; longer sequences are split even on a full GPU, to end together
OVERHEAD = 2  # tiles' worth of time that a program takes to start and to write its part
MERGE = 5  # tiles' worth of time of the second kernel

Entry = tuple[int, int, int, int]  # most rows a tile, keys a tile, warps, stages

# table of tuning.CHIPS → itemsize → one entry for each of BUCKETS
DECODE_TABLES: dict[str, dict[int, tuple[Entry, ...]]] = {
    "hopper": {
        2: ((64, 128, 4, 4), (64, 128, 4, 4), (64, 128, 4, 4), (64, 64, 4, 4), (32, 32, 4, 4)),
        4: ((32, 64, 4, 3), (32, 64, 4, 3), (16, 32, 4, 3), (16, 16, 4, 3), (16, 16, 4, 3)),
    },
    "large": {
        2: ((64, 128, 4, 3), (64, 128, 4, 3), (64, 64, 4, 3), (32, 64, 4, 3), (32, 32, 4, 3)),
        4: ((32, 64, 4, 3), (32, 64, 4, 3), (32, 32, 4, 3), (16, 16, 4, 3), (16, 16, 4, 2)),
    },
    "medium": {
        2: ((64, 128, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3), (32, 32, 4, 3), (32, 16, 4, 3)),
        4: ((32, 64, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 2), (16, 16, 4, 1)),
    },
    # Turing's dots compile to plain multiply-adds, which keep their operands in registers.
    "small": {
        2: ((16, 64, 4, 1), (16, 64, 4, 1), (16, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1)),
        4: ((16, 32, 4, 1), (16, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    },
    "cdna": {
        2: ((64, 64, 4, 1), (64, 64, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1), (32, 16, 4, 1)),
        4: ((16, 32, 4, 1), (16, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    },
}
# One program a multiprocessor, with larger tiles, was faster on contiguous caches where programs
# walk over thousands of keys, and where there are fewer programs than multiprocessors. Measured
# with up to 16 rows; with more rows they spill registers. table → itemsize → bucket → entry.
LONG, LONG_ROWS = 32_768, 16
LONG_TABLES: dict[str, dict[int, dict[int, Entry]]] = {"hopper": {2: {128: (16, 128, 4, 3)}}}
INTERPRETER_ENTRY: Entry = (64, 32, 4, 1)

_forced: list[Entry] = []


@contextlib.contextmanager
def force_decode(rows: int, keys: int, warps: int, stages: int) -> Iterator[None]:
    """Use this entry instead of the table's, for experiments and for making the table.

    Args:
        rows, keys: of a tile, powers of two of at least 16; calls with fewer rows use fewer.
        warps: of a program.
        stages: tiles in flight, plus one.
    """
    _forced.append((rows, keys, warps, stages))
    try:
        yield
    finally:
        _forced.pop()


def forced_decode() -> Entry | None:
    """What :func:`force_decode` forces at the moment."""
    return _forced[-1] if _forced else None


def decode_tiles(
    rows: int,
    head_dim: int,
    itemsize: int,
    paged: bool,
    device: torch.device,
    longest: int = 0,
    alone: bool = False,
) -> tuple[Tiles, int]:
    """The tiles of a call, and how many programs of them share a multiprocessor.

    Args:
        rows: seq_q · heads_q / heads_kv, the rows to each KV head.
        longest: how many keys its sequences see at most.
        alone: there are fewer programs than multiprocessors, without splits.
    """
    forced = forced_decode()
    if forced is not None or device.type == "cpu":
        return tiles_of_entry(forced or INTERPRETER_ENTRY, rows, paged), PROGRAMS_PER_SM
    chip, long = chip_of(device), is_long(rows, paged, longest, alone)
    entry = decode_entry(chip, head_dim, itemsize, long)
    one = entry != decode_entry(chip, head_dim, itemsize)
    return tiles_of_entry(entry, rows, paged), 1 if one else PROGRAMS_PER_SM


def is_long(rows: int, paged: bool, longest: int, alone: bool = False) -> bool:
    """True for the calls that :data:`LONG_TABLES` is for."""
    return not paged and rows <= LONG_ROWS and (longest >= LONG or alone)


def tiles_of_entry(entry: Entry, rows: int, paged: bool) -> Tiles:
    """The tiles that an entry of the table stands for.

    Triton deals the stages of a loop out over chains of loads. In a paged loop the page's number is
    loaded before what lies there, so it takes twice the steps to keep as many tiles in flight.
    """
    most_rows, keys, warps, stages = entry
    stages = 2 * stages - 1 if paged else stages
    block_q = max(16, min(most_rows, 1 << (rows - 1).bit_length()))  # tl.dot takes no fewer than 16
    return Tiles(block_q, keys, warps, stages)


def decode_entry(chip: str, head_dim: int, itemsize: int, long: bool = False) -> Entry:
    """The entry of the table for a chip of :data:`~flashcourse.attention.tuning.CHIPS`."""
    if long:
        of_long = LONG_TABLES.get(CHIPS[chip].table, {}).get(itemsize, {}).get(bucket_of(head_dim))
        if of_long is not None:
            return of_long
    entries = DECODE_TABLES[CHIPS[chip].table][itemsize]
    return entries[BUCKETS.index(bucket_of(head_dim))]


@functools.lru_cache(maxsize=4096)
def choose_splits(
    programs: int,
    tiles: int,
    block_k: int,
    multiprocessors: int,
    programs_per_sm: int = PROGRAMS_PER_SM,
) -> tuple[int, int]:
    """Into how many splits the keys go, and the least number of tiles in one.

    The time of a call is modelled as the number of waves of programs times the tiles each walks
    over, plus what starting and merging costs; the fewest splits with the least time win. A GPU
    that is full anyway gains nothing from splits but an earlier end of its longest sequence.

    Args:
        programs: programs without any split: batch · heads_kv · tiles of rows.
        tiles: tiles of keys in the longest sequence the cache can hold.
        block_k: keys a tile.
        multiprocessors: of the GPU; 1 for the interpreter, which has no use for splits.
        programs_per_sm: how many programs share one.
    """
    slots = multiprocessors * programs_per_sm
    full = programs >= slots
    least = max(1, 1024 // block_k) if full else 2
    best, best_time = 1, float("inf")
    for splits in range(1, MAX_SPLITS + 1):
        each = -(-tiles // splits)
        if splits > 1 and each < least:
            break
        waves = -(-programs * splits // slots)
        time = waves * (each + OVERHEAD) + (MERGE + splits / 16 if splits > 1 else 0)
        if time < best_time:
            best, best_time = splits, time
    longest = -(-tiles * block_k // LONGEST_SPLIT)
    return max(best, min(longest, MAX_SPLITS)), least

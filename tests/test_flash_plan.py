"""What a launch decides: which tile a program gets, how many heads share the cache, which tiles."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl

from flashcourse.attention.flash_sizes import heads_together, keys_seen
from flashcourse.attention.flash_tiles import locate_tile
from flashcourse.attention.tuning import SHORT_TABLES, table_entry

pytestmark = pytest.mark.needs_triton
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@triton.jit
def write_tiles(found, num_tiles, heads, section, seq, REVERSED: tl.constexpr):
    first, head, batch, _a, _b, _c, _d = locate_tile(
        tl.program_id(0), tl.num_programs(0), num_tiles, heads, section, None, None, 0,
        seq, seq, 16, False, REVERSED,
    )  # fmt: skip
    row = found + 3 * tl.program_id(0)
    tl.store(row, first // 16)
    tl.store(row + 1, head)
    tl.store(row + 2, batch)


def tiles_of_programs(
    num_tiles: int, heads: int, batch: int, section: int, reverse: bool
) -> list[tuple[int, int, int]]:
    """(tile, head, batch) of every program of a grid, in its order."""
    programs = num_tiles * heads * batch
    found = torch.full((programs, 3), -1, dtype=torch.int32, device=HERE)
    write_tiles[(programs,)](found, num_tiles, heads, section, 16 * num_tiles, reverse)
    return [tuple(row) for row in found.tolist()]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("section", [1, 2, 4, 6])
@pytest.mark.parametrize("shape", [(3, 2, 3), (1, 6, 1), (5, 3, 2)])
def test_every_tile_has_one_program_and_the_heavy_ones_of_a_section_come_first(
    shape: tuple[int, int, int], section: int, reverse: bool
) -> None:
    num_tiles, heads, batch = shape
    found = tiles_of_programs(num_tiles, heads, batch, section, reverse)
    assert sorted(found) == sorted(itertools.product(range(num_tiles), range(heads), range(batch)))
    # numbered through, the heads of a section stay together, and its tiles come in order of work
    whole = [b * heads + h for _, h, b in found]
    for start in range(0, heads * batch, section):
        inside = found[start * num_tiles : (start + section) * num_tiles]
        assert {h // section for h in whole[start * num_tiles : (start + section) * num_tiles]} == {
            start // section
        }
        tiles = [tile for tile, _, _ in inside]
        assert tiles == sorted(tiles, reverse=reverse)


@pytest.mark.parametrize("left", [None, 0, 5, 300])
@pytest.mark.parametrize("right", [None, 0, 7])
def test_keys_seen_is_the_average_row(left: int | None, right: int | None) -> None:
    for seq_q, seq_k in ((64, 64), (1024, 1024), (100, 700), (700, 100), (1, 50), (50, 0)):
        seen = 0
        for i in range(seq_q):
            diagonal = i + seq_k - seq_q
            first = 0 if left is None else max(0, diagonal - left)
            last = seq_k - 1 if right is None else min(seq_k - 1, diagonal + right)
            seen += max(0, last - first + 1)
        exact = seen / seq_q
        guess = keys_seen(seq_q, seq_k, left, right, None)
        assert guess == pytest.approx(exact, rel=0.1, abs=2.0), (seq_q, seq_k)


def test_keys_seen_of_a_packed_batch_are_those_of_a_sequence_of_average_length() -> None:
    offsets = torch.tensor([0, 100, 100, 400], dtype=torch.int32)
    assert keys_seen(402, 402, None, None, offsets) == 134.0
    assert keys_seen(402, 402, None, 0, offsets) == pytest.approx(67.5, abs=1.0)
    nothing = torch.tensor([0], dtype=torch.int32)
    assert keys_seen(0, 0, None, 0, nothing) == 0.0


@pytest.mark.parametrize("seq", [1, 64, 1024, 16384])
@pytest.mark.parametrize("num_heads", [1, 2, 7, 32, 128])
def test_sections_hold_equally_many_heads(seq: int, num_heads: int) -> None:
    others = torch.empty(1, 1, seq, 64, dtype=torch.float16, device=HERE)
    tiles = -(-seq // 64)
    section = heads_together(tiles, num_heads, others, 1, None, 0, None)
    assert 1 <= section <= num_heads
    sections = -(-num_heads // section)
    assert sections * section - num_heads < sections  # none lacks more than one head
    # all tiles are alike without a causal mask, or with a window: then heads come one by one
    assert heads_together(tiles, num_heads, others, 1, None, None, None) == 1
    assert heads_together(tiles, num_heads, others, 1, 100, 0, None) == 1


def test_few_keys_have_tiles_of_their_own() -> None:
    for head_dim, (most, tiles) in SHORT_TABLES["hopper"][2]["forward"].items():
        assert table_entry("sm_90", "forward", head_dim, 2, True, most) == tiles
        assert table_entry("sm_90", "forward", head_dim, 2, True, most + 1) != tiles
        assert table_entry("sm_90", "forward", head_dim, 2, True) != tiles
        assert table_entry("sm_90", "forward", head_dim, 4, True, 1) != tiles
    assert table_entry("sm_80", "forward", 64, 2, False, 1) == table_entry(
        "sm_80", "forward", 64, 2
    )

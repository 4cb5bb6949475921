"""What a launch decides: which tile a program gets, how many heads share the cache, which tiles."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl

from flashcourse.attention.flash_sizes import heads_together, keys_seen, needs_int64
from flashcourse.attention.flash_tiles import count_visits, item_of_visit, locate_tile
from flashcourse.attention.tuning import KERNELS, SHORT_TABLES, Kernel, Tiles, table_entry
from flashcourse.bench.tune import candidates

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


@triton.jit
def write_visits(found, num_items, num_tiles, most, PAIRED: tl.constexpr):
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    for visit in range(count_visits(program, num_programs, num_items, PAIRED)):
        item, there = item_of_visit(visit, program, num_programs, num_items, num_tiles, PAIRED)
        tl.store(found + program * most + visit, tl.where(there, item, -2))


def visits_of_programs(
    programs: int, num_tiles: int, heads: int, paired: bool
) -> list[list[tuple[int, int]]]:
    """(tile, head) of every visit of every program that goes through several tiles."""
    items = num_tiles * heads
    most = 2 * items + 2
    found = torch.full((programs, most), -1, dtype=torch.int32, device=HERE)
    write_visits[(programs,)](found, items, num_tiles, most, paired)
    return [
        [(item % num_tiles, item // num_tiles) for item in row if item >= 0]
        for row in found.tolist()
    ]


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("programs", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (2, 3), (3, 3), (4, 6), (7, 2)])
def test_programs_that_take_several_tiles_take_each_once(
    shape: tuple[int, int], programs: int, paired: bool
) -> None:
    num_tiles, heads = shape
    found = visits_of_programs(programs, num_tiles, heads, paired)
    assert sorted(itertools.chain(*found)) == sorted(
        itertools.product(range(num_tiles), range(heads))
    )


@pytest.mark.parametrize("num_tiles", [4, 6, 10])
def test_a_pair_is_as_much_work_as_every_other(num_tiles: int) -> None:
    (visits,) = visits_of_programs(1, num_tiles, 3, True)
    for (first, head), (second, other) in zip(visits[::2], visits[1::2], strict=True):
        assert head == other
        assert first + second == num_tiles - 1  # tile t of a causal mask sees t + 1 tiles of keys
        assert first > second
    (unpaired,) = visits_of_programs(1, num_tiles, 3, False)
    assert unpaired[0][0] + unpaired[1][0] != num_tiles - 1


def test_offsets_are_int64_where_the_kernel_counts_that_far() -> None:
    def tensor(tokens: int, stride_n: int, stride_d: int = 1) -> torch.Tensor:
        return torch.empty(1, 1, tokens, 64, device="meta").as_strided(
            (1, 1, tokens, 64), (0, 0, stride_n, stride_d)
        )

    in_triton, in_gluon = Tiles(64, 128, 4, 2), Tiles(64, 128, 4, 2, True, None, True)
    dense, long = tensor(70_000, 64), tensor(70_000, 2**15)
    assert not needs_int64(in_triton, dense)
    assert not needs_int64(in_gluon, dense)
    assert not needs_int64(in_triton, long)  # of one tile they fit
    assert needs_int64(in_gluon, long)
    assert needs_int64(in_gluon, dense, long)
    assert needs_int64(in_triton, tensor(5, 2**25))
    assert needs_int64(in_gluon, tensor(5, 2**25))
    assert needs_int64(in_triton, tensor(5, 1, 2**26))


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


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_search_tries_every_entry_that_is_said_to_be_measured(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)  # AMD has no limits of registers
    for head_dim in (64, 128):
        tried = {candidate.tiles for candidate in candidates(kernel, head_dim, "float16", True)}
        for gluon, keys in ((False, None), (True, None), (True, 1)):
            assert table_entry("sm_90", kernel, head_dim, 2, gluon, keys) in tried
        assert Tiles(16, 16, 4, 2) not in tried

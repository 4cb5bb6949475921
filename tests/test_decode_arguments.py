"""What the decode functions refuse, and how they are cut into programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_cases import DecodeCase, inputs_of

from flashcourse.attention import flash_decode, paged_attention
from flashcourse.attention.arguments import HALF_AND_SINGLE
from flashcourse.attention.decode_arguments import check_decode, check_paged
from flashcourse.attention.decode_tuning import (
    DECODE_TABLES,
    LONG,
    LONG_ROWS,
    LONG_TABLES,
    choose_splits,
    decode_entry,
    is_long,
    tiles_of_entry,
)
from flashcourse.attention.tuning import BUCKETS, CHIPS


@pytest.mark.needs_triton
def test_gradients_are_refused_and_not_lost() -> None:
    inputs = inputs_of(DecodeCase(lengths=(20,)), "cuda" if torch.cuda.is_available() else "cpu")
    q, k, v, lengths = inputs.contiguous
    with pytest.raises(ValueError, match=r"flash_decode computes no gradient, and q requires one"):
        flash_decode(q.detach().requires_grad_(), k, v, lengths)
    _, k, v, table, _ = inputs.paged
    leaves = (k.detach().requires_grad_(), v.detach().requires_grad_())
    with pytest.raises(ValueError, match=r"paged_attention .* k_pages and v_pages require one"):
        paged_attention(q, *leaves, table, lengths)
    with torch.no_grad():
        assert not paged_attention(q, *leaves, table, lengths).requires_grad


def wrong_calls() -> list[tuple[str, type[Exception], Any]]:
    inputs = inputs_of(DecodeCase(lengths=(20, 8), page_size=4, slack=0))
    q, k, v, lengths = inputs.contiguous
    _, kp, vp, table, _ = inputs.paged
    used = table.clone()
    used[1, 1] = -1

    def decode(*arguments: Any, **options: Any) -> Any:
        return lambda: flash_decode(*arguments, **options)

    def paged(*arguments: Any, **options: Any) -> Any:
        return lambda: paged_attention(*arguments, **options)

    return [
        ("q must be a torch.Tensor, got list", TypeError, decode([1], k, v, lengths)),
        ("q has dtype float64; allowed", TypeError, decode(q.double(), k, v, lengths)),
        ("k_cache must have 4 dimensions", ValueError, decode(q, k[0], v, lengths)),
        ("must agree in dtype", ValueError, decode(q, k.half(), v, lengths)),
        ("must agree in batch size", ValueError, decode(q[:1], k, v, lengths[:1])),
        ("must agree in capacity", ValueError, decode(q, k[:, :, 1:], v, lengths)),
        ("must agree in head_dim", ValueError, decode(q[..., 1:], k, v, lengths)),
        ("positive multiple", ValueError, decode(q[:, :1], k, v, lengths)),
        ("at least one query", ValueError, decode(q[:, :, :0], k, v, lengths)),
        ("cache_seqlens has dtype int64", TypeError, decode(q, k, v, lengths.long())),
        ("cache_seqlens must have shape", ValueError, decode(q, k, v, lengths[:1])),
        (r"cache_seqlens\[0\] is 21; allowed are 0 to 20", ValueError,
         decode(q, k, v, lengths + 1)),
        (r"cache_seqlens\[1\] is -1", ValueError, decode(q, k, v, lengths - 9)),
        ("num_splits must be between", ValueError, decode(q, k, v, lengths, num_splits=0)),
        ("num_splits must be an integer", TypeError, decode(q, k, v, lengths, num_splits=2.0)),
        ("softcap must be positive", ValueError, decode(q, k, v, lengths, softcap=0.0)),
        ("return_lse must be", TypeError, decode(q, k, v, lengths, return_lse=1)),
        ("return_lse must be", TypeError, paged(q, kp, vp, table, lengths, return_lse=None)),
        ("page_size 0", ValueError, paged(q, kp[:, :0], vp[:, :0], table, lengths)),
        ("page_size 257", ValueError, paged(q, kp[:, :1].expand(-1, 257, -1, -1),
                                            vp[:, :1].expand(-1, 257, -1, -1), table, lengths)),
        ("block_table has dtype int64", TypeError, paged(q, kp, vp, table.long(), lengths)),
        ("block_table must have shape", ValueError, paged(q, kp, vp, table[0], lengths)),
        ("must agree in number of pages", ValueError, paged(q, kp[1:], vp, table, lengths)),
        (r"block_table\[1, 1\] is -1, but sequence 1 of length 8", ValueError,
         paged(q, kp, vp, used, lengths)),
        ("allowed are 0 to 16, what block_table", ValueError,
         paged(q, kp, vp, table[:, :4], lengths)),
    ]  # fmt: skip


def test_wrong_arguments_are_named() -> None:
    for message, error, call in wrong_calls():
        with pytest.raises(error, match=message):
            call()


def test_a_call_that_passed_vouches_for_no_other() -> None:
    """Off the CPU, checks are remembered by shapes, dtypes and devices; meta needs no GPU."""
    q = torch.empty(2, 4, 1, 8, device="meta")
    k = torch.empty(2, 2, 9, 8, device="meta")
    lengths = torch.empty(2, dtype=torch.int32, device="meta")
    pages, table = torch.empty(5, 4, 2, 8, device="meta"), lengths.new_empty(2, 3)
    for _ in range(2):
        check_decode(q, k, k, lengths, HALF_AND_SINGLE)
        check_paged(q, pages, pages, table, lengths, HALF_AND_SINGLE)
        for wrong in ((q[:, :3], k, k, lengths), (q, k, k[:, :, 1:], lengths),
                      (q, k, k, lengths[:1]), (q, k, k.half(), lengths)):  # fmt: skip
            with pytest.raises(ValueError, match=r"must|multiple"):
                check_decode(*wrong, HALF_AND_SINGLE)
        with pytest.raises(ValueError, match="block_table must have shape"):
            check_paged(q, pages, pages, table[:1], lengths, HALF_AND_SINGLE)
        with pytest.raises(TypeError, match="q has dtype float64"):
            check_decode(q.double(), k.double(), k.double(), lengths, HALF_AND_SINGLE)


def test_splits_are_chosen_to_fill_the_gpu() -> None:
    assert choose_splits(512, 1, 64, 132)[0] == 1  # one tile cannot be split
    assert choose_splits(10**6, 64, 64, 132)[0] == 1  # full anyway
    alone = choose_splits(8, 2048, 64, 132)[0]  # one sequence of 128k, 8 KV heads
    assert alone >= 16
    assert alone * 8 <= 2 * 264
    assert choose_splits(8, 16, 64, 132)[0] > 1
    assert choose_splits(320, 128, 64, 132)[0] > 1  # 1.2 waves would cost 2
    assert choose_splits(10**6, 2048, 64, 132)[0] == 2  # 64k keys each at most
    assert choose_splits(64, 64, 128, 132, 1)[0] == 2  # 128 programs on 132 places
    for table in DECODE_TABLES.values():
        for entries in table.values():
            assert len(entries) == len(BUCKETS)
            for rows, keys, _, _ in entries:
                assert min(rows, keys) >= 16
                assert rows & (rows - 1) == keys & (keys - 1) == 0
    assert {chip.table for chip in CHIPS.values()} == set(DECODE_TABLES)
    tiles = [tiles_of_entry((64, 32, 4, 3), rows, False) for rows in (1, 16, 17, 33, 900)]
    assert [one.block_q for one in tiles] == [16, 16, 32, 64, 64]


def test_the_tiles_of_long_caches_are_for_few_rows() -> None:
    assert is_long(4, False, LONG)
    assert not is_long(LONG_ROWS + 1, False, LONG)
    assert not is_long(4, True, LONG)
    assert not is_long(4, False, LONG - 1)
    assert is_long(4, False, 1, alone=True)
    assert not is_long(4, True, 1, alone=True)
    ordinary = decode_entry("sm_90", 128, 2)
    assert decode_entry("sm_90", 128, 2, True) != ordinary
    assert decode_entry("sm_80", 128, 2, True) == decode_entry("sm_80", 128, 2)  # has none
    for table in LONG_TABLES.values():
        for entries in table.values():
            assert all(rows <= LONG_ROWS for rows, *_ in entries.values())

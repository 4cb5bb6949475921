"""The formulas against counting one element at a time, and the numbers of published sources."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashcourse.measure import (
    CHIPS,
    arithmetic_intensity,
    attainable_flops,
    attention_flops,
    attention_traffic,
    io_bound,
    ridge_point,
    roofline_seconds,
    visible_pairs,
)

sizes = st.integers(1, 40)


def mask(seq_q: int, seq_k: int, is_causal: bool) -> torch.Tensor:
    everything = torch.ones(seq_q, seq_k, dtype=torch.bool)
    return everything.tril(seq_k - seq_q) if is_causal else everything


@settings(max_examples=200, deadline=None)
@given(sizes, sizes, st.booleans())
def test_visible_pairs_are_those_of_the_mask(seq_q: int, seq_k: int, is_causal: bool) -> None:
    assert visible_pairs(seq_q, seq_k, is_causal) == int(mask(seq_q, seq_k, is_causal).sum())


@settings(max_examples=100, deadline=None)
@given(sizes, sizes, st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_flash_forward_loads_the_tiles_with_a_visible_pair(
    seq_q: int, seq_k: int, block_q: int, block_k: int, is_causal: bool
) -> None:
    visible = mask(seq_q, seq_k, is_causal)
    keys = 0
    for i in range(0, seq_q, block_q):
        for j in range(0, seq_k, block_k):
            if visible[i : i + block_q, j : j + block_k].any():
                keys += min(block_k, seq_k - j)
    traffic = attention_traffic(
        2, 3, seq_q, seq_k, 5, 2,
        algorithm="flash", is_causal=is_causal, block_q=block_q, block_k=block_k,
    )  # fmt: skip
    row = 2 * 3 * 5 * 2
    assert traffic.bytes_read == row * (seq_q + 2 * keys)
    assert traffic.bytes_written == row * seq_q


@settings(max_examples=100, deadline=None)
@given(sizes, sizes, st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_flash_backward_loads_the_tiles_with_a_visible_pair(
    seq_q: int, seq_k: int, block_q: int, block_k: int, is_causal: bool
) -> None:
    visible = mask(seq_q, seq_k, is_causal)
    queries = 0
    for j in range(0, seq_k, block_k):
        for i in range(0, seq_q, block_q):
            if visible[i : i + block_q, j : j + block_k].any():
                queries += min(block_q, seq_q - i)
    _, dkdv, _ = attention_traffic(
        1, 4, seq_q, seq_k, 8, 2, heads_kv=2, direction="backward",
        algorithm="flash", is_causal=is_causal, block_q=block_q, block_k=block_k,
    ).passes  # fmt: skip
    keys = 2 * 2 * seq_k * 8 * 2  # k and v of two KV heads
    assert dkdv.bytes_read == keys + 4 * queries * (2 * 8 * 2 + 2 * 4)
    assert dkdv.bytes_written == keys


def test_the_shape_of_the_hardware_measurement() -> None:
    naive = attention_traffic(1, 16, 4096, 4096, 64, 2)
    matrix = 16 * 4096**2 * 2
    passes_over_the_matrix = [p.bytes_moved // matrix for p in naive.passes]
    assert passes_over_the_matrix == [1, 2, 2, 1]
    assert naive.compulsory_bytes == 4 * 16 * 4096 * 64 * 2
    flash = attention_traffic(1, 16, 4096, 4096, 64, 2, algorithm="flash")
    assert flash.compulsory_bytes < flash.bytes_moved < naive.bytes_moved / 5
    assert flash.flops == naive.flops == 4 * 16 * 4096**2 * 64
    assert flash.intensity > 5 * naive.intensity


def test_backward_passes_over_the_matrix_nine_times() -> None:
    naive = attention_traffic(1, 1, 1024, 1024, 1, 2, direction="backward")
    assert round(naive.bytes_moved / (1024**2 * 2)) == 9
    assert naive.flops == 2.5 * attention_traffic(1, 1, 1024, 1024, 1, 2).flops


def test_lse_is_four_bytes_a_row() -> None:
    def written(**options: bool) -> int:
        return attention_traffic(2, 3, 7, 9, 8, 2, algorithm="flash", **options).bytes_written

    assert written(return_lse=True) - written() == 2 * 3 * 7 * 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seq_q": 0}, "seq_q must be 1 or more, got 0"),
        ({"heads_kv": 3}, "heads must be a multiple of heads_kv"),
        ({"algorithm": "fast"}, "'naive' or 'flash'"),
        ({"block_q": -1}, "block_q must be 1 or more"),
    ],
)
def test_wrong_arguments_are_named(change: dict, says: str) -> None:
    right = dict(batch=1, heads=4, seq_q=8, seq_k=8, head_dim=8, itemsize=2)
    with pytest.raises(ValueError, match=says):
        attention_traffic(**(right | change))
    with pytest.raises(TypeError, match="batch must be an integer"):
        attention_traffic(**(right | {"batch": 1.0}))


def test_flops_of_a_tiny_causal_case() -> None:
    assert attention_flops(1, 1, 2, 4, 1, True) == 4 * (3 + 4)
    assert attention_flops(1, 1, 4, 2, 1, True) == 4 * (0 + 0 + 1 + 2)
    assert attention_flops(1, 1, 2, 4, 1, True, direction="backward") == 10 * 7


def test_roofline() -> None:
    assert roofline_seconds(100, 10, 50, 10) == 2.0
    assert roofline_seconds(100, 90, 50, 10) == 9.0
    assert arithmetic_intensity(100, 10) == 10
    assert ridge_point(50, 10) == 5
    assert attainable_flops(2, 50, 10) == 20
    assert attainable_flops(6, 50, 10) == 50
    with pytest.raises(ValueError, match="bandwidth must be a positive number, got 0"):
        roofline_seconds(1, 1, 1, 0)


def test_chips_have_the_published_ridge_points() -> None:
    assert round(CHIPS["A100 80GB SXM"].ridge_point) == 153
    assert round(CHIPS["H100 SXM"].ridge_point) == 295
    assert round(CHIPS["H200 SXM"].ridge_point) == 206
    assert all(chip.source for chip in CHIPS.values())


def test_io_bound_follows_the_theorem() -> None:
    small, large = (io_bound(8192, 64, kib * 1024, 2) for kib in (64, 128))
    assert small.flash_bytes == pytest.approx(2 * large.flash_bytes)  # ~ 1/M
    assert small.naive_bytes == large.naive_bytes == 2 * (8192 * 64 + 8192**2)
    everything_fits = io_bound(256, 64, 10**9, 2)
    assert everything_fits.flash_bytes == 256 * 64 * 2
    with pytest.raises(ValueError, match="at least one row of 64 numbers, 128 bytes, got 100"):
        io_bound(256, 64, 100, 2)

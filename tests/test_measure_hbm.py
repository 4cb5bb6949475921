"""The pretend device memory: every byte is counted once, and there is no way around the meter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashcourse.measure import (
    HBM,
    NotOnChip,
    SramExceeded,
    attention_traffic,
    metered_flash,
    metered_naive,
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_load_counts_what_indexing_returns(data) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    dtype = data.draw(st.sampled_from([torch.float16, torch.float32, torch.float64, torch.int64]))
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    index = tuple(
        data.draw(
            st.one_of(
                st.integers(-size, size - 1),
                st.builds(slice, st.none() | st.integers(0, size), st.none() | st.integers(0, 9)),
            )
        )
        for size in shape[: data.draw(st.integers(0, len(shape)))]
    )
    if data.draw(st.booleans()):
        index = (*index, ...)
    hbm = HBM()
    handle = hbm.put(tensor)
    tile = hbm.load(handle, index)
    assert torch.equal(tile, tensor[index])
    assert hbm.bytes_read == tile.numel() * tensor.element_size()
    assert hbm.bytes_written == 0
    place = hbm.empty(shape, dtype)
    hbm.store(place, index, tile)
    assert hbm.bytes_written == hbm.bytes_read
    assert torch.equal(hbm.read(place)[index], tile)


def test_what_was_not_stored_is_not_a_number() -> None:
    hbm = HBM()
    y = hbm.empty((4,))
    hbm.store(y, slice(0, 2), torch.zeros(2))
    assert torch.isnan(hbm.read(y)).tolist() == [False, False, True, True]
    assert hbm.read(hbm.empty((2,), torch.int32)).tolist() == [2**31 - 1] * 2


def test_the_memory_keeps_copies() -> None:
    hbm = HBM()
    x = torch.ones(3)
    handle = hbm.put(x)
    x.zero_()
    hbm.load(handle).zero_()
    hbm.read(handle).zero_()
    assert hbm.read(handle).tolist() == [1, 1, 1]


def test_store_counts_in_the_dtype_of_the_array() -> None:
    hbm = HBM()
    half = hbm.empty((8,), torch.float16)
    hbm.store(half, ..., torch.ones(8))
    assert hbm.bytes_written == 16


@pytest.mark.parametrize("index", [7, -8, (0, 0), slice(9, 12), (..., ...), slice(0, 4, -1)])
def test_an_index_outside_is_an_error(index: object) -> None:
    hbm = HBM()
    x = hbm.put(torch.ones(7), name="x")
    with pytest.raises(IndexError, match="x"):
        hbm.load(x, index)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="integers, slices"):
        hbm.load(x, torch.tensor([0, 1]))  # type: ignore[arg-type]
    assert hbm.bytes_moved == 0


def test_store_broadcasts_nothing() -> None:
    hbm = HBM()
    y = hbm.empty((4, 2), name="y")
    with pytest.raises(ValueError, match=r"place in y has shape \(4, 2\), the tile has \(2,\)"):
        hbm.store(y, ..., torch.ones(2))
    with pytest.raises(TypeError, match="writes a tensor, got float"):
        hbm.store(y, (0, 0), 1.0)  # type: ignore[arg-type]
    assert hbm.bytes_written == 0


def test_a_handle_has_no_values() -> None:
    hbm = HBM()
    x = hbm.put(torch.ones(3), name="x")
    for misuse in (
        lambda: x + 1,
        lambda: x @ x,
        lambda: x[0],
        lambda: torch.exp(x),
        lambda: list(x),
    ):
        with pytest.raises(TypeError, match=r"hbm\.load\(x, index\)"):
            misuse()
    assert not any(isinstance(value, torch.Tensor) for value in vars(x).values())
    assert (x.shape, x.ndim, x.nbytes, len(x)) == ((3,), 1, 12, 3)


def test_a_handle_belongs_to_one_memory() -> None:
    with pytest.raises(ValueError, match="another HBM"):
        HBM().load(HBM().put(torch.ones(1)))
    with pytest.raises(TypeError, match="expected a handle"):
        HBM().load(torch.ones(1))  # type: ignore[arg-type]


def test_sections_split_the_count() -> None:
    hbm = HBM()
    x = hbm.put(torch.ones(4))
    with hbm.section("first"):
        hbm.load(x)
        with hbm.section("inner") as inner:
            hbm.load(x, 0)
    hbm.load(x, slice(0, 2))
    assert [(s.name, s.bytes_read) for s in hbm.sections] == [
        ("first", 16),
        ("inner", 4),
        ("outside any section", 8),
    ]
    assert inner.bytes_moved == 4
    assert hbm.bytes_moved == 28
    assert "together" in hbm.report()
    hbm.reset()
    assert hbm.bytes_moved == 0


# The chip


def launch(kernel, sram_bytes: int | None = 1024, **tensors: torch.Tensor) -> HBM:
    hbm = HBM(sram_bytes)
    hbm.launch(kernel, *(hbm.put(tensor, name) for name, tensor in tensors.items()))
    return hbm


def test_peak_counts_tensors_while_they_live_and_views_once() -> None:
    def kernel(hbm: HBM, x: object) -> None:
        a = hbm.load(x)  # 400 bytes  # type: ignore[arg-type]
        b = a.reshape(10, 10).T  # a view
        c = a * 2  # 800
        del a, b
        c = c + 1  # 800: the old c is alive until the new one is there
        c.add_(1)

    assert launch(kernel, x=torch.ones(100)).sram_peak == 800


def test_a_tile_that_is_too_large_is_named() -> None:
    def loads(hbm: HBM, s: object) -> None:
        hbm.load(s)  # type: ignore[arg-type]

    with pytest.raises(
        SramExceeded, match=r"holds a 8×64 float32 tile: 2\.0 KiB; the chip has 1\.0"
    ):
        launch(loads, s=torch.ones(8, 64))
    with pytest.raises(SramExceeded, match="8×64"):
        launch(lambda hbm: torch.zeros(8, 64))


def test_many_small_tiles_are_too_large_together() -> None:
    def keeps(hbm: HBM, s: object) -> None:
        tiles = [hbm.load(s, row) for row in range(8)]  # type: ignore[arg-type]
        assert tiles

    def lets_go(hbm: HBM, s: object) -> None:
        for row in range(8):
            hbm.load(s, row)  # type: ignore[arg-type]

    s = torch.ones(8, 64)
    with pytest.raises(SramExceeded, match=r"5 tiles at once, 1\.2 KiB in all"):
        launch(keeps, s=s)
    assert launch(lets_go, s=s).sram_peak == 256


def test_a_kernel_cannot_go_around_the_meter() -> None:
    outside = torch.ones(5)
    hbm = HBM(1024)
    x = hbm.put(outside, "x")
    kernels = {
        "neither loaded nor made": lambda hbm: torch.exp(outside),
        "not made in this kernel": lambda hbm: hbm.store(x, ..., outside),
        "returned a tensor": lambda hbm: hbm.load(x),
        "for the world outside": lambda hbm: hbm.read(x),
        "before the launch": lambda hbm: hbm.put(torch.ones(2)),
        "cannot launch another": lambda hbm: hbm.launch(lambda hbm: None),
    }
    for says, kernel in kernels.items():
        with pytest.raises((NotOnChip, RuntimeError, TypeError), match=says):
            hbm.launch(kernel)
    with pytest.raises(TypeError, match="was given a tensor"):
        hbm.launch(lambda hbm, t: None, outside)
    with pytest.raises(RuntimeError, match=r"hbm\.launch"):
        hbm.load(x)
    hbm.launch(lambda hbm: hbm.store(x, ..., torch.tensor(2.0) * hbm.load(x)))  # constants are fine
    assert hbm.read(x).tolist() == [2.0] * 5


def test_sram_bytes_must_be_a_size() -> None:
    with pytest.raises(ValueError, match="sram_bytes"):
        HBM(0)


# Formula and meter agree

SHAPES = [(1, 1), (5, 9), (16, 16), (1, 30), (33, 7)]


def metered(seq_q: int, seq_k: int, dtype: torch.dtype = torch.float32):
    """A fresh memory, handles of q, k and v in it, and attention of them in float64."""
    hbm = HBM()
    q = torch.randn(2, 3, seq_q, 8, dtype=dtype)
    k, v = (torch.randn(2, 3, seq_k, 8, dtype=dtype) for _ in range(2))
    s = q.double() @ k.double().transpose(-2, -1) * 8**-0.5
    return hbm, [hbm.put(t) for t in (q, k, v)], s.softmax(-1) @ v.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("seq_q", "seq_k"), SHAPES)
def test_naive_moves_what_the_formula_says(seq_q: int, seq_k: int, dtype: torch.dtype) -> None:
    hbm, inputs, expected = metered(seq_q, seq_k, dtype)
    out = metered_naive(hbm, *inputs)
    model = attention_traffic(2, 3, seq_q, seq_k, 8, dtype.itemsize)
    assert [(s.name, s.bytes_read, s.bytes_written) for s in hbm.sections] == [
        (p.name, p.bytes_read, p.bytes_written) for p in model.passes
    ]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(hbm.read(out).double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("blocks", [(4, 4), (5, 3), (1, 16), (64, 64)])
@pytest.mark.parametrize(("seq_q", "seq_k"), SHAPES)
def test_flash_moves_what_the_formula_says(seq_q: int, seq_k: int, blocks: tuple) -> None:
    hbm, inputs, expected = metered(seq_q, seq_k)
    out = metered_flash(hbm, *inputs, *blocks)
    model = attention_traffic(
        2, 3, seq_q, seq_k, 8, 4, algorithm="flash", block_q=blocks[0], block_k=blocks[1]
    )
    assert (hbm.bytes_read, hbm.bytes_written) == (model.bytes_read, model.bytes_written)
    torch.testing.assert_close(hbm.read(out).double(), expected, rtol=0, atol=1e-5)


def test_the_chip_of_flash_does_not_grow_with_the_length() -> None:
    def peak(seq: int) -> int:
        hbm, inputs, _ = metered(seq, seq)
        metered_flash(hbm, *inputs, 8, 8)
        return hbm.sram_peak

    assert peak(16) == peak(64)
    hbm, inputs, _ = metered(16, 64)
    metered_naive(hbm, *inputs)
    assert hbm.sram_peak > 3 * peak(64)  # negative control: naive kernels hold whole matrices

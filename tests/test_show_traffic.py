"""The figures of lesson 02 draw what they are given, and nothing else."""

from typing import Any

import pytest

from flashcourse.show.figure import png
from flashcourse.show.roofline import draw_io_bound, draw_roofline
from flashcourse.show.traffic import draw_bytes, draw_time_and_flops


def axes_of(figure: Any) -> Any:
    assert png(figure).startswith(b"\x89PNG")
    (axes,) = figure.axes
    return axes


def test_kernels_stand_on_the_roof() -> None:
    axes = axes_of(draw_roofline(100e12, 1e12, {"slow": 10.0, "fast": 500.0}, "a chip"))
    points = [tuple(line.get_xydata()[0]) for line in axes.lines if len(line.get_xdata()) == 1]
    assert points == [(10.0, pytest.approx(10.0)), (500.0, pytest.approx(100.0))]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == [
        "slow: at most 10 TFLOP/s (10% of the peak)",
        "fast: at most 100 TFLOP/s (100% of the peak)",
    ]
    assert any("ridge: 100" in text.get_text() for text in axes.texts)


def test_no_kernel_is_left_out_and_each_looks_different() -> None:
    kernels = {f"kernel {n}": 2.0**n for n in range(10)}
    axes = axes_of(draw_roofline(100e12, 1e12, kernels, "a chip"))
    points = [line for line in axes.lines if len(line.get_xdata()) == 1]
    assert [line.get_xdata()[0] for line in points] == list(kernels.values())
    assert len({(line.get_color(), line.get_marker()) for line in points}) == len(kernels)


@pytest.mark.parametrize("log", [False, True])
def test_bars_have_the_lengths_given(log: bool) -> None:
    axes = axes_of(draw_bytes(["a", "b"], {"x": [1.0, 2.0], "y": [3.0, 40.0]}, "title", log=log))
    assert [bar.get_width() for bar in axes.patches] == [1.0, 2.0, 3.0, 40.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert axes.get_xscale() == ("log" if log else "linear")


def test_shares_stand_side_by_side() -> None:
    axes = axes_of(draw_time_and_flops(["a", "b"], [0.25, 0.75], [0.9, 0.1], "title"))
    assert [bar.get_width() for bar in axes.patches] == [0.9, 0.1, 0.25, 0.75]


def test_both_bounds_are_drawn_in_mebibytes() -> None:
    figure = draw_io_bound([1, 2, 4], [2**20] * 3, [2**22, 2**21, 2**20], {"chip": 3.0}, "title")
    naive, flash, chip = axes_of(figure).lines
    assert list(naive.get_ydata()) == [1, 1, 1]
    assert list(flash.get_ydata()) == [4, 2, 1]
    assert list(chip.get_xdata()) == [3.0, 3.0]

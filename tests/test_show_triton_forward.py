"""Figures of lesson 04: what they say, and what they refuse."""

from __future__ import annotations

import pytest

from flashcourse.measure.block_table import BlockPoint
from flashcourse.measure.occupancy import occupancy
from flashcourse.show.figure import png
from flashcourse.show.triton_forward import draw_blocks, draw_programs, draw_steps


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


@pytest.mark.parametrize(
    ("elements", "block", "programs", "masked"), [(20, 8, 3, 4), (8, 8, 1, 0), (1, 4, 1, 3)]
)
def test_every_element_has_a_program_and_the_rest_is_masked(elements, block, programs, masked):
    said = texts(draw_programs(elements, block))
    assert said.count("mask") == masked
    assert [t for t in said if t.startswith("program")] == [f"program {p}" for p in range(programs)]
    assert [t for t in said if t.isdigit()] == [str(e) for e in range(elements)]


@pytest.mark.parametrize(("elements", "block"), [(0, 8), (8, 0)])
def test_nothing_to_draw_is_an_error(elements, block):
    with pytest.raises(ValueError, match="must be 1 or more"):
        draw_programs(elements, block)
    with pytest.raises(ValueError, match="rows is empty"):
        draw_steps({}, "title")


def test_steps_are_drawn_with_their_numbers():
    figure = draw_steps(
        {"1 a": {"tflops": 100.4, "ms": 2.0}, "SDPA": {"tflops": 50, "ms": 4}}, "here"
    )
    assert texts(figure) == [" 100  (2.00 ms)", " 50  (4.00 ms)"]
    assert png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("shared", "registers", "spilled", "expected"),
    [
        (96 * 1024, 200, 0, ["96 of 227", "200", "8 of 64\n2 programs", "128"]),
        (0, 255, 40, ["0 of 227", "255\nand 40 bytes spilled", "8 of 64\n2 programs", "128"]),
        (200 * 1024, 100, 0, ["200 of 227", "100", "4 of 64\n1 program", "128"]),
        (256 * 1024, 100, 0, ["256 of 227", "100", "none: it does\nnot launch", "128"]),
    ],
)  # fmt: skip
def test_blocks_say_what_stands_in_the_way(shared, registers, spilled, expected):
    point = BlockPoint(shared, 128, registers, spilled)
    resident = occupancy("sm_90", shared_bytes=shared, registers=registers, threads=128)
    figure = draw_blocks(point, resident, shared_limit=227 * 1024, intensity=128, title="a choice")
    assert texts(figure) == expected


def test_a_long_title_stays_inside_the_figure():
    origin = "recorded on NVIDIA H200 on 2026-11-30 by notebooks/04_triton_forward.ipynb " * 2
    figure = draw_steps({"1 a": {"tflops": 100.4, "ms": 2.0}}, origin)
    figure.canvas.draw()
    titles = [axes.title for axes in figure.axes]
    titles += [axes._left_title for axes in figure.axes]
    for title in titles:
        box = title.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1

"""The figures of benchmarks and of SDPA show what they are given, and refuse what does not fit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashcourse.show.backends import (
    Panel,
    crossover_length,
    draw_benchmark,
    draw_claims,
    draw_crossover,
    draw_masks,
    draw_relative,
)

LENGTHS = [16, 32, 64, 128, 256]


def test_the_crossover_of_two_power_laws_is_where_they_meet() -> None:
    quadratic = [n * n / 10_000 for n in LENGTHS]
    linear = [n / 100 for n in LENGTHS]  # the same at n = 100
    found = crossover_length(LENGTHS, quadratic, linear)
    assert found == pytest.approx(100)
    assert crossover_length(LENGTHS, linear, quadratic) is None  # it loses at the end
    assert crossover_length(LENGTHS, [2.0] * 5, [1.0] * 5) == 16
    assert crossover_length([], [], []) is None


@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)), min_size=5, max_size=5))
def test_after_the_crossover_the_second_one_is_faster(times: list[tuple[float, float]]) -> None:
    first, second = zip(*times, strict=True)
    found = crossover_length(LENGTHS, first, second)
    assert (found is None) == (first[-1] <= second[-1])
    for n, a, b in zip(LENGTHS, first, second, strict=True):
        if found is not None and n > found * (1 + 1e-9):
            assert a > b
    if found is not None and found > LENGTHS[0]:
        before = max(i for i, n in enumerate(LENGTHS) if n <= found * (1 + 1e-9))
        assert first[before] <= second[before] or math.isclose(first[before], second[before])


def test_the_crossover_figure_skips_what_did_not_run() -> None:
    figure = draw_crossover([16, 32], {"a": [1.0, None], "b": [2.0, 3.0]}, 20.0)
    lines = figure.axes[0].lines
    assert [len(line.get_xdata()) for line in lines[:2]] == [1, 2]
    assert "crossover at 20" in [text.get_text() for text in figure.axes[0].texts]
    with pytest.raises(ValueError, match="a: 1 values for 2 lengths"):
        draw_crossover([16, 32], {"a": [1.0]}, None)


@pytest.mark.parametrize("nothing_crosses", [None, 16.0])
def test_where_one_is_faster_everywhere_no_crossover_is_drawn(
    nothing_crosses: float | None,
) -> None:
    figure = draw_crossover([16, 32], {"a": [1.0, 2.0], "b": [2.0, 3.0]}, nothing_crosses)
    assert len(figure.axes[0].lines) == 2
    assert not figure.axes[0].texts


def test_a_panel_for_each_family_and_one_look_for_each_name() -> None:
    panels = [Panel("one", {"a": {1.0: 2.0, 2.0: 3.0}}), Panel("two", {"b": {1.0: 1.0},
              "a": {2.0: 5.0}})]  # fmt: skip
    figure = draw_benchmark(panels, "TFLOP/s", ceiling=9.0)
    assert [ax.get_title(loc="left") or ax.get_title() for ax in figure.axes] == ["one", "two"]
    assert figure.axes[0].get_ylim()[0] == 0
    assert figure.axes[0].get_ylim()[1] > 9  # the ceiling is in sight
    other = draw_benchmark([panels[1]], "TFLOP/s", names=["a", "b"])
    assert other.axes[0].lines[0].get_color() == figure.axes[1].lines[0].get_color()
    assert figure.axes[0].lines[0].get_color() == figure.axes[1].lines[1].get_color()
    assert figure.axes[0].lines[0].get_color() != figure.axes[1].lines[0].get_color()
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_benchmark([], "TFLOP/s")


def test_bars_stand_at_their_values_and_a_missing_one_leaves_a_gap() -> None:
    figure = draw_relative(
        {"forward": {"a": {"x": 1.0, "y": 2.0}, "b": {"y": 0.5}}, "backward": {"b": {"x": 3.0}}},
        "times as fast", "a",
    )  # fmt: skip
    forward, backward = figure.axes
    assert [patch.get_width() for patch in forward.patches] == [1.0, 2.0, 0.5]
    assert [patch.get_width() for patch in backward.patches] == [3.0]
    assert [text.get_text().strip() for text in forward.texts] == ["1.00", "2.00", "0.50"]
    assert [label.get_text() for label in forward.get_yticklabels()] == ["a", "b"]
    first, second = (patch.get_y() + patch.get_height() / 2 for patch in forward.patches[:2])
    assert first < 0 < second  # side by side around their name
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_relative({}, "times as fast", "a")


def test_what_nobody_sees_is_left_white() -> None:
    figure = draw_masks({"a": [[0.0, 1.0], [0.5, 0.5]]})
    shown = figure.axes[0].images[0].get_array()
    assert np.ma.getmaskarray(shown).tolist() == [[True, False], [False, False]]


@pytest.mark.parametrize(("values", "scale"), [((1.0, 5.0), "linear"), ((1.0, 50.0), "log")])
def test_claims_far_apart_are_drawn_on_a_logarithmic_axis(
    values: tuple[float, float], scale: str
) -> None:
    figure = draw_claims(dict(zip("ab", values, strict=True)), right="a", unit="ms")
    assert figure.axes[0].get_xscale() == scale

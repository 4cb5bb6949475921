"""Figures of lesson 07: what they say is what they were given."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from flashcourse.show import packing
from flashcourse.show.figure import png


def test_every_figure_draws():
    figures = [
        packing.draw_batches([5, 2, 9, 1, 4], 2),
        packing.draw_lengths([3, 4, 90, 7], 4),
        packing.draw_waste([1, 2, 4], {"random": [0, 0.2, 0.4], "sorted": [0, 0.1, 0.1]}),
        packing.draw_packed_mask([5, 1, 7], 4),
        packing.draw_losses({"a": [3, 2], "b": [3, 2.1]}),
        packing.draw_speeds([("x", {"a": 1.0, "b": 2.0}), ("y", {"a": 1.0})], "speed", "a"),
        packing.draw_scripts({"English": 3}, {"English": 9}),
    ]
    for figure in figures:
        assert isinstance(figure, Figure)
        assert png(figure).startswith(b"\x89PNG")


def test_batches_say_how_much_is_padding():
    top, bottom = packing.draw_batches([4, 2, 3, 3], 2).axes
    assert "14 slots, 14% of them padding" in top.get_title()
    assert "12 slots" in bottom.get_title()


def test_the_packed_mask_counts_tiles_and_hides_neighbours():
    (axes,) = packing.draw_packed_mask([5, 3], 4).axes
    assert axes.get_title() == "4 tiles visited of 4"
    image = np.asarray(axes.images[0].get_array())
    assert (image[5:, :5] == 0).all()
    assert image[4, 0] == image[7, 5] == 2
    assert image[0, 4] == 0  # a tile that no query of its row reaches
    assert image[0, 3] == 1  # visited, and hidden by the mask


def test_speeds_are_relative_to_the_base():
    (axes,) = packing.draw_speeds([("x", {"a": 2.0, "b": 5.0})], "speed", "a").axes
    assert [text.get_text() for text in axes.texts] == [" 1.00", " 2.50"]
    (axes,) = packing.draw_speeds([("x", {"a": 2.0}), ("y", {"a": 2.0, "b": 5.0})], "s", "a").axes
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"a", "b"}


@pytest.mark.parametrize("batch", [1, 3])
def test_one_document_a_batch_has_no_padding(batch):
    top, _ = packing.draw_batches([4] * 6, batch).axes
    assert "0% of them padding" in top.get_title()

"""The pictures of lesson 03: right counts, a picture that follows the step, errors that explain."""

from __future__ import annotations

import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from flashcourse.show.figure import png
from flashcourse.show.online import (
    OnlineStep,
    describe_step,
    draw_online_step,
    draw_online_strip,
)
from flashcourse.show.tiles import MASKED, SKIPPED, WHOLE, draw_peaks, draw_tiles, tile_kinds

SCORES = [0.0, 1.0, 3.0, -2.0, 2.0]
STEPS = [
    OnlineStep(0, 2, m=1.0, l=math.exp(-1) + 1, rescale=0.0, out=[1.0, 0.0]),
    OnlineStep(2, 4, m=3.0, l=1.19, rescale=math.exp(-2), out=[0.2, -0.3]),
    OnlineStep(4, 5, m=3.0, l=1.56, rescale=1.0, out=[0.1, 0.4]),
]


def test_every_step_has_its_own_picture():
    pictures = [png(draw_online_step(SCORES, STEPS, step)) for step in range(len(STEPS) + 1)]
    assert len(set(pictures)) == len(pictures)
    assert png(draw_online_step(SCORES, STEPS, 1)) == pictures[1]  # the same step, the same picture


def test_the_weights_are_relative_to_the_maximum_so_far():
    _, weights, output = draw_online_step(SCORES, STEPS, 2).axes
    heights = [bar.get_height() for bar in weights.patches]
    assert heights == pytest.approx([math.exp(-3), math.exp(-2), 1.0, math.exp(-5), 0.0])
    assert [bar.get_height() for bar in output.patches] == pytest.approx([0.2, -0.3])


def test_a_row_whose_keys_are_all_hidden_draws():
    hidden = [OnlineStep(0, 2, m=float("-inf"), l=0.0, rescale=1.0, out=[0.0])]
    _, weights, _ = draw_online_step([0.0, 0.0], hidden, 1).axes
    assert [bar.get_height() for bar in weights.patches] == [0.0, 0.0]


def test_the_strip_has_a_column_for_each_block():
    figure = draw_online_strip(SCORES, STEPS)
    assert isinstance(figure, Figure)
    titles = [axes.get_title(loc="left") or axes.get_title() for axes in figure.axes]
    assert len(figure.axes) == 3 * len(STEPS)
    assert any("block 3" in title for title in titles)
    assert any("× 0.135" in title for title in titles)


def test_the_state_is_described_in_one_line():
    assert "nothing read yet" in describe_step(STEPS, 0)
    assert "keys 2 to 3" in describe_step(STEPS, 2)
    assert "0.135" in describe_step(STEPS, 2)


@pytest.mark.parametrize("step", [-1, 4])
def test_a_step_that_does_not_exist_is_refused(step):
    with pytest.raises(ValueError, match=f"between 0 and 3.*got {step}"):
        draw_online_step(SCORES, STEPS, step)


def test_a_strip_without_steps_is_refused():
    with pytest.raises(ValueError, match="steps is empty"):
        draw_online_strip(SCORES, [])


def causal(seq_q, seq_k):
    return np.arange(seq_k)[None, :] <= np.arange(seq_q)[:, None] + seq_k - seq_q


@pytest.mark.parametrize(
    ("seq_q", "seq_k", "block_q", "block_k"),
    [(14, 20, 4, 4), (20, 14, 4, 4), (7, 7, 3, 5), (1, 9, 4, 2), (5, 5, 8, 8)],
)
def test_tiles_are_whole_masked_or_skipped(seq_q, seq_k, block_q, block_k):
    visible = causal(seq_q, seq_k)
    rows, columns = -(-seq_q // block_q), -(-seq_k // block_k)

    def tile(i, j):
        return visible[i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]

    visited = [(i, j) for i in range(rows) for j in range(columns) if tile(i, j).any()]
    kinds = tile_kinds(visible, block_q, block_k, visited)
    assert len(kinds) == rows * columns
    for (i, j), kind in kinds.items():
        expected = WHOLE if tile(i, j).all() else MASKED if tile(i, j).any() else SKIPPED
        assert kind == expected
    legend = draw_tiles(visible, block_q, block_k, visited).axes[0].get_legend()
    labels = [text.get_text() for text in legend.texts]
    assert f"skipped: {list(kinds.values()).count(SKIPPED)}" in labels


def test_a_loop_that_skips_a_visible_tile_is_not_drawn():
    with pytest.raises(ValueError, match=r"tile \(1, 1\) was not visited"):
        draw_tiles(causal(8, 8), 4, 4, [(0, 0), (1, 0)])


def test_a_tile_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"do not exist: \[\(2, 0\)\]"):
        tile_kinds(causal(8, 8), 4, 4, [(0, 0), (1, 0), (1, 1), (2, 0)])


@pytest.mark.parametrize(("visible", "block"), [(np.ones(4, bool), 2), (np.ones((4, 4), bool), 0)])
def test_wrong_matrices_and_blocks_are_refused(visible, block):
    with pytest.raises(ValueError):
        tile_kinds(visible, block, block, [])


def test_peaks_are_drawn_in_mebibytes():
    lines = draw_peaks([1024, 2048], [2**23, 2**25], [2**20, 2**20], [2**23, 2**25]).axes[0].lines
    assert list(lines[0].get_ydata()) == [8.0, 32.0]
    assert list(lines[1].get_ydata()) == [1.0, 1.0]

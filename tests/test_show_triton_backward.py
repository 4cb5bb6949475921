"""The pictures of the backward pass: what they draw, and what they refuse to draw."""

import pytest
from matplotlib.figure import Figure

from flashcourse.show.triton_backward import draw_kept, draw_speed, draw_two_loops

# Causal, three blocks of queries and of keys.
NEEDED = {(i, j) for i in range(3) for j in range(i + 1)}
COLUMN = [(1, 1), (2, 1)]  # the dK/dV program of key block 1
ROW = [(1, 0), (1, 1)]  # the dQ program of query block 1


def test_two_loops_numbers_the_visits_in_order():
    figure = draw_two_loops(3, 3, NEEDED, COLUMN, ROW)
    left, right = figure.axes
    assert [(t.get_text(), t.get_position()) for t in left.texts] == [
        ("1", (1.5, 1.5)),
        ("2", (1.5, 2.5)),
    ]
    assert [(t.get_text(), t.get_position()) for t in right.texts] == [
        ("1", (0.5, 1.5)),
        ("2", (1.5, 1.5)),
    ]
    assert len(left.patches) == len(right.patches) == 9


@pytest.mark.parametrize(
    ("column", "row", "message"),
    [
        ([(2, 1)], ROW, r"dkdv_order .* misses \[\(1, 1\)\]"),
        ([(0, 1), *COLUMN], ROW, r"dkdv_order .* has \[\(0, 1\)\] too many"),
        ([(1, 1), (2, 2)], ROW, "dkdv_order must stay in one block of keys"),
        ([*COLUMN, (2, 1)], ROW, "dkdv_order visits a tile twice"),
        (COLUMN, [(1, 0)], r"dq_order .* misses \[\(1, 1\)\]"),
        (COLUMN, [(1, 0), (2, 0)], "dq_order must stay in one block of queries"),
    ],
)
def test_two_loops_refuses_a_loop_that_gives_wrong_gradients(column, row, message):
    with pytest.raises(ValueError, match=message):
        draw_two_loops(3, 3, NEEDED, column, row)


def test_a_program_without_tiles_is_drawn():
    """More queries than keys, causal: the first queries see nothing."""
    assert isinstance(draw_two_loops(2, 1, {(1, 0)}, [(1, 0)], []), Figure)


def test_kept_and_speed_draw_every_series():
    kept = draw_kept([1, 2], {"ours": [2**20, 2**21], "ours, predicted": [2**20, 2**21]})
    lines = kept.axes[0].lines
    assert [list(line.get_ydata()) for line in lines] == [[1, 2], [1, 2]]
    assert [line.get_linestyle() for line in lines] == ["None", "--"]
    speed = draw_speed([1, 2], {"ours": [0.5, 0.8], "flash": [1.0, 1.0], "cudnn": [None, 1.5]})
    assert [bar.get_height() for bar in speed.axes[0].patches] == [0.5, 0.8, 1.0, 1.0, 0.0, 1.5]


@pytest.mark.parametrize("draw", [draw_kept, draw_speed])
def test_a_series_of_another_length_is_named(draw):
    with pytest.raises(ValueError, match="ours: 1 values for 2 lengths"):
        draw([1, 2], {"ours": [1.0]})

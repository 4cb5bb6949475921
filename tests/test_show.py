"""The figures of lessons 00 and 01; alt text, palette and widgets on the screen."""

from __future__ import annotations

import base64
import re
from collections import defaultdict
from pathlib import Path

import ipywidgets as widgets
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, Patch
from matplotlib.text import Text

from flashcourse.grading import all_questions
from flashcourse.show import explore, figure, new_figure, show_figure, style
from flashcourse.show.course_map import LESSONS, draw_course_map
from flashcourse.show.figure import WIDGET_VIEW, png
from flashcourse.show.masks import draw_head_maps, draw_masks, draw_matrices
from flashcourse.show.memory_growth import draw_memory_growth
from flashcourse.show.precision import draw_errors, draw_exp_ranges

ROOT = Path(__file__).parent.parent
NAN, INF = float("nan"), float("inf")
PALETTE = {
    to_hex(value).lower()
    for name, value in vars(style).items()
    if name.isupper() and isinstance(value, str) and value.startswith("#")
} | {"#ffffff"}


def causal(seq_q, seq_k):
    return np.arange(seq_k)[None, :] <= np.arange(seq_q)[:, None] + seq_k - seq_q


def grown():
    return draw_memory_growth([1, 2, 4], [2**20, 2**22, 2**24], {1: 2**20, 2: 2**22}, 2**23, [4])


FIGURES = {
    "masks": lambda: draw_masks([causal(3, 5), causal(5, 3)], ["a", "b"]),
    "matrices": lambda: draw_matrices([np.eye(3), np.array([[1.5, -INF], [NAN, 0.0]])], ["s", "p"]),
    "heads": lambda: draw_head_maps([[0, 0, 1, 1], [0, 1, 0, 1]], ["right", "wrong"]),
    "errors": lambda: draw_errors([1, 10], {"a": [1e-3, NAN], "b": [0.0, 1e-4]}, "scale"),
    "exp": lambda: draw_exp_ranges({"float16": 65504.0, "float32": 3.4e38}),
    "memory": grown,
    "map": draw_course_map,
}


def texts(shown):
    return [t.get_text() for t in shown.findobj(Text) if t.get_text()]


# Every figure ---------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES)
def test_figures_are_figures_and_draw_the_same_every_time(draw):
    first = draw()
    assert isinstance(first, Figure)
    picture = png(first)
    assert picture.startswith(b"\x89PNG")
    assert picture == png(draw())


@pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES)
def test_figures_use_the_palette(draw):
    shown = draw()
    shown.draw_without_rendering()
    used = {
        to_hex(colour).lower()
        for artist in shown.findobj(lambda a: isinstance(a, (Line2D, Patch)) and a.get_visible())
        for colour in (
            [artist.get_color()]
            if isinstance(artist, Line2D)
            else [artist.get_facecolor(), artist.get_edgecolor()]
        )
    }
    # The legend's frame is matplotlib's own; it is faint and carries nothing.
    assert used - PALETTE - {"#cccccc"} == set()


def test_the_palette_can_be_told_apart():
    def channels(colour):
        return np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])

    marks = sorted(PALETTE - {"#ffffff"})
    for i, a in enumerate(marks):
        for b in marks[i + 1 :]:
            assert np.abs(channels(a) - channels(b)).max() > 0.15, (a, b)


# What they show -------------------------------------------------------------------------------


@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 1), (3, 7), (7, 3), (5, 5), (1, 9)])
def test_a_mask_is_drawn_cell_by_cell(seq_q, seq_k):
    mask = causal(seq_q, seq_k)
    shown = draw_masks([mask, ~mask], ["mask", "opposite"])
    images = [axis.images[0].get_array() for axis in shown.axes]
    assert np.array_equal(images[0], mask)
    assert np.array_equal(images[1], ~mask)
    assert texts(shown.axes[0]).count("sees no key") == max(0, seq_q - seq_k)


@pytest.mark.parametrize(
    ("masks", "titles", "words"),
    [
        ([np.ones((2, 2))], ["a"], "bool matrix.*float64"),
        ([np.ones(3, dtype=bool)], ["a"], r"shape \(3,\)"),
        ([np.ones((2, 2), dtype=bool)], [], "1 masks, 0 titles"),
        ([], [], "0 masks"),
    ],
)
def test_what_is_no_mask_is_refused(masks, titles, words):
    with pytest.raises(ValueError, match=words):
        draw_masks(masks, titles)


def test_matrices_show_their_numbers():
    shown = texts(draw_matrices([np.array([[1.234, -INF], [NAN, -0.5]])], ["s"]))
    assert {"1.23", "−∞", "nan", "−0.50", "s"} <= set(shown)


def test_head_maps_connect_what_they_say():
    right, wrong = draw_head_maps([[0, 0, 1, 1], [0, 1, 0, 1]], ["right", "wrong"]).axes
    for axis, heads in ((right, [0, 0, 1, 1]), (wrong, [0, 1, 0, 1])):
        lines = [line for line in axis.lines if len(line.get_xdata()) == 2]
        ends = defaultdict(set)
        for line in lines:
            ends[line.get_xdata()[1]].add(int(line.get_xdata()[0]))
        joined = [ends[x] for x in sorted(ends)]
        assert joined == [{h for h, kv in enumerate(heads) if kv == n} for n in (0, 1)]


def test_errors_mark_nan_with_crosses():
    axis = draw_errors([1, 10, 100], {"a": [1e-3, NAN, INF], "b": [1, 2, 3]}, "scale").axes[0]
    crosses = [line for line in axis.lines if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in crosses] == [[10, 100]]
    assert "× NaN or infinity" in texts(axis)
    clean = draw_errors([1, 10], {"a": [1e-3, 1e-2]}, "scale").axes[0]
    assert "× NaN or infinity" not in texts(clean)
    with pytest.raises(ValueError, match="b has 1 errors for 2 values of scale"):
        draw_errors([1, 2], {"a": [1, 2], "b": [1]}, "scale")


def test_exp_ranges_are_logarithms():
    axis = draw_exp_ranges({"float16": 65504.0, "float32": 3.4028e38}).axes[0]
    assert [bar.get_width() for bar in axis.patches] == pytest.approx([11.09, 88.72], abs=0.01)


def test_memory_growth_shows_measured_and_failed():
    lines = {line.get_label(): line for line in grown().axes[0].lines}
    assert list(lines["measured"].get_ydata()) == [1, 4]
    assert list(lines["out of memory"].get_xdata()) == [4]
    assert list(lines["predicted (N²)"].get_ydata()) == [1, 4, 16]


def test_the_map_is_the_course():
    names = [lesson.name for lesson in LESSONS]
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} <= set(names)
    assert [name[:2] for name in names] == [f"{n:02}" for n in range(len(names))]
    points = defaultdict(float)
    for question in all_questions().values():
        points[re.match(r"lab(\d+)", question.id)[1]] += question.points
    promised = {
        number: float(total)
        for lesson in LESSONS
        for number, total in re.findall(r"lab (\d+) · (\d+) points", lesson.lab or "")
    }
    assert sum(promised.values()) == 100
    assert {number: promised[number] for number in points} == dict(points)


def test_the_map_fills_what_is_here():
    def filled(here):
        boxes = draw_course_map(here).axes[0].findobj(FancyBboxPatch)
        return sum(to_hex(box.get_facecolor()) != "#ffffff" for box in boxes)

    boxes = len(LESSONS) + sum(lesson.lab is not None for lesson in LESSONS)
    legend = 1  # its frame
    assert filled(None) - filled(()) == boxes
    assert filled({"00_start_here", "01_naive_attention"}) - filled(()) == 2
    assert filled({"01_naive_attention", "lab1_attention"}) - filled(()) == 2
    assert filled(()) <= legend
    assert "filled: in this folder" in texts(draw_course_map({"00_start_here"}))
    assert "filled: in this folder" not in texts(draw_course_map())


# On the screen --------------------------------------------------------------------------------


@pytest.fixture
def displayed(monkeypatch):
    """What would have been displayed, as (data, metadata)."""
    shown = []
    monkeypatch.setattr(
        figure, "display", lambda data, raw, metadata=None: shown.append((data, metadata))
    )
    return shown


def curve(height=1.0):
    shown, axis = new_figure(2, 1)
    axis.plot([0, 1], [0, height], color=style.BLUE)
    axis.set_ylim(0, 4)
    return shown


def test_a_figure_carries_its_alt_text(displayed):
    show_figure(curve(), alt="A line that rises to 1.")
    data, metadata = displayed[0]
    assert base64.b64decode(data["image/png"]) == png(curve())
    assert data["text/plain"] == "A line that rises to 1."
    assert metadata["image/png"]["alt"] == "A line that rises to 1."


def test_a_figure_says_in_words_what_it_shows(displayed):
    """JupyterLab shows an image without its alt text, so the words follow as text."""
    show_figure(curve(), alt="x < 1 & it rises")
    words, _ = displayed[1]
    assert "<details>" in words["text/html"]
    assert "x &lt; 1 &amp; it rises" in words["text/html"]
    assert "image/png" not in words


@pytest.mark.parametrize("alt", ["", "  \n"])
def test_no_figure_without_alt_text(displayed, alt):
    with pytest.raises(ValueError, match="alt must say what the figure shows"):
        show_figure(curve(), alt=alt)
    with pytest.raises(ValueError, match="alt must say"):
        explore(curve, alt, height=widgets.FloatSlider(1.0))
    with pytest.raises(TypeError):
        show_figure(curve())
    assert displayed == []


def test_moving_a_control_changes_the_picture(displayed):
    height = widgets.FloatSlider(1.0, min=0, max=4)
    box = explore(curve, 'A line to "1".', height=height)
    picture = box.children[0]

    def drawn():
        return base64.b64decode(re.search(r"base64,([^\"]+)", picture.value)[1])

    data, _ = displayed[0]
    assert {"image/png", "text/plain", WIDGET_VIEW} <= set(data)
    assert base64.b64decode(data["image/png"]) == drawn() == png(curve(1.0))
    assert 'alt="A line to &quot;1&quot;."' in picture.value
    height.value = 3.0
    assert drawn() == png(curve(3.0)) != png(curve(1.0))
    height.value = 1.0
    assert drawn() == png(curve(1.0))
    # The picture is replaced: below it are its words, and nothing more.
    assert ["details" in data.get("text/html", "") for data, _ in displayed] == [False, True]


def test_every_control_of_a_mask_matters(displayed):
    def draw(seq_q, seq_k, left):
        offset = np.arange(seq_k)[None, :] - (np.arange(seq_q)[:, None] + seq_k - seq_q)
        return draw_masks([(offset <= 0) & (offset >= -left)], ["causal, windowed"])

    controls = {
        "seq_q": widgets.IntSlider(4, 1, 8),
        "seq_k": widgets.IntSlider(6, 1, 8),
        "left": widgets.IntSlider(1, 0, 8),
    }
    picture = explore(draw, "A mask.", **controls).children[0]
    seen = {picture.value}
    for control in controls.values():
        control.value += 1
        seen.add(picture.value)
    assert len(seen) == 4

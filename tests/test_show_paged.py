"""Figures of lesson 09, and the story they draw."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from serving_cases import contiguous, paged

from flashcourse.serving.story import PageStory
from flashcourse.show import paged as show
from flashcourse.show.figure import png

WORDS = ["you", "are", "a", "kind", "and", "helpful"]
SERVED = {
    "contiguous": {"tokens/s": 10.0, "at once": 4},
    "paged": {"tokens/s": 30.0, "at once": 12},
}


def told():
    story = PageStory(num_pages=7, page_size=4)
    story.begin("A", WORDS)
    story.fork("A", "B")
    story.write("B", "poet")
    story.write("A", "cook", "of", "soup")
    story.begin("C", [*WORDS[:4], "judge"])
    story.free("A")
    story.begin("D", [*WORDS, "cook", "of", "tea"])
    return story.scenes


def read(scene, name):
    """A sequence's words, through its table."""
    words = [word for page in scene.tables[name] for word in scene.words[page]]
    return " ".join(words[: scene.lengths[name]])


def test_every_figure_draws():
    columns = [np.zeros(16, dtype=int), np.ones(16, dtype=int)]
    figures = [
        show.draw_memory_over_time({"contiguous": columns, "paged": columns[:1]}),
        show.draw_memory_now(columns[1], 5, "now"),
        show.draw_lengths([(3, 4), (9, 9)], 64),
        show.draw_block_table([4, 1, 6], 10, 4, 8),
        show.draw_page_waste([1, 2, 4], {"a": [0, 0.1, 0.2]}),
        show.draw_scene(told()[2]),
        show.draw_story(told()),
        show.draw_running({"contiguous": [[0, 1, 2], [1, 1, 1]], "paged": [[0, 3, 0]]}),
        show.draw_service(SERVED),
        show.draw_indirection({"contiguous": 2.0, "1": 3.0, "16": 2.1}),
    ]
    for figure in figures:
        assert isinstance(figure, Figure)
        assert png(figure).startswith(b"\x89PNG")


def test_a_column_says_who_has_what():
    cache = paged(tokens=16, page_size=4)
    sequence = cache.begin([1])
    cache.extend(sequence, 6)
    cache.publish(sequence, [1, 2, 3, 4, 5, 6])
    column = show.memory_column(cache.regions(), cache.capacity)
    assert sorted(column) == [show.FREE] * 8 + [show.EMPTY] * 2 + [show.FIRST] * 6
    cache.free(sequence)
    column = show.memory_column(cache.regions(), cache.capacity)
    assert sorted(column) == [show.FREE] * 12 + [show.KEPT] * 4
    rows = contiguous(tokens=16, longest=8)
    rows.extend(rows.begin([1]), 3)
    column = show.memory_column(rows.regions(), rows.capacity)
    assert column.tolist() == [show.FIRST] * 3 + [show.EMPTY] * 5 + [show.FREE] * 8


def test_the_map_counts_what_holds_nothing():
    column = np.array([show.FIRST, show.EMPTY, show.EMPTY, show.EMPTY, show.FREE, show.KEPT])
    (axes,) = show.draw_memory_over_time({"contiguous": [column, column]}).axes
    assert axes.get_title().splitlines() == [
        "contiguous: 2 steps",
        "75% of the reserved holds nothing",
    ]


def test_bars_are_relative_to_the_contiguous_kernel():
    (axes,) = show.draw_indirection({"contiguous": 2.0, "1": 3.0, "16": 2.1}).axes
    assert [text.get_text() for text in axes.texts] == ["1.50", "1.05"]


def test_everybody_in_the_story_reads_his_own_words():
    scenes = told()
    assert read(scenes[1], "B") == "you are a kind and helpful"
    assert read(scenes[3], "A") == "you are a kind and helpful cook of soup"
    assert read(scenes[3], "B") == "you are a kind and helpful poet"
    assert read(scenes[-1], "D") == "you are a kind and helpful cook of tea"


def test_the_story_shows_sharing_copying_and_finding():
    scenes = told()
    assert scenes[1].references[:2] == (2, 2)
    assert not scenes[1].changed  # a fork writes nothing
    assert "shared, so it is copied" in scenes[2].caption
    assert scenes[2].references[:3] == (2, 1, 1)
    assert "1 of its pages found" in scenes[4].caption
    assert len(scenes[5].kept) == 1
    assert "2 of its pages found" in scenes[6].caption
    assert not scenes[6].kept

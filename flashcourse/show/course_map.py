"""The map of the course: the lessons in reading order, and the lab that goes with each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch

from flashcourse.show.style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, new_figure


@dataclass(frozen=True)
class Lesson:
    """A row of the map, and the lab that goes with it."""

    name: str
    question: str
    part: str
    lab: str | None = None


PARTS = {
    "the idea": BLUE,
    "the kernel": ORANGE,
    "in training": GREEN,
    "in serving": PURPLE,
}

LESSONS = (
    Lesson("00_start_here", "What can I run here?", "the idea"),
    Lesson(
        "01_naive_attention",
        "What does attention compute and keep?",
        "the idea",
        "lab 1 · 10 points",
    ),
    Lesson(
        "02_memory_traffic",
        "Why is a softmax slow where a product is fast?",
        "the idea",
        "lab 2 · 15 points",
    ),
    Lesson(
        "03_online_softmax",
        "How to normalise a row before it is seen?",
        "the idea",
        "lab 3 · 15 points",
    ),
    Lesson(
        "04_triton_forward",
        "How does the loop become a GPU kernel?",
        "the kernel",
        "lab 4 · 20 points",
    ),
    Lesson(
        "05_triton_backward",
        "Gradients without the stored matrix?",
        "the kernel",
        "lab 5 · 20 points",
    ),
    Lesson("06_sdpa_backends", "Is PyTorch already doing this?", "the kernel"),
    Lesson("07_packing", "What does padding cost in training?", "in training", "lab 6 · 10 points"),
    Lesson("08_kv_cache", "Why is decoding slow?", "in serving"),
    Lesson("09_paged_attention", "What does a page table buy?", "in serving", "lab 7 · 10 points"),
    Lesson("10_does_it_matter", "When do users notice?", "in serving"),
)


def draw_course_map(
    here: Collection[str] | None = None, lessons: tuple[Lesson, ...] = LESSONS
) -> Figure:
    """Lessons from top to bottom with their labs beside them.

    Args:
        here: names of the lessons and labs that this copy of the course contains; they are
            filled, the others outlined. None: all.
        lessons: the rows.
    """
    figure, axis = new_figure(8.4, 0.42 * len(lessons) + 0.7)
    for row, lesson in enumerate(lessons):
        colour = PARTS[lesson.part]
        filled = here is None or lesson.name in here
        text = _on(colour) if filled else colour
        _box(axis, 0.0, row, 2.6, lesson.name, colour, filled, text)
        axis.text(2.75, row, lesson.question, va="center", color=BLACK if filled else GREY)
        if row + 1 < len(lessons):
            axis.annotate(
                "",
                (0.25, row + 0.68),
                (0.25, row + 0.32),
                arrowprops={"arrowstyle": "-|>", "color": GREY},
            )
        if lesson.lab:
            axis.annotate(
                "", (7.0, row), (6.5, row), arrowprops={"arrowstyle": "->", "color": GREY}
            )
            number = lesson.lab.split()[1]
            filled = here is None or any(name.startswith(f"lab{number}_") for name in here)
            text = _on(colour) if filled else colour
            _box(axis, 7.05, row, 1.75, lesson.lab, colour, filled, text)
    patches = [Patch(color=colour, label=part) for part, colour in PARTS.items()]
    axis.legend(handles=patches, loc="upper left", bbox_to_anchor=(0, 0), ncols=len(PARTS))
    axis.set_xlim(-0.1, 8.9)
    axis.set_ylim(len(lessons) - 0.5, -0.55)
    if here is not None and any(lesson.name not in here for lesson in lessons):
        axis.set_title("filled: in this folder", fontsize=9, color=GREY)
    axis.set_axis_off()
    return figure


def _box(
    axis: Axes, x: float, row: int, width: float, text: str, edge: str, filled: bool, colour: str
) -> None:
    axis.add_patch(
        FancyBboxPatch(
            (x, row - 0.3),
            width,
            0.6,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor=edge if filled else "white",
            edgecolor=edge,
        )
    )
    axis.text(x + width / 2, row, text, ha="center", va="center", color=colour, fontsize=9)


def _on(colour: str) -> str:
    """A text colour that can be read on a box of this colour."""
    return BLACK if colour == ORANGE else "white"

"""Figures and widgets. Nothing here computes: it draws what it is given."""

from flashcourse.show.figure import explore, show_figure
from flashcourse.show.style import new_figure

__all__ = ["explore", "new_figure", "show_figure"]

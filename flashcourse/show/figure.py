"""Putting figures on the screen of a notebook, always with a text for those who cannot see them."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable
from io import BytesIO
from typing import Any

from IPython.display import display
from matplotlib.figure import Figure

DOTS_PER_INCH = 100
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def png(figure: Figure) -> bytes:
    """The figure as a PNG at screen size."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return buffer.getvalue()


def show_figure(figure: Figure, alt: str) -> None:
    """Display a figure in a notebook, and under it what it says, folded.

    JupyterLab hands an image's alt text to no screen reader, so the words are an output as well.

    Args:
        figure: made with :func:`flashcourse.show.new_figure`.
        alt: what the figure says, for a reader who does not see it.
    """
    _display_png(png(figure), alt)
    display(in_words(alt), raw=True)


def in_words(alt: str) -> dict[str, str]:
    """The output under a figure: its alt text, to unfold."""
    words = f"<details><summary>Figure in words</summary>{html.escape(alt)}</details>"
    return {"text/html": words, "text/plain": f"Figure in words: {alt}"}


def explore(draw: Callable[..., Figure], alt: str, **controls: Any) -> Any:
    """A picture with controls under it; where widgets do not run, the picture alone.

    The output carries both forms. JupyterLab draws the widget; GitHub, and a notebook that was
    saved and not run again, draw the static picture of the starting values.

    Args:
        draw: makes the figure from the values of the controls, passed by name.
        alt: what the figure shows, for a reader who does not see it.
        controls: ipywidgets by name; each has a ``value`` and starts at the static picture's.

    Returns:
        The widget (a ``VBox``), so that a test can move its controls.
    """
    import ipywidgets as widgets

    def values() -> dict[str, Any]:
        return {name: control.value for name, control in controls.items()}

    static = png(draw(**values()))
    picture = widgets.HTML(_image_tag(static, alt))

    def redraw(_change: object) -> None:
        picture.value = _image_tag(png(draw(**values())), alt)

    for control in controls.values():
        control.observe(redraw, names="value")
    box = widgets.VBox([picture, *controls.values()])
    bundle = box._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    _display_png(static, alt, extra={WIDGET_VIEW: data[WIDGET_VIEW]})
    display(in_words(alt), raw=True)
    return box


def _image_tag(image: bytes, alt: str) -> str:
    encoded = base64.b64encode(image).decode("ascii")
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{encoded}">'


def _display_png(image: bytes, alt: str, extra: dict[str, Any] | None = None) -> None:
    if not alt.strip():
        raise ValueError("alt must say what the figure shows; it is empty")
    encoded = base64.b64encode(image).decode("ascii")
    data = {"image/png": encoded, "text/plain": alt, **(extra or {})}
    display(data, raw=True, metadata={"image/png": {"alt": alt}})

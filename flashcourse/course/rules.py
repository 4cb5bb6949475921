"""The rules of a committed notebook. Each function returns what is wrong, in words; none is good.

``python -m flashcourse notebooks --check`` prints them and the tests require that there are none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from nbformat import NotebookNode

from flashcourse.course.colab import setup_cell
from flashcourse.course.stamp import stamp
from flashcourse.files import (
    LABS,
    LESSONS,
    SOLUTIONS,
    ColabSettings,
    CourseError,
    colab_settings,
    notebook_text,
    notebooks_in,
    read_notebook,
)

MOST_BYTES = 1_500_000
MOST_CELLS = 40
# A word or an id that a person chose; not the eight hexadecimal digits a tool makes up.
HUMAN_ID = re.compile(r"(?!^[0-9a-f]{8}$)(?!.*[0-9a-f]{12})[a-z][a-z0-9]*([-_.][a-z0-9]+)*")
MACHINE_PATH = re.compile(
    r"(?<![\w.:/-])/(?:home|root|work|tmp|Users|private/tmp|var/folders|content|mnt/[a-z])/[^\s'\"]*"
    r"|\bfile:///[^\s'\"]*"
    r"|\b[A-Za-z]:\\{1,2}[A-Za-z][^\s'\"]*"
)
IMAGE = re.compile(r"!\[(?P<alt>[^\]]*)\]\((?P<target>[^)\s]*)[^)]*\)")
IMAGE_TAG = re.compile(r"<img\b[^>]*>", re.IGNORECASE)


def problems(notebook: NotebookNode, kind: str, settings: ColabSettings) -> list[str]:
    """Everything that is wrong with one notebook.

    Args:
        notebook: as read.
        kind: the folder it belongs to: ``notebooks``, ``solutions`` or ``labs``.
        settings: what the first cell is generated from.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in (LESSONS, SOLUTIONS, LABS):
        raise ValueError(f"kind must be {LESSONS}, {SOLUTIONS} or {LABS}, got {kind!r}")
    found = [*_ids(notebook)]
    try:
        size = len(notebook_text(notebook).encode("utf-8"))
    except CourseError as error:
        return [*found, str(error)]
    found += [*_size(notebook, size), *_generated(notebook, kind, settings)]
    for cell in notebook.cells:
        where = f"cell {cell.get('id')}"
        found += [f"{where}: {text}" for text in _cell(cell, kind)]
    return found


def _ids(notebook: NotebookNode) -> Iterator[str]:
    ids = [str(cell.get("id")) for cell in notebook.cells]
    for name, times in Counter(ids).items():
        if times > 1:
            yield f"cell id {name!r} is used {times} times"
        if not HUMAN_ID.fullmatch(name):
            yield f"cell id {name!r} is not a short lower-case name such as 'online-softmax'"


def _size(notebook: NotebookNode, size: int) -> Iterator[str]:
    if len(notebook.cells) > MOST_CELLS:
        yield f"{len(notebook.cells)} cells; at most {MOST_CELLS}"
    if size > MOST_BYTES:
        yield f"{size:,} bytes; at most {MOST_BYTES:,}"


def _generated(notebook: NotebookNode, kind: str, settings: ColabSettings) -> Iterator[str]:
    remedy = "labs" if kind == LABS else "notebooks"
    if not notebook.cells or notebook.cells[0].source != setup_cell(settings).source:
        yield f"the first cell is not the generated one: run `python -m flashcourse {remedy}`"
    try:
        stamped = stamp(notebook, settings)
    except CourseError as error:
        yield str(error)
        return
    if stamped != notebook:
        yield f"not stamped (metadata, widgets, run times): run `python -m flashcourse {remedy}`"


def _cell(cell: NotebookNode, kind: str) -> Iterator[str]:
    if cell.cell_type == "markdown":
        yield from _markdown_images(cell.source)
    for path in MACHINE_PATH.findall(cell.source):
        yield f"its text holds a path of one machine: {path}"
    if cell.cell_type != "code":
        return
    if kind == LESSONS:
        if cell.execution_count is None:
            yield "it was not run: `python -m flashcourse notebooks --execute`"
        yield from output_problems(cell)
    elif cell.outputs or cell.execution_count is not None:
        yield f"{kind}/ is kept without outputs and execution counts; this cell has some"


def _markdown_images(text: str) -> Iterator[str]:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    for image in IMAGE.finditer(text):
        if not image["alt"].strip():
            yield f"the image {image['target']} has no alt text"
        if re.match(r"(https?:)?//", image["target"]):
            yield f"the image {image['target']} is remote; images live in the repository"
    for tag in IMAGE_TAG.findall(text):
        if not re.search(r"\balt\s*=\s*(\"[^\"]*\w[^\"]*\"|'[^']*\w[^']*')", tag):
            yield f"the image {tag[:60]} has no alt text"
        if re.search(r"\bsrc\s*=\s*[\"']?\s*(https?:)?//", tag, re.IGNORECASE):
            yield f"the image {tag[:60]} is remote; images live in the repository"


def output_problems(cell: NotebookNode) -> Iterator[str]:
    """What is wrong with the outputs of one code cell of a lesson."""
    for output in cell.outputs:
        if output.output_type == "error":
            yield f"it ended in an error: {output.ename}: {output.evalue}"
        data = output.get("data", {})
        for kind in data:
            if not kind.startswith("image/"):
                continue
            alt = output.get("metadata", {}).get(kind, {}).get("alt", "")
            if not str(alt).strip():
                yield f"its {kind} output has no alt text: use flashcourse.show.show_figure"
        if "text/html" in data:
            yield from _markdown_images(str(data["text/html"]))
        for text in output_texts(output):
            for path in MACHINE_PATH.findall(text):
                yield f"its output holds a path of one machine: {path}"


def output_texts(output: NotebookNode) -> Iterator[str]:
    """The texts of an output that a reader may see."""
    if "text" in output:
        yield str(output.text)
    for key in ("ename", "evalue"):
        if key in output:
            yield str(output[key])
    yield from (str(line) for line in output.get("traceback", []))
    for kind, value in output.get("data", {}).items():
        if kind.startswith("text/") or kind == "image/svg+xml":
            # A picture inside HTML is base64, in which any letters may come.
            yield re.sub(r"base64,[A-Za-z0-9+/=\s]+", "", str(value))


def all_problems(root: Path) -> list[str]:
    """What is wrong with the notebooks of ``notebooks/``, ``solutions/`` and ``labs/``."""
    settings = colab_settings(root)
    return [
        f"{path.relative_to(root)}: {text}"
        for path in notebooks_in(root, LESSONS, SOLUTIONS, LABS)
        for text in problems(read_notebook(path), path.parent.name, settings)
    ]

"""The generated first cell of every notebook, and stand-alone copies to hand out."""

from __future__ import annotations

import base64
import io
import zipfile
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from flashcourse.files import (
    LABS,
    LESSONS,
    ColabSettings,
    CourseError,
    notebook_text,
    notebooks_in,
    read_notebook,
    write_whole,
)

CELL_ID = "colab-setup"

_FETCH = """\
# On Google Colab, this cell fetches the course. Anywhere else it does nothing.
import os
import sys

if "COLAB_RELEASE_TAG" in os.environ or "google.colab" in sys.modules:
    import subprocess

    address, tag = {repository!r}, {tag!r}
    course = os.path.abspath("flash-course")
    clone = ["git", "clone", "--quiet", "--depth", "1", "--branch", tag, address, course]
    if not os.path.isdir(course) and subprocess.run(clone).returncode != 0:
        raise RuntimeError(f"could not fetch {{address}} at {{tag}}; run this cell again")
    sys.path.insert(0, course)
    from flashcourse.course.on_colab import prepare  # before Triton, so that it sees the GPU

    prepare()
"""

_NO_ADDRESS = """\
# On Google Colab, this cell would fetch the course. Anywhere else it does nothing.
import os
import sys

if "COLAB_RELEASE_TAG" in os.environ or "google.colab" in sys.modules:
    raise RuntimeError(
        "this course has no public address yet; ask for stand-alone copies made with "
        "`python -m flashcourse colab --out DIR`"
    )
"""

_STAND_ALONE = '''\
# @title Run this cell first: it unpacks the course's library, which travels in this notebook
import base64
import io
import sys
import tempfile
import zipfile

LIBRARY = """
{library}
"""
if "flashcourse" not in sys.modules:
    folder = tempfile.mkdtemp(prefix="flashcourse-")
    zipfile.ZipFile(io.BytesIO(base64.b64decode(LIBRARY))).extractall(folder)
    sys.path.insert(0, folder)
from flashcourse.course.on_colab import prepare  # before Triton, so that it sees the GPU

prepare()
'''


def setup_source(settings: ColabSettings) -> str:
    """The source of the first cell of the course's own notebooks."""
    if not settings.repository:
        return _NO_ADDRESS.strip()
    if not settings.tag:
        raise CourseError(
            "[tool.flashcourse] in pyproject.toml has a repository and no tag: a notebook must "
            'fetch the release it belongs to, for example tag = "v0.1.0"'
        )
    return _FETCH.format(repository=settings.repository, tag=settings.tag).strip()


def setup_cell(settings: ColabSettings) -> NotebookNode:
    """The first cell, not yet run."""
    return new_code_cell(setup_source(settings), id=CELL_ID)


def library_archive(root: Path) -> bytes:
    """The library and ``pyproject.toml`` as a zip; the same files give the same bytes."""
    members = [root / "pyproject.toml"]
    members += sorted(
        path
        for path in (root / "flashcourse").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in members:
            entry = zipfile.ZipInfo(path.relative_to(root).as_posix())  # dated 1980, always
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, path.read_bytes())
    return buffer.getvalue()


def stand_alone(notebook: NotebookNode, archive: bytes) -> NotebookNode:
    """The notebook with the library inside its first cell; it needs no other file.

    Args:
        notebook: one of the course's, stamped; it is changed in place.
        archive: from :func:`library_archive`.
    """
    if not notebook.cells or notebook.cells[0].id != CELL_ID:
        raise CourseError(f"the first cell is not {CELL_ID}: run `python -m flashcourse notebooks`")
    encoded = base64.b64encode(archive).decode("ascii")
    lines = [encoded[start : start + 2000] for start in range(0, len(encoded), 2000)]
    # Both front ends fold the cell away: Colab as a form, JupyterLab as a hidden source.
    notebook.cells[0] = new_code_cell(
        _STAND_ALONE.format(library="\n".join(lines)).strip(),
        id=CELL_ID,
        metadata={"cellView": "form", "jupyter": {"source_hidden": True}},
    )
    return notebook


def write_stand_alone(root: Path, out: Path) -> list[Path]:
    """Write stand-alone copies of every lesson and lab into ``out``, all or none.

    Returns:
        the files written: ``out/notebooks/*.ipynb`` and ``out/labs/*.ipynb``.

    Raises:
        CourseError: there is nothing to copy, or ``out`` is one of the course's own folders.
    """
    out = out.resolve()
    if out == root or out.is_relative_to(root / LESSONS) or out.is_relative_to(root / LABS):
        raise CourseError(f"--out must be a folder of its own, got {out}, which holds the course")
    archive = library_archive(root)
    files: dict[Path, str | bytes] = {}
    for path in notebooks_in(root, LESSONS, LABS):
        try:
            copy = stand_alone(read_notebook(path), archive)
        except CourseError as error:
            raise CourseError(f"{path.relative_to(root)}: {error}") from error
        files[out / path.relative_to(root)] = notebook_text(copy)
    if not files:
        raise CourseError(f"no notebooks in {LESSONS}/ and {LABS}/ of {root}")
    write_whole(files)
    return list(files)

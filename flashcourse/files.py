"""Where the course's files are, and how they are written: whole or not at all.

The course, its grader and the benchmarks import this; it imports none of them.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbformat import NotebookNode

LESSONS, LABS, SOLUTIONS = "notebooks", "labs", "solutions"


class CourseError(Exception):
    """Something about the course's files that its author must put right; the text says how."""


@dataclass(frozen=True)
class ColabSettings:
    """Where a notebook on Colab fetches the project from: ``[tool.flashcourse]``."""

    repository: str  # the address git clones, empty if the course has none
    tag: str  # the release the notebooks belong to


def course_root() -> Path:
    """The folder that holds ``pyproject.toml``, ``notebooks/`` and ``flashcourse/``.

    Raises:
        CourseError: flashcourse was installed without its checkout.
    """
    root = Path(__file__).resolve().parents[1]
    if not (root / "pyproject.toml").is_file():
        raise CourseError(
            f"no pyproject.toml beside the package in {root}: this command works on the course's "
            "own checkout. Clone the repository and run `pip install -e .` in it."
        )
    return root


def colab_settings(root: Path) -> ColabSettings:
    """Read the address and the tag from the one place that states them."""
    with (root / "pyproject.toml").open("rb") as file:
        settings = tomllib.load(file).get("tool", {}).get("flashcourse", {})
    for name in ("repository", "tag"):
        if not isinstance(settings.get(name), str):
            raise CourseError(
                f"[tool.flashcourse] in pyproject.toml must state {name} as a string, "
                f"got {settings.get(name)!r}"
            )
    return ColabSettings(settings["repository"].strip(), settings["tag"].strip())


def notebooks_in(root: Path, *folders: str) -> list[Path]:
    """The notebooks of these folders, in reading order; hidden checkpoints are not among them."""
    return [path for folder in folders for path in sorted((root / folder).glob("*.ipynb"))]


def read_notebook(path: Path) -> NotebookNode:
    """Read one notebook exactly as it is: nbformat's own ``read`` makes up ids and mends others.

    Raises:
        CourseError: the file is not a notebook of format 4.
    """
    from nbformat import reader

    try:
        notebook = reader.reads(path.read_text(encoding="utf-8"))
        found = f"format {notebook.nbformat}"
    except (reader.NotJSONError, ValueError, AttributeError, KeyError, OSError) as error:
        raise CourseError(f"{path}: not a readable notebook: {error}") from error
    if notebook.nbformat != 4:
        raise CourseError(f"{path}: {found}, wanted format 4: save it anew in JupyterLab")
    return notebook


def notebook_text(notebook: NotebookNode) -> str:
    """The one way the course writes a notebook: format 4.5, sorted keys, a final newline.

    Raises:
        CourseError: the notebook is not valid.
    """
    import nbformat

    ids = [cell.get("id") for cell in notebook.cells]
    if len(set(ids)) != len(ids):  # validate() would give them new random ones
        raise CourseError("not a valid notebook: two cells have the same id")
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        raise CourseError(f"not a valid notebook: {str(error).splitlines()[0]}") from error
    return nbformat.v4.writes(notebook) + "\n"


def write_whole(files: Mapping[Path, str | bytes]) -> None:
    """Write files so that each is found whole, and none is touched unless all could be written.

    Everything is first written beside its target; a full disk is met before anything is replaced.
    """
    prepared: list[tuple[Path, Path]] = []
    try:
        for target, content in files.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            data = content.encode("utf-8") if isinstance(content, str) else content
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
            prepared.append((Path(name), target))
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
            os.chmod(name, mode)
        for temporary, target in prepared:
            os.replace(temporary, target)
    finally:
        for temporary, _ in prepared:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()


def differing(files: Mapping[Path, str | bytes]) -> list[Path]:
    """Those of the files that are missing, or hold something else than they should."""
    wrong = []
    for path, content in files.items():
        data = content.encode("utf-8") if isinstance(content, str) else content
        if not path.is_file() or path.read_bytes() != data:
            wrong.append(path)
    return wrong


def relative(paths: Iterable[Path], root: Path) -> list[str]:
    """The paths as a person in the root would type them."""
    return [path.relative_to(root).as_posix() for path in paths]

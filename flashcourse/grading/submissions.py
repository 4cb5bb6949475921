"""Reading what was handed in: a notebook, a folder or an archive of hundreds, whatever it holds.

Nothing is unpacked to the disk and nothing is executed. Everything that was handed in becomes a
:class:`Submission`, with a ``problem`` if no notebook can be made of it.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

MIB = 2**20
MAX_NOTEBOOK = 32 * MIB
MAX_ARCHIVE_FILES = 20_000
MAX_ARCHIVE_BYTES = 2048 * MIB  # read out of one archive
MAX_CELLS = 5_000
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
IGNORED = ("__MACOSX", ".ipynb_checkpoints", ".git")


class NoSuchSubmission(ValueError):
    """A path that was to be graded does not exist."""


@dataclass(frozen=True)
class Cell:
    """One cell of a notebook that was handed in, as far as it can be trusted: kind and text."""

    kind: str
    source: str
    grade_id: str = ""  # nbgrader's
    cell_id: str = ""


@dataclass
class Submission:
    """Something that was handed in.

    Attributes:
        name: who or what, from the path; unique within a tray.
        origin: where it was found, for people.
        cells: the notebook's cells; empty if there is a problem.
        notes: remarks on how it was read.
        problem: why it cannot be graded; empty if it can.
    """

    name: str
    origin: str
    cells: list[Cell] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problem: str = ""


def collect(paths: list[Path]) -> list[Submission]:
    """Every submission below the paths, in order, each with a name of its own.

    A notebook is one submission. In a folder or an archive every entry is one: a notebook, a
    student's folder or archive (each notebook in it), or something that cannot be graded.

    Raises:
        NoSuchSubmission: a path does not exist.
    """
    found: list[Submission] = []
    for path in paths:
        if not path.exists() and not path.is_symlink():
            raise NoSuchSubmission(f"{path} does not exist")
        if path.is_dir():
            found += _of_entries(_folder(path), str(path))
        elif path.name.lower().endswith(ARCHIVES):
            found += _of_archive(path.name, _Blob(path), alone=True)
        else:
            found.append(_of_blob(path.name, _Blob(path), path.name))
    seen: dict[str, int] = {}
    for submission in found:
        submission.name = submission.name.removesuffix(".ipynb") or "unnamed"
        count = seen[submission.name] = seen.get(submission.name, 0) + 1
        if count > 1:
            submission.name += f" ({count})"
    return found


# What is there --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Blob:
    """Bytes, in a file or at hand; or the reason why there are none."""

    path: Path | None = None
    data: bytes = b""
    problem: str = ""

    def read(self, most: int) -> bytes:
        """The content; one byte more than ``most`` if there is more."""
        if self.path is None:
            return self.data[: most + 1]
        with self.path.open("rb") as file:
            return file.read(most + 1)


def _folder(root: Path) -> Iterator[tuple[str, _Blob]]:
    """(path below the root, content) of every file; links are not followed."""
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            yield name, _Blob(problem="it is a link; hand in the file itself")
        elif path.is_file():
            yield name, _Blob(path)
        elif not path.is_dir():
            yield name, _Blob(problem="it is no ordinary file")


def _wanted(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return not any(part in IGNORED or part.startswith(".") for part in parts)


def _of_entries(entries: Iterator[tuple[str, _Blob]], origin: str) -> list[Submission]:
    """Submissions of a folder's or an archive's files, grouped by the first part of their path."""
    groups: dict[str, list[tuple[str, _Blob]]] = {}
    for name, blob in entries:
        if _wanted(name):
            groups.setdefault(PurePosixPath(name).parts[0], []).append((name, blob))
    found = []
    for first, files in groups.items():
        mine: list[Submission] = []
        for name, blob in files:
            where = f"{origin}/{name}"
            if name.lower().endswith(ARCHIVES):
                mine += _of_archive(name, blob, alone=False)
            elif name.lower().endswith(".ipynb") or name == first:
                mine.append(_of_blob(name, blob, where))
        if not mine:
            problem = f"there is no notebook among its {len(files)} files"
            mine = [Submission(first, f"{origin}/{first}", problem=problem)]
        found += mine
    return found


def _of_archive(name: str, blob: _Blob, *, alone: bool) -> list[Submission]:
    """The submissions in an archive: a tray of them, or (inside of one) a student's own."""
    short = name
    for ending in sorted(ARCHIVES, key=len, reverse=True):
        if name.lower().endswith(ending):
            short = name[: -len(ending)]
            break
    if blob.problem:
        return [Submission(short, name, problem=blob.problem)]
    try:
        entries = list(_archive_entries(blob))
    except _TooMuch as error:
        return [Submission(short, name, problem=str(error))]
    except Exception as error:  # zipfile and tarfile raise all sorts on broken input
        problem = f"not a readable archive: {type(error).__name__}: {error}"
        return [Submission(short, name, problem=problem[:500])]
    if alone:
        found = _of_entries(iter(entries), name)
    else:
        found = [
            _of_blob(f"{short}/{PurePosixPath(inner).name}", content, f"{name}/{inner}")
            for inner, content in entries
            if inner.lower().endswith(".ipynb") and _wanted(inner)
        ]
    return found or [Submission(short, name, problem="there is no notebook in the archive")]


class _TooMuch(ValueError):
    """An archive holds more than anybody hands in."""


def _archive_entries(blob: _Blob) -> Iterator[tuple[str, _Blob]]:
    file: Any = blob.path.open("rb") if blob.path else io.BytesIO(blob.data)
    with file:
        start = file.read(6)
        file.seek(0)
        yield from _zip_entries(file) if start[:2] == b"PK" else _tar_entries(file, start)


def _tame(name: str) -> str:
    """An entry's path without what would lead out of a folder."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    return "/".join(part for part in parts if part not in ("/", "..", ".")) or "unnamed"


def _needs_content(name: str) -> bool:
    return name.lower().endswith((".ipynb", *ARCHIVES)) or "/" not in name


def _zip_entries(file: Any) -> Iterator[tuple[str, _Blob]]:
    total = 0
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        _check_count(len(entries))
        for entry in entries:
            name = _tame(entry.filename)
            if entry.is_dir():
                continue
            if not _needs_content(name):
                yield name, _Blob()
                continue
            if entry.flag_bits & 1:
                yield name, _Blob(problem="it is encrypted")
                continue
            with archive.open(entry) as stream:  # sizes in the directory may lie: count
                data = stream.read(MAX_NOTEBOOK + 1)
            total += len(data)
            _check_total(total)
            yield name, _Blob(data=data)


class _Counted(io.RawIOBase):
    """Reads a stream and stops when it gives too much."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.total = stream, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.stream.read(len(buffer))
        self.total += len(data)
        _check_total(self.total)
        buffer[: len(data)] = data
        return len(data)


def _tar_entries(file: Any, start: bytes) -> Iterator[tuple[str, _Blob]]:
    openers = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ", lzma.open))
    stream = next((opener(file) for mark, opener in openers if start.startswith(mark)), file)
    counted = io.BufferedReader(_Counted(stream))
    with tarfile.open(fileobj=counted, mode="r|") as archive:
        for count, entry in enumerate(archive, 1):
            _check_count(count)
            name = _tame(entry.name)
            if entry.isdir():
                continue
            if not entry.isreg():
                yield name, _Blob(problem="it is a link or a device; hand in the file itself")
                continue
            content = archive.extractfile(entry) if _needs_content(name) else None
            yield name, _Blob(data=content.read(MAX_NOTEBOOK + 1) if content else b"")


def _check_count(count: int) -> None:
    if count > MAX_ARCHIVE_FILES:
        raise _TooMuch(f"the archive holds more than {MAX_ARCHIVE_FILES:,} files")


def _check_total(total: int) -> None:
    if total > MAX_ARCHIVE_BYTES:
        raise _TooMuch(
            f"the archive unpacks to more than {MAX_ARCHIVE_BYTES // MIB:,} MiB: not opened further"
        )


# From bytes to cells --------------------------------------------------------------------------


def _of_blob(name: str, blob: _Blob, origin: str) -> Submission:
    submission = Submission(name, origin)
    try:
        data = b"" if blob.problem else blob.read(MAX_NOTEBOOK)
        submission.problem = blob.problem or _read_cells(data, submission)
    except OSError as error:
        submission.problem = f"it cannot be read: {error.strerror}"
    except (RecursionError, MemoryError, ValueError, TypeError, AttributeError, KeyError) as error:
        submission.problem = f"not a readable notebook: {type(error).__name__}"
    return submission


def _read_cells(data: bytes, submission: Submission) -> str:
    """Fill in cells and notes; return the problem, or nothing."""
    if len(data) > MAX_NOTEBOOK:
        return f"it is larger than {MAX_NOTEBOOK // MIB} MiB: clear the outputs and save it again"
    if not data.strip():
        return "the file is empty"
    if data.startswith(b"%PDF"):
        return "it is a PDF; hand in the notebook (.ipynb) itself"
    if data.startswith(b"PK\x03\x04"):
        return "it is a zip archive or an Office document, not a notebook (.ipynb)"
    if data.lstrip()[:1] == b"<":
        return "it is a web page; hand in the notebook (.ipynb) itself"
    try:
        content = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return "it is no text, so no notebook (.ipynb)"
    except json.JSONDecodeError as error:
        return f"not a notebook: its JSON breaks off or is wrong in line {error.lineno}"
    if not isinstance(content, dict) or not isinstance(content.get("nbformat"), int):
        return "it is JSON, but not a notebook"
    raw = content.get("cells")
    if content["nbformat"] < 4:
        worksheets = content.get("worksheets") or []
        raw = [cell for sheet in worksheets for cell in sheet.get("cells", [])]
        submission.notes.append(f"a notebook of format {content['nbformat']}, read as it is")
    if not isinstance(raw, list) or len(raw) > MAX_CELLS:
        return "it has no list of cells, or a very long one"
    submission.cells = [cell for cell in map(_cell, raw) if cell is not None]
    return "" if submission.cells else "the notebook has no cells"


def _cell(raw: Any) -> Cell | None:
    if not isinstance(raw, dict):
        return None
    source = raw.get("source", raw.get("input", ""))  # format 3 calls it input
    if isinstance(source, list):
        source = "".join(part for part in source if isinstance(part, str))
    if not isinstance(source, str):
        return None
    metadata = raw.get("metadata")
    grader = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    grade_id = grader.get("grade_id") if isinstance(grader, dict) else ""
    return Cell(
        kind=str(raw.get("cell_type")),
        source=source.replace("\r\n", "\n").encode("utf-8", "replace").decode("utf-8"),
        grade_id=str(grade_id or ""),
        cell_id=str(raw.get("id") or ""),
    )


def slug(name: str) -> str:
    """A name that is safe as a file's name everywhere."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._")[:80] or "unnamed"

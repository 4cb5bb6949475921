"""Documents to train on that need no network: the source of Python's own standard library.

Functions, methods and the heads of classes are real text with a real, skewed distribution of
lengths: many of a few lines, a few of several pages.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import textwrap
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3",
    "pydoc_data", "lib-dynload",
}  # fmt: skip
HELD_OUT_SHARE = 20  # one module in this many
SHORTEST = 40  # characters; below it a document is a stub


class CorpusMissing(RuntimeError):
    """There is no text to train on at the place where it should be."""


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order.

    Attributes:
        train: documents to learn from.
        held_out: documents of other modules, to measure the loss on.
        source: where they come from, in words.
    """

    train: list[str]
    held_out: list[str]
    source: str


def standard_library(
    limit: int | None = None, *, seed: int = 0, folder: str | Path | None = None
) -> Corpus:
    """Functions, methods and class heads of the Python that runs this, as documents.

    Whole modules are held out, so that no method is held out while its neighbour is learnt.

    Args:
        limit: the number of training documents after which to stop; None: all (about 20,000).
        seed: of the order of the modules.
        folder: another folder of Python files.

    Raises:
        CorpusMissing: no Python source is there (some minimal installations bring none).
    """
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    files = sorted(
        p for p in root.rglob("*.py") if not SKIPPED_FOLDERS & set(p.parts[len(root.parts) :])
    )
    random.Random(seed).shuffle(files)
    train: list[str] = []
    held_out: list[str] = []
    for path in files:
        into = held_out if _is_held_out(path.relative_to(root)) else train
        into.extend(_documents(path))
        if limit is not None and len(train) >= limit and held_out:
            break
    if not train or not held_out:
        raise CorpusMissing(
            f"found {len(train)} + {len(held_out)} documents in the Python files under {root}; "
            "give another folder with folder=..., or a dataset with hub_dataset(name)"
        )
    return Corpus(train[:limit], held_out, f"Python source under {root.name}")


def hub_dataset(
    name: str, *, column: str = "text", split: str = "train", limit: int = 20_000, **options: Any
) -> Corpus:
    """Documents of a data set on the Hugging Face Hub. It needs a network and ``datasets``.

    Args:
        name: the data set, such as ``"roneneldan/TinyStories"``.
        column: which column holds the text.
        split: which split to read, as a stream.
        limit: how many documents to read.
        options: passed on to ``datasets.load_dataset``.

    Raises:
        ImportError: the package ``datasets`` is not installed.
        CorpusMissing: the column is not there, or holds no text.
    """
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            "hub_dataset needs the package datasets: pip install datasets. "
            "standard_library() needs nothing."
        ) from error
    train: list[str] = []
    held_out: list[str] = []
    for number, row in enumerate(
        datasets.load_dataset(name, split=split, streaming=True, **options)
    ):
        if number >= limit:
            break
        if column not in row:
            raise CorpusMissing(f"{name} has no column {column!r}; it has {', '.join(row)}")
        (held_out if number % HELD_OUT_SHARE == 0 else train).append(str(row[column]))
    if not train:
        raise CorpusMissing(f"{name}, split {split}, gave no documents")
    return Corpus(train, held_out, f"{name}, split {split}")


def _is_held_out(path: Path) -> bool:
    """By the module's name, so that it is the same on every machine."""
    return zlib.crc32(path.as_posix().encode()) % HELD_OUT_SHARE == 0


def _documents(path: Path) -> Iterator[str]:
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return  # files kept to show an error, or in an older encoding
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            text = _text(lines, node.lineno, node.end_lineno)
        elif isinstance(node, ast.ClassDef):
            text = _text(lines, node.lineno, _end_of_head(node))
        else:
            continue
        if len(text) >= SHORTEST:
            yield text


def _end_of_head(node: ast.ClassDef) -> int | None:
    """The last line before a class's first method: its docstring and attributes."""
    for child in node.body:
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            decorators = [d.lineno for d in child.decorator_list]
            return min([child.lineno, *decorators]) - 1
    return node.end_lineno


def _text(lines: list[str], first: int, last: int | None) -> str:
    return textwrap.dedent("".join(lines[first - 1 : last])).strip() + "\n"

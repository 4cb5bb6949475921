"""A class hands in lab 4: a hundred notebooks with right, mistaken, broken and hostile answers.

Graded as one batch, with a table of what was expected and what came::

    python tests/class_of_100 --limit 20 --workers 2
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from class_of_100 import cells
from class_of_100.cells import Cell

ROOT = Path(__file__).parents[2]
SOLVED = ROOT / "solutions" / "lab4_triton_forward.ipynb"
STUBS = ROOT / "labs" / "lab4_triton_forward.ipynb"
SOFTMAX, FORWARD, SPEED = "lab4.row_softmax", "lab4.flash_forward", "lab4.speed"
SIZE = 100
# A kernel with a mistake may be right on the few inputs of the question on speed.
SPEED_OF_WRONG = ("failed", "not_verified", "passed")


@dataclass(frozen=True)
class Paper:
    """One submission: its answer cells, and what may become of every question."""

    name: str
    softmax: Cell
    forward: Cell

    def expected(self, gpu: bool) -> dict[str, tuple[str, ...]]:
        """The statuses that are right, by question."""
        speed = self.forward.statuses
        if self.forward.mistake:
            speed = SPEED_OF_WRONG
        elif self.forward.statuses == ("passed",):
            speed = self.forward.speed if gpu else ("not_verified",)
        return {SOFTMAX: self.softmax.statuses, FORWARD: self.forward.statuses, SPEED: speed}

    def notebook(self) -> dict[str, Any]:
        """The notebook as it is handed in."""
        notebook = json.loads(SOLVED.read_text(encoding="utf-8"))
        stubs = json.loads(STUBS.read_text(encoding="utf-8"))
        for cell_id, answer in (
            ("lab4-row_softmax", self.softmax),
            ("lab4-flash_forward", self.forward),
        ):
            source = answer.source or _cell(stubs, cell_id)["source"]
            _cell(notebook, cell_id)["source"] = source
        return notebook


def _cell(notebook: dict[str, Any], cell_id: str) -> dict[str, Any]:
    return next(cell for cell in notebook["cells"] if cell["id"] == cell_id)


def papers() -> list[Paper]:
    """The class, in an order in which any beginning is a sample of the whole."""
    softmaxes = [*cells.right_softmaxes(), *cells.right_softmaxes(), *cells.wrong_softmaxes()]
    right = cells.right_forwards()
    wrong = [*cells.wrong_forwards(), *cells.broken_forwards()]
    forwards = [*wrong, *(right[i % len(right)] for i in range(SIZE - len(wrong)))]
    random.Random(4).shuffle(forwards)
    chosen = enumerate(zip(_for_ever(softmaxes), forwards, strict=False))
    return [
        Paper(f"{number:03d}-{forward.name}", softmax, forward)
        for number, (softmax, forward) in chosen
    ]


def _for_ever(things: list[Cell]) -> Iterator[Cell]:
    while True:
        yield from things


def write(folder: Path, chosen: list[Paper]) -> None:
    """Write the notebooks."""
    folder.mkdir(parents=True, exist_ok=True)
    for paper in chosen:
        text = json.dumps(paper.notebook(), ensure_ascii=False)
        (folder / f"{paper.name}.ipynb").write_text(text, encoding="utf-8")

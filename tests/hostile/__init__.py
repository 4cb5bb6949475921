"""A tray of submissions that break, deceive or attack a grader, made from code.

Each attack stands in lab 1's softmax cell; the other two answers are right, so that one can see
whether an attack costs its own question alone.
"""

from __future__ import annotations

import copy
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostile.attacks import ATTACKS

ROOT = Path(__file__).parents[2]
SOFTMAX = "lab1-softmax"
OTHERS = 8.0  # points of the two answers that are right
Notebook = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One submission: how to make it, and what the grader must say.

    Attributes:
        make: writes it to the tray and may return the name it gets there.
        statuses: what may become of softmax; None if the submission cannot be graded at all.
        others: the points of the other two questions.
        says: a part of the notes, the reason or the problem.
    """

    name: str
    make: Callable[[Path], None]
    statuses: tuple[str, ...] | None
    others: float = OTHERS
    says: str = ""


def solved() -> Notebook:
    """Lab 1 with the right answers."""
    text = (ROOT / "solutions" / "lab1_attention.ipynb").read_text(encoding="utf-8")
    return json.loads(text)


def cell(notebook: Notebook, name: str) -> dict[str, Any]:
    """The cell with this id."""
    return next(c for c in notebook["cells"] if c["id"] == name)


def with_softmax(source: str) -> Notebook:
    """The solved lab with another softmax cell."""
    notebook = solved()
    cell(notebook, SOFTMAX)["source"] = f"# lab: {SOFTMAX}\n{source}"
    return notebook


def _written(notebook: Notebook) -> Callable[[Path], None]:
    return lambda path: path.write_text(json.dumps(notebook), encoding="utf-8")


def _changed(change: Callable[[Notebook], None]) -> Callable[[Path], None]:
    notebook = solved()
    change(notebook)
    return _written(notebook)


def _delete(notebook: Notebook) -> None:
    notebook["cells"].remove(cell(notebook, SOFTMAX))


def _duplicate(notebook: Notebook) -> None:
    stub = json.loads((ROOT / "labs" / "lab1_attention.ipynb").read_text(encoding="utf-8"))
    notebook["cells"].append(copy.deepcopy(cell(stub, SOFTMAX)))


def _reorder(notebook: Notebook) -> None:
    notebook["cells"].reverse()


def _edit_checks(notebook: Notebook) -> None:
    cell(notebook, SOFTMAX)["source"] = f"# lab: {SOFTMAX}\ndef softmax(x):\n    return x"
    cell(notebook, f"{SOFTMAX}-check")["source"] = "print('✓ lab1.softmax: passed, 2 of 2 points')"


def _delete_checks(notebook: Notebook) -> None:
    notebook["cells"] = [c for c in notebook["cells"] if not c["id"].endswith("-check")]


def _drop_metadata(notebook: Notebook) -> None:
    for number, each in enumerate(notebook["cells"]):
        each["metadata"], each["id"] = {}, f"colab{number}"


def _to_markdown(notebook: Notebook) -> None:
    answer = cell(notebook, SOFTMAX)
    answer["cell_type"] = "markdown"
    del answer["outputs"], answer["execution_count"]


def _to_format_3(notebook: Notebook) -> None:
    cells = notebook.pop("cells")
    for each in cells:
        each.pop("id")
        if each["cell_type"] == "code":
            each["input"] = each.pop("source")
    notebook.update(nbformat=3, nbformat_minor=0, worksheets=[{"cells": cells}])


def _foreign_lab(notebook: Notebook) -> None:
    for each in notebook["cells"]:
        each["metadata"], each["id"] = {}, ""
        each["source"] = "print('assignment 7 of another course')"


def _strange_types(notebook: Notebook) -> None:
    notebook["cells"] += [None, 7, {"cell_type": "code", "source": {"a": 1}}, []]
    cell_types = [{"cell_type": ["code"], "source": ["x", 3], "metadata": "none", "id": 5}]
    notebook["cells"] += cell_types


def _helper_cell(notebook: Notebook) -> None:
    answer = cell(notebook, SOFTMAX)
    helper = copy.deepcopy(answer)
    helper.update(id="mine", metadata={}, source="def my_helper(x):\n    return x")
    answer["source"] = f"# lab: {SOFTMAX}\ndef softmax(x):\n    return my_helper(x)"
    notebook["cells"].insert(0, helper)


def _syntax(notebook: Notebook) -> None:
    cell(notebook, SOFTMAX)["source"] = f"# lab: {SOFTMAX}\ndef softmax(x)\n    return x"


def _magic(notebook: Notebook) -> None:
    answer = cell(notebook, SOFTMAX)
    answer["source"] = "%%time\n" + "".join(answer["source"]) + "\n!echo done"


def _unsolved(path: Path) -> None:
    path.write_bytes((ROOT / "labs" / "lab1_attention.ipynb").read_bytes())


def _bytes(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data)


def _zip_bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(80):  # 80 × 64 MiB of zeros in 5 MiB
            archive.writestr(f"{number}.ipynb", bytes(64 * 2**20))


def _traversal(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../../escaped.ipynb", json.dumps(solved()))
        archive.writestr("/escaped.txt", "out")


def _tar_of_links(path: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        link = tarfile.TarInfo("passwords.ipynb")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        data = json.dumps(solved()).encode()
        entry = tarfile.TarInfo("../good.ipynb")
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))


def _link(path: Path) -> None:
    os.symlink("/etc/passwd", path)


def _student_folder(path: Path) -> None:
    path.mkdir()
    (path / "my notes.txt").write_text("figures are in the notebook")
    _written(solved())(path / "lab1_attention.ipynb")


BROKEN = [
    Entry("deleted.ipynb", _changed(_delete), ("missing",), says="deleted"),
    Entry("duplicated.ipynb", _changed(_duplicate), ("passed",), says="2 cells of this name"),
    Entry("reordered.ipynb", _changed(_reorder), ("passed",), says="another order"),
    Entry("edited_checks.ipynb", _changed(_edit_checks), ("failed",), says="cell was edited"),
    Entry("deleted_checks.ipynb", _changed(_delete_checks), ("passed",), says="cell is missing"),
    Entry("colab.ipynb", _changed(_drop_metadata), ("passed",)),
    Entry("markdown.ipynb", _changed(_to_markdown), ("passed",), says="markdown cell"),
    Entry("format3.ipynb", _changed(_to_format_3), ("passed",), says="format 3"),
    Entry("strange.ipynb", _changed(_strange_types), ("passed",)),
    Entry(
        "helper.ipynb", _changed(_helper_cell), ("failed",), says="my_helper from a cell of your"
    ),
    Entry("syntax.ipynb", _changed(_syntax), ("failed",), says="SyntaxError"),
    Entry("magic.ipynb", _changed(_magic), ("passed",), says="%%time"),
    Entry("unsolved.ipynb", _unsolved, ("missing",), others=0),
    Entry("student with space", _student_folder, ("passed",)),
    Entry("foreign.ipynb", _changed(_foreign_lab), None, says="no answer of this course"),
    Entry("empty.ipynb", _bytes(b""), None, says="empty"),
    Entry("report.pdf", _bytes(b"%PDF-1.7\n..."), None, says="PDF"),
    Entry("renamed.ipynb", _bytes(b"PK\x03\x04rest"), None, says="zip archive or an Office"),
    Entry("page.ipynb", _bytes(b"<!DOCTYPE html><html>"), None, says="web page"),
    Entry("binary.ipynb", _bytes(bytes(range(256)) * 10), None, says="no text"),
    Entry("nested.ipynb", _bytes(b"[" * 200_000), None, says="not a readable notebook"),
    Entry("cut.ipynb", _bytes(json.dumps(solved()).encode()[:3000]), None, says="breaks off"),
    Entry("list.ipynb", _bytes(b"[1, 2]"), None, says="not a notebook"),
    Entry("link.ipynb", _link, None, says="link"),
    Entry("broken.zip", _bytes(b"PK\x03\x04 no zip at all"), None, says="not a readable archive"),
    Entry("bomb.zip", _zip_bomb, None, says="unpacks to more than"),
    Entry("traversal.zip", _traversal, ("passed",)),
    Entry("links.tar.gz", _tar_of_links, ("passed",)),
]


def tray() -> list[Entry]:
    """Every submission of the tray."""
    attacks = [
        Entry(f"{name}.ipynb", _written(with_softmax(attack.source)), attack.statuses)
        for name, attack in ATTACKS.items()
    ]
    return attacks + BROKEN

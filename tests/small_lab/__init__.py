"""A lab of two small questions, for tests of the grader: one in PyTorch, one in Triton."""

from __future__ import annotations

import copy
import os
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook, writes

TESTS = Path(__file__).parents[1]
DOUBLE, ADD = "lab9-double", "lab9-add"
RIGHT_DOUBLE = "def double(x):\n    return x + x"
RIGHT_ADD = """import triton
import triton.language as tl

@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    total = tl.load(x + place, mask=inside) + tl.load(y + place, mask=inside)
    tl.store(out + place, total, mask=inside)

def add(x, y):
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 16),)](x, y, out, x.numel(), BLOCK=16)
    return out"""


def _cell(name: str, source: str, **grader: object) -> NotebookNode:
    settings = {"schema_version": 3, "grade_id": name, "task": False, **grader}
    return new_code_cell(source, id=name, metadata={"nbgrader": settings})


def notebook(double: str = "", add: str = "") -> NotebookNode:
    """The lab, solved as far as answers are given."""
    cells = [new_code_cell("import torch\nfrom flashcourse.grading import check", id="imports")]
    for name, answer in ((DOUBLE, double), (ADD, add)):
        function = name.removeprefix("lab9-")
        body = (
            answer or f"def {function}(*x):\n    # YOUR CODE HERE\n    raise NotImplementedError()"
        )
        source = f"# lab: {name}\n{body}"
        question = name.replace("-", ".")
        call = f'check("{question}", {function});'
        cells.append(_cell(name, source, solution=True, grade=False, locked=False))
        graded = {"solution": False, "grade": True, "locked": True, "points": 2}
        cells.append(_cell(f"{name}-check", call, **graded))
    return new_notebook(cells=copy.deepcopy(cells))


def write(folder: Path, name: str, **answers: str) -> Path:
    """Write the lab as ``name.ipynb``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.ipynb"
    path.write_text(writes(notebook(**answers)) + "\n", encoding="utf-8")
    return path


def variables() -> dict[str, str]:
    """The environment in which the lab's questions exist."""
    return {
        **os.environ,
        "FLASHCOURSE_QUESTIONS": "small_lab.double small_lab.add",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
    }

"""The answers in solutions/, by question, as functions."""

from __future__ import annotations

import ast
import importlib.util
import linecache
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import nbformat

SOLUTIONS = Path(__file__).parent.parent / "solutions"
_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


@cache
def solution_answers() -> dict[str, Callable[..., Any]]:
    """Every ``check("question", answer)`` of the solved labs, with the answer it names."""
    answers: dict[str, Callable[..., Any]] = {}
    for path in sorted(SOLUTIONS.glob("lab*.ipynb")):
        namespace: dict[str, Any] = {"__name__": path.stem}
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type != "code":
                continue
            tree = ast.parse(cell.source)
            grade = cell.metadata.get("nbgrader", {}).get("grade", False)
            if grade:
                for question, name in _checks(tree):
                    answers[question] = namespace[name]
                continue
            tree.body = [node for node in tree.body if isinstance(node, _DEFINITIONS)]
            # Triton reads the source of a kernel again, as it does in a notebook: from this cache.
            name = f"<{path.stem}/{cell.id}>"
            linecache.cache[name] = (len(cell.source), None, cell.source.splitlines(True), name)
            exec(compile(tree, name, "exec"), namespace)
    return answers


def changed_answer(
    folder: Path, question: str, name: str, changes: list[tuple[str, str]]
) -> Callable[..., Any]:
    """The solution's function with changes of its text, from a file that Triton can read."""
    (path,) = SOLUTIONS.glob(f"{question.split('.')[0]}_*.ipynb")
    cells = nbformat.read(path, as_version=4).cells
    source = next(cell.source for cell in cells if cell.id == question.replace(".", "-"))
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    answer = folder / f"answer_{abs(hash(source))}.py"
    answer.write_text("import torch\nimport triton\nimport triton.language as tl\n" + source)
    spec = importlib.util.spec_from_file_location(answer.stem, answer)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[answer.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def _checks(tree: ast.AST) -> list[tuple[str, str]]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [
        (ast.literal_eval(call.args[0]), ast.unparse(call.args[1]))
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "check"
    ]

"""The labs as they were given out, and a learner's answer cells put into a pristine copy."""

from __future__ import annotations

import ast
import copy
import re
import symtable
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashcourse.files import CourseError, read_notebook
from flashcourse.grading.submissions import Cell, Submission

MARK = re.compile(r"#\s*lab:\s*([\w.-]+)\s*")
MARK_WITHIN = 5  # lines in which the mark is looked for: a magic may stand above it
LITERALS = (ast.Constant, ast.Tuple, ast.List, ast.UnaryOp, ast.BinOp)


@dataclass(frozen=True)
class Asked:
    """One graded question of a lab: the cell that holds the answer, and what to evaluate."""

    question: str
    cell: str
    expression: str
    points: float


@dataclass(frozen=True)
class Lab:
    """A lab as it was given out.

    Attributes:
        name: ``lab1_attention``.
        notebook: the released notebook.
        stubs: the source of every answer cell as released, in order.
        asked: the graded questions, in order.
    """

    name: str
    notebook: Any
    stubs: dict[str, str]
    asked: tuple[Asked, ...]

    @property
    def points(self) -> float:
        """What can be reached."""
        return sum(asked.points for asked in self.asked)


@dataclass
class Answers:
    """A learner's answer cells by the id of the cell, and what was noticed on the way."""

    sources: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


# The labs -------------------------------------------------------------------------------------


def load_labs(folder: Path) -> dict[str, Lab]:
    """Every lab of the folder with released notebooks, by name.

    Raises:
        CourseError: there is none.
    """
    labs = {path.stem: _load(path) for path in sorted(folder.glob("*.ipynb"))}
    if not labs:
        raise CourseError(f"no released labs (*.ipynb) in {folder}")
    return labs


def _load(path: Path) -> Lab:
    notebook = read_notebook(path)
    stubs: dict[str, str] = {}
    asked: list[Asked] = []
    for cell in notebook.cells:
        grader = cell.metadata.get("nbgrader", {})
        if grader.get("solution"):
            stubs[grader["grade_id"]] = cell.source
        elif grader.get("grade"):
            asked += _asked(cell.source, grader, stubs)
    return Lab(path.stem, notebook, stubs, tuple(asked))


def _asked(source: str, grader: Any, stubs: dict[str, str]) -> list[Asked]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check"):
            continue
        question, expression = ast.literal_eval(node.args[0]), ast.unparse(node.args[1])
        own = question.replace(".", "-", 1)
        cell = own
        if own not in stubs:  # graded on another question's answer
            cell = next((c for c, text in stubs.items() if expression in defined_names(text)), own)
        found.append(Asked(question, cell, expression, float(grader["points"])))
    return found


def which_lab(submission: Submission, labs: dict[str, Lab]) -> Lab | None:
    """The lab whose answer cells the submission holds most of; None if it holds none."""
    counts = {
        name: sum(1 for cell in submission.cells if _cell_of(cell, lab))
        for name, lab in labs.items()
    }
    best = max(counts, key=lambda name: counts[name], default=None)
    return labs[best] if best is not None and counts[best] else None


# The answers ----------------------------------------------------------------------------------


def _cell_of(cell: Cell, lab: Lab) -> str:
    """Which answer cell of the lab this is, or an empty string."""
    return next((name for name in _claims(cell) if name in lab.stubs), "")


def _claims(cell: Cell) -> Iterable[str]:
    yield cell.grade_id
    for line in [line for line in cell.source.split("\n") if line.strip()][:MARK_WITHIN]:
        if mark := MARK.fullmatch(line.strip()):
            yield mark[1].replace(".", "-", 1)
    yield cell.cell_id


def find_answers(submission: Submission, lab: Lab) -> Answers:
    """The answer cells of a submission, however it was edited.

    A cell is known by nbgrader's grade_id, by its ``# lab:`` line, or by its id. Of several with
    one name the last counts that is more than the stub.
    """
    answers = Answers(notes=list(submission.notes))
    candidates: dict[str, list[Cell]] = {name: [] for name in lab.stubs}
    order: list[str] = []
    others: list[Cell] = []
    for cell in submission.cells:
        name = _cell_of(cell, lab)
        if name:
            candidates[name].append(cell)
            order.append(name)
        elif cell.kind == "code":
            others.append(cell)
    for name, cells in candidates.items():
        source = _choose(name, cells, lab.stubs[name], answers.notes)
        if source is not None:
            answers.sources[name] = source
    firsts = list(dict.fromkeys(order))
    if firsts != [name for name in lab.stubs if name in firsts]:
        answers.notes.append("the answer cells stand in another order; the lab's order was used")
    answers.notes += _notes_on_others(others, lab, answers)
    return answers


def _choose(name: str, cells: list[Cell], stub: str, notes: list[str]) -> str | None:
    if not cells:
        notes.append(f"{name}: there is no such cell; it was deleted, or lost its first line")
        return None
    code = [cell for cell in cells if cell.kind == "code"]
    if not code:
        notes.append(f"{name}: the answer stands in a {cells[0].kind} cell; it was read as code")
    changed = [cell for cell in code or cells if not same_code(cell.source, stub)]
    if len(code) > 1:
        notes.append(f"{name}: {len(code)} cells of this name; the last that was changed counts")
    if not changed:
        return None
    source, removed = without_magics(changed[-1].source)
    if removed:
        notes.append(f"{name}: lines for IPython were left out: {', '.join(removed[:3])}")
    return source


def _notes_on_others(others: list[Cell], lab: Lab, answers: Answers) -> list[str]:
    """What to say about cells that are no answers: edited checks, helpers in cells of their own."""
    released = {_squeezed(cell.source) for cell in lab.notebook.cells}
    graded = {
        cell.metadata.nbgrader.grade_id: _squeezed(cell.source)
        for cell in lab.notebook.cells
        if cell.metadata.get("nbgrader", {}).get("grade")
    }
    notes = []
    present = {cell.grade_id or cell.cell_id for cell in others}
    sources = {_squeezed(cell.source) for cell in others}
    for cell in others:
        name = cell.grade_id or cell.cell_id
        if name in graded and _squeezed(cell.source) != graded[name]:
            notes.append(f"{name}: the checking cell was edited; the lab's own was used")
    for name, source in graded.items():
        if name not in present and source not in sources:
            notes.append(f"{name}: the checking cell is missing; the lab's own was used")
    used = set().union(*(used_names(source) for source in answers.sources.values()), set())
    used -= set().union(*(defined_names(source) for source in answers.sources.values()), set())
    for cell in others:
        if _squeezed(cell.source) not in released and (
            helpers := sorted(defined_names(cell.source) & used - _preamble_names(lab))
        ):
            notes.append(
                f"your answers use {', '.join(helpers)} from a cell of your own; only answer cells "
                "are graded: move it into the answer cell"
            )
    return notes


def _squeezed(source: str) -> str:
    return "\n".join(line.strip() for line in source.split("\n") if line.strip())


def same_code(source: str, other: str) -> bool:
    """True if two sources differ in comments and blank space alone."""
    try:
        return ast.dump(ast.parse(source)) == ast.dump(ast.parse(other))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _squeezed(source) == _squeezed(other)


def without_magics(source: str) -> tuple[str, list[str]]:
    """The source with IPython's ``%magic`` and ``!command`` lines turned into comments."""
    if _tree(source) is not None:
        return source, []
    lines, removed = source.split("\n"), []
    for number, line in enumerate(lines):
        if re.match(r"\s*[%!]", line):
            removed.append(line.strip())
            indent = line[: len(line) - len(line.lstrip())]
            lines[number] = f"{indent}pass  # {line.strip()}"
    return "\n".join(lines), removed


# What to run ----------------------------------------------------------------------------------


def _tree(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def defined_names(source: str) -> set[str]:
    """The names a source defines at its top level; none if it cannot be parsed."""
    tree = _tree(source)
    return set().union(*map(_bound, tree.body), set()) if tree else set()


def _bound(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def used_names(source: str) -> set[str]:
    """The global names a source mentions and does not define itself."""
    try:
        waiting = [symtable.symtable(source, "cell", "exec")]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    found: set[str] = set()
    while waiting:
        table = waiting.pop()
        waiting += table.get_children()
        top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (top or symbol.is_global()):
                found.add(symbol.get_name())
    return found - defined_names(source)


def _preamble(lab: Lab) -> list[ast.stmt]:
    """What the lab itself gives to the answers: imports, functions, classes, plain constants."""
    kept: list[ast.stmt] = []
    for cell in lab.notebook.cells:
        if cell.cell_type != "code" or cell.metadata.get("nbgrader") or cell.id == "colab-setup":
            continue
        for node in ast.parse(cell.source).body:
            constant = isinstance(node, ast.Assign) and _is_constant(node.value)
            if constant or isinstance(
                node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
            ):
                kept.append(node)
    return kept


def _is_constant(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).endswith("constexpr")
    return all(
        isinstance(node, (*LITERALS, ast.expr_context, ast.operator, ast.unaryop))
        for node in ast.walk(value)
    )


def _preamble_names(lab: Lab) -> set[str]:
    return set().union(*map(_bound, _preamble(lab)), set())


def cells_to_run(lab: Lab, asked: Asked, answers: Answers) -> dict[str, str]:
    """What has to be defined for one question, in order: sources by name.

    The answer's own cell, the answer cells whose functions it uses, and of the lab's own cells
    what these mention. Another question's cell that raises or hangs does no harm here.
    """
    wanted, given = {asked.cell}, _preamble_names(lab)
    while True:
        used = set().union(*(used_names(answers.sources[cell]) for cell in wanted)) - given
        more = {
            cell
            for cell, source in answers.sources.items()
            if cell not in wanted and defined_names(source) & used
        }
        if not more:
            break
        wanted |= more
    text = [answers.sources[cell] for cell in wanted]
    mentioned = set().union(*map(used_names, text), {asked.expression})
    parts: list[str] = []
    for node in reversed(_preamble(lab)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a for a in node.names if (a.asname or a.name).split(".")[0] in mentioned]
            if names:
                node = copy.copy(node)
                node.names = names
                parts.append(ast.unparse(node))
        elif _bound(node) & mentioned:
            parts.append(ast.unparse(node))
            mentioned |= used_names(parts[-1])
    preamble = {"given": "\n".join(reversed(parts)) + "\n"} if parts else {}
    return preamble | {cell: answers.sources[cell] for cell in lab.stubs if cell in wanted}


def pristine_copy(lab: Lab, answers: Answers) -> Any:
    """The released notebook with the learner's answers in place."""
    notebook = copy.deepcopy(lab.notebook)
    for cell in notebook.cells:
        grader = cell.metadata.get("nbgrader", {})
        if grader.get("solution") and grader["grade_id"] in answers.sources:
            cell.source = answers.sources[grader["grade_id"]]
    return notebook

"""The committed notebooks keep the rules of flashcourse.course.rules, and the rules can see."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from flashcourse.course.rules import problems
from flashcourse.course.stamp import WIDGET_VIEW, stamp, stamped_files
from flashcourse.files import (
    LABS,
    LESSONS,
    SOLUTIONS,
    ColabSettings,
    CourseError,
    colab_settings,
    differing,
    notebook_text,
    notebooks_in,
    read_notebook,
    write_whole,
)

ROOT = Path(__file__).parents[1]
SETTINGS = ColabSettings("https://example.org/course.git", "v1")
COMMITTED = notebooks_in(ROOT, LESSONS, SOLUTIONS, LABS)
PIXEL = "iVBORw0KGgo="


def lesson() -> nbformat.NotebookNode:
    """A small lesson that keeps every rule."""
    picture = new_output(
        "display_data",
        {"image/png": PIXEL, "text/plain": "a dot"},
        metadata={"image/png": {"alt": "a dot"}},
    )
    cells = [
        new_markdown_cell("# A dot\n![the dot](dot.png) `![](not an image)`", id="title"),
        new_code_cell(
            "show()  # see https://example.org/home/ and /home",
            id="draw",
            execution_count=2,
            outputs=[picture, new_output("stream", text="notebooks/x, a/tmp/b, 1/home/2\n")],
        ),
    ]
    stamped = stamp(new_notebook(cells=cells), SETTINGS)
    stamped.cells[0].execution_count = 1
    return stamped


def dead_links(notebook: nbformat.NotebookNode, folder: Path) -> list[str]:
    """The links of a notebook's text to files that are not there."""
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    targets = re.findall(r"(?<!!)\[[^\]]*\]\(([^)#\s]+)", "\n".join(texts))
    return [t for t in targets if "://" not in t and not (folder / t).exists()]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_its_links_lead_somewhere(path: Path) -> None:
    assert dead_links(read_notebook(path), path.parent) == []


def test_a_dead_link_is_seen() -> None:
    text = "[one](99_nowhere.ipynb), [two](../README.md), [three](https://example.org/x)"
    notebook = new_notebook(cells=[new_markdown_cell(text, id="links")])
    assert dead_links(notebook, ROOT / LESSONS) == ["99_nowhere.ipynb"]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_it_keeps_the_rules(path: Path) -> None:
    found = problems(read_notebook(path), path.parent.name, colab_settings(ROOT))
    assert found == [], "\n".join(found)


def test_there_are_notebooks_to_look_at() -> None:
    for folder in (LESSONS, SOLUTIONS, LABS):
        assert notebooks_in(ROOT, folder), f"{folder}/ is empty"


def test_stamping_what_is_committed_changes_no_byte() -> None:
    assert differing(stamped_files(ROOT)) == [], "run `python -m flashcourse notebooks`"


def test_ruff_finds_nothing() -> None:
    for command in (["check"], ["format", "--check"]):
        run = subprocess.run(
            [sys.executable, "-m", "ruff", *command, LESSONS, SOLUTIONS],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("kind", [LESSONS, SOLUTIONS, LABS])
def test_a_sound_notebook_is_accepted(kind: str) -> None:
    notebook = lesson()
    if kind != LESSONS:
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.update(outputs=[], execution_count=None)
    assert problems(notebook, kind, SETTINGS) == []


Notebook = nbformat.NotebookNode


def add_output(notebook: Notebook, output: Notebook) -> None:
    notebook.cells[2].outputs.append(output)


def page(html: str) -> Notebook:
    return new_output("display_data", {"text/html": html})


def widget(**beside: str) -> Notebook:
    return new_output(
        "display_data",
        {WIDGET_VIEW: {"model_id": "1"}, "text/plain": "VBox()", **beside},
        metadata={"image/png": {"alt": "a dot"}} if beside else {},
    )


def markdown(text: str) -> Callable[[Notebook], object]:
    return lambda notebook: notebook.cells[1].update(source=text)


def printed(text: str) -> Callable[[Notebook], object]:
    return lambda notebook: add_output(notebook, new_output("stream", text=text))


BREAKS: dict[str, tuple[Callable[[Notebook], object], str]] = {
    "id twice": (lambda n: n.cells[1].update(id="draw"), "'draw' is used 2 times"),
    "random id": (lambda n: n.cells[1].update(id="3f2a9c1d"), "'3f2a9c1d' is not a short"),
    "long random id": (
        lambda n: n.cells[1].update(id="7f5cab64-c790-4c7f-bd04-0242ac120002"),
        "is not a short",
    ),
    "capital id": (lambda n: n.cells[1].update(id="Title"), "'Title' is not a short"),
    "no first cell": (lambda n: n.cells.pop(0), "first cell is not the generated one"),
    "first cell edited": (
        lambda n: n.cells[0].update(source="import os"),
        "first cell is not the generated one",
    ),
    "first cell elsewhere": (
        lambda n: n.cells.append(n.cells.pop(0)),
        "first cell is not the generated one",
    ),
    "no accelerator": (lambda n: n.metadata.pop("accelerator"), "not stamped"),
    "other kernel": (lambda n: n.metadata.kernelspec.update(name="my-venv"), "not stamped"),
    "widget state": (lambda n: n.metadata.update(widgets={"state": {}}), "not stamped"),
    "run times": (
        lambda n: n.cells[2].metadata.update(execution={"iopub.execute_input": "2026"}),
        "not stamped",
    ),
    "widget view": (lambda n: add_output(n, widget(**{"image/png": PIXEL})), "not stamped"),
    "widget alone": (lambda n: add_output(n, widget()), "a widget with no picture beside it"),
    "old format": (lambda n: n.update(nbformat_minor=4), "not a valid"),
    "image without alt": (
        lambda n: n.cells[2].outputs[0].update(metadata={}),
        "image/png output has no alt text",
    ),
    "blank alt": (
        lambda n: n.cells[2].outputs[0].metadata.update({"image/png": {"alt": " "}}),
        "image/png output has no alt text",
    ),
    "markdown image without alt": (markdown("![](dot.png)"), "dot.png has no alt text"),
    "remote image": (markdown("![a dot](https://example.org/dot.png)"), "is remote"),
    "tag without alt": (markdown('<img src="dot.png" alt="">'), "has no alt text"),
    "remote tag": (markdown('<img alt="a dot" src="//example.org/dot.png">'), "is remote"),
    "tag in an output": (lambda n: add_output(n, page('<img src="a.png">')), "has no alt text"),
    "not run": (lambda n: n.cells[2].update(execution_count=None), "it was not run"),
    "error": (
        lambda n: add_output(n, new_output("error", ename="ValueError", evalue="no")),
        "ended in an error: ValueError: no",
    ),
    **{
        f"path {text}": (printed(f"saved to {text}!"), "a path of one machine")
        for text in (
            *("/home/ada/course/x", "/root/.cache/a", "/content/course/x.py", "/tmp/tmp1/k.py"),
            *("/Users/ada/x", "'/content/x'", r"C:\Users\ada", "file:///home/ada/x"),
        )
    },
    "path in a text": (markdown("Look into /home/ada/course."), "a path of one machine"),
    "path in a page": (lambda n: add_output(n, page("<p>/tmp/x/y</p>")), "a path of one machine"),
    "too large": (
        lambda n: add_output(
            n,
            new_output(
                "display_data",
                {"image/png": "A" * 1_500_000},
                metadata={"image/png": {"alt": "a large dot"}},
            ),
        ),
        "at most 1,500,000",
    ),
    "too long": (
        lambda n: n.cells.extend(new_markdown_cell("x", id=f"more-{i}") for i in range(40)),
        "43 cells; at most 40",
    ),
    "not valid": (lambda n: n.cells[2].update(outputs=[{"output_type": "what"}]), "not a valid"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_rule_is_seen(name: str) -> None:
    notebook = lesson()
    spoil, message = BREAKS[name]
    spoil(notebook)
    found = problems(notebook, LESSONS, SETTINGS)
    assert any(message in text for text in found), found


@pytest.mark.parametrize("kind", [SOLUTIONS, LABS])
def test_labs_are_kept_without_outputs(kind: str) -> None:
    found = problems(lesson(), kind, SETTINGS)
    assert sum("kept without outputs" in text for text in found) == 2


def test_stamping_generates_and_strips_and_is_idempotent() -> None:
    before = lesson()
    before.metadata.update(widgets={"state": {}}, language_info={"version": "3.99"})
    before.cells[2].metadata.update(tags=["keep"], execution={"shell.execute_reply": "2026"})
    add_output(before, widget(**{"image/png": PIXEL}))
    before.cells.pop(0)
    untouched = copy.deepcopy(before)
    once = stamp(before, SETTINGS)
    assert before == untouched
    assert [cell.id for cell in once.cells] == ["colab-setup", "title", "draw"]
    assert once.cells[2].metadata == {"tags": ["keep"]}
    assert [set(output.get("data", ())) for output in once.cells[2].outputs[::2]] == [
        {"image/png", "text/plain"}
    ] * 2
    assert "widgets" not in once.metadata
    assert notebook_text(stamp(once, SETTINGS)) == notebook_text(once)


def test_stamping_clears_the_outputs_of_solutions_and_keeps_those_of_lessons(
    tmp_path: Path,
) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.flashcourse]\nrepository = ""\ntag = "v1"\n')
    for folder in (LESSONS, SOLUTIONS):
        write_whole({tmp_path / folder / "01_a.ipynb": notebook_text(lesson())})
    write_whole(stamped_files(tmp_path))
    settings = colab_settings(tmp_path)
    for folder in (LESSONS, SOLUTIONS):
        assert problems(read_notebook(tmp_path / folder / "01_a.ipynb"), folder, settings) == []
    assert differing(stamped_files(tmp_path)) == []


def test_a_new_address_keeps_the_run() -> None:
    moved = stamp(lesson(), ColabSettings("https://example.org/elsewhere.git", "v2"))
    assert "elsewhere.git', 'v2'" in moved.cells[0].source
    assert [cell.get("execution_count") for cell in moved.cells] == [1, None, 2]


def test_one_bad_notebook_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.flashcourse]\nrepository = ""\ntag = "v1"\n')
    bad = lesson()
    add_output(bad, widget())
    write_whole({tmp_path / LESSONS / "01_bad.ipynb": notebook_text(bad)})
    with pytest.raises(CourseError, match=r"notebooks/01_bad.ipynb: cell draw: it shows a widget"):
        stamped_files(tmp_path)
    (tmp_path / LESSONS / "02_not.ipynb").write_text("not json")
    with pytest.raises(CourseError, match=r"02_not.ipynb: not a readable notebook"):
        read_notebook(tmp_path / LESSONS / "02_not.ipynb")

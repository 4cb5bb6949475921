"""Stamping a notebook with what is generated, and taking out what must not be committed."""

from __future__ import annotations

import copy
from pathlib import Path

from nbformat import NotebookNode

from flashcourse.course.colab import CELL_ID, setup_cell
from flashcourse.files import (
    LESSONS,
    SOLUTIONS,
    ColabSettings,
    CourseError,
    colab_settings,
    notebook_text,
    notebooks_in,
    read_notebook,
)

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "accelerator": "GPU",
    "colab": {"gpuType": "T4", "provenance": []},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
# What editors and runs leave in a cell: when it ran, where, how far it was scrolled.
CELL_LITTER = (
    *("ExecuteTime", "cellView", "colab", "collapsed", "execution", "executionInfo", "id"),
    *("outputId", "scrolled", "trusted", "vscode"),
)


def stamp(notebook: NotebookNode, settings: ColabSettings) -> NotebookNode:
    """A stamped copy of a notebook; stamping a stamped notebook changes nothing.

    The first cell and the metadata are generated, widget state goes, run times go. A widget's
    static picture stays.

    Raises:
        CourseError: a widget has no picture beside it, so nothing of it would remain.
    """
    stamped = copy.deepcopy(notebook)
    stamped.nbformat, stamped.nbformat_minor = 4, 5
    stamped.metadata = copy.deepcopy(METADATA)
    setup = setup_cell(settings)
    old = [cell for cell in stamped.cells if cell.get("id") == CELL_ID]
    if old and old[0].cell_type == "code":
        # It has no output outside Colab, whatever its text: a run of the lesson stays valid.
        setup.execution_count = old[0].execution_count
    stamped.cells = [setup] + [cell for cell in stamped.cells if cell.get("id") != CELL_ID]
    for cell in stamped.cells:
        for key in CELL_LITTER:
            cell.metadata.pop(key, None)
        if cell.cell_type == "code":
            _strip_widgets(cell)
    return stamped


def _strip_widgets(cell: NotebookNode) -> None:
    for output in cell.outputs:
        data = output.get("data", {})
        if WIDGET_VIEW not in data:
            continue
        if "image/png" not in data:
            raise CourseError(
                f"cell {cell.get('id')}: it shows a widget with no picture beside it, so a reader "
                "on GitHub would see nothing. Make it with flashcourse.show.explore, and assign "
                "the result (`box = explore(...)`) so that the cell does not show it twice."
            )
        del data[WIDGET_VIEW]


def clear_outputs(notebook: NotebookNode) -> NotebookNode:
    """Take the outputs and execution counts out, in place: ``solutions/`` is kept without."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def stamped_files(root: Path) -> dict[Path, str]:
    """What every notebook of ``notebooks/`` and ``solutions/`` should hold, by path.

    Raises:
        CourseError: a notebook cannot be stamped; names it.
    """
    settings = colab_settings(root)
    files = {}
    for path in notebooks_in(root, LESSONS, SOLUTIONS):
        try:
            notebook = read_notebook(path)
            if path.parent.name == SOLUTIONS:
                clear_outputs(notebook)
            files[path] = notebook_text(stamp(notebook, settings))
        except CourseError as error:
            raise CourseError(f"{path.relative_to(root)}: {error}") from error
    return files

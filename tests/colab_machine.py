"""A pretended Colab: a Python environment with what Colab brings, and nothing else."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import venv
from collections.abc import Iterable
from pathlib import Path

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode
from packaging.requirements import Requirement

from flashcourse import runtime

PACKAGES = Path(__file__).parent / "data" / "colab_packages.txt"


def listed_packages() -> list[str]:
    lines = PACKAGES.read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def with_dependencies(names: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions with these names and all that they need, by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found:
            continue
        found[name] = distribution = importlib.metadata.distribution(name)
        needs = [Requirement(text) for text in distribution.requires or []]
        waiting += [
            need.name for need in needs if not need.marker or need.marker.evaluate({"extra": ""})
        ]
    return found


def make_environment(folder: Path) -> Path:
    """Make the environment in an empty folder, of links to what is installed here.

    Returns:
        the folder of its kernel specification, which is called ``colab``.
    """
    names = [n for n in listed_packages() if n != "triton" or runtime.triton_installed()]
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    (site,) = (folder / "lib").glob("python*/site-packages")
    for name, distribution in with_dependencies(names).items():
        files = distribution.files
        assert files, f"{name} does not list its files: it cannot be linked"
        source = Path(str(distribution.locate_file("")))
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(source / top)
    python = str(folder / "bin" / "python")
    specification = {
        "argv": [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Colab",
        "language": "python",
    }
    kernels = folder / "kernels"
    (kernels / "colab").mkdir(parents=True)
    (kernels / "colab" / "kernel.json").write_text(json.dumps(specification))
    return kernels


def run_notebook(
    notebook: NotebookNode, kernels: Path, folder: Path, *, allow_errors: bool = False
) -> None:
    """Run a notebook in the pretended Colab, in ``folder``; the outputs go into the notebook."""
    kept = {
        name: os.environ[name]
        for name in ("HOME", "LANG", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "TMPDIR")
        if name in os.environ
    }
    path = os.pathsep.join([str(kernels.parent / "bin"), os.environ["PATH"]])
    colab = {"COLAB_RELEASE_TAG": "release-colab", "PYTHONNOUSERSITE": "1", "PATH": path}
    manager = AsyncKernelManager(
        kernel_name="colab",
        kernel_spec_manager=KernelSpecManager(
            kernel_dirs=[str(kernels)], ensure_native_kernel=False
        ),
    )
    client = NotebookClient(
        notebook,
        km=manager,
        timeout=120,
        allow_errors=allow_errors,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env={**kept, **colab})


def errors(notebook: NotebookNode) -> dict[str, str]:
    """The cells that ended in an error, and its text."""
    return {
        cell.id: f"{output.ename}: {output.evalue}"
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "error"
    }


def printed(notebook: NotebookNode, cell_id: str) -> str:
    """What one cell wrote to its standard output."""
    (cell,) = (cell for cell in notebook.cells if cell.id == cell_id)
    return "".join(o.text for o in cell.outputs if o.get("name") == "stdout").strip()


if __name__ == "__main__":  # to look at it: python tests/colab_machine.py EMPTY_FOLDER
    print(make_environment(Path(sys.argv[1])))

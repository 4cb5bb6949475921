"""Notebooks on Colab: the first cell, what it installs, and copies that carry the library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from colab_machine import errors, listed_packages, make_environment, printed, run_notebook
from nbformat.v4 import new_code_cell, new_notebook

from flashcourse.course import colab, on_colab
from flashcourse.course.labs import graded_cells
from flashcourse.files import LABS, LESSONS, ColabSettings, CourseError, notebooks_in

ROOT = Path(__file__).parents[1]
NOWHERE = ColabSettings("", "v1")

# Asks the library for everything that differs between a checkout, a zip and real files.
PROBE = """
import inspect, subprocess, sys
import flashcourse
from flashcourse.attention import naive_attention
print(flashcourse.__file__)
assert "online" in inspect.getsource(flashcourse.attention.tiled) and "triton" not in sys.modules
child = subprocess.run([sys.executable, "-m", "flashcourse", "--help"], capture_output=True)
assert child.returncode == 0, child.stderr
"""


def probe_notebook(setup: nbformat.NotebookNode) -> nbformat.NotebookNode:
    return new_notebook(cells=[setup, new_code_cell(PROBE.strip(), id="probe")])


def with_setup_twice(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """As a learner does who runs the first cell again."""
    notebook.cells.insert(1, new_code_cell(notebook.cells[0].source, id="again"))
    return notebook


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("colab") / "environment")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> ColabSettings:
    """The project as it stands here, committed and tagged in a repository that git can clone."""
    folder = tmp_path_factory.mktemp("published")
    for path in [ROOT / "pyproject.toml", *(ROOT / "flashcourse").rglob("*")]:
        if path.is_file() and "__pycache__" not in path.parts:
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    who = ["-c", "user.name=Course", "-c", "user.email=course@example.org"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "v1"], ["tag", "v1"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return ColabSettings(folder.as_uri(), "v1")


@pytest.mark.parametrize(
    "settings", [NOWHERE, ColabSettings("https://example.org/course.git", "v1")]
)
def test_the_cell_does_nothing_elsewhere(settings: ColabSettings, tmp_path: Path) -> None:
    source = colab.setup_source(settings)
    program = (
        "import os, sys; before = list(sys.path), dict(os.environ)\n"
        f"exec({source!r})\n"
        "assert (list(sys.path), dict(os.environ)) == before and not os.listdir()\n"
        "assert 'flashcourse' not in sys.modules and 'subprocess' not in sys.modules\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "COLAB_RELEASE_TAG"}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True)


def test_without_an_address_it_says_what_to_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    with pytest.raises(RuntimeError, match="no public address yet; ask for stand-alone copies"):
        exec(colab.setup_source(NOWHERE), {})


def test_an_address_needs_a_tag() -> None:
    with pytest.raises(CourseError, match="no tag"):
        colab.setup_source(ColabSettings("https://example.org/course.git", ""))


def test_it_fetches_the_tagged_project(
    kernels: Path, published: ColabSettings, tmp_path: Path
) -> None:
    notebook = with_setup_twice(probe_notebook(colab.setup_cell(published)))
    run_notebook(notebook, kernels, tmp_path)
    assert printed(notebook, "probe") == str(tmp_path / "flash-course/flashcourse/__init__.py")


def test_a_failed_fetch_says_so_and_leaves_nothing(kernels: Path, tmp_path: Path) -> None:
    missing = ColabSettings((tmp_path / "not-there").as_uri(), "v1")
    notebook = new_notebook(cells=[colab.setup_cell(missing)])
    run_notebook(notebook, kernels, tmp_path, allow_errors=True)
    assert "could not fetch file://" in errors(notebook)[colab.CELL_ID]
    assert list(tmp_path.iterdir()) == []


def test_a_copy_carries_the_library(kernels: Path, tmp_path: Path) -> None:
    stamped = probe_notebook(colab.setup_cell(NOWHERE))
    with_library = with_setup_twice(colab.stand_alone(stamped, colab.library_archive(ROOT)))
    run_notebook(with_library, kernels, tmp_path)
    assert "flashcourse-" in printed(with_library, "probe")
    assert not printed(with_library, "probe").startswith(str(ROOT))
    # The control: this machine has nothing of the course but what the copy brings.
    bare = new_notebook(cells=[new_code_cell("import flashcourse", id="probe")])
    run_notebook(bare, kernels, tmp_path, allow_errors=True)
    assert errors(bare) == {"probe": "ModuleNotFoundError: No module named 'flashcourse'"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", [LESSONS, LABS])
def test_the_first_of_the_courses_copies_runs(folder: str, kernels: Path, tmp_path: Path) -> None:
    out = tmp_path / "copies"
    written = colab.write_stand_alone(ROOT, out)
    assert sorted(written) == sorted(
        out / path.relative_to(ROOT) for path in notebooks_in(ROOT, LESSONS, LABS)
    )
    notebook = nbformat.read(notebooks_in(out, folder)[0], as_version=4)
    empty = tmp_path / "empty"
    empty.mkdir()
    run_notebook(notebook, kernels, empty, allow_errors=True)
    assert set(errors(notebook)) == set(graded_cells(notebook)), errors(notebook)


def test_copies_are_the_same_bytes_each_time_and_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert colab.library_archive(ROOT) == colab.library_archive(ROOT)
    replaced: list[object] = []

    def full_disk(fd: int, *args: object, **kwargs: object) -> object:
        replaced.append(fd)
        if len(replaced) > 1:
            raise OSError(28, "No space left on device")
        return open(fd, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "fdopen", full_disk)
    with pytest.raises(OSError, match="No space left"):
        colab.write_stand_alone(ROOT, tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_copies_do_not_overwrite_the_course() -> None:
    for out in (ROOT, ROOT / LESSONS, ROOT / LABS / "copies"):
        with pytest.raises(CourseError, match="a folder of its own"):
            colab.write_stand_alone(ROOT, out)


@pytest.mark.parametrize(
    ("installed", "missing"),
    [
        ({"rich": "13.7.0", "typer": "0.20"}, []),
        ({"rich": "13.7", "typer": "0.12.0"}, []),
        ({"rich": "13.6.9", "typer": "0.9.1"}, ["rich>=13.7", "typer>=0.12,<1"]),
        ({"rich": "14", "typer": "1.0rc1"}, []),
        ({"typer": "0.12"}, ["rich>=13.7"]),
        ({}, ["rich>=13.7", "typer>=0.12,<1"]),
    ],
)
def test_only_what_is_missing_or_too_old_is_installed(
    installed: dict[str, str], missing: list[str]
) -> None:
    requirements = ["torch>=2.8", "triton; sys_platform == 'linux'", "ipywidgets>=8.0,<9"]
    requirements += ["jupyterlab>=4.2", "ipykernel>=6.17", "rich>=13.7", "typer>=0.12,<1"]
    assert on_colab.missing_requirements(requirements, installed.get) == missing


def test_the_machines_own_packages_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], str]] = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        frozen = Path(command[command.index("--constraint") + 1]).read_text()
        calls.append((command, frozen))
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no network")

    versions = {"torch": "2.8.0+cu126", "triton": "3.4.0", "numpy": "2.0.2", "ipywidgets": "7.7.1"}
    monkeypatch.setattr(on_colab, "installed_version", versions.get)
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(on_colab.subprocess, "run", pip)
    with pytest.raises(on_colab.SetupFailed, match=r"(?s)could not install .*no network.*again"):
        on_colab.prepare()
    ((command, frozen),) = calls
    assert frozen.splitlines() == [
        "torch==2.8.0+cu126",
        "triton==3.4.0",
        "ipywidgets==7.7.1",
        "numpy==2.0.2",
    ]
    wanted = command[command.index("--constraint") + 2 :]
    assert any(name.startswith("rich") for name in wanted)
    assert not any(name.startswith(on_colab.NEVER_INSTALLED) for name in wanted)


def test_away_from_colab_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_colab, "installed_version", lambda name: None)
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(on_colab.SetupFailed, match="pip install 'numpy"):
        on_colab.prepare()


def test_the_pretended_colab_brings_no_more_than_colab() -> None:
    from colab_machine import with_dependencies

    from flashcourse import runtime

    names = [n for n in listed_packages() if n != "triton" or runtime.triton_installed()]
    brought = with_dependencies(names)
    assert brought.keys().isdisjoint(
        {"flashcourse", "jupyterlab", "nbval", "nbgrader", "playwright", "pytest"}
    )

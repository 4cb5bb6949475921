"""The notebooks' own runner is tested on notebooks that die, hang, fail, and do none of these."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Run:
    outcomes: dict[str, str]  # by notebook and cell, such as "dies 1": "FAILED"
    output: str
    seconds: float
    folder: Path


def cell(source: str, number: int, *tags: str) -> nbformat.NotebookNode:
    return new_code_cell(source, id=f"cell-{number}", metadata={"tags": list(tags)} if tags else {})


def run_nbval(folder: Path, cell_seconds: float, **notebooks: list[tuple[str, ...]]) -> Run:
    """Run notebooks, given as (source, tag, …) of their cells, the way the course's suite does."""
    for name, cells in notebooks.items():
        notebook = new_notebook(cells=[cell(c[0], n, *c[1:]) for n, c in enumerate(cells)])
        nbformat.write(notebook, folder / f"{name}.ipynb")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(ROOT / "pyproject.toml"),
        "-n0",
        "-rA",
        "-v",
    ]
    command += ["-p", "plugins.nbval_guard", "-p", "no:cacheprovider", "--color=no"]
    command += ["--rootdir", str(folder), f"--nbval-cell-timeout={cell_seconds}", str(folder)]
    started = time.monotonic()
    run = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    outcomes = {}
    for line in run.stdout.splitlines():  # such as "dies::ipynb::Cell 1 FAILED     [ 66%]"
        if found := re.match(r"(\w+)::ipynb::Cell (\d+) ([A-Z]+) .*%\]$", line):
            outcomes[f"{found[1]} {found[2]}"] = found[3]
    return Run(outcomes, run.stdout + run.stderr, time.monotonic() - started, folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Notebooks that go wrong in every way but by taking too long."""
    folder = tmp_path_factory.mktemp("notebooks")
    child = "import os, subprocess; child = subprocess.Popen(['sleep', '600'])"
    note = f"{child}; open('pids', 'a').write(f'{{os.getpid()}} {{child.pid}}\\n')"
    return run_nbval(
        folder,
        200,  # nbval alone would wait this long for a dead kernel
        announced=[("1 / 0", "raises-exception"), ("x = 1", "raises-exception"), ("x",)],
        dies=[(note,), ("os._exit(3)",), ("x",), ("y = 2",)],
        killed=[("import os, signal; os.kill(os.getpid(), signal.SIGKILL)",)],
        sound=[(note,), ("assert child",)],
        wrong=[("x = 1",), ("assert x == 2",), ("x",)],
    )


def outcomes(run: Run, name: str) -> list[str]:
    return [outcome for cell, outcome in run.outcomes.items() if cell.split()[0] == name]


def test_a_sound_notebook_passes(run: Run) -> None:
    assert outcomes(run, "sound") == ["PASSED"] * 2, run.output


def test_an_error_fails_its_cell_alone(run: Run) -> None:
    assert outcomes(run, "wrong") == ["PASSED", "FAILED", "PASSED"], run.output
    assert "AssertionError" in run.output


def test_a_dead_kernel_is_noticed_at_once(run: Run) -> None:
    assert outcomes(run, "dies") == ["PASSED", "FAILED", "FAILED", "FAILED"], run.output
    assert outcomes(run, "killed") == ["FAILED"], run.output
    assert "the kernel ended with exit status 3" in run.output
    assert "not run: the kernel ended with exit status 3 in cell cell-1" in run.output
    assert "the kernel was killed by SIGKILL" in run.output
    assert run.seconds < 60, run.output


def test_an_error_that_was_announced_must_come(run: Run) -> None:
    assert outcomes(run, "announced") == ["PASSED", "FAILED", "PASSED"], run.output
    assert "tagged raises-exception and raised nothing" in run.output


def test_no_process_outlives_the_run(run: Run) -> None:
    pids = [int(pid) for pid in (run.folder / "pids").read_text().split()]
    assert len(pids) == 4, run.output
    assert [pid for pid in pids if _running(pid)] == []
    assert _running(os.getpid())  # the check can see a process


def _running(pid: int) -> bool:
    """True if the process is there and more than an entry that nobody has collected."""
    if Path("/proc/self/stat").exists():
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
    else:  # macOS
        listing = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True)
        state = listing.stdout.decode().strip()
    return state[:1] not in ("", "Z")


def test_a_hung_cell_is_stopped_and_the_rest_fail_plainly(tmp_path: Path) -> None:
    run = run_nbval(
        tmp_path,
        2,
        hangs=[("import time; time.sleep(600)",), ("x = 1",)],
        # It does not listen to the interrupt either.
        stubborn=[
            ("import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)",),
            ("x = 1",),
        ],
    )
    assert outcomes(run, "hangs") == outcomes(run, "stubborn") == ["FAILED"] * 2, run.output
    assert "Timeout of 2 seconds exceeded" in run.output
    assert "not run: cell cell-0 did not finish within 2 s" in run.output
    assert "XFAIL" not in run.output
    assert "XPASS" not in run.output
    assert run.seconds < 60, run.output

"""What only a GPU can verify, in steps: ``python tools/verify_on_gpu.py --list`` names them.

    python tools/verify_on_gpu.py paper lesson-06 flash --minutes 9

Steps that measure run alone and in the order given, tests afterwards and side by side. Each has a
time limit, and none begins with less than half of it left. Afterwards ``out/verified`` holds

- ``summary.json``: what became of every step, written again after each;
- ``<step>.log``: what it printed;
- ``made.tar.gz``: the lessons, results and records that were made, to be unpacked over a clone.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from flashcourse import runtime
from flashcourse.files import write_whole
from flashcourse.measure.recorded import RECORD_VARIABLE

ROOT = Path(__file__).parents[1]
MADE = ("notebooks", "results", "flashcourse/measure/data")  # what a step may write
PYTHON = (sys.executable, "-m")
SIDE_BY_SIDE = 4


@dataclass(frozen=True)
class Step:
    """A command, run in the course's folder; ``alone``: it measures, so nothing runs beside it."""

    name: str
    command: tuple[str, ...]
    seconds: int
    alone: bool = True
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """``status``: passed, failed, timeout, or left (there was no time to begin it)."""

    step: str
    status: str
    seconds: float
    command: str


def _lesson(number: str, seconds: int) -> Step:
    return Step(
        f"lesson-{number}", (*PYTHON, "flashcourse", "notebooks", "--execute", number), seconds
    )


def _tests(name: str, seconds: int, *arguments: str, alone: bool = False, **more: str) -> Step:
    # a run that is cut off must still say which tests failed
    return Step(name, (*PYTHON, "pytest", "-v", *arguments), seconds, alone, more)


def _bench(name: str, seconds: int, *arguments: str) -> Step:
    return Step(name, (*PYTHON, *arguments), seconds)


STEPS = {
    step.name: step
    for step in (
        _bench("paper", 480, "flashcourse", "bench", "--grid", "paper", "--rounds", "2",
               "--minutes", "7.4", "--out", "results"),
        _bench("tune-short", 240, "flashcourse", "bench", "--tune", "--tune-length", "512",
               "--only", "forward head_dim=128 float16"),
        _bench("decode", 240, "flashcourse", "bench", "--grid", "decode", "--rounds", "6",
               "--out", "results"),
        _bench("grouped", 120, "flashcourse.bench.grouped", "--json", "results/grouped.json"),
        _bench("varlen", 240, "flashcourse.bench.varlen"),
        _bench("packing", 420, "flashcourse.bench.packing"),
        _bench("serving", 420, "flashcourse.bench.serving", "--requests", "128", "--turns", "1",
               "--sample", "48"),
        *(_lesson(f"{number:02}", 200) for number in range(1, 11)),
        _lesson("00", 60),  # shows what the others recorded
        _tests("speed", 300, "-n", "0", "-k", "lab4.speed", "tests/test_right_answers.py",
               alone=True, FLASHCOURSE_SEEDS="500"),
        Step("class", (sys.executable, "tests/class_of_100", "--stop-after", "590"), 600),
        _tests("flash", 590, "-n", "8", "--dist", "load", "tests/test_flash_by_hand.py",
               "tests/test_flash_attention.py",
               "tests/test_flash_plan.py", "tests/test_flash_operator.py",
               "tests/test_flash_decode.py"),
        _tests("random", 590, "-n", "12", "--dist", "load", "-k", "two_thousand",
               "tests/test_flash_random.py"),
        _tests("measure", 300, "-n", "0", "tests/test_measure_backend.py", "tests/test_bench.py",
               "tests/test_bench_grouped.py",
               "tests/test_measure_timing_memory.py", "tests/test_measure_compiled.py", alone=True),
        _tests("solutions", 400, "-n", "0", "solutions", alone=True),  # lab4.speed is timed
        _tests("models", 500, "-n", "2", "tests/test_model_transformers.py",
               "tests/test_model_limits.py", "tests/test_model_bench.py",
               "tests/test_serving_bench.py", "tests/test_serving_engine.py"),
        _tests("notebooks", 590, "-n", "3", "notebooks"),
        _tests("unsolved", 500, "-n", "3", "--dist", "load", "tests/test_notebook_runs.py"),
        _tests("grader", 500, "-n", "0", "tests/test_grade_tray.py", "tests/test_grade_sandbox.py",
               "tests/test_grade_race.py", "tests/test_grade_batch.py",
               "tests/test_grading_triton.py"),
        _tests("right-answers", 590, "-n", "8", "--dist", "load", "-k", "not lab4.speed",
               "tests/test_right_answers.py", FLASHCOURSE_SEEDS="500"),
        _tests("mistakes", 590, "-n", "8", "--dist", "load", "tests/test_known_mistakes.py",
               "tests/test_grading_kernels_forward.py", "tests/test_grading_kernels_backward.py",
               "tests/test_grading_wrong_answers.py"),
    )
}  # fmt: skip


def run_step(step: Step, out: Path, seconds: float) -> Outcome:
    """Run one step; it and all it started are ended when its time is over."""
    started = time.monotonic()
    environment = {**os.environ, RECORD_VARIABLE: "1", **step.environment}
    with (out / f"{step.name}.log").open("wb") as log:
        process = subprocess.Popen(
            step.command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = "failed" if process.wait(min(step.seconds, seconds)) else "passed"
        except subprocess.TimeoutExpired:
            status = "timeout"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Outcome(step.name, status, time.monotonic() - started, " ".join(step.command[1:]))


def run_steps(
    steps: Sequence[Step], out: Path, minutes: float, told: Callable[[Outcome], None]
) -> list[Outcome]:
    """Run the steps: those that measure one by one, then the others side by side."""
    out.mkdir(parents=True, exist_ok=True)
    started, begun = time.time(), time.monotonic()
    outcomes: list[Outcome] = []

    def one(step: Step) -> None:
        left = 60 * minutes - (time.monotonic() - begun)
        # a step that is cut off has cost its time and says nothing
        if left < step.seconds / 2:
            outcome = Outcome(step.name, "left", 0.0, " ".join(step.command[1:]))
        else:
            outcome = run_step(step, out, left)
        outcomes.append(outcome)
        _keep(out, outcomes, started)
        told(outcome)

    for step in steps:
        if step.alone:
            one(step)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        list(pool.map(one, [step for step in steps if not step.alone]))
    return outcomes


def _keep(out: Path, outcomes: Iterable[Outcome], since: float) -> None:
    """What there is so far: a run that is cut off keeps its finished steps."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for folder in MADE:
            for path in sorted((ROOT / folder).rglob("*")):
                if path.is_file() and path.stat().st_mtime >= since:
                    archive.add(path, path.relative_to(ROOT).as_posix())
    summary = json.dumps([asdict(outcome) for outcome in list(outcomes)], indent=1)
    write_whole({out / "made.tar.gz": packed.getvalue(), out / "summary.json": summary})


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Steps, in their order.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for logs, summary and what was made.")] = (
        ROOT / "out" / "verified"
    ),
    minutes: Annotated[float, typer.Option(min=0, help="End everything by then.")] = 60.0,
    tutorial: Annotated[
        Path | None, typer.Option(help="Triton's 06-fused-attention.py, for the paper grid.")
    ] = None,
    list_steps: Annotated[bool, typer.Option("--list", help="Name the steps and stop.")] = False,
) -> None:
    """Run steps that only a GPU can verify; all of them if none is named."""
    console = Console()
    if list_steps:
        table = Table("step", "seconds at most", "alone", "command")
        for step in STEPS.values():
            alone = "yes" if step.alone else ""
            table.add_row(step.name, str(step.seconds), alone, " ".join(step.command[1:]))
        console.print(table)
        return
    unknown = sorted(set(names or ()) - set(STEPS))
    if unknown:
        console.print(f"unknown steps: {', '.join(unknown)}; --list names those there are")
        raise typer.Exit(2)
    if not runtime.has_gpu():
        console.print("there is no GPU here, so nothing of this can be verified")
        raise typer.Exit(2)

    def tell(outcome: Outcome) -> None:
        console.print(f"{outcome.status:8} {outcome.seconds:6.0f} s  {outcome.step}")

    steps = [STEPS[name] for name in names or STEPS]
    if tutorial is not None:
        more = ("--tutorial", str(tutorial.resolve()))
        steps = [
            replace(step, command=step.command + more) if step.name == "paper" else step
            for step in steps
        ]
    outcomes = run_steps(steps, out, minutes, tell)
    raise typer.Exit(0 if all(outcome.status == "passed" for outcome in outcomes) else 1)


if __name__ == "__main__":
    typer.run(main)

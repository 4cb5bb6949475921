"""``python -m flashcourse doctor``: what this machine can run, and what to type where it cannot.

The doctor answers on a broken machine too: nothing is imported here that may be missing, and the
kernel runs in a process of its own.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import typer

from flashcourse import runtime

ROOT = Path(__file__).resolve().parents[1]
OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 8)
PROBE_SECONDS = 60
COUNTER_SWITCH = Path("/proc/driver/nvidia/params")

Status = Literal["ok", "limited", "broken"]

# What a lesson or lab loses without a need. Those that lose nothing stand here too: a notebook
# that is not listed is a mistake, found by tests/test_doctor.py.
NEEDS: dict[str, dict[str, str]] = {
    "00_start_here": {},
    "01_naive_attention": {},
    "02_memory_traffic": {"counters": "reading the bytes from the hardware counter"},
    "03_online_softmax": {},
    "04_triton_forward": {"triton": "every kernel", "gpu": "speed and occupancy"},
    "05_triton_backward": {"triton": "every kernel", "gpu": "speed"},
    "06_sdpa_backends": {"gpu": "which GPU backend ran, and how fast"},
    "07_packing": {"triton": "the varlen kernel", "gpu": "speed and memory of training"},
    "08_kv_cache": {"triton": "the decode kernel", "gpu": "speed of decoding"},
    "09_paged_attention": {"triton": "the paged kernel", "gpu": "speed of the paged kernel"},
    "10_does_it_matter": {"triton": "the course's kernels", "gpu": "speed and service"},
    "lab1": {},
    "lab2": {},
    "lab3": {},
    "lab4": {"triton": "every question", "gpu": "the question on speed"},
    "lab5": {"triton": "every question"},
    "lab6": {"triton": "the varlen kernel"},
    "lab7": {"triton": "the paged kernel"},
}
NEED_NAMES = {"triton": "Triton", "gpu": "a GPU", "counters": "a GPU's hardware counters"}


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``fix`` is what to type or to use where something is missing."""

    name: str
    value: str
    status: Status = "ok"
    note: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Coverage:
    """What can be verified of one notebook here: all but what ``missing`` lists, and why."""

    notebook: str
    missing: list[str] = field(default_factory=list)


@dataclass
class Report:
    """Everything the doctor found, in the order in which it is shown."""

    findings: list[Finding]
    coverage: list[Coverage]
    seconds: float = 0.0

    @property
    def can_run(self) -> bool:
        """False if the course cannot run here."""
        return all(finding.status != "broken" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The report for ``--json``."""
        return {"can_run": self.can_run, **asdict(self)}


def pip(arguments: str) -> str:
    """The pip command of the Python that is running, as one types it in the course's folder."""
    in_venv = Path(sys.prefix) == ROOT / ".venv"
    return f"{'.venv/bin/python' if in_venv else 'python'} -m pip {arguments}"


def installed_version(package: str) -> str | None:
    """The version of an installed package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def load(name: str) -> ModuleType | str:
    """The module, or in words why it cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken library can raise anything while it loads
        return f"{type(error).__name__}: {error}"


def examine_python() -> Finding:
    version = platform.python_version()
    if sys.version_info < OLDEST_PYTHON:
        fix = "make lab PYTHON=python3.13"
        return Finding("Python", version, "broken", "The course needs 3.11 or newer.", fix)
    return Finding("Python", version, note=f"{platform.system()} {platform.machine()}")


def examine_torch(torch: ModuleType | str) -> Finding:
    wanted = ".".join(map(str, OLDEST_TORCH))
    install = pip(f'install "torch>={wanted}"')
    if isinstance(torch, str):
        if installed_version("torch") is None:
            return Finding("PyTorch", "missing", "broken", torch, install)
        again = pip("install --force-reinstall torch numpy")
        return Finding("PyTorch", "does not load", "broken", torch, again)
    version = str(getattr(torch, "__version__", "unknown"))
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or tuple(map(int, found.groups())) < OLDEST_TORCH:
        return Finding(
            "PyTorch", version, "broken", f"The course needs {wanted} or newer.", install
        )
    return Finding("PyTorch", version)


def examine_triton() -> Finding:
    version = installed_version("triton")
    if not runtime.triton_installed():
        if sys.platform == "linux":
            note = (
                "The kernels of lessons 04 and later cannot run; the set-up installs it on Linux."
            )
            return Finding("Triton", "missing", "broken", note, pip("install triton"))
        note = "There are no wheels for this system. Everything in plain PyTorch runs."
        fix = "For the kernels, use the devcontainer or Colab (README.md says how)."
        return Finding("Triton", "missing", "limited", note, fix)
    note = "interpreter on: kernels run on the CPU" if runtime.interpreting() else "compiles"
    return Finding("Triton", version or "unknown version", note=note)


def driver_sees_a_gpu() -> bool:
    """True if NVIDIA's own tool lists a GPU, whatever PyTorch thinks."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout


def shared_memory_per_block(properties: Any) -> int | None:
    """Bytes of shared memory one block may use, or None where PyTorch does not know."""
    for name in ("shared_memory_per_block_optin", "shared_memory_per_block"):
        if value := getattr(properties, name, None):
            return int(value)
    return None


def examine_gpu(torch: ModuleType | str) -> list[Finding]:
    if isinstance(torch, str):
        return []
    if not runtime.has_gpu():
        note = "Kernels run in Triton's interpreter; speed is not measured."
        fix = "For speed: a machine with an NVIDIA GPU, or Colab (README.md says how)."
        if driver_sees_a_gpu():
            if getattr(torch.version, "cuda", None) is None:
                note = "There is an NVIDIA GPU, but this PyTorch was built for CPUs only."
                fix = pip("install --force-reinstall torch") + "  (from an index with CUDA builds)"
            else:
                note = "There is an NVIDIA GPU, but its driver is too old for this PyTorch."
                fix = f"Update the NVIDIA driver to one for CUDA {torch.version.cuda}."
        return [Finding("GPU", "none", "limited", note, fix)]
    properties = torch.cuda.get_device_properties(0)
    capability = runtime.compute_capability() or (0, 0)
    shared = shared_memory_per_block(properties)
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    findings = [Finding("GPU", str(properties.name), note=memory)]
    value = ".".join(map(str, capability))
    if torch.version.hip is None and capability < (8, 0):
        note = "Outside Triton's support: dots compile to plain FMA, no bfloat16. Use small tiles."
        findings.append(Finding("compute capability", value, "limited", note))
    else:
        findings.append(Finding("compute capability", value))
    text = "unknown" if shared is None else f"{shared / 1024:.0f} KiB"
    findings.append(Finding("shared memory per block", text))
    return findings


def examine_dtype(torch: ModuleType | str) -> list[Finding]:
    if isinstance(torch, str):
        return []
    return [Finding("dtype to use", str(runtime.compute_dtype()).removeprefix("torch."))]


def probe_command() -> list[str]:
    return [sys.executable, "-m", "flashcourse.probe"]


def examine_kernel(timeout: float = PROBE_SECONDS) -> Finding:
    """Run the tiny kernel in a process of its own and read what it says."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    numpy = pip("install --force-reinstall numpy triton")
    try:
        run = subprocess.run(
            probe_command(), capture_output=True, text=True, timeout=timeout, env=environment
        )
    except subprocess.TimeoutExpired:
        note = f"It did not answer within {timeout:g} s."
        return Finding("test kernel", "hangs", "broken", note, numpy)
    if run.returncode < 0:
        note = f"It died from signal {-run.returncode}."
        return Finding("test kernel", "crashes", "broken", note, numpy)
    if run.returncode > 0:
        words = run.stderr.strip().splitlines() or ["It said nothing."]
        return Finding("test kernel", "fails", "broken", words[-1], numpy)
    result = json.loads(run.stdout.strip().splitlines()[-1])
    if result["problem"]:
        note = f"In the {result['where']}, {result['problem']}."
        return Finding("test kernel", "wrong", "broken", note, numpy)
    note = f"largest error {result['error']:.0e} against float64"
    return Finding("test kernel", f"right, by the {result['where']}", note=note)


def examine_jupyter() -> list[Finding]:
    findings = []
    for package, loss in (("jupyterlab", "`make lab` opens it."), ("ipywidgets", "No sliders.")):
        version = installed_version(package)
        if version:
            findings.append(Finding(package, version))
        else:
            fix = pip(f"install {package}")
            findings.append(Finding(package, "missing", "limited", loss, fix))
    return findings


def find_ncu() -> str | None:
    from flashcourse.measure.counters import find_ncu as find

    return find()


def examine_counters(torch: ModuleType | str) -> Finding:
    """Can NVIDIA's ncu read this GPU's counters? Lesson 02 uses them."""
    name = "hardware counters"
    instead = "Lesson 02 meters the bytes in a pretended memory and shows recorded counters."
    if isinstance(torch, str) or not runtime.has_gpu() or torch.version.hip is not None:
        return Finding(name, "none", "limited", instead, "They need an NVIDIA GPU and ncu.")
    ncu = find_ncu()
    if ncu is None:
        fix = "Install NVIDIA Nsight Compute and put `ncu` on the PATH."
        return Finding(name, "no ncu", "limited", instead, fix)
    try:
        restricted = "RmProfilingAdminOnly: 1" in COUNTER_SWITCH.read_text()
    except OSError:
        restricted = False
    if restricted and os.geteuid() != 0:
        fix = "An administrator sets NVreg_RestrictProfilingToAdminUsers=0 for the nvidia module."
        return Finding(name, "not allowed", "limited", instead, fix)
    return Finding(name, "ncu")


def examine_notebooks(root: Path, have: dict[str, bool]) -> list[Coverage]:
    """What can be verified of each lesson and lab in this folder, given what the machine has."""
    paths = [
        *sorted((root / "notebooks").glob("*.ipynb")),
        *sorted((root / "labs").glob("*.ipynb")),
    ]
    coverage = []
    for path in paths:
        name = path.stem
        key = name.split("_")[0] if name.startswith("lab") else name
        missing = [
            f"{loss} (needs {NEED_NAMES[need]})"
            for need, loss in NEEDS.get(key, {}).items()
            if not have[need]
        ]
        coverage.append(Coverage(f"{path.parent.name}/{name}", missing))
    return coverage


def examine(root: Path = ROOT) -> Report:
    """Look at everything. Takes a few seconds, most of them for the test kernel."""
    start = time.perf_counter()
    torch = load("torch")
    triton = examine_triton()
    findings = [examine_python(), examine_torch(torch), triton]
    findings += [*examine_gpu(torch), *examine_dtype(torch)]
    kernel_runs = False
    if not isinstance(torch, str) and triton.value != "missing":
        kernel = examine_kernel()
        kernel_runs = kernel.status == "ok"
        findings.append(kernel)
    counters = examine_counters(torch)
    findings += [*examine_jupyter(), counters]
    have = {
        "triton": kernel_runs,
        "gpu": runtime.has_gpu(),
        "counters": counters.status == "ok",
    }
    return Report(findings, examine_notebooks(root, have), time.perf_counter() - start)


NOTEBOOK_LETTERS = 88  # in a line of a notebook's output
MARKS = {"ok": "[green]✓[/]", "limited": "[yellow]–[/]", "broken": "[red]✗[/]"}


def show(report: Report) -> None:
    """Print the report for a person. In a notebook it is one output, narrow enough for its cell."""
    from rich.console import Console, Group, RenderableType
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if console.is_jupyter:
        console.width = NOTEBOOK_LETTERS
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in report.findings:
        table.add_row(
            MARKS[finding.status], finding.name, escape(finding.value), escape(finding.note)
        )
    parts: list[RenderableType] = [table]

    def say(line: str) -> None:
        parts.append(Text.from_markup(line))

    fixes = [finding for finding in report.findings if finding.fix]
    if fixes:
        say("\n[bold]What to do about it[/]")
    for finding in fixes:
        say(f"{MARKS[finding.status]} {finding.name}: {escape(finding.fix)}")
    if report.coverage:
        say("\n[bold]Lessons and labs[/]")
    for notebook in report.coverage:
        mark = MARKS["limited" if notebook.missing else "ok"]
        text = "fully verified here"
        if notebook.missing:
            text = "runs; not verified here: " + "; ".join(notebook.missing)
        say(f"{mark} {notebook.notebook}: {escape(text)}")
    verdict = "[bold green]The course runs here.[/]"
    if not report.can_run:
        verdict = "[bold red]The course cannot run here yet.[/] What to do stands above, at each ✗."
    say(f"\n{verdict} [dim]({report.seconds:.0f} s)[/]")
    console.print(Group(*parts))


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON, for programs.")
    ] = False,
) -> None:
    """Say what this machine can run, and what to type where it cannot."""
    report = examine()
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        show(report)
    if not report.can_run:
        raise typer.Exit(1)

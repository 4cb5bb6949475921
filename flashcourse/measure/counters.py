"""Bytes read from the hardware: NVIDIA's counters at the device memory, through Nsight Compute.

``ncu`` runs a small program (:mod:`flashcourse.measure.counters_child`) and reports, for each of
its kernels, what went in and out of DRAM. Where that is not possible the result says why; it is
never a zero.

``python -m flashcourse.measure.counters --record`` measures both programs and keeps the result
that the lesson shows on machines without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from flashcourse.measure.recorded import RECORD_VARIABLE, describe_record, load_record, record

CHILD_MODULE = "flashcourse.measure.counters_child"
PROGRAMS = ("naive", "flash")
READ_METRIC, WRITE_METRIC = "dram__bytes_read.sum", "dram__bytes_write.sum"
RECORD = "hardware_bytes"
COMMAND = "python -m flashcourse.measure.counters --record"
_UNITS = {"byte": 1, "kbyte": 10**3, "mbyte": 10**6, "gbyte": 10**9, "tbyte": 10**12}
_INSTALL_PLACES = (
    "/usr/local/cuda*/bin/ncu",
    "/opt/nvidia/nsight-compute/*/ncu",
    "/usr/local/NVIDIA-Nsight-Compute*/ncu",
)


class NotMeasured(RuntimeError):
    """A number was asked of a measurement that did not take place."""


class UnreadableCounters(ValueError):
    """ncu's output does not hold what it was asked for."""


@dataclass(frozen=True)
class KernelBytes:
    """What the counters said about one kernel."""

    name: str
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True)
class HardwareBytes:
    """What the counters said about one program, or why they said nothing.

    Attributes:
        program: ``"naive"`` or ``"flash"``.
        kernels: in the order in which they ran; empty if nothing was measured.
        reason: why nothing was measured; empty if something was.
        shape: batch, heads, seq and head_dim of the float16 inputs.
        ncu: the version of ncu that read them; empty if nothing was measured.
    """

    program: str
    kernels: tuple[KernelBytes, ...] = ()
    reason: str = ""
    shape: dict[str, int] = field(default_factory=dict)
    ncu: str = ""

    @property
    def measured(self) -> bool:
        """True if there are numbers."""
        return bool(self.kernels)

    @property
    def bytes_read(self) -> int:
        """Bytes read from DRAM; raises NotMeasured if there are no numbers."""
        return sum(kernel.bytes_read for kernel in self._kernels())

    @property
    def bytes_written(self) -> int:
        """Bytes written to DRAM; raises NotMeasured if there are no numbers."""
        return sum(kernel.bytes_written for kernel in self._kernels())

    @property
    def bytes_moved(self) -> int:
        """Both directions together; raises NotMeasured if there are no numbers."""
        return self.bytes_read + self.bytes_written

    def _kernels(self) -> tuple[KernelBytes, ...]:
        if not self.kernels:
            raise NotMeasured(f"the bytes of {self.program} were not measured: {self.reason}")
        return self.kernels

    def __str__(self) -> str:
        if not self.kernels:
            return f"{self.program}: not measured on this machine — {self.reason}"
        lines = [f"{self.program}: {self.bytes_moved / 1e6:,.1f} MB through DRAM"]
        for kernel in self.kernels:
            read, written = kernel.bytes_read / 1e6, kernel.bytes_written / 1e6
            lines.append(f"  {read:8.1f} MB read  {written:8.1f} MB written  {kernel.name}")
        return "\n".join(lines)


def hardware_bytes(
    name: str,
    *,
    batch: int = 1,
    heads: int = 16,
    seq: int = 4096,
    head_dim: int = 64,
    timeout: float = 300.0,
) -> HardwareBytes:
    """Run an attention program under ``ncu`` and read the bytes its kernels moved through DRAM.

    Inputs are float16. ``"naive"`` is four PyTorch calls (QKᵀ, scale, softmax, PV), ``"flash"`` is
    SDPA restricted to its FlashAttention backend. ncu empties the caches before every kernel
    (``--cache-control all``) and leaves the clocks alone. Written bytes still in L2 when a kernel
    ends are not seen.

    Returns:
        a :class:`HardwareBytes`; ``measured`` is False, with a ``reason``, on a machine without a
        GPU or ncu, where the counters may not be read, or where ncu printed something that
        :func:`parse_ncu_csv` does not understand.

    Raises:
        ValueError: there is no such program.
    """
    if name not in PROGRAMS:
        raise ValueError(f"name must be one of {', '.join(PROGRAMS)}, got {name!r}")
    shape = {"batch": batch, "heads": heads, "seq": seq, "head_dim": head_dim}

    def unavailable(reason: str) -> HardwareBytes:
        return HardwareBytes(name, reason=reason, shape=shape)

    if not torch.cuda.is_available() or torch.version.hip is not None:
        return unavailable("PyTorch sees no NVIDIA GPU")
    ncu = find_ncu()
    if ncu is None:
        return unavailable("ncu (NVIDIA Nsight Compute) is not installed, or not on PATH")
    with tempfile.TemporaryDirectory(prefix="flashcourse-ncu-") as folder:
        log = Path(folder) / "counters.csv"
        command = [
            *(ncu, "--csv", "--page", "details", "--print-units", "base", "--log-file", str(log)),
            *("--metrics", f"{READ_METRIC},{WRITE_METRIC}"),
            *("--clock-control", "none", "--cache-control", "all"),
            *("--profile-from-start", "off", "--target-processes", "all"),
            *(sys.executable, "-m", CHILD_MODULE, name, *(str(size) for size in shape.values())),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        # ncu serialises kernels and takes a lock in its TMPDIR: one of its own avoids strangers'.
        environment["TMPDIR"] = folder
        try:
            status, printed = _run(command, environment, timeout)
        except subprocess.TimeoutExpired:
            return unavailable(f"ncu was still running after {timeout:g} s and was stopped")
        except OSError as error:
            return unavailable(f"{ncu} could not be started: {error}")
        table = log.read_text(errors="replace") if log.exists() else ""
    said = f"{table}\n{printed}"
    if "ERR_NVGPUCTRPERM" in said:
        return unavailable(
            "this user may not read the GPU's counters (ERR_NVGPUCTRPERM). An administrator can "
            "allow it: https://developer.nvidia.com/ERR_NVGPUCTRPERM"
        )
    if status != 0:
        return unavailable(f"ncu ended with status {status}: {_last_words(said)}")
    try:
        kernels = parse_ncu_csv(table)
    except UnreadableCounters as error:
        return unavailable(str(error))
    return HardwareBytes(name, kernels, "", shape, _version_of(ncu))


def _run(command: list[str], environment: dict[str, str], timeout: float) -> tuple[int, str]:
    """(exit status, what it printed); on a timeout ncu and the program under it are stopped."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    ) as running:
        try:
            printed, _ = running.communicate(timeout=timeout)
        except BaseException:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(running.pid, signal.SIGKILL)
            raise
        return running.returncode, printed


def find_ncu() -> str | None:
    """The path of ncu: on PATH, or where NVIDIA's installers put it (the newest)."""
    on_path = shutil.which("ncu")
    if on_path:
        return on_path
    found = [path for place in _INSTALL_PLACES for path in glob.glob(place)]
    return max(found, key=_version_in) if found else None


def parse_ncu_csv(text: str) -> tuple[KernelBytes, ...]:
    """The kernels in the output of ``ncu --csv``, in either of its two layouts.

    Page "details" has a line per metric, with its name, unit and value; page "raw" has a column
    per metric and a line of units under the header. Lines of ncu's own (``==PROF==``) and of the
    program may stand before the table.

    Raises:
        UnreadableCounters: no table, a metric without a number, or an unknown unit.
    """
    lines = text.splitlines()
    header = next(
        (n for n, line in enumerate(lines) if '"Kernel Name"' in line and '"ID"' in line), None
    )
    if header is None:
        raise UnreadableCounters(f"ncu printed no table of kernels: {_last_words(text)}")
    table = [line for line in lines[header:] if line.startswith('"')]
    rows = list(csv.DictReader(table))
    is_details = bool(rows) and "Metric Name" in rows[0]
    readings = _details_page(rows) if is_details else _raw_page(rows)
    if not readings:
        raise UnreadableCounters("ncu's table holds no kernel: nothing ran between start and stop")
    kernels = []
    for kernel_id, (name, values) in readings.items():
        missing = [metric for metric in (READ_METRIC, WRITE_METRIC) if metric not in values]
        if missing:
            raise UnreadableCounters(
                f"kernel {kernel_id} ({name}) has no {' and no '.join(missing)}"
            )
        kernels.append(KernelBytes(name, values[READ_METRIC], values[WRITE_METRIC]))
    return tuple(kernels)


Readings = dict[str, tuple[str, dict[str, int]]]


def _details_page(rows: list[dict[str, str]]) -> Readings:
    readings: Readings = {}
    for row in rows:
        _, values = readings.setdefault(row["ID"], (_short_name(row["Kernel Name"]), {}))
        if row["Metric Name"] in (READ_METRIC, WRITE_METRIC):
            values[row["Metric Name"]] = _in_bytes(row["Metric Value"], row["Metric Unit"])
    return readings


def _raw_page(rows: list[dict[str, str]]) -> Readings:
    if not rows:
        return {}
    units, *kernels = rows
    return {
        row["ID"]: (
            _short_name(row["Kernel Name"]),
            {m: _in_bytes(row[m], units[m]) for m in (READ_METRIC, WRITE_METRIC) if m in row},
        )
        for row in kernels
    }


def _in_bytes(value: str, unit: str) -> int:
    factor = _UNITS.get(unit.strip().lower())
    if factor is None:
        raise UnreadableCounters(f"ncu gave bytes in the unknown unit {unit!r}")
    try:
        return round(float(value.replace(",", "")) * factor)
    except ValueError:
        raise UnreadableCounters(f"ncu gave {value!r} instead of a number of bytes") from None


def _short_name(kernel: str) -> str:
    """The function's name without its return type, templates and arguments."""
    bare = re.sub(r"\(anonymous namespace\)::|<unnamed>::", "", kernel)
    bare = re.split(r"[<(]", bare, maxsplit=1)[0].strip()
    return bare.split(" ")[-1] or kernel


def _version_in(path: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path)]


def _last_words(text: str) -> str:
    words = " ".join(text.split())
    return words[-400:] or "(it printed nothing)"


def _version_of(ncu: str) -> str:
    said = subprocess.run([ncu, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"Version\s+(\S+)", said)
    return found.group(1) if found else "of unknown version"


def committed_measurement() -> tuple[dict[str, HardwareBytes], str] | None:
    """The measurement that comes with the course, by program, and one line on where it was made.

    None if no measurement was recorded.
    """
    try:
        content = load_record(RECORD)
    except FileNotFoundError:
        return None
    programs = {
        name: HardwareBytes(
            name, tuple(KernelBytes(**kernel) for kernel in stored["kernels"]), "", stored["shape"]
        )
        for name, stored in content["results"].items()
    }
    ncu = next(iter(content["results"].values()))["ncu"]
    return programs, f"{describe_record(content)}, ncu {ncu}"


def record_measurement(results: Sequence[HardwareBytes]) -> bool:
    """Keep measured results as the course's, where recording is on (see ``recorded.record``).

    Raises:
        NotMeasured: one of them has no numbers.
    """
    stored = {
        result.program: {
            "shape": result.shape,
            "ncu": result.ncu,
            "kernels": [asdict(kernel) for kernel in result._kernels()],
        }
        for result in results
    }
    return record(RECORD, stored, COMMAND)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both programs; with ``--record``, keep the result. Exit status 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m flashcourse.measure.counters",
        description="Read the bytes of naive and flash attention from the GPU's counters.",
    )
    parser.add_argument("--record", action="store_true", help="keep the result in the package")
    keep = parser.parse_args(arguments).record
    results = [hardware_bytes(program) for program in PROGRAMS]
    for result in results:
        print(result)
    if not all(result.measured for result in results):
        return 1
    if keep:
        os.environ[RECORD_VARIABLE] = "1"
        record_measurement(results)
        print(f"recorded as {RECORD}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

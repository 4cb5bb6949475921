"""Peak memory of one call, measured in a process of its own.

A process remembers: its allocator keeps what it freed, its caches stay warm, and a call that ran
out of memory leaves it in a strange state. So every candidate gets a fresh Python, and what it
held before the call is subtracted.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

CHILD_MODULE = "flashcourse.measure.memory_child"


class OutOfMemory(MemoryError):
    """The call needed more than ``limit_bytes``, or more than the machine has."""


class CandidateFailed(RuntimeError):
    """The call raised, crashed or took too long in its own process."""


class PeakMemory(int):
    """Bytes at the peak of a call above what was held when it began.

    Attributes:
        method: how it was read: ``"VmHWM"`` (Linux), ``"ru_maxrss"`` (macOS and where VmHWM
            cannot be reset) or ``"cuda"`` (PyTorch's allocator).
        resolution: the smallest difference this method can see, in bytes.
    """

    method: str
    resolution: int

    def __new__(cls, value: int, method: str = "VmHWM", resolution: int = 0) -> PeakMemory:
        peak = super().__new__(cls, value)
        peak.method = method
        peak.resolution = resolution
        return peak

    def __str__(self) -> str:
        return readable_bytes(self)

    def __repr__(self) -> str:
        return f"<PeakMemory {self} by {self.method}>"

    def __reduce__(self) -> tuple[type[PeakMemory], tuple[int, str, int]]:
        return PeakMemory, (int(self), self.method, self.resolution)


def peak_memory(
    fn: Callable[..., object],
    *args: Any,
    limit_bytes: int | None = None,
    timeout: float = 120.0,
    **kwargs: Any,
) -> PeakMemory:
    """The peak memory of ``fn(*args, **kwargs)``, in bytes above what was held when it began.

    The function and its arguments are pickled (functions of a notebook too) and run in a fresh
    Python. The arguments are held before the call begins, so they do not count; what the call
    allocates does, its result included. On a GPU (where an argument lies on one, or ``fn`` puts
    tensors there) PyTorch's own count of allocated bytes is read; otherwise the resident memory
    of the process, which is exact to about a megabyte.

    Args:
        fn: the candidate. What it returns is dropped.
        args, kwargs: its arguments.
        limit_bytes: how much the call may hold; more raises :class:`OutOfMemory`. None: no limit.
        timeout: seconds after which the process is stopped.

    Returns:
        A :class:`PeakMemory`: an int with ``method`` and ``resolution``.

    Raises:
        OutOfMemory: the limit, or the machine's memory, was not enough.
        CandidateFailed: the call raised (the message ends with its traceback), its process died,
            or the timeout passed.
        TypeError, ValueError: an argument of this function is wrong, or something in the call
            cannot be pickled.
    """
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {type(fn).__name__}; its arguments follow it")
    if limit_bytes is not None:
        if not isinstance(limit_bytes, int) or isinstance(limit_bytes, bool):
            raise TypeError(f"limit_bytes must be an integer or None, got {limit_bytes!r}")
        if limit_bytes < 1:
            raise ValueError(f"limit_bytes must be 1 or more, got {limit_bytes}")
    if not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    name = getattr(fn, "__name__", type(fn).__name__)
    try:
        call = cloudpickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"{name} or one of its arguments cannot be sent to another process: {error}"
        ) from error
    with tempfile.TemporaryDirectory(prefix="flashcourse-") as folder:
        return _run_child(Path(folder), call, name, limit_bytes, timeout)


def _run_child(
    folder: Path, call: bytes, name: str, limit_bytes: int | None, timeout: float
) -> PeakMemory:
    job, answer, log = folder / "job", folder / "answer", folder / "log"
    job.write_bytes(pickle.dumps({"path": sys.path, "call": call, "limit_bytes": limit_bytes}))
    # glibc otherwise raises this threshold as it goes and keeps what was freed below it.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    with log.open("wb") as output:
        # The child ends when its stdin does: if this process is killed, no orphan stays behind.
        child = subprocess.Popen(
            [sys.executable, "-m", CHILD_MODULE, str(job), str(answer)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            child.wait(timeout)
        except subprocess.TimeoutExpired:
            raise CandidateFailed(
                f"{name} was still running after {timeout:g} s and was stopped; give it a smaller "
                "input or a larger timeout"
            ) from None
        finally:
            _end(child)
    if not answer.exists():
        tail = log.read_text(errors="replace").strip()[-2000:]
        raise CandidateFailed(f"{name}: {_how_it_ended(child.returncode)}\n{tail}".rstrip())
    status, value = pickle.loads(answer.read_bytes())
    if status == "peak":
        return PeakMemory(*value)
    if status == "out_of_memory":
        allowed = "the machine has" if limit_bytes is None else readable_bytes(limit_bytes)
        raise OutOfMemory(f"{name} needed more memory than {allowed}: {value}")
    raise CandidateFailed(f"{name} failed in its own process:\n{value}")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Stop the child and what it started, and wait for it."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    if child.stdin is not None:
        child.stdin.close()
    child.wait()


def _how_it_ended(returncode: int) -> str:
    if returncode >= 0:
        return f"its process ended with exit status {returncode} before it could report"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    why = " (often: the system ran out of memory)" if name == "SIGKILL" else ""
    return f"its process was killed by {name}{why}"


def readable_bytes(count: float) -> str:
    """A number of bytes for people, in units of 1,024: ``"1.5 MiB"``."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"

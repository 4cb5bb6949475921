"""The process in which :func:`flashcourse.measure.peak_memory` runs one candidate.

Started as ``python -m flashcourse.measure.memory_child JOB ANSWER``; not for use by hand.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import resource
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_PAGE = 4096
_MEBIBYTE = 1024 * 1024


def main(job_path: str, answer_path: str) -> None:
    """Run the job and write ``(status, value)`` to the answer, whole or not at all."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    job = pickle.loads(Path(job_path).read_bytes())
    sys.path[:] = job["path"]
    try:
        fn, args, kwargs = pickle.loads(job["call"])
        answer = _measure(lambda: fn(*args, **kwargs), job["limit_bytes"])
    except BaseException as error:
        answer = ("failed", _explain(error))
    part = Path(answer_path + ".part")
    part.write_bytes(pickle.dumps(answer))
    os.replace(part, answer_path)


def _explain(error: BaseException) -> str:
    """The traceback without the frames of this file, which are not the candidate's."""
    place = error.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename == __file__:
        place = place.tb_next
    return "".join(traceback.format_exception(type(error), error, place)[-12:])


def _leave_with_parent() -> None:
    """stdin is a pipe that the parent never writes to: it ends when the parent does."""
    while os.read(0, 1024):
        pass
    os._exit(1)


def _measure(call: Callable[[], object], limit_bytes: int | None) -> tuple[str, Any]:
    on_gpu = torch.cuda.is_available()
    # The first product starts the threads and loads the libraries. They are not the candidate's.
    warm = torch.ones(256, 256)
    (warm @ warm).softmax(-1).sum().item()
    del warm
    try:
        return _peak_on_gpu(call, limit_bytes) if on_gpu else _peak_on_cpu(call, limit_bytes)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return "out_of_memory", str(error).split("\n")[0] or "MemoryError"
    except RuntimeError as error:
        if "DefaultCPUAllocator" in str(error) or "can't allocate memory" in str(error):
            return "out_of_memory", str(error).split("\n")[0]
        raise


def _peak_on_gpu(call: Callable[[], object], limit_bytes: int | None) -> tuple[str, Any]:
    """By PyTorch's allocator; a call that never touched the GPU is read as on a CPU."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    if limit_bytes is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        allowed = min(1.0, (torch.cuda.memory_reserved() + limit_bytes) / total)
        torch.cuda.set_per_process_memory_fraction(allowed)
    torch.cuda.reset_peak_memory_stats()
    blocks_before = torch.cuda.memory_stats().get("allocation.all.allocated", 0)
    host = _peak_on_host(call)
    torch.cuda.synchronize()
    if (
        before == 0
        and torch.cuda.memory_stats().get("allocation.all.allocated", 0) == blocks_before
    ):
        return _within(limit_bytes, *host)
    peak = max(0, torch.cuda.max_memory_allocated() - before)
    return _within(limit_bytes, peak, "cuda", 512)


def _peak_on_cpu(call: Callable[[], object], limit_bytes: int | None) -> tuple[str, Any]:
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc: give back what was freed
    _limit_data(limit_bytes)
    return _within(limit_bytes, *_peak_on_host(call))


def _peak_on_host(call: Callable[[], object]) -> tuple[int, str, int]:
    """(bytes, method, resolution) of the resident memory that the call added at its peak."""
    exact = _reset_high_water_mark()
    before = _resident()
    before_peak = _high_water_mark(exact)
    call()
    after = _high_water_mark(exact)
    if exact:
        return max(0, after - before), "VmHWM", _MEBIBYTE
    # The mark of the whole process: a call that stays below an earlier peak cannot be seen.
    resolution = max(_MEBIBYTE, before_peak - before)
    return (after - before if after > before_peak else 0), "ru_maxrss", resolution


def _within(limit_bytes: int | None, peak: int, method: str, resolution: int) -> tuple[str, Any]:
    """The peak; or out of memory where the system let the call pass its limit (macOS does)."""
    if limit_bytes is not None and peak > limit_bytes:
        return "out_of_memory", f"it held {peak:,} bytes, the limit was {limit_bytes:,}"
    return "peak", (peak, method, resolution)


def _limit_data(limit_bytes: int | None) -> None:
    """Make an allocation beyond the limit fail, as it would on a smaller machine.

    RLIMIT_DATA counts writable private memory. RLIMIT_AS would also count the addresses that
    glibc reserves for each thread and never uses.
    """
    held = _status_field("VmData")
    if limit_bytes is None or held is None:
        return
    slack = 8 * _MEBIBYTE  # Python's own small allocations; the exact check comes after the call
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = held + limit_bytes + slack
    if hard != resource.RLIM_INFINITY:
        allowed = min(allowed, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))


def _reset_high_water_mark() -> bool:
    """Linux: set VmHWM back to what is resident now (proc(5), clear_refs). True if it worked."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    mark, resident = _status_field("VmHWM"), _status_field("VmRSS")
    return mark is not None and resident is not None and mark <= resident + 64 * _PAGE


def _high_water_mark(exact: bool) -> int:
    mark = _status_field("VmHWM") if exact else None
    if mark is not None:
        return mark
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere


def _resident() -> int:
    resident = _status_field("VmRSS")
    if resident is not None:
        return resident
    shown = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, check=True
    )
    return int(shown.stdout) * 1024


def _status_field(field: str) -> int | None:
    """Bytes from /proc/self/status; None where there is no such line."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])

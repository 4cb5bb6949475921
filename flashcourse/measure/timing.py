"""Time: how long a call takes once the machine has warmed up, with its spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

# More than the L2 of any GPU in the course's table (H200: 50 MiB; B200: 126 MiB).
L2_FLUSH_BYTES = 256 * 1024 * 1024


class Timing(float):
    """A median time in milliseconds that remembers the runs it came from.

    Attributes:
        times: every measured run in milliseconds, in the order they ran.
    """

    times: tuple[float, ...]

    def __new__(cls, times: list[float] | tuple[float, ...]) -> Timing:
        if not times:
            raise ValueError("a Timing needs at least one measured run, got none")
        timing = super().__new__(cls, statistics.median(times))
        timing.times = tuple(times)
        return timing

    @property
    def median(self) -> float:
        """The middle run, in milliseconds."""
        return float(self)

    @property
    def low(self) -> float:
        """The 20th percentile, in milliseconds: one run in five was faster."""
        return _percentile(self.times, 0.2)

    @property
    def high(self) -> float:
        """The 80th percentile, in milliseconds: one run in five was slower."""
        return _percentile(self.times, 0.8)

    def __str__(self) -> str:
        runs = "1 run" if len(self.times) == 1 else f"{len(self.times)} runs"
        return f"{_short(self)} ms ({_short(self.low)}–{_short(self.high)}, {runs})"

    def __repr__(self) -> str:
        return f"<Timing {self}>"

    def __reduce__(self) -> tuple[type[Timing], tuple[tuple[float, ...]]]:
        return Timing, (self.times,)


def time_ms(
    fn: Callable[[], object],
    *,
    warmup: int = 3,
    repeats: int = 20,
    clear_l2: bool = False,
    lead: int = 1,
    device: torch.device | str | None = None,
) -> Timing:
    """The time of ``fn()`` in milliseconds.

    On a GPU a call only queues work, so each run is bracketed by two CUDA events and read after
    the GPU has caught up. On a CPU each run is read from ``time.perf_counter``. The warm-up runs
    pay for compilation, allocation and cold caches; they are not counted.

    Args:
        fn: called without arguments; what it returns is dropped.
        warmup: runs before the first measured one, 0 or more.
        repeats: measured runs, 1 or more.
        clear_l2: on a GPU, overwrite a large buffer before every measured run, so that inputs
            come from device memory and not from the L2 cache. Nothing changes on a CPU.
        lead: with ``clear_l2``, how often it is overwritten. While the GPU does that (60 µs each
            on an H200) the host queues the call; what it needs beyond is part of the result.
        device: where the work runs; default: the GPU if there is one, else the CPU.

    Returns:
        A :class:`Timing`: a float (the median) with ``low``, ``high`` (20th and 80th percentile)
        and ``times``.

    Raises:
        TypeError: ``fn`` cannot be called, or a count is not an integer.
        ValueError: a count is too small, or ``device`` is a GPU that is not there.
    """
    if not callable(fn):
        raise TypeError(
            f"fn must be callable without arguments, got {type(fn).__name__}; "
            "wrap the call: time_ms(lambda: f(x))"
        )
    _check_count("warmup", warmup, at_least=0)
    _check_count("repeats", repeats, at_least=1)
    _check_count("lead", lead, at_least=1)
    on_gpu = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but PyTorch sees no GPU; leave it out for the CPU")
    if on_gpu:
        with torch.cuda.device(torch.device("cuda") if device is None else torch.device(device)):
            return _time_on_gpu(fn, warmup, repeats, lead if clear_l2 else 0)
    for _ in range(warmup):
        fn()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        fn()
        times.append((time.perf_counter() - start) * 1e3)
    return Timing(times)


def _time_on_gpu(fn: Callable[[], object], warmup: int, repeats: int, flushes: int) -> Timing:
    flush = torch.empty(L2_FLUSH_BYTES if flushes else 0, dtype=torch.int8, device="cuda")
    for _ in range(warmup):
        fn()
    events = []
    torch.cuda.synchronize()
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(flushes):
            flush.zero_()
        start.record()
        fn()
        stop.record()
        events.append((start, stop))
    torch.cuda.synchronize()
    return Timing([start.elapsed_time(stop) for start, stop in events])


def _check_count(name: str, value: object, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < at_least:
        raise ValueError(f"{name} must be {at_least} or more, got {value}")


def _percentile(times: tuple[float, ...], fraction: float) -> float:
    """Linear interpolation between the sorted runs."""
    ordered = sorted(times)
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _short(ms: float) -> str:
    """Two decimals from 1 ms up; three significant digits below."""
    return f"{ms:.2f}" if ms >= 1 else f"{ms:.3g}"

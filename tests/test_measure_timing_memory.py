"""Time and peak memory: the numbers are plausible, the errors explain, no process is left."""

import os
import pickle
import signal
import subprocess
import sys
import time

import pytest
import torch

from flashcourse.measure import (
    CandidateFailed,
    OutOfMemory,
    Timing,
    measured_ceilings,
    peak_memory,
    readable_bytes,
    time_ms,
)

MIB = 2**20


def square(n: int) -> torch.Tensor:
    return torch.ones(n, n)


def test_a_timing_is_the_median_with_percentiles() -> None:
    timing = Timing([1.0, 2.0, 3.0, 4.0, 100.0])
    assert timing == 3.0 == timing.median
    assert timing.low == pytest.approx(1.8)
    assert timing.high == pytest.approx(23.2)
    assert str(timing) == "3.00 ms (1.80–23.20, 5 runs)"
    assert str(Timing([1.0])) == "1.00 ms (1.00–1.00, 1 run)"
    assert pickle.loads(pickle.dumps(timing)).times == timing.times


def test_time_counts_only_the_repeats_after_the_warmup() -> None:
    calls = []
    timing = time_ms(lambda: calls.append(1), warmup=4, repeats=7, device="cpu")
    assert len(calls) == 11
    assert len(timing.times) == 7


def test_time_sees_a_slow_call() -> None:
    assert time_ms(lambda: time.sleep(0.02), warmup=0, repeats=3, device="cpu") >= 20.0
    assert time_ms(lambda: None, repeats=3, device="cpu") < 20.0


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"repeats": 0}, ValueError, "repeats must be 1 or more, got 0"),
        ({"warmup": -1}, ValueError, "warmup must be 0 or more"),
        ({"lead": 0}, ValueError, "lead must be 1 or more, got 0"),
        ({"repeats": 2.5}, TypeError, "repeats must be an integer, got 2.5"),
    ],
)
def test_time_refuses_bad_counts(arguments: dict, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        time_ms(lambda: None, **arguments)


def test_time_refuses_what_cannot_be_called() -> None:
    with pytest.raises(TypeError, match="time_ms\\(lambda: f\\(x\\)\\)"):
        time_ms(torch.ones(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("mebibytes", [4, 64])
def test_peak_memory_sees_what_a_call_allocates(mebibytes: int) -> None:
    n = int((mebibytes * MIB / 4) ** 0.5)
    peak = peak_memory(square, n)
    assert abs(peak - 4 * n * n) <= 2 * MIB
    assert peak.method in ("VmHWM", "ru_maxrss", "cuda")


def test_peak_memory_does_not_count_the_arguments_and_sees_freed_memory() -> None:
    def passes_over(x: torch.Tensor) -> float:
        for _ in range(3):  # freed and allocated again: the peak is one copy, not three
            y = x + 1
            del y
        return 0.0

    peak = peak_memory(passes_over, torch.ones(8 * MIB))
    assert abs(peak - 32 * MIB) <= 3 * MIB


def test_peak_memory_accepts_functions_of_a_notebook() -> None:
    namespace: dict = {"__name__": "__main__", "torch": torch}
    exec("def made_in_a_cell(n):\n    return torch.zeros(n).add_(1)", namespace)
    assert abs(peak_memory(namespace["made_in_a_cell"], n=4 * MIB) - 16 * MIB) <= 2 * MIB


def test_limit_makes_an_allocation_fail() -> None:
    with pytest.raises(OutOfMemory, match=r"square needed more memory than 32\.0 MiB"):
        peak_memory(square, 4096, limit_bytes=32 * MIB)
    assert peak_memory(square, 1024, limit_bytes=32 * MIB) <= 6 * MIB


def test_limit_holds_exactly_even_where_the_system_is_lenient() -> None:
    with pytest.raises(OutOfMemory, match="the limit was"):
        peak_memory(square, 1100, limit_bytes=3 * MIB)  # below the slack of the system's limit


def raises() -> None:
    raise ArithmeticError("seventeen")


def crashes() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves() -> None:
    os._exit(3)


@pytest.mark.parametrize(
    ("candidate", "says"),
    [(raises, "ArithmeticError: seventeen"), (crashes, "SIGSEGV"), (leaves, "exit status 3")],
)
def test_a_failing_candidate_is_explained(candidate: object, says: str) -> None:
    with pytest.raises(CandidateFailed, match=says) as caught:
        peak_memory(candidate)  # type: ignore[arg-type]
    assert "memory_child" not in str(caught.value)


def test_timeout_stops_the_candidate() -> None:
    start = time.monotonic()
    with pytest.raises(CandidateFailed, match="still running after 4 s"):
        peak_memory(time.sleep, 60, timeout=4)
    assert time.monotonic() - start < 15


def test_no_orphan_when_the_caller_is_killed(tmp_path) -> None:
    """The candidate writes its pid and sleeps; its parent is killed; it must be gone soon."""
    script = tmp_path / "caller.py"
    note = tmp_path / "pid"
    script.write_text(
        "import os, time\n"
        "from flashcourse.measure import peak_memory\n"
        "def candidate():\n"
        f"    open({str(note)!r}, 'w').write(str(os.getpid()))\n"
        "    time.sleep(100)\n"
        "peak_memory(candidate)\n"
    )
    caller = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.DEVNULL)
    try:
        pid = _wait_for(lambda: note.exists() and note.read_text(), 60)
    finally:
        caller.kill()
        caller.wait()
    assert _wait_for(lambda: not _alive(int(pid)), 10)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = f"/proc/{pid}/stat"  # a zombie that init has not collected yet is not running
    if not os.path.exists(stat):
        return sys.platform != "linux"
    with open(stat) as status:
        return status.read().rsplit(")", 1)[1].split()[0] != "Z"


def _wait_for(condition, seconds: float):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        result = condition()
        if result:
            return result
        time.sleep(0.05)
    raise AssertionError(f"nothing happened within {seconds} s")


def test_peak_memory_refuses_what_it_cannot_do() -> None:
    with pytest.raises(TypeError, match="fn must be callable"):
        peak_memory(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="limit_bytes must be 1 or more"):
        peak_memory(square, 4, limit_bytes=0)
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        peak_memory(square, (i for i in range(3)))


def test_readable_bytes() -> None:
    assert readable_bytes(999) == "999 bytes"
    assert readable_bytes(1536) == "1.5 KiB"
    assert readable_bytes(3 * 2**30) == "3.0 GiB"


def test_measured_ceilings_are_consistent_with_their_timings() -> None:
    ceilings = measured_ceilings(copy_bytes=2**22, matmul_size=128, repeats=3)
    assert ceilings.bandwidth == pytest.approx(2 * 2**22 / (ceilings.copy / 1e3))
    assert ceilings.peak_flops == pytest.approx(2 * 128**3 / (ceilings.matmul / 1e3))
    assert len(ceilings.copy.times) == len(ceilings.matmul.times) == 3

"""Reading ncu: its two layouts, its noise, its refusals; never a number that was not measured."""

import re
import stat
from pathlib import Path

import pytest
import torch

from flashcourse.measure import counters, recorded
from flashcourse.measure.counters import (
    HardwareBytes,
    KernelBytes,
    NotMeasured,
    UnreadableCounters,
    committed_measurement,
    hardware_bytes,
    parse_ncu_csv,
    record_measurement,
)

NOISE = """==PROF== Connected to process 4711 (/usr/bin/python3.11)
==PROF== Profiling "gemm" - 0: 0%....50%....100% - 1 pass
warming up, 3 kernels
==PROF== Disconnected from process 4711
"""
COLUMNS = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream",'
    '"Block Size","Grid Size","Device","CC"'
)
GEMM = '"void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm>(T1::Params)"'
SOFTMAX = '"void <unnamed>::softmax_warp_forward<float, 12>(float *, const float *, int)"'


def row(number: int, kernel: str) -> str:
    launch = '"1","7","(256, 1, 1)","(64, 16, 1)","0","9.0"'
    return f'"{number}","4711","python3.11","127.0.0.1",{kernel},{launch}'


DETAILS = NOISE + "\n".join(
    [
        COLUMNS + ',"Section Name","Metric Name","Metric Unit","Metric Value"',
        row(0, GEMM)
        + ',"Command line profiler metrics","dram__bytes_read.sum","byte","16,813,056"',
        row(0, GEMM)
        + ',"Command line profiler metrics","dram__bytes_write.sum","byte","510,112,000"',
        row(1, SOFTMAX) + ',"Command line profiler metrics","dram__bytes_read.sum","Mbyte","537.1"',
        row(1, SOFTMAX)
        + ',"Command line profiler metrics","dram__bytes_write.sum","Gbyte","0.511"',
    ]
)
RAW = NOISE + "\n".join(
    [
        COLUMNS + ',"dram__bytes_read.sum","dram__bytes_write.sum"',
        '"","","","","","","","","","","","byte","Kbyte"',
        row(0, GEMM) + ',"16813056","510112"',
        row(1, SOFTMAX) + ',"537100000","511000"',
    ]
)


@pytest.mark.parametrize("text", [DETAILS, RAW], ids=["details", "raw"])
def test_both_layouts_give_the_same_kernels(text: str) -> None:
    assert parse_ncu_csv(text) == (
        KernelBytes("cutlass::Kernel2", 16_813_056, 510_112_000),
        KernelBytes("softmax_warp_forward", 537_100_000, 511_000_000),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no table.*printed nothing"),
        (NOISE + "==WARNING== No kernels were profiled.", "no table.*No kernels were profiled"),
        (DETAILS.replace('"510,112,000"', '"n/a"'), "'n/a' instead of a number"),
        (DETAILS.replace('"Mbyte"', '"sector"'), "unknown unit 'sector'"),
        (DETAILS.rsplit("\n", 1)[0], r"softmax_warp_forward\) has no dram__bytes_write"),
        ("\n".join(RAW.split("\n")[:-2]), "holds no kernel"),
    ],
)
def test_what_cannot_be_read_is_an_error_not_a_zero(text: str, says: str) -> None:
    with pytest.raises(UnreadableCounters, match=says):
        parse_ncu_csv(text)


def test_without_a_measurement_there_is_no_number() -> None:
    nothing = HardwareBytes("naive", reason="no GPU here")
    assert not nothing.measured
    assert "not measured on this machine — no GPU here" in str(nothing)
    for number in ("bytes_read", "bytes_written", "bytes_moved"):
        with pytest.raises(NotMeasured, match="no GPU here"):
            getattr(nothing, number)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_says_so() -> None:
    assert hardware_bytes("flash").reason == "PyTorch sees no NVIDIA GPU"


def test_unknown_programs_are_refused() -> None:
    with pytest.raises(ValueError, match="naive, flash, got 'fast'"):
        hardware_bytes("fast")


def pretend_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a script in ncu's place; $LOG is the file that it was told to write."""
    ncu = tmp_path / "ncu"
    find_log = 'for a; do [ "$p" = --log-file ] && LOG="$a"; p="$a"; done\n'
    ncu.write_text("#!/bin/sh\n" + find_log + script)
    ncu.chmod(ncu.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Pretend GPU")
    monkeypatch.setattr(counters, "find_ncu", lambda: str(ncu))


def test_a_run_of_ncu_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "table").write_text(DETAILS)
    script = (
        '[ "$1" = --version ] && echo "Version 2026.1.0.0 (build 1)" && exit 0\n'
        f'cat "{tmp_path}/table" > "$LOG"\n'
    )
    pretend_ncu(tmp_path, monkeypatch, script)
    result = hardware_bytes("naive", seq=512)
    assert result.bytes_moved == 16_813_056 + 510_112_000 + 537_100_000 + 511_000_000
    assert result.shape == {"batch": 1, "heads": 16, "seq": 512, "head_dim": 64}
    assert result.ncu == "2026.1.0.0"


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ('echo "==ERROR== ERR_NVGPUCTRPERM - no permission" > "$LOG"; exit 1', "may not read"),
        ('echo "==ERROR== out of luck"; exit 9', "status 9.*out of luck"),
        ("sleep 30", "still running after 1 s"),
        ('echo "==WARNING== No kernels were profiled." > "$LOG"', "no table.*No kernels"),
    ],
)
def test_a_refusal_of_ncu_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str
) -> None:
    pretend_ncu(tmp_path, monkeypatch, script)
    result = hardware_bytes("naive", timeout=1)
    assert not result.measured
    assert re.search(says, result.reason)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where records go in these tests; recording is on, on a pretend GPU."""
    monkeypatch.setattr(recorded, "DATA", tmp_path)
    monkeypatch.setenv(recorded.RECORD_VARIABLE, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Pretend GPU")
    return tmp_path


def test_a_measurement_survives_being_recorded(folder: Path) -> None:
    assert committed_measurement() is None
    results = [
        HardwareBytes(name, (KernelBytes("k", 5, 7), KernelBytes("l", 1, 0)), "", {"seq": 8}, "9.9")
        for name in ("naive", "flash")
    ]
    assert record_measurement(results)
    programs, where = committed_measurement()  # type: ignore[misc]
    assert {name: (p.kernels, p.shape) for name, p in programs.items()} == {
        result.program: (result.kernels, result.shape) for result in results
    }
    assert "Pretend GPU" in where
    assert "ncu 9.9" in where


def test_nothing_unmeasured_is_recorded(folder: Path) -> None:
    with pytest.raises(NotMeasured):
        record_measurement([HardwareBytes("naive", reason="no GPU")])
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_command_fails_where_nothing_can_be_measured(capsys) -> None:
    assert counters.main(["--record"]) == 1
    assert "not measured on this machine" in capsys.readouterr().out

"""Times of a lesson's steps: measured on a GPU, recorded elsewhere, never made up."""

from __future__ import annotations

import pytest
import torch

from flashcourse.measure import recorded, step_times


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "DATA", tmp_path)
    monkeypatch.setenv(recorded.RECORD_VARIABLE, "1")
    return tmp_path


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(step_times, "time_ms", lambda call: call() or 2.0)
    return monkeypatch


def refuse():
    raise AssertionError("nothing may be prepared or timed without a GPU")


def test_without_gpu_and_record_the_step_says_so(folder, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    times = step_times.StepTimes("steps", "a test")
    times.step("1 a", refuse, 10**9, "a shape")
    assert (
        capsys.readouterr().out == "1 a: its time is not known: no GPU here, and no recorded run\n"
    )
    assert times.rows == {}
    assert not times.save()
    assert list(folder.iterdir()) == []


def test_what_a_gpu_measured_is_shown_elsewhere_with_its_origin(folder, gpu, capsys):
    times = step_times.StepTimes("steps", "a test")
    times.step("1 a", lambda: lambda: None, 4 * 10**9, "a shape")
    assert "2.000 ms, 2 TFLOP/s, a shape (measured here, on a GPU)" in capsys.readouterr().out
    assert times.save()
    gpu.setattr(torch.cuda, "is_available", lambda: False)

    elsewhere = step_times.StepTimes("steps", "a test")
    elsewhere.step("1 a", refuse, 0, "another shape")
    elsewhere.step("2 new", refuse, 0, "another shape")
    shown = capsys.readouterr().out
    assert "1 a: 2.000 ms, 2 TFLOP/s, a shape (recorded on a GPU on " in shown
    assert "2 new: its time is not known" in shown
    assert elsewhere.rows == times.rows

"""Records: written whole, only on a GPU and only when asked; read back with their origin."""

from __future__ import annotations

import pytest
import torch

from flashcourse.measure import recorded


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "DATA", tmp_path)
    return tmp_path


def test_nothing_is_recorded_unless_asked_or_without_a_gpu(folder, monkeypatch):
    monkeypatch.delenv(recorded.RECORD_VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not recorded.record("times", [1], "a test")
    monkeypatch.setenv(recorded.RECORD_VARIABLE, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not recorded.record("times", [1], "a test")
    assert list(folder.iterdir()) == []


def test_a_record_keeps_its_origin(folder, monkeypatch):
    monkeypatch.setenv(recorded.RECORD_VARIABLE, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert recorded.record("times", {"ms": 1.5}, "a test")
    content = recorded.load_record("times")
    assert content["results"] == {"ms": 1.5}
    assert recorded.describe_record(content).startswith("recorded on a GPU on ")
    with pytest.raises(ValueError, match="JSON compliant"):
        recorded.record("times", {"ms": float("nan")}, "a test")
    assert recorded.load_record("times") == content
    assert [path.name for path in folder.iterdir()] == ["times.json"]


def test_a_missing_record_says_so(folder):
    with pytest.raises(FileNotFoundError, match="no record 'speed'; there are: none"):
        recorded.load_record("speed")


def test_a_lesson_measures_on_a_gpu_and_reads_the_record_elsewhere(folder, monkeypatch, capsys):
    never = lambda: pytest.fail("measured without a GPU")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert recorded.measured_or_recorded("times", never, "a test") is None
    assert "no record" in capsys.readouterr().out

    monkeypatch.setenv(recorded.RECORD_VARIABLE, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    here = recorded.measured_or_recorded("times", lambda: {8: 1.5}, "a test")
    assert here == {"8": 1.5}, "the keys a learner without a GPU will see"
    assert "measured here, on a GPU" in capsys.readouterr().out

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert recorded.measured_or_recorded("times", never, "a test") == here
    assert "recorded on a GPU" in capsys.readouterr().out


def test_results_stand_beside_where_they_come_from(folder, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert recorded.here_and_recorded("08", "times", lambda: [3.0]) == [("this CPU", [3.0])]

    monkeypatch.setenv(recorded.RECORD_VARIABLE, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert recorded.here_and_recorded("08", "times", lambda: [1.0]) == [("this GPU", [1.0])]
    assert recorded.load_record("lesson_08_times")["made_by"] == "lesson 08"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    both = recorded.here_and_recorded("08", "times", lambda: [3.0])
    assert both == [("this CPU", [3.0]), ("GPU, recorded", [1.0])]

"""A measurement has the GPU alone: others wait for it, or stand still meanwhile."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import small_lab
import torch
from small_lab.race import CHECK, QUESTION

from flashcourse.grading.gate import Gate
from flashcourse.grading.limits import Limits, choose_sandbox, descendants
from flashcourse.grading.process import Stopped, Workshop


def test_a_measurement_waits_for_others_and_is_not_overtaken(tmp_path):
    one, two, three = (Gate(tmp_path / "gate") for _ in range(3))
    order = []

    def measure():
        with two.alone():
            order.append("measured")

    def come_later():
        with three.shared():
            order.append("came later")

    with one.shared():
        assert not one.wanted()
        threads = [threading.Thread(target=measure)]
        threads[0].start()
        while not one.wanted():
            time.sleep(0.01)
        threads.append(threading.Thread(target=come_later))
        threads[1].start()
        time.sleep(0.1)
        assert order == []
        one.give_way()
        assert order[0] == "measured"
    for thread in threads:
        thread.join(5)
    assert order == ["measured", "came later"]
    assert one.held == ""


def test_an_answer_at_work_stands_still_while_another_is_timed(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHCOURSE_QUESTIONS", "small_lab.race")
    monkeypatch.setenv("PYTHONPATH", str(small_lab.TESTS), prepend=os.pathsep)
    gate, other = Gate(tmp_path / "gate"), Gate(tmp_path / "gate")
    case = next(iter(CHECK.cases(torch.Generator().manual_seed(0))))
    with Workshop(tmp_path / "w", choose_sandbox("auto"), Limits(seconds=3), gate) as workshop:
        workshop.define({"a": "def answer(x):\n    while True: pass"}, "answer")
        family = descendants(workshop._line.process.pid)
        assert family

        def states():
            stats = [Path("/proc", str(pid), "stat").read_text() for pid in family]
            return {stat.rpartition(")")[2].split()[0] for stat in stats}

        found = []

        def measure():
            time.sleep(0.5)
            started = time.monotonic()
            with other.alone():
                found.append(states())
                found.append(time.monotonic() - started)
                time.sleep(2.5)
            found.append(states())

        thread = threading.Thread(target=measure)
        thread.start()
        started = time.monotonic()
        with gate.shared(), pytest.raises(Stopped, match="no answer within 3 seconds"):
            workshop.observe(QUESTION, CHECK, case)
        thread.join(10)
    assert found[0] == {"T"}
    assert found[1] < 2  # it did not wait for the answer's limit
    assert time.monotonic() - started > 5  # and its time did not count against the answer

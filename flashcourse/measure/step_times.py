"""Times of a lesson's steps: measured on a GPU, read from the committed record elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashcourse.measure.recorded import describe_record, load_record, record
from flashcourse.measure.timing import time_ms


class StepTimes:
    """Collects the times of one lesson under the name of its record.

    Args:
        name: the record, see :mod:`flashcourse.measure.recorded`.
        made_by: the lesson, as the record names it.
    """

    def __init__(self, name: str, made_by: str) -> None:
        self.name, self.made_by = name, made_by
        self.on_gpu = torch.cuda.is_available()
        self._measured: dict[str, dict[str, Any]] = {}
        self._record: dict[str, Any] | None = None
        if not self.on_gpu:
            try:
                self._record = load_record(name)
            except FileNotFoundError:
                self._record = None

    @property
    def rows(self) -> Mapping[str, Mapping[str, Any]]:
        """Known steps by name: ``ms``, ``tflops`` and ``shape``; empty if nothing is known."""
        if self.on_gpu:
            return self._measured
        return self._record["results"] if self._record else {}

    @property
    def origin(self) -> str:
        """Where the numbers come from, in words."""
        if self.on_gpu:
            return f"measured here, on {torch.cuda.get_device_name()}"
        if self._record:
            return describe_record(self._record)
        return "no GPU here, and no recorded run"

    def step(
        self, name: str, make: Callable[[], Callable[[], object]], flops: int, what: str
    ) -> None:
        """Measure a step if there is a GPU, and print what is known of it.

        Args:
            name: of the step; the same in the record.
            make: prepares the inputs at a real size and returns the call to time. It is not
                called without a GPU: the interpreter's time says nothing about the kernel.
            flops: of the call, for FLOP/s.
            what: the shape, in words.
        """
        if self.on_gpu:
            ms = float(time_ms(make()))
            self._measured[name] = {"ms": ms, "tflops": flops / ms / 1e9, "shape": what}
        row = self.rows.get(name)
        if row is None:
            why = "it is not in the record" if self._record else "no GPU here, and no recorded run"
            print(f"{name}: its time is not known: {why}")
        else:
            speed = f"{row['ms']:.3f} ms, {row['tflops']:.0f} TFLOP/s"
            print(f"{name}: {speed}, {row['shape']} ({self.origin})")

    def save(self) -> bool:
        """Keep the measured steps as the course's record, if recording is on; True if kept."""
        return record(self.name, self._measured, self.made_by) if self._measured else False

"""Time for the engine: the wall's, or one that counts work, the same on every machine."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What the engine and the load generator ask of a clock; seconds from its start."""

    def now(self) -> float:
        """The time."""

    def wait_until(self, when: float) -> None:
        """Return at this time, at once if it has passed."""

    def worked(self, tokens: int) -> None:
        """A step over so many tokens is done."""


class WallClock:
    """Real time."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._start

    def wait_until(self, when: float) -> None:
        """Sleep."""
        time.sleep(max(0.0, when - self.now()))

    def worked(self, tokens: int) -> None:
        """Nothing to do: the work took its time."""


class VirtualClock:
    """Time as a model of a GPU: a step costs so much, and each token in it a little more.

    The numbers are round ones of a model of some billion parameters: a step reads all weights
    once, whatever the batch, and a token costs its arithmetic.

    Args:
        step: seconds a step.
        token: seconds a token.
    """

    def __init__(self, step: float = 0.01, token: float = 2e-5) -> None:
        self.step, self.token = step, token
        self._now = 0.0

    def now(self) -> float:
        """Seconds counted so far."""
        return self._now

    def wait_until(self, when: float) -> None:
        """Jump."""
        self._now = max(self._now, when)

    def worked(self, tokens: int) -> None:
        """Count a step."""
        self._now += self.step + self.token * tokens

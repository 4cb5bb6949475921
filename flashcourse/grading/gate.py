"""Keeps a measurement apart from everything else that the graders run on the same GPU."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import IO


class Gate:
    """Many may use the GPU at once, but one that measures time has it alone.

    Two locked files, shared by all graders of one GPU. The first is the gate itself; the second is
    the queue before it, without which a measurement would wait for ever while others come and go.
    A lock goes with its process, however that ends.

    Attributes:
        held: ``shared``, ``alone``, or an empty string.
    """

    def __init__(self, path: Path | None) -> None:
        """Without a path there is nobody else, and nothing is locked."""
        self.path = path
        self.held = ""
        self._file: IO[str] | None = None

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Use the GPU beside others; wait while a measurement runs or waits for its turn."""
        if self.path is None:
            yield
            return
        with self.path.open("a") as self._file:
            self._enter()
            self.held = "shared"
            try:
                yield
            finally:
                self.held = ""

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Use the GPU while nobody else does."""
        if self.path is None:
            yield
            return
        with self._queue() as queue, self.path.open("a") as file:
            fcntl.flock(queue, fcntl.LOCK_EX)
            fcntl.flock(file, fcntl.LOCK_EX)
            self.held = "alone"
            try:
                yield
            finally:
                self.held = ""

    def wanted(self) -> bool:
        """True if this grader holds its share and a measurement waits for it."""
        if self.held != "shared":
            return False
        with self._queue() as queue:
            try:
                fcntl.flock(queue, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def give_way(self) -> None:
        """Let the measurement that waits pass; return when the share is held again."""
        assert self._file is not None
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._enter()

    def _enter(self) -> None:
        assert self._file is not None
        with self._queue() as queue:
            fcntl.flock(queue, fcntl.LOCK_SH)
            fcntl.flock(self._file, fcntl.LOCK_SH)

    def _queue(self) -> IO[str]:
        assert self.path is not None
        return self.path.with_name(f"{self.path.name}-queue").open("a")

"""The grader's side of the line to the process in which answers run."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashcourse import runtime
from flashcourse.grading.confine import FAILED
from flashcourse.grading.gate import Gate
from flashcourse.grading.limits import (
    Limits,
    Sandbox,
    SandboxError,
    command_line,
    descendants,
    end_all,
    environment,
    memory_of,
    paused,
)
from flashcourse.grading.observe import CELL_FOLDER
from flashcourse.grading.question import Case, Check, Observation, Question
from flashcourse.grading.replies import how_it_ended, observation, status_of, text_of
from flashcourse.grading.wire import PREFIX, WireError, frame_sizes, pack, unpack

STEP = 0.1  # seconds between two looks at memory and processes
START_SECONDS = 180.0  # to import torch on a busy machine
KEPT_OUTPUT = 16 * 1024  # of what the answer printed, bytes


class Stopped(Exception):
    """The answer's process ended or was ended; the question cannot go on.

    Attributes:
        status: ``failed``, ``timeout``, ``crashed`` or ``out_of_memory``.
    """

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class StartFailed(RuntimeError):
    """The process could not even be started: that is the grader's fault, not the answer's."""


@dataclass
class _Line:
    process: subprocess.Popen
    resident: int = 0  # processes that belong to the line itself
    buffer: bytes = b""


class Workshop:
    """One submission's folder and process: defines its cells and runs its answers.

    Every question gets a process of its own: forked from one that has torch imported, or, where
    there is a GPU or a lecturer's command, started anew.
    """

    def __init__(
        self, folder: Path, sandbox: Sandbox, limits: Limits, gate: Gate | None = None
    ) -> None:
        self.gate = gate or Gate(None)
        self.folder, self.sandbox, self.limits = folder.resolve(), sandbox, limits
        self.gpu = runtime.has_gpu()
        self.forks = not self.gpu and sandbox.kind != "command" and hasattr(os, "fork")
        self.printed = bytearray()
        self.left = limits.seconds
        self._line: _Line | None = None
        self._looked = 0.0  # when memory and processes were last counted
        (self.folder / CELL_FOLDER).mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Workshop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What a question needs

    def define(self, cells: dict[str, str], answer: str) -> None:
        """Begin a question: run the cells' sources, in order, and find the answer by its name.

        Raises:
            Stopped: a cell raised, crashed or hung, or there is no such name.
        """
        self.left = self.limits.seconds
        self.printed.clear()
        paths = []
        for name, source in cells.items():
            path = self.folder / CELL_FOLDER / f"{name}.py"
            path.unlink(missing_ok=True)  # an answer may have put a link there
            path.write_text(source, encoding="utf-8")
            paths.append(str(path))
        self._send({"op": "define", "cells": paths, "answer": answer}, {})
        while True:
            message, _ = self._receive()
            if message.get("kind") == "defined":
                return
            if message.get("kind") == "undefined":
                error = text_of(message.get("error"))
                raise Stopped(status_of(error), f"the answer cell raised {error}")
            if message.get("kind") != "defining":
                raise self._nonsense()

    def observe(self, question: Question, check: Check, case: Case) -> Observation:
        """Run the defined answer on one case.

        Raises:
            Stopped: its process ended, or was ended because it used too much.
        """
        message, _ = self._exchange(
            "ask", {"args": case.args, "kwargs": case.kwargs}, **_number_of(question, check)
        )
        if message.get("kind") != "ready":
            raise self._nonsense()
        started = time.perf_counter()
        message, values = self._exchange("go")
        seconds = time.perf_counter() - started
        error = self._error_in(message, "observation")
        return observation(message, values, error, seconds)

    # What a race needs

    def oppose(self, question: Question, check: Check) -> None:
        """Begin with the opponent of a check's race as the answer, instead of a learner's cells."""
        self.left = self.limits.seconds
        message, _ = self._exchange("oppose", **_number_of(question, check))
        if message.get("kind") != "defined":
            raise self._nonsense()

    def line_up(self, question: Question, check: Check, case: Case) -> None:
        """Hand over the inputs of a race, ahead of the measurements."""
        self.left = max(self.left, self.limits.seconds)
        message, _ = self._exchange("line up", {"args": case.args}, **_number_of(question, check))
        if message.get("kind") != "lined up":
            raise self._nonsense()

    def lap(self, changes: torch.Tensor) -> tuple[float, Any, str]:
        """Run the answer once for each change: seconds, the digests, and an error or "".

        The seconds pass from the first byte of the changes that is sent until the last byte of
        the digests has come.

        Raises:
            Stopped: its process ended, or was ended because it used too much.
        """
        started = time.perf_counter()
        message, values = self._exchange("lap", {"changes": changes})
        seconds = time.perf_counter() - started
        error = self._error_in(message, "lap")
        return seconds, values.get("digests"), error

    def show(self, run: int) -> Any:
        """The output of one run of the last lap."""
        message, values = self._exchange("show", run=run)
        if message.get("kind") != "shown":
            raise self._nonsense()
        return values.get("output")

    def _exchange(
        self, op: str, values: dict[str, Any] | None = None, **words: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        self._send({"op": op, **words}, values or {})
        return self._receive()

    def _error_in(self, message: dict[str, Any], kind: str) -> str:
        """What the answer raised, in a reply of this kind; an empty string if nothing.

        Raises:
            Stopped: it is another reply, or an error that means more than a failed check.
        """
        if message.get("kind") != kind:
            raise self._nonsense()
        error = text_of(message.get("error"))
        if status_of(error) != "failed":
            raise Stopped(status_of(error), f"your answer raised {error}")
        return error

    def pid(self) -> int | None:
        """The id of the process, None when it is not there."""
        if self._line is None or self._line.process.poll() is not None:
            return None
        return self._line.process.pid

    def finish(self) -> None:
        """End a question's process; the next question gets a fresh one."""
        if self._line is None:
            return
        if not self.forks:
            self.close()
            return
        self.left = 5.0
        try:
            self._send({"op": "end"}, {})
            message, _ = self._receive(ended_is_fine=True)
            quiet = message.get("kind") == "ended" and message.get("status") == 0
        except (Stopped, StartFailed):
            quiet = False
        line = self._line
        if line is None:
            return
        if not quiet or line.buffer or len(descendants(line.process.pid)) > line.resident:
            self.close()

    def close(self) -> None:
        """End every process of the submission."""
        if self._line is not None:
            line, self._line = self._line, None
            end_all(line.process)
            for pipe in (line.process.stdin, line.process.stdout, line.process.stderr):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]

    # The line

    def _start(self) -> _Line:
        program = [sys.executable, "-P", "-m", "flashcourse.grading.child"]
        if self.forks:
            program.append("--fork")
        words = command_line(self.sandbox, self.limits, self.folder, program, gpu=self.gpu)
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self.folder,
                env=environment(self.folder),
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise StartFailed(f"{words[0]} cannot be started: {error}") from error
        for pipe in (process.stdin, process.stdout, process.stderr):
            os.set_blocking(pipe.fileno(), False)  # type: ignore[union-attr]
        self._line = _Line(process)
        self._await_start()
        return self._line

    def _await_start(self) -> None:
        """Wait until the process says that it is there, and count what belongs to it."""
        assert self._line is not None
        process = self._line.process
        left, self.left = self.left, START_SECONDS
        try:
            message, _ = self._receive()
        except Stopped as error:
            said = self.printed.decode(errors="replace").strip()[-2000:]
            self.close()
            if process.poll() == FAILED:
                raise SandboxError(said) from error
            raise StartFailed(f"the process for answers did not start: {error}\n{said}") from error
        finally:
            self.left = left
        if message.get("kind") != "here" or self._line is None:
            self.close()
            raise StartFailed("the process for answers did not greet")
        self._line.resident = len(descendants(self._line.process.pid))

    def _send(self, message: dict[str, Any], values: dict[str, Any]) -> None:
        frame = memoryview(pack(message, values))
        line = self._line or self._start()
        pipe = line.process.stdin
        assert pipe is not None
        while frame:
            self._wait(writing=True)
            try:
                frame = frame[os.write(pipe.fileno(), frame[: 2**20]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._ended() from error

    def _receive(self, ended_is_fine: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
        try:
            header, body = frame_sizes(self._read(PREFIX.size))
            message, values = unpack(self._read(header), self._read(body))
        except WireError as error:
            self.close()
            raise Stopped("crashed", f"the answer's process sent nonsense: {error}") from error
        if message.get("kind") == "ended" and not ended_is_fine:
            status = message.get("status")
            # The line's own process said so, or the answer in its name: either way it is over.
            self.close()
            raise Stopped("crashed", how_it_ended(status))
        return message, values

    def _read(self, length: int) -> bytes:
        line = self._line
        if line is None:
            raise Stopped("crashed", "the answer's process is gone")
        pipe = line.process.stdout
        assert pipe is not None
        parts, missing = [line.buffer[:length]], length - len(line.buffer[:length])
        line.buffer = line.buffer[length:]
        while missing:
            self._wait(writing=False)
            try:
                part = os.read(pipe.fileno(), min(missing, 2**20))
            except BlockingIOError:
                continue
            if not part:
                raise self._ended()
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _wait(self, *, writing: bool) -> None:
        """Wait until the line can be used; meanwhile watch clock, memory and processes.

        Raises:
            Stopped: it used too much of one of them, and was ended.
        """
        line = self._line
        assert line is not None
        process = line.process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        poll = select.poll()
        target = process.stdin if writing else process.stdout
        poll.register(target.fileno(), select.POLLOUT if writing else select.POLLIN)
        poll.register(process.stderr.fileno(), select.POLLIN)
        while True:
            before = time.monotonic()
            ready = dict(poll.poll(STEP * 1000))
            if process.stderr.fileno() in ready and not self._drain(process.stderr.fileno()):
                poll.unregister(process.stderr.fileno())
            now = time.monotonic()
            self.left -= now - before
            if target.fileno() in ready:
                return
            if now - self._looked >= STEP or self.left <= 0:
                self._looked = now
                self._check_use(line)
                if self.gate.wanted():  # a measurement: stand still, off the clock
                    with paused(process):
                        self.gate.give_way()

    def _check_use(self, line: _Line) -> None:
        if self.left <= 0:
            self.close()
            raise Stopped("timeout", f"no answer within {self.limits.seconds:g} seconds")
        family = descendants(line.process.pid)
        if len(family) > self.limits.processes:
            self.close()
            raise Stopped("crashed", f"it started more than {self.limits.processes} processes")
        used = memory_of(family)
        if used > self.limits.memory:
            self.close()
            raise Stopped(
                "out_of_memory",
                f"it used {used / 2**30:.1f} GiB of memory; "
                f"{self.limits.memory / 2**30:g} GiB are allowed",
            )

    def _drain(self, pipe: int) -> bool:
        """Take what was printed and keep the end of it; False when the pipe has closed."""
        try:
            part = os.read(pipe, 2**20)
        except BlockingIOError:
            return True
        self.printed += part
        del self.printed[:-KEPT_OUTPUT]
        return bool(part)

    def _ended(self) -> Stopped:
        status: int | None = None
        if self._line is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._line.process.wait(2)
            with contextlib.suppress(OSError):
                self._drain(self._line.process.stderr.fileno())  # type: ignore[union-attr]
        self.close()
        return Stopped("crashed", how_it_ended(status))

    def _nonsense(self) -> Stopped:
        self.close()
        return Stopped("crashed", "the answer's process sent something else than asked")


def _number_of(question: Question, check: Check) -> dict[str, Any]:
    return {"question": question.id, "check": question.checks.index(check)}

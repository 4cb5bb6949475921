"""The grader's side of the line to the process in which answers run."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashcourse import runtime
from flashcourse.grading.confine import FAILED
from flashcourse.grading.launches import Launch
from flashcourse.grading.limits import (
    Limits,
    Sandbox,
    SandboxError,
    command_line,
    descendants,
    end_all,
    environment,
    memory_of,
)
from flashcourse.grading.observe import CELL_FOLDER
from flashcourse.grading.question import Case, Check, Observation, Question
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

    def __init__(self, folder: Path, sandbox: Sandbox, limits: Limits) -> None:
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
                error = _text(message.get("error"))
                raise Stopped(_status_of(error), f"the answer cell raised {error}")
            if message.get("kind") != "defining":
                raise self._nonsense()

    def observe(self, question: Question, check: Check, case: Case) -> Observation:
        """Run the defined answer on one case.

        Raises:
            Stopped: its process ended, or was ended because it used too much.
        """
        number = question.checks.index(check)
        ask = {"op": "ask", "question": question.id, "check": number}
        self._send(ask, {"args": case.args, "kwargs": case.kwargs})
        if self._receive()[0].get("kind") != "ready":
            raise self._nonsense()
        started = time.perf_counter()
        self._send({"op": "go"}, {})
        message, values = self._receive()
        seconds = time.perf_counter() - started
        if message.get("kind") != "observation":
            raise self._nonsense()
        error = _text(message.get("error"))
        if _status_of(error) != "failed":
            raise Stopped(_status_of(error), f"your answer raised {error}")
        return Observation(
            output=values.get("output"),
            error=error,
            changed_inputs=_texts(message.get("changed_inputs")),
            largest_shape=_numbers(message.get("largest_shape")),
            largest_numel=_number(message.get("largest_numel")),
            live_numel=_number(message.get("live_numel")),
            operators=frozenset(_texts(message.get("operators"))),
            library_calls=frozenset(_texts(message.get("library_calls"))),
            threads=message.get("threads") is True,
            launches=_launches(message.get("launches")),
            seconds=seconds,
        )

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
        left, self.left = self.left, START_SECONDS
        try:
            message, _ = self._receive()
        except Stopped as error:
            said = self.printed.decode(errors="replace").strip()[-2000:]
            code = self._line.process.poll() if self._line else FAILED
            self.close()
            if code == FAILED:
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
            raise Stopped("crashed", _how_it_ended(status))
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
        return Stopped("crashed", _how_it_ended(status))

    def _nonsense(self) -> Stopped:
        self.close()
        return Stopped("crashed", "the answer's process sent something else than asked")


def _how_it_ended(status: Any) -> str:
    if isinstance(status, int) and not isinstance(status, bool):
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"the answer's process was killed by {signal.Signals(-status).name}"
        return f"the answer ended its own process (exit status {status})"
    return "the answer's process ended"


_MEMORY = ("MemoryError", "OutOfMemoryError", "can't allocate memory", "out of memory")
_DEVICE = ("CUDA error", "illegal memory access", "HIP error", "device-side assert")


def _status_of(error: str) -> str:
    """What an error that an answer raised means for the question."""
    head = error.split("  (raised by the line")[0]
    if any(word in head for word in _MEMORY):
        return "out_of_memory"
    return "crashed" if any(word in head for word in _DEVICE) else "failed"


def _text(value: Any) -> str:
    return value[:2000] if isinstance(value, str) else ""


def _texts(value: Any) -> tuple[str, ...]:
    items = value[:1000] if isinstance(value, list) else []
    return tuple(item[:200] for item in items if isinstance(item, str))


def _number(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 2**62 else 0


def _numbers(value: Any) -> tuple[int, ...]:
    return tuple(_number(item) for item in value[:64]) if isinstance(value, list) else ()


def _launches(value: Any) -> tuple[Launch, ...]:
    items = value[:1000] if isinstance(value, list) else []
    return tuple(
        Launch(_text(item[0]), item[1] is True, _number(item[2]))
        for item in items
        if isinstance(item, list) and len(item) == 3
    )

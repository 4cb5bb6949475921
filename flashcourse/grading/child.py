"""The process in which answers run: ``python -m flashcourse.grading.child``.

It is told the cells to define and the inputs to use, and returns what came out. It never holds an
expected value, a seed, a verdict or a clock that counts. Frames (see
:mod:`flashcourse.grading.wire`) come in on what was its standard input and leave on what was its
standard output; whatever an answer prints goes to standard error.

With ``--fork`` it stays clean itself and forks a process for every question: torch is imported
once. That is for machines without a GPU: a process that has touched CUDA cannot be forked.
"""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any, BinaryIO

from flashcourse.grading.confine import adopt_orphans, end_with_parent

READ_STEP = 2**20


def main() -> None:
    """Serve questions until the grader closes the line."""
    incoming, outgoing = _take_over_the_line()
    from flashcourse import runtime
    from flashcourse.grading.registry import all_questions

    all_questions()
    if "--fork" not in sys.argv:
        _send(outgoing, {"kind": "here"}, {})
        Workbench(incoming, outgoing).serve()
        return
    if runtime.interpreting() and runtime.triton_installed():
        import triton
        import triton.language  # noqa: F401
    _warm_up()
    adopt_orphans()
    _send(outgoing, {"kind": "here"}, {})
    while _ask_next(incoming):
        child = os.fork()
        if child == 0:
            end_with_parent()
            signal.set_wakeup_fd(-1)
            try:
                Workbench(incoming, outgoing).serve()
            finally:
                os._exit(0)
        status = _wait_for(child, incoming)
        if status is None:
            break
        _send(outgoing, {"kind": "ended", "status": status}, {})
    os._exit(0)  # in a process namespace of its own everything else ends with it


def _warm_up() -> None:
    """Let torch import what it imports at first use, once for all questions."""
    import torch

    from flashcourse.grading.observe import observe
    from flashcourse.grading.question import Case, Check

    torch.set_num_threads(1)  # threads would not survive a fork
    nothing = Check("", lambda generator: (), lambda case, observation: None)
    observe(nothing, lambda x: torch.exp(x) @ x, Case("", (torch.ones(2, 2),)))


def _take_over_the_line() -> tuple[BinaryIO, BinaryIO]:
    """Keep the two ends of the line for the grader alone; print goes to standard error."""
    incoming, outgoing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    return os.fdopen(incoming, "rb", buffering=0), os.fdopen(outgoing, "wb", buffering=0)


def _ask_next(incoming: BinaryIO) -> bool:
    """Wait for a question without reading from it; False when the grader has gone."""
    poll = select.poll()
    poll.register(incoming, select.POLLIN)
    while True:
        _reap()
        events = poll.poll(200)
        if any(event & select.POLLIN for _, event in events):
            return True
        if events:
            return False


def _reap(wanted: int | None = None) -> int | None:
    """Collect what has ended, orphans included; the status of the wanted process, if it did."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == wanted:
            found = os.waitstatus_to_exitcode(status)


def _wait_for(child: int, incoming: BinaryIO) -> int | None:
    """The exit status of the forked process; None when the grader has gone meanwhile."""
    poll = select.poll()
    poll.register(incoming, 0)  # hang-up alone
    pause = 0.001
    while True:
        status = _reap(child)
        if status is not None:
            return status
        if poll.poll(0):
            return None
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)


def _send(outgoing: BinaryIO, message: dict[str, Any], values: dict[str, Any]) -> None:
    from flashcourse.grading.wire import pack

    _write(outgoing, pack(message, values, strict=False))


def _write(outgoing: BinaryIO, frame: bytes) -> None:
    view = memoryview(frame)
    while view:
        view = view[os.write(outgoing.fileno(), view) :]


def _read(incoming: BinaryIO, length: int) -> bytes:
    parts = []
    while length:
        part = os.read(incoming.fileno(), min(length, READ_STEP))
        if not part:
            os._exit(0)
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


class Workbench:
    """Defines the cells of one question and runs its answer on the inputs that come."""

    def __init__(self, incoming: BinaryIO, outgoing: BinaryIO) -> None:
        self.incoming, self.outgoing = incoming, outgoing
        self.module = types.ModuleType("lab")
        sys.modules["lab"] = self.module
        self.answer: Any = None
        self.race: Any = None  # what a race is about, its inputs, and the outputs of a lap
        self.inputs: tuple[Any, ...] = ()
        self.outputs: list[Any] = []

    def serve(self) -> None:
        """Answer requests until the question is done."""
        while True:
            message, values = self._receive()
            if message["op"] == "end":
                return
            if message["op"] == "define":
                self._define(message["cells"], message["answer"])
            elif message["op"] == "ask":
                self._ask(message, values)
            else:
                self._take_part(message, values)

    def _receive(self) -> tuple[dict[str, Any], dict[str, Any]]:
        from flashcourse.grading.wire import PREFIX, frame_sizes, unpack

        header, body = frame_sizes(_read(self.incoming, PREFIX.size))
        return unpack(_read(self.incoming, header), _read(self.incoming, body), dense=False)

    def _define(self, cells: list[str], answer: str) -> None:
        from flashcourse.grading.observe import describe_error

        for cell in cells:
            _send(self.outgoing, {"kind": "defining", "cell": cell}, {})
            try:
                source = Path(cell).read_text(encoding="utf-8")
                # A file of its own, so that inspect finds the source of a kernel.
                exec(compile(source, cell, "exec"), self.module.__dict__)
            except BaseException as error:
                reply = {"kind": "undefined", "cell": cell, "error": describe_error(error)}
                _send(self.outgoing, reply, {})
                return
        try:
            self.answer = eval(answer, self.module.__dict__)
        except BaseException as error:
            reply = {"kind": "undefined", "cell": "", "error": describe_error(error)}
            _send(self.outgoing, reply, {})
            return
        _send(self.outgoing, {"kind": "defined"}, {})

    def _ask(self, message: dict[str, Any], values: dict[str, Any]) -> None:
        from flashcourse.grading.observe import observe
        from flashcourse.grading.question import Case, call_plainly

        check = _check_of(message)
        if check.race is not None:  # ``call`` would measure the time in here
            check = dataclasses.replace(check, call=call_plainly)
        case = Case("", values["args"], values["kwargs"])
        _send(self.outgoing, {"kind": "ready"}, {})
        self._receive()  # "go": the grader's clock runs from here
        seen = observe(check, self.answer, case)
        report = {
            "kind": "observation",
            "error": seen.error[:2000],
            "changed_inputs": list(seen.changed_inputs),
            "largest_shape": list(seen.largest_shape),
            "largest_numel": seen.largest_numel,
            "live_numel": seen.live_numel,
            "operators": sorted(seen.operators),
            "library_calls": sorted(seen.library_calls),
            "threads": seen.threads,
            "launches": [[launch.kernel, launch.own, launch.tensors] for launch in seen.launches],
        }
        self._report(report, {"output": seen.output})

    def _take_part(self, message: dict[str, Any], values: dict[str, Any]) -> None:
        """A step of a race; the clock is the grader's."""
        if message["op"] == "lap":
            self._lap(values["changes"])
        elif message["op"] == "show":
            self._report({"kind": "shown"}, {"output": self.outputs[message["run"]]})
        elif message["op"] == "line up":
            self.race, self.inputs = _check_of(message).race, values["args"]
            _send(self.outgoing, {"kind": "lined up"}, {})
        else:
            self.answer = _check_of(message).race.opponent
            _send(self.outgoing, {"kind": "defined"}, {})

    def _lap(self, changes: Any) -> None:
        import torch

        from flashcourse.grading.observe import describe_error

        self.outputs = []
        report, digests = {"kind": "lap", "error": ""}, None
        try:
            made = []
            for change in changes:
                output = self.answer(*self.race.vary(self.inputs, change))
                self.outputs.append(output)
                made.append(self.race.digest(output))
            digests = torch.stack(made) if made else None
        except BaseException as error:
            report["error"] = describe_error(error)[:2000]
        self._report(report, {"digests": digests})

    def _report(self, report: dict[str, Any], values: dict[str, Any]) -> None:
        from flashcourse.grading.wire import WireError, pack

        try:
            frame = pack(report, values, strict=False)
        except WireError as error:
            report["error"] = f"an output that is too large to be taken: {error}"
            frame = pack(report, dict.fromkeys(values))
        _write(self.outgoing, frame)


def _check_of(message: dict[str, Any]) -> Any:
    from flashcourse.grading.registry import find_question

    return find_question(message["question"]).checks[message["check"]]


if __name__ == "__main__":
    main()

"""Worker processes that mark submissions, and the foremen who replace those that die."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashcourse.grading.assemble import Lab
from flashcourse.grading.confine import adopt_orphans
from flashcourse.grading.limits import end_strays
from flashcourse.grading.marking import (
    Marks,
    Outcome,
    Poisoned,
    Rivals,
    Settings,
    mark_submission,
)
from flashcourse.grading.observe import SHARE
from flashcourse.grading.submissions import Submission

HURRY = 5.0  # seconds a worker gets to clean up when it is told to stop


class BatchError(RuntimeError):
    """The batch cannot run as asked; the text says what to do."""


@dataclass
class Job:
    """One submission of a batch: what to grade it as, and where its result goes."""

    submission: Submission
    lab: Lab | None
    folder: str  # below students/
    key: str  # equal only for equal content, lab and settings

    def describe(self) -> str:
        """For the progress bar."""
        return self.submission.name


def grader_error(job: Job, reason: str) -> dict[str, Any]:
    assert job.lab is not None
    submission = job.submission
    marks = Marks(submission.name, submission.origin, job.lab.name)
    for asked in job.lab.asked:
        marks.outcomes.append(Outcome(asked.question, "grader_error", None, asked.points, reason))
    return marks.as_dict()


class Foreman(threading.Thread):
    """Gives jobs to one worker process, and replaces it when it dies."""

    def __init__(
        self,
        number: int,
        settings: Settings,
        out: Path,
        jobs: queue.SimpleQueue[Job],
        news: queue.SimpleQueue[tuple[Job, str, Any]],
    ) -> None:
        super().__init__(daemon=True, name=f"foreman-{number}")
        self.number, self.settings, self.out = number, settings, out
        self.jobs, self.news = jobs, news
        self.worker: Any = None
        self.line: Any = None
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.is_set():
            try:
                job = self.jobs.get_nowait()
            except queue.Empty:
                break
            try:
                self._do(job)
            except Exception as error:
                self.news.put((job, "done", grader_error(job, f"{type(error).__name__}: {error}")))
        self._dismiss()

    def _do(self, job: Job) -> None:
        """Have one job done; a worker that dies costs the question it was at, and no more."""
        done: dict[str, Outcome] = {}
        at = ""
        while not self.stopped.is_set():
            if self.worker is None:
                self._hire()
            try:
                self.line.send((job, done))
                while True:
                    kind, content = self.line.recv()
                    if kind == "done":
                        self.news.put((job, kind, content))
                        return
                    if kind == "outcome":
                        done[content.question] = content
                    elif kind == "poisoned":
                        break  # an error of the GPU stays in the process that met it
                    else:
                        at = content
                        self.news.put((job, kind, content))
                self._dismiss()
            except (EOFError, OSError) as error:
                self.worker.join(HURRY)
                code = self.worker.exitcode
                self._dismiss()
                asked = {a.question: a for a in job.lab.asked} if job.lab else {}
                if at not in asked or at in done:
                    raise BatchError(f"the marking process ended with status {code}") from error
                reason = f"the marking process ended with status {code} at this question"
                done[at] = Outcome(at, "grader_error", None, asked[at].points, reason)

    def _hire(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.line, other = context.Pipe()
        work = self.out / ".work" / f"worker-{self.number}"
        self.worker = context.Process(
            target=work_through, args=(other, self.settings, work, os.getpid()), daemon=True
        )
        with _one_gpu(self.number):
            self.worker.start()
        other.close()

    def _dismiss(self) -> None:
        if self.worker is None:
            return
        with contextlib.suppress(OSError):
            self.line.close()  # one that waits for a job leaves
        self.worker.join(HURRY)
        if self.worker.is_alive():
            self.worker.terminate()
            self.worker.join(HURRY)
        if self.worker.is_alive():
            self.worker.kill()
            self.worker.join(HURRY)
        self.worker = None

    def stop(self) -> None:
        """Finish nothing more; end the worker and all it started."""
        self.stopped.set()
        if self.worker is not None:
            self.worker.terminate()


_environment = threading.Lock()


@contextlib.contextmanager
def _one_gpu(number: int) -> Iterator[None]:
    """Let a process that is started meanwhile see one of the GPUs; workers take turns."""
    count = torch.cuda.device_count()
    if count < 2:
        yield
        return
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = before.split(",") if before else [str(index) for index in range(count)]
    with _environment:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[number % len(visible)]
        try:
            yield
        finally:
            if before is None:
                del os.environ["CUDA_VISIBLE_DEVICES"]
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = before


class _Told(BaseException):
    """The worker was told to stop; on its way out it ends all that its submission started."""


def _stop_now(*_: object) -> None:
    raise _Told


def work_through(line: Any, settings: Settings, work: Path, parent: int) -> None:
    """A worker process: marks the jobs that come over the line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the grader itself is interrupted, and says so
    signal.signal(signal.SIGTERM, _stop_now)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    adopt_orphans()
    temporary = work / "tmp"  # removed with the work, however this process ends
    temporary.mkdir(parents=True, exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    if settings.share:
        os.environ[SHARE] = str(settings.share)
    if settings.gate is not None:  # one for each GPU: a measurement does not disturb another's
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace("/", "-")
        settings.gate = settings.gate.with_name(f"{settings.gate.name}-{gpu}")
    try:
        with Rivals(work / "rivals", settings) as rivals:
            while True:
                job, done = line.recv()
                folder = work / job.folder
                try:
                    _mark_one(line, job, done, settings, folder, rivals)
                finally:
                    end_strays(rivals.processes())
                    shutil.rmtree(folder, ignore_errors=True)
    except (EOFError, OSError, Poisoned, _Told):
        os._exit(0)  # at once: torch takes its time to go


def _mark_one(
    line: Any,
    job: Job,
    done: dict[str, Outcome],
    settings: Settings,
    folder: Path,
    rivals: Rivals,
) -> None:
    assert job.lab is not None
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        marks = mark_submission(
            job.submission,
            job.lab,
            settings,
            folder,
            rivals=rivals,
            done=done,
            progress=lambda text: line.send(("at", text)),
            report=lambda outcome: line.send(("outcome", outcome)),
        ).as_dict()
    except Poisoned:
        line.send(("poisoned", None))
        raise
    except Exception as error:
        last = " ".join(traceback.format_exc().strip().split("\n")[-3:-1])
        marks = grader_error(job, f"{type(error).__name__}: {error} [{last}]")
    line.send(("done", marks))


def _end_with(parent: int) -> None:
    """End this worker when the grader has gone without a word."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)

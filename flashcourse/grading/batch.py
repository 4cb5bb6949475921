"""A tray of submissions, marked by workers in processes of their own; what is done is kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import queue
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import flashcourse
from flashcourse.course.files import write_whole
from flashcourse.grading.assemble import Lab, load_labs, which_lab
from flashcourse.grading.document import Document
from flashcourse.grading.marking import Marks, Outcome, Poisoned, Settings, mark_submission
from flashcourse.grading.submissions import Submission, slug

SCHEMA = 1  # of report.json and of each submission's result.json
RESULT = "result.json"
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


@dataclass
class Batch:
    """A tray to be graded into a folder.

    Attributes:
        lab: the lab that was asked for; None takes each submission for what it is.
        workers: how many submissions at once.
    """

    out: Path
    labs_folder: Path
    settings: Settings
    lab: str | None = None
    workers: int = 1
    again: bool = False
    _results: list[dict[str, Any]] = field(default_factory=list)

    def run(
        self, submissions: list[Submission], progress: Callable[[int, int, str], None]
    ) -> dict[str, Any]:
        """Grade what has no result yet; return the whole report.

        Raises:
            BatchError: another grader is at work in the folder, or there is no such lab.
            KeyboardInterrupt: it was interrupted; what is finished is kept.
        """
        labs = load_labs(self.labs_folder)
        if self.lab is not None and self.lab not in labs:
            raise BatchError(f"there is no lab {self.lab!r}; there are {', '.join(labs)}")
        self.out.mkdir(parents=True, exist_ok=True)
        with _locked(self.out):
            self._settle_seed()
            work = self.out / ".work"
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            self.settings.gate = work / "gate"
            try:
                jobs = self._jobs(submissions, labs)
                results = self._mark(jobs, progress)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        return self._report(results)

    def _settle_seed(self) -> None:
        """A batch that is taken up again draws the same inputs as before."""
        note = self.out / "run.json"
        if self.settings.seed < 0:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                self.settings.seed = int(json.loads(note.read_text())["seed"])
        if self.settings.seed < 0:
            self.settings.seed = random.SystemRandom().getrandbits(62)
        write_whole({note: json.dumps({"seed": self.settings.seed}) + "\n"})

    def _jobs(self, submissions: list[Submission], labs: dict[str, Lab]) -> list[Job]:
        jobs, taken = [], set()
        for submission in submissions:
            lab = labs[self.lab] if self.lab else which_lab(submission, labs)
            if self.lab and not submission.problem:
                found = which_lab(submission, labs)
                if found is not lab:
                    is_it = f"it is {found.name}" if found else "it holds no answer of this course"
                    submission.problem = f"{is_it}; {self.lab} was asked for"
            elif lab is None and not submission.problem:
                submission.problem = "it holds no answer cell of this course's labs"
            folder = base = slug(submission.name)
            number = 1
            while folder.lower() in taken:
                number += 1
                folder = f"{base}-{number}"
            taken.add(folder.lower())
            jobs.append(Job(submission, lab, folder, self._key(submission, lab)))
        return jobs

    def _key(self, submission: Submission, lab: Lab | None) -> str:
        content = {
            "submission": asdict(submission),
            "lab": [lab.name, lab.stubs, [asdict(a) for a in lab.asked]] if lab else None,
            "seed": self.settings.seed,
            "limits": asdict(self.settings.limits),
            "document": self.settings.document,
            "version": [SCHEMA, flashcourse.__version__],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    # Marking

    def _mark(
        self, jobs: list[Job], progress: Callable[[int, int, str], None]
    ) -> list[dict[str, Any]]:
        results: dict[str, dict[str, Any]] = {}
        open_jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        waiting = 0
        for job in jobs:
            finished = None if self.again else self._finished(job)
            if finished is not None:
                results[job.folder] = finished
            elif job.lab is None or job.submission.problem:
                results[job.folder] = self._keep(job, _unmarked(job))
            else:
                open_jobs.put(job)
                waiting += 1
        progress(len(results), len(jobs), "")
        if waiting:
            news: queue.SimpleQueue[tuple[Job, str, Any]] = queue.SimpleQueue()
            count = max(1, min(self.workers, waiting))
            crew = [
                _Foreman(number, self.settings, self.out, open_jobs, news)
                for number in range(count)
            ]
            try:
                for foreman in crew:
                    foreman.start()
                while waiting:
                    job, kind, content = news.get()
                    if kind == "at":
                        progress(len(results), len(jobs), f"{job.describe()}: {content}")
                        continue
                    results[job.folder] = self._keep(job, content)
                    waiting -= 1
                    progress(len(results), len(jobs), job.describe())
            finally:
                for foreman in crew:
                    foreman.stop()
                for foreman in crew:
                    foreman.join(2 * HURRY)
        return [results[job.folder] for job in jobs]

    def _finished(self, job: Job) -> dict[str, Any] | None:
        """The result of an earlier run, if it is for the very same thing and final."""
        try:
            result = json.loads((self.out / "students" / job.folder / RESULT).read_text("utf-8"))
            same = result["key"] == job.key and result["schema"] == SCHEMA
            return result if same and not result["mark_again"] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _keep(self, job: Job, marks: dict[str, Any]) -> dict[str, Any]:
        result = {"schema": SCHEMA, "key": job.key, "folder": job.folder, **marks}
        text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
        place = self.out / "students" / job.folder / RESULT
        write_whole({place: text.encode("utf-8", "replace")})
        return result

    def _report(self, results: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "seed": self.settings.seed,
            "sandbox": self.settings.sandbox.describe(),
            "limits": asdict(self.settings.limits),
            "machine": _machine(),
            "submissions": results,
        }


def _machine() -> dict[str, Any]:
    from flashcourse import runtime

    return {
        "gpu": torch.cuda.get_device_name() if runtime.has_gpu() else None,
        "triton": "interpreter" if runtime.interpreting() else "compiled",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "flashcourse": flashcourse.__version__,
    }


def _unmarked(job: Job) -> dict[str, Any]:
    """The row of something that cannot be graded."""
    submission, lab = job.submission, job.lab
    marks = Marks(submission.name, submission.origin, lab.name if lab else "", submission.problem)
    for asked in lab.asked if lab else ():
        marks.outcomes.append(
            Outcome(asked.question, "missing", 0.0, asked.points, submission.problem)
        )
    marks.document = Document("not run", reason=submission.problem)
    return marks.as_dict()


def _grader_error(job: Job, reason: str) -> dict[str, Any]:
    assert job.lab is not None
    submission = job.submission
    marks = Marks(submission.name, submission.origin, job.lab.name)
    for asked in job.lab.asked:
        marks.outcomes.append(Outcome(asked.question, "grader_error", None, asked.points, reason))
    return marks.as_dict()


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Hold the folder for this grader; the lock goes with the process, however it ends."""
    import fcntl

    with (out / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BatchError(
                f"another grader is at work in {out}: wait for it, or choose another --out"
            ) from error
        yield


# Workers --------------------------------------------------------------------------------------


class _Foreman(threading.Thread):
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
                self.news.put((job, "done", _grader_error(job, f"{type(error).__name__}: {error}")))
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
    try:
        while True:
            job, done = line.recv()
            folder = work / job.folder
            try:
                _mark_one(line, job, done, settings, folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    except (EOFError, OSError, Poisoned, _Told):
        os._exit(0)  # at once: torch takes its time to go


def _mark_one(
    line: Any, job: Job, done: dict[str, Outcome], settings: Settings, folder: Path
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
            done=done,
            progress=lambda text: line.send(("at", text)),
            report=lambda outcome: line.send(("outcome", outcome)),
        ).as_dict()
    except Poisoned:
        line.send(("poisoned", None))
        raise
    except Exception as error:
        last = " ".join(traceback.format_exc().strip().split("\n")[-3:-1])
        marks = _grader_error(job, f"{type(error).__name__}: {error} [{last}]")
    line.send(("done", marks))


def _end_with(parent: int) -> None:
    """End this worker when the grader has gone without a word."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)

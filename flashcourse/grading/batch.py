"""A tray of submissions, marked by workers in processes of their own; what is done is kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import queue
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import flashcourse
from flashcourse.files import write_whole
from flashcourse.grading.assemble import Lab, load_labs, which_lab
from flashcourse.grading.document import Document
from flashcourse.grading.marking import Marks, Outcome, Settings
from flashcourse.grading.submissions import Submission, slug
from flashcourse.grading.workers import HURRY, BatchError, Foreman, Job

SCHEMA = 1  # of report.json and of each submission's result.json
RESULT = "result.json"


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
            gpus = torch.cuda.device_count()
            if gpus:  # one that takes all it gets leaves the others theirs, and the grader its own
                self.settings.share = 0.75 / -(-count // gpus)
            crew = [
                Foreman(number, self.settings, self.out, open_jobs, news) for number in range(count)
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

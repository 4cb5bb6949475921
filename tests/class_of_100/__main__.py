"""Grade the class, or a part of it, and print what was expected and what came."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from class_of_100 import ROOT, Paper, papers, write
from flashcourse import runtime
from flashcourse.grading.batch import Batch
from flashcourse.grading.limits import Limits, choose_sandbox
from flashcourse.grading.marking import Settings
from flashcourse.grading.submissions import collect

LAB = "lab4_triton_forward"
GIB = 2**30


def grade(
    chosen: list[Paper], out: Path, workers: int, limits: Limits, document: bool, seed: int
) -> dict[str, dict[str, Any]]:
    """The results by name; those that are there, if it is interrupted."""
    shutil.rmtree(out, ignore_errors=True)
    write(out / "tray", chosen)
    settings = Settings(seed, choose_sandbox("auto"), limits, document)
    batch = Batch(out / "grades", ROOT / "labs", settings, LAB, workers)
    started = time.monotonic()

    def progress(done: int, total: int, text: str) -> None:
        if done and ":" not in text:
            print(f"  {time.monotonic() - started:6.0f} s  {done}/{total}", flush=True)

    with contextlib.suppress(KeyboardInterrupt):
        batch.run(collect([out / "tray"]), progress)
    found = {}
    for path in (out / "grades" / "students").glob("*/result.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        found[result["name"]] = result
    return found


def compare(paper: Paper, result: dict[str, Any], gpu: bool) -> list[str]:
    """What differs from what was expected."""
    wrong = []
    outcomes = {outcome["question"]: outcome for outcome in result["outcomes"]}
    for question, statuses in paper.expected(gpu).items():
        outcome = outcomes[question]
        if outcome["status"] not in statuses:
            said = [outcome["reason"], *(f["message"] for f in outcome["findings"])]
            text = " | ".join(part for part in said if part)[:300]
            wrong.append(f"{question}: {outcome['status']}, expected {'/'.join(statuses)}: {text}")
    if paper.forward.mistake:
        named = {
            mistake["name"]
            for finding in outcomes["lab4.flash_forward"]["findings"]
            for mistake in finding["mistakes"]
        }
        if named != {paper.forward.mistake}:
            wrong.append(f"named {sorted(named)}, expected {paper.forward.mistake!r}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=100, help="how many of the hundred")
    parser.add_argument("--only", default="", help="those whose name holds this")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for a question")
    parser.add_argument("--stop-after", type=int, default=0, help="seconds for the whole")
    parser.add_argument("--no-document", action="store_true")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--rows", action="store_true", help="print a row for every submission")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "class")
    wanted = parser.parse_args()
    chosen = [paper for paper in papers()[: wanted.limit] if wanted.only in paper.name]
    limits = Limits(seconds=wanted.timeout, document_seconds=5 * wanted.timeout)
    gpu = runtime.has_gpu()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, stop)
    signal.alarm(wanted.stop_after)
    started = time.monotonic()
    document = not wanted.no_document
    found = grade(chosen, wanted.out, wanted.workers, limits, document, wanted.seed)
    wall = time.monotonic() - started
    signal.alarm(0)
    return report(chosen, found, gpu, wall, wanted.rows)


def report(
    chosen: list[Paper], found: dict[str, dict[str, Any]], gpu: bool, wall: float, rows: bool
) -> int:
    """Print the table; 0 if all are there and as expected."""
    strange: dict[str, list[str]] = {}
    became: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for paper in chosen:
        result = found.get(paper.name)
        if result is None:
            continue
        wrong = compare(paper, result, gpu)
        if wrong:
            strange[paper.name] = wrong
        for outcome in result["outcomes"]:
            became[f"{outcome['question']} {outcome['status']}"] += 1
            seconds[outcome["question"]] += outcome["seconds"]
        became[f"the document {result['document']['status']}"] += 1
        if rows:
            line = " ".join(f"{o['status']}({o['seconds']:.0f}s)" for o in result["outcomes"])
            print(f"{paper.name:45s} {line} {result['document']['status']}")
    print(*(f"{count:4d}  {what}" for what, count in sorted(became.items())), sep="\n")
    for question, total in seconds.items():
        print(f"{total / max(len(found), 1):6.1f} s a submission: {question}")
    for name, wrong in strange.items():
        print(f"UNEXPECTED {name}", *(f"    {line}" for line in wrong), sep="\n")
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{len(found)} of {len(chosen)} graded, {len(strange)} not as expected; "
        f"{wall:.0f} s of wall clock, {children.ru_utime + children.ru_stime:.0f} s of CPU"
    )
    return 0 if len(found) == len(chosen) and not strange else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Measurements made on a GPU and committed, for those who run a lesson without one.

A record is one JSON file under ``flashcourse/measure/data``: what was measured, on which machine,
with which versions, by which command. A lesson shows it beside that description and never as if
it had been measured here.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

DATA = Path(__file__).parent / "data"
RECORD_VARIABLE = "FLASHCOURSE_RECORD"


def machine() -> dict[str, str]:
    """What was measured on: device, torch, Triton and Python, as a record states them."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "not installed"
    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else "CPU",
        "torch": torch.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
    }


def load_record(name: str) -> dict[str, Any]:
    """The committed record called ``name``: keys ``machine``, ``date``, ``made_by``, ``results``.

    Raises:
        FileNotFoundError: there is no such record; the message lists those there are.
    """
    path = DATA / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in DATA.glob("*.json"))) or "none"
        raise FileNotFoundError(f"there is no record {name!r}; there are: {known}")
    return json.loads(path.read_text(encoding="utf-8"))


def record(name: str, results: Any, made_by: str) -> bool:
    """Keep results measured here as the course's record, if recording is on and this is a GPU.

    Recording is on when ``FLASHCOURSE_RECORD=1``: that is how the lessons are run for a release.
    A learner's own run changes no file.

    Args:
        results: plain numbers, strings, lists and dictionaries.
        made_by: the command or lesson that measured them.

    Returns:
        True if the record was written.
    """
    if os.environ.get(RECORD_VARIABLE) != "1" or not torch.cuda.is_available():
        return False
    content = {
        "made_by": made_by,
        "date": date.today().isoformat(),
        "machine": machine(),
        "results": results,
    }
    DATA.mkdir(exist_ok=True)
    path = DATA / f"{name}.json"
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, path)
    return True


def describe_record(content: dict[str, Any]) -> str:
    """One line that says where a record comes from."""
    where = content["machine"]
    return (
        f"recorded on {where['device']} on {content['date']} by {content['made_by']} "
        f"(torch {where['torch']}, Triton {where['triton']})"
    )


def measured_or_recorded(name: str, measure: Callable[[], Any], made_by: str) -> Any:
    """Results measured here on a GPU, else those of the committed record, else None.

    It prints which of the three it is, so that no number stands without its machine.

    Args:
        name: of the record.
        measure: called on a GPU; returns plain numbers, strings, lists and dictionaries.
        made_by: the lesson, as the record names it.

    Returns:
        The results as JSON keeps them on either way: keys of dictionaries are strings.
    """
    if torch.cuda.is_available():
        results = json.loads(json.dumps(measure(), allow_nan=False))
        record(name, results, made_by)
        print(f"measured here, on {torch.cuda.get_device_name()}:")
        return results
    try:
        kept = load_record(name)
    except FileNotFoundError:
        print("This needs a GPU, and no record made on one has been committed yet.")
        return None
    print(describe_record(kept) + ":")
    return kept["results"]


def here_and_recorded(lesson: str, name: str, measure: Callable[[], Any]) -> list[tuple[str, Any]]:
    """Where results come from, and the results: measured here and, without a GPU, the record's too.

    Args:
        lesson: its number, such as "08".
        name: of what is measured; the record is called ``lesson_08_name``.
        measure: as in :func:`measured_or_recorded`; without a GPU it is called as well.

    Returns:
        On a GPU one pair; else this CPU's and, where there is a record, the recorded one.
    """
    gpu = torch.cuda.is_available()
    found = [] if gpu else [("this CPU", measure())]
    kept = measured_or_recorded(f"lesson_{lesson}_{name}", measure, f"lesson {lesson}")
    return found + ([] if kept is None else [("this GPU" if gpu else "GPU, recorded", kept)])

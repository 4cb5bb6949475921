"""What a batch leaves behind: report.json, grades.csv, Gradescope's results.json, and pages.

The schema of ``report.json`` (``schema`` 1)::

    schema, seed, sandbox, limits {…}, machine {gpu, triton, torch, python, flashcourse}
    submissions: a list of
        schema, key         what this result is valid for
        folder              below students/
        name, origin, lab   who, where it was found, which lab ("" if that is unknown)
        problem             why it could not be graded, or ""
        notes               how it was read: duplicated cells, edited checks, …
        points, max_points  the sum so far, and what the lab gives
        mark_again          questions that nobody has marked yet: no zero, no pass
        outcomes: a list of question, status, points (null: mark again), max_points, reason,
                  checks (that hold), findings [check, case, message, mistakes [name, explanation]],
                  seconds
        document            status (ran, errors, timeout, not run), failed_checks, errors, reason

A status is one of passed, failed, timeout, crashed, out_of_memory, missing, not_verified,
grader_error. The seed stands in ``report.json`` alone; no page for a learner shows it.
"""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flashcourse.files import write_whole

WORDS = {
    "passed": "passed",
    "failed": "failed",
    "timeout": "took too long",
    "crashed": "crashed",
    "out_of_memory": "out of memory",
    "missing": "no answer",
    "not_verified": "not verified: will be marked again",
    "grader_error": "the grader failed: will be marked again",
}
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
section { border: 1px solid #8888; border-radius: .4rem; padding: .2rem 1rem; margin: 1rem 0; }
h2 { display: flex; justify-content: space-between; font-size: 1.1rem; }
.finding { border-left: .25rem solid #c40; padding-left: .8rem; margin: .8rem 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
""".strip()


def write_reports(out: Path, report: dict[str, Any]) -> list[Path]:
    """Write every file of a report, whole or not at all; return those for the whole batch."""
    whole = {
        out / "report.json": json.dumps(report, indent=1, ensure_ascii=False) + "\n",
        out / "grades.csv": grades_csv(report["submissions"]),
    }
    files = dict(whole)
    for result in report["submissions"]:
        place = out / "students" / result["folder"]
        files[place / "results.json"] = json.dumps(gradescope(result), indent=1) + "\n"
        files[place / "report.html"] = page(result)
    write_whole({path: text.encode("utf-8", "replace") for path, text in files.items()})
    return list(whole)


def grades_csv(results: Iterable[dict[str, Any]]) -> str:
    """One row for every submission; a question that must be marked again has no number."""
    results = list(results)
    questions = list(dict.fromkeys(o["question"] for r in results for o in r["outcomes"]))
    head = ["name", "lab", "points", "max_points", "mark_again", "problem"]
    head += [column for question in questions for column in (question, f"{question} status")]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for result in results:
        known = bool(result["outcomes"])
        row = [
            _plain_cell(result["name"]),
            result["lab"],
            f"{result['points']:g}" if known else "",
            f"{result['max_points']:g}" if known else "",
            " ".join(result["mark_again"]),
            _plain_cell(result["problem"]),
        ]
        by_question = {outcome["question"]: outcome for outcome in result["outcomes"]}
        for question in questions:
            outcome = by_question.get(question)
            points = outcome["points"] if outcome else None
            row += ["" if points is None else f"{points:g}", outcome["status"] if outcome else ""]
        writer.writerow(row)
    return text.getvalue()


def _plain_cell(text: str) -> str:
    """Text that a spreadsheet does not take for a formula."""
    return "'" + text if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def gradescope(result: dict[str, Any]) -> dict[str, Any]:
    """Gradescope's results.json (its autograder specification): one test for each question."""
    tests = []
    for outcome in result["outcomes"]:
        test = {
            "name": outcome["question"],
            "max_score": outcome["max_points"],
            "score": outcome["points"] or 0.0,
            "status": "passed" if outcome["status"] == "passed" else "failed",
            "output": _outcome_text(outcome),
        }
        if outcome["points"] is None:  # neither a pass nor a fail
            del test["status"]
        tests.append(test)
    head = result["problem"]
    if result["mark_again"]:
        head = f"To be marked again, so no zero: {', '.join(result['mark_again'])}."
    return {
        "score": result["points"],
        "output": "\n".join([head, *result["notes"]]).strip(),
        "visibility": "visible",
        "tests": tests,
    }


def _outcome_text(outcome: dict[str, Any]) -> str:
    lines = [WORDS[outcome["status"]]]
    if outcome["reason"]:
        lines.append(outcome["reason"])
    lines += [f"✓ {check}" for check in outcome["checks"]]
    for finding in outcome["findings"]:
        lines += [f"✗ {finding['check']}", f"  input: {finding['case']}", f"  {finding['message']}"]
        lines += [f"  {_mistake(mistake)}" for mistake in finding["mistakes"]]
    return "\n".join(lines)


def _mistake(mistake: dict[str, str]) -> str:
    return (
        f"These are exactly the numbers of a known mistake — {mistake['name']}. "
        f"{mistake['explanation']}"
    )


def page(result: dict[str, Any]) -> str:
    """A page for the learner: what holds, what was wrong, what will be marked again."""
    title = f"{result['lab'] or 'not graded'} · {result['name']}"
    parts = [f"<h1>{_safe(title)}</h1>"]
    if result["problem"]:
        parts.append(f"<p><strong>Not graded: {_safe(result['problem'])}.</strong></p>")
    if result["outcomes"]:
        total = f"{result['points']:g} of {result['max_points']:g} points"
        if result["mark_again"]:
            total += f" so far; {len(result['mark_again'])} to be marked again"
        parts.append(f"<p><strong>{total}</strong></p>")
    if not result["problem"]:
        parts += [_question(outcome) for outcome in result["outcomes"]]
        parts.append(_document(result["document"]))
    if result["notes"]:
        items = "".join(f"<li>{_safe(note)}</li>" for note in result["notes"])
        parts.append(f"<h2>How your notebook was read</h2><ul>{items}</ul>")
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_safe(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n"
        "</body></html>\n"
    )


def _question(outcome: dict[str, Any]) -> str:
    earned = "–" if outcome["points"] is None else f"{outcome['points']:g}"
    parts = [
        f"<h2><span>{_safe(outcome['question'])}: {WORDS[outcome['status']]}</span>"
        f"<span>{earned} / {outcome['max_points']:g}</span></h2>"
    ]
    if outcome["reason"]:
        parts.append(f"<p>{_safe(outcome['reason'])}</p>")
    for finding in outcome["findings"]:
        mistakes = "".join(f"<p>{_safe(_mistake(mistake))}</p>" for mistake in finding["mistakes"])
        parts.append(
            f'<div class="finding"><p><strong>{_safe(finding["check"])}</strong><br>'
            f"input: {_safe(finding['case'])}</p><pre>{_safe(finding['message'])}</pre>"
            f"{mistakes}</div>"
        )
    if outcome["checks"]:
        items = "".join(f"<li>✓ {_safe(check)}</li>" for check in outcome["checks"])
        parts.append(f"<details><summary>What holds</summary><ul>{items}</ul></details>")
    return f"<section>{''.join(parts)}</section>"


def _document(document: dict[str, Any]) -> str:
    text = {
        "ran": "The notebook runs from top to bottom.",
        "errors": "The notebook does not run from top to bottom.",
        "timeout": "The notebook did not come to its end.",
        "not run": "The notebook was not run as a document.",
    }[document["status"]]
    details = [*document["errors"], *([document["reason"]] if document["reason"] else [])]
    items = "".join(f"<li>{_safe(item)}</li>" for item in details)
    return f"<p>{text} This gives no points.</p>" + (f"<ul>{items}</ul>" if items else "")


def _safe(text: str) -> str:
    return html.escape(str(text))

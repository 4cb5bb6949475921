"""Reading a benchmark's JSON again: how many times as fast as another a candidate was."""

from __future__ import annotations

from typing import Any

from flashcourse.bench.candidates import OURS
from flashcourse.bench.grids import Direction


def kept_ratios(
    results: dict[str, Any],
    other: str,
    direction: Direction,
    *,
    ours: str = OURS,
    head_dim: int | None = None,
    at_least: int = 0,
) -> list[float]:
    """Time of ``other`` over time of ``ours``, for each shape that has both.

    Args:
        results: what ``bench --out`` wrote, or the ``results`` of its record.
        other: a candidate's name, such as ``"SDPA CUDNN"``.
        ours: another one's; if it is not given, the course's kernel.
        head_dim: only shapes with this one; None: all.
        at_least: leave out shapes with fewer keys.
    """
    found = []
    for row in results["rows"]:
        if head_dim not in (None, row["head_dim"]) or row["seq_k"] < at_least:
            continue
        by_name = {c["name"]: c for c in row["candidates"] if direction in c}
        if ours in by_name and other in by_name:
            found.append(by_name[other][direction]["ms"] / by_name[ours][direction]["ms"])
    return found

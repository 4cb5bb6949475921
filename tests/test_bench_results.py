"""The committed results: a GPU's, the lessons' own, and drawn as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashcourse.bench import report
from flashcourse.bench.charts import LONG, REFERENCE, relative, write_summary
from flashcourse.bench.grids import GRIDS
from flashcourse.bench.grouped import LENGTHS
from flashcourse.measure.recorded import load_record

FOLDER = Path(__file__).parents[1] / "results"
RESULTS = sorted(path for path in FOLDER.glob("*.json") if path.stem in GRIDS)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_committed_results_are_a_gpus_and_nothing_in_them_is_wrong(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content == load_record(f"bench_{path.stem}")["results"]  # what the lessons show
    assert content["machine"]["device"] != "CPU"
    assert len(content["rows"]) >= 20
    for row in content["rows"]:
        status = {c["name"]: c["status"] for c in row["candidates"]}
        assert status[report.OURS] == "timed", row["shape"]
        assert not {"wrong", "failed"} & set(status.values()), row["shape"]


def test_there_are_results() -> None:
    assert [path.stem for path in RESULTS] == ["decode", "paper"]
    assert {path.stem for path in FOLDER.glob("*.json")} == {"decode", "grouped", "paper"}


def test_grouped_heads_were_timed_on_a_gpu() -> None:
    content = json.loads((FOLDER / "grouped.json").read_text(encoding="utf-8"))
    assert content["machine"]["device"] != "CPU"
    assert [row["seq"] for row in content["rows"]] == list(LENGTHS)
    for row in content["rows"]:
        for part in ("forward", "backward"):
            times = row[part]
            assert times["ratio"] == pytest.approx(times["grouped"] / times["repeated"])


def kept(times: dict[str, dict[str, float]], head_dim: int = 64, keys: int = LONG) -> dict:
    """A row of a report's JSON: milliseconds by candidate and direction."""
    return {
        "head_dim": head_dim,
        "seq_k": keys,
        "candidates": [
            {"name": name, **{direction: {"ms": ms} for direction, ms in by_direction.items()}}
            for name, by_direction in times.items()
        ],
    }


def test_the_summary_is_of_long_shapes_that_both_ran() -> None:
    slow, fast = {"forward": 8.0}, {"forward": 2.0}
    rows: list[Any] = [
        kept({REFERENCE: slow, "ours": fast}),
        kept({REFERENCE: slow, "ours": {"forward": 8.0}}),
        kept({REFERENCE: slow, "ours": {"forward": 0.001}}, keys=LONG - 1),  # too short
        kept({REFERENCE: {}, "ours": fast}),  # no reference to compare with
    ]
    shown = relative({"rows": rows})
    assert list(shown) == ["forward"]
    assert list(shown["forward"]) == ["ours", REFERENCE]  # the fastest first
    assert shown["forward"]["ours"] == {"head_dim 64": pytest.approx(2.0)}  # of 4 and 1
    assert shown["forward"][REFERENCE] == {"head_dim 64": pytest.approx(1.0)}


def test_a_summary_needs_something_to_compare(tmp_path: Path) -> None:
    alone = {"rows": [kept({REFERENCE: {"forward": 1.0}})] * 3}
    assert not write_summary(alone, tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()
    content = json.loads(RESULTS[0].read_text(encoding="utf-8"))
    assert write_summary(content, tmp_path / "y.png")
    assert (tmp_path / "y.png").read_bytes()[:4] == b"\x89PNG"

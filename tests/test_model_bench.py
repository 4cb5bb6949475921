"""The benchmarks of packed training and of the varlen kernel: what can be checked without a GPU."""

from __future__ import annotations

import statistics

import pytest
import torch
from typer.testing import CliRunner

from flashcourse import runtime
from flashcourse.bench import packing as bench_packing
from flashcourse.bench import varlen as bench_varlen
from flashcourse.bench.packing import Case, check_layouts, choose, compare_curves, compare_row
from flashcourse.bench.varlen import KINDS, VarlenRow, draw_lengths, race_varlen, varlen_rows
from flashcourse.model import LAYOUTS, Layout, Size, packed_batch, padded_batch, small_llama

SMALL = Size(32, 1, 2, 1, 16, 48, 300, 24, 60, 4, 6, 3e-3)
LAYOUTS_HERE = (Layout(LAYOUTS[0].name, "sdpa", padded_batch), LAYOUTS[1])
DOCUMENTS = [[1 + (i * 7 + j) % 290 for j in range(3 + i % 11)] for i in range(40)]


def test_a_row_of_the_training_benchmark():
    model = small_llama(SMALL, attention="sdpa")
    case = Case("short", 4, 5, 9)
    row = bench_packing.measure_case(
        model, DOCUMENTS, case, layouts=LAYOUTS_HERE, steps=3, turns=1, dtype=torch.float32
    )
    assert 0 < row["padding"] < 0.5
    assert 5 <= row["mean_length"] <= 9
    assert set(row["layouts"]) == {layout.name for layout in LAYOUTS_HERE}
    assert all(run["tokens_per_second"] > 0 for run in row["layouts"].values())
    row["layouts"]["other"] = {"out_of_memory": True}
    assert "out of memory" in compare_row(row)
    assert "1.00× the tokens" in compare_row(row)


def test_cases_choose_and_cut():
    chosen = choose(DOCUMENTS, Case("", 4, 5, 9))
    assert {len(d) for d in chosen} == {5, 6, 7, 8, 9}
    with pytest.raises(ValueError, match="only 0 documents have 50 tokens"):
        choose(DOCUMENTS, Case("", 4, 50, 90))


def test_layouts_that_compute_something_else_are_not_timed():
    model = small_llama(SMALL, attention="sdpa")
    check_layouts(model, DOCUMENTS[:4], LAYOUTS_HERE, torch.float32)
    all_ones = Layout("wrong", "sdpa", lambda d: {**_packed(d), "attention_mask": _ones(d)})
    with pytest.raises(AssertionError, match="do not compute the same losses"):
        check_layouts(model, DOCUMENTS[:4], (*LAYOUTS_HERE, all_ones), torch.float32)
    fewer = Layout("fewer", "sdpa", lambda d: padded_batch(d[:-1]))
    with pytest.raises(AssertionError, match="fewer has"):
        check_layouts(model, DOCUMENTS[:4], (*LAYOUTS_HERE, fewer), torch.float32)


def _packed(documents):
    return packed_batch(documents, keywords=False)


def _ones(documents):
    return torch.ones(1, sum(map(len, documents)))


def test_curves_are_compared_with_the_spread_of_seeds():
    curves = [
        {"layout": name, "seed": seed, "held_out_loss": loss}
        for name, seed, loss in (("a", 0, 2.0), ("a", 1, 2.1), ("b", 0, 2.02), ("b", 1, 2.1))
    ]
    assert "means differ by 0.0100; two seeds of one layout by up to 0.1000" in compare_curves(
        curves
    )


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_lengths_add_up(kind):
    lengths = draw_lengths(kind, 32 * 1024)
    assert sum(lengths) == 32 * 1024
    assert min(lengths) >= 1
    assert lengths == draw_lengths(kind, 32 * 1024)
    if kind == KINDS[1]:
        assert statistics.fmean(lengths) == pytest.approx(420, rel=0.15)
        assert statistics.pstdev(lengths) / statistics.fmean(lengths) == pytest.approx(
            0.45, rel=0.2
        )


def test_the_grid_is_the_course_s():
    rows = varlen_rows()
    assert {r.head_dim for r in rows} == {64, 128}
    assert {r.kind for r in rows} == set(KINDS)
    assert (min(r.total for r in rows), max(r.total for r in rows)) == (32 * 1024, 256 * 1024)
    assert any(r.heads != r.heads_kv for r in rows)


@pytest.mark.skipif(runtime.has_gpu(), reason="says what it says without a GPU")
def test_without_a_gpu_the_benchmarks_say_so():
    with pytest.raises(RuntimeError, match="needs a GPU"):
        next(race_varlen())
    import typer

    app = typer.Typer()
    app.command()(bench_packing.main)
    result = CliRunner().invoke(app, [])
    assert result.exit_code != 0
    assert "needs a GPU" in result.output.replace("\n", " ")


@pytest.mark.needs_gpu
def test_a_race_on_this_gpu():
    (row,) = race_varlen([VarlenRow(KINDS[0], 8192, 64, 4, 2)], repeats=2)
    assert row["forward"]["ratio"] > 0
    assert row["backward"]["tflops"] > 0


@pytest.mark.needs_gpu
def test_a_wrong_kernel_does_not_get_timed(monkeypatch):
    right = bench_varlen.PROVIDERS["ours"]
    monkeypatch.setitem(bench_varlen.PROVIDERS, "ours", lambda *args: right(*args) * 1.05)
    with pytest.raises(AssertionError, match=r"out of sequence \d+ .* is off by"):
        next(race_varlen([VarlenRow(KINDS[0], 8192, 64, 4, 2)], repeats=2))

"""The benchmark: shapes, the check before the clock, rows for what does not run, the files."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plugins.machine import not_verified
from reference import mask
from rich.console import Console

from flashcourse import runtime
from flashcourse.attention import naive_attention
from flashcourse.bench import charts, command, report, tune
from flashcourse.bench.candidates import Candidate, LeftOut, all_candidates
from flashcourse.bench.correctness import expect, wrong
from flashcourse.bench.grids import DIRECTIONS, GRIDS, Shape, parse_shape
from flashcourse.bench.kept import kept_ratios
from flashcourse.bench.race import Outcome, _order, race
from flashcourse.measure import Ceilings, Timing

SMALL = Shape(40, 40, 16, True, "float32", batch=2, heads=4, heads_kv=2)
PACKED = Shape(40, 40, 16, True, "float32", batch=1, heads=2, heads_kv=2, lengths=(7, 0, 33))


def right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = naive_attention(q, k, v, is_causal=True)
    assert isinstance(out, torch.Tensor)
    return out


def named(name: str, run: Any) -> Candidate:
    return Candidate(name, lambda shape, q, k, v: run)


def refuse(shape: Shape, *qkv: torch.Tensor) -> Any:
    raise LeftOut("it does not like Mondays")


def no_memory(*qkv: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB. GPU 0 has")


def broken(*qkv: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel image\nsecond line")


FIELD: list[Candidate] = [
    named("flashcourse", right),
    named("doubles v", lambda q, k, v: right(q, k, 2 * v)),
    named("right forward, no gradient of k", lambda q, k, v: right(q, k.detach() + 0 * k, v)),
    named("zeros", lambda q, k, v: 0 * right(q, k, v)),
    Candidate("refuses", refuse),
    named("memory", no_memory),
    named("broken", broken),
    named("other", lambda q, k, v: right(q, k, v)),
]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {o.candidate: o for o in race(SMALL, FIELD, device="cpu", rounds=2)}


def test_what_is_right_is_timed_in_every_direction(outcomes: dict[str, Outcome]) -> None:
    for name in ("flashcourse", "other"):
        assert outcomes[name].status == "timed"
        assert set(outcomes[name].times) == set(DIRECTIONS)
        assert all(len(t.times) >= 2 and t > 0 for t in outcomes[name].times.values())


def test_what_is_wrong_is_never_timed(outcomes: dict[str, Outcome]) -> None:
    expected = {"doubles v": "out", "right forward, no gradient of k": "dk", "zeros": "out"}
    for name, tensor in expected.items():
        assert outcomes[name].status == "wrong"
        assert f"{tensor}[" in outcomes[name].reason
        assert outcomes[name].times == {}


def test_what_does_not_run_is_a_row_with_a_reason(outcomes: dict[str, Outcome]) -> None:
    assert list(outcomes) == [c.name for c in FIELD]
    found = {name: (o.status, o.reason) for name, o in outcomes.items() if not o.times}
    assert found["refuses"] == ("left out", "it does not like Mondays")
    assert found["memory"] == ("out of memory", "Tried to allocate 64.00 GiB.")
    assert found["broken"] == ("failed", "RuntimeError: no kernel image")


def test_running_out_of_memory_while_timed_is_a_row_too() -> None:
    calls = iter(range(100))
    late = named("late", lambda q, k, v: no_memory() if next(calls) > 3 else right(q, k, v))
    (late_row, other) = race(SMALL, [late, named("other", right)], device="cpu", rounds=2)
    assert (late_row.status, late_row.times) == ("out of memory", {})
    assert other.status == "timed"


def test_inputs_that_do_not_fit_are_a_row_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shape, "inputs", no_memory)
    (only,) = race(SMALL, FIELD[:1], device="cpu")
    assert only.status == "out of memory"
    assert "nothing could be checked" in only.reason


@pytest.mark.needs_triton
def test_the_candidates_that_a_cpu_has_are_right() -> None:
    if not runtime.interpreting():
        not_verified("Triton compiles for the GPU here")
    shape = Shape(24, 24, 16, True, "float32", batch=1, heads=2, heads_kv=1)
    found = {o.candidate: o for o in race(shape, all_candidates(), device="cpu", rounds=1)
             if o.candidate != "FlexAttention"}  # fmt: skip
    assert {name for name, o in found.items() if o.times} == {
        "flashcourse", "SDPA FLASH", "SDPA MATH",
    }, found  # fmt: skip
    for name, o in found.items():
        assert o.times or (o.status == "left out" and o.reason), (name, o)


@pytest.mark.parametrize("shape", [
    SMALL, PACKED, Shape(20, 50, 16, True, "float32", 1, 2, 2, window=9),
    Shape(1, 50, 16, False, "float32", 2, 4, 2, directions=("forward",)),
], ids=str)  # fmt: skip
def test_the_reference_in_chunks_is_the_reference(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and in chunks of 8 queries, against a mask written pair by pair."""
    monkeypatch.setattr("flashcourse.bench.correctness.CHUNK", 8)
    q, k, v, d_out = shape.inputs("cpu")

    def pair_by_pair(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen = torch.zeros(shape.seq_q, shape.seq_k, dtype=torch.bool)
        window = None if shape.window is None else (shape.window, 0)
        for first_q, n_q, first_k, n_k in shape.sequences():
            seen[first_q : first_q + n_q, first_k : first_k + n_k] = mask(
                n_q, n_k, shape.is_causal, window
            )
        group = shape.heads // shape.heads_kv
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        s = (q @ k.mT * shape.head_dim**-0.5).masked_fill(~seen, float("-inf"))
        return s.softmax(-1) @ v

    expected = expect(shape, (q, k, v, d_out))
    assert wrong(shape, pair_by_pair, q, k, v, d_out, expected) is None
    shuffled = lambda q, k, v: pair_by_pair(q, k.flip(2), v)  # noqa: E731
    assert wrong(shape, shuffled, q, k, v, d_out, expected) is not None

    def last_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.cat([pair_by_pair(q, k, v)[:, :-1], torch.zeros_like(q[:, -1:])], 1)

    assert wrong(shape, last_head, q, k, v, d_out, expected) is not None


@settings(max_examples=60, deadline=None)
@given(seq_q=st.integers(1, 30), more=st.integers(0, 20),
       causal=st.booleans(), window=st.none() | st.integers(1, 40))  # fmt: skip
def test_pairs_are_counted_exactly(seq_q: int, more: int, causal: bool, window: int | None) -> None:
    causal = causal or window is not None
    shape = Shape(seq_q, seq_q + more, is_causal=causal, window=window)
    seen = mask(seq_q, seq_q + more, causal, None if window is None else (window, 0))
    assert shape.pairs == int(seen.sum())


@pytest.mark.parametrize("count", range(1, 10))
def test_nobody_follows_the_same_one_twice(count: int) -> None:
    names = [chr(ord("a") + i) for i in range(count)]
    rounds = [_order(names, turn) for turn in range(count + count % 2)]
    assert all(sorted(order) == names for order in rounds)
    followed = [pair for order in rounds for pair in itertools.pairwise(order)]
    most = 1 if count % 2 == 0 else 2  # the pause lets one pair meet again
    assert all(followed.count(pair) <= most for pair in followed)
    if count % 2 == 0:
        assert sorted(order[0] for order in rounds) == names


def test_no_names_make_no_order() -> None:
    assert _order([], 2) == []


@pytest.mark.parametrize("name", GRIDS)
def test_grids_have_distinct_legal_shapes(name: str) -> None:
    shapes = GRIDS[name]()
    assert len({str(s) for s in shapes}) == len(shapes)
    for shape in shapes:
        assert shape.heads % shape.heads_kv == 0
        if shape.lengths is not None:
            assert sum(shape.lengths) == shape.seq_q == shape.seq_k
            assert shape.batch == 1


def test_the_paper_grid_is_the_promised_one() -> None:
    shapes = GRIDS["paper"]()
    plain = [s for s in shapes if s.heads == s.heads_kv and s.window is None]
    assert len(plain) == 2 * 2 * (6 + 3)
    assert any(s.heads_kv == 8 for s in shapes)
    assert any((s.window, s.seq_q) == (1024, 16384) for s in shapes)


def test_shapes_by_hand() -> None:
    assert parse_shape("B2,H8/2,D96,N100/300,causal,bf16") == Shape(
        100, 300, 96, True, "bfloat16", 2, 8, 2
    )
    assert parse_shape("N64 W16").window == 16
    assert parse_shape("N1/64").directions == ("forward",)
    for text, message in {
        "B2": "length is missing", "N64,Q3": "'Q3' is not understood", "N0": "'N0' is not",
        "N64,H6/4": "multiple of KV heads", "N64,D300": "1 to 256", "N64,D8/2": "'D8/2'",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(message)):
            parse_shape(text)


def a_report() -> report.Report:
    top = Ceilings("a GPU", "bfloat16", 4e12, 8e14, Timing([1.0]), Timing([1.0]))
    result = report.Report("python -m flashcourse bench", top)
    for n, factor in ((512, 2.0), (1024, 0.5)):
        shape = Shape(n, n, is_causal=True)
        ours = Outcome("flashcourse", "timed", times={d: Timing([1, 2, 3]) for d in DIRECTIONS})
        other = Outcome("SDPA CUDNN", "timed",
                        times={d: Timing([2 * factor]) for d in DIRECTIONS})  # fmt: skip
        ours.host["forward"] = 40.0 * factor
        out = Outcome("SDPA MATH", "out of memory", "Tried to allocate 64 GiB.")
        result.rows.append((shape, [ours, other, out]))
    return result


def test_the_report_in_numbers() -> None:
    result = a_report()
    assert result.ratios("SDPA CUDNN", "forward") == [2.0, 0.5]
    assert result.ratios("SDPA CUDNN", "forward", at_least=1024) == [0.5]
    assert result.ratios("SDPA MATH", "forward") == []
    text = "\n".join(report.summary(result))
    assert "flashcourse / SDPA CUDNN, backward: geometric mean 1.00, lowest 0.50" in text
    assert "800 TFLOP/s (bfloat16 matrix product), 4.00 TB/s" in text
    assert "call returns, forward (host, median over the shapes): flashcourse 50 µs" in text
    assert "call returns, backward" not in text
    assert report.reasons(result) == [
        "SDPA MATH, all shapes: out of memory: Tried to allocate 64 GiB."
    ]
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table(result, "forward"))
    shown = console.export_text()
    assert "(0.50×)" in shown
    assert "(2.00×)" in shown


def test_the_files_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = a_report()
    path = tmp_path / "new" / "quick.json"
    report.write_json(result, path)
    before = path.read_bytes()
    content = json.loads(before)
    assert content["rows"][0]["candidates"][0]["forward"] == {
        "ms": 2.0, "low_ms": 1.4, "high_ms": 2.6, "runs": 3, "tflops": 2.15, "host_us": 80.0,
    }  # fmt: skip
    assert content["rows"][0]["candidates"][2]["reason"]
    assert content["machine"]["torch"] == torch.__version__
    result.rows[0][1][1].times["forward"] = Timing([float("nan")])
    with pytest.raises(ValueError):
        report.write_json(result, path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["quick.json"]


def test_charts_of_each_direction(tmp_path: Path) -> None:
    written = charts.write_charts(a_report(), tmp_path / "quick")
    assert [p.name for p in written] == [f"quick-{d}.png" for d in DIRECTIONS]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in written)


def test_charts_of_decoding_show_bytes_and_not_flops() -> None:
    result = report.Report("x", None)
    shape = Shape(1, 1024, 64, dtype="bfloat16", directions=("forward",))
    result.rows.append((shape, [Outcome("a", "timed", times={"forward": Timing([1.0])})]))
    (panel,) = charts.panels(result, "forward")
    assert panel.series["a"][1024.0] == pytest.approx(4 * 32 * 2 * (2 * 1024 + 1) * 64 / 1e9)
    assert charts.panels(result, "backward") == []
    (wide,) = charts.panels(a_report(), "forward")
    assert wide.series["flashcourse"][512.0] == pytest.approx(2.15, abs=0.01)


def test_a_whole_run_on_the_cpu_machinery() -> None:
    kept: list[tuple[int, list[str]]] = []
    result = command.measure(
        [SMALL, PACKED], FIELD[:2], "x", 1, Console(quiet=True), "cpu",
        keep=lambda report: kept.append((len(report.rows), list(report.left))),
    )  # fmt: skip
    (small,) = [outcomes for shape, outcomes in result.rows if shape == SMALL]
    assert [o.status for o in small] == ["timed", "wrong"]
    assert len(result.mistakes) == 3, result.mistakes  # packed: it ignores the boundaries
    assert result.seconds > 0
    assert kept == [(1, [str(PACKED)]), (2, [])]


def test_when_the_time_is_over_the_rest_is_named() -> None:
    quiet = Console(quiet=True)
    result = command.measure([SMALL, PACKED], FIELD[:1], "x", 1, quiet, "cpu", minutes=1e-6)
    assert len(result.rows) + len(result.left) == 2
    assert str(PACKED) in result.left


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flashcourse", "bench", *arguments], capture_output=True, text=True
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="it measures where there is a GPU")
def test_without_a_gpu_it_prints_no_speed_and_says_why() -> None:
    run = bench("--grid", "quick")
    assert run.returncode == 2
    assert "interpreter" in run.stdout
    assert "TFLOP/s" not in run.stdout
    assert "ms" not in re.findall(r"\b\w+\b", run.stdout)


def test_the_command_is_kept_without_the_folders_of_a_machine() -> None:
    kept = command._typed(None, None, ["SDPA MATH"], 3, Path("/somewhere/results"), Path("/x/a.py"))
    assert kept == (
        "python -m flashcourse bench --grid quick --only 'SDPA MATH' --out results --tutorial a.py"
    )
    assert command._typed(None, ["N64"], None, 5, None, None).endswith("--shape N64 --rounds 5")
    assert command._typed("paper", None, None, 3, None, None, 2.5).endswith("--minutes 2.5")


def test_wrong_arguments_are_named() -> None:
    run = bench("--grid", "huge")
    assert run.returncode == 2
    assert "'huge' is not a grid" in " ".join(run.stderr.split()).replace("│ ", "")


def test_rows_of_the_tuning_table_are_chosen_by_name() -> None:
    assert len(tune.rows()) == len(set(tune.rows())) == 3 * 5 * 3
    (row,) = tune.rows(["forward head_dim=128 float16"])
    assert row == ("forward", 128, "float16")
    assert {dtype for _, _, dtype in tune.rows(["head_dim=64 float16", "head_dim=64 b"])} == {
        "float16", "bfloat16",
    }  # fmt: skip
    assert tune.rows(["head_dim=65"]) == []
    run = bench("--tune", "--only", "head_dim=65")
    assert run.returncode == 2
    assert "no row matches" in " ".join(run.stderr.split()).replace("│ ", "")


@pytest.mark.needs_gpu
@pytest.mark.parametrize("text", [
    "B1,H4/2,D64,N512,causal,fp16", "B1,H2,D64,N1024,W100,bf16", "B1,H2,D64,N1/512,fp16",
])  # fmt: skip
def test_on_the_gpu_every_candidate_is_right(text: str) -> None:
    shape = parse_shape(text)
    found = race(shape, all_candidates(), rounds=1)
    assert found[0].status == "timed" or "yet" in found[0].reason, found[0]
    for outcome in found:
        assert outcome.status in ("timed", "left out"), outcome
        assert list(outcome.host) == ([] if shape.seq_q == 1 else list(outcome.times))


@pytest.mark.needs_gpu
def test_on_the_gpu_packed_batches_are_right() -> None:
    shape = Shape(900, 900, 64, True, "float16", 1, 4, 4, lengths=(1, 399, 500))
    for outcome in race(shape, all_candidates(), rounds=1):
        assert outcome.status in ("timed", "left out"), outcome
    assert race(shape, all_candidates()[:1], rounds=1)[0].status == "timed"


def test_a_kept_run_gives_the_ratios_of_the_report() -> None:
    ran = a_report()
    kept = json.loads(json.dumps(ran.to_json()))
    names = {o.candidate for _, outcomes in ran.rows for o in outcomes}
    for name, direction in itertools.product(names, DIRECTIONS):
        expected = ran.ratios(name, direction)
        assert kept_ratios(kept, name, direction) == pytest.approx(expected, rel=1e-2)
    longest = max(shape.seq_k for shape, _ in ran.rows)
    assert kept_ratios(kept, report.OURS, "forward", at_least=longest + 1) == []
    assert kept_ratios(kept, report.OURS, "forward", head_dim=999) == []
    assert kept_ratios(kept, report.OURS, "forward")

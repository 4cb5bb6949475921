"""The comparison of caches, and the two ways in which tokens are compared."""

from __future__ import annotations

import pytest
from serving_cases import DEVICE, model, paged
from typer.testing import CliRunner

from flashcourse import runtime
from flashcourse.bench import serving
from flashcourse.serving import ContiguousKVCache, Engine, PagedKVCache, VirtualClock, make_load
from flashcourse.serving.check import agree_with_generate_batch, agree_with_model

LENGTHS = [(5, 4), (12, 6), (3, 1), (20, 3)]


@pytest.fixture
def answers():
    engine = Engine(model(), paged(), attention="naive", token_budget=16, clock=VirtualClock())
    load = make_load(LENGTHS, 61, seed=1)
    requests = [engine.submit(a.prompt, max_new_tokens=a.new_tokens) for a in load]
    engine.run()
    return requests


def test_right_answers_agree_with_the_model_alone(answers):
    found = agree_with_model(model(), answers)
    assert (found.requests, found.equal, found.tokens) == (4, 4, 14)
    assert found.largest_gap == 0
    assert str(found) == "4 of 4 answers equal (14 tokens)"


def test_one_wrong_token_is_noticed(answers):
    wrong = answers[1]
    wrong.output[2] = wrong.tokens[len(wrong.prompt) + 2] = (wrong.output[2] + 1) % 61
    found = agree_with_model(model(), answers)
    assert found.equal == 3
    assert found.largest_gap > 1e-4
    assert "at most" in str(found)


def test_drawn_answers_cannot_be_compared(answers):
    answers[0].temperature = 1.0
    with pytest.raises(ValueError, match="greedy"):
        agree_with_model(model(), answers)


def test_transformers_own_engine_gives_the_same_tokens(answers):
    found = agree_with_generate_batch(model(), answers)
    assert (found.requests, found.equal) == (4, 4)
    assert model().config._attn_implementation == "sdpa"
    answers[3].output[0] = (answers[3].output[0] + 1) % 61
    assert agree_with_generate_batch(model(), answers).equal == 3


def test_both_caches_get_the_same_memory_and_give_the_same_tokens(monkeypatch):
    monkeypatch.setattr(serving, "ROWS", 3)
    monkeypatch.setattr(serving, "LONGEST", 48)
    made = {name: make() for name, make in serving.caches(model()).items()}
    assert isinstance(made["contiguous"], ContiguousKVCache)
    assert isinstance(made["paged"], PagedKVCache)
    assert made["contiguous"].num_bytes == made["paged"].num_bytes
    load = make_load(LENGTHS * 4, 61, seed=1)
    found = serving.compare(model(), load, turns=2, attention="naive")
    assert found["caches"]["contiguous"]["max_running"] == 3
    assert found["caches"]["paged"]["max_running"] > 3
    assert found["caches"]["paged"]["waste"] < found["caches"]["contiguous"]["waste"]
    agreement = serving.check(model(), found["requests"], 4)
    assert agreement["paged"]["equal"] == agreement["contiguous"]["equal"] == 16
    assert agreement["generate_batch"]["equal"] == 4


def test_the_trace_fits_and_has_its_means():
    lengths = serving.trace(2000)
    prompts, new = zip(*lengths, strict=True)
    assert max(prompts) + max(new) - 1 < serving.LONGEST
    assert abs(sum(prompts) / 2000 - 290) < 30
    assert abs(sum(new) / 2000 - 180) < 30


@pytest.mark.skipif(runtime.has_gpu(), reason="what it says without a GPU")
def test_without_a_gpu_nothing_is_measured():
    import typer

    app = typer.Typer()
    app.command()(serving.main)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert "needs a GPU" in result.output


@pytest.mark.needs_gpu
def test_the_price_of_indirection_is_measured():
    found = serving.price_of_indirection(batch=2, context=256)
    assert set(found["ms"]) == {"contiguous", "1", "8", "16", "64", "256"}
    assert DEVICE.type == "cuda"

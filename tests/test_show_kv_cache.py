"""Lesson 08: its figures say what they were given, its formulas agree with what is really held."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from flashcourse.measure.decode_costs import (
    MODELS,
    Cost,
    decode_attention_cost,
    kv_bytes_per_token,
    matmul_cost,
    prefill_attention_cost,
)
from flashcourse.model import Size, small_llama
from flashcourse.model.generation import cache_keyword, new_cache, run_with_cache
from flashcourse.show import kv_cache
from flashcourse.show.figure import png

TINY = Size(32, 3, 4, 2, 8, 64, 96, 64, None, 2, 2, 1e-3)


def test_every_figure_draws():
    figures = [
        kv_cache.draw_recomputed(4, 3),
        kv_cache.draw_lines([1, 2], {"a": [1, None], "b": [1, 2]}, title="t", xlabel="x",
                            ylabel="y", dashed=["b"]),
        kv_cache.draw_memory("m", 1e10, 1e5, 8192, 64, {"T4": 16e9}),
        kv_cache.draw_occupancy(8, 4, 12),
        kv_cache.draw_bars({"a": 1.0, "b": 0.0}, "t", "x", 2.0, "limit"),
    ]  # fmt: skip
    for figure in figures:
        assert isinstance(figure, Figure)
        assert png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize(("prompt", "new"), [(1, 1), (8, 16), (5, 2)])
def test_recomputed_tokens_are_counted(prompt, new):
    without, cached = kv_cache.draw_recomputed(prompt, new).axes
    assert f": {sum(prompt + i for i in range(new))} tokens" in without.get_title()
    assert f": {prompt + new - 1} tokens" in cached.get_title()


def test_lines_refuse_a_series_of_another_length():
    with pytest.raises(ValueError, match="a: 1 values for 2 places"):
        kv_cache.draw_lines([1, 2], {"a": [1]}, title="", xlabel="", ylabel="")


@pytest.mark.parametrize("programs", [1, 8, 132, 133])
@pytest.mark.parametrize("splits", [1, 3, 16])
@pytest.mark.parametrize("places", [1, 12, 132])
def test_a_schedule_runs_every_part_once_and_leaves_no_place_free_too_early(
    programs, splits, places
):
    table, time = kv_cache.schedule(programs, splits, places)
    numbers, counts = np.unique(table[table >= 0], return_counts=True)
    assert numbers.tolist() == list(range(programs))
    assert (counts == splits).all()
    assert (table[:-1] >= 0).all(), "a free place before the last wave"
    assert time == pytest.approx(len(table) / splits)
    assert time >= programs / places - 1e-9


def test_memory_names_cache_and_weights():
    shape = MODELS["Llama-3-8B"]
    figure = kv_cache.draw_memory(
        shape.name, 2 * shape.parameters, shape.kv_bytes_per_token(2), 8192, 64, {"H200": 141e9}
    )
    assert "cache 64.00 GiB" in figure.axes[0].get_title()


@pytest.mark.parametrize(
    ("name", "kib"),
    [("Llama-2-7B", 512), ("Llama-3-8B", 128), ("Mistral-7B", 128), ("Llama-3-70B", 320),
     ("Qwen2.5-7B", 56), ("Qwen2.5-0.5B", 12), ("Qwen3-0.6B", 112)],
)  # fmt: skip
def test_published_models(name, kib):
    assert MODELS[name].kv_bytes_per_token(2) == kib * 1024


def test_sizes_must_be_positive():
    assert kv_bytes_per_token(1, 1, 8, 0.5) == 8
    with pytest.raises(ValueError, match="heads_kv must be positive, got 0"):
        kv_bytes_per_token(2, 0, 8, 2)


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(32, 32), (32, 8), (12, 4), (8, 1)])
@pytest.mark.parametrize("seq", [1024, 100_000])
def test_intensities(batch, heads_q, heads_kv, seq):
    decode = decode_attention_cost(batch, heads_q, heads_kv, seq, 128, 2)
    assert decode.intensity == pytest.approx(heads_q / heads_kv, rel=0.02)
    prefill = prefill_attention_cost(batch, heads_q, heads_kv, seq, 128, 2)
    assert prefill.intensity == pytest.approx(seq / 2 * heads_q / (heads_q + heads_kv), rel=2 / seq)
    assert matmul_cost(batch, 1e9, 2).intensity == batch


def test_a_cost_takes_the_longer_of_both():
    cost = Cost(flops=100, bytes_moved=10)
    assert cost.seconds(peak_flops=50, bandwidth=10) == 2
    assert cost.seconds(peak_flops=1000, bandwidth=10) == 1


def test_the_formula_counts_what_the_cache_holds():
    model = small_llama(TINY, attention="sdpa").eval()
    cache = new_cache(model)
    ids = torch.randint(3, TINY.vocab, (2, 7))
    with torch.no_grad():
        logits = run_with_cache(model, ids, cache)
    held = sum(
        t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values)
    )
    assert held == 2 * 7 * kv_bytes_per_token(TINY.layers, TINY.heads_kv, TINY.head_dim, 4)
    assert logits.shape == (2, 7, TINY.vocab)


def test_a_cache_changes_roundings_only_and_is_really_used():
    model = small_llama(TINY, attention="sdpa").eval()
    assert cache_keyword(model) in inspect.signature(model.forward).parameters
    ids = torch.randint(3, TINY.vocab, (1, 9))
    cache = new_cache(model)
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        run_with_cache(model, ids[:, :5], cache)
        rest = run_with_cache(model, ids[:, 5:], cache)
        torch.testing.assert_close(rest, whole[:, 5:], atol=1e-5, rtol=1e-5)
        fresh = run_with_cache(model, ids[:, 5:], new_cache(model))
    assert cache.get_seq_length() == 9
    assert (fresh - whole[:, 5:]).abs().max() > 1e-2, "an empty cache must make a difference"

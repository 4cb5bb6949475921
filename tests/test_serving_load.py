"""Caches' counters, sampling, clocks, loads and reports."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_cases import alone, contiguous, model, paged

from flashcourse.serving import (
    Arrival,
    Engine,
    KVShape,
    Request,
    StepRecord,
    Usage,
    VirtualClock,
    WallClock,
    lognormal_lengths,
    make_load,
    poisson_times,
    report,
    sample,
    serve,
    uniform,
)


def test_bytes_of_a_token():
    llama = KVShape(32, 8, 128, torch.bfloat16)  # Llama-3-8B
    assert llama.bytes_per_token == 128 * 1024
    shape = KVShape.of(model())
    assert shape.bytes_per_token == 2 * 2 * 2 * 8 * 4
    cache = paged(tokens=99, page_size=4)
    assert (cache.capacity, cache.num_bytes) == (96, 96 * shape.bytes_per_token)
    held = sum(memory.numel() * memory.element_size() for memory in (cache.k, cache.v))
    assert held == cache.num_bytes


def test_counters_of_pages():
    cache = paged(tokens=32, page_size=4)
    first = cache.begin([1])
    cache.extend(first, 6)
    assert cache.usage() == Usage(6, 8, 0, 32)
    assert cache.usage().waste == 0.25
    second = cache.fork(first)
    assert cache.usage() == Usage(6, 8, 0, 32)  # shared slots count once
    cache.extend(second, 1)
    assert cache.usage() == Usage(9, 12, 0, 32)  # its last page was copied
    regions = cache.regions()
    assert sorted(len(r.sequences) for r in regions) == [1, 1, 2]
    assert sum(r.used for r in regions) == 9
    cache.publish(first, [1, 2, 3, 4, 5, 6])
    cache.free(first)
    cache.free(second)
    assert cache.usage() == Usage(0, 0, 4, 32)
    assert [r.sequences for r in cache.regions()] == [()]
    assert cache.usage().waste == 0


def test_counters_of_rows():
    cache = contiguous(tokens=100, longest=30)
    assert (cache.capacity, cache.num_rows) == (90, 3)
    first = cache.begin([1])
    cache.extend(first, 6)
    assert cache.usage() == Usage(6, 30, 0, 90)
    cache.fork(first)
    assert cache.usage() == Usage(12, 60, 0, 90)
    cache.free(first)
    assert [(r.start, r.used) for r in cache.regions()] == [(30, 6)]
    cache.begin([1])
    assert [(r.start, r.used) for r in cache.regions()] == [(0, 0), (30, 6)]


def test_a_fork_copies_the_keys_and_values():
    for cache in (paged(), contiguous()):
        first = cache.begin([1])
        cache.extend(first, 6)
        k = torch.randn(6, 2, 8, device=cache.device)
        cache.write(1, torch.from_numpy(cache.slots(first, 0, 6)).to(cache.device), k, 2 * k)
        second = cache.fork(first)
        cache.extend(second, 1)
        slots = torch.from_numpy(cache.slots(second, 0, 6)).to(cache.device)
        assert torch.equal(cache.k[1, slots], k)
        assert torch.equal(cache.v[1, slots], 2 * k)


def test_greedy_takes_the_largest():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 4.0]])
    assert sample(logits, [0, 0], [0.9, 0.9]) == [1, 0]
    assert sample(logits, [0, 1e-4], [0.9, 0.9999]) == [1, 0]


def test_draws_follow_the_probabilities():
    p = torch.tensor([0.5, 0.0, 0.2, 0.3])
    count = 4000
    draws = [uniform(7, index) for index in range(count)]
    tokens = sample(p.log().expand(count, 4), [1.0] * count, draws)
    shares = np.bincount(tokens, minlength=4) / count
    assert np.abs(shares - p.numpy()).max() < 0.03
    assert shares[1] == 0
    hot = sample(p.log().expand(count, 4), [2.0] * count, draws)
    flat = p.sqrt() / p.sqrt().sum()
    assert np.abs(np.bincount(hot, minlength=4) / count - flat.numpy()).max() < 0.03


@given(st.integers(-(2**70), 2**70), st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_a_draw_depends_on_seed_and_index_alone(seed, index):
    first = uniform(seed, index)
    assert 0 <= first < 1
    assert uniform(seed, index) == first
    assert uniform(seed, index + 1) != first
    assert uniform(seed + 1, index) != first


def test_nan_is_not_a_token():
    logits = torch.tensor([[0.0, 1.0], [float("nan"), 1.0]])
    with pytest.raises(FloatingPointError, match="row 1"):
        sample(logits, [0, 0], [0, 0])


def test_clocks():
    virtual = VirtualClock(step=1.0, token=0.1)
    virtual.worked(5)
    assert virtual.now() == 1.5
    virtual.wait_until(1.0)
    assert virtual.now() == 1.5
    virtual.wait_until(4.0)
    assert virtual.now() == 4.0
    wall = WallClock()
    wall.worked(10**9)
    wall.wait_until(0.02)
    assert 0.02 <= wall.now() < 5


def test_lengths_and_times():
    lengths = lognormal_lengths(4000, 300, spread=1.0, longest=100_000, seed=1)
    assert abs(np.mean(lengths) - 300) < 20
    assert np.median(lengths) < 250
    cut = lognormal_lengths(4000, 300, longest=512, seed=1)
    assert (min(cut) >= 1, max(cut)) == (True, 512)
    times = poisson_times(4000, 20.0, seed=2)
    assert times == sorted(times)
    assert abs(times[-1] - 200) < 15
    assert poisson_times(3, math.inf) == [0.0] * 3
    with pytest.raises(ValueError, match="rate"):
        poisson_times(3, 0)


def test_a_load_is_the_same_for_the_same_seed():
    lengths = [(9, 2), (3, 5), (1, 1)]
    load = make_load(lengths, 61, rate=5.0, prefix=(8, 9), seed=4)
    assert load == make_load(lengths, 61, rate=5.0, prefix=(8, 9), seed=4)
    assert [(len(a.prompt), a.new_tokens) for a in load] == lengths
    assert all(a.prompt[:2] == (8, 9)[: len(a.prompt)] for a in load)
    text = list(range(100, 140))
    cut = make_load([(10, 1)], 200, text=text, seed=4)[0].prompt
    assert cut == tuple(range(cut[0], cut[0] + 10))


@pytest.mark.parametrize("rate", [1.0, 30.0, math.inf])
def test_a_served_load(rate):
    lengths = [(5, 4), (12, 6), (3, 1), (20, 3), (8, 9)]
    load = make_load(lengths, 61, rate=rate, seed=1)
    clock = VirtualClock()
    clock.wait_until(100.0)  # an engine that has been up for a while
    engine = Engine(model(), paged(), attention="naive", token_budget=16, clock=clock)
    watched = []
    requests = serve(engine, load, watched.append)
    for request, come in zip(requests, load, strict=True):
        assert request.output == alone(come.prompt, come.new_tokens)
        assert request.arrival == 100.0 + come.time
        assert request.arrival <= request.started < request.token_times[0]
        assert request.token_times == sorted(request.token_times)
    assert len(watched) == len(engine.steps)
    found = report(requests, engine.steps)
    assert found.new_tokens == sum(new for _, new in lengths)
    assert found.max_running == (1 if rate == 1.0 else max(s.running for s in engine.steps))
    assert 0 < found.waste < 0.75
    assert str(found)


def test_a_report_counts_what_it_is_given():
    def done(arrival, *times):
        request = Request(0, [1, 2], len(times), arrival=arrival)
        for time in times:
            request.add(9, time)
        return request

    requests = [done(0.0, 1.0, 2.0, 3.0), done(1.0, 3.0), Request(2, [1], 5)]
    steps = [
        StepRecord(0.0, 1.0, 4, 1, 1, 1, 0, Usage(2, 4, 0, 8)),
        StepRecord(1.0, 3.0, 2, 2, 2, 0, 1, Usage(8, 8, 0, 8)),
    ]
    found = report(requests, steps)
    assert (found.requests, found.new_tokens, found.seconds) == (2, 4, 3.0)
    assert found.tokens_per_second == 4 / 3
    assert found.first_token["p50"] == 1.5
    assert found.per_token["p99"] == 1.0
    assert found.whole["p50"] == 2.5
    assert found.mean_running == pytest.approx(5 / 3)
    assert (found.max_waiting, found.preemptions, found.computed) == (1, 1, 6)
    assert found.waste == pytest.approx(1 - (2 * 1 + 8 * 2) / (4 * 1 + 8 * 2))
    assert found.mean_reserved == pytest.approx((4 * 1 + 8 * 2) / 3 / 8)
    assert found.as_dict()["steps"] == 2
    with pytest.raises(ValueError, match="no request was finished"):
        report([Request(0, [1], 1)], steps)


def test_pages_serve_more_at_once_in_the_same_memory():
    lengths = list(
        zip(
            lognormal_lengths(30, 8, longest=24, seed=5),
            lognormal_lengths(30, 6, longest=24, seed=6),
            strict=True,
        )
    )
    load = make_load(lengths, 61, seed=1)
    found = {}
    for name, cache in (("rows", contiguous(tokens=192)), ("pages", paged(tokens=192))):
        clock = VirtualClock()
        engine = Engine(model(), cache, attention="naive", token_budget=64, clock=clock)
        requests = serve(engine, load)
        for request, come in zip(requests, load, strict=True):
            assert request.output == alone(come.prompt, come.new_tokens)
        found[name] = report(requests, engine.steps)
    assert found["rows"].max_running == 4
    assert found["pages"].tokens_per_second > 2 * found["rows"].tokens_per_second
    assert found["pages"].waste < 0.2 < 0.6 < found["rows"].waste


def test_an_arrival_is_plain():
    assert Arrival(0.0, (1, 2), 3) == Arrival(0.0, (1, 2), 3, 0.0, 0)

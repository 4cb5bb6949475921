"""The engine: every request gets the tokens that the model gives it alone."""

from __future__ import annotations

import pytest
import torch
from serving_cases import CACHES, DEVICE, VOCAB, alone, contiguous, model, paged

from flashcourse.model import small_llama
from flashcourse.serving import (
    CacheFull,
    Engine,
    KVShape,
    PagedKVCache,
    RequestRefused,
    VirtualClock,
    report,
)

PROMPTS = [
    (5, 9, 11),
    (7,),
    (5, 9, 11, 4, 20, 33, 2, 8, 50),  # begins like the first
    (5, 9, 11, 4, 20, 33, 2, 8, 50, 13, 13, 41),  # and like the third
    tuple(range(3, 30)),
    (60, 0, 60),
]


def engine(cache=None, **options):
    options = {"attention": "naive", "token_budget": 16, "clock": VirtualClock(), **options}
    return Engine(model(), paged() if cache is None else cache, **options)


def check_all(requests):
    for request in requests:
        assert request.state == "finished"
        expected = alone(
            tuple(request.prompt), request.max_new_tokens, request.temperature, request.seed
        )
        assert request.output == expected, request


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_request_gets_what_it_gets_alone(kind, temperature):
    served = engine(CACHES[kind](), headroom=0)
    requests = [
        served.submit(prompt, max_new_tokens=4 + 3 * n, temperature=temperature, seed=n)
        for n, prompt in enumerate(PROMPTS)
    ]
    served.run()
    check_all(requests)
    assert not served.busy
    assert served.cache.usage().reserved == 0
    assert max(step.running for step in served.steps) > 1


@pytest.mark.needs_triton
@pytest.mark.parametrize("kind", CACHES)
def test_the_kernels_give_the_same_tokens(kind):
    served = engine(CACHES[kind](), attention="flashcourse", token_budget=8)
    requests = [served.submit(p, max_new_tokens=3) for p in PROMPTS[:3]]
    served.run()
    check_all(requests)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("rows", [2, 8])
def test_rows_that_stand_for_nobody_change_nothing(kind, rows):
    """On a GPU decoding batches are padded, so that few shapes occur."""
    served = engine(CACHES[kind](), headroom=0)
    served._model.decode_rows = rows
    requests = [served.submit(p, max_new_tokens=3 + 2 * n) for n, p in enumerate(PROMPTS)]
    served.run()
    check_all(requests)


@pytest.mark.needs_triton
@pytest.mark.parametrize("kind", CACHES)
def test_rows_that_stand_for_nobody_and_the_kernels(kind):
    served = engine(CACHES[kind](), attention="flashcourse", token_budget=16)
    served._model.decode_rows = 4
    requests = [served.submit(p, max_new_tokens=2) for p in PROMPTS[:2]]
    served.run()
    check_all(requests)


def test_preempted_requests_lose_no_token():
    served = engine(paged(tokens=44), headroom=0)
    requests = [
        served.submit(p, max_new_tokens=14, temperature=t, seed=11)
        for p, t in zip(PROMPTS[:4], (0, 1, 0, 1), strict=True)
    ]
    served.run()
    check_all(requests)
    assert served.scheduler.preemptions > 0
    assert requests[0].preemptions == 0  # the oldest keeps its place
    assert report(requests, served.steps).preemptions == served.scheduler.preemptions


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 64])
def test_prompts_in_chunks_of_any_size(budget):
    served = engine(token_budget=budget, max_running=1)
    requests = [served.submit(p, max_new_tokens=3) for p in PROMPTS]
    served.run()
    check_all(requests)
    assert max(step.tokens for step in served.steps) <= budget


def test_decoding_goes_on_while_a_long_prompt_is_read():
    served = engine(token_budget=4)
    first = served.submit(PROMPTS[0], max_new_tokens=12)
    served.step()
    served.submit(PROMPTS[4], max_new_tokens=1)
    for tokens in range(2, 8):
        served.step()
        assert len(first.output) == tokens


def test_a_prefix_is_computed_once():
    served = engine()
    first = served.submit(PROMPTS[3], max_new_tokens=2)
    served.run()
    second = served.submit(PROMPTS[3], max_new_tokens=2)
    served.run()
    assert (first.found, second.found) == (0, 8)  # two pages of four; one token stays to compute
    check_all([first, second])
    before = sum(step.tokens for step in served.steps[:2])
    assert sum(step.tokens for step in served.steps[2:]) == before - 8


@pytest.mark.parametrize("kind", CACHES)
def test_forks_go_their_own_ways(kind):
    served = engine(CACHES[kind]())
    first = served.submit(PROMPTS[2], max_new_tokens=12, temperature=1.0, seed=1)
    for _ in range(4):
        served.step()
    reserved = served.cache.usage().reserved
    same, other = served.fork(first), served.fork(first, seed=2)
    begun = list(other.output)
    assert len(begun) >= 3
    if kind == "paged":
        assert served.cache.usage().reserved == reserved
    served.run()
    check_all([first, same])
    rest = alone((*PROMPTS[2], *begun), 12 - len(begun), 1.0, 2, len(begun))
    assert other.output == begun + rest
    assert other.output != first.output


def test_a_fork_needs_a_running_request_and_a_place():
    served = engine(max_running=2)
    first = served.submit(PROMPTS[0], max_new_tokens=9)
    with pytest.raises(RequestRefused, match="waiting"):
        served.fork(first)
    served.step()
    served.fork(first)
    with pytest.raises(RequestRefused, match="2 requests run"):
        served.fork(first)
    full = engine(contiguous(tokens=48))
    only = full.submit(PROMPTS[0], max_new_tokens=9)
    full.step()
    with pytest.raises(CacheFull, match="all 1 rows"):
        full.fork(only)
    full.run()
    check_all([only])


def test_generation_ends_after_a_stop_token():
    whole = alone(PROMPTS[2], 10)
    stop = next(t for n, t in enumerate(whole) if n >= 2 and t not in whole[:n])
    served = engine()
    request = served.submit(PROMPTS[2], max_new_tokens=10, stop_tokens=[stop])
    served.run()
    assert request.output == whole[: whole.index(stop) + 1]
    assert request.finish_reason == "stop"


@pytest.mark.parametrize("kind", CACHES)
def test_cancelled_requests_leave_nothing_behind(kind):
    served = engine(CACHES[kind](), max_running=2)
    kept, running, waiting = (served.submit(p, max_new_tokens=8) for p in PROMPTS[:3])
    served.step()
    served.cancel(running)
    served.cancel(waiting)
    served.cancel(waiting)  # twice is once
    assert (running.finish_reason, waiting.output) == ("cancelled", [])
    assert len(served.cache.regions()) == 1
    served.run()
    check_all([kept])


BAD = {
    "empty": ({"prompt": []}, "prompt is empty"),
    "text": ({"prompt": "hello"}, "use the tokenizer"),
    "tensor": ({"prompt": torch.tensor([3])}, "tolist"),
    "not an integer": ({"prompt": [3, 4.0]}, r"prompt\[1\] is 4.0"),
    "a bool": ({"prompt": [True]}, r"prompt\[0\] is True"),
    "negative": ({"prompt": [3, -1]}, r"prompt\[1\] is -1"),
    "beyond the vocabulary": ({"prompt": [VOCAB]}, "from 0 to 60"),
    "no new token": ({"max_new_tokens": 0}, "max_new_tokens"),
    "half a token": ({"max_new_tokens": 1.5}, "max_new_tokens"),
    "cold": ({"temperature": -1.0}, "temperature"),
    "no temperature": ({"temperature": float("nan")}, "temperature"),
    "boiling": ({"temperature": float("inf")}, "temperature"),
    "seed": ({"seed": "x"}, "seed"),
    "a stop text": ({"stop_tokens": ["."]}, "stop_tokens"),
    "too long a prompt": ({"prompt": [3] * 500}, "need 500 slots"),
    "too long an answer": ({"max_new_tokens": 10**9}, "one request may have"),
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_refused_and_touch_nobody(kind, name):
    served = engine(CACHES[kind]())
    good = served.submit(PROMPTS[0], max_new_tokens=5)
    served.step()
    changes, message = BAD[name]
    arguments = {"prompt": list(PROMPTS[1]), "max_new_tokens": 1, **changes}
    with pytest.raises(RequestRefused, match=message):
        served.submit(arguments.pop("prompt"), **arguments)
    served.run()
    check_all([good])
    assert [len(served.scheduler.waiting), len(served.scheduler.running)] == [0, 0]


@pytest.mark.parametrize(("kind", "longest"), [("paged", 96), ("contiguous", 48)])
def test_the_longest_request_that_fits_is_served(kind, longest):
    served = engine(CACHES[kind](), max_running=1)
    served._longest = min(served._longest, longest)
    prompt = tuple(PROMPTS[4])
    request = served.submit(prompt, max_new_tokens=longest - len(prompt) + 1)
    with pytest.raises(RequestRefused):
        served.submit(prompt, max_new_tokens=longest - len(prompt) + 2)
    served.run()
    check_all([request])


def test_a_step_that_fails_costs_no_request(monkeypatch):
    served = engine(headroom=0)
    requests = [served.submit(p, max_new_tokens=6, temperature=1.0, seed=4) for p in PROMPTS[:3]]
    served.step()
    works = served._model.logits
    with monkeypatch.context() as patch:
        patch.setattr(served._model, "logits", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            served.step()
    assert served._model.logits == works
    assert served.cache.usage().reserved == 0
    assert list(served.scheduler.waiting) == requests  # in their order
    assert [r.state for r in requests] == ["waiting"] * 3
    served.run()
    check_all(requests)


def test_what_the_engine_was_made_from_stays_as_it_was():
    plain = model()
    before = plain.config._attn_implementation
    served = engine()
    assert plain.config._attn_implementation == before == "sdpa"
    pairs = zip(plain.parameters(), served._model.model.parameters(), strict=True)
    assert all(a is b for a, b in pairs)


def test_wrong_engines():
    other = small_llama("tiny")
    with pytest.raises(ValueError, match="the cache was made for"):
        Engine(other, paged())
    with pytest.raises(ValueError, match="one of"):
        engine(attention="flash")
    with pytest.raises(ValueError, match="max_running"):
        engine(token_budget=4, max_running=5)
    with pytest.raises(ValueError, match="headroom"):
        engine(headroom=1.0)
    if DEVICE.type == "cuda":
        with pytest.raises(ValueError, match="make the cache with"):
            engine(PagedKVCache(KVShape.of(model()), tokens=16))


@pytest.mark.parametrize("tokens", [0, 3])
def test_caches_without_room_for_anything(tokens):
    with pytest.raises(ValueError, match="no page of 4"):
        paged(tokens=tokens)
    with pytest.raises(ValueError, match="no row of 48"):
        contiguous(tokens=tokens)
    with pytest.raises(ValueError, match="1 to 256"):
        paged(page_size=257)


def test_an_idle_engine_does_nothing():
    served = engine()
    assert served.step() is None
    served.run()
    assert served.steps == []

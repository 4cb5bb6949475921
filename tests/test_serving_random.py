"""The engine under random use, with NaN wherever nobody's keys and values are."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from plugins.machine import THOROUGH
from serving_cases import VOCAB, alone, contiguous, model, paged, poisoned

from flashcourse.serving import (
    CacheFull,
    Engine,
    PagedKVCache,
    RequestRefused,
    VirtualClock,
)

BASE = (5, 9, 11, 4, 20, 33, 2, 8, 50, 13, 13, 41, 7, 7, 30)
# Prefixes of one text, another text, and one with the first's pages behind another beginning.
PROMPTS = [BASE[:n] for n in (1, 4, 5, 8, 9, 15)] + [(60, 3), (17, 17, 17, 17, *BASE[4:9])]
COUNTS = (1, 6, 12, 17)
SEEDS = (1, 2)
WRONG = [[], [VOCAB], [-1], "text", list(BASE) * 20]


class Serving(RuleBasedStateMachine):
    """Submit, fork, cancel, step, in any order; whatever happens, answers are right.

    Attributes:
        seen: what has happened in all runs of the class.
    """

    seen: Counter[str] = Counter()

    def make_cache(self):
        return paged(tokens=32, page_size=4)  # two of the requests fill it

    def __init__(self):
        super().__init__()
        self.engine = Engine(
            model(), self.make_cache(), attention="naive", token_budget=6, max_running=4,
            headroom=0, clock=VirtualClock(),
        )  # fmt: skip
        self.asked = []  # (request, tokens given at its beginning, from which on seed counts)

    @initialize()
    def begin_with_two(self):
        for prompt in (BASE[:9], BASE[:5]):
            self.asked.append((self.engine.submit(prompt, max_new_tokens=17), ()))
        self.engine.step()

    @rule(
        prompt=st.sampled_from(PROMPTS), count=st.sampled_from(COUNTS),
        seed=st.sampled_from([None, *SEEDS]),
    )  # fmt: skip
    def submit(self, prompt, count, seed):
        hot = {} if seed is None else {"temperature": 1.0, "seed": seed}
        self.asked.append((self.engine.submit(prompt, max_new_tokens=count, **hot), ()))

    @rule(prompt=st.sampled_from(WRONG))
    def submit_nonsense(self, prompt):
        waiting = list(self.engine.scheduler.waiting)
        with pytest.raises(RequestRefused):
            self.engine.submit(prompt, max_new_tokens=2)
        assert list(self.engine.scheduler.waiting) == waiting

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.engine.step()

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(data=st.data(), seed=st.sampled_from(SEEDS))
    def fork(self, data, seed):
        request = data.draw(st.sampled_from(self.engine.scheduler.running))
        begun = tuple(request.output)
        try:
            self.asked.append((self.engine.fork(request, seed=seed), begun))
        except (RequestRefused, CacheFull):
            assert tuple(request.output) == begun

    @precondition(lambda self: self.engine.busy)
    @rule(data=st.data())
    def cancel(self, data):
        there = [*self.engine.scheduler.running, *self.engine.scheduler.waiting]
        self.engine.cancel(data.draw(st.sampled_from(there)))

    @invariant()
    def every_place_in_the_cache_is_somebodys(self):
        cache, running = self.engine.cache, self.engine.scheduler.running
        holders = {s for region in cache.regions() for s in region.sequences}
        with_tokens = {r.sequence for r in running if cache.length(r.sequence)}
        assert with_tokens <= holders <= {r.sequence for r in running}
        for request in running:
            assert cache.length(request.sequence) == request.computed
        usage = cache.usage()
        assert 0 <= usage.used <= usage.reserved <= usage.capacity
        poisoned(cache)

    @invariant()
    def answers_so_far_are_right(self):
        for request, begun in self.asked:
            rest = request.output[len(begun) :]
            given = (*request.prompt, *begun)
            count = request.max_new_tokens - len(begun)
            heat = (request.temperature, request.seed if request.temperature else 0, len(begun))
            assert rest == alone(given, count, *heat)[: len(rest)] if count else not rest

    def teardown(self):
        self.engine.run()
        self.answers_so_far_are_right()
        for request, _ in self.asked:
            assert request.state == "cancelled" or len(request.output) == request.max_new_tokens
        cache = self.engine.cache
        assert cache.usage().reserved == 0
        self.seen["preemptions"] += self.engine.scheduler.preemptions
        self.seen["prefixes found"] += sum(request.found > 0 for request, _ in self.asked)
        self.seen["forks"] += sum(len(begun) > 0 for _, begun in self.asked)
        if isinstance(cache, PagedKVCache):
            self.seen["evictions"] += cache.allocator.evictions


class ServingInRows(Serving):
    seen: Counter[str] = Counter()

    def make_cache(self):
        return contiguous(tokens=96, longest=32)


def drive(machine, examples, steps, phases=tuple(Phase)):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True,
            database=None, phases=phases, report_multiple_bugs=False, print_blob=False,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("machine", [Serving, ServingInRows])
def test_random_use(machine):
    drive(machine, *((150, 50) if THOROUGH else (15, 25)))
    happened = {name for name, count in machine.seen.items() if count}
    in_pages = {"preemptions", "prefixes found", "evictions"}
    assert happened == ({"forks"} | in_pages if machine is Serving else {"forks"})


class NoCopies(PagedKVCache):
    def extend(self, sequence, count):
        self.allocator.append(sequence, count)


class WrongSlots(PagedKVCache):
    def slots(self, sequence, start, stop):
        return super().slots(sequence, start, stop)[::-1].copy()


class FreesEarly(PagedKVCache):
    def publish(self, sequence, tokens):
        super().publish(sequence, tokens)
        if self.length(sequence) > 12:
            self.allocator._release(self.allocator._of(sequence).pages[0])
            self.allocator._references[self.allocator._of(sequence).pages[0]] += 1


@pytest.mark.parametrize("broken", [NoCopies, WrongSlots, FreesEarly])
def test_random_use_finds_a_broken_cache(broken):
    def make_cache(self):
        return paged(tokens=32, page_size=4, kind=broken)

    with pytest.raises((AssertionError, FloatingPointError, KeyError, ValueError, IndexError)):
        drive(type("Broken", (Serving,), {"make_cache": make_cache}), 60, 25, [Phase.generate])

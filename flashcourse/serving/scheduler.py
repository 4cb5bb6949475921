"""Who runs in the next step: waiting and running requests, a token budget, preemption."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from flashcourse.serving.kv_cache import CacheFull, KVCache
from flashcourse.serving.request import RUNNING, WAITING, Request


@dataclass(frozen=True)
class Work:
    """Tokens ``start`` to ``start + count`` of a request go through the model in this step."""

    request: Request
    sequence: int
    start: int
    count: int


class Scheduler:
    """Continuous batching: at every step, whoever has a place in the cache gets on.

    Requests that decode come first, one token each; what is left of the budget goes to prompts,
    in chunks (Agrawal et al., 2024, "Sarathi-Serve"). If the cache is full, the request that began
    last loses its place, and is computed again later (Kwon et al., 2023, section 4.5).

    Args:
        cache: the places.
        token_budget: tokens a step.
        max_running: requests at once, at most the budget.
        headroom: share of the cache that must stay free after a request is admitted beside
            others, so that it is not preempted at once. Only what can be dealt out later counts.

    Raises:
        ValueError: a number makes no sense.
    """

    def __init__(
        self, cache: KVCache, token_budget: int, max_running: int, headroom: float
    ) -> None:
        if not 1 <= max_running <= token_budget:
            raise ValueError(
                f"max_running must be 1 to token_budget, so that every running request gets a "
                f"token in a step; got {max_running} and a budget of {token_budget}"
            )
        if not 0 <= headroom < 1:
            raise ValueError(f"headroom is a share of the cache, 0 to below 1, got {headroom}")
        self.cache, self.token_budget, self.max_running = cache, token_budget, max_running
        self.headroom = headroom
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order in which they began
        self.preemptions = 0

    def plan(self) -> list[Work]:
        """The work of the next step; its slots are the sequences' from now on."""
        work: dict[Request, Work] = {}
        budget = self.token_budget
        preemptions = self.preemptions
        # A list of its own: preemption takes from the end of self.running.
        for request in sorted(self.running, key=lambda r: r.pending > 1):  # stable
            if budget == 0:
                break
            if request.state != RUNNING:
                continue  # preempted for one before it
            if self._grow(request, min(request.pending, budget), work):
                budget -= work[request].count
        if self.preemptions == preemptions:
            self._admit(budget, work)
        return list(work.values())

    def _grow(self, request: Request, count: int, work: dict[Request, Work]) -> bool:
        """Slots for a running request, at the cost of the newest ones; False: at its own."""
        assert request.sequence is not None
        while True:
            try:
                self.cache.extend(request.sequence, count)
            except CacheFull:
                newest = self.running[-1]
                work.pop(newest, None)
                self.preempt(newest)
                if newest is request:
                    return False
            else:
                work[request] = Work(request, request.sequence, request.computed, count)
                return True

    def _admit(self, budget: int, work: dict[Request, Work]) -> None:
        while self.waiting and budget and len(self.running) < self.max_running:
            request = self.waiting[0]
            try:
                sequence = self.cache.begin(request.tokens)
            except CacheFull:
                return
            found = self.cache.length(sequence)
            count = min(len(request.tokens) - found, budget)
            try:
                if self.running:
                    self._check_headroom(len(request.tokens) - found)
                self.cache.extend(sequence, count)
            except CacheFull:
                self.cache.free(sequence)
                return
            self.waiting.popleft()
            request.sequence, request.computed, request.found = sequence, found, found
            request.state = RUNNING
            self.running.append(request)
            work[request] = Work(request, sequence, found, count)
            budget -= count

    def _check_headroom(self, tokens: int) -> None:
        """Room for the whole prompt, not only for its first chunk, and some more."""
        if not self.cache.grows:
            return  # its place is its own from the beginning
        usage = self.cache.usage()
        unfilled = 0
        for r in self.running:
            assert r.sequence is not None
            unfilled += len(r.tokens) - self.cache.length(r.sequence)
        free = usage.capacity - usage.reserved - unfilled
        if free - tokens < self.headroom * usage.capacity:
            raise CacheFull("too little would stay free")

    def preempt(self, request: Request) -> None:
        """Take a running request's place; it waits before all others and loses no token."""
        self._leave(request)
        request.state = WAITING
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def remove(self, request: Request) -> None:
        """Forget a request that has ended, wherever it is."""
        if request.sequence is not None:
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _leave(self, request: Request) -> None:
        assert request.sequence is not None
        self.cache.free(request.sequence)
        self.running.remove(request)
        request.sequence, request.computed = None, 0

"""The engine: requests in, tokens out, one step of the model at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flashcourse.serving.clock import Clock, WallClock
from flashcourse.serving.kv_cache import KVCache, KVShape, Usage
from flashcourse.serving.model_step import ServedModel
from flashcourse.serving.request import CANCELLED, RUNNING, Request, RequestRefused
from flashcourse.serving.sampling import sample, uniform
from flashcourse.serving.scheduler import Scheduler


@dataclass(frozen=True)
class StepRecord:
    """What one step did.

    Attributes:
        begun, time: when it began and ended.
        tokens: that went through the model.
        new_tokens: that were generated.
        running, waiting: requests during and after it.
        preemptions: places taken in it.
        usage: of the cache while it ran.
    """

    begun: float
    time: float
    tokens: int
    new_tokens: int
    running: int
    waiting: int
    preemptions: int
    usage: Usage


class Engine:
    """Serves a Llama of Transformers with continuous batching (Yu et al., 2022, "Orca").

    Args:
        model: on the cache's device. It is not changed; the engine shares its weights.
        cache: :class:`PagedKVCache` or :class:`ContiguousKVCache`, made for this model.
        token_budget: tokens a step: one for each request that decodes, the rest for prompts.
        max_running: requests at once; None: 256 or the budget, whichever is less.
        headroom: share of the cache left free when a request is admitted beside others.
        attention: "flashcourse", the course's kernels, or "naive", their slow twins.
        clock: what time is; default the wall clock.

    Attributes:
        steps: a :class:`StepRecord` of each step.

    Raises:
        ValueError: the cache was made for another model, or an argument is not allowed.
    """

    def __init__(
        self,
        model: Any,
        cache: KVCache,
        *,
        token_budget: int = 512,
        max_running: int | None = None,
        headroom: float = 0.01,
        attention: str = "flashcourse",
        clock: Clock | None = None,
    ) -> None:
        wanted = KVShape.of(model)
        if cache.shape != wanted:
            raise ValueError(f"the cache was made for {cache.shape}, the model needs {wanted}")
        if cache.device.type != model.device.type:
            raise ValueError(
                f"the cache is on {cache.device}, the model on {model.device}: make the cache "
                "with device=model.device"
            )
        if max_running is None:
            max_running = min(256, token_budget)
        self.cache, self.clock = cache, clock or WallClock()
        self.scheduler = Scheduler(cache, token_budget, max_running, headroom)
        self.steps: list[StepRecord] = []
        self._model = ServedModel(model, attention)
        self._vocab = int(model.config.vocab_size)
        self._longest = min(cache.longest, int(model.config.max_position_embeddings))
        self._submitted = 0

    @property
    def busy(self) -> bool:
        """True while a request waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        stop_tokens: Iterable[int] = (),
        arrival: float | None = None,
    ) -> Request:
        """Take a request. It waits until a step has a place for it.

        Args:
            prompt: token ids, at least one.
            max_new_tokens: at least 1. Nothing else is derived from it: how long an answer will
                be is not known before.
            temperature: 0 is greedy.
            seed: of the sampling.
            stop_tokens: the answer ends after one of these.
            arrival: when it came, if that was before now.

        Raises:
            RequestRefused: it makes no sense or can never fit; others are not touched.
        """
        prompt = self._checked_prompt(prompt)
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise RequestRefused(f"max_new_tokens must be 1 or more, got {max_new_tokens!r}")
        if not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
            raise RequestRefused(f"temperature must be a number of 0 or more, got {temperature!r}")
        if type(seed) is not int:
            raise RequestRefused(f"seed must be an integer, got {seed!r}")
        stop = frozenset(stop_tokens)
        if not all(type(token) is int for token in stop):
            raise RequestRefused(f"stop_tokens must be token ids, got {list(stop)}")
        now = self.clock.now() if arrival is None else arrival
        request = Request(
            self._submitted, prompt, max_new_tokens, float(temperature), seed, stop, now
        )
        if request.longest > self._longest:
            raise RequestRefused(
                f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones need "
                f"{request.longest} slots of the cache; one request may have {self._longest}. "
                "Shorten the prompt or lower max_new_tokens."
            )
        self._submitted += 1
        self.scheduler.waiting.append(request)
        return request

    def fork(self, request: Request, *, seed: int | None = None) -> Request:
        """A second continuation of a running request, from here on.

        Args:
            seed: of its sampling; None: the same, and so the same tokens.

        Raises:
            RequestRefused: the request is not running, or as many run as may.
            CacheFull: a contiguous cache has no row for the copy. Nothing has changed.
        """
        if request.state != RUNNING or request.sequence is None:
            raise RequestRefused(f"only a running request can be forked; this one is "
                                 f"{request.state}")  # fmt: skip
        if len(self.scheduler.running) >= self.scheduler.max_running:
            raise RequestRefused(f"{self.scheduler.max_running} requests run, which is the limit")
        sequence = self.cache.fork(request.sequence)
        copy = Request(
            self._submitted, list(request.prompt), request.max_new_tokens, request.temperature,
            request.seed if seed is None else seed, request.stop_tokens, self.clock.now(),
            list(request.output), RUNNING, computed=request.computed, started=self.clock.now(),
        )  # fmt: skip
        copy.token_times = list(request.token_times)
        copy.sequence = sequence
        self._submitted += 1
        self.scheduler.running.append(copy)
        return copy

    def cancel(self, request: Request) -> None:
        """End a request early; what it held is free. One that is done stays as it is."""
        if not request.done:
            self.scheduler.remove(request)
            request.end(CANCELLED, "cancelled", self.clock.now())

    def step(self) -> StepRecord | None:
        """Run one step; None if there is nothing to do.

        If the model fails, its requests wait again with all their tokens, and the error is raised.
        """
        begun, preempted = self.clock.now(), self.scheduler.preemptions
        work = self.scheduler.plan()
        if not work:
            return None
        usage, running = self.cache.usage(), len(self.scheduler.running)
        ready = [w for w in work if w.start + w.count == len(w.request.tokens)]
        try:
            logits = self._model.logits(self.cache, work, ready)
            tokens = sample(
                logits,
                [w.request.temperature for w in ready],
                [uniform(w.request.seed, len(w.request.output)) if w.request.temperature else 0.0
                 for w in ready],
            ) if ready else []  # fmt: skip
        except BaseException:
            at_work = {w.request for w in work}
            for request in reversed(self.scheduler.running[:]):  # so that they wait in order
                if request in at_work:
                    self.scheduler.preempt(request)
            raise
        self.clock.worked(sum(w.count for w in work))
        now = self.clock.now()
        for w in work:
            w.request.computed += w.count
            if w.request.started is None:
                w.request.started = begun
            self.cache.publish(w.sequence, w.request.tokens)
        for w, token in zip(ready, tokens, strict=True):
            w.request.add(token, now)
            if w.request.done:
                self.scheduler.remove(w.request)
        record = StepRecord(
            begun, now, sum(w.count for w in work), len(tokens), running,
            len(self.scheduler.waiting), self.scheduler.preemptions - preempted, usage,
        )  # fmt: skip
        self.steps.append(record)
        return record

    def run(self) -> None:
        """Step until nothing waits or runs."""
        while self.busy:
            self.step()

    def _checked_prompt(self, prompt: Sequence[int]) -> list[int]:
        if isinstance(prompt, str) or not isinstance(prompt, Sequence):
            raise RequestRefused(
                f"prompt must be a list of token ids, got {type(prompt).__name__}: use the "
                "tokenizer, and .tolist() for a tensor"
            )
        if not prompt:
            raise RequestRefused("prompt is empty: there is nothing to continue")
        for place, token in enumerate(prompt):
            if type(token) is not int or not 0 <= token < self._vocab:
                raise RequestRefused(
                    f"prompt[{place}] is {token!r}; token ids are integers from 0 to "
                    f"{self._vocab - 1}"
                )
        return list(prompt)

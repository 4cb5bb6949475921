"""One request: what was asked, what came of it so far, and when."""

from __future__ import annotations

from dataclasses import dataclass, field

WAITING, RUNNING, FINISHED, CANCELLED = "waiting", "running", "finished", "cancelled"


class RequestRefused(ValueError):
    """A request that the engine cannot serve; the message says why and what would be allowed."""


@dataclass(eq=False)
class Request:
    """A prompt and its continuation.

    Attributes:
        number: of the request in its engine, in order of submission.
        prompt: token ids.
        max_new_tokens: how many to generate at most.
        temperature: 0 is greedy.
        seed: of the sampling; the same seed gives the same tokens, whatever runs beside it.
        stop_tokens: generation ends after one of these.
        arrival: when it was submitted, in seconds of the engine's clock.
        output: token ids so far.
        state: "waiting", "running", "finished" or "cancelled".
        finish_reason: "length", "stop", "cancelled", or "" while it lasts.
        computed: tokens whose keys and values are in the cache.
        found: tokens that were found in the cache when it last began to run.
        preemptions: how often it lost its place in the cache.
        started, token_times, ended: when it first ran, when each token came, when it ended.
    """

    number: int
    prompt: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()
    arrival: float = 0.0
    output: list[int] = field(default_factory=list)
    state: str = WAITING
    finish_reason: str = ""
    computed: int = 0
    found: int = 0
    preemptions: int = 0
    started: float | None = None
    token_times: list[float] = field(default_factory=list)
    ended: float | None = None
    sequence: int | None = None  # in the cache, while it runs
    tokens: list[int] = field(init=False)  # prompt and output

    def __post_init__(self) -> None:
        self.tokens = [*self.prompt, *self.output]

    @property
    def longest(self) -> int:
        """The most slots it can need: the last token is never read again."""
        return len(self.prompt) + self.max_new_tokens - 1

    @property
    def pending(self) -> int:
        """Tokens that are known and have not been through the model."""
        return len(self.tokens) - self.computed

    @property
    def done(self) -> bool:
        """True if nothing more will come."""
        return self.state in (FINISHED, CANCELLED)

    def add(self, token: int, now: float) -> None:
        """Take the next token; the request may be finished with it."""
        self.output.append(token)
        self.tokens.append(token)
        self.token_times.append(now)
        if token in self.stop_tokens:
            self.end(FINISHED, "stop", now)
        elif len(self.output) >= self.max_new_tokens:
            self.end(FINISHED, "length", now)

    def end(self, state: str, reason: str, now: float) -> None:
        """Nothing more will come."""
        self.state, self.finish_reason, self.ended = state, reason, now

"""A load for the engine: when requests come, and how long they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flashcourse.serving.engine import Engine
from flashcourse.serving.request import Request


@dataclass(frozen=True)
class Arrival:
    """One request of a load.

    Attributes:
        time: when it comes, seconds from the start.
        prompt: token ids.
        new_tokens: how long the answer turns out to be. The engine stops there, as at a stop
            token; it plans nothing by it.
        temperature, seed: of its sampling.
    """

    time: float
    prompt: tuple[int, ...]
    new_tokens: int
    temperature: float = 0.0
    seed: int = 0


def poisson_times(count: int, rate: float, seed: int = 0) -> list[float]:
    """Arrival times of independent users: the gaps are exponential.

    Args:
        rate: requests a second; ``math.inf`` brings all at once.

    Raises:
        ValueError: the rate is not positive.
    """
    if not rate > 0:
        raise ValueError(f"rate must be positive, got {rate}")
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return np.cumsum(gaps).tolist()


def lognormal_lengths(
    count: int, mean: float, *, spread: float = 1.0, longest: int, seed: int = 0
) -> list[int]:
    """Lengths as people's texts have them: many short, few very long.

    Args:
        mean: before the longest are cut.
        spread: standard deviation over mean.
        longest: longer ones are cut to this; the shortest is 1.
    """
    variance = math.log(1 + spread**2)
    drawn = np.random.default_rng(seed).lognormal(
        math.log(mean) - variance / 2, math.sqrt(variance), count
    )
    return np.clip(drawn.round(), 1, longest).astype(int).tolist()


def make_load(
    lengths: Sequence[tuple[int, int]],
    vocab: int,
    *,
    rate: float = math.inf,
    prefix: Sequence[int] = (),
    text: Sequence[int] | None = None,
    seed: int = 0,
) -> list[Arrival]:
    """Requests of given lengths: a trace, or lengths drawn with :func:`lognormal_lengths`.

    Args:
        lengths: (tokens of the prompt, tokens of the answer) a request.
        vocab: token ids are drawn below it, from 3 on (0 to 2 mean padding, begin, end).
        rate: requests a second.
        prefix: tokens every prompt begins with, within its length.
        text: cut the prompts out of these tokens instead of drawing them.
        seed: of times and tokens.
    """
    generator = np.random.default_rng(seed)
    times = poisson_times(len(lengths), rate, seed)
    load: list[Arrival] = []
    for time, (prompt, new) in zip(times, lengths, strict=True):
        rest = max(0, prompt - len(prefix))
        if text is None:
            tokens = generator.integers(3, vocab, rest).tolist()
        else:
            start = int(generator.integers(max(1, len(text) - rest)))
            tokens = list(text[start : start + rest])
        load.append(Arrival(time, (*prefix[:prompt], *tokens), new, seed=len(load)))
    return load


def serve(
    engine: Engine, load: Sequence[Arrival], watch: Callable[[Engine], None] | None = None
) -> list[Request]:
    """Submit each request when its time has come, and step until all are served.

    Args:
        engine: with an empty queue; its clock tells the time, the load begins now.
        load: in order of time.
        watch: called after every step.

    Returns:
        The requests, in the order of the load.
    """
    begin = engine.clock.now()
    requests: list[Request] = []
    while len(requests) < len(load) or engine.busy:
        now = engine.clock.now()
        # The sum that wait_until gets below: a difference could round to just before it, for ever.
        while len(requests) < len(load) and begin + load[len(requests)].time <= now:
            come = load[len(requests)]
            requests.append(
                engine.submit(
                    come.prompt, max_new_tokens=come.new_tokens, temperature=come.temperature,
                    seed=come.seed, arrival=begin + come.time,
                )
            )  # fmt: skip
        if engine.busy:
            engine.step()
            if watch is not None:
                watch(engine)
        else:
            engine.clock.wait_until(begin + load[len(requests)].time)
    return requests

"""What a service's users and its owner see: latencies, throughput, the use of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from flashcourse.serving.engine import StepRecord
from flashcourse.serving.request import FINISHED, Request

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Report:
    """Numbers of one run. Times in seconds; means over time are weighed by the steps' time.

    Attributes:
        requests, new_tokens: that were served.
        seconds: from the first arrival to the last token.
        tokens_per_second, requests_per_second: throughput.
        first_token: percentiles of the time from a request's arrival to its first token.
        per_token: percentiles of each request's mean time between tokens after the first.
        whole: percentiles of the time from arrival to the last token.
        mean_running, max_running: requests at once.
        mean_waiting, max_waiting: length of the queue.
        mean_reserved: share of the cache that was reserved.
        waste: share of the reserved slots that held nothing, over the run.
        preemptions: places taken.
        computed: tokens that went through the model, those computed again too.
        steps: of the engine.
    """

    requests: int
    new_tokens: int
    seconds: float
    tokens_per_second: float
    requests_per_second: float
    first_token: dict[str, float]
    per_token: dict[str, float]
    whole: dict[str, float]
    mean_running: float
    max_running: int
    mean_waiting: float
    max_waiting: int
    mean_reserved: float
    waste: float
    preemptions: int
    computed: int
    steps: int

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for a record."""
        return asdict(self)

    def __str__(self) -> str:
        first, each = self.first_token, self.per_token
        return (
            f"{self.requests} requests, {self.new_tokens:,} new tokens in {self.seconds:.2f} s: "
            f"{self.tokens_per_second:,.0f} tokens/s\n"
            f"  first token: median {first['p50'] * 1e3:,.0f} ms, p99 {first['p99'] * 1e3:,.0f} ms;"
            f" each further: median {each['p50'] * 1e3:.1f} ms, p99 {each['p99'] * 1e3:.1f} ms\n"
            f"  running: mean {self.mean_running:.1f}, most {self.max_running}; waiting: mean "
            f"{self.mean_waiting:.1f}, most {self.max_waiting}\n"
            f"  cache: {self.mean_reserved:.0%} reserved, {self.waste:.1%} of that holds nothing; "
            f"{self.preemptions} preemptions"
        )


def report(requests: Sequence[Request], steps: Sequence[StepRecord]) -> Report:
    """Sum up a run.

    Args:
        requests: those of the run; only finished ones count.
        steps: the engine's, of the run.

    Raises:
        ValueError: nothing was served.
    """
    served = [r for r in requests if r.state == FINISHED]
    if not served or not steps:
        raise ValueError("no request was finished: there is nothing to report")
    ends = [r.token_times[-1] for r in served]
    seconds = max(ends) - min(r.arrival for r in served)
    weight = np.array([step.time - step.begun for step in steps])
    if not weight.sum():
        weight = np.ones(len(steps))
    reserved = np.array([step.usage.reserved for step in steps]) @ weight
    used = np.array([step.usage.used for step in steps]) @ weight
    new_tokens = sum(len(r.output) for r in served)
    gaps = [
        (r.token_times[-1] - r.token_times[0]) / (len(r.token_times) - 1)
        for r in served
        if len(r.token_times) > 1
    ]
    running, waiting = ([getattr(step, name) for step in steps] for name in ("running", "waiting"))
    return Report(
        requests=len(served),
        new_tokens=new_tokens,
        seconds=seconds,
        tokens_per_second=new_tokens / seconds,
        requests_per_second=len(served) / seconds,
        first_token=_percentiles([r.token_times[0] - r.arrival for r in served]),
        per_token=_percentiles(gaps or [0.0]),
        whole=_percentiles([end - r.arrival for end, r in zip(ends, served, strict=True)]),
        mean_running=float(np.average(running, weights=weight)),
        max_running=max(running),
        mean_waiting=float(np.average(waiting, weights=weight)),
        max_waiting=max(waiting),
        mean_reserved=float(reserved / weight.sum() / steps[0].usage.capacity),
        waste=float(1 - used / reserved),
        preemptions=sum(step.preemptions for step in steps),
        computed=sum(step.tokens for step in steps),
        steps=len(steps),
    )


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}

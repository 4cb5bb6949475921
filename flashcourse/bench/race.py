"""One shape: check every candidate, then time those that are right, in turns."""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from flashcourse.bench.candidates import Candidate, LeftOut, Run
from flashcourse.bench.correctness import expect, wrong
from flashcourse.bench.grids import Direction, Shape
from flashcourse.measure.timing import Timing, time_ms

Status = Literal["timed", "left out", "out of memory", "wrong", "failed"]
BUDGET_MS = 25.0  # a candidate, direction and round: at least one run, at most MOST_REPEATS
MOST_REPEATS = 10
LEAD = 6  # so often the L2 cache is overwritten before a run: time for Python to queue it


@dataclass
class Outcome:
    """What became of one candidate on one shape.

    Attributes:
        status: ``timed``, ``left out`` (with its reason; a refusal of a backend is one),
            ``out of memory``, ``wrong`` (then it was not timed) or ``failed``.
        reason: in words, unless it was timed.
        times: for each direction, milliseconds on the GPU.
        host: for each direction, the microseconds after which the call returned, its work queued;
            empty on a CPU, and for decoding, which is replayed.
    """

    candidate: str
    status: Status
    reason: str = ""
    times: dict[Direction, Timing] = field(default_factory=dict)
    host: dict[Direction, float] = field(default_factory=dict)


def race(shape: Shape, candidates: list[Candidate], device: str = "cuda",
         rounds: int = 3) -> list[Outcome]:  # fmt: skip
    """Check and time the candidates on one shape. No candidate can end the run.

    Args:
        rounds: how often the candidates take turns, in orders in which none follows the same one
            twice: what a large one leaves behind in clocks and memory is not one rival's alone.
    """
    outcomes = {c.name: Outcome(c.name, "timed") for c in candidates}
    try:
        q, k, v, d_out = shape.inputs(device)
        expected = expect(shape, (q, k, v, d_out))
    except torch.OutOfMemoryError:
        _free()
        reason = "the inputs or the reference did not fit, so nothing could be checked"
        return [Outcome(c.name, "out of memory", reason) for c in candidates]
    runs: dict[str, Run] = {}
    for candidate in candidates:
        outcome = outcomes[candidate.name]

        def check(candidate: Candidate = candidate) -> str | None:
            run = candidate.prepare(shape, q, k, v)
            runs[candidate.name] = run
            return wrong(shape, run, q, k, v, d_out, expected)

        problem = _guarded(outcome, check)
        if problem is not None:
            outcome.status, outcome.reason = "wrong", problem
    calls = {
        name: _calls(shape, run, q, k, v, d_out)
        for name, run in runs.items()
        if outcomes[name].status == "timed"
    }
    names = list(calls)
    taken = {name: Taken(shape) for name in names}
    for turn in range(rounds):
        for name in _order(names, turn):
            if outcomes[name].status == "timed":
                turn_of = functools.partial(
                    _one_turn, calls[name], taken[name], device, warmup=turn == 0
                )
                _guarded(outcomes[name], turn_of)
    for name in names:
        if outcomes[name].status == "timed":
            outcomes[name].times = {way: Timing(ms) for way, ms in taken[name].ms.items()}
            outcomes[name].host = {
                way: statistics.median(us) for way, us in taken[name].host_us.items() if us
            }
    return list(outcomes.values())


def _order(names: list[str], turn: int) -> list[str]:
    """The order of a round: a row of a balanced Latin square (Williams, 1949).

    In as many rounds as there are names, each begins once, and each follows every other one once
    (with an odd number of names, one pause takes part).
    """
    size = len(names) + len(names) % 2
    zigzag = [(i + 1) // 2 if i % 2 else (size - i // 2) % size for i in range(size)]
    places = [(place + turn) % size for place in zigzag]
    return [names[place] for place in places if place < len(names)]


def _guarded(outcome: Outcome, work: Callable[[], str | None]) -> str | None:
    """Do it, and turn whatever goes wrong into a status with a reason."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a backend has to say is in the reason
            return work()
    except LeftOut as reason:
        outcome.status, outcome.reason = "left out", str(reason)
    except torch.OutOfMemoryError as error:
        outcome.status, outcome.reason = "out of memory", _wanted(str(error))
    except Exception as error:  # the others must still be measured
        first = (str(error).splitlines() or [""])[0]
        outcome.status, outcome.reason = "failed", f"{type(error).__name__}: {first}"[:200]
    _free()
    return None


def _free() -> None:
    gc.collect()
    with contextlib.suppress(RuntimeError):  # after an illegal access every call raises it again
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _wanted(message: str) -> str:
    """The one sentence of PyTorch's message that says how much was wanted."""
    for sentence in message.split(". "):
        if "Tried to allocate" in sentence:
            return sentence.split("out of memory. ")[-1].strip() + "."
    return "the allocator had no more"


Calls = dict[Direction, Callable[[], object]]


def _calls(shape: Shape, run: Run, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
           d_out: torch.Tensor) -> Callable[[], Calls]:  # fmt: skip
    """Makes the call of each direction; the graph that a backward needs lives for one turn."""

    def make() -> Calls:
        leaves = [t.detach().requires_grad_("backward" in shape.directions) for t in (q, k, v)]

        def forward() -> object:
            with torch.no_grad():
                return run(*leaves)

        if shape.seq_q == 1 and q.is_cuda:
            return {"forward": _graphed(forward)}
        calls: Calls = {"forward": forward}
        if "backward" in shape.directions:
            out = run(*leaves)
            calls["backward"] = lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True)
        if "both" in shape.directions:
            calls["both"] = lambda: torch.autograd.grad(run(*leaves), leaves, d_out)
        return {direction: calls[direction] for direction in shape.directions}

    return make


def _graphed(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph, as servers launch decoding: a step is shorter than the time Python
    needs for it, which would be all that is measured. The same for every candidate."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    before = torch.cuda.current_stream()
    before.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    finally:  # a capture that fails leaves its own stream behind, for all that come after
        torch.cuda.set_stream(before)
    return graph.replay


class Taken:
    """The runs of one candidate so far, by direction."""

    def __init__(self, shape: Shape) -> None:
        self.ms: dict[Direction, list[float]] = {way: [] for way in shape.directions}
        self.host_us: dict[Direction, list[float]] = {way: [] for way in shape.directions}
        self.on_host = shape.seq_q > 1


def _one_turn(make: Callable[[], Calls], taken: Taken, device: str, warmup: bool) -> None:
    for direction, call in make().items():
        # The L2 cache is cleared before each run, and that takes long enough to hide the time
        # Python needs for a launch, which would be all one sees of short inputs. In training it
        # is hidden as well: the GPU is behind. It is measured apart.
        cold = int(warmup and direction != "both")  # both are warm by then
        once = time_ms(call, warmup=cold, repeats=1, clear_l2=True, lead=LEAD, device=device)
        repeats = max(0, min(MOST_REPEATS, int(BUDGET_MS / max(once, 1e-6))) - 1)
        taken.ms[direction] += once.times
        if repeats:
            more = time_ms(call, warmup=0, repeats=repeats, clear_l2=True, lead=LEAD, device=device)
            taken.ms[direction] += more.times
        if torch.device(device).type == "cuda" and taken.on_host:
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            taken.host_us[direction].append((time.perf_counter() - start) * 1e6)
            torch.cuda.synchronize()

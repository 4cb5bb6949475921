"""Timing an answer from outside its process, against an opponent in another.

Whoever wants to win without being fast has these ways, and none leads anywhere:

- *other clocks, events or a synchronize that returns at once*: the only clock that counts is in
  this process. It stops when the digests have arrived, and they cannot be had before the work is
  done.
- *a slower opponent*: it runs in a process that never loads a learner's code.
- *a slow start, to look fast in a difference of two measurements*: the cost of asking and
  answering is measured with the opponent's process alone.
- *answers that were kept, or made ahead*: every run has inputs that were unknown until the clock
  ran.
- *runs left out, or left for later*: the digests of runs that nobody could foresee are judged, and
  the whole output of one of them.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any, Protocol

import torch

from flashcourse.grading.gate import Gate
from flashcourse.grading.question import Case, Check, Observation, Question, Race

SECRET = random.SystemRandom()  # no verdict's seed: an answer could find that one by trying
WARM_UP = 8  # runs of a first lap, whose time does not count


class Runner(Protocol):
    """A process that takes part; :class:`flashcourse.grading.process.Workshop` is one."""

    def line_up(self, question: Question, check: Check, case: Case) -> None: ...

    def lap(self, changes: torch.Tensor) -> tuple[float, Any, str]: ...

    def show(self, run: int) -> Any: ...


@dataclasses.dataclass
class _Lap:
    """One measurement of the answer: what it ran on, and what has to be judged of it."""

    changes: torch.Tensor
    digests: Any
    shown: int = -1
    output: Any = None


class _Failed(Exception):
    """A lap in which the answer raised."""


def run_race(
    question: Question,
    check: Check,
    case: Case,
    seen: Observation,
    answer: Runner,
    opponent: Runner,
    gate: Gate,
) -> Observation:
    """Time the answer and its opponent by turns.

    Args:
        seen: what the answer did on the case when it was watched; its kernels are compiled.
        gate: everything else on the same GPU waits while the clock runs.

    Returns:
        ``seen`` with another output: the answer's ``output``; ``ms`` and ``plain_ms``, one run of
        the answer and of the opponent; ``wrong``, None or what was wrong with a timed run.
    """
    race = check.race
    assert race is not None
    with gate.shared():
        for runner in (answer, opponent):
            runner.line_up(question, check, case)
    generator = torch.Generator().manual_seed(SECRET.getrandbits(63))
    try:
        with gate.alone():
            laps, seconds = _laps(race, case, answer, opponent, generator)
    except _Failed as failure:
        return dataclasses.replace(seen, output=None, error=str(failure))
    with gate.shared():
        wrong = _judge(race, case, laps)
    output = {"output": seen.output, "wrong": wrong}
    return dataclasses.replace(seen, output=output | seconds)


def _laps(
    race: Race, case: Case, answer: Runner, opponent: Runner, generator: torch.Generator
) -> tuple[list[_Lap], dict[str, float]]:
    """The answer's laps, and what one run took on either side, in milliseconds."""
    laps: list[_Lap] = []

    def changes(runs: int) -> torch.Tensor:
        return race.changes(generator, case, runs)

    def of_answer(runs: int) -> float:
        lap = _Lap(changes(runs), None)
        seconds, lap.digests, error = answer.lap(lap.changes)
        if error:
            raise _Failed(error)
        laps.append(lap)
        return seconds

    def of_opponent(runs: int) -> float:
        seconds, _, error = opponent.lap(changes(runs))
        if error:
            raise RuntimeError(f"the opponent raised {error}")
        return seconds

    first = of_answer(WARM_UP), of_opponent(WARM_UP)
    idle = min(of_opponent(0) for _ in range(3))
    if first[0] - idle > race.hopeless * first[1]:
        mine, theirs, runs = [first[0]], [first[1]], WARM_UP
    else:
        mine, theirs, runs = [], [], race.runs
        for _ in range(race.rounds):
            mine.append(of_answer(runs))
            theirs.append(of_opponent(runs))
            idle = min(idle, of_opponent(0))
    # The last lap's outputs are still there. Which of them is looked at was no one's to know.
    laps[-1].shown = SECRET.randrange(runs)
    laps[-1].output = answer.show(laps[-1].shown)
    one = {
        name: 1e3 * max(min(times) - idle, 1e-9) / runs
        for name, times in (("ms", mine), ("plain_ms", theirs))
    }
    return laps, one


def _judge(race: Race, case: Case, laps: list[_Lap]) -> str | None:
    """None if the timed runs computed what they should, as far as they are looked at."""
    for lap in laps:
        if not isinstance(lap.digests, torch.Tensor) or len(lap.digests) != len(lap.changes):
            return "the timed runs gave no outputs like those of the first run"
        runs = len(lap.changes)
        looked_at = SECRET.sample(range(runs), min(race.judged, runs))
        for run in looked_at:
            message = race.judge_digest(race.vary(case.args, lap.changes[run]), lap.digests[run])
            if message:
                return f"in a timed run on inputs it had not seen before: {message}"
        if lap.shown >= 0:
            message = race.judge_output(race.vary(case.args, lap.changes[lap.shown]), lap.output)
            if message:
                return f"in a timed run on inputs it had not seen before: {message}"
    return None

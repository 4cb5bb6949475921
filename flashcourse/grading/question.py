"""What a graded question is made of: checks on fresh inputs, and the mistakes people make.

A check is split in three, so that the answer can run in another process than the one that knows
what is right: ``cases`` draws inputs, ``call`` runs the answer on one of them, and ``judge``
compares what came out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from flashcourse.grading.launches import Launch


@dataclass(frozen=True)
class Case:
    """One input, described in words.

    Attributes:
        description: what is special about it; names shapes and scales.
        args, kwargs: what the answer is called with. Tensors are copied for every call.
    """

    description: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Observation:
    """What an answer did on one case. It holds plain data only.

    Attributes:
        output: what it returned, tensors detached.
        error: ``"TypeName: message"`` if it raised; then output is None.
        changed_inputs: names or positions of tensors in the arguments that it wrote to.
        largest_shape, largest_numel: the largest tensor it allocated.
        live_numel: the most numbers it held at once, in tensors beside its inputs.
        operators: the PyTorch operators it called, without the ``aten.`` prefix.
        library_calls: the functions of ``flashcourse.attention`` it called.
        threads: True if it started a thread, where none of this can be seen.
        launches: the Triton kernels it launched, in order.
        seconds: how long the call took, by the clock of whoever judges. `grade` measures outside
            the answer's process, from the go until the whole output has arrived.
    """

    output: Any = None
    error: str = ""
    changed_inputs: tuple[str, ...] = ()
    largest_shape: tuple[int, ...] = ()
    largest_numel: int = 0
    live_numel: int = 0
    operators: frozenset[str] = frozenset()
    library_calls: frozenset[str] = frozenset()
    threads: bool = False
    launches: tuple[Launch, ...] = ()
    seconds: float = 0.0


Answer = Callable[..., Any]


def call_plainly(answer: Answer, *args: Any, **kwargs: Any) -> Any:
    """Call the answer with the case's arguments: what most checks do."""
    return answer(*args, **kwargs)


@dataclass(frozen=True)
class Race:
    """How `grade` times an answer against an opponent, in two processes that take turns.

    The answer's process holds no clock. It is told changes of the inputs that nobody could know
    before, runs the answer on every changed input, and sends a digest of every output. The grader
    times that from outside and judges some of the outputs, so that an answer that does no work,
    returns what it kept or leaves the work for later fails.

    Attributes:
        opponent: what the answer is timed against; it runs in a process of its own.
        changes: draws the changes of a number of runs, as a tensor ``(runs, ...)``; its seed is
            no verdict's, but a secret of the moment.
        vary: the case's arguments under one of these changes.
        digest: a small tensor that cannot be had without the whole output; it runs in the answer's
            process, and its time counts for both.
        judge_digest, judge_output: None if a digest or an output is right for these (changed)
            arguments, else what was expected and what came.
        runs: in one measurement.
        rounds: measurements of each of the two; the fastest counts.
        judged: how many digests of each measurement are judged.
        hopeless: an answer this many times slower than the opponent is measured but once.
    """

    opponent: Answer
    changes: Callable[[torch.Generator, Case, int], torch.Tensor]
    vary: Callable[[tuple[Any, ...], torch.Tensor], tuple[Any, ...]]
    digest: Callable[[Any], torch.Tensor]
    judge_digest: Callable[[tuple[Any, ...], Any], str | None]
    judge_output: Callable[[tuple[Any, ...], Any], str | None]
    runs: int = 40
    rounds: int = 5
    judged: int = 4
    hopeless: float = 3.0


@dataclass(frozen=True)
class Check:
    """One property of a right answer.

    Attributes:
        name: the property, as a statement that holds for a right answer.
        cases: draws the inputs from a seeded generator.
        judge: None if the observation is right, else what was expected and what came.
        call: runs the answer on the (copied) arguments of a case.
        needs: None, or a function that says why this machine cannot run the check (and returns an
            empty string where it can). The rest is checked all the same.
        work: True if it asks who did the work, and how, rather than what came out. A known mistake
            written in PyTorch explains the numbers of a kernel without passing such a check.
        race: None, or how `grade` measures the time that this check asks for. ``call`` measures it
            where the answer runs: that is for the learner's own check.
    """

    name: str
    cases: Callable[[torch.Generator], Iterable[Case]]
    judge: Callable[[Case, Observation], str | None]
    call: Callable[..., Any] = call_plainly
    needs: Callable[[], str] | None = None
    work: bool = False
    race: Race | None = None


@dataclass(frozen=True)
class Mistake:
    """A small wrong implementation of a question's answer.

    Attributes:
        name: the mistake, in a few words.
        explanation: what goes wrong and why, for the person who made it.
        answer: the implementation.
        variants: the same mistake with other tiles, for answers whose tiles are their own choice.
    """

    name: str
    explanation: str
    answer: Answer
    variants: tuple[Answer, ...] = ()


@dataclass(frozen=True)
class Question:
    """A graded question; its id and points are those of the lab.

    Attributes:
        right: None, or a right answer. With it a mistake is named only if an answer's numbers lie
            much nearer to the mistake's than the mistake's lie to the right ones.
        needs: None, or a function that says why this machine cannot verify an answer (and
            returns an empty string where it can).
        remark: None, or what to say beside a pass on this machine, such as what ran it.
    """

    id: str
    points: float
    checks: tuple[Check, ...]
    mistakes: tuple[Mistake, ...]
    needs: Callable[[], str] | None = None
    right: Answer | None = None
    remark: Callable[[], str] | None = None

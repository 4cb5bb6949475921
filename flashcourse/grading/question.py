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
    """

    name: str
    cases: Callable[[torch.Generator], Iterable[Case]]
    judge: Callable[[Case, Observation], str | None]
    call: Callable[..., Any] = call_plainly
    needs: Callable[[], str] | None = None
    work: bool = False


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
        alone: True if it measures time: then the grader runs no other submission meanwhile.
        remark: None, or what to say beside a pass on this machine, such as what ran it.
    """

    id: str
    points: float
    checks: tuple[Check, ...]
    mistakes: tuple[Mistake, ...]
    needs: Callable[[], str] | None = None
    right: Answer | None = None
    alone: bool = False
    remark: Callable[[], str] | None = None

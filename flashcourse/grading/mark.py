"""Marking an answer: run every check on fresh inputs, and name the mistake if it is a known one."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves

from flashcourse.grading.observe import observe, output_of
from flashcourse.grading.question import Answer, Case, Check, Mistake, Observation, Question
from flashcourse.grading.verdict import Finding, Verdict
from flashcourse.measure.accuracy import FLOAT32_EPS

NAMING_SECONDS = 10.0  # for an answer that no known mistake explains as a whole
SMALL = 20_000  # numbers in an input on which a named mistake is confirmed
CONFIRMED = 3  # such inputs of a check


@dataclass(frozen=True)
class _Failure:
    check: Check
    case: Case
    observation: Observation
    message: str


Observe = Callable[[Check, Case], Observation]
Beside = Callable[[], contextlib.AbstractContextManager[None]]


def mark(question: Question, answer: Answer, seed: int) -> Verdict:
    """Run all checks of a question on an answer, in this process.

    Args:
        seed: fixes every input; the same seed draws the same cases on every machine.
    """
    return mark_observed(question, lambda check, case: observe(check, answer, case), seed)


def mark_observed(
    question: Question,
    look: Observe,
    seed: int,
    beside: Beside = contextlib.nullcontext,
) -> Verdict:
    """Run all checks of a question on an answer that may live elsewhere.

    Args:
        look: runs the answer on a case and says what it did.
        beside: entered while known mistakes run here: others may be timing on the same GPU.
    """
    reason = question.needs() if question.needs else ""
    if reason:
        return Verdict(question.id, "not_verified", 0, question.points, seed=seed, reason=reason)
    passed: list[str] = []
    failures: list[_Failure] = []
    reasons: list[str] = []
    for check in question.checks:
        reason = check.needs() if check.needs else ""
        if reason:
            reasons.append(reason)
            continue
        if check.race is not None and failures:
            continue  # what is wrong is not timed
        failure = _first_failure(question, check, look, seed)
        if failure is None:
            passed.append(check.name)
        elif failure.message not in {f.message for f in failures}:  # one error, told once
            failures.append(failure)
    checks = tuple(passed)
    if not failures and reasons:
        reason = "; ".join(dict.fromkeys(reasons))
        return Verdict(question.id, "not_verified", 0, question.points, (), seed, checks, reason)
    if not failures:
        points, remark = question.points, question.remark() if question.remark else ""
        return Verdict(question.id, "passed", points, points, (), seed, checks, remark)
    with beside():
        findings = _diagnose(question, failures, checks, seed)
    findings = tuple(
        _confirmed(question, finding, failure, look, seed, beside)
        for finding, failure in zip(findings, failures, strict=True)
    )
    return Verdict(question.id, "failed", 0, question.points, findings, seed, checks)


def _cases(question: Question, check: Check, seed: int) -> Iterable[Case]:
    key = zlib.crc32(f"{question.id}/{check.name}".encode())
    return check.cases(torch.Generator().manual_seed(key ^ seed))


def _first_failure(question: Question, check: Check, look: Observe, seed: int) -> _Failure | None:
    for case in _cases(question, check, seed):
        observation = look(check, case)
        message = _misbehaviour(observation) or check.judge(case, observation)
        if message:
            return _Failure(check, case, observation, message)
    return None


def _misbehaviour(observation: Observation) -> str | None:
    """What is wrong whatever the check asks: borrowed work, an error, an input written to."""
    if observation.library_calls:
        called = ", ".join(sorted(observation.library_calls))
        return f"your answer called the course's library ({called}); the lab asks for your own"
    if observation.threads:
        return "your answer started a thread; compute in the function itself, where it can be seen"
    if observation.error.startswith("NotImplementedError"):
        return "this answer is not written yet: it raises NotImplementedError"
    if observation.error:
        return f"your answer raised {observation.error}"
    if observation.changed_inputs:
        return f"your answer wrote to its inputs: {', '.join(observation.changed_inputs)} changed"
    return None


def _diagnose(
    question: Question, failures: list[_Failure], passed: tuple[str, ...], seed: int
) -> tuple[Finding, ...]:
    """Attach to each failure the known mistakes that fail the same check with the same result.

    If some mistakes explain all failures, only those are named; a name that explains one failure
    and contradicts another would mislead. So would a mistake that fails where the answer passed.
    """
    # Most wrong answers are one mistake: follow those that explain the first failure, and ask the
    # others about the rest only if none of these explains everything. Small inputs come first:
    # after them few mistakes are left for the large ones.
    ordered = sorted((f for f in failures if f.check.race is None), key=_size)
    whole = list(question.mistakes)
    for failure in ordered:
        whole = _explaining(question, whole, failure)
    telling = [failure for failure in ordered if _has_a_number(failure.observation.output)]
    if not telling and len(whole) > 1:
        whole = []  # NaN everywhere: as good as any other mistake that gives it
    explained = {id(failure): whole for failure in ordered}
    if not whole:
        deadline = time.monotonic() + NAMING_SECONDS
        # Who did the work is asked where the numbers are right, and right numbers are no evidence:
        # any mistake can have them there. Wrong ones are.
        wrong = [failure for failure in telling if not failure.check.work]
        for failure in wrong or telling:
            explained[id(failure)] = _explaining(question, question.mistakes, failure, deadline)
    suspects = {m.name: m for named in explained.values() for m in named}
    fitting = {name for name, m in suspects.items() if _passes(question, m, passed, seed)}
    findings = []
    for failure in failures:
        named = [m for m in explained.get(id(failure), []) if m.name in fitting]
        findings.append(
            Finding(
                failure.check.name,
                failure.case.description,
                failure.message,
                tuple((m.name, m.explanation) for m in named),
            )
        )
    return tuple(findings)


def _confirmed(
    question: Question,
    finding: Finding,
    failure: _Failure,
    look: Observe,
    seed: int,
    beside: Beside,
) -> Finding:
    """The finding with only those mistakes that give the answer's results on other cases too.

    On one input two mistakes can give the same numbers, if these are counts or a mask. (Rounded
    numbers hardly ever agree by chance; and where a kernel reads memory that is not its own, two
    runs of the same mistake do not.) Asking the answer again costs time: only small cases of the
    same check are asked, and only if a mistake was named.
    """
    leaves = tree_leaves(failure.observation.output)
    if not finding.mistakes or any(
        isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in leaves
    ):
        return finding
    named = {name for name, _ in finding.mistakes}
    suspects = [m for m in question.mistakes if m.name in named]
    others = (
        case
        for case in _cases(question, failure.check, seed)
        if case.description != failure.case.description and _numbers(case) <= SMALL
    )
    for case in itertools.islice(others, CONFIRMED):
        if not suspects:
            break
        try:
            ours = look(failure.check, case)
        except Exception:  # the verdict stands; that the answer ended here changes nothing
            break
        with beside():
            suspects = [m for m in suspects if _agrees(m, failure.check, case, ours)]
    kept = {m.name for m in suspects}
    mistakes = tuple(named for named in finding.mistakes if named[0] in kept)
    return dataclasses.replace(finding, mistakes=mistakes)


def _agrees(mistake: Mistake, check: Check, case: Case, ours: Observation) -> bool:
    """True if the mistake, with some of its tiles, does on this case what the answer did."""
    for answer in (mistake.answer, *mistake.variants):
        theirs = observe(check, answer, case)
        if ours.error or theirs.error:
            if bool(ours.error) == bool(theirs.error):
                return True
        elif _same_output(ours.output, theirs.output):
            return True
    return False


def _has_a_number(output: Any) -> bool:
    """False if it is NaN or infinite throughout: many mistakes end so."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return not tensors or any(bool(torch.isfinite(tensor).any()) for tensor in tensors)


def _size(failure: _Failure) -> int:
    return _numbers(failure.case)


def _numbers(case: Case) -> int:
    """How many numbers the input has."""
    leaves = tree_leaves((case.args, case.kwargs))
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))


def _passes(question: Question, mistake: Mistake, passed: tuple[str, ...], seed: int) -> bool:
    """True if the mistake, with some of its tiles, passes the checks that the answer passed."""
    checks = [check for check in question.checks if check.name in passed and not check.work]

    def fits(answer: Answer) -> bool:
        def look(check: Check, case: Case) -> Observation:
            return observe(check, answer, case)

        return all(_first_failure(question, check, look, seed) is None for check in checks)

    return any(fits(answer) for answer in (mistake.answer, *mistake.variants))


def _explaining(
    question: Question,
    mistakes: Sequence[Mistake],
    failure: _Failure,
    deadline: float = math.inf,
) -> list[Mistake]:
    """The mistakes that fail the failure's check, on its input, with its result.

    Args:
        deadline: on the monotonic clock; afterwards no more is tried.
    """
    if failure.observation.error or not mistakes:
        return []  # two errors are rarely the same mistake, and the error speaks for itself
    right = None
    if question.right and time.monotonic() < deadline:
        right = output_of(failure.check, question.right, failure.case)
    return [mistake for mistake in mistakes if _same_failure(mistake, failure, right, deadline)]


def _same_failure(mistake: Mistake, failure: _Failure, right: Any, deadline: float) -> bool:
    answers = (mistake.answer, *mistake.variants)
    return any(
        _gives_the_same(answer, failure, right) for answer in answers if time.monotonic() < deadline
    )


def _gives_the_same(answer: Answer, failure: _Failure, right: Any) -> bool:
    """True if the answer fails like the failure; ``right`` is None or what would be right."""
    ours = failure.observation
    try:  # most mistakes give other numbers, and that is seen without watching them
        output = output_of(failure.check, answer, failure.case)
    except Exception:
        return False
    if not _same_output(ours.output, output):
        return False
    theirs = observe(failure.check, answer, failure.case)
    if failure.check.work and ours.launches and not theirs.launches:
        return False  # the numbers are right, so any mistake that gets them right has the same
    if theirs.error or theirs.changed_inputs != ours.changed_inputs:
        return False
    if not _same_output(ours.output, theirs.output):
        return False
    if right is not None and not _beyond_rounding(ours.output, theirs.output, right):
        return False
    return bool(_misbehaviour(theirs) or failure.check.judge(failure.case, theirs))


def _beyond_rounding(ours: Any, theirs: Any, right: Any) -> bool:
    """False if ours and theirs are alike only because both are nearly right.

    A small mistake (a number rounded to float16) leaves all numbers within a thousandth of the
    right ones, and so does another small mistake. They are the same only if they differ from each
    other by far less than from what is right.
    """
    leaves = [tree_leaves(tree) for tree in (ours, theirs, right)]
    if len(leaves[1]) != len(leaves[2]):
        return True
    for a, b, c in zip(*leaves, strict=True):
        if not all(isinstance(leaf, torch.Tensor) for leaf in (a, b, c)) or b.shape != c.shape:
            continue
        unit = 2 * torch.finfo(a.dtype).eps if a.dtype == torch.float16 else 16 * FLOAT32_EPS
        a, b, c = a.double(), b.double(), c.double()
        finite = torch.isfinite(a) & torch.isfinite(b) & torch.isfinite(c)
        if not finite.any():
            continue
        apart = (a - b)[finite].abs().max().item()
        wrong = (b - c)[finite].abs().max().item()
        rounding = unit * b[finite].abs().max().item()
        if apart > max(wrong / 4, rounding):
            return False
    return True


def _same_output(ours: Any, theirs: Any) -> bool:
    """Equal in structure and, up to rounding, in every number."""
    our_leaves, our_structure = tree_flatten(ours)
    their_leaves, their_structure = tree_flatten(theirs)
    if our_structure != their_structure:
        return False
    return all(_same_leaf(a, b) for a, b in zip(our_leaves, their_leaves, strict=True))


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.numel() == 0:
            return True
        coarse = a.dtype in (torch.float16, torch.bfloat16)  # weights are rounded to it as well
        a, b = a.double(), b.double()
        finite = b[torch.isfinite(b)].abs()
        size = finite.max().item() if finite.numel() else 0.0
        near = (1e-3 if coarse else 1e-4) * size
        return torch.allclose(a, b, rtol=1e-3, atol=near, equal_nan=True)
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        if isinstance(a, int) != isinstance(b, int):
            return False  # 9.0 where an int is asked for
        return math.isclose(a, b, rel_tol=1e-9) or (math.isnan(a) and math.isnan(b))
    return type(a) is type(b) and a == b

"""A mistake is named only where it explains what came: not because two results happen to agree."""

from __future__ import annotations

import pytest
import torch

from flashcourse.grading import find_question, mark
from flashcourse.grading.question import Case, Check, Mistake, Question
from flashcourse.grading.verdict import Verdict


def names(verdict: Verdict) -> set[str]:
    assert verdict.status == "failed"
    return {name for finding in verdict.findings for name, _ in finding.mistakes}


def doubled(x: int) -> int:
    return 2 * x


def squared(x: int) -> int:
    return x * x


def a_question(*values: int) -> Question:
    """Triple a number; on 2 doubling and squaring are the same mistake."""
    check = Check(
        "three times x",
        lambda generator: [Case(f"x = {x}", (x,)) for x in values],
        lambda case, seen: None if seen.output == 3 * case.args[0] else f"got {seen.output}",
    )
    return Question("test", 1, (check,), (Mistake("doubled", "", doubled),))


def test_a_count_that_agrees_once_is_no_name() -> None:
    assert names(mark(a_question(2, 5), doubled, 0)) == {"doubled"}
    assert names(mark(a_question(2, 5), squared, 0)) == set()
    assert names(mark(a_question(2), squared, 0)) == {"doubled"}  # nothing contradicts it


def test_a_number_of_another_type_is_another_mistake() -> None:
    assert names(mark(a_question(2, 5), lambda x: 2.0 * x, 0)) == set()


def test_an_answer_that_cannot_run_again_keeps_its_name() -> None:
    calls: list[int] = []

    def once(x: int) -> int:
        calls.append(x)
        if len(calls) > 1:
            raise RuntimeError("only once")
        return 2 * x

    assert names(mark(a_question(2, 5), once, 0)) == set()  # the mistake does not raise there


@pytest.mark.needs_triton
def test_own_kernels_with_a_helper_from_pytorch_are_not_pytorch_s_work() -> None:
    """Their numbers are right, as those of every mistake in whose work it was."""
    from flashcourse.grading.mistakes_triton_forward import right_answer

    kernel = right_answer()

    def answer(q, k, v, is_causal=False):
        torch.zeros(q.shape[2], k.shape[2], device=q.device)
        out, lse = kernel(q, k, v, is_causal)
        return out, lse + torch.log1p(torch.zeros_like(lse))

    verdict = mark(find_question("lab4.flash_forward"), answer, 0)
    assert names(verdict) == set()


def test_the_first_document_seen_by_all_is_neither_of_two_others() -> None:
    def mask(cu_seqlens, *rest):
        total = int(cu_seqlens[-1])
        document = torch.bucketize(torch.arange(total), cu_seqlens[1:].long(), right=True)
        i, j = torch.arange(total)[:, None], torch.arange(total)
        same = document[:, None] == document
        return (same | (document == 0)) & (j <= i)

    question = find_question("lab6.packed_mask")
    assert "causal only" not in names(mark(question, mask, 0))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda values: values.pop(), "argument number 1 changed"),
        (lambda values: values.append(3), "argument number 1 changed"),
        (lambda values: values.__setitem__(0, 9), "argument number 1 (item 0) changed"),
        (lambda values: values.reverse(), "argument number 1 (items 0 and 2) changed"),
    ],
)
def test_a_list_that_was_changed_is_named(spoil, says) -> None:
    def answer(values: list[int]) -> int:
        spoil(values)
        return 6

    check = Check("sum", lambda generator: [Case("a list", ([1, 2, 3],))], lambda *_: None)
    (finding,) = mark(Question("test", 1, (check,), ()), answer, 0).findings
    assert finding.message == f"your answer wrote to its inputs: {says}"

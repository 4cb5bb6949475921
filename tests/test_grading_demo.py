"""The demonstration of lesson 00, and checking a question that belongs to no lab."""

from __future__ import annotations

import pytest
import torch

from flashcourse.grading import all_questions, check, mark
from flashcourse.grading.demo import DEMO
from flashcourse.grading.draw import integer, strided

RIGHT = {
    "mean": lambda x: x.mean(dim=1),
    "sum": lambda x: x.sum(1) / x.shape[1],
    "product": lambda x: x @ torch.full((x.shape[1],), 1 / x.shape[1]),
}


@pytest.mark.parametrize("answer", RIGHT.values(), ids=RIGHT)
def test_right_answers_pass(answer):
    assert all(mark(DEMO, answer, seed).passed for seed in range(50))


@pytest.mark.parametrize("mistake", DEMO.mistakes, ids=lambda m: m.name)
def test_its_mistakes_are_rejected_and_named(mistake):
    for seed in range(20):
        verdict = mark(DEMO, mistake.answer, seed)
        assert verdict.status == "failed"
        assert {name for f in verdict.findings for name, _ in f.mistakes} == {mistake.name}


def test_an_unknown_mistake_is_not_named():
    verdict = mark(DEMO, lambda x: x.mean(dim=1) + 0.25, 0)
    assert verdict.status == "failed"
    assert all(finding.mistakes == () for finding in verdict.findings)


def test_it_counts_for_no_lab(capsys):
    assert DEMO.id not in all_questions()
    assert check(DEMO, RIGHT["mean"]).passed
    assert "✓ demo.row_mean: passed, 1 of 1 points" in capsys.readouterr().out


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 3, 0, 2), (3, 2, 1, 0)])
def test_strided_changes_the_layout_and_nothing_else(order):
    x = torch.randn(2, 3, 4, 5)
    laid_out = strided(x, order)
    assert torch.equal(laid_out, x)
    assert laid_out.permute(order).is_contiguous()
    assert not laid_out.is_contiguous()


def test_integers_reach_both_ends():
    generator = torch.Generator().manual_seed(0)
    assert {integer(generator, 3, 6) for _ in range(200)} == {3, 4, 5, 6}

"""Labs 4 and 5 on kernels: known mistakes written in Triton, whose work it was, and where.

The mistakes here are what learners hand in. Their tiles differ from those of the mistakes in
PyTorch by which the grader names them.
"""

from __future__ import annotations

import os
from functools import cache

import pytest
import torch

from flashcourse import runtime
from flashcourse.grading import find_question, mark
from flashcourse.grading.launches import noting_launches

pytestmark = pytest.mark.needs_triton

# One interpreted verdict takes seconds: FLASHCOURSE_SEEDS=5 looks at more than one seed.
SEEDS = int(os.environ.get("FLASHCOURSE_SEEDS", "1"))


@cache
def forward_mistakes():
    from flashcourse.grading import mistakes_triton_forward

    return mistakes_triton_forward


@cache
def backward_mistakes():
    from flashcourse.grading import mistakes_triton_backward

    return mistakes_triton_backward


def names(module):
    """The names of the mistakes, known before Triton is imported; none where it is missing."""
    if not runtime.triton_installed():
        return ["no Triton"]
    return [*module().CHANGES, *module().LAUNCHES]


def sampled(module):
    """The names as parameters; interpreted, every fourth stands for the others."""
    for number, name in enumerate(names(module)):
        left_out = number % 4 and not runtime.has_gpu()
        yield pytest.param(name, marks=[pytest.mark.thorough] if left_out else [])


def named(verdict):
    return {name for finding in verdict.findings for name, _ in finding.mistakes}


@pytest.mark.parametrize("name", list(sampled(forward_mistakes)))
def test_a_wrong_forward_kernel_is_rejected_and_named(name):
    answer = forward_mistakes().triton_mistakes()[name]
    for seed in range(SEEDS):
        verdict = mark(find_question("lab4.flash_forward"), answer, seed)
        assert verdict.status == "failed"
        assert named(verdict) == {name}, str(verdict)


@pytest.mark.parametrize("name", list(sampled(backward_mistakes)))
def test_wrong_backward_kernels_are_rejected_and_named(name):
    answer = backward_mistakes().triton_mistakes()[name]
    for seed in range(SEEDS):
        verdict = mark(find_question("lab5.flash_backward"), answer, seed)
        assert verdict.status == "failed"
        assert named(verdict) == {name}, str(verdict)


def test_there_are_ten_mistakes_each_in_triton_and_in_pytorch():
    for module, question in (
        (forward_mistakes, "lab4.flash_forward"),
        (backward_mistakes, "lab5.flash_backward"),
    ):
        in_pytorch = {mistake.name for mistake in find_question(question).mistakes}
        assert len(in_pytorch) >= 10
        assert len(names(module)) >= 10
        assert set(names(module)) <= in_pytorch


# Whose work it was ------------------------------------------------------------------------------


def finding_of(verdict, check):
    return next(finding.message for finding in verdict.findings if finding.check == check)


def test_pytorch_s_attention_is_no_kernel_of_yours():
    def answer(q, k, v, is_causal=False):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v), q.new_zeros(q.shape[:3])

    verdict = mark(find_question("lab4.flash_forward"), answer, seed=0)
    message = finding_of(verdict, "your own kernel did the work")
    assert "your answer called _scaled_dot_product" in message
    assert "the numbers come from a kernel" in message


def test_a_kernel_launched_for_show_does_not_hide_the_matrix():
    from flashcourse.grading.mistakes_flash_forward import whole_matrix

    right = forward_mistakes().right_answer()

    def answer(q, k, v, is_causal=False):
        right(q, k, v, is_causal)
        return whole_matrix(q, k, v, is_causal)

    verdict = mark(find_question("lab4.flash_forward"), answer, seed=0)
    assert "score matrix has" in finding_of(verdict, "memory does not grow with the score matrix")
    assert "MiB in float32" in finding_of(verdict, "memory does not grow with the score matrix")
    assert "your answer called" in finding_of(verdict, "your own kernel did the work")


def test_the_library_s_kernels_are_not_one_s_own():
    from flashcourse.attention import flash_attention

    def answer(q, k, v, is_causal=False):
        return flash_attention(q, k, v, is_causal=is_causal, return_lse=True)

    verdict = mark(find_question("lab4.flash_forward"), answer, seed=0)
    assert "your answer called the course's library" in verdict.findings[0].message


def test_a_call_of_the_library_in_the_backward_is_seen_on_a_gpu_too():
    """There autograd runs a backward in a thread of its own."""
    from flashcourse.attention import naive_attention

    class Borrowed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, is_causal):
            ctx.is_causal = is_causal
            scores = q @ k.mT * q.shape[-1] ** -0.5
            if is_causal:
                seen = torch.ones_like(scores[0, 0], dtype=torch.bool)
                scores = scores.masked_fill(~seen.tril(k.shape[2] - q.shape[2]), -torch.inf)
            out = torch.softmax(scores.float(), -1).to(v) @ v
            ctx.save_for_backward(q, k, v)
            return out

        @staticmethod
        def backward(ctx, d_out):
            leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            with torch.enable_grad():
                out = naive_attention(*leaves, is_causal=ctx.is_causal)
            return *torch.autograd.grad(out, leaves, d_out), None

    verdict = mark(find_question("lab5.attention"), Borrowed.apply, seed=0)
    messages = [finding.message for finding in verdict.findings]
    assert any("called the course's library (naive_attention" in m for m in messages), messages


def test_launches_are_noted_and_the_gates_are_put_back():
    from triton.runtime import interpreter, jit

    gates = [interpreter.InterpretedFunction.run, jit.JITFunction.run]
    q, k, v = (torch.randn(1, 1, 5, 16, device=runtime.device()) for _ in range(3))
    with noting_launches() as launches:
        forward_mistakes().right_answer()(q, k, v)
    assert [(launch.kernel, launch.own) for launch in launches] == [("forward_kernel", True)]
    assert launches[0].tensors == 5
    assert [interpreter.InterpretedFunction.run, jit.JITFunction.run] == gates

    from flashcourse.attention import flash_attention

    with noting_launches() as launches:
        flash_attention(q, k, v)
    assert launches
    assert not any(launch.own for launch in launches)


# Where it was judged ----------------------------------------------------------------------------


def test_a_pass_says_that_it_was_interpreted():
    verdict = mark(find_question("lab5.delta"), _delta(), seed=0)
    assert verdict.passed
    assert verdict.reason == ("verified in Triton's interpreter" if runtime.interpreting() else "")
    assert verdict.reason in str(verdict)


def _delta():
    from right_answers.lab5 import from_copies

    return from_copies


def test_without_triton_nothing_is_verified(monkeypatch):
    monkeypatch.setattr(runtime, "triton_installed", lambda: False)
    for question in ("lab4.row_softmax", "lab4.flash_forward", "lab4.speed", "lab5.attention"):
        verdict = mark(find_question(question), lambda *args: None, seed=0)
        assert verdict.status == "not_verified"
        assert "Triton is not installed" in verdict.reason


def test_speed_needs_a_gpu_with_matrix_units(monkeypatch):
    from flashcourse.grading.triton_work import needs_matrix_units

    monkeypatch.setattr(runtime, "has_gpu", lambda: False)
    assert "speed needs a GPU" in needs_matrix_units()
    monkeypatch.setattr(runtime, "has_gpu", lambda: True)
    monkeypatch.setattr(runtime, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(runtime, "compute_capability", lambda: (7, 5))
    assert "Tesla T4, compute capability 7.5" in needs_matrix_units()
    monkeypatch.setattr(runtime, "compute_capability", lambda: (9, 0))
    assert needs_matrix_units() == ""
    monkeypatch.setenv("FLASHCOURSE_UNTIMED", "1")  # in a notebook that runs beside others
    assert "measures speed by itself" in needs_matrix_units()


def test_a_wrong_kernel_fails_the_speed_question_without_a_gpu_too():
    answer = forward_mistakes().triton_mistakes()["never divided by the sum"]
    assert mark(find_question("lab4.speed"), answer, seed=0).status == "failed"


@pytest.mark.needs_gpu
def test_a_slow_kernel_is_told_by_how_much(monkeypatch):
    from flashcourse.grading.questions import lab4_speed

    if lab4_speed.needs_matrix_units():
        pytest.skip("not verified on this machine: no matrix units for Triton")
    monkeypatch.setattr(lab4_speed, "FACTOR", 1000.0)
    verdict = mark(find_question("lab4.speed"), forward_mistakes().right_answer(), seed=0)
    assert verdict.status == "failed"
    assert "times as fast, and the lab asks for 1000" in str(verdict)

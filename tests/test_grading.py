"""The questions of the labs as a whole, and the machinery that marks an answer."""

from __future__ import annotations

import threading

import pytest
import torch
from right_answers import other_right_answers
from solution_answers import solution_answers

from flashcourse.grading import (
    CheckFailed,
    all_questions,
    check,
    find_question,
    mark,
)
from flashcourse.grading.judge import judge_number, judge_operators, judge_tensor, judge_tensors
from flashcourse.grading.question import Case, Check, Mistake, Observation, Question

POINTS = {
    "lab1.softmax": 2,
    "lab1.attention": 5,
    "lab1.padding_mask": 3,
    "lab2.naive_bytes": 3,
    "lab2.flash_bytes": 3,
    "lab2.attention_flops": 2,
    "lab2.roofline_seconds": 2,
    "lab2.metered_attention": 5,
    "lab3.online_softmax": 3,
    "lab3.merge": 3,
    "lab3.tiled_forward": 5,
    "lab3.tiled_backward": 4,
    "lab4.row_softmax": 4,
    "lab4.flash_forward": 12,
    "lab4.speed": 4,
    "lab5.delta": 3,
    "lab5.flash_backward": 13,
    "lab5.attention": 4,
    "lab6.pack": 3,
    "lab6.packed_mask": 2,
    "lab6.flash_varlen": 5,
    "lab7.kv_bytes_per_token": 1,
    "lab7.block_allocator": 4,
    "lab7.paged_decode": 5,
}

QUESTIONS = all_questions()
MISTAKES = [(q, m) for q in QUESTIONS.values() for m in q.mistakes]


def test_questions_and_points_are_the_course_s():
    assert {id: question.points for id, question in QUESTIONS.items()} == POINTS
    assert sum(POINTS.values()) == 100


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=lambda q: q.id)
def test_every_question_has_two_other_right_answers(question):
    assert sum(question_id == question.id for question_id, _ in other_right_answers()) >= 2


def test_there_are_many_known_mistakes():
    assert len(MISTAKES) >= 12
    assert all(len(q.mistakes) >= 3 for q in QUESTIONS.values())
    for question in QUESTIONS.values():
        names = [mistake.name for mistake in question.mistakes]
        assert len(set(names)) == len(names), question.id


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=lambda q: q.id)
@pytest.mark.parametrize(
    "answer",
    [
        lambda *args, **kwargs: None,
        lambda *args, **kwargs: 0,
        lambda *args, **kwargs: torch.zeros(()),
        lambda *args, **kwargs: float("nan"),
        lambda *args, **kwargs: (None, None),
        lambda *args, **kwargs: exec("raise SystemExit(0)"),
        lambda: 1,
    ],
    ids=["None", "0", "zero tensor", "nan", "pair of None", "exit", "no arguments"],
)
def test_nonsense_fails_without_crashing(question, answer):
    verdict = mark(question, answer, seed=0)
    assert verdict.status == "failed"
    assert verdict.findings
    assert all(finding.message for finding in verdict.findings)


class AlwaysEqual:
    """Says yes to every comparison."""

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0

    def __getattr__(self, name):
        return self


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=lambda q: q.id)
def test_a_friendly_object_is_not_an_answer(question):
    assert mark(question, lambda *a, **k: AlwaysEqual(), seed=0).status == "failed"


# The machinery, on a small question of its own.


def _double_cases(generator):
    for scale in (1, 10):
        yield Case(f"x (4,), scale ×{scale}", (torch.randn(4, generator=generator) * scale,))


def _judge_double(case, observation):
    return judge_tensor("y", observation.output, case.args[0].double() * 2, 1e-5, torch.float32)


DOUBLE = Question(
    "test.double",
    2,
    (
        Check("doubles every entry", _double_cases, _judge_double),
        Check("works without mul", _double_cases, lambda c, o: judge_operators(o, ("mul",))),
    ),
    (
        Mistake("squared", "x² is 2x only at 0 and 2.", lambda x: x.square()),
        Mistake("tripled", "That is 3x.", lambda x: x + x + x),
        Mistake("tripled again", "That is 3x too.", lambda x: x.add(x).add(x)),
    ),
)


def test_verdict_of_a_right_answer():
    verdict = mark(DOUBLE, lambda x: x + x, seed=3)
    assert (verdict.status, verdict.passed, verdict.points) == ("passed", True, 2)
    assert verdict.checks == ("doubles every entry", "works without mul")
    assert "✓ test.double: passed, 2 of 2 points" in str(verdict)


def test_a_message_says_what_came_and_what_was_expected():
    verdict = mark(DOUBLE, lambda x: x + x + 1, seed=3)
    (finding,) = verdict.findings
    assert finding.check == "doubles every entry"
    assert finding.case == "x (4,), scale ×1"
    x = next(iter(_double_cases(torch.Generator()))).args[0]
    assert x.shape == (4,)
    assert "expected" in finding.message
    assert "4 of 4 entries are outside" in finding.message
    assert finding.mistakes == ()  # no known mistake gives these numbers: nothing is guessed


def test_a_known_mistake_is_named_only_for_its_own_numbers():
    verdict = mark(DOUBLE, lambda x: x**2, seed=3)
    assert verdict.findings[0].mistakes == (("squared", "x² is 2x only at 0 and 2."),)
    assert "known mistake — squared" in str(verdict)


def test_mistakes_with_equal_numbers_are_all_named():
    verdict = mark(DOUBLE, lambda x: torch.stack([x, x, x]).sum(0), seed=3)
    assert [name for name, _ in verdict.findings[0].mistakes] == ["tripled", "tripled again"]
    assert "Each of these known mistakes" in str(verdict)


def test_an_error_is_told_once_and_in_the_learner_s_words():
    verdict = mark(DOUBLE, lambda x: x.no_such_thing(), seed=3)
    (finding,) = verdict.findings
    assert "AttributeError" in finding.message


def test_writing_to_an_input_fails():
    verdict = mark(DOUBLE, lambda x: x.add_(x), seed=3)
    assert "your answer wrote to its inputs: argument number 1 changed" in str(verdict)


def test_forbidden_operators_fail():
    verdict = mark(DOUBLE, lambda x: x * 2, seed=3)
    assert verdict.checks == ("doubles every entry",)
    assert "your answer called mul" in verdict.findings[0].message


def test_a_thread_is_out_of_sight_and_refused():
    def answer(x):
        result = []
        worker = threading.Thread(target=lambda: result.append(x * 2))
        worker.start()
        worker.join()
        return result[0]

    verdict = mark(DOUBLE, answer, seed=3)
    assert verdict.status == "failed"
    assert "your answer started a thread" in verdict.findings[0].message


def test_an_answer_not_written_yet_says_so():
    def answer(x):
        raise NotImplementedError

    assert "not written yet" in str(mark(DOUBLE, answer, seed=3))


def test_a_change_from_infinity_to_the_largest_number_is_a_change():
    def cases(generator):
        yield Case("one -inf", (torch.tensor([1.0, -torch.inf]),))

    question = Question("test.same", 1, (Check("returns it", cases, lambda c, o: None),), ())
    assert mark(question, lambda x: x, seed=0).passed
    assert not mark(question, lambda x: x.clamp_(min=torch.finfo(x.dtype).min), seed=0).passed


def test_a_mistake_is_not_named_where_it_contradicts_what_passed():
    def cases(generator):
        yield Case("the number 2", (torch.tensor([2.0]),))

    checks = (*DOUBLE.checks[:1], Check("doubles 2", cases, _judge_double))
    question = Question("test.named", 1, checks, (Mistake("tripled", "That is 3x.", _triple),))
    assert "tripled" in str(mark(question, _triple, seed=0))
    verdict = mark(question, lambda x: x + x if len(x) == 1 else _triple(x), seed=0)
    assert verdict.checks == ("doubles 2",)
    assert "tripled" not in str(verdict)


def _triple(x):
    return x + x + x


def test_what_is_held_at_once_is_watched():
    def cases(generator):
        yield Case("x (8,)", (torch.randn(8, generator=generator),))

    seen = []
    check = Check("holds little", cases, lambda case, observation: seen.append(observation))
    question = Question("test.held", 1, (check,), ())
    mark(question, lambda x: [x + 1 for _ in range(10)], seed=0)
    mark(question, lambda x: [(x + 1).sum().item() for _ in range(10)], seed=0)
    assert seen[0].live_numel == 80
    assert seen[1].live_numel <= 9


def test_calling_the_library_is_not_an_answer():
    from flashcourse.attention import naive_attention

    verdict = mark(find_question("lab1.attention"), naive_attention, seed=0)
    assert verdict.status == "failed"
    assert "your answer called the course's library" in verdict.findings[0].message
    assert "naive_attention" in verdict.findings[0].message


def test_calling_a_right_answer_of_the_grader_is_not_an_answer():
    cell = (
        "from flashcourse.grading.mistakes_tiled_forward import tiled_forward\n"
        "def answer(*args, **options):\n"
        "    return tiled_forward(*args, **options)\n"
    )
    names = {}
    exec(compile(cell, "<cell>", "exec"), names)
    verdict = mark(find_question("lab3.tiled_forward"), names["answer"], seed=0)
    assert "your answer called the course's library (tiled_forward)" in verdict.findings[0].message


def test_the_seed_fixes_the_inputs_and_fresh_ones_differ():
    seen = []

    def answer(x):
        seen.append(x.clone())
        return x + x

    for seed in (1, 1, 2):
        mark(DOUBLE, answer, seed)
    assert torch.equal(seen[0], seen[4])
    assert not torch.equal(seen[0], seen[8])


def test_an_answer_cannot_disturb_the_random_numbers():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    mark(DOUBLE, lambda x: torch.manual_seed(0) and x + x, seed=3)
    assert torch.equal(torch.rand(3), expected)


def test_not_verified_is_neither_passed_nor_zero(capsys):
    question = Question("test.gpu", 4, DOUBLE.checks, (), needs=lambda: "it needs a GPU")
    verdict = mark(question, lambda x: x + x, seed=0)
    assert verdict.status == "not_verified"
    assert not verdict.passed
    assert verdict.findings == ()
    assert str(verdict) == "? test.gpu: not verified on this machine — it needs a GPU"


def test_check_prints_raises_and_returns(capsys):
    verdict = check("lab1.softmax", solution_answers()["lab1.softmax"])
    assert verdict.passed
    assert "✓ lab1.softmax: passed, 2 of 2 points" in capsys.readouterr().out
    with pytest.raises(CheckFailed, match=r"lab1\.softmax failed") as caught:
        check("lab1.softmax", lambda x: x)
    assert isinstance(caught.value, AssertionError)
    assert caught.value.verdict.status == "failed"
    printed = capsys.readouterr().out
    again = check("lab1.softmax", lambda x: x, raise_on_fail=False, seed=caught.value.verdict.seed)
    assert capsys.readouterr().out == printed
    assert again == caught.value.verdict


def test_check_refuses_what_it_cannot_check():
    with pytest.raises(ValueError, match=r"no question 'lab1\.sofmax'; near it: lab1\.softmax"):
        check("lab1.sofmax", lambda x: x)
    with pytest.raises(TypeError, match="your function itself, got Tensor"):
        check("lab1.softmax", torch.zeros(3))
    assert find_question("lab1.softmax").id == "lab1.softmax"


@pytest.mark.parametrize(
    ("actual", "words"),
    [
        (None, "must be a torch.Tensor, got NoneType"),
        (torch.zeros(3).double(), "dtype float64, expected float32"),
        (torch.zeros(2), "shape (2,), expected (3,)"),
        (torch.tensor([0, float("nan"), 0]), "NaN or infinite on one side only"),
        (torch.tensor([0, 1e-3, 0]), "1 of 3 entries are outside"),
    ],
)
def test_judge_tensor(actual, words):
    right = torch.zeros(3)
    assert judge_tensor("x", right, right, 1e-6, torch.float32) is None
    assert words in judge_tensor("x", actual, right, 1e-6, torch.float32)


def test_judge_tensors_and_numbers():
    pair = (torch.zeros(2), torch.ones(2))
    assert judge_tensors(("a", "b"), pair, pair, (0, 0)) is None
    assert "b[0] is 0, expected 1" in judge_tensors(("a", "b"), pair[:1] * 2, pair, (0, 0))
    assert "got a tensor of shape" in judge_tensors(("a", "b"), pair[0], pair, (0, 0))
    assert judge_number("n", 7, 7) is None
    assert judge_number("n", 8, 7) == "n is 8, expected 7"
    assert "must be a number, got None" in judge_number("n", None, 7)
    assert judge_number("t", 0.1 + 0.2, 0.3, exact=False) is None
    assert judge_number("t", 0.31, 0.3, exact=False)


def test_observations_are_plain():
    assert Observation().output is None

"""Times are measured from outside: no clock, opponent or kept answer in the answer's process helps.

Under half a minute on one free core.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from textwrap import dedent

import pytest
import small_lab
import torch
from small_lab.race import CHECK, QUESTION

from flashcourse.grading.gate import Gate
from flashcourse.grading.limits import Limits, choose_sandbox, descendants
from flashcourse.grading.mark import mark_observed
from flashcourse.grading.marking import Rivals, Settings, _look
from flashcourse.grading.process import StartFailed, Workshop
from flashcourse.grading.question import Case, Observation
from flashcourse.grading.race import WARM_UP, run_race

FAST = "def answer(x):\n    return torch.exp(x).sum(dim=1)\n"
SLOW = "def answer(x):\n    return torch.stack([torch.exp(row).sum() for row in x])\n"
WATCHED = "import sys\ndef watched():\n    return sys.getprofile() is not None\n"
# Each is as slow as the opponent, or does not compute at all, and wants to be called fast.
CHEATS = {
    "slow": (SLOW, "times as fast"),
    "stopped clocks": (
        dedent("""
        import time
        for name in ("perf_counter", "monotonic", "time", "process_time", "perf_counter_ns"):
            setattr(time, name, lambda: 0)
        class Event:
            def __init__(self, *a, **k): pass
            def record(self, *a): pass
            def elapsed_time(self, other): return 1e-6
        torch.cuda.Event = torch.Event = Event
        torch.cuda.synchronize = torch.cpu.synchronize = lambda *a: None
        """)
        + SLOW,
        "times as fast",
    ),
    "a slow opponent": (
        dedent("""
        import time, small_lab.race as race, flashcourse.grading.question as question
        race.row_by_row = lambda x: time.sleep(1)
        object.__setattr__(race.RACE, "opponent", race.row_by_row)
        torch.stack_ = torch.stack
        """)
        + SLOW,
        "times as fast",
    ),
    "slow where overhead is measured": (
        dedent("""
        import time, flashcourse.grading.child as child
        import sys
        bench = sys.modules["__main__"].Workbench
        whole = bench._lap
        def lap(self, changes):
            if len(changes) < 10:
                time.sleep(0.1)
            whole(self, changes)
        bench._lap = lap
        """)
        + SLOW,
        "times as fast",
    ),
    "the first answer kept": (
        """
        kept = []
        def answer(x):
            if not kept:
                kept.append(torch.exp(x).sum(dim=1))
            return kept[0]
        """,
        "inputs it had not seen before",
    ),
    "answers kept by shape": (
        """
        kept = {}
        def answer(x):
            return kept.setdefault((x.shape, x.dtype, x.stride()), torch.exp(x).sum(dim=1))
        """,
        "inputs it had not seen before",
    ),
    "nothing done unless watched": (
        WATCHED + "def answer(x):\n    return torch.exp(x).sum(1) if watched() else x.sum(1)\n",
        "inputs it had not seen before",
    ),
    "every third run left out": (
        WATCHED
        + """
count = [0]
def answer(x):
    count[0] += 1
    if watched() or count[0] % 3:
        return torch.exp(x).sum(1)
    return torch.zeros(len(x))
""",
        "inputs it had not seen before",
    ),
    "left for later": (
        """
        import sys
        main = sys.modules["__main__"]
        def lap(self, changes):
            self.changes = changes
            self._report({"kind": "lap", "error": ""}, {"digests": torch.rand(len(changes), 400)})
        def take_part(self, message, values):
            if message["op"] != "show":
                return whole(self, message, values)
            x = self.inputs[0] * self.changes[message["run"]]
            self._report({"kind": "shown"}, {"output": torch.exp(x).sum(1)})
        whole = main.Workbench._take_part
        main.Workbench._lap, main.Workbench._take_part = lap, take_part
        def answer(x):
            return torch.exp(x).sum(dim=1)
        """,
        "inputs it had not seen before",
    ),
    "no digests at all": (
        """
        import sys
        def lap(self, changes):
            self.outputs = [torch.zeros(400)] * len(changes)
            self._report({"kind": "lap", "error": ""}, {"digests": None})
        sys.modules["__main__"].Workbench._lap = lap
        def answer(x):
            return torch.exp(x).sum(dim=1)
        """,
        "no outputs like those of the first run",
    ),
    "an error in the timed runs alone": (
        WATCHED
        + "def answer(x):\n    assert watched(), 'now'\n    return torch.exp(x).sum(dim=1)\n",
        "your answer raised AssertionError: now",
    ),
    "inputs written to": (
        "def answer(x):\n    return x.exp_().sum(dim=1)\n",
        "wrote to its inputs",
    ),
}


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """Marks a source, in processes as `grade` starts them; the opponent's is kept."""
    root = tmp_path_factory.mktemp("race")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in small_lab.variables().items():
            patch.setenv(name, value)
        patch.setenv("FLASHCOURSE_QUESTIONS", "small_lab.race")
        settings = Settings(0, choose_sandbox("auto"), Limits(seconds=60))
        gate = Gate(root / "gate")
        with (
            Rivals(root / "rivals", settings) as rivals,
            Workshop(root / "answers", settings.sandbox, settings.limits, gate) as workshop,
        ):

            def grade(source):
                workshop.define({"answer": f"import torch\n{dedent(source)}"}, "answer")
                try:
                    return mark_observed(
                        QUESTION,
                        lambda check, case: _look(QUESTION, check, case, workshop, rivals),
                        seed=0,
                    )
                finally:
                    workshop.finish()

            yield grade


def test_a_fast_answer_passes(graded):
    for _ in range(3):
        verdict = graded(FAST)
        assert verdict.passed, str(verdict)


@pytest.mark.parametrize("name", CHEATS)
def test_nobody_is_fast_who_does_not_work_fast(graded, name):
    source, says = CHEATS[name]
    verdict = graded(source)
    assert verdict.status == "failed"
    assert says in str(verdict), str(verdict)


# With a clock that is set by the test ------------------------------------------------------------


class Fake:
    """A process that takes ``once`` seconds for each lap and ``each`` for a run."""

    def __init__(self, each, once=0.5, digest=lambda x: x.exp().sum(1), error=""):
        self.each, self.once, self.digest, self.error = each, once, digest, error
        self.laps = []

    def line_up(self, question, check, case):
        self.x = case.args[0]

    def lap(self, changes):
        self.laps.append(len(changes))
        self.outputs = [self.digest(self.x * change) for change in changes]
        digests = torch.stack(self.outputs) if self.outputs else None
        return self.once + self.each * len(changes), digests, self.error

    def show(self, run):
        return self.outputs[run]


def race_of(answer, opponent):
    case = Case("", (torch.randn(4, 64),))
    seen = Observation(output=case.args[0].exp().sum(1))
    return run_race(QUESTION, CHECK, case, seen, answer, opponent, Gate(None))


def test_what_asking_costs_is_taken_off():
    answer, opponent = Fake(0.001), Fake(0.003)
    output = race_of(answer, opponent).output
    assert output["ms"] == pytest.approx(1.0)
    assert output["plain_ms"] == pytest.approx(3.0)
    assert output["wrong"] is None
    assert 0 not in answer.laps  # what asking costs is measured on the opponent's process alone
    assert opponent.laps.count(0) >= 2


def test_an_answer_that_is_slow_to_ask_is_slow():
    assert race_of(Fake(0.001, once=0.6), Fake(0.003)).output["ms"] > 3


def test_a_hopeless_answer_is_measured_once():
    answer = Fake(1.0)
    output = race_of(answer, Fake(0.003)).output
    assert answer.laps == [WARM_UP]
    assert output["ms"] == pytest.approx(1000)
    assert output["wrong"] is None


def test_what_is_wrong_is_not_timed():
    always_wrong = dataclasses.replace(CHECK, name="wrong", judge=lambda *_: "no", race=None)
    question = dataclasses.replace(QUESTION, checks=(always_wrong, CHECK))
    looked_at = []

    def look(check, case):
        looked_at.append(check.name)
        return Observation()

    verdict = mark_observed(question, look, seed=0)
    assert verdict.status == "failed"
    assert looked_at == ["wrong"]


def test_errors_have_their_owner():
    assert race_of(Fake(0.001, error="Oops: no"), Fake(0.003)).error == "Oops: no"
    with pytest.raises(RuntimeError, match="the opponent raised"):
        race_of(Fake(0.001), Fake(0.003, error="Oops: no"))


def test_an_opponent_that_dies_is_the_grader_s_fault(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHCOURSE_QUESTIONS", "small_lab.race")
    monkeypatch.setenv("PYTHONPATH", str(small_lab.TESTS), prepend=os.pathsep)
    settings = Settings(0, choose_sandbox("auto"), Limits(seconds=60))
    with Rivals(tmp_path, settings) as rivals:
        with rivals.at(QUESTION, CHECK, Gate(None)) as opponent:
            for pid in descendants(opponent._line.process.pid):
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(StartFailed, match="timed beside answers"):
                opponent.lap(torch.zeros(0))
        with rivals.at(QUESTION, CHECK, Gate(None)) as opponent:  # a fresh one
            assert opponent.pid() is not None


# lab4.speed's own race, on a CPU ------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_sums_of_right_outputs_pass_and_guesses_fail(seed):
    from flashcourse.grading.questions import lab4_speed as speed

    generator = torch.Generator().manual_seed(seed)
    args = tuple(torch.randn(1, 2, 512, 64, generator=generator).half() for _ in range(3))
    signs = speed.draw_signs(generator, Case("", args), 3)
    assert signs.shape == (3, 1, 1, 1, 64)
    assert signs.abs().min() == 1
    changed = speed.change_signs(args, signs[1])
    scores = changed[0].float() @ changed[1].float().mT / 8
    right = speed.plain_attention(*changed), torch.logsumexp(scores, -1)
    assert speed.judge_sum(changed, speed.sum_over_queries(right)) is None
    assert speed.judge_rows(changed, right) is None
    # The output of other signs, of nothing, and the weight that keys get on average.
    for wrong in (args, changed[::-1]):
        assert speed.judge_sum(changed, speed.sum_over_queries((speed.plain_attention(*wrong),)))
    assert speed.judge_sum(changed, torch.zeros(1, 2, 64))
    weights = torch.exp(changed[1].float().square().sum(-1, keepdim=True) / 128)
    guess = weights / weights.mean(dim=2, keepdim=True) * changed[2].float()
    assert speed.judge_sum(changed, guess.sum(dim=2))
    for wrong in (torch.zeros_like(right[0]), right[1]), (right[0], 2 * right[1]), right[0], None:
        assert speed.judge_rows(changed, wrong)


# On a GPU ---------------------------------------------------------------------------------------

WITH_SOLUTION = {
    "the solution": ("", ""),
    "ten times the work": (
        """
        import time
        once = flash_forward
        time.perf_counter = time.monotonic = lambda: 0.0
        torch.cuda.synchronize = lambda *a: None
        torch.cuda.Event = None
        def flash_forward(q, k, v, is_causal=False):
            for _ in range(10):
                both = once(q, k, v, is_causal)
            return both
        """,
        "times as fast",
    ),
    "kept": (
        """
        once, kept = flash_forward, []
        def flash_forward(q, k, v, is_causal=False):
            if q.shape[2] < 1000:
                return once(q, k, v, is_causal)
            if not kept:
                kept.append(once(q, k, v, is_causal))
            return kept[0]
        """,
        "inputs it had not seen before",
    ),
    "nothing done unless watched": (
        WATCHED
        + """
once = flash_forward
def flash_forward(q, k, v, is_causal=False):
    if watched():
        return once(q, k, v, is_causal)
    return torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
""",
        "inputs it had not seen before",
    ),
}


@pytest.mark.needs_gpu
@pytest.mark.parametrize("name", WITH_SOLUTION)
def test_speed_on_a_gpu_is_earned(tmp_path, name):
    from class_of_100.cells import right_forwards

    from flashcourse.grading import find_question
    from flashcourse.grading.triton_work import needs_matrix_units

    if needs_matrix_units():
        pytest.skip(f"not verified on this machine: {needs_matrix_units()}")
    more, says = WITH_SOLUTION[name]
    cells = {
        "imports": "import torch\nimport triton\nimport triton.language as tl",
        "solution": right_forwards()[0].source,
        "more": dedent(more),
    }
    question = find_question("lab4.speed")
    settings = Settings(0, choose_sandbox("auto"), Limits(seconds=120))
    with (
        Rivals(tmp_path / "rivals", settings) as rivals,
        Workshop(tmp_path / "answers", settings.sandbox, settings.limits) as workshop,
    ):
        workshop.define(cells, "flash_forward")
        verdict = mark_observed(
            question, lambda check, case: _look(question, check, case, workshop, rivals), seed=1
        )
    assert verdict.status == ("failed" if says else "passed"), str(verdict)
    assert says in str(verdict)

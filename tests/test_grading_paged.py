"""Lab 7: an allocator judged by what it does; decode kernels with one place changed are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from right_answers.lab7 import RIGHT_ANSWERS
from solution_answers import changed_answer, solution_answers

from flashcourse.grading import block_allocators, find_question, mark
from flashcourse.grading.block_judge import judge_script
from flashcourse.grading.block_script import Ledger, run_script
from flashcourse.grading.mistakes_paged_decode import RIGHT
from flashcourse.grading.question import Case, Observation
from flashcourse.serving import BlockAllocator

ALLOCATORS = RIGHT_ANSWERS["lab7.block_allocator"]

# The allocator ----------------------------------------------------------------------------------


def judged(allocator, num_blocks, block_size, *steps):
    """What is wrong with an allocator on a script, or None."""
    case = Case("", (num_blocks, block_size, list(steps)))
    return judge_script(case, Observation(run_script(allocator, *case.args)))


A, B, C = range(3)


class OldHandlesAgain(block_allocators.Allocator):
    """A handle is the number of sequences alive: after a free it may be another's."""

    def start(self, table, length):
        handle = len(self.tables)
        self.tables[handle], self.lengths[handle] = table, length
        return handle


def test_handles_that_come_again_are_not_blamed_on_a_shared_dict():
    verdict = mark(find_question("lab7.block_allocator"), OldHandlesAgain, seed=0)
    assert verdict.status == "failed"
    failed = {finding.check: str(finding) for finding in verdict.findings}
    assert failed
    assert "two allocators share nothing" not in failed
    assert not any("for all allocators" in text for text in failed.values())


@st.composite
def scripts(draw):
    """A small pool and a long script, drawn step by step from what can be asked."""
    num_blocks, block_size = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    ledger, steps, count = Ledger(num_blocks, block_size), [], 0
    for _ in range(draw(st.integers(1, 60))):
        alive = sorted(ledger.tables)
        kinds = ["allocate"] + ["append", "append", "fork", "free"] * bool(alive)
        kind = draw(st.sampled_from(kinds + ["stale"] * bool(ledger.freed)))
        if kind == "allocate":
            step = (kind, count, draw(st.integers(1, num_blocks * block_size + 2)))
        elif kind == "stale":
            method = draw(st.sampled_from(["free", "append", "fork", "block_table"]))
            step = (kind, method, draw(st.sampled_from(ledger.freed)))
        else:
            step = (kind, draw(st.sampled_from(alive)), *([count] if kind == "fork" else []))
        count += kind in ("allocate", "fork")
        ledger.do(step)
        assert ledger.num_free >= 0
        steps.append(step)
    return num_blocks, block_size, steps


@settings(deadline=None, max_examples=60)
@given(scripts())
def test_right_allocators_do_what_the_ledger_says(script):
    num_blocks, block_size, steps = script
    for allocator in (solution_answers()["lab7.block_allocator"], *ALLOCATORS, BlockAllocator):
        assert judged(allocator, num_blocks, block_size, *steps) is None


def test_the_course_s_own_allocator_is_no_answer():
    verdict = mark(find_question("lab7.block_allocator"), BlockAllocator, seed=0)
    assert {f.message.split(" (")[0] for f in verdict.findings} == {
        "your answer called the course's library"
    }


@settings(deadline=None, max_examples=60)
@given(scripts())
def test_the_ledger_s_tables_hold_the_tokens(script):
    """Tokens written where the tables say, and copied when append asks for it, can all be read."""
    num_blocks, block_size, steps = script
    ledger, slots, texts = Ledger(num_blocks, block_size), {}, {}

    def write(seq, position):
        block = ledger.tables[seq][position // block_size]
        slots[block, position % block_size] = token = object()
        texts[seq].append(token)

    for step in steps:
        kind, *parts = step
        outcome, copy = ledger.do(step)
        if outcome != "ok":
            continue
        if kind == "allocate":
            texts[parts[0]] = []
            for position in range(parts[1]):
                write(parts[0], position)
        elif kind == "fork":
            texts[parts[1]] = list(texts[parts[0]])
        elif kind == "append":
            if copy:
                for slot in range(block_size):
                    slots[copy[1], slot] = slots.get((copy[0], slot))
            write(parts[0], ledger.lengths[parts[0]] - 1)
        for seq, table in ledger.tables.items():
            read = [slots[table[n // block_size], n % block_size] for n in range(len(texts[seq]))]
            assert read == texts[seq]


def test_messages_name_the_step_and_what_it_does():
    allocator = solution_answers()["lab7.block_allocator"]

    class Sharing(allocator):
        def append(self, seq):
            self.lengths[seq] += 1

    message = judged(Sharing, 4, 3, ("allocate", A, 4), ("fork", A, B), ("append", B))
    assert message == (
        "step 3, `append(b)`: entry 1 of b's table is a block of a: what one writes there, the "
        "other reads"
    )

    class Keeping(allocator):
        def free(self, seq):
            del self.tables[seq]

    message = judged(Keeping, 4, 3, ("allocate", A, 4), ("free", A))
    assert message.startswith("step 2, `free(a)`: num_free is 2, expected 4")


def test_two_living_sequences_with_one_handle():
    class Counted(ALLOCATORS[0]):
        """Its next handle is the number of living sequences."""

        def allocate(self, num_tokens):
            self.handle = len(self.living) if hasattr(self, "living") else 0
            self.living = {**getattr(self, "living", {}), self.handle: super().allocate(num_tokens)}
            return self.handle

        def free(self, seq):
            super().free(self.living.pop(seq))

        def block_table(self, seq):
            return super().block_table(self.living[seq])

    steps = [("allocate", A, 1), ("allocate", B, 1)]
    assert judged(Counted, 4, 3, *steps) is None
    message = judged(Counted, 4, 3, *steps, ("free", A), ("allocate", C, 1))
    assert message.startswith("step 4, `c = allocate(1)`: it returned the handle of b")


def test_another_error_than_the_one_that_was_agreed():
    class Other(ALLOCATORS[0]):
        def allocate(self, num_tokens):
            try:
                return super().allocate(num_tokens)
            except Exception:
                raise RuntimeError from None

        def free(self, seq):
            try:
                super().free(seq)
            except (KeyError, ValueError):
                raise TypeError from None

    message = judged(Other, 1, 2, ("allocate", A, 3))
    assert "it raised RuntimeError, expected OutOfBlocks: it needs 2 blocks, and 1 is" in message
    message = judged(Other, 1, 2, ("allocate", A, 1), ("free", A), ("stale", "free", A))
    assert "it raised TypeError, expected an error: a KeyError or a ValueError" in message


@pytest.mark.parametrize("value", [1.0, None, "3", [1]])
def test_a_num_free_that_is_no_number_is_refused(value):
    allocator = type("Odd", (ALLOCATORS[1],), {"__getattribute__": None})

    def odd(self, name):
        return value if name == "num_free" else object.__getattribute__(self, name)

    allocator.__getattribute__ = odd
    with pytest.raises(TypeError, match="num_free is of type"):
        run_script(allocator, 3, 2, [])


def test_numbers_outside_the_cache_are_no_blocks():
    class FromOne(ALLOCATORS[0]):
        def __init__(self, num_blocks, block_size):
            super().__init__(num_blocks, block_size)
            self.free_blocks = list(range(1, num_blocks + 1))

    message = judged(FromOne, 2, 2, ("allocate", A, 4))
    assert "outside 0 to 1" in message


def test_an_error_that_nobody_asked_for_is_the_learner_s():
    class Empty(ALLOCATORS[0]):
        def allocate(self, num_tokens):
            return [].pop()

    with pytest.raises(IndexError):
        judged(Empty, 2, 2, ("allocate", A, 1))


@pytest.mark.parametrize(
    "log",
    [
        None,
        [],
        [{}],
        [{"outcome": "ok", "returned": None, "num_free": 2, "tables": {0: 3}, "outside": False}],
        [{"outcome": "ok", "returned": None, "num_free": 2, "tables": {0: [[]]}, "outside": False}],
    ],
)
def test_a_forged_log_is_no_answer(log):
    assert judge_script(Case("", (2, 2, [("allocate", A, 1)])), Observation(log))


# The kernel -------------------------------------------------------------------------------------

QUESTION = "lab7.paged_decode"
LENGTH = "length = tl.load(cache_seqlens + batch)"
PAGES = "tl.load(table + keys // PAGE_SIZE * stride_tn, mask=keys < length, other=0)"
EXISTS = "exists = (keys[:, None] < length)"
LOOP = "range(0, length, BLOCK)"
TABLE = "block_table + batch * stride_tb"
STEP = 'o = rescale[:, None] * o + tl.dot(p.to(v_j.dtype), v_j, input_precision="ieee")'
ZEROS = "m = tl.zeros((BLOCK_G,), tl.float32)"
DIVIDED = "o / tl.where(l == 0.0, 1.0, l)[:, None]"


def read_to(end):
    """Keys and values are loaded to ``end``; scores are still masked by the length."""
    return [
        (LENGTH, f"{LENGTH}\n    limit = {end}"),
        (PAGES, PAGES.replace("length", "limit").replace("other=0", "other=-1")),
        (EXISTS, EXISTS.replace("length", "limit")),
        (LOOP, LOOP.replace("length", "limit")),
    ]


def contiguous(name):
    return f"*torch.empty({name}.shape, device='meta').stride()"


# The name of the mistake → the changes of the solution's text.
CHANGES = {
    "the last page is dropped": [(LENGTH, f"{LENGTH} // PAGE_SIZE * PAGE_SIZE")],
    "only the first page": [(LENGTH, f"{LENGTH}\n    length = tl.minimum(length, PAGE_SIZE)")],
    "garbage slots scored": [
        (LENGTH, f"{LENGTH}\n    length = tl.cdiv(length, PAGE_SIZE) * PAGE_SIZE"),
    ],
    "every sequence as long as the first": [(LENGTH, LENGTH.replace(" + batch", ""))],
    "the table is read past its end": read_to(
        "tl.where(length > 0, length // PAGE_SIZE + 1, 0) * PAGE_SIZE"
    ),
    "values of unused slots are read": read_to("tl.cdiv(length, PAGE_SIZE) * PAGE_SIZE"),
    "the newest token is not seen": [(LENGTH, f"{LENGTH} - 1")],
    "one slot too many": [(LENGTH, f"{LENGTH} + 1")],
    "the table is not used": [(PAGES, "keys // PAGE_SIZE")],
    "the first row of the table for all": [(TABLE, "block_table")],
    "the neighbour's row of the table": [
        (TABLE, "block_table + (batch + 1) % tl.num_programs(0) * stride_tb"),
    ],
    "the slot in the page is missing": [("(keys % PAGE_SIZE)", "(keys * 0)")],
    "keys in place of values": [
        ("q, k_pages, v_pages, out, block", "q, k_pages, k_pages, out, block"),
        ("*v_pages.stride()", "*k_pages.stride()"),
    ],
    "KV heads tiled instead of repeated": [
        ("kv_head * group + members[:, None]", "members[:, None] * tl.num_programs(1) + kv_head"),
    ],
    "an empty sequence gives NaN": [(DIVIDED, "o / l[:, None]")],
    "never divided by the sum": [(DIVIDED, "o * 1.0")],
    "scale missing": [("head_dim**-0.5", "1.0")],
    "scale from the padded head_dim": [
        ("head_dim**-0.5", "max(16, triton.next_power_of_2(head_dim))**-0.5"),
    ],
    "the sum is not rescaled": [("l = rescale * l +", "l = l +")],
    "the accumulator is not rescaled": [("rescale[:, None] * o +", "o +")],
    "no max subtraction": [
        ("m_new = tl.maximum(m, tl.max(s, 1))", "m_new = tl.zeros((BLOCK_G,), tl.float32)"),
        ('m = tl.full((BLOCK_G,), float("-inf"), tl.float32)', ZEROS),
    ],
    "strides ignored": [
        ("q.stride(0), q.stride(1), q.stride(3)", "heads_q * head_dim, head_dim, 1"),
        ("*k_pages.stride()", contiguous("k_pages")),
        ("*v_pages.stride()", contiguous("v_pages")),
    ],
    "float16 accumulator": [
        ("o = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)",
         "o = tl.zeros((BLOCK_G, BLOCK_D), out.dtype.element_ty)"),
        (STEP, STEP.replace("o = ", "o = (") + ").to(out.dtype.element_ty)"),
    ],
}  # fmt: skip
SAMPLED = 4  # every so many of them; a thorough run takes all


def kernels():
    for number, name in enumerate(CHANGES):
        yield pytest.param(name, marks=[pytest.mark.thorough] if number % SAMPLED else [])


@pytest.mark.needs_triton
@pytest.mark.parametrize("name", list(kernels()))
def test_a_kernel_with_a_known_mistake_is_named(tmp_path, name):
    answer = changed_answer(tmp_path, QUESTION, "paged_decode", CHANGES[name])
    verdict = mark(find_question(QUESTION), answer, seed=1)
    assert verdict.status == "failed"
    assert {n for f in verdict.findings for n, _ in f.mistakes} == {name}, str(verdict)


def who_did_the_work(answer):
    """The messages of the checks that ask about that, without looking for a name."""
    question = find_question(QUESTION)
    checks = tuple(check for check in question.checks if check.work)
    verdict = mark(replace(question, checks=checks, mistakes=()), answer, seed=1)
    return [finding.message for finding in verdict.findings]


@pytest.mark.needs_triton
@pytest.mark.parametrize(
    "change",
    [
        ("*block_table.stride()", "block_table.stride(0), 1"),
        ("PAGE_SIZE=page_size", "PAGE_SIZE=16"),
    ],
)
def test_what_the_table_looks_like_counts(tmp_path, change):
    """Strides of the table; and a wrong size of pages is an answer that fails, not a crash."""
    name = "any strides" if "stride" in change[0] else "any page size"
    question = find_question(QUESTION)
    checks = tuple(check for check in question.checks if check.name == name)
    answer = changed_answer(tmp_path, QUESTION, "paged_decode", [change])
    assert mark(replace(question, checks=checks, mistakes=()), answer, seed=1).status == "failed"


@pytest.mark.needs_triton
def test_a_loop_of_launches_is_not_one_launch(tmp_path):
    whole = changed_answer(tmp_path, QUESTION, "paged_decode", [])

    def one_launch_a_sequence(q, k_pages, v_pages, block_table, cache_seqlens):
        parts = [
            whole(q[b : b + 1], k_pages, v_pages, block_table[b : b + 1], cache_seqlens[b : b + 1])
            for b in range(len(q))
        ]
        return torch.cat(parts)

    (message,) = who_did_the_work(one_launch_a_sequence)
    assert "8 launches for 8 sequences" in message


@pytest.mark.needs_triton
def test_pages_copied_behind_each_other_are_seen(tmp_path):
    whole = changed_answer(tmp_path, QUESTION, "paged_decode", [])

    def gathering(q, k_pages, v_pages, block_table, cache_seqlens):
        page_size = k_pages.shape[1]
        longest = int(cache_seqlens.max())
        columns = block_table[:, : -(-longest // page_size)].long()
        columns = columns.clamp(0, len(k_pages) - 1).flatten()
        table = torch.arange(len(columns), dtype=torch.int32, device=q.device).view(len(q), -1)
        return whole(q, k_pages[columns], v_pages[columns], table, cache_seqlens)

    (message,) = who_did_the_work(gathering)
    assert "copied behind each other" in message


@pytest.mark.needs_triton
def test_the_right_numbers_from_pytorch_are_no_answer():
    messages = who_did_the_work(RIGHT)
    assert any("the numbers come from a kernel" in message for message in messages), messages


def test_nan_throughout_is_given_no_name():
    def answer(q, *rest):
        return torch.full_like(q, torch.nan)

    verdict = mark(find_question("lab7.paged_decode"), answer, 0)
    assert verdict.status == "failed"
    assert not any(finding.mistakes for finding in verdict.findings)

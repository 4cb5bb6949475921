"""Lab 7: wrong answers that look right, and what the check of each is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from right_answers.lab7 import RIGHT_ANSWERS
from solution_answers import changed_answer, solution_answers

from flashcourse.grading import find_question, mark

# The kernel -------------------------------------------------------------------------------------

QUESTION = "lab7.paged_decode"
INF = 'float("-inf")'
LENGTH = "length = tl.load(cache_seqlens + batch)"
KV_HEAD = "    k += kv_head * stride_kh"
MASKED = "s = tl.where(keys[None, :] < length, s,"
HIGHEST = "m_new = tl.maximum(m, tl.max(s, 1))"
WEIGHTS = "p = tl.exp(s - m_new[:, None])"
START = 'm = tl.full((BLOCK_G,), float("-inf"), tl.float32)'
HIDDEN = 's = tl.where(keys[None, :] < length, s, float("-inf"))'
OF_THE_TILE = 'tl.max(tl.max(tl.where(members[:, None] < group, s, float("-inf")), 1), 0)'
OUT_STRIDES = "out.stride(0), out.stride(1), out.stride(3)"
GROUP = "BLOCK_G=max(16, triton.next_power_of_2(group))"


def exact_tiles_lost(block):
    """A last tile that is exactly full is taken for an empty one."""
    rest = "(keys[None, :] - first_key < length % BLOCK) | (first_key + BLOCK < length)"
    return [
        ("BLOCK=32", f"BLOCK={block}"),
        (MASKED, f"s = tl.where({rest}, s,"),
        (HIGHEST, "m_new = tl.maximum(tl.maximum(m, tl.max(s, 1)), -1e30)"),
    ]


# What is wrong → the check that sees it, and the changes of the solution's text.
KERNELS = {
    **{
        f"a full tile of {block} lost": ("the last page: one slot", exact_tiles_lost(block))
        for block in (16, 32, 64, 128)
    },
    "scores rounded": (
        "float16, with",
        [(MASKED, f"s = s.to(q_i.dtype).to(tl.float32)\n        {MASKED}")],
    ),
    **{
        f"at most {tokens} tokens": (
            "a new token over several pages",
            [(LENGTH, f"{LENGTH}\n    length = tl.minimum(length, {tokens})")],
        )
        for tokens in ("512", "1024", "200 * PAGE_SIZE")
    },
    "out written with q's strides": (
        "any strides",
        [(OUT_STRIDES, OUT_STRIDES.replace("out", "q"))],
    ),
    **{
        f"m starts at {start}": ("scores far below 0", [(START, START.replace(INF, start))])
        for start in ("-400.0", "-1000.0", "-10000.0")
    },
    **{
        f"hidden scores at {fill}": ("scores far below 0", [(HIDDEN, HIDDEN.replace(INF, fill))])
        for fill in ("-400.0", "-10000.0")
    },
    "one maximum for all heads": (
        "scores far below 0",
        [(HIGHEST, HIGHEST.replace("tl.max(s, 1)", OF_THE_TILE))],
    ),
    "the first tile's maximum for all": (
        "scores that rise",
        [(HIGHEST, f"m_new = tl.where(m == {INF}, tl.max(s, 1), m)")],
    ),
    "rescaled by 1/10,000 at the least": (
        "scores that rise",
        [("tl.exp(m - m_new)", "tl.maximum(tl.exp(m - m_new), 1e-4)")],
    ),
    "small weights dropped": (
        "scores that rise",
        [(WEIGHTS, f"{WEIGHTS}\n        p = tl.where(p < 1e-5, 0.0, p)")],
    ),
    "an epsilon": (
        "the last page: one slot",
        [("o / tl.where(l == 0.0, 1.0, l)[:, None]", "o / (l + 1e-5)[:, None]")],
    ),
    "head_dim in steps of 4": (
        "any head_dim",
        [("< length) & (d < HEAD_DIM)", "< length) & (d < HEAD_DIM // 4 * 4)")],
    ),
    "offsets of 32 bits": (
        "a pool of 40,000 pages",
        [("pages = pages.to(tl.int64)[:, None]", "pages = pages[:, None]")],
    ),
    "page numbers of 16 bits": (
        "a pool of 40,000 pages",
        [("pages = pages.to(tl.int64)", "pages = pages.to(tl.int16).to(tl.int64)")],
    ),
    "page numbers of 8 bits": (
        "a new token over several pages",
        [("pages = pages.to(tl.int64)", "pages = (pages & 255).to(tl.int64)")],
    ),
    "pages of at most 128": (
        "any page size",
        [("slots = (keys % PAGE_SIZE)", "slots = (keys % PAGE_SIZE % 128)")],
    ),
    "at most 32 sequences": (
        "every sequence has its own length",
        [("(batch, heads_kv)]", "(min(batch, 32), heads_kv)]"), ("empty_like", "zeros_like")],
    ),
    "at most 4 KV heads": (
        "query heads share",
        [("tl.program_id(1).to", "(tl.program_id(1) % 4).to")],
    ),
    **{
        f"l in float16, tiles of {block}": (
            "float16, and small weights",
            [
                (
                    "        m = m_new",
                    "        l = l.to(q_i.dtype).to(tl.float32)\n        m = m_new",
                ),
                ("BLOCK=32", f"BLOCK={block}"),
            ],
        )
        for block in (16, 32, 128)
    },
    "m in float16": (
        "float16, with",
        [("        m = m_new", "        m = m_new.to(q_i.dtype).to(tl.float32)")],
    ),
    "groups of at most 32": ("query heads share", [(GROUP, "BLOCK_G=32")]),
    "groups of at most 64": ("query heads share", [(GROUP, "BLOCK_G=64")]),
}


def judged(answer, check, seed, question=QUESTION):
    """The verdict of one check alone, without looking for a name."""
    whole = find_question(question)
    checks = tuple(each for each in whole.checks if each.name.startswith(check))
    assert len(checks) == 1
    return mark(replace(whole, checks=checks, mistakes=()), answer, seed)


@pytest.mark.needs_triton
@pytest.mark.parametrize("name", list(KERNELS))
def test_a_wrong_kernel_is_rejected(tmp_path, name):
    check, changes = KERNELS[name]
    answer = changed_answer(tmp_path, QUESTION, "paged_decode", changes)
    for seed in range(2):
        assert judged(answer, check, seed).status == "failed"


@pytest.mark.needs_triton
def test_scores_rounded_to_float16_are_named(tmp_path):
    _, changes = KERNELS["scores rounded"]
    verdict = mark(
        find_question(QUESTION), changed_answer(tmp_path, QUESTION, "paged_decode", changes), 1
    )
    assert {n for f in verdict.findings for n, _ in f.mistakes} == {"scores rounded to float16"}


@pytest.mark.needs_triton
@pytest.mark.parametrize("maximum", [OF_THE_TILE, "tl.max(tl.max(s, 1), 0)"])
def test_one_maximum_for_all_heads_is_named(tmp_path, maximum):
    changes = [(HIGHEST, HIGHEST.replace("tl.max(s, 1)", maximum))]
    answer = changed_answer(tmp_path, QUESTION, "paged_decode", changes)
    verdict = mark(find_question(QUESTION), answer, 1)
    names = {n for f in verdict.findings for n, _ in f.mistakes}
    assert names == {"one maximum for the whole tile"}


@pytest.mark.needs_triton
def test_a_query_scaled_in_float16_is_within_rounding(tmp_path):
    """FlashAttention's kernels do so; what the scores have in common cancels."""
    changes = [
        (KV_HEAD, f"    q_i = (q_i * scale).to(q_i.dtype)\n{KV_HEAD}"),
        ('input_precision="ieee") * scale', 'input_precision="ieee")'),
    ]
    answer = changed_answer(tmp_path, QUESTION, "paged_decode", changes)
    for seed in range(3):
        assert judged(answer, "float16, with", seed).passed


@pytest.mark.needs_triton
def test_results_in_one_buffer_are_rejected():
    right, buffers = solution_answers()[QUESTION], {}

    def answer(q, *rest):
        return buffers.setdefault(q.shape, torch.empty_like(q)).copy_(right(q, *rest))

    verdict = judged(answer, "every call returns new tensors", 0)
    assert "a second call with other numbers changed" in verdict.findings[0].message


# The allocator ----------------------------------------------------------------------------------


def test_two_allocators_that_share_a_dict_are_rejected():
    solution = solution_answers()["lab7.block_allocator"]

    class Sharing(solution):
        kept = ({}, {})

        def __init__(self, num_blocks, block_size):
            super().__init__(num_blocks, block_size)
            self.tables, self.lengths = self.kept

    verdict = mark(find_question("lab7.block_allocator"), Sharing, 0)
    (finding,) = verdict.findings
    assert finding.check == "two allocators share nothing"
    assert "made in __init__" in finding.message


def test_two_allocators_whose_free_blocks_are_one_list_are_rejected():
    solution = solution_answers()["lab7.block_allocator"]
    unused = []

    class Sharing(solution):
        def __init__(self, num_blocks, block_size):
            super().__init__(num_blocks, block_size)
            unused[:] = self.unused
            self.unused = unused

    verdict = mark(find_question("lab7.block_allocator"), Sharing, 0)
    assert {finding.check for finding in verdict.findings} == {"two allocators share nothing"}


def test_counters_of_handles_may_be_common_to_all():
    from itertools import count

    solution = solution_answers()["lab7.block_allocator"]
    handles = count()

    class Counting(solution):
        def _begin(self, table, length):
            self.next_handle = next(handles)
            return super()._begin(table, length)

    for allocator in (Counting, *RIGHT_ANSWERS["lab7.block_allocator"]):
        assert mark(find_question("lab7.block_allocator"), allocator, 0).passed


# The bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        (lambda n, h, d, size: 2 * n * h * d * 4, "always 4 bytes a number"),
        (lambda n, h, d, size: 2 * n * h * d * 2, "always 2 bytes a number"),
        (lambda n, h, d, size: 2 * n * h * d * size // 8, "divided by 8"),
        (lambda n, h, d, size: 2 * n * h * d * (size // 8), "divided by 8"),
        (lambda n, h, d, size: n * h * d * size, "keys or values alone"),
        (lambda n, h, d, size: 2 * n * h * d, "numbers instead of bytes"),
    ],
)
def test_a_wrong_number_of_bytes_has_one_name(answer, name):
    for seed in range(5):
        verdict = mark(find_question("lab7.kv_bytes_per_token"), answer, seed)
        assert {n for f in verdict.findings for n, _ in f.mistakes} == {name}

"""Lab 6: kernels with one place changed, as learners hand them in, are rejected and named."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise

import pytest
from solution_answers import changed_answer

from flashcourse.grading import find_question, mark

pytestmark = pytest.mark.needs_triton
QUESTION = "lab6.flash_varlen"
# One interpreted verdict takes seconds: FLASHCOURSE_SEEDS=5 looks at more than one seed.
SEEDS = range(1, 1 + int(os.environ.get("FLASHCOURSE_SEEDS", "1")))
LOAD_BEGIN = "tl.load(cu_seqlens + tl.program_id(2))"
LOAD_END = "tl.load(cu_seqlens + tl.program_id(2) + 1)"
TOTAL = "tl.load(cu_seqlens + tl.num_programs(2))"
LENGTH = f"seq = ({LOAD_END} - begin).to(tl.int32)"
EXISTS, VISIBLE = "exists = (", "s = tl.where("
OF_THE_ROW = "(keys[COLUMN] >= -begin) & "
START = 'm = tl.full((BLOCK,), float("-inf"), tl.float32)'
HIDE = 's, float("-inf"))'
LOOPS_OVER = "tl.minimum(first_query + BLOCK, seq)"
NEW_OUT = "            m = m_new\n"
PRODUCT = '            s = tl.dot(q_i, tl.trans(k_j), input_precision="ieee") * scale\n'
FULL_TILE = "(keys[None, :] < seq)"
NOT_FULL = "((keys[None, :] - first_key < seq % BLOCK) | (first_key + BLOCK < seq))"
ZEROS = ("torch.empty_like", "torch.zeros_like")
# The name of the mistake → the changes of the solution's text.
CHANGES = {
    "scale missing": [("head_dim**-0.5", "1.0")],
    "the sum is not rescaled": [("l = rescale * l +", "l = l +")],
    "neighbours visible": [
        ("range(0, tl.minimum", "range(-begin.to(tl.int32), tl.minimum"),
        (" " + EXISTS, " " + EXISTS[:-1] + OF_THE_ROW.replace("COLUMN", ":, None") + "("),
        (VISIBLE, VISIBLE + OF_THE_ROW.replace("COLUMN", "None, :")),
    ],
    "cu_seqlens shifted by one": [
        (LOAD_BEGIN, f"({LOAD_BEGIN} + tl.where(tl.program_id(2) > 0, 1, 0))"),
        (LOAD_END, f"tl.minimum({LOAD_END} + 1, {TOTAL})"),
    ],
    "not causal inside a document": [
        ("(keys[None, :] <= rows[:, None]) & ", ""),
        (LOOPS_OVER, "seq"),
    ],
    "KV heads tiled instead of repeated": [
        ("head // group * stride", "head % (tl.num_programs(1) // group) * stride"),
    ],
    "only the first tile of each document": [("triton.cdiv(max_seqlen, block)", "1"), ZEROS],
    "strides ignored": [
        ("*q.stride()", "heads * head_dim, head_dim, 1"),
        ("*k.stride()", "k.shape[1] * head_dim, head_dim, 1"),
        ("*v.stride()", "k.shape[1] * head_dim, head_dim, 1"),
    ],
    "v read with k's strides": [("*v.stride()", "*k.stride()")],
    "a full last tile is dropped": [(FULL_TILE, NOT_FULL)],
    "m starts at 0": [(START, "m = tl.zeros((BLOCK,), tl.float32)")],
    "one maximum for the whole tile": [("tl.max(s, 1)", "tl.max(tl.max(s, 1), 0)")],
    "m starts at a number that scores can lie below": [(START, START.replace('"-inf"', "-50.0"))],
    "hidden scores filled with a finite number": [(HIDE, "s, -100.0)")],
    "float16 accumulator": [
        (NEW_OUT, "            o = o.to(v_j.dtype).to(tl.float32)\n" + NEW_OUT)
    ],
    "scores rounded to float16": [
        (PRODUCT, PRODUCT + "            s = s.to(q_i.dtype).to(tl.float32)\n")
    ],
}
# Wrong in ways that are not worth a name of their own, or the same at other numbers.
REJECTED = {
    "a full last tile of 64": [(FULL_TILE, NOT_FULL), ("block = 32", "block = 64")],
    "a full last tile of 16": [(FULL_TILE, NOT_FULL), ("block = 32", "block = 16")],
    "m starts at −1,000": [(START, START.replace('float("-inf")', "-1000.0"))],
    "hidden scores at −10,000": [(HIDE, "s, -10000.0)")],
    "float16 scores before the scale": [
        (PRODUCT, PRODUCT.replace(" * scale", ".to(q_i.dtype).to(tl.float32) * scale"))
    ],
    **{
        f"the sum in float16, tiles of {block}": [
            (NEW_OUT, "            l = l.to(q_i.dtype).to(tl.float32)\n" + NEW_OUT),
            ("block = 32", f"block = {block}"),
        ]
        for block in (16, 32, 128)
    },
    "programs for 1,024 tokens": [("cdiv(max_seqlen,", "cdiv(min(max_seqlen, 1024),"), ZEROS],
    "1,024 tokens a document": [(LENGTH, f"{LENGTH}\n    seq = tl.minimum(seq, 1024)"), ZEROS],
    "1,024 keys a document": [(LOOPS_OVER, f"tl.minimum(1024, {LOOPS_OVER})")],
    "64 documents": [("cu_seqlens.numel() - 1)", "min(cu_seqlens.numel() - 1, 64))"), ZEROS],
    "small weights dropped": [
        (
            "            rescale =",
            "            p = tl.where(p < 1e-6, 0.0, p)\n            rescale =",
        )
    ],
    "float16 accumulator for all": [
        (NEW_OUT, "            o = o.to(tl.float16).to(tl.float32)\n" + NEW_OUT)
    ],
    "eight documents": [("cu_seqlens.numel() - 1)", "min(cu_seqlens.numel() - 1, 8))"), ZEROS],
    "the first tile's maximum for all": [
        ("tl.maximum(m, tl.max(s, 1))", 'tl.where(m == float("-inf"), tl.max(s, 1), m)'),
    ],
    "rescaled by 1/10,000 at the least": [
        ("tl.exp(m - m_new)", "tl.maximum(tl.exp(m - m_new), 1e-4)"),
    ],
    "an epsilon": [("o / l[:, None]", "o / (l[:, None] + 1e-5)")],
    "head_dim in steps of 4": [
        (
            "(keys[:, None] < seq) & (d < HEAD_DIM)",
            "(keys[:, None] < seq) & (d < HEAD_DIM // 4 * 4)",
        ),
    ],
    "no KV head above 1": [
        ("head // group * stride_kh", "tl.minimum(head // group, 1) * stride_kh")
    ],
    "values of other documents are read": [
        ("exists = (keys[:, None] < seq)", f"exists = (begin + keys[:, None] < {TOTAL})"),
    ],
    "m in float16": [(NEW_OUT, "            m = m_new.to(q_i.dtype).to(tl.float32)\n")],
    "512 tokens a row": [
        (f"begin = {LOAD_BEGIN}", f"begin = tl.minimum({LOAD_BEGIN}, 512)"),
    ],
    "256 keys a document": [(LOOPS_OVER, f"tl.minimum(256, {LOOPS_OVER})")],
    "512 keys a document": [(LOOPS_OVER, f"tl.minimum(512, {LOOPS_OVER})")],
    "out written with q's strides": [("*out.stride()", "*q.stride()")],
    "a buffer for every shape": [
        ("def flash_varlen", "BUFFERS = {}\n\n\ndef flash_varlen"),
        ("torch.empty_like(q)", "BUFFERS.setdefault((q.shape, q.dtype), torch.empty_like(q))"),
    ],
}
# The same numbers, up to rounding.
ACCEPTED = {
    "tiles of 16": [("block = 32", "block = 16")],
    "tiles of 128": [("block = 32", "block = 128")],
    "a maximum that moves by 8 or not at all": [
        (
            "m_new = tl.maximum(m, tl.max(s, 1))",
            "m_new = tl.maximum(m, tl.max(s, 1))\n"
            "            m_new = tl.where(m_new - m > 8.0, m_new, m)",
        ),
    ],
    "base 2, and q scaled before the product": [
        (
            "        m = tl.full",
            "        q_i = (q_i * scale * 1.44269504).to(q_i.dtype)\n        m = tl.full",
        ),
        (PRODUCT, PRODUCT.replace(" * scale", "")),
        ("tl.exp(", "tl.exp2("),
    ],
}


def named(verdict):
    return {name for finding in verdict.findings for name, _ in finding.mistakes}


@pytest.mark.parametrize("name", CHANGES)
def test_a_kernel_with_a_known_mistake_is_named(tmp_path, name):
    answer = changed_answer(tmp_path, QUESTION, "flash_varlen", CHANGES[name])
    for seed in SEEDS:
        verdict = mark(find_question(QUESTION), answer, seed)
        assert verdict.status == "failed"
        assert named(verdict) == {name}, str(verdict)


@pytest.mark.parametrize("name", REJECTED)
def test_a_kernel_that_is_right_on_most_inputs_is_rejected(tmp_path, name):
    answer = changed_answer(tmp_path, QUESTION, "flash_varlen", REJECTED[name])
    question = replace(find_question(QUESTION), mistakes=())  # to look for a name takes seconds
    alone = [replace(question, checks=(check,)) for check in question.checks]
    for seed in SEEDS:  # one check that fails is enough
        failed = any(mark(part, answer, seed).status == "failed" for part in alone)
        assert failed, f"seed {seed}: accepted"


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_kernel_with_other_tiles_or_another_base_is_right(tmp_path, name):
    answer = changed_answer(tmp_path, QUESTION, "flash_varlen", ACCEPTED[name])
    for seed in SEEDS:
        verdict = mark(find_question(QUESTION), answer, seed)
        assert verdict.passed, str(verdict)


def test_a_loop_of_launches_is_not_one_launch(tmp_path):
    whole = changed_answer(tmp_path, QUESTION, "flash_varlen", [])

    def one_launch_a_document(q, k, v, cu_seqlens, max_seqlen):
        out = q.new_zeros(q.shape)
        bounds = cu_seqlens.tolist()
        for first, last in pairwise(bounds):
            ends = cu_seqlens.new_tensor([0, last - first])
            out[first:last] = whole(q[first:last], k[first:last], v[first:last], ends, max_seqlen)
        return out

    verdict = mark(find_question(QUESTION), one_launch_a_document, seed=1)
    (finding,) = verdict.findings
    assert "8 launches for 8 documents" in finding.message
    assert not finding.mistakes

"""Lab 6: kernels with one place changed, as learners hand them in, are rejected and named."""

from __future__ import annotations

from itertools import pairwise

import pytest
from solution_answers import changed_answer

from flashcourse.grading import find_question, mark

pytestmark = pytest.mark.needs_triton
QUESTION = "lab6.flash_varlen"
LOAD_BEGIN = "tl.load(cu_seqlens + tl.program_id(2))"
LOAD_END = "tl.load(cu_seqlens + tl.program_id(2) + 1)"
TOTAL = "tl.load(cu_seqlens + tl.num_programs(2))"
EXISTS, VISIBLE = "exists = (", "s = tl.where("
OF_THE_ROW = "(keys[COLUMN] >= -begin) & "
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
        ("tl.minimum(first_query + BLOCK, seq)", "seq"),
    ],
    "KV heads tiled instead of repeated": [
        ("head // group * stride", "head % (tl.num_programs(1) // group) * stride"),
    ],
    "only the first tile of each document": [
        ("triton.cdiv(max_seqlen, block)", "1"),
        ("torch.empty_like", "torch.zeros_like"),
    ],
    "strides ignored": [
        ("*q.stride()", "heads * head_dim, head_dim, 1"),
        ("*k.stride()", "k.shape[1] * head_dim, head_dim, 1"),
        ("*v.stride()", "k.shape[1] * head_dim, head_dim, 1"),
    ],
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_kernel_with_a_known_mistake_is_named(tmp_path, name):
    verdict = mark(
        find_question(QUESTION),
        changed_answer(tmp_path, QUESTION, "flash_varlen", CHANGES[name]),
        seed=1,
    )
    assert verdict.status == "failed"
    assert {n for f in verdict.findings for n, _ in f.mistakes} == {name}, str(verdict)


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

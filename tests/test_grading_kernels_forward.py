"""Lab 4: wrong kernels that look right. Each is the solution with one place changed."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from solution_answers import changed_answer

from flashcourse.grading import find_question, mark

pytestmark = pytest.mark.needs_triton

# One interpreted verdict takes seconds: FLASHCOURSE_SEEDS=5 looks at more than one seed.
SEEDS = int(os.environ.get("FLASHCOURSE_SEEDS", "1"))

STOP = "tl.maximum(first_query + BLOCK_Q + seq_k - seq_q, 0)"
VISIBLE = "visible = keys[None, :] < seq_k\n"
TILES = "block_q, block_k = 64, 64  # the"
DEFAULT = "def flash_forward(q, k, v, is_causal=False)"
HIGHEST = "m_new = tl.maximum(m, tl.max(s, 1))"
WEIGHTS = "p = tl.exp2(s - pivot[:, None])"
SUM = "l = rescale * l + tl.sum(p, 1)"
CACHED = (
    "    {name} = {make}\n",
    "    cache = flash_forward.__dict__.setdefault('cache', {{}})\n"
    "    if q.shape not in cache:\n        cache[q.shape] = {make}\n"
    "    {name} = cache[q.shape]\n",
)
OUT = {"name": "out", "make": "torch.empty(q.shape, dtype=q.dtype, device=q.device)"}
LSE = {"name": "lse", "make": "torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)"}


def one_key_short(block_q, block_k):
    return [
        (STOP, STOP.replace("BLOCK_Q +", "BLOCK_Q - 1 +")),
        (TILES, f"block_q, block_k = {block_q}, {block_k}  # the"),
    ]


# What is wrong → (the changes, the name by which it is called or None).
WRONG_FORWARD = {
    "v with k's strides": ([("*v.stride(),", "*k.stride(),")], "v read with k's strides"),
    **{
        f"one key short, tiles {block_q} × {block_k}": (
            one_key_short(block_q, block_k),
            "the causal loop stops a key early",
        )
        for block_q, block_k in ((64, 64), (16, 128), (128, 32))
    },
    "wrong for whole tiles of 128": (
        [
            (
                VISIBLE,
                "visible = (keys[None, :] - first_key < seq_k % BLOCK_K)"
                " | (first_key + BLOCK_K < seq_k)\n",
            ),
            (TILES, "block_q, block_k = 64, 128  # the"),
        ],
        None,
    ),
    "scores in float16": (
        [("        visible = keys[None", "        s = s.to(q_i.dtype).to(tl.float32)\n"
          "        visible = keys[None")],
        "scores in float16",
    ),
    **{
        f"one maximum for the tile, {side} × {side}": (
            [("tl.max(s, 1)", "tl.max(tl.max(s, 1), 0)"),
             (TILES, f"block_q, block_k = {side}, {side}  # the")],
            "one maximum for the whole tile",
        )
        for side in (16, 64)
    },
    "the sum in float16": (
        [(SUM, SUM + "\n        l = l.to(q_i.dtype).to(tl.float32)")], "the sum in float16",
    ),
    "lse through float16": (
        [("row_of_out, lse_i", "row_of_out, lse_i.to(q_i.dtype).to(tl.float32)")],
        "lse rounded to float16",
    ),
    "the first tile's maximum for all": (
        [(HIGHEST, 'm_new = tl.where(m == float("-inf"), tl.max(s, 1), m)')], None,
    ),
    "rescaled by 1/10,000 at the least": (
        [("tl.exp2(m - pivot)", "tl.maximum(tl.exp2(m - pivot), 1e-4)")], None,
    ),
    "small weights dropped": (
        [(WEIGHTS, WEIGHTS + "\n        p = tl.where(p < 1e-5, 0.0, p)")], None,
    ),
    "an epsilon of a millionth": ([("o / safe_l[:, None]", "o / (l[:, None] + 1e-6)")], None),
    **{
        f"head_dim in steps of {step}": (
            [("(d < HEAD_DIM)\n        k_j", f"(d < HEAD_DIM // {step} * {step})\n        k_j")],
            None,
        )
        for step in (2, 8)
    },
    "m in float16": (
        [("        m = m_new", "        m = m_new.to(q_i.dtype).to(tl.float32)")], None,
    ),
    "a tile that reaches one key too far is not masked": (
        [("tl.where(visible, s",
          "tl.where(visible | (first_key + BLOCK_K <= first_query + seq_k - seq_q + 2), s")],
        None,
    ),
    "groups of at most 8": (
        [("heads // k.shape[1], seq_q", "min(8, heads // k.shape[1]), seq_q")], None,
    ),
    "no more than 320 keys": ([("stop = seq_k\n", "stop = tl.minimum(seq_k, 320)\n")], None),
    "no more than 1,024 queries": (
        [("(rows[:, None] < seq_q)", "(rows[:, None] < tl.minimum(seq_q, 1024))"),
         ("torch.empty(q.shape,", "torch.zeros(q.shape,")],
        None,
    ),
    "no more than 512 keys if causal": (
        [("stop = tl.minimum(seq_k,", "stop = tl.minimum(tl.minimum(seq_k, 512),")], None,
    ),
    "float16 heads of 64 at the most": (
        [("HEAD_DIM=head_dim", "HEAD_DIM=min(head_dim, 64 if q.dtype == torch.float16 else 128)")],
        None,
    ),
    "0 / 0 in float16 alone": (
        [("safe_l = tl.where(l == 0.0,",
          "safe_l = tl.where((l == 0.0) & (q_i.dtype == tl.float32),")],
        None,
    ),
    "one tile of 512 keys": (
        [("range(0, stop, BLOCK_K)", "range(0, 1)"), (TILES, "block_q, block_k = 64, 512  # the"),
         ("first_key + tl.arange", "first_key * BLOCK_K + tl.arange")],
        None,
    ),
    "batch modulo 2": (
        [("// heads).to(tl.int64)\n    q", "// heads % 2).to(tl.int64)\n    q")], None,
    ),
    "no KV head above 1": ([("head // group", "tl.minimum(head // group, 1)")], None),
    "MQA read as MHA": (
        [("head // group", "tl.where(group == heads, head, head // group)")], None,
    ),
    "causal by default": (
        [(DEFAULT, DEFAULT.replace("False", "True"))], "causal if nothing is said",
    ),
    "out in q's layout": (
        [
            (OUT["make"], "torch.empty_like(q)"),
            ("(stride_qn, stride_qd)", "(stride_qn, stride_qd)"),
            ("out + row_of_out[:, None] * HEAD_DIM + d,",
             "out + batch * stride_qb + head * stride_qh + rows[:, None] * stride_qn"
             " + d * stride_qd,"),
        ][::2],
        None,
    ),
    "out cached": ([(CACHED[0].format(**OUT), CACHED[1].format(**OUT))], None),
    "lse cached": ([(CACHED[0].format(**LSE), CACHED[1].format(**LSE))], None),
}  # fmt: skip

ROW_BLOCK = "block = triton.next_power_of_2(columns)"
NEW = "    p = torch.empty(x.shape, dtype=x.dtype, device=x.device)\n"
WRONG_SOFTMAX = {
    "a block of 1,024": [
        (ROW_BLOCK, "block = min(triton.next_power_of_2(columns), 1024)"),
        ("torch.empty(x.shape", "torch.zeros(x.shape"),
    ],
    **{
        f"no more than {rows} rows": [
            ("[(rows,)]", f"[(min(rows, {rows}),)]"),
            ("torch.empty(x.shape", "torch.zeros(x.shape"),
        ]
        for rows in (8, 64, 1024)
    },
    "the maximum of the first 1,024": [
        ("tl.max(s, 0)", 'tl.max(tl.where(j < 1024, s, float("-inf")), 0)')
    ],
    "an epsilon of a millionth": [("e / tl.sum(e, 0)", "e / (tl.sum(e, 0) + 1e-6)")],
    "a sum of 2,048 at the most": [("e / tl.sum(e, 0)", "e / tl.minimum(tl.sum(e, 0), 2048.0)")],
    "wide rows are flat": [
        ("    return p\n", "    return p if columns <= 1024 else torch.full_like(p, 1 / columns)\n")
    ],
    "exponentials in float16": [
        ("e = tl.exp(s - tl.max(s, 0))", "e = tl.exp(s - tl.max(s, 0)).to(p.dtype.element_ty)")
    ],
    "p cached": [
        (
            NEW,
            "    cache = row_softmax.__dict__.setdefault('cache', {})\n"
            "    if x.shape not in cache:\n        cache[x.shape] = torch.empty(\n"
            "            x.shape, dtype=x.dtype, device=x.device)\n"
            "    p = cache[x.shape]\n",
        )
    ],
    "stored with x's strides": [
        ("torch.empty(x.shape, dtype=x.dtype, device=x.device)", "torch.empty_like(x)"),
        ("p + row * columns + j", "p + row * stride_row + j * stride_column"),
    ],
}  # fmt: skip


def named(verdict):
    return {name for finding in verdict.findings for name, _ in finding.mistakes}


def rejected(question_id, answer, name=None):
    """The last verdict; where no name is expected none is looked for, which takes seconds.

    Nor are the checks behind the one that fails: the verdict is that of its check alone.
    """
    question = find_question(question_id)
    for seed in range(SEEDS):
        if name is None:
            for check in question.checks:
                alone = dataclasses.replace(question, checks=(check,), mistakes=())
                verdict = mark(alone, answer, seed)
                if verdict.status == "failed":
                    break
        else:
            verdict = mark(question, answer, seed)
        assert verdict.status == "failed", f"seed {seed}: accepted"
        assert all(finding.message for finding in verdict.findings)
        assert named(verdict) == ({name} if name else set()), str(verdict)
    return verdict


@pytest.mark.parametrize("what", WRONG_FORWARD)
def test_a_wrong_forward_kernel_is_rejected(what, tmp_path):
    changes, name = WRONG_FORWARD[what]
    answer = changed_answer(tmp_path, "lab4.flash_forward", "flash_forward", changes)
    rejected("lab4.flash_forward", answer, name)


@pytest.mark.parametrize("what", WRONG_SOFTMAX)
def test_a_wrong_softmax_is_rejected(what, tmp_path):
    answer = changed_answer(tmp_path, "lab4.row_softmax", "row_softmax", WRONG_SOFTMAX[what])
    rejected("lab4.row_softmax", answer)


LOADED = "mask=row_exists, other=0.0)\n"
RIGHT = {
    "q scaled first, for base 2, and rounded": (
        "lab4.flash_forward",
        [
            (LOADED, f"{LOADED}    q_i = (q_i.to(tl.float32) * scale_log2).to(q_i.dtype)\n"),
            ('input_precision="ieee") * scale_log2', 'input_precision="ieee")'),
        ],
    ),
    "tiles of 16": ("lab4.flash_forward", [(TILES, "block_q, block_k = 16, 16  # the")]),
    # tl.max makes float32 of float16, and so all that follows is float32.
    "no cast": ("lab4.row_softmax", [('float("-inf")).to(tl.float32)', 'float("-inf"))')]),
    "a maximum that moves by 8 or not at all": (
        "lab4.flash_forward",
        [(HIGHEST, HIGHEST + "\n        m_new = tl.where(m_new - m > 8.0, m_new, m)")],
    ),
    "base 2, through the logarithm of the sum": (
        "lab4.row_softmax",
        [("e = tl.exp(s - tl.max(s, 0))",
          "t = s * 1.4426950408889634\n    top = tl.max(t, 0)\n"
          "    e = tl.exp2(t - (top + tl.log2(tl.sum(tl.exp2(t - top), 0))))"),
         ("e / tl.sum(e, 0)", "e")],
    ),
    "a product with 1 / sum": (
        "lab4.row_softmax", [("e / tl.sum(e, 0)", "e * (1.0 / tl.sum(e, 0))")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", RIGHT)
def test_a_right_kernel_written_otherwise_passes(what, tmp_path):
    question, changes = RIGHT[what]
    answer = changed_answer(tmp_path, question, question.split(".")[1], changes)
    verdict = mark(find_question(question), answer, seed=0)
    assert verdict.passed, str(verdict)


def test_a_maximum_over_hidden_keys_is_seen():
    """The largest score of a row is taken before the mask, which comes behind the exponential."""

    def answer(q, k, v, is_causal=False):
        group = q.shape[1] // k.shape[1]
        keys, values = (t.float().repeat_interleave(group, 1) for t in (k, v))
        s = q.float() @ keys.mT * q.shape[-1] ** -0.5
        m = s.amax(-1, keepdim=True)
        p = torch.exp(s - m)
        if is_causal:
            p = p.tril(k.shape[2] - q.shape[2])
        total = p.sum(-1, keepdim=True)
        out = p @ values / torch.where(total == 0, 1.0, total)
        return out.to(q.dtype), (m + total.log())[..., 0]

    verdict = mark(find_question("lab4.flash_forward"), answer, seed=0)
    assert "hidden keys stay hidden, whatever the scores" not in verdict.checks
    assert "causal: no query sees a later key" in verdict.checks

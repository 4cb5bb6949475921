"""Lab 5: wrong kernels and functions that look right. Each is the solution, changed in a place."""

from __future__ import annotations

import nbformat
import pytest
import torch
from solution_answers import SOLUTIONS, changed_answer
from test_grading_kernels_forward import SEEDS, named, rejected

from flashcourse.grading import find_question, mark

pytestmark = pytest.mark.needs_triton

STOP = "tl.maximum(first_query + BLOCK_Q + seq_k - seq_q, 0)"
BEGIN = "tl.maximum(first_key - (seq_k - seq_q), 0)"
DK = 'dk_j = tl.dot(dst.to(q_i.dtype), q_i, dk_j, input_precision="ieee")'
DQ = 'dq_i = tl.dot(ds.to(k_j.dtype), k_j, dq_i, input_precision="ieee")'
DP = 'tl.dot(do_i, tl.trans(v_j), input_precision="ieee")'
DPT = 'tl.dot(v_j, tl.trans(do_i), input_precision="ieee")'
S = 'tl.dot(q_i, tl.trans(k_j), input_precision="ieee") * scale'
ST = 'tl.dot(k_j, tl.trans(q_i), input_precision="ieee") * scale'
LSE = "tl.load(lse + row, mask=rows < seq_q, other=0.0)"
NO_KEY = 'lse_i = tl.where(lse_i == float("-inf"), 0.0, lse_i)'
SHAPE = "    batch, heads, seq_q, head_dim = q.shape\n"
DELTA = "delta = (do.float() * out.float()).sum(-1)"
SIZES = '"BLOCK_Q": block if q.is_cuda else 64, "BLOCK_K": block if q.is_cuda else 64,'
DEFAULT = "def flash_backward(q, k, v, out, lse, do, is_causal=False)"
HALF = ".to(q.dtype.element_ty).to(tl.float32)"


def tiles(block_q, block_k):
    return (SIZES, f'"BLOCK_Q": {block_q}, "BLOCK_K": {block_k},')


def cached(name):
    """The gradient of this name is allocated once for all calls of a shape."""
    new = "(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))\n"
    line = (
        f"    cache = globals().setdefault('CACHE', {{}}).setdefault((q.shape, k.shape), {name})\n"
    )
    return [(new, f"{new}{line}    {name} = cache\n")]


def changed_backward(folder, changes):
    """The solution of flash_backward, changed, with the helper that its notebook gives."""
    (path,) = SOLUTIONS.glob("lab5_*.ipynb")
    source = next(
        cell.source
        for cell in nbformat.read(path, as_version=4).cells
        if "def given_load(" in cell.source
    )
    given = source[: source.index("\n\n\n")]
    label = "# lab: lab5-flash_backward\n"
    changes = [(label, f"{label}{given}\n\n\n"), *changes]
    return changed_answer(folder, "lab5.flash_backward", "flash_backward", changes)


# What is wrong → (the changes, the name by which it is called or None).
WRONG_BACKWARD = {
    "v with k's strides": ([("*v.stride(), *do", "*k.stride(), *do")], "v read with k's strides"),
    **{
        f"keys stop one short, tiles {q} × {k}": (
            [(STOP, STOP.replace("BLOCK_Q +", "BLOCK_Q - 1 +")), tiles(q, k)],
            "the causal loop over keys stops a key early",
        )
        for q, k in ((64, 64), (16, 128))
    },
    **{
        f"queries begin one late, tiles {q} × {k}": (
            [(BEGIN, BEGIN.replace(", 0", " + 1, 0")), tiles(q, k)],
            "the causal loop over queries begins a query late",
        )
        for q, k in ((64, 64), (128, 32))
    },
    "dk summed in float16": ([(DK, DK + HALF)], "float16 accumulator"),
    "dq summed in float16": ([(DQ, DQ + HALF)], "float16 accumulator"),
    "delta in float16": ([(DELTA, "delta = (do * out).sum(-1).float()")], "delta in float16"),
    "dP in float16 for dk": ([(DPT, DPT + HALF)], "dP in float16"),
    "dP in float16 for dq": ([(DP, DP + HALF)], "dP in float16"),
    "scores in float16 for dk": ([(ST, f"({ST}){HALF}")], "scores in float16"),
    "scores in float16 for dq": ([(S, f"({S}){HALF}")], "scores in float16"),
    "lse in float16 for dq": ([(LSE, LSE + HALF)], "lse in float16"),
    "delta stored in float16": ([(DELTA, f"{DELTA}.to(q.dtype).float()")], None),
    "do clipped": ([(SHAPE, f"    do = do.clamp(-10, 10)\n{SHAPE}")], None),
    "do clipped in place": (
        [(SHAPE, f"    do.clamp_(-10, 10) if 0 not in do.stride() else None\n{SHAPE}")], None,
    ),
    "no more than 512 queries": (
        [("in range(begin, seq_q, BLOCK_Q)", "in range(begin, tl.minimum(seq_q, 512), BLOCK_Q)")],
        None,
    ),
    "no more than 1,024 keys": ([("stop = seq_k\n", "stop = tl.minimum(seq_k, 1024)\n")], None),
    "no more than 1,024 queries": (
        [("in range(begin, seq_q, BLOCK_Q)", "in range(begin, tl.minimum(seq_q, 1024), BLOCK_Q)")],
        None,
    ),
    "no more than 512 keys if causal": (
        [("stop = tl.minimum(seq_k,", "stop = tl.minimum(tl.minimum(seq_k, 512),")], None,
    ),
    "groups of at most 3": (
        [("in range(0, group)", "in range(0, tl.minimum(group, 3))")], None,
    ),
    **{
        f"lse from {lowest} on": ([(NO_KEY, f"lse_i = tl.maximum({NO_KEY[8:]}, {lowest})")], None)
        for lowest in ("-1000.0", "-10000.0")
    },
    "lse below −10,000 taken for −inf": (
        [('lse_i == float("-inf")', "lse_i < -10000.0")], None,
    ),
    "−inf − (−inf) in float16 alone": (
        [('(lse_i == float("-inf"),', '((lse_i == float("-inf")) & (q_i.dtype == tl.float32),')],
        None,
    ),
    "KV head modulo 2": (
        [("kv_head = (tl.program_id(0) // tiles % heads_kv)",
          "kv_head = (tl.program_id(0) // tiles % heads_kv % 2)")],
        None,
    ),
    "batch modulo 2": (
        [("// tiles // heads).to(tl.int64)", "// tiles // heads % 2).to(tl.int64)")], None,
    ),
    "causal by default": (
        [(DEFAULT, DEFAULT.replace("False", "True"))], "causal if nothing is said",
    ),
    "dq cached": (cached("dq"), None),
    "dk cached": (cached("dk"), None),
    "dv cached": (cached("dv"), None),
    "dq stored with q's strides": (
        [
            ("(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))",
             "(torch.empty_like(t) for t in (q, k, v))"),
            ("dq + row[:, None] * HEAD_DIM + d[None, :]",
             "dq + batch * stride_qb + head * stride_qh + rows[:, None] * stride_qn"
             " + d[None, :] * stride_qd"),
            # The others by their strides too, or the layouts would not fit.
            ("dk + at", "dk + batch * stride_kb + kv_head * stride_kh + keys[:, None] * stride_kn"
             " + d[None, :] * stride_kd"),
            ("dv + at", "dv + batch * stride_vb + kv_head * stride_vh + keys[:, None] * stride_vn"
             " + d[None, :] * stride_vd"),
        ],
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_BACKWARD)
def test_wrong_backward_kernels_are_rejected(what, tmp_path):
    changes, name = WRONG_BACKWARD[what]
    answer = changed_backward(tmp_path, changes)
    rejected("lab5.flash_backward", answer, name)


def test_a_row_sum_by_einsum_is_told_where_bmm_comes_from(tmp_path):
    einsum = 'delta = torch.einsum("bhnd,bhnd->bhn", do.float(), out.float())'
    changes = [(DELTA, einsum)]
    answer = changed_backward(tmp_path, changes)
    verdict = rejected("lab5.flash_backward", answer)
    assert "called bmm" in verdict.findings[0].message
    assert "einsum and @ run as bmm" in verdict.findings[0].message


# lab5.delta ---------------------------------------------------------------------------------------

NEW_DELTA = "torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)"
WRONG_DELTA = {
    "do clipped": (
        [("    batch, heads, seq,", "    do = do.clamp(-10, 10)\n    batch, heads, seq,")], None,
    ),
    "no more than 512 rows": ([("mask=rows < seq)", "mask=rows < tl.minimum(seq, 512))")], None),
    "stored in float16": (
        [(NEW_DELTA, NEW_DELTA.replace("torch.float32", "out.dtype"))],
        "delta stored in the inputs' dtype",
    ),
    "cached": (
        [(f"    delta = {NEW_DELTA}", "    cache = globals().setdefault('CACHE', {})\n"
          f"    delta = cache.setdefault(out.shape, {NEW_DELTA})")],
        None,
    ),
    "batch modulo 2": ([("// heads).to(tl.int64)", "// heads % 2).to(tl.int64)")], None),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_DELTA)
def test_a_wrong_delta_is_rejected(what, tmp_path):
    changes, name = WRONG_DELTA[what]
    answer = changed_answer(tmp_path, "lab5.delta", "delta", changes)
    rejected("lab5.delta", answer, name)


# lab5.attention -----------------------------------------------------------------------------------


def dense(tensor):
    """The memory of a tensor as if it were contiguous."""
    return torch.as_strided(tensor, tensor.shape, torch.empty(tensor.shape).stride())


def same(*tensors):
    return tensors


def function(
    prepare=same, save=lambda ctx, *kept: None, sent=lambda do: do, launched=same, finish=same
):
    """An answer to lab5.attention over right kernels, with places to go wrong."""
    from right_answers.lab5 import backward, forward

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, is_causal):
            q, k, v = prepare(q, k, v)
            out, lse = finish(*forward(*launched(q, k, v), is_causal))
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.is_causal = is_causal
            save(ctx, q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, do):
            return *backward(*ctx.saved_tensors, sent(do), ctx.is_causal), None

    return lambda q, k, v, is_causal=False: Function.apply(q, k, v, is_causal)


def copies_in_ctx(ctx, q, *others):
    ctx.extra = [q.float().clone() for _ in range(8)]


KEPT = []
WRONG_ATTENTION = {
    "strides of the inputs ignored": {"prepare": lambda *inputs: map(dense, inputs)},
    "do clipped": {"sent": lambda do: do.clamp(-10, 10)},
    "a copy of q": {"prepare": lambda q, k, v: (q.clone(), k, v)},
    "copies of all": {"prepare": lambda *inputs: (t.clone() for t in inputs)},
    "strides of do ignored": {
        "sent": lambda do: dense(do.contiguous() if 0 in do.stride() else do)
    },
    "copies in ctx": {"save": copies_in_ctx},
    "kept in a list too": {"save": lambda ctx, *kept: KEPT.append(kept)},
}


@pytest.mark.parametrize("what", WRONG_ATTENTION)
def test_a_wrong_function_is_rejected(what):
    rejected("lab5.attention", function(**WRONG_ATTENTION[what]))
    KEPT.clear()


def test_a_function_causal_by_default_is_named():
    right = function()
    rejected(
        "lab5.attention",
        lambda q, k, v, is_causal=True: right(q, k, v, is_causal),
        "causal if nothing is said",
    )


def test_wrong_numbers_from_no_kernel_get_no_name():
    """PyTorch's own attention masks at the top left: that it ran no kernel names no mistake."""

    def answer(q, k, v, is_causal=False):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, enable_gqa=True
        )

    verdict = mark(find_question("lab5.attention"), answer, seed=0)
    assert verdict.status == "failed"
    assert named(verdict) == set(), str(verdict)


def test_contiguous_inputs_may_be_kept():
    """Where an input is not contiguous that is a copy, and the kernels may need it."""
    answer = function(prepare=lambda *inputs: (t.contiguous() for t in inputs))
    assert mark(find_question("lab5.attention"), answer, seed=0).passed


# What a forward makes and drops again: Triton's interpreter leaves it in cycles.
TEMPORARY = {
    "copies": {"launched": lambda *inputs: [t.clone() for t in inputs]},
    "heads repeated": {
        "launched": lambda q, k, v: (q, *(t.repeat_interleave(1, 1) for t in (k, v)))
    },
    "m and l": {"finish": lambda out, lse: (out, (lse - 1) + torch.ones_like(lse))},
    "out copied": {"finish": lambda out, lse: (out.clone(), lse)},
    "m and l are kept": {"save": lambda ctx, *kept: setattr(ctx, "m", kept[-1] + 1)},
}


@pytest.mark.parametrize("what", TEMPORARY)
def test_what_is_dropped_again_is_not_kept(what):
    verdict = mark(find_question("lab5.attention"), function(**TEMPORARY[what]), seed=1)
    assert verdict.passed, verdict


# How others write the products of the backward, each with roundings of its own.
BASE_2 = "(scale * 1.4426950408889634)"
ROUNDED = {
    "q scaled in float16, base 2": [
        (S, f'tl.dot((q_i * {BASE_2}).to(q_i.dtype), tl.trans(k_j), input_precision="ieee")'
         " * 0.6931471805599453"),
        (ST, f'tl.dot(k_j, tl.trans((q_i * {BASE_2}).to(q_i.dtype)), input_precision="ieee")'
         " * 0.6931471805599453"),
    ],
    "k scaled in float16": [
        (S, 'tl.dot(q_i, tl.trans((k_j * scale).to(k_j.dtype)), input_precision="ieee")'),
        (ST, 'tl.dot((k_j * scale).to(k_j.dtype), tl.trans(q_i), input_precision="ieee")'),
    ],
    "P in float16 for dS": [
        ("ds = p * (", "ds = p.to(q_i.dtype) * ("), ("dst = pt * (", "dst = pt.to(q_i.dtype) * ("),
    ],
    "dS scaled": [
        ("ds = p * (dp - delta_i[:, None])", "ds = p * (dp - delta_i[:, None]) * scale"),
        ("dq_i * scale", "dq_i"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("what", ROUNDED)
def test_roundings_that_are_right(what, tmp_path):
    answer = changed_backward(tmp_path, ROUNDED[what])
    for seed in range(SEEDS):
        verdict = mark(find_question("lab5.flash_backward"), answer, seed)
        assert verdict.passed, str(verdict)


@pytest.mark.parametrize("sides", [(16, 128), (128, 16)])
def test_the_solution_passes_with_other_tiles(sides, tmp_path):
    verdict = mark(
        find_question("lab5.flash_backward"), changed_backward(tmp_path, [tiles(*sides)]), seed=0
    )
    assert verdict.passed, str(verdict)

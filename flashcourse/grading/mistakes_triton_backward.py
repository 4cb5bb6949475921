"""The known mistakes of lab 5 as Triton kernels: right kernels with one place changed.

See :mod:`flashcourse.grading.mistakes_triton_forward`. Needs Triton.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from flashcourse.grading.question import Answer
from flashcourse.measure.kernel_source import with_change

BLOCK = 32


@triton.jit
def tile(base, rows, d, stride_n, stride_d, seq, HEAD_DIM: tl.constexpr):
    """Rows of one head, 0 outside."""
    return tl.load(
        base + rows[:, None] * stride_n + d[None, :] * stride_d,
        mask=(rows[:, None] < seq) & (d[None, :] < HEAD_DIM), other=0.0,
    )  # fmt: skip


@triton.jit
def dkdv_kernel(
    q, k, v, do, lse, delta, dk, dv,
    stride_qb, stride_qh, stride_qn, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_on, stride_od,
    heads_kv, group, seq_q, seq_k, scale,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys."""
    first_key = tl.program_id(0) * BLOCK
    keys = first_key + tl.arange(0, BLOCK)
    kv_head = (tl.program_id(1) % heads_kv).to(tl.int64)
    batch = (tl.program_id(1) // heads_kv).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    k_j = tile(
        k + batch * stride_kb + kv_head * stride_kh, keys, d, stride_kn, stride_kd, seq_k, HEAD_DIM
    )
    v_j = tile(
        v + batch * stride_vb + kv_head * stride_vh, keys, d, stride_vn, stride_vd, seq_k, HEAD_DIM
    )
    dk_j = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dv_j = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    first_query = 0
    if CAUSAL:
        first_query = tl.maximum(first_key - (seq_k - seq_q), 0) // BLOCK * BLOCK
    for member in range(0, group):
        head = kv_head * group + member
        row = (batch * heads_kv * group + head) * seq_q
        q_head = q + batch * stride_qb + head * stride_qh
        do_head = do + batch * stride_ob + head * stride_oh
        for start in range(first_query, seq_q, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            q_i = tile(q_head, rows, d, stride_qn, stride_qd, seq_q, HEAD_DIM)
            do_i = tile(do_head, rows, d, stride_on, stride_od, seq_q, HEAD_DIM)
            lse_i = tl.load(lse + row + rows, mask=rows < seq_q, other=0.0)
            delta_i = tl.load(delta + row + rows, mask=rows < seq_q, other=0.0)
            lse_i = tl.where(lse_i == float("-inf"), 0.0, lse_i)
            visible = (rows[:, None] < seq_q) & (keys[None, :] < seq_k)
            if CAUSAL:
                visible = visible & (keys[None, :] <= rows[:, None] + seq_k - seq_q)
            s = tl.dot(q_i, tl.trans(k_j), input_precision="ieee") * scale
            p = tl.exp(tl.where(visible, s, float("-inf")) - lse_i[:, None])
            dp = tl.dot(do_i, tl.trans(v_j), input_precision="ieee")
            ds = p * (dp - delta_i[:, None])
            dv_j = dv_j + tl.dot(tl.trans(p).to(do_i.dtype), do_i, input_precision="ieee")
            dk_j = dk_j + tl.dot(tl.trans(ds).to(q_i.dtype), q_i, input_precision="ieee")
    at = (tl.program_id(1).to(tl.int64) * seq_k + keys[:, None]) * HEAD_DIM + d[None, :]
    inside = (keys[:, None] < seq_k) & (d[None, :] < HEAD_DIM)
    tl.store(dk + at, (dk_j * scale).to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + at, dv_j.to(dv.dtype.element_ty), mask=inside)


@triton.jit
def dq_kernel(
    q, k, v, do, lse, delta, dq,
    stride_qb, stride_qh, stride_qn, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_on, stride_od,
    heads, group, seq_q, seq_k, scale,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries."""
    first_query = tl.program_id(0) * BLOCK
    rows = first_query + tl.arange(0, BLOCK)
    head = (tl.program_id(1) % heads).to(tl.int64)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    kv_head = head // group
    d = tl.arange(0, BLOCK_D)
    q_i = tile(
        q + batch * stride_qb + head * stride_qh, rows, d, stride_qn, stride_qd, seq_q, HEAD_DIM
    )
    do_i = tile(
        do + batch * stride_ob + head * stride_oh, rows, d, stride_on, stride_od, seq_q, HEAD_DIM
    )
    row = tl.program_id(1).to(tl.int64) * seq_q
    lse_i = tl.load(lse + row + rows, mask=rows < seq_q, other=0.0)
    delta_i = tl.load(delta + row + rows, mask=rows < seq_q, other=0.0)
    lse_i = tl.where(lse_i == float("-inf"), 0.0, lse_i)
    dq_i = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    k_head = k + batch * stride_kb + kv_head * stride_kh
    v_head = v + batch * stride_vb + kv_head * stride_vh
    stop = seq_k
    if CAUSAL:
        stop = tl.minimum(seq_k, tl.maximum(first_query + BLOCK + seq_k - seq_q, 0))
    for start in range(0, stop, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        k_j = tile(k_head, keys, d, stride_kn, stride_kd, seq_k, HEAD_DIM)
        v_j = tile(v_head, keys, d, stride_vn, stride_vd, seq_k, HEAD_DIM)
        visible = (rows[:, None] < seq_q) & (keys[None, :] < seq_k)
        if CAUSAL:
            visible = visible & (keys[None, :] <= rows[:, None] + seq_k - seq_q)
        s = tl.dot(q_i, tl.trans(k_j), input_precision="ieee") * scale
        p = tl.exp(tl.where(visible, s, float("-inf")) - lse_i[:, None])
        dp = tl.dot(do_i, tl.trans(v_j), input_precision="ieee")
        ds = p * (dp - delta_i[:, None])
        dq_i = dq_i + tl.dot(ds.to(k_j.dtype), k_j, input_precision="ieee")
    tl.store(
        dq + (row + rows[:, None]) * HEAD_DIM + d[None, :],
        (dq_i * scale).to(dq.dtype.element_ty),
        mask=(rows[:, None] < seq_q) & (d[None, :] < HEAD_DIM),
    )


def launch(
    dkdv: Any,
    dq_of: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    is_causal: bool = False,
    *,
    scale: Callable[[int], float] = lambda head_dim: head_dim**-0.5,
    causal: Callable[[bool], bool] = bool,
    row_sum: Callable[..., torch.Tensor] = lambda do, out: (do.float() * out.float()).sum(-1),
    strides: Callable[[torch.Tensor], tuple[int, ...]] = torch.Tensor.stride,
    strides_of_do: Callable[[torch.Tensor], tuple[int, ...]] = torch.Tensor.stride,
    finish: Callable[[torch.Tensor], torch.Tensor] = lambda gradient: gradient,
) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv from kernels with the arguments of those above."""
    batch, heads, seq_q, head_dim = q.shape
    heads_kv, seq_k = k.shape[1:3]
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    delta = row_sum(do, out).contiguous()
    lines = (*strides(q), *strides(k), *strides(v), *strides_of_do(do))
    group, options = heads // heads_kv, {
        "CAUSAL": causal(is_causal), "HEAD_DIM": head_dim, "BLOCK": BLOCK,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
    }  # fmt: skip
    dkdv[(triton.cdiv(seq_k, BLOCK), batch * heads_kv)](
        q, k, v, do, lse, delta, dk, dv, *lines, heads_kv, group, seq_q, seq_k, scale(head_dim),
        **options,
    )  # fmt: skip
    dq_of[(triton.cdiv(seq_q, BLOCK), batch * heads)](
        q, k, v, do, lse, delta, dq, *lines, heads, group, seq_q, seq_k, scale(head_dim), **options
    )
    return tuple(finish(t) for t in (dq, dk, dv))


def _contiguous_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(math.prod(tensor.shape[dim + 1 :]) for dim in range(4))


_P = 'tl.exp(tl.where(visible, s, float("-inf")) - lse_i[:, None])'
_DS = "p * (dp - delta_i[:, None])"
_SEEN = "keys[None, :] <= rows[:, None] + seq_k - seq_q"
_STOP = "tl.minimum(seq_k, tl.maximum(first_query + BLOCK + seq_k - seq_q, 0))"
_BEGIN = "tl.maximum(first_key - (seq_k - seq_q), 0) // BLOCK * BLOCK"
_NUMERATOR = (
    'tl.exp(tl.where(visible, s, float("-inf"))'
    ' - tl.maximum(tl.max(tl.where(visible, s, float("-inf")), 1), -1e30)[:, None])'
)
# The name of the mistake in lab5_flash_backward → changes of the dkdv kernel, of the dq kernel.
Changes = tuple[tuple[str, str], ...]
CHANGES: dict[str, tuple[Changes, Changes]] = {
    name: (changes, changes)
    for name, changes in {
        "delta missing": ((_DS, "p * dp"),),
        "delta added instead of subtracted": ((_DS, "p * (dp + delta_i[:, None])"),),
        "delta from one tile only": ((_DS, "p * (dp - tl.sum(p * dp, 1)[:, None])"),),
        "delta without the product with P": (
            (_DS, "tl.where((rows[:, None] < seq_q) & (keys[None, :] < seq_k),"
                  " p * dp - delta_i[:, None], 0.0)"),
        ),
        "P not normalised": ((_P, _NUMERATOR),),
        "lse taken as base 2": ((_P, _P.replace("exp", "exp2")),),
        "scale missing in the recomputed scores": ((") * scale\n", ")\n"),),
        "masked after exp, by multiplication": (
            ('lse_i = tl.where(lse_i == float("-inf"), 0.0, lse_i)',
             'lse_i = tl.where(lse_i == float("-inf"), float("inf"), lse_i)'),
            (_P, "tl.exp(s - lse_i[:, None]) * visible"),
        ),
        "a row that sees no key gives NaN": (
            ('lse_i = tl.where(lse_i == float("-inf"), 0.0, lse_i)', "lse_i = lse_i + 0.0"),
        ),
        "causal off by one: a query does not see its own key": (
            (_SEEN, _SEEN.replace("<=", "<")),
        ),
    }.items()
}  # fmt: skip
CHANGES |= {
    "causal mask aligned to the top left": (
        ((_SEEN, "keys[None, :] <= rows[:, None]"), (_BEGIN, "0 * first_key")),
        ((_SEEN, "keys[None, :] <= rows[:, None]"), (_STOP, "seq_k")),
    ),
    "causal off by one: a query sees the next key": (
        ((_SEEN, _SEEN + " + 1"), (_BEGIN, "0 * first_key")),
        ((_SEEN, _SEEN + " + 1"), (_STOP, "seq_k")),
    ),
    "scale missing in dq": ((), (("dq_i * scale", "dq_i"),)),
    "scale missing in dk": ((("dk_j * scale", "dk_j"),), ()),
    "scale missing in dq and dk": (
        (("dk_j * scale", "dk_j"),),
        (("dq_i * scale", "dq_i"),),
    ),
    "dv from dS": ((("tl.trans(p).to(do_i.dtype)", "tl.trans(ds).to(do_i.dtype)"),), ()),
    "only the first query head of a group": (
        (("for member in range(0, group)", "for member in range(0, 1)"),),
        (),
    ),
    "only the last query head of a group": (
        (("for member in range(0, group)", "for member in range(group - 1, group)"),),
        (),
    ),
    "mean over the group instead of sum": (
        (("dk_j * scale", "dk_j * scale / group"), ("dv_j.to(dv", "(dv_j / group).to(dv")),
        (),
    ),
    "KV heads tiled instead of repeated": (
        (("kv_head * group + member", "kv_head + member * heads_kv"),),
        (("kv_head = head // group", "kv_head = head % (heads // group)"),),
    ),
    "dq overwritten by each block of keys": ((), (("dq_i = dq_i + tl.dot", "dq_i = tl.dot"),)),
    "dk and dv overwritten by each block of queries": (
        (("dv_j = dv_j + tl.dot", "dv_j = tl.dot"), ("dk_j = dk_j + tl.dot", "dk_j = tl.dot")),
        (),
    ),
    "the causal loop over keys stops a tile early": (
        (),
        ((_STOP, _STOP.replace(" + BLOCK", "") + " // BLOCK * BLOCK"),),
    ),
    "the causal loop over queries begins a tile late": (
        ((_BEGIN, "tl.cdiv(tl.maximum(first_key - (seq_k - seq_q), 0), BLOCK) * BLOCK"),),
        (),
    ),
    "the last keys are dropped": (
        (("keys[None, :] < seq_k", "keys[None, :] < seq_k // BLOCK * BLOCK"),),
        (("keys[None, :] < seq_k", "keys[None, :] < seq_k // BLOCK * BLOCK"),),
    ),
    "the last queries are dropped": (
        (("(rows[:, None] < seq_q)", "(rows[:, None] < seq_q // BLOCK * BLOCK)"),),
        (("visible = (rows[:, None] < seq_q)", "visible = (rows[:, None] < whole_rows)"),
         ("stop = seq_k\n", "stop = seq_k\n    whole_rows = seq_q // BLOCK * BLOCK\n")),
    ),
    "float16 accumulator": (
        (
            ("dv_j = dv_j + tl.dot(tl.trans(p).to(do_i.dtype), do_i, input_precision=\"ieee\")",
             "dv_j = (dv_j + tl.dot(tl.trans(p).to(do_i.dtype), do_i, input_precision=\"ieee\"))"
             ".to(dv.dtype.element_ty).to(tl.float32)"),
        ),
        (),
    ),
}  # fmt: skip
# The name of the mistake → what is changed around the kernels.
LAUNCHES: dict[str, dict[str, Any]] = {
    "causal mask ignored": {"causal": lambda is_causal: False},
    "strides of do ignored": {"strides_of_do": _contiguous_strides},
    "strides of q, k and v ignored": {"strides": _contiguous_strides},
    "scale from the padded head_dim": {
        "scale": lambda head_dim: max(16, triton.next_power_of_2(head_dim)) ** -0.5
    },
    "gradients of 0": {"finish": torch.zeros_like},
}


def right_answer() -> Answer:
    """The kernels as they should be."""
    return functools.partial(launch, dkdv_kernel, dq_kernel)


def triton_mistakes() -> dict[str, Answer]:
    """Every mistake as an answer that launches Triton kernels, by its name."""
    changed = {
        name: functools.partial(
            launch, with_change(dkdv_kernel, *for_kv), with_change(dq_kernel, *for_q)
        )
        for name, (for_kv, for_q) in CHANGES.items()
    }
    others = {
        name: functools.partial(launch, dkdv_kernel, dq_kernel, **options)
        for name, options in LAUNCHES.items()
    }
    return {**changed, **others}

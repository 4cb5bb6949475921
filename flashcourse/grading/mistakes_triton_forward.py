"""The known mistakes of lab 4 as Triton kernels: a right kernel with one place changed.

The grader itself compares numbers with the mistakes in PyTorch, which need no compiler. These
here are what learners hand in; the tests prove that each is rejected and called by its name.
Needs Triton.
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
def forward_kernel(
    q, k, v, out, lse,
    stride_qb, stride_qh, stride_qn, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    heads, group, seq_q, seq_k, scale,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out and lse of one tile of queries; as plain as it can be."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = (tl.program_id(1) % heads).to(tl.int64)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    kv_head = head // group
    d = tl.arange(0, BLOCK_D)
    q_head = q + batch * stride_qb + head * stride_qh
    row_exists = (rows[:, None] < seq_q) & (d[None, :] < HEAD_DIM)
    q_tile = rows[:, None] * stride_qn + d[None, :] * stride_qd
    q_i = tl.load(q_head + q_tile, mask=row_exists, other=0.0)
    k_head = k + batch * stride_kb + kv_head * stride_kh
    v_head = v + batch * stride_vb + kv_head * stride_vh
    m = tl.full((BLOCK,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)
    o = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    stop = seq_k
    if CAUSAL:
        stop = tl.minimum(seq_k, tl.maximum(tl.program_id(0) * BLOCK + BLOCK + seq_k - seq_q, 0))
    for first_key in range(0, stop, BLOCK):
        keys = first_key + tl.arange(0, BLOCK)
        inside = (keys[:, None] < seq_k) & (d[None, :] < HEAD_DIM)
        k_tile = keys[:, None] * stride_kn + d[None, :] * stride_kd
        v_tile = keys[:, None] * stride_vn + d[None, :] * stride_vd
        k_j = tl.load(k_head + k_tile, mask=inside, other=0.0)
        v_j = tl.load(v_head + v_tile, mask=inside, other=0.0)
        s = tl.dot(q_i, tl.trans(k_j), input_precision="ieee") * scale
        visible = keys[None, :] < seq_k
        if CAUSAL:
            visible = visible & (keys[None, :] <= rows[:, None] + seq_k - seq_q)
        s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp(s - pivot[:, None])
        rescale = tl.exp(m - pivot)
        l = l * rescale + tl.sum(p, 1)
        o = o * rescale[:, None] + tl.dot(p.to(v_j.dtype), v_j, input_precision="ieee")
        m = m_new
    safe_l = tl.where(l == 0.0, 1.0, l)
    lse_i = tl.where(l == 0.0, float("-inf"), m + tl.log(safe_l))
    o = o / safe_l[:, None]
    row_of_out = tl.program_id(1).to(tl.int64) * seq_q
    tl.store(lse + row_of_out + rows, lse_i, mask=rows < seq_q)
    tl.store(
        out + (row_of_out + rows[:, None]) * HEAD_DIM + d[None, :],
        o.to(out.dtype.element_ty),
        mask=row_exists,
    )


def launch(
    kernel: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = False,
    *,
    scale: Callable[[int], float] = lambda head_dim: head_dim**-0.5,
    programs: Callable[[int], int] = lambda seq_q: triton.cdiv(seq_q, BLOCK),
    strides: Callable[[torch.Tensor], tuple[int, ...]] = torch.Tensor.stride,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse from a kernel with the arguments of :func:`forward_kernel`."""
    batch, heads, seq_q, head_dim = q.shape
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:3], -math.inf, device=q.device)
    if programs(seq_q) > 0:
        kernel[(programs(seq_q), batch * heads)](
            q, k, v, out, lse, *strides(q), *strides(k), *strides(v),
            heads, heads // k.shape[1], seq_q, k.shape[2], scale(head_dim),
            CAUSAL=is_causal, HEAD_DIM=head_dim, BLOCK=BLOCK,
            BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        )  # fmt: skip
    return out, lse


def _contiguous_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(math.prod(tensor.shape[dim + 1 :]) for dim in range(4))


_NO_PIVOT = ('tl.where(m_new == float("-inf"), 0.0, m_new)', "m_new")
_STEP = 'o = o * rescale[:, None] + tl.dot(p.to(v_j.dtype), v_j, input_precision="ieee")'
_ZEROS = "m = tl.zeros((BLOCK,), tl.float32)"
_ALL_KEYS = (
    "tl.minimum(seq_k, tl.maximum(tl.program_id(0) * BLOCK + BLOCK + seq_k - seq_q, 0))",
    "seq_k",
)
# The name of the mistake in lab4_flash_forward → the changes of the kernel's text.
CHANGES: dict[str, tuple[tuple[str, str], ...]] = {
    "the accumulator is not rescaled": (("o * rescale[:, None] + tl.dot", "o + tl.dot"),),
    "the sum is not rescaled": (("l * rescale + tl.sum", "l + tl.sum"),),
    "no max subtraction": (
        ("tl.maximum(m, tl.max(s, 1))", "tl.maximum(m, tl.max(s, 1)) * 0.0"),
        ('m = tl.full((BLOCK,), float("-inf"), tl.float32)', _ZEROS),
        (
            'pivot = tl.where(m_new == float("-inf"), 0.0, m_new)',
            "m_new = tl.zeros((BLOCK,), tl.float32)\n        pivot = m_new",
        ),
    ),
    "m starts at 0": (('m = tl.full((BLOCK,), float("-inf"), tl.float32)', _ZEROS),),
    "the last keys are dropped": (
        ("range(0, stop, BLOCK)", "range(0, tl.minimum(stop, seq_k // BLOCK * BLOCK), BLOCK)"),
    ),
    "causal mask ignored": (
        ("visible & (keys[None, :] <= rows[:, None] + seq_k - seq_q)", "visible"),
        _ALL_KEYS,
    ),
    "causal mask aligned to the top left": (
        ("keys[None, :] <= rows[:, None] + seq_k - seq_q", "keys[None, :] <= rows[:, None]"),
        _ALL_KEYS,
    ),
    "causal off by one: a query does not see its own key": (
        ("keys[None, :] <= rows[:, None] + seq_k", "keys[None, :] < rows[:, None] + seq_k"),
    ),
    "causal off by one: a query sees the next key": (
        ("<= rows[:, None] + seq_k - seq_q", "<= rows[:, None] + seq_k - seq_q + 1"),
        _ALL_KEYS,
    ),
    "the causal loop stops a tile early": (
        (
            "tl.program_id(0) * BLOCK + BLOCK + seq_k - seq_q, 0))",
            "tl.program_id(0) * BLOCK + seq_k - seq_q, 0)) // BLOCK * BLOCK",
        ),
    ),
    "hidden scores filled with a finite number": (
        (
            'tl.where(visible, s, float("-inf"))',
            'tl.where(visible, s, tl.where(keys[None, :] < seq_k, -10000.0, float("-inf")))',
        ),
    ),
    "a row that sees no key gives NaN": (
        _NO_PIVOT,
        ("tl.where(l == 0.0, 1.0, l)", "l"),
        ('tl.where(l == 0.0, float("-inf"), m + tl.log(safe_l))', "m + tl.log(safe_l)"),
    ),
    "KV heads tiled instead of repeated": (
        ("kv_head = head // group", "kv_head = head % (heads // group)"),
    ),
    "divided by the sum in every tile": (
        (_STEP, _STEP + "\n        o = o / tl.where(l == 0.0, 1.0, l)[:, None]"),
        ("o = o / safe_l[:, None]", "o = o * 1.0"),
    ),
    "never divided by the sum": (("o = o / safe_l[:, None]", "o = o * 1.0"),),
    "an epsilon in the denominator": (("o / safe_l[:, None]", "o / (l + 1e-2)[:, None]"),),
    "lse in base 2": (("m + tl.log(safe_l)", "(m + tl.log(safe_l)) * 1.4426950408889634"),),
    "lse without the maximum": (("m + tl.log(safe_l)", "tl.log(safe_l)"),),
    "float16 accumulator": (
        (
            "o = tl.zeros((BLOCK, BLOCK_D), tl.float32)",
            "o = tl.zeros((BLOCK, BLOCK_D), out.dtype.element_ty)",
        ),
        (_STEP, _STEP.replace("o = ", "o = (") + ").to(out.dtype.element_ty)"),
    ),
    "keys past the end take part": (
        ("visible = keys[None, :] < seq_k", "visible = keys[None, :] >= 0"),
    ),
}
# The name of the mistake → what is changed around the kernel.
LAUNCHES: dict[str, dict[str, Any]] = {
    "scale missing": {"scale": lambda head_dim: 1.0},
    "scaled twice": {"scale": lambda head_dim: 1.0 / head_dim},
    "scale from the padded head_dim": {
        "scale": lambda head_dim: max(16, triton.next_power_of_2(head_dim)) ** -0.5
    },
    "the last queries are dropped": {"programs": lambda seq_q: seq_q // BLOCK},
    "strides ignored": {"strides": _contiguous_strides},
}


def right_answer() -> Answer:
    """The kernel as it should be."""
    return functools.partial(launch, forward_kernel)


def triton_mistakes() -> dict[str, Answer]:
    """Every mistake as an answer that launches a Triton kernel, by its name."""
    changed = {
        name: functools.partial(launch, with_change(forward_kernel, *changes))
        for name, changes in CHANGES.items()
    }
    others = {
        name: functools.partial(launch, forward_kernel, **options)
        for name, options in LAUNCHES.items()
    }
    return {**changed, **others}

"""Right answers to lab 4 that are written in other ways than the solution."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from flashcourse.grading.mistakes_triton_forward import right_answer

# lab4.row_softmax -------------------------------------------------------------------------------


@triton.jit
def _rows_in_chunks(x, p, columns, stride_row, stride_column, CHUNK: tl.constexpr):
    """The online softmax over chunks of a row, in base 2; then a second pass."""
    row = tl.program_id(0).to(tl.int64)
    m = tl.full((1,), float("-inf"), tl.float32)
    l = tl.zeros((1,), tl.float32)
    for first in range(0, columns, CHUNK):
        j = first + tl.arange(0, CHUNK)
        s = tl.load(x + row * stride_row + j * stride_column, mask=j < columns, other=float("-inf"))
        s = s.to(tl.float32) * 1.4426950408889634
        m_new = tl.maximum(m, tl.max(s, 0))
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
        l = l * tl.exp2(m - pivot) + tl.sum(tl.exp2(s - pivot), 0)
        m = m_new
    for first in range(0, columns, CHUNK):
        j = first + tl.arange(0, CHUNK)
        s = tl.load(x + row * stride_row + j * stride_column, mask=j < columns, other=float("-inf"))
        e = tl.exp2(s.to(tl.float32) * 1.4426950408889634 - m)
        tl.store(p + row * columns + j, (e / l).to(p.dtype.element_ty), mask=j < columns)


def in_chunks(x):
    """Two passes over chunks of 128."""
    p = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rows_in_chunks[(x.shape[0],)](x, p, x.shape[1], x.stride(0), x.stride(1), CHUNK=128)
    return p


@triton.jit
def _several_rows(x, p, rows, columns, stride_row, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, BLOCK)[None, :]
    exists = (i < rows) & (j < columns)
    s = tl.load(x + i * stride_row + j, mask=exists, other=-float("inf")).to(tl.float32)
    s = tl.where(i < rows, s, 0.0)
    e = tl.exp(s - tl.max(s, axis=1, keep_dims=True))
    tl.store(p + i * columns + j, e / tl.sum(e, axis=1, keep_dims=True), mask=exists)


def several_rows(x):
    """Four rows a program, from a contiguous copy."""
    x = x.contiguous()
    p = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    grid = (triton.cdiv(x.shape[0], 4),)
    _several_rows[grid](x, p, *x.shape, x.stride(0), ROWS=4, BLOCK=block)
    return p


# lab4.flash_forward -----------------------------------------------------------------------------


@triton.jit
def _backwards_kernel(
    q, k, v, out, lse, seq_q, seq_k, group, factor,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Contiguous inputs; q scaled first; K loaded transposed; the last tile of keys first."""
    head = tl.program_id(0).to(tl.int64)  # of all batch × heads
    rows = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d = tl.arange(0, BLOCK_D)
    inside = (rows < seq_q)[:, None] & (d < HEAD_DIM)[None, :]
    at = head * seq_q * HEAD_DIM + rows[:, None] * HEAD_DIM + d[None, :]
    q_i = tl.load(q + at, mask=inside, other=0.0)
    q_i = (q_i.to(tl.float32) * factor).to(q_i.dtype)
    base = head // group * seq_k * HEAD_DIM
    m = tl.full((BLOCK_Q,), -1e38, tl.float32)
    l = tl.zeros((BLOCK_Q,), tl.float32)
    o = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    tiles = tl.cdiv(seq_k, BLOCK_K)
    for count in range(0, tiles):
        keys = (tiles - 1 - count) * BLOCK_K + tl.arange(0, BLOCK_K)
        kt = tl.load(
            k + base + keys[None, :] * HEAD_DIM + d[:, None],
            mask=(keys < seq_k)[None, :] & (d < HEAD_DIM)[:, None], other=0.0,
        )  # fmt: skip
        v_j = tl.load(
            v + base + keys[:, None] * HEAD_DIM + d[None, :],
            mask=(keys < seq_k)[:, None] & (d < HEAD_DIM)[None, :], other=0.0,
        )  # fmt: skip
        s = tl.dot(q_i, kt, input_precision="ieee")
        hidden = (keys >= seq_k)[None, :] | (rows >= seq_q)[:, None]
        if CAUSAL:
            hidden = hidden | (rows[:, None] + (seq_k - seq_q) < keys[None, :])
        s = tl.where(hidden, float("-inf"), s)
        m_new = tl.maximum(m, tl.max(s, 1))  # finite from the start
        p = tl.exp(s - m_new[:, None])
        l = l * tl.exp(m - m_new) + tl.sum(p, 1)
        o = o * tl.exp(m - m_new)[:, None] + tl.dot(p.to(v_j.dtype), v_j, input_precision="ieee")
        m = m_new
    seen = l > 0
    o = tl.where(seen[:, None], o / tl.where(seen, l, 1.0)[:, None], 0.0)
    tl.store(out + at, o.to(out.dtype.element_ty), mask=inside)
    total = tl.where(seen, m + tl.log(tl.where(seen, l, 1.0)), float("-inf"))
    tl.store(lse + head * seq_q + rows, total, mask=rows < seq_q)


def from_the_last_key(q, k, v, is_causal=False, block_q=128, block_k=16):
    """Copies to contiguous memory and walks over all keys, from the last tile to the first."""
    q, k, v = (t.contiguous() for t in (q, k, v))
    batch, heads, seq_q, head_dim = q.shape
    out = torch.zeros_like(q)
    lse = torch.zeros(batch, heads, seq_q, device=q.device)
    _backwards_kernel[(batch * heads, triton.cdiv(seq_q, block_q))](
        q, k, v, out, lse, seq_q, k.shape[2], heads // k.shape[1], head_dim**-0.5,
        CAUSAL=is_causal, HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_Q=block_q, BLOCK_K=block_k,
    )  # fmt: skip
    return out, lse


@triton.jit
def _scores(q_i, k, first, columns, seq_k, stride_n, stride_d, HEAD_DIM: tl.constexpr,
            BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    keys = first + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    kt = tl.load(
        k + keys[None, :] * stride_n + d[:, None] * stride_d,
        mask=(keys[None, :] < seq_k) & (d[:, None] < HEAD_DIM), other=0.0,
    )  # fmt: skip
    s = tl.dot(q_i, kt, input_precision="ieee")
    return tl.where(keys[None, :] < columns[:, None], s, float("-inf"))


@triton.jit
def _two_pass_kernel(
    q, k, v, out, lse, heads, group, seq_q, seq_k, scale,
    qb, qh, qn, qd, kb, kh, kn, kd, vb, vh, vn, vd,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """First lse of the rows, then P = exp(s − lse) and out: no rescaling of out."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = (tl.program_id(1)).to(tl.int64)
    batch = (tl.program_id(2)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    q_i = tl.load(
        q + batch * qb + head * qh + rows[:, None] * qn + d[None, :] * qd,
        mask=(rows[:, None] < seq_q) & (d[None, :] < HEAD_DIM), other=0.0,
    )  # fmt: skip
    k += batch * kb + head // group * kh
    v += batch * vb + head // group * vh
    columns = tl.where(rows < seq_q, seq_k, 0)  # how many keys a row sees
    if CAUSAL:
        columns = tl.minimum(columns, tl.maximum(rows + 1 + seq_k - seq_q, 0))
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, seq_k, BLOCK):
        s = _scores(q_i, k, first, columns, seq_k, kn, kd, HEAD_DIM, BLOCK_D, BLOCK) * scale
        top = tl.maximum(top, tl.max(s, 1))
    pivot = tl.where(columns > 0, top, 0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, seq_k, BLOCK):
        s = _scores(q_i, k, first, columns, seq_k, kn, kd, HEAD_DIM, BLOCK_D, BLOCK) * scale
        total += tl.sum(tl.exp(s - pivot[:, None]), 1)
    safe = tl.where(columns > 0, total, 1.0)
    o = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for first in range(0, seq_k, BLOCK):
        s = _scores(q_i, k, first, columns, seq_k, kn, kd, HEAD_DIM, BLOCK_D, BLOCK) * scale
        p = tl.exp(s - pivot[:, None]) / safe[:, None]
        keys = first + tl.arange(0, BLOCK)
        v_j = tl.load(
            v + keys[:, None] * vn + d[None, :] * vd,
            mask=(keys[:, None] < seq_k) & (d[None, :] < HEAD_DIM), other=0.0,
        )  # fmt: skip
        o += tl.dot(p.to(v_j.dtype), v_j, input_precision="ieee")
    row = (batch * heads + head) * seq_q + rows
    tl.store(
        out + row[:, None] * HEAD_DIM + d[None, :], o.to(out.dtype.element_ty),
        mask=(rows[:, None] < seq_q) & (d[None, :] < HEAD_DIM),
    )  # fmt: skip
    log = tl.where(columns > 0, pivot + tl.log(safe), float("-inf"))
    tl.store(lse + row, log, mask=rows < seq_q)


def in_three_passes(q, k, v, is_causal=False):
    """Maximum, sum, output: three passes over the keys, nothing rescaled; a grid of three axes."""
    batch, heads, seq_q, head_dim = q.shape
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    _two_pass_kernel[(triton.cdiv(seq_q, 64), heads, batch)](
        q, k, v, out, lse, heads, heads // k.shape[1], seq_q, k.shape[2], head_dim**-0.5,
        *q.stride(), *k.stride(), *v.stride(),
        CAUSAL=is_causal, HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK=64,
    )  # fmt: skip
    return out, lse


square_tiles = partial(from_the_last_key, block_q=16, block_k=128)
# Those that are fast too: no tile of float32 with a wide head comes there.
tall_tiles = partial(from_the_last_key, block_q=128, block_k=64)
tall_tiles_of_few_keys = partial(from_the_last_key, block_q=128, block_k=32)

RIGHT_ANSWERS = {
    "lab4.row_softmax": [in_chunks, several_rows],
    "lab4.flash_forward": [from_the_last_key, square_tiles, in_three_passes, right_answer()],
    "lab4.speed": [tall_tiles, tall_tiles_of_few_keys],
}

"""The forward kernel: Dao (2023), "FlashAttention-2", algorithm 1, with the names of the paper.

One program computes one tile of queries ``i`` of one head and walks over the tiles of keys ``j``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashcourse.attention.flash_tiles import (
    LN2,
    head_base,
    load_tile,
    locate_tile,
    power,
    store_tile,
    tanh,
    tile_offsets,
    visible_pairs,
    visible_tiles,
)

# Lengths are no part of the compiled kernel: a new one must not compile anything.
LENGTHS = ["num_tiles", "section", "num_sequences", "seq_q", "seq_k", "left", "right"]


@triton.jit
def attend(
    o, m, l, q_i, k_head, v_head, k_offsets, v_offsets, stride_kn, stride_vn,
    begin, end, first_query, shift, num_keys, score_scale, left, right, cap_in, cap_out,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    TMA: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax for each tile of keys from ``begin`` to ``end``.

    Only tiles on the EDGE of what is visible are masked.
    """
    NATURAL: tl.constexpr = q_i.dtype == tl.float32  # else scores are in units of log 2
    for j in range(begin, end):
        first_key = j * BLOCK_K
        if TMA:
            k_j = k_head.load([first_key, 0])
        else:
            k_j = load_tile(
                k_head, k_offsets, first_key, num_keys, stride_kn, BLOCK_K, BLOCK_D, HEAD_DIM, EDGE
            )
        s = tl.dot(q_i, tl.trans(k_j), input_precision="ieee")  # (BLOCK_Q, BLOCK_K)
        factor = score_scale
        if SOFTCAP:
            s = cap_out * tanh(s * cap_in)
            factor = 1.0
        if EDGE:
            rows = first_query + tl.arange(0, BLOCK_Q)[:, None]
            keys = first_key + tl.arange(0, BLOCK_K)[None, :]
            visible = visible_pairs(rows, keys, shift, num_keys, left, right, HAS_LEFT, HAS_RIGHT)
            s = tl.where(visible, s * factor, float("-inf"))
            factor = 1.0

        # q carries the sign of the scale, so factor >= 0 and may be taken out of the maximum:
        # the power then costs one fused multiply-add per score.
        m_new = tl.maximum(m, tl.max(s, 1) * factor)
        # A row that has seen no key yet has m = -inf; -inf - (-inf) would be NaN.
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = power(s * factor - pivot[:, None], NATURAL)
        rescale = power(m - pivot, NATURAL)  # what was summed under the old maximum
        l = l * rescale + tl.sum(p, 1)
        o = o * rescale[:, None]
        if TMA:
            v_j = v_head.load([first_key, 0])
        else:
            v_j = load_tile(
                v_head, v_offsets, first_key, num_keys, stride_vn, BLOCK_K, BLOCK_D, HEAD_DIM, EDGE
            )
        o = tl.dot(p.to(v_j.dtype), v_j, o, input_precision="ieee")  # (BLOCK_Q, BLOCK_D)
        m = m_new
    return o, m, l


@triton.jit(do_not_specialize=LENGTHS)
def flash_forward_kernel(
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k,
    stride_qb, stride_qh, stride_qn, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_on, stride_od,
    heads, group, num_tiles, section, num_sequences, seq_q, seq_k,
    score_scale, left, right, cap_in, cap_out,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    VARLEN: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    NEGATE: tl.constexpr, WIDE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """out and lse of one tile of queries. ``score_scale`` is |scale|, times log2 e for 16-bit
    inputs; NEGATE its sign."""
    first_query, head, batch, start_q, num_queries, start_k, num_keys = locate_tile(
        tl.program_id(0), tl.num_programs(0), num_tiles, heads, section, cu_seqlens_q,
        cu_seqlens_k, num_sequences, seq_q, seq_k, BLOCK_Q, VARLEN, HAS_RIGHT,
    )  # fmt: skip
    if first_query >= num_queries:
        return
    q_head = head_base(q, batch, head, start_q, stride_qb, stride_qh, stride_qn)
    k_head = head_base(k, batch, head // group, start_k, stride_kb, stride_kh, stride_kn)
    v_head = head_base(v, batch, head // group, start_k, stride_vb, stride_vh, stride_vn)
    out_head = head_base(out, batch, head, start_q, stride_ob, stride_oh, stride_on)
    lse_head = lse + (batch * heads + head).to(tl.int64) * seq_q + start_q

    q_offsets = tile_offsets(stride_qn, stride_qd, BLOCK_Q, BLOCK_D, WIDE)
    k_offsets = tile_offsets(stride_kn, stride_kd, BLOCK_K, BLOCK_D, WIDE)
    v_offsets = tile_offsets(stride_vn, stride_vd, BLOCK_K, BLOCK_D, WIDE)
    q_i = load_tile(
        q_head, q_offsets, first_query, num_queries, stride_qn, BLOCK_Q, BLOCK_D, HEAD_DIM, True
    )
    if NEGATE:
        q_i = -q_i
    if TMA:  # Hopper's copy engine: it clips at the end of the sequence and fills with zeros
        k_head = tl.make_tensor_descriptor(
            k_head, [num_keys, HEAD_DIM], [stride_kn, 1], [BLOCK_K, BLOCK_D]
        )
        v_head = tl.make_tensor_descriptor(
            v_head, [num_keys, HEAD_DIM], [stride_vn, 1], [BLOCK_K, BLOCK_D]
        )

    o = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_Q,), tl.float32)
    shift = num_keys - num_queries  # query i stands at key i + shift
    last_query = tl.minimum(first_query + BLOCK_Q, num_queries) - 1
    begin, full_begin, full_end, end = visible_tiles(
        first_query, last_query, shift, num_keys, left, right, BLOCK_K, HAS_LEFT, HAS_RIGHT
    )
    if HAS_LEFT:
        o, m, l = attend(
            o, m, l, q_i, k_head, v_head, k_offsets, v_offsets, stride_kn, stride_vn,
            begin, full_begin, first_query, shift, num_keys,
            score_scale, left, right, cap_in, cap_out,
            HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D, HAS_LEFT, HAS_RIGHT, SOFTCAP, TMA, True,
        )  # fmt: skip
    o, m, l = attend(
        o, m, l, q_i, k_head, v_head, k_offsets, v_offsets, stride_kn, stride_vn,
        full_begin, full_end, first_query, shift, num_keys,
        score_scale, left, right, cap_in, cap_out,
        HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D, HAS_LEFT, HAS_RIGHT, SOFTCAP, TMA, False,
    )  # fmt: skip
    o, m, l = attend(
        o, m, l, q_i, k_head, v_head, k_offsets, v_offsets, stride_kn, stride_vn,
        full_end, end, first_query, shift, num_keys,
        score_scale, left, right, cap_in, cap_out,
        HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D, HAS_LEFT, HAS_RIGHT, SOFTCAP, TMA, True,
    )  # fmt: skip

    safe_l = tl.where(l == 0.0, 1.0, l)  # a row that sees no key: 0 / 1, not 0 / 0
    o = o * (1.0 / safe_l)[:, None]
    NATURAL: tl.constexpr = q.dtype.element_ty == tl.float32
    lse_i = m + tl.log(safe_l) if NATURAL else (m + tl.log2(safe_l)) * LN2
    lse_i = tl.where(l == 0.0, float("-inf"), lse_i)
    rows = first_query + tl.arange(0, BLOCK_Q)
    tl.store(lse_head + rows, lse_i, mask=rows < num_queries)
    out_offsets = tile_offsets(stride_on, stride_od, BLOCK_Q, BLOCK_D, WIDE)
    store_tile(
        out_head, o, out_offsets, first_query, num_queries, stride_on, BLOCK_Q, BLOCK_D, HEAD_DIM
    )

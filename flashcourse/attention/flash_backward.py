"""The backward kernels: Dao (2023), "FlashAttention-2", algorithm 2, as two loops without atomics.

From the saved lse each kernel computes P again, tile by tile. With delta = rowsum(dO ∘ O):

    dV = Pᵀ dO     dP = dO Vᵀ     dS = P ∘ (dP - delta)     dQ = scale · dS K     dK = scale · dSᵀ Q

A program owns either a tile of dQ or a tile of dK and dV and sums it alone, in one fixed order:
two runs give the same bits. That costs QKᵀ and dO Vᵀ twice; adding dQ up with atomics would not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashcourse import runtime
from flashcourse.attention.flash_forward import LENGTHS
from flashcourse.attention.flash_tiles import (
    LOG2E,
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

# A GPU sums a score over head_dim in one order, whichever factor comes first. NumPy does not, and
# scores that are rounded otherwise than the forward's do not fit its lse.
INTERPRETED = tl.constexpr(runtime.interpreting())


@triton.jit
def load_lse(lse_head, rows, num_queries, RAGGED: tl.constexpr, NATURAL: tl.constexpr = False):
    """lse in the units of the scores. It is +inf where P must be 0: past the end, and in a row that
    sees no key (whose lse is -inf)."""
    if RAGGED:
        lse = tl.load(lse_head + rows, mask=rows < num_queries, other=float("inf"))
    else:
        lse = tl.load(lse_head + rows)
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    if not NATURAL:
        lse = lse * LOG2E
    return lse


@triton.jit
def probabilities(
    s, lse, score_scale, cap_in, cap_out, SOFTCAP: tl.constexpr, NATURAL: tl.constexpr = False
):
    """P from the raw scores QKᵀ, and d(capped score) / d(raw score · scale), 1 without softcap."""
    if SOFTCAP:
        t = tanh(s * cap_in)
        p = power(cap_out * t - lse, NATURAL)
        slope = 1.0 - t * t
    else:
        p = power(s * score_scale - lse, NATURAL)
        slope = 1.0
    return p, slope


@triton.jit
def add_to_dq(
    dq, q_i, do_i, lse_i, delta_i, k_head, v_head, k_offsets, v_offsets, stride_kn, stride_vn,
    begin, end, first_query, shift, num_keys, score_scale, left, right, cap_in, cap_out,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    TMA: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Add dS K of the tiles of keys from ``begin`` to ``end``."""
    NATURAL: tl.constexpr = q_i.dtype == tl.float32
    for j in range(begin, end):
        first_key = j * BLOCK_K
        if TMA:
            k_j = k_head.load([first_key, 0])
            v_j = v_head.load([first_key, 0])
        else:
            k_j = load_tile(
                k_head, k_offsets, first_key, num_keys, stride_kn, BLOCK_K, BLOCK_D, HEAD_DIM, EDGE
            )
            v_j = load_tile(
                v_head, v_offsets, first_key, num_keys, stride_vn, BLOCK_K, BLOCK_D, HEAD_DIM, EDGE
            )
        s = tl.dot(q_i, tl.trans(k_j), input_precision="ieee")  # (BLOCK_Q, BLOCK_K)
        dp = tl.dot(do_i, tl.trans(v_j), input_precision="ieee")
        p, slope = probabilities(s, lse_i[:, None], score_scale, cap_in, cap_out, SOFTCAP, NATURAL)
        if EDGE:
            rows = first_query + tl.arange(0, BLOCK_Q)[:, None]
            keys = first_key + tl.arange(0, BLOCK_K)[None, :]
            visible = visible_pairs(rows, keys, shift, num_keys, left, right, HAS_LEFT, HAS_RIGHT)
            p = tl.where(visible, p, 0.0)
        ds = p * (dp - delta_i[:, None]) * slope
        dq = tl.dot(ds.to(k_j.dtype), k_j, dq, input_precision="ieee")  # (BLOCK_Q, BLOCK_D)
    return dq


@triton.jit(do_not_specialize=LENGTHS)
def flash_backward_q_kernel(
    q, k, v, out, do, dq, lse, dlse, delta, cu_seqlens_q, cu_seqlens_k,
    stride_qb, stride_qh, stride_qn, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_on, stride_od,
    stride_dob, stride_doh, stride_don, stride_dod,
    stride_dqb, stride_dqh, stride_dqn, stride_dqd,
    heads, group, num_tiles, section, num_sequences, seq_q, seq_k,
    scale, score_scale, left, right, cap_in, cap_out,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    VARLEN: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_DLSE: tl.constexpr, WIDE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries, and their delta, which the kernel for dK and dV reads."""
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
    do_head = head_base(do, batch, head, start_q, stride_dob, stride_doh, stride_don)
    dq_head = head_base(dq, batch, head, start_q, stride_dqb, stride_dqh, stride_dqn)
    row_of_lse = (batch * heads + head).to(tl.int64) * seq_q + start_q

    q_offsets = tile_offsets(stride_qn, stride_qd, BLOCK_Q, BLOCK_D, WIDE)
    k_offsets = tile_offsets(stride_kn, stride_kd, BLOCK_K, BLOCK_D, WIDE)
    v_offsets = tile_offsets(stride_vn, stride_vd, BLOCK_K, BLOCK_D, WIDE)
    out_offsets = tile_offsets(stride_on, stride_od, BLOCK_Q, BLOCK_D, WIDE)
    do_offsets = tile_offsets(stride_don, stride_dod, BLOCK_Q, BLOCK_D, WIDE)
    out_i = load_tile(
        out_head, out_offsets, first_query, num_queries, stride_on, BLOCK_Q, BLOCK_D, HEAD_DIM, True
    )
    do_i = load_tile(
        do_head, do_offsets, first_query, num_queries, stride_don, BLOCK_Q, BLOCK_D, HEAD_DIM, True
    )
    delta_i = tl.sum(out_i.to(tl.float32) * do_i.to(tl.float32), 1)
    rows = first_query + tl.arange(0, BLOCK_Q)
    if HAS_DLSE:  # d lse / d S = P, so a gradient of lse enters where delta does
        delta_i -= tl.load(dlse + row_of_lse + rows, mask=rows < num_queries, other=0.0)
    tl.store(delta + row_of_lse + rows, delta_i, mask=rows < num_queries)
    lse_i = load_lse(lse + row_of_lse, rows, num_queries, True, q.dtype.element_ty == tl.float32)
    q_i = load_tile(
        q_head, q_offsets, first_query, num_queries, stride_qn, BLOCK_Q, BLOCK_D, HEAD_DIM, True
    )

    if TMA:
        k_head = tl.make_tensor_descriptor(
            k_head, [num_keys, HEAD_DIM], [stride_kn, 1], [BLOCK_K, BLOCK_D]
        )
        v_head = tl.make_tensor_descriptor(
            v_head, [num_keys, HEAD_DIM], [stride_vn, 1], [BLOCK_K, BLOCK_D]
        )

    dq_i = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    shift = num_keys - num_queries
    last_query = tl.minimum(first_query + BLOCK_Q, num_queries) - 1
    begin, full_begin, full_end, end = visible_tiles(
        first_query, last_query, shift, num_keys, left, right, BLOCK_K, HAS_LEFT, HAS_RIGHT
    )
    if HAS_LEFT:
        dq_i = add_to_dq(
            dq_i, q_i, do_i, lse_i, delta_i, k_head, v_head, k_offsets, v_offsets,
            stride_kn, stride_vn, begin, full_begin, first_query, shift, num_keys,
            score_scale, left, right, cap_in, cap_out,
            HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D, HAS_LEFT, HAS_RIGHT, SOFTCAP, TMA, True,
        )  # fmt: skip
    dq_i = add_to_dq(
        dq_i, q_i, do_i, lse_i, delta_i, k_head, v_head, k_offsets, v_offsets,
        stride_kn, stride_vn, full_begin, full_end, first_query, shift, num_keys,
        score_scale, left, right, cap_in, cap_out,
        HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D, HAS_LEFT, HAS_RIGHT, SOFTCAP, TMA, False,
    )  # fmt: skip
    dq_i = add_to_dq(
        dq_i, q_i, do_i, lse_i, delta_i, k_head, v_head, k_offsets, v_offsets,
        stride_kn, stride_vn, full_end, end, first_query, shift, num_keys,
        score_scale, left, right, cap_in, cap_out,
        HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D, HAS_LEFT, HAS_RIGHT, SOFTCAP, TMA, True,
    )  # fmt: skip
    dq_offsets = tile_offsets(stride_dqn, stride_dqd, BLOCK_Q, BLOCK_D, WIDE)
    store_tile(
        dq_head, dq_i * scale, dq_offsets, first_query, num_queries, stride_dqn,
        BLOCK_Q, BLOCK_D, HEAD_DIM,
    )  # fmt: skip


@triton.jit
def add_to_dk_dv(
    dk, dv, k_j, v_j, q_head, do_head, lse_head, delta_head, q_offsets, do_offsets,
    stride_qh, stride_qn, stride_doh, stride_don, seq_q, group,
    begin, end, first_key, shift, num_queries, num_keys,
    score_scale, left, right, cap_in, cap_out,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    GROUPED: tl.constexpr, TMA: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Add dSᵀ Q and Pᵀ dO of the tiles of queries from ``begin`` to ``end``, of every query head
    that reads these keys. One loop over all of them keeps the loads of the next tile in flight.

    Sᵀ = K Qᵀ is computed as such: transposing a finished P costs a trip through shared memory.
    """
    NATURAL: tl.constexpr = k_j.dtype == tl.float32
    for step in range(0, group * (end - begin)):
        i = begin + step
        if GROUPED:
            member = (step // (end - begin)).to(tl.int64)
            i = begin + step % (end - begin)
            q_member = q_head + member * stride_qh
            do_member = do_head + member * stride_doh
            lse_member = lse_head + member * seq_q
            delta_member = delta_head + member * seq_q
        else:
            q_member, do_member = q_head, do_head
            lse_member, delta_member = lse_head, delta_head
        first_query = i * BLOCK_Q
        rows = first_query + tl.arange(0, BLOCK_Q)
        if TMA:
            q_i = q_member.load([first_query, 0])
            do_i = do_member.load([first_query, 0])
        else:
            q_i = load_tile(
                q_member, q_offsets, first_query, num_queries, stride_qn,
                BLOCK_Q, BLOCK_D, HEAD_DIM, EDGE,
            )  # fmt: skip
            do_i = load_tile(
                do_member, do_offsets, first_query, num_queries, stride_don,
                BLOCK_Q, BLOCK_D, HEAD_DIM, EDGE,
            )  # fmt: skip
        lse_i = load_lse(lse_member, rows, num_queries, EDGE, NATURAL)
        if EDGE:
            delta_i = tl.load(delta_member + rows, mask=rows < num_queries, other=0.0)
        else:
            delta_i = tl.load(delta_member + rows)
        if INTERPRETED:
            s_t = tl.trans(tl.dot(q_i, tl.trans(k_j), input_precision="ieee"))
        else:
            s_t = tl.dot(k_j, tl.trans(q_i), input_precision="ieee")  # (BLOCK_K, BLOCK_Q)
        # The matrix unit can compute dP while the exponential is taken, where a tile is small
        # enough for both products to be in registers at once.
        if BLOCK_Q <= 64:
            dp_t = tl.dot(v_j, tl.trans(do_i), input_precision="ieee")
        p_t, slope = probabilities(
            s_t, lse_i[None, :], score_scale, cap_in, cap_out, SOFTCAP, NATURAL
        )
        if EDGE and (HAS_LEFT or HAS_RIGHT):
            # Keys past the end need no mask: their rows of dK and dV are not stored.
            keys = first_key + tl.arange(0, BLOCK_K)[:, None]
            visible = visible_pairs(
                rows[None, :], keys, shift, num_keys, left, right, HAS_LEFT, HAS_RIGHT
            )
            p_t = tl.where(visible, p_t, 0.0)
        dv = tl.dot(p_t.to(do_i.dtype), do_i, dv, input_precision="ieee")  # (BLOCK_K, BLOCK_D)
        if BLOCK_Q > 64:
            dp_t = tl.dot(v_j, tl.trans(do_i), input_precision="ieee")
        ds_t = p_t * (dp_t - delta_i[None, :]) * slope
        dk = tl.dot(ds_t.to(q_i.dtype), q_i, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=LENGTHS)
def flash_backward_kv_kernel(
    q, k, v, do, dk, dv, lse, delta, cu_seqlens_q, cu_seqlens_k,
    stride_qb, stride_qh, stride_qn, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_don, stride_dod,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd,
    stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    heads_kv, group, num_tiles, section, num_sequences, seq_q, seq_k,
    scale, score_scale, left, right, cap_in, cap_out,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    VARLEN: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    GROUPED: tl.constexpr, WIDE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys, summed over all query heads that read it."""
    first_key, head, batch, start_k, num_keys, start_q, num_queries = locate_tile(
        tl.program_id(0), tl.num_programs(0), num_tiles, heads_kv, section, cu_seqlens_k,
        cu_seqlens_q, num_sequences, seq_k, seq_q, BLOCK_K, VARLEN, False,
    )  # fmt: skip
    if first_key >= num_keys:
        return
    k_head = head_base(k, batch, head, start_k, stride_kb, stride_kh, stride_kn)
    v_head = head_base(v, batch, head, start_k, stride_vb, stride_vh, stride_vn)
    dk_head = head_base(dk, batch, head, start_k, stride_dkb, stride_dkh, stride_dkn)
    dv_head = head_base(dv, batch, head, start_k, stride_dvb, stride_dvh, stride_dvn)
    k_offsets = tile_offsets(stride_kn, stride_kd, BLOCK_K, BLOCK_D, WIDE)
    v_offsets = tile_offsets(stride_vn, stride_vd, BLOCK_K, BLOCK_D, WIDE)
    q_offsets = tile_offsets(stride_qn, stride_qd, BLOCK_Q, BLOCK_D, WIDE)
    do_offsets = tile_offsets(stride_don, stride_dod, BLOCK_Q, BLOCK_D, WIDE)
    k_j = load_tile(
        k_head, k_offsets, first_key, num_keys, stride_kn, BLOCK_K, BLOCK_D, HEAD_DIM, True
    )
    v_j = load_tile(
        v_head, v_offsets, first_key, num_keys, stride_vn, BLOCK_K, BLOCK_D, HEAD_DIM, True
    )

    dk_j = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    dv_j = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    shift = num_keys - num_queries
    last_key = tl.minimum(first_key + BLOCK_K, num_keys) - 1
    # Seen from a key the window is mirrored: query i sees key j, so j is seen from
    # j - shift - right to j - shift + left.
    begin, full_begin, full_end, end = visible_tiles(
        first_key, last_key, -shift, num_queries, right, left, BLOCK_Q, HAS_RIGHT, HAS_LEFT
    )
    first_member = head * group  # of the query heads that read this KV head
    q_head = head_base(q, batch, first_member, start_q, stride_qb, stride_qh, stride_qn)
    do_head = head_base(do, batch, first_member, start_q, stride_dob, stride_doh, stride_don)
    row_of_lse = (batch * heads_kv * group + first_member).to(tl.int64) * seq_q + start_q
    if TMA:  # only where each KV head has one query head
        q_head = tl.make_tensor_descriptor(
            q_head, [num_queries, HEAD_DIM], [stride_qn, 1], [BLOCK_Q, BLOCK_D]
        )
        do_head = tl.make_tensor_descriptor(
            do_head, [num_queries, HEAD_DIM], [stride_don, 1], [BLOCK_Q, BLOCK_D]
        )
    if HAS_RIGHT:
        dk_j, dv_j = add_to_dk_dv(
            dk_j, dv_j, k_j, v_j, q_head, do_head, lse + row_of_lse, delta + row_of_lse,
            q_offsets, do_offsets, stride_qh, stride_qn, stride_doh, stride_don, seq_q, group,
            begin, full_begin, first_key, shift, num_queries, num_keys,
            score_scale, left, right, cap_in, cap_out,
            HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D, HAS_LEFT, HAS_RIGHT, SOFTCAP, GROUPED, TMA, True,
        )  # fmt: skip
    dk_j, dv_j = add_to_dk_dv(
        dk_j, dv_j, k_j, v_j, q_head, do_head, lse + row_of_lse, delta + row_of_lse,
        q_offsets, do_offsets, stride_qh, stride_qn, stride_doh, stride_don, seq_q, group,
        full_begin, full_end, first_key, shift, num_queries, num_keys,
        score_scale, left, right, cap_in, cap_out,
        HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D, HAS_LEFT, HAS_RIGHT, SOFTCAP, GROUPED, TMA, False,
    )  # fmt: skip
    dk_j, dv_j = add_to_dk_dv(
        dk_j, dv_j, k_j, v_j, q_head, do_head, lse + row_of_lse, delta + row_of_lse,
        q_offsets, do_offsets, stride_qh, stride_qn, stride_doh, stride_don, seq_q, group,
        full_end, end, first_key, shift, num_queries, num_keys,
        score_scale, left, right, cap_in, cap_out,
        HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D, HAS_LEFT, HAS_RIGHT, SOFTCAP, GROUPED, TMA, True,
    )  # fmt: skip
    dk_offsets = tile_offsets(stride_dkn, stride_dkd, BLOCK_K, BLOCK_D, WIDE)
    dv_offsets = tile_offsets(stride_dvn, stride_dvd, BLOCK_K, BLOCK_D, WIDE)
    store_tile(
        dk_head, dk_j * scale, dk_offsets, first_key, num_keys, stride_dkn,
        BLOCK_K, BLOCK_D, HEAD_DIM,
    )  # fmt: skip
    store_tile(
        dv_head, dv_j, dv_offsets, first_key, num_keys, stride_dvn, BLOCK_K, BLOCK_D, HEAD_DIM
    )

"""dQ for Hopper, in Gluon: ``flash_backward``'s loop over keys, scheduled by hand.

Both products of a tile are queued on the matrix units without a gap, and the arithmetic between
them runs while the next one is computed: P while dP is, and the product of dS is only waited for
when the next tile's scores are there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from flashcourse.attention import flash_backward
from flashcourse.attention.flash_forward import LENGTHS
from flashcourse.attention.flash_hopper_tiles import (
    STAGES,
    await_tile,
    block_barrier,
    drop_barriers,
    fetch,
    head_base,
    load_rows,
    locate_tile,
    new_barriers,
    store_rows,
    visible_pairs,
    visible_tiles,
)

# Entry by entry, without layouts: the same in both languages.
load_lse = gluon.jit(flash_backward.load_lse.fn)
probabilities = gluon.jit(flash_backward.probabilities.fn)


@gluon.jit
def add_to_dq(
    dq, t_begin, t_end, q_tile, do_tile, lse_i, delta_i, k_desc, v_desc, k_tiles, v_tiles,
    k_barriers, v_barriers, begin, end, first_query, shift, num_keys,
    scale_log2, left, right, cap_in, cap_out,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr, EDGE: gl.constexpr, S_LAYOUT: gl.constexpr, DS_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add dS K of tiles ``t_begin`` to ``t_end``; the last product is in flight on return."""
    for t in range(t_begin, t_end):
        k_j = k_tiles.index(t % STAGES)
        v_j = v_tiles.index(t % STAGES)
        nothing = gl.zeros((BLOCK_Q, BLOCK_K), gl.float32, S_LAYOUT)
        await_tile(k_barriers, t, True)
        s = warpgroup_mma(q_tile, k_j.permute((1, 0)), nothing, use_acc=False, is_async=True)
        await_tile(v_barriers, t, True)
        dp = warpgroup_mma(do_tile, v_j.permute((1, 0)), nothing, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])  # S and the dS K before it are done, dP is in flight
        block_barrier()  # every warp has read tile t - 1
        fetch(k_desc, k_tiles, k_barriers, t + STAGES - 1, begin, end)
        fetch(v_desc, v_tiles, v_barriers, t + STAGES - 1, begin, end)
        p, slope = probabilities(s, gl.expand_dims(lse_i, 1), scale_log2, cap_in, cap_out, SOFTCAP)
        if EDGE:
            rows = first_query + gl.arange(0, BLOCK_Q, gl.SliceLayout(1, S_LAYOUT))
            keys = (begin + t) * BLOCK_K + gl.arange(0, BLOCK_K, gl.SliceLayout(0, S_LAYOUT))
            visible = visible_pairs(
                gl.expand_dims(rows, 1), gl.expand_dims(keys, 0), shift, num_keys, left, right,
                HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
            p = gl.where(visible, p, 0.0)
        await_tile(v_barriers, t, True)  # passes: it only keeps the wait below P
        dp, p = warpgroup_mma_wait(0, deps=[dp, p])
        ds = p * (dp - gl.expand_dims(delta_i, 1)) * slope
        ds = gl.convert_layout(ds.to(k_tiles.dtype), DS_LAYOUT)
        dq = warpgroup_mma(ds, k_j, dq, is_async=True)
    return dq


@gluon.jit(do_not_specialize=LENGTHS)
def flash_backward_q_hopper_kernel(
    q, k, v, out, do, dq, lse, dlse, delta, cu_seqlens_q, cu_seqlens_k,
    stride_qb, stride_qh, stride_qn, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_on, stride_od,
    stride_dob, stride_doh, stride_don, stride_dod,
    stride_dqb, stride_dqh, stride_dqn, stride_dqd,
    heads, group, num_tiles, section, num_sequences, seq_q, seq_k,
    scale, scale_log2, left, right, cap_in, cap_out,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
    VARLEN: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    HAS_DLSE: gl.constexpr, WIDE: gl.constexpr, TMA: gl.constexpr,
):  # fmt: skip
    """dQ and delta of one tile of queries; the arguments are ``flash_backward_q_kernel``'s."""
    first_query, head, batch, start_q, num_queries, start_k, num_keys = locate_tile(
        gl.program_id(0), gl.num_programs(0), num_tiles, heads, section, cu_seqlens_q,
        cu_seqlens_k, num_sequences, seq_q, seq_k, BLOCK_Q, VARLEN, HAS_RIGHT,
    )  # fmt: skip
    if first_query >= num_queries:
        return
    dtype: gl.constexpr = q.dtype.element_ty
    warps: gl.constexpr = gl.num_warps()
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BLOCK_K, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BLOCK_D, 16])
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    memory_layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_D, BLOCK_D // 8], [warps, 1], [1, 0]
    )
    q_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_Q, BLOCK_D], dtype)
    kv_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_D], dtype)

    q_head = head_base(q, batch, head, start_q, stride_qb, stride_qh, stride_qn)
    k_head = head_base(k, batch, head // group, start_k, stride_kb, stride_kh, stride_kn)
    v_head = head_base(v, batch, head // group, start_k, stride_vb, stride_vh, stride_vn)
    out_head = head_base(out, batch, head, start_q, stride_ob, stride_oh, stride_on)
    do_head = head_base(do, batch, head, start_q, stride_dob, stride_doh, stride_don)
    dq_head = head_base(dq, batch, head, start_q, stride_dqb, stride_dqh, stride_dqn)
    row_of_lse = (batch * heads + head).to(gl.int64) * seq_q + start_q

    rows = first_query + gl.arange(0, BLOCK_Q, gl.SliceLayout(1, memory_layout))
    columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, memory_layout))
    inside = gl.expand_dims(rows < num_queries, 1) & gl.expand_dims(columns < HEAD_DIM, 0)
    if WIDE:
        rows = rows.to(gl.int64)
        columns = columns.to(gl.int64)
    shift = num_keys - num_queries
    last_query = gl.minimum(first_query + BLOCK_Q, num_queries) - 1
    begin, full_begin, full_end, end = visible_tiles(
        first_query, last_query, shift, num_keys, left, right, BLOCK_K, HAS_LEFT, HAS_RIGHT
    )
    out_i = load_rows(out_head, rows, columns, stride_on, stride_od, inside)
    do_i = load_rows(do_head, rows, columns, stride_don, stride_dod, inside)
    delta_i = gl.sum(out_i.to(gl.float32) * do_i.to(gl.float32), 1)
    if HAS_DLSE:  # d lse / d S = P, so a gradient of lse enters where delta does
        delta_i -= gl.load(dlse + row_of_lse + rows, mask=rows < num_queries, other=0.0)
    gl.store(delta + row_of_lse + rows, delta_i, mask=rows < num_queries)

    dq_i = gl.zeros((BLOCK_Q, BLOCK_D), gl.float32, d_layout)
    if begin < end:
        k_desc = tma.make_tensor_descriptor(
            k_head, [num_keys, HEAD_DIM], [stride_kn, 1], [BLOCK_K, BLOCK_D], kv_shared
        )
        v_desc = tma.make_tensor_descriptor(
            v_head, [num_keys, HEAD_DIM], [stride_vn, 1], [BLOCK_K, BLOCK_D], kv_shared
        )
        k_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_D], kv_shared)
        v_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_D], kv_shared)
        k_barriers = new_barriers()
        v_barriers = new_barriers()
        q_i = load_rows(q_head, rows, columns, stride_qn, stride_qd, inside)
        q_tile = gl.allocate_shared_memory(dtype, [BLOCK_Q, BLOCK_D], q_shared, q_i)
        do_tile = gl.allocate_shared_memory(dtype, [BLOCK_Q, BLOCK_D], q_shared, do_i)
        fence_async_shared()
        block_barrier()
        fetch(k_desc, k_tiles, k_barriers, 0, begin, end)
        fetch(v_desc, v_tiles, v_barriers, 0, begin, end)
        lse_i = load_lse(
            lse + row_of_lse, first_query + gl.arange(0, BLOCK_Q, row_layout), num_queries, True
        )
        delta_s = gl.convert_layout(delta_i, row_layout)
        dq_sum = warpgroup_mma_init(dq_i)
        if HAS_LEFT:
            dq_sum = add_to_dq(
                dq_sum, 0, full_begin - begin, q_tile, do_tile, lse_i, delta_s, k_desc, v_desc,
                k_tiles, v_tiles, k_barriers, v_barriers, begin, end, first_query, shift, num_keys,
                scale_log2, left, right, cap_in, cap_out,
                BLOCK_Q, BLOCK_K, HAS_LEFT, HAS_RIGHT, SOFTCAP, True, s_layout, ds_layout,
            )  # fmt: skip
        dq_sum = add_to_dq(
            dq_sum, full_begin - begin, full_end - begin, q_tile, do_tile, lse_i, delta_s,
            k_desc, v_desc, k_tiles, v_tiles, k_barriers, v_barriers,
            begin, end, first_query, shift, num_keys,
            scale_log2, left, right, cap_in, cap_out,
            BLOCK_Q, BLOCK_K, HAS_LEFT, HAS_RIGHT, SOFTCAP, False, s_layout, ds_layout,
        )  # fmt: skip
        dq_sum = add_to_dq(
            dq_sum, full_end - begin, end - begin, q_tile, do_tile, lse_i, delta_s,
            k_desc, v_desc, k_tiles, v_tiles, k_barriers, v_barriers,
            begin, end, first_query, shift, num_keys,
            scale_log2, left, right, cap_in, cap_out,
            BLOCK_Q, BLOCK_K, HAS_LEFT, HAS_RIGHT, SOFTCAP, True, s_layout, ds_layout,
        )  # fmt: skip
        dq_i = warpgroup_mma_wait(0, deps=[dq_sum])
        drop_barriers(k_barriers)
        drop_barriers(v_barriers)
    store_rows(dq_head, dq_i * scale, rows, columns, stride_dqn, stride_dqd, inside, memory_layout)

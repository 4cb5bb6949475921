"""dK and dV for Hopper, in Gluon: ``flash_backward``'s loop over queries, scheduled by hand.

All products of a tile are queued on the matrix units without a gap, and the arithmetic between
them runs while the next one is computed: P while dP is, dS while dV is, and the product of dS is
only waited for when the next tile's scores are there. The heads of a group are one stream.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
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
    copy_tile,
    drop_barriers,
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
def next_tile(i, member, group, GROUPED: gl.constexpr):
    """What comes after ``member``'s tile ``i``: the next head's, or all heads' tile ``i - 1``."""
    if GROUPED:
        member += 1
        around = member == group
        i -= around.to(gl.int32)
        member = gl.where(around, 0, member)
    else:
        i -= 1
    return i, member


@gluon.jit
def fetch_of_group(
    descriptor, tiles, barriers, t, i, member, begin, BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """Start the copy of ``member``'s tile ``i``, the group's ``t``-th, if there is such a tile."""
    slot = t % STAGES
    there = i >= begin
    mbarrier.expect(barriers.index(slot), descriptor.block_type.nbytes, pred=there)
    copy_tile(
        descriptor, [member, i * BLOCK_Q, 0], barriers.index(slot), tiles.index(slot), pred=there
    )


@gluon.jit
def load_statistics(
    lse_head, delta_head, i, member, seq_q, num_queries,
    BLOCK_Q: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """lse and delta of the rows of ``member``'s tile ``i``, one number a thread."""
    rows = gl.maximum(i, 0) * BLOCK_Q + gl.arange(0, BLOCK_Q, LAYOUT)
    skipped = member.to(gl.int64) * seq_q
    lse_i = load_lse(lse_head + skipped, rows, num_queries, True)
    delta_i = gl.load(delta_head + skipped + rows, mask=rows < num_queries, other=0.0)
    return lse_i, delta_i


@gluon.jit
def add_to_dk_dv(
    dk, dv, lse_next, delta_next, i, member, statistics, t_begin, t_end, k_tile, v_tile,
    lse_head, delta_head, q_desc, do_desc, q_tiles, do_tiles, q_barriers, do_barriers,
    begin, group, seq_q, first_key, shift, num_queries, num_keys,
    scale_log2, left, right, cap_in, cap_out,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, GROUPED: gl.constexpr, EDGE: gl.constexpr,
    S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add dSᵀ Q and Pᵀ dO of tiles ``t_begin`` to ``t_end``; dSᵀ Q is in flight on return.

    ``i`` and ``member`` say whose tile ``t_begin`` is. They are counted along, since a division
    would be paid for in every tile.
    """
    gl.static_assert(STAGES == 2)  # the tile that is fetched is the next one
    row_layout: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    one_layout: gl.constexpr = lse_next.type.layout
    for t in range(t_begin, t_end):
        q_i = q_tiles.index(t % STAGES).reshape([BLOCK_Q, BLOCK_D])
        do_i = do_tiles.index(t % STAGES).reshape([BLOCK_Q, BLOCK_D])
        nothing = gl.zeros((BLOCK_K, BLOCK_Q), gl.float32, S_LAYOUT)
        await_tile(q_barriers, t, True)
        s_t = warpgroup_mma(k_tile, q_i.permute((1, 0)), nothing, use_acc=False, is_async=True)
        await_tile(do_barriers, t, True)
        dp_t = warpgroup_mma(v_tile, do_i.permute((1, 0)), nothing, use_acc=False, is_async=True)
        # Every thread needs 16 of the tile's 64 numbers; they come by way of shared memory.
        statistics.index(0).store(lse_next)
        statistics.index(1).store(delta_next)
        i_next, member_next = next_tile(i, member, group, GROUPED)
        lse_next, delta_next = load_statistics(
            lse_head, delta_head, i_next, member_next, seq_q, num_queries, BLOCK_Q, one_layout
        )
        s_t = warpgroup_mma_wait(1, deps=[s_t])  # Sᵀ and the dSᵀ Q before it are done
        block_barrier()  # every warp has read tile t - 1
        fetch_of_group(q_desc, q_tiles, q_barriers, t + 1, i_next, member_next, begin, BLOCK_Q)
        fetch_of_group(do_desc, do_tiles, do_barriers, t + 1, i_next, member_next, begin, BLOCK_Q)
        lse_i = statistics.index(0).load(row_layout)
        p_t, slope = probabilities(
            s_t, gl.expand_dims(lse_i, 0), scale_log2, cap_in, cap_out, SOFTCAP
        )
        if EDGE and (HAS_LEFT or HAS_RIGHT):
            # Keys past the end need no mask: their rows of dK and dV are not stored.
            rows = i * BLOCK_Q + gl.arange(0, BLOCK_Q, row_layout)
            keys = first_key + gl.arange(0, BLOCK_K, gl.SliceLayout(1, S_LAYOUT))
            visible = visible_pairs(
                gl.expand_dims(rows, 0), gl.expand_dims(keys, 1), shift, num_keys, left, right,
                HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
            p_t = gl.where(visible, p_t, 0.0)
        p_low = gl.convert_layout(p_t.to(q_tiles.dtype), P_LAYOUT)
        dv = warpgroup_mma(p_low, do_i, dv, is_async=True)
        dp_t = warpgroup_mma_wait(1, deps=[dp_t])  # Pᵀ dO is in flight
        delta_i = statistics.index(1).load(row_layout)
        ds_t = p_t * (dp_t - gl.expand_dims(delta_i, 0)) * slope
        ds_t = gl.convert_layout(ds_t.to(q_tiles.dtype), P_LAYOUT)
        dk = warpgroup_mma(ds_t, q_i, dk, is_async=True)
        i, member = i_next, member_next
    return dk, dv, lse_next, delta_next, i, member


@gluon.jit(do_not_specialize=LENGTHS)
def flash_backward_kv_hopper_kernel(
    q, k, v, do, dk, dv, lse, delta, cu_seqlens_q, cu_seqlens_k,
    stride_qb, stride_qh, stride_qn, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_don, stride_dod,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd,
    stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    heads_kv, group, num_tiles, section, num_sequences, seq_q, seq_k,
    scale, scale_log2, left, right, cap_in, cap_out,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
    VARLEN: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    GROUPED: gl.constexpr, WIDE: gl.constexpr, TMA: gl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys; the arguments are ``flash_backward_kv_kernel``'s."""
    first_key, head, batch, start_k, num_keys, start_q, num_queries = locate_tile(
        gl.program_id(0), gl.num_programs(0), num_tiles, heads_kv, section, cu_seqlens_k,
        cu_seqlens_q, num_sequences, seq_k, seq_q, BLOCK_K, VARLEN, False,
    )  # fmt: skip
    if first_key >= num_keys:
        return
    dtype: gl.constexpr = q.dtype.element_ty
    warps: gl.constexpr = gl.num_warps()
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BLOCK_Q, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BLOCK_D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    memory_layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_D, BLOCK_D // 8], [warps, 1], [1, 0]
    )
    kv_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_D], dtype)
    one_layout: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])

    q_head = head_base(q, batch, head * group, start_q, stride_qb, stride_qh, stride_qn)
    k_head = head_base(k, batch, head, start_k, stride_kb, stride_kh, stride_kn)
    v_head = head_base(v, batch, head, start_k, stride_vb, stride_vh, stride_vn)
    do_head = head_base(do, batch, head * group, start_q, stride_dob, stride_doh, stride_don)
    dk_head = head_base(dk, batch, head, start_k, stride_dkb, stride_dkh, stride_dkn)
    dv_head = head_base(dv, batch, head, start_k, stride_dvb, stride_dvh, stride_dvn)
    row_of_lse = ((batch * heads_kv + head) * group).to(gl.int64) * seq_q + start_q

    rows = first_key + gl.arange(0, BLOCK_K, gl.SliceLayout(1, memory_layout))
    columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, memory_layout))
    inside = gl.expand_dims(rows < num_keys, 1) & gl.expand_dims(columns < HEAD_DIM, 0)
    if WIDE:
        rows = rows.to(gl.int64)
        columns = columns.to(gl.int64)
    shift = num_keys - num_queries
    last_key = gl.minimum(first_key + BLOCK_K, num_keys) - 1
    begin, full_begin, full_end, end = visible_tiles(  # mirrored: see flash_backward
        first_key, last_key, -shift, num_queries, right, left, BLOCK_Q, HAS_RIGHT, HAS_LEFT
    )
    if not HAS_LEFT:
        full_end = end  # queries past the end need no mask: their lse is infinite
    dk_j = gl.zeros((BLOCK_K, BLOCK_D), gl.float32, d_layout)
    dv_j = gl.zeros((BLOCK_K, BLOCK_D), gl.float32, d_layout)
    if begin < end:
        # One descriptor holds all query heads of the group, so the copies run ahead from one to
        # the next. A tile of queries is taken with all heads, then the one before it: under a
        # causal mask all programs see the last queries, so those that begin together walk
        # together, and what one has read the others find in L2.
        group_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
            [1, BLOCK_Q, BLOCK_D], dtype
        )
        count = end - begin
        q_desc = tma.make_tensor_descriptor(
            q_head, [group, num_queries, HEAD_DIM], [stride_qh, stride_qn, 1],
            [1, BLOCK_Q, BLOCK_D], group_shared,
        )  # fmt: skip
        do_desc = tma.make_tensor_descriptor(
            do_head, [group, num_queries, HEAD_DIM], [stride_doh, stride_don, 1],
            [1, BLOCK_Q, BLOCK_D], group_shared,
        )  # fmt: skip
        q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_Q, BLOCK_D], group_shared)
        do_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_Q, BLOCK_D], group_shared)
        statistics = gl.allocate_shared_memory(
            gl.float32, [2, BLOCK_Q], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        )
        q_barriers = new_barriers()
        do_barriers = new_barriers()
        k_j = load_rows(k_head, rows, columns, stride_kn, stride_kd, inside)
        v_j = load_rows(v_head, rows, columns, stride_vn, stride_vd, inside)
        k_tile = gl.allocate_shared_memory(dtype, [BLOCK_K, BLOCK_D], kv_shared, k_j)
        v_tile = gl.allocate_shared_memory(dtype, [BLOCK_K, BLOCK_D], kv_shared, v_j)
        fence_async_shared()
        block_barrier()
        none = count * 0
        fetch_of_group(q_desc, q_tiles, q_barriers, none, end - 1, none, begin, BLOCK_Q)
        fetch_of_group(do_desc, do_tiles, do_barriers, none, end - 1, none, begin, BLOCK_Q)
        lse_head = lse + row_of_lse
        delta_head = delta + row_of_lse
        lse_next, delta_next = load_statistics(
            lse_head, delta_head, end - 1, none, seq_q, num_queries, BLOCK_Q, one_layout
        )
        dk_sum = warpgroup_mma_init(dk_j)
        dv_sum = warpgroup_mma_init(dv_j)
        i = end - 1
        member = none
        if HAS_LEFT:
            dk_sum, dv_sum, lse_next, delta_next, i, member = add_to_dk_dv(
                dk_sum, dv_sum, lse_next, delta_next, i, member, statistics,
                none, (end - full_end) * group, k_tile, v_tile,
                lse_head, delta_head, q_desc, do_desc, q_tiles, do_tiles, q_barriers, do_barriers,
                begin, group, seq_q, first_key, shift, num_queries, num_keys,
                scale_log2, left, right, cap_in, cap_out,
                BLOCK_Q, BLOCK_K, BLOCK_D, HAS_LEFT, HAS_RIGHT, SOFTCAP, GROUPED, True,
                s_layout, p_layout,
            )  # fmt: skip
        dk_sum, dv_sum, lse_next, delta_next, i, member = add_to_dk_dv(
            dk_sum, dv_sum, lse_next, delta_next, i, member, statistics,
            (end - full_end) * group, (end - full_begin) * group, k_tile, v_tile,
            lse_head, delta_head, q_desc, do_desc, q_tiles, do_tiles, q_barriers, do_barriers,
            begin, group, seq_q, first_key, shift, num_queries, num_keys,
            scale_log2, left, right, cap_in, cap_out,
            BLOCK_Q, BLOCK_K, BLOCK_D, HAS_LEFT, HAS_RIGHT, SOFTCAP, GROUPED, False,
            s_layout, p_layout,
        )  # fmt: skip
        if HAS_RIGHT:
            dk_sum, dv_sum, lse_next, delta_next, i, member = add_to_dk_dv(
                dk_sum, dv_sum, lse_next, delta_next, i, member, statistics,
                (end - full_begin) * group, count * group, k_tile, v_tile,
                lse_head, delta_head, q_desc, do_desc, q_tiles, do_tiles, q_barriers, do_barriers,
                begin, group, seq_q, first_key, shift, num_queries, num_keys,
                scale_log2, left, right, cap_in, cap_out,
                BLOCK_Q, BLOCK_K, BLOCK_D, HAS_LEFT, HAS_RIGHT, SOFTCAP, GROUPED, True,
                s_layout, p_layout,
            )  # fmt: skip
        dk_j, dv_j = warpgroup_mma_wait(0, deps=[dk_sum, dv_sum])
        drop_barriers(q_barriers)
        drop_barriers(do_barriers)
    store_rows(dk_head, dk_j * scale, rows, columns, stride_dkn, stride_dkd, inside, memory_layout)
    store_rows(dv_head, dv_j, rows, columns, stride_dvn, stride_dvd, inside, memory_layout)

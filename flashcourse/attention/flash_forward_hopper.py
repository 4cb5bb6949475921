"""The forward kernel for Hopper, in Gluon: the same algorithm, scheduled by hand.

Triton's compiler waits for a matrix product as soon as a loop uses it, so its forward kernel
computes the softmax while the matrix units rest. Here the products are started and waited for in
the open (Shah et al., 2024, "FlashAttention-3", section 3.2): while a tile's softmax runs, the
product P V of the tile before is in flight. Everything else, the names included, is
``flash_forward``'s.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashcourse.attention.flash_forward import LENGTHS
from flashcourse.attention.flash_hopper_tiles import (
    LN2,
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
    tanh,
    visible_pairs,
    visible_tiles,
)


@gluon.jit
def softmax_step(
    s, m, l, first_query, first_key, shift, num_keys, scale_log2, left, right, cap_in, cap_out,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """P of a tile, the new maximum and sum, and the factor for what was summed before."""
    layout: gl.constexpr = s.type.layout
    factor = scale_log2
    if SOFTCAP:
        s = cap_out * tanh(s * cap_in)
        factor = 1.0
    if EDGE:
        rows = first_query + gl.arange(0, BLOCK_Q, gl.SliceLayout(1, layout))
        keys = first_key + gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
        rows = gl.expand_dims(rows, 1)
        keys = gl.expand_dims(keys, 0)
        visible = visible_pairs(rows, keys, shift, num_keys, left, right, HAS_LEFT, HAS_RIGHT)
        s = gl.where(visible, s * factor, float("-inf"))
        factor = 1.0
    m_new = gl.maximum(m, gl.max(s, 1) * factor)
    pivot = gl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - (-inf) would be NaN
    p = gl.exp2(s * factor - gl.expand_dims(pivot, 1))
    rescale = gl.exp2(m - pivot)
    l = l * rescale + gl.sum(p, 1)
    return p, m_new, l, rescale


@gluon.jit
def attend(
    o, p, m, l, t_begin, t_end, q_i, k_desc, v_desc, k_tiles, v_tiles, k_barriers, v_barriers,
    begin, end, first_query, shift, num_keys, scale_log2, left, right, cap_in, cap_out,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr, EDGE: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Tiles ``t_begin`` to ``t_end``; ``p`` is the tile before, whose product with V is due."""
    for t in range(t_begin, t_end):
        k_j = k_tiles.index(t % STAGES)
        nothing = gl.zeros((BLOCK_Q, BLOCK_K), gl.float32, S_LAYOUT)
        s = warpgroup_mma(q_i, k_j.permute((1, 0)), nothing, use_acc=False, is_async=True)
        p_before = gl.convert_layout(p.to(k_tiles.dtype), gl.DotOperandLayout(0, o.type.layout, 2))
        await_tile(v_barriers, t - 1, True)
        o = warpgroup_mma(p_before, v_tiles.index((t - 1) % STAGES), o, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])  # S is there, P V still in flight
        p, m, l, rescale = softmax_step(
            s, m, l, first_query, (begin + t) * BLOCK_K, shift, num_keys,
            scale_log2, left, right, cap_in, cap_out,
            BLOCK_Q, BLOCK_K, HAS_LEFT, HAS_RIGHT, SOFTCAP, EDGE,
        )  # fmt: skip
        await_tile(k_barriers, t + 1, begin + t + 1 < end)
        o, p = warpgroup_mma_wait(0, deps=[o, p])
        block_barrier()  # every warp has read tile t of K and tile t - 1 of V
        fetch(k_desc, k_tiles, k_barriers, t + STAGES, begin, end)
        fetch(v_desc, v_tiles, v_barriers, t + STAGES - 1, begin, end)
        o = o * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, o.type.layout)), 1)
    return o, p, m, l


@gluon.jit(do_not_specialize=LENGTHS)
def flash_forward_hopper_kernel(
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k,
    stride_qb, stride_qh, stride_qn, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_on, stride_od,
    heads, group, num_tiles, num_sequences, seq_q, seq_k,
    scale_log2, left, right, cap_in, cap_out,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
    VARLEN: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    NEGATE: gl.constexpr, WIDE: gl.constexpr, TMA: gl.constexpr,
):  # fmt: skip
    """out and lse of one tile of queries; the arguments are ``flash_forward_kernel``'s."""
    first_query, head, batch, start_q, num_queries, start_k, num_keys = locate_tile(
        num_tiles, heads, cu_seqlens_q, cu_seqlens_k, num_sequences, seq_q, seq_k, BLOCK_Q, VARLEN
    )
    if first_query >= num_queries:
        return
    dtype: gl.constexpr = q.dtype.element_ty
    warps: gl.constexpr = gl.num_warps()
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BLOCK_K, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BLOCK_D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
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
    lse_head = lse + (batch * heads + head).to(gl.int64) * seq_q + start_q

    shift = num_keys - num_queries  # query i stands at key i + shift
    last_query = gl.minimum(first_query + BLOCK_Q, num_queries) - 1
    begin, full_begin, full_end, end = visible_tiles(
        first_query, last_query, shift, num_keys, left, right, BLOCK_K, HAS_LEFT, HAS_RIGHT
    )

    o = gl.zeros((BLOCK_Q, BLOCK_D), gl.float32, o_layout)
    m = gl.full((BLOCK_Q,), float("-inf"), gl.float32, row_layout)
    l = gl.zeros((BLOCK_Q,), gl.float32, row_layout)

    # rows and columns of this tile of q and of out
    rows = first_query + gl.arange(0, BLOCK_Q, gl.SliceLayout(1, memory_layout))
    columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, memory_layout))
    inside = gl.expand_dims(rows < num_queries, 1) & gl.expand_dims(columns < HEAD_DIM, 0)
    if WIDE:
        rows = rows.to(gl.int64)
        columns = columns.to(gl.int64)

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
        fence_async_shared()
        block_barrier()
        fetch(k_desc, k_tiles, k_barriers, 0, begin, end)
        fetch(v_desc, v_tiles, v_barriers, 0, begin, end)
        fetch(k_desc, k_tiles, k_barriers, 1, begin, end)

        q_i = load_rows(q_head, rows, columns, stride_qn, stride_qd, inside)
        if NEGATE:
            q_i = -q_i
        q_tile = gl.allocate_shared_memory(dtype, [BLOCK_Q, BLOCK_D], q_shared, q_i)
        fence_async_shared()
        block_barrier()
        # From registers, because reading Q and K from shared memory together would be its limit.
        q_i = q_tile.load(gl.DotOperandLayout(0, s_layout, 2))

        # The first tile has nothing to overlap with. It may lie on an edge, so it is masked.
        await_tile(k_barriers, 0, True)
        k_j = k_tiles.index(0)
        nothing = gl.zeros((BLOCK_Q, BLOCK_K), gl.float32, s_layout)
        s = warpgroup_mma(q_i, k_j.permute((1, 0)), nothing, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        p, m, l, _ = softmax_step(
            s, m, l, first_query, begin * BLOCK_K, shift, num_keys,
            scale_log2, left, right, cap_in, cap_out,
            BLOCK_Q, BLOCK_K, HAS_LEFT, HAS_RIGHT, SOFTCAP, True,
        )  # fmt: skip
        await_tile(k_barriers, 1, begin + 1 < end)
        block_barrier()
        fetch(k_desc, k_tiles, k_barriers, 2, begin, end)
        fetch(v_desc, v_tiles, v_barriers, 1, begin, end)

        full_first = gl.maximum(full_begin - begin, 1)
        full_last = gl.maximum(full_end - begin, full_first)
        if HAS_LEFT:
            o, p, m, l = attend(
                o, p, m, l, 1, full_first, q_i, k_desc, v_desc,
                k_tiles, v_tiles, k_barriers, v_barriers,
                begin, end, first_query, shift, num_keys, scale_log2, left, right, cap_in, cap_out,
                BLOCK_Q, BLOCK_K, HAS_LEFT, HAS_RIGHT, SOFTCAP, True, s_layout,
            )  # fmt: skip
        o, p, m, l = attend(
            o, p, m, l, full_first, full_last, q_i, k_desc, v_desc,
            k_tiles, v_tiles, k_barriers, v_barriers,
            begin, end, first_query, shift, num_keys, scale_log2, left, right, cap_in, cap_out,
            BLOCK_Q, BLOCK_K, HAS_LEFT, HAS_RIGHT, SOFTCAP, False, s_layout,
        )  # fmt: skip
        o, p, m, l = attend(
            o, p, m, l, full_last, end - begin, q_i, k_desc, v_desc,
            k_tiles, v_tiles, k_barriers, v_barriers,
            begin, end, first_query, shift, num_keys, scale_log2, left, right, cap_in, cap_out,
            BLOCK_Q, BLOCK_K, HAS_LEFT, HAS_RIGHT, SOFTCAP, True, s_layout,
        )  # fmt: skip
        last = end - begin - 1
        await_tile(v_barriers, last, True)
        p_last = gl.convert_layout(p.to(dtype), p_layout)
        o = warpgroup_mma(p_last, v_tiles.index(last % STAGES), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        drop_barriers(k_barriers)
        drop_barriers(v_barriers)

    safe_l = gl.where(l == 0.0, 1.0, l)  # a row that sees no key: 0 / 1, not 0 / 0
    scale_rows = gl.convert_layout(1.0 / safe_l, gl.SliceLayout(1, o_layout))
    o = o * gl.expand_dims(scale_rows, 1)
    lse_i = gl.where(l == 0.0, float("-inf"), (m + gl.log2(safe_l)) * LN2)
    lse_rows = first_query + gl.arange(0, BLOCK_Q, row_layout)
    gl.store(lse_head + lse_rows, lse_i, mask=lse_rows < num_queries)
    store_rows(out_head, o, rows, columns, stride_on, stride_od, inside, memory_layout)

"""The forward kernel for Hopper, in Gluon: ``flash_forward``'s loop, divided among warps by hand.

Three warps copy tiles of Q, K and V into shared memory. Two warp groups own half of the tile of
queries each and share K and V. In each of them the matrix units compute Q Kᵀ of a tile and
P V of the tile before, and the exponentials are taken while P V runs: the schedule of
FlashAttention-3 (Shah et al., 2024, sections 3.1 and 3.2).

A dense batch is computed by as many programs as the GPU runs at a time. Each goes through several
tiles of queries, and its copies run ahead: the next tile and its first keys are there when the
output of the last one has been written.

One descriptor serves all batches and heads of a dense batch: to make one takes as long as a tile or
two of keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
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
    copy_tile,
    count_visits,
    head_base,
    item_of_visit,
    locate_tile,
    new_barriers,
    store_rows,
    tanh,
    visible_pairs,
    visible_tiles,
)

GROUPS = gl.constexpr(2)  # warp groups that share the tiles of K and V
REGISTERS = gl.constexpr(240)  # a thread of them; all that the copying warps leave
COPY_REGISTERS = gl.constexpr(24)


@gluon.jit
def softmax_step(
    s, m, l, first_query, first_key, shift, num_keys, scale_log2, left, right, cap_in, cap_out,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr, NEGATE: gl.constexpr, edge,
):  # fmt: skip
    """P of a tile, the new maximum and sum, and the factor for what was summed before.

    ``edge``: the tile is to be masked, known when compiling or when running.
    """
    layout: gl.constexpr = s.type.layout
    if NEGATE:
        s = -s
    factor = scale_log2
    if SOFTCAP:
        s = cap_out * tanh(s * cap_in)
        factor = gl.to_tensor(1.0)
    if edge:
        rows = first_query + gl.arange(0, BLOCK_Q, gl.SliceLayout(1, layout))
        keys = first_key + gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
        rows = gl.expand_dims(rows, 1)
        keys = gl.expand_dims(keys, 0)
        visible = visible_pairs(rows, keys, shift, num_keys, left, right, HAS_LEFT, HAS_RIGHT)
        s = gl.where(visible, s * factor, float("-inf"))
        factor = gl.to_tensor(1.0)
    m_new = gl.maximum(m, gl.max(s, 1) * factor)
    pivot = gl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - (-inf) would be NaN
    p = gl.exp2(s * factor - gl.expand_dims(pivot, 1))
    rescale = gl.exp2(m - pivot)
    l = l * rescale + gl.sum(p, 1)
    return p, m_new, l, rescale


@gluon.jit
def visit_tile(
    visit, sizes, cu_seqlens_q, cu_seqlens_k,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, VARLEN: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, PAIRED: gl.constexpr,
):  # fmt: skip
    """A tile of queries of this program: (first query, lengths, shift, where, tiles of keys)."""
    num_items, num_tiles, heads, num_sequences, seq_q, seq_k, left, right = sizes
    item, there = item_of_visit(
        visit, gl.program_id(0), gl.num_programs(0), num_items, num_tiles, PAIRED
    )
    first_query, head, batch, start_q, num_queries, start_k, num_keys = locate_tile(
        item, num_items, num_tiles, heads, 1, cu_seqlens_q, cu_seqlens_k, num_sequences,
        seq_q, seq_k, BLOCK_Q, VARLEN, HAS_RIGHT and not PAIRED,
    )  # fmt: skip
    shift = num_keys - num_queries  # query i stands at key i + shift
    last_query = gl.minimum(first_query + BLOCK_Q, num_queries) - 1
    begin, full_begin, full_end, end = visible_tiles(
        first_query, last_query, shift, num_keys, left, right, BLOCK_K, HAS_LEFT, HAS_RIGHT
    )
    end = gl.where(there & (first_query < num_queries), end, begin)
    num_queries = gl.where(there, num_queries, 0)
    where = (head, batch, start_q, start_k)
    return first_query, num_queries, num_keys, shift, where, (begin, full_begin, full_end, end)


@gluon.jit
def copy_queries(
    q, q_strides, sizes, cu_seqlens_q, cu_seqlens_k, q_tiles, q_full, q_empty,
    HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr,
    VARLEN: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, PAIRED: gl.constexpr,
    SHARED: gl.constexpr,
):  # fmt: skip
    """Copy each tile of Q as soon as both warp groups are done with the one before."""
    num_items, num_tiles, heads, _, seq_q, _, _, _ = sizes
    share: gl.constexpr = BLOCK_Q // GROUPS
    block: gl.constexpr = [1, 1, share, BLOCK_D]
    if not VARLEN:
        shape = [num_items // (num_tiles * heads), heads, seq_q, HEAD_DIM]
        desc = tma.make_tensor_descriptor(
            q, shape, [q_strides[0], q_strides[1], q_strides[2], 1], block, SHARED
        )
    done = 0  # tiles of queries before
    for visit in range(count_visits(gl.program_id(0), gl.num_programs(0), num_items, PAIRED)):
        first_query, num_queries, _, _, where, span = visit_tile(
            visit, sizes, cu_seqlens_q, cu_seqlens_k,
            BLOCK_Q, BLOCK_K, VARLEN, HAS_LEFT, HAS_RIGHT, PAIRED,
        )  # fmt: skip
        head, batch, start_q, _ = where
        begin, _, _, end = span
        if VARLEN:  # a sequence has its own end, and a program only this one tile of queries
            q_head = head_base(q, batch, head, start_q, q_strides[0], q_strides[1], q_strides[2])
            shape = [1, 1, num_queries, HEAD_DIM]
            desc = tma.make_tensor_descriptor(
                q_head, shape, [q_strides[0], q_strides[1], q_strides[2], 1], block, SHARED
            )
            batch *= 0
            head *= 0
        if begin < end:
            mbarrier.wait(q_empty.index(0), (done & 1) ^ 1)
            mbarrier.expect(q_full.index(0), GROUPS * desc.block_type.nbytes)
            for part in gl.static_range(GROUPS):
                row = first_query + part * share
                copy_tile(desc, [batch, head, row, 0], q_full.index(0), q_tiles.index(part))
        done += (begin < end).to(gl.int32)


@gluon.jit
def copy_keys(
    x, x_strides, sizes, group, cu_seqlens_q, cu_seqlens_k, x_tiles, x_full, x_empty,
    HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr,
    VARLEN: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, PAIRED: gl.constexpr,
    SHARED: gl.constexpr,
):  # fmt: skip
    """Copy the visible tiles of K, or of V, each as soon as both warp groups have left its slot."""
    num_items, num_tiles, heads, _, _, seq_k, _, _ = sizes
    block: gl.constexpr = [1, 1, BLOCK_K, BLOCK_D]
    if not VARLEN:
        shape = [num_items // (num_tiles * heads), heads // group, seq_k, HEAD_DIM]
        desc = tma.make_tensor_descriptor(
            x, shape, [x_strides[0], x_strides[1], x_strides[2], 1], block, SHARED
        )
    done = 0  # tiles copied for the tiles of queries before
    for visit in range(count_visits(gl.program_id(0), gl.num_programs(0), num_items, PAIRED)):
        _, _, num_keys, _, where, span = visit_tile(
            visit, sizes, cu_seqlens_q, cu_seqlens_k,
            BLOCK_Q, BLOCK_K, VARLEN, HAS_LEFT, HAS_RIGHT, PAIRED,
        )  # fmt: skip
        head, batch, _, start_k = where
        begin, _, _, end = span
        head //= group
        if VARLEN:  # a sequence has its own end, and a program only this one tile of queries
            x_head = head_base(x, batch, head, start_k, x_strides[0], x_strides[1], x_strides[2])
            shape = [1, 1, num_keys, HEAD_DIM]
            desc = tma.make_tensor_descriptor(
                x_head, shape, [x_strides[0], x_strides[1], x_strides[2], 1], block, SHARED
            )
            batch *= 0
            head *= 0
        first = begin - done
        for t in range(done, end - first):
            slot = t % STAGES
            row = (first + t) * BLOCK_K
            mbarrier.wait(x_empty.index(slot), ((t // STAGES) & 1) ^ 1)
            mbarrier.expect(x_full.index(slot), desc.block_type.nbytes)
            copy_tile(desc, [batch, head, row, 0], x_full.index(slot), x_tiles.index(slot))
        done = end - first


@gluon.jit
def attend(
    o, p, m, l, t_begin, t_end, q_tile, tiles, full, empty, first, end,
    first_query, shift, num_keys, scale_log2, left, right, cap_in, cap_out,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, NEGATE: gl.constexpr, S_LAYOUT: gl.constexpr,
    EDGES: gl.constexpr, full_first, full_last,
):  # fmt: skip
    """Tiles ``t_begin`` to ``t_end``; ``p`` is the tile before, whose product with V is due.

    ``EDGES``: they are to be masked (True) or not (False); None: except ``full_first`` to
    ``full_last``.
    """
    k_tiles, v_tiles = tiles
    _, k_full, v_full = full
    _, k_empty, v_empty = empty
    for t in range(t_begin, t_end):
        edge = (t < full_first) | (t >= full_last) if EDGES is None else EDGES
        k_j = k_tiles.index(t % STAGES).reshape([BLOCK_K, BLOCK_D])
        v_j = v_tiles.index((t - 1) % STAGES).reshape([BLOCK_K, BLOCK_D])
        nothing = gl.zeros((BLOCK_Q, BLOCK_K), gl.float32, S_LAYOUT)
        s = warpgroup_mma(q_tile, k_j.permute((1, 0)), nothing, use_acc=False, is_async=True)
        p_before = gl.convert_layout(p.to(k_tiles.dtype), gl.DotOperandLayout(0, o.type.layout, 2))
        await_tile(v_full, t - 1, True)
        o = warpgroup_mma(p_before, v_j, o, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])  # S is there, P V still in flight
        p, m, l, rescale = softmax_step(
            s, m, l, first_query, (first + t) * BLOCK_K, shift, num_keys,
            scale_log2, left, right, cap_in, cap_out,
            BLOCK_Q, BLOCK_K, HAS_LEFT, HAS_RIGHT, SOFTCAP, NEGATE, edge,
        )  # fmt: skip
        await_tile(k_full, t + 1, first + t + 1 < end)
        o, p = warpgroup_mma_wait(0, deps=[o, p])
        block_barrier()  # every warp of the group has read tile t of K and tile t - 1 of V
        mbarrier.arrive(k_empty.index(t % STAGES), count=1)
        mbarrier.arrive(v_empty.index((t - 1) % STAGES), count=1)
        o = o * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, o.type.layout)), 1)
    return o, p, m, l


@gluon.jit
def attend_rows(
    out, lse, out_strides, sizes, cu_seqlens_q, cu_seqlens_k,
    q_tiles, tiles, full, empty, scale_log2, cap_in, cap_out,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
    BLOCK_D: gl.constexpr, VARLEN: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr, NEGATE: gl.constexpr, WIDE: gl.constexpr, PAIRED: gl.constexpr,
):  # fmt: skip
    """out and lse of one warp group's share of each tile of queries."""
    k_tiles, v_tiles = tiles
    q_full, k_full, v_full = full
    q_empty, k_empty, v_empty = empty
    num_items, _, heads, _, seq_q, _, left, right = sizes
    dtype: gl.constexpr = k_tiles.dtype
    warps: gl.constexpr = gl.num_warps()
    share: gl.constexpr = BLOCK_Q // GROUPS
    # A program starts sooner with less code to load; without a window only the last tile is masked.
    ONE_LOOP: gl.constexpr = HAS_LEFT or HAS_RIGHT
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BLOCK_K, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BLOCK_D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    memory_layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_D, BLOCK_D // 8], [warps, 1], [1, 0]
    )
    q_tile = q_tiles.index(GROUP).reshape([share, BLOCK_D])
    tiles_of_q = 0
    done = 0  # tiles of keys seen with the tiles of queries before
    for visit in range(count_visits(gl.program_id(0), gl.num_programs(0), num_items, PAIRED)):
        first_query, num_queries, num_keys, shift, where, span = visit_tile(
            visit, sizes, cu_seqlens_q, cu_seqlens_k,
            BLOCK_Q, BLOCK_K, VARLEN, HAS_LEFT, HAS_RIGHT, PAIRED,
        )  # fmt: skip
        head, batch, start_q = where[0], where[1], where[2]
        begin, full_begin, full_end, end = span
        first_query += GROUP * share
        o = gl.zeros((share, BLOCK_D), gl.float32, o_layout)
        m = gl.full((share,), float("-inf"), gl.float32, row_layout)
        l = gl.zeros((share,), gl.float32, row_layout)

        # rows and columns of this share of out
        rows = first_query + gl.arange(0, share, gl.SliceLayout(1, memory_layout))
        columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, memory_layout))
        inside = gl.expand_dims(rows < num_queries, 1) & gl.expand_dims(columns < HEAD_DIM, 0)
        if WIDE:
            rows = rows.to(gl.int64)
            columns = columns.to(gl.int64)

        first = begin - done  # tile t of the stream is tile first + t of this head's keys
        last = end - first - 1
        if begin < end:
            # The first tile has nothing to overlap with.
            await_tile(k_full, done, True)
            mbarrier.wait(q_full.index(0), tiles_of_q & 1)
            nothing = gl.zeros((share, BLOCK_K), gl.float32, s_layout)
            k_j = k_tiles.index(done % STAGES).reshape([BLOCK_K, BLOCK_D])
            s = warpgroup_mma(q_tile, k_j.permute((1, 0)), nothing, use_acc=False, is_async=True)
            await_tile(k_full, done + 1, begin + 1 < end)
            s = warpgroup_mma_wait(0, deps=[s])
            block_barrier()
            mbarrier.arrive(k_empty.index(done % STAGES), count=1)
            edge = (begin < full_begin) | (begin >= full_end) if ONE_LOOP else True
            p, m, l, _rescale = softmax_step(
                s, m, l, first_query, begin * BLOCK_K, shift, num_keys,
                scale_log2, left, right, cap_in, cap_out,
                share, BLOCK_K, HAS_LEFT, HAS_RIGHT, SOFTCAP, NEGATE, edge,
            )  # fmt: skip
            full_first = full_begin - first
            full_last = gl.maximum(full_end - first, done + 1)
            if ONE_LOOP:
                o, p, m, l = attend(
                    o, p, m, l, done + 1, last + 1, q_tile, tiles, full, empty, first, end,
                    first_query, shift, num_keys, scale_log2, left, right, cap_in, cap_out,
                    share, BLOCK_K, BLOCK_D, HAS_LEFT, HAS_RIGHT, SOFTCAP, NEGATE, s_layout,
                    None, full_first, full_last,
                )  # fmt: skip
            else:
                o, p, m, l = attend(
                    o, p, m, l, done + 1, full_last, q_tile, tiles, full, empty, first, end,
                    first_query, shift, num_keys, scale_log2, left, right, cap_in, cap_out,
                    share, BLOCK_K, BLOCK_D, HAS_LEFT, HAS_RIGHT, SOFTCAP, NEGATE, s_layout,
                    False, full_first, full_last,
                )  # fmt: skip
                o, p, m, l = attend(
                    o, p, m, l, full_last, last + 1, q_tile, tiles, full, empty, first, end,
                    first_query, shift, num_keys, scale_log2, left, right, cap_in, cap_out,
                    share, BLOCK_K, BLOCK_D, HAS_LEFT, HAS_RIGHT, SOFTCAP, NEGATE, s_layout,
                    True, full_first, full_last,
                )  # fmt: skip
            mbarrier.arrive(q_empty.index(0), count=1)  # a barrier of the group lies behind it
            await_tile(v_full, last, True)
            p_last = gl.convert_layout(p.to(dtype), p_layout)
            v_j = v_tiles.index(last % STAGES).reshape([BLOCK_K, BLOCK_D])
            o = warpgroup_mma(p_last, v_j, o, is_async=True)
            o = warpgroup_mma_wait(0, deps=[o])
            block_barrier()
            mbarrier.arrive(v_empty.index(last % STAGES), count=1)
        tiles_of_q += (begin < end).to(gl.int32)
        done = last + 1

        safe_l = gl.where(l == 0.0, 1.0, l)  # a row that sees no key: 0 / 1, not 0 / 0
        scale_rows = gl.convert_layout(1.0 / safe_l, gl.SliceLayout(1, o_layout))
        o = o * gl.expand_dims(scale_rows, 1)
        lse_i = gl.where(l == 0.0, float("-inf"), (m + gl.log2(safe_l)) * LN2)
        lse_rows = first_query + gl.arange(0, share, row_layout)
        lse_head = lse + (batch * heads + head).to(gl.int64) * seq_q + start_q
        gl.store(lse_head + lse_rows, lse_i, mask=lse_rows < num_queries)
        out_head = head_base(
            out, batch, head, start_q, out_strides[0], out_strides[1], out_strides[2]
        )
        store_rows(
            out_head, o, rows, columns, out_strides[2], out_strides[3], inside, memory_layout
        )


@gluon.jit(do_not_specialize=[*LENGTHS, "num_items"])
def flash_forward_hopper_kernel(
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k,
    stride_qb, stride_qh, stride_qn, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_on, stride_od,
    heads, group, num_tiles, section, num_sequences, seq_q, seq_k,
    scale_log2, left, right, cap_in, cap_out, num_items,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
    VARLEN: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    NEGATE: gl.constexpr, WIDE: gl.constexpr, TMA: gl.constexpr,
):  # fmt: skip
    """out and lse of several tiles of queries, of ``num_items`` in all batches and heads.

    The other arguments are ``flash_forward_kernel``'s; ``section`` is not needed here.
    """
    PAIRED: gl.constexpr = HAS_RIGHT and not HAS_LEFT and not VARLEN
    dtype: gl.constexpr = q.dtype.element_ty
    share: gl.constexpr = BLOCK_Q // GROUPS
    q_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, share, BLOCK_D], dtype)
    block: gl.constexpr = [1, 1, BLOCK_K, BLOCK_D]
    kv_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for(block, dtype)

    q_strides = (stride_qb, stride_qh, stride_qn)
    k_strides = (stride_kb, stride_kh, stride_kn)
    v_strides = (stride_vb, stride_vh, stride_vn)
    out_strides = (stride_ob, stride_oh, stride_on, stride_od)
    sizes = (num_items, num_tiles, heads, num_sequences, seq_q, seq_k, left, right)
    q_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, share, BLOCK_D], q_shared)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_K, BLOCK_D], kv_shared)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_K, BLOCK_D], kv_shared)
    tiles = (k_tiles, v_tiles)
    full = (new_barriers(1, 1), new_barriers(1), new_barriers(1))
    empty = (new_barriers(GROUPS, 1), new_barriers(GROUPS), new_barriers(GROUPS))
    fence_async_shared()
    block_barrier()
    gl.warp_specialize(
        [
            (attend_rows, (
                out, lse, out_strides, sizes, cu_seqlens_q, cu_seqlens_k,
                q_tiles, tiles, full, empty, scale_log2, cap_in, cap_out,
                0, HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D,
                VARLEN, HAS_LEFT, HAS_RIGHT, SOFTCAP, NEGATE, WIDE, PAIRED,
            )),
            (attend_rows, (
                out, lse, out_strides, sizes, cu_seqlens_q, cu_seqlens_k,
                q_tiles, tiles, full, empty, scale_log2, cap_in, cap_out,
                1, HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D,
                VARLEN, HAS_LEFT, HAS_RIGHT, SOFTCAP, NEGATE, WIDE, PAIRED,
            )),
            (copy_keys, (
                k, k_strides, sizes, group, cu_seqlens_q, cu_seqlens_k,
                k_tiles, full[1], empty[1], HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D,
                VARLEN, HAS_LEFT, HAS_RIGHT, PAIRED, kv_shared,
            )),
            (copy_keys, (
                v, v_strides, sizes, group, cu_seqlens_q, cu_seqlens_k,
                v_tiles, full[2], empty[2], HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D,
                VARLEN, HAS_LEFT, HAS_RIGHT, PAIRED, kv_shared,
            )),
            (copy_queries, (
                q, q_strides, sizes, cu_seqlens_q, cu_seqlens_k,
                q_tiles, full[0], empty[0], HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D,
                VARLEN, HAS_LEFT, HAS_RIGHT, PAIRED, q_shared,
            )),
        ],
        [4, 1, 1, 1], [REGISTERS, COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip

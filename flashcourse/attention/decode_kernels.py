"""The decode kernels: a few new queries over a long cache, which is split over many programs.

With one query a head there is nothing to reuse but the KV head itself: the query heads of its group
become the rows of one tile, and the cache is read once for all of them. A single sequence would
still keep only ``heads_kv`` programs busy, so its keys are split, and a second kernel merges the
parts by their log-sum-exp. The splits take turns, tile by tile: what is read at one time lies
together in memory, which DRAM serves faster than as many places far apart.

Dao, Haziza, Massa and Sizov (2023), "Flash-Decoding for long-context inference"; for the cache in
pages Kwon et al. (2023), "Efficient Memory Management for Large Language Model Serving with
PagedAttention", section 4.1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashcourse.attention.flash_tiles import (
    LN2,
    LOG2E,
    head_base,
    load_tile,
    tanh,
    tile_offsets,
    visible_pairs,
    visible_tiles,
)

# These change from step to step of a generation; a new one must not compile anything.
VARYING = ["stride_tb", "num_tiles", "num_splits", "least_tiles", "seq_q", "capacity", "num_rows",
           "left"]  # fmt: skip


@triton.jit
def load_pages(
    table, stride_tn, first_key, num_keys,
    BLOCK_K: tl.constexpr, PAGE_SIZE: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """The pages of a tile of keys: one number if a page holds the whole tile, else one a key.

    No entry past the page of the sequence's last key is read: it may be -1, or not exist.
    """
    if PAGE_SIZE % BLOCK_K == 0:
        pages = tl.load(table + (first_key // PAGE_SIZE).to(tl.int64) * stride_tn)
    else:
        keys = first_key + tl.arange(0, BLOCK_K)
        entries = table + (keys // PAGE_SIZE).to(tl.int64) * stride_tn
        pages = tl.load(entries, mask=keys < num_keys, other=0) if EDGE else tl.load(entries)
    return pages.to(tl.int64)  # times a page's stride this passes 2³¹ in real use


@triton.jit
def load_slots(
    base, offsets, pages, first_key, num_keys, stride_p, stride_n, stride_d,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGED: tl.constexpr, PAGE_SIZE: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """A tile of cached keys or values; on the EDGE, slots past the end are read as 0.

    For the values that matters as much as the mask of the scores: 0 · NaN would be NaN.
    """
    if not PAGED:
        tile = load_tile(
            base, offsets, first_key, num_keys, stride_n, BLOCK_K, BLOCK_D, HEAD_DIM, EDGE
        )
    elif PAGE_SIZE % BLOCK_K == 0:
        slot = first_key % PAGE_SIZE
        tile = load_tile(
            base + pages * stride_p, offsets, slot, num_keys - first_key + slot, stride_n,
            BLOCK_K, BLOCK_D, HEAD_DIM, EDGE,
        )  # fmt: skip
    else:
        keys = first_key + tl.arange(0, BLOCK_K)
        columns = tl.arange(0, BLOCK_D)[None, :]
        rows = pages * stride_p + (keys % PAGE_SIZE).to(tl.int64) * stride_n
        address = base + rows[:, None] + columns.to(tl.int64) * stride_d
        inside = (keys < num_keys)[:, None]
        if EDGE and HEAD_DIM < BLOCK_D:
            tile = tl.load(address, mask=inside & (columns < HEAD_DIM), other=0.0)
        elif EDGE:
            tile = tl.load(address, mask=inside, other=0.0)
        elif HEAD_DIM < BLOCK_D:
            tile = tl.load(address, mask=columns < HEAD_DIM, other=0.0)
        else:
            tile = tl.load(address)
    return tile


@triton.jit
def attend_cache(
    o, m, l, q_i, k_head, v_head, k_offsets, v_offsets, table, stride_tn,
    stride_kb, stride_kn, stride_kd, stride_vb, stride_vn, stride_vd,
    begin, end, step, queries, shift, num_keys, scale_log2, left, cap_in, cap_out,
    HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGED: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HAS_LEFT: tl.constexpr, SOFTCAP: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax for every ``step``-th tile of keys from ``begin`` to ``end``.

    The same loop for both caches: they differ in where a tile lies, not in what is done with it.
    Scores are in units of log 2. Only tiles on the EDGE of what is visible are masked.
    """
    for start in range(begin * BLOCK_K, end * BLOCK_K, step * BLOCK_K):
        first_key = tl.full((), start, tl.int32)  # in the interpreter a range counts in Python
        pages = first_key
        if PAGED:
            pages = load_pages(table, stride_tn, first_key, num_keys, BLOCK_K, PAGE_SIZE, EDGE)
        k_j = load_slots(
            k_head, k_offsets, pages, first_key, num_keys, stride_kb, stride_kn, stride_kd,
            BLOCK_K, BLOCK_D, HEAD_DIM, PAGED, PAGE_SIZE, EDGE,
        )  # fmt: skip
        s = tl.dot(q_i, tl.trans(k_j), input_precision="ieee")  # (BLOCK_Q, BLOCK_K)
        factor = scale_log2
        if SOFTCAP:
            s = cap_out * tanh(s * cap_in)
            factor = 1.0
        if EDGE:
            keys = first_key + tl.arange(0, BLOCK_K)[None, :]
            visible = visible_pairs(
                queries[:, None], keys, shift, num_keys, left, 0, HAS_LEFT, True
            )
            s = tl.where(visible, s * factor, float("-inf"))
            factor = 1.0

        # q carries the sign of the scale, so factor >= 0 and may be taken out of the maximum.
        m_new = tl.maximum(m, tl.max(s, 1) * factor)
        # A row that has seen no key yet has m = -inf; -inf - (-inf) would be NaN.
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * factor - pivot[:, None])
        rescale = tl.exp2(m - pivot)
        l = l * rescale + tl.sum(p, 1)
        o = o * rescale[:, None]
        v_j = load_slots(
            v_head, v_offsets, pages, first_key, num_keys, stride_vb, stride_vn, stride_vd,
            BLOCK_K, BLOCK_D, HEAD_DIM, PAGED, PAGE_SIZE, EDGE,
        )  # fmt: skip
        o = tl.dot(p.to(v_j.dtype), v_j, o, input_precision="ieee")  # (BLOCK_Q, BLOCK_D)
        m = m_new
    return o, m, l


@triton.jit(do_not_specialize=VARYING)
def decode_kernel(
    q, k, v, out, lse, cache_seqlens, table,
    stride_qb, stride_qh, stride_qn, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_os, stride_ob, stride_oh, stride_on, stride_od,
    stride_tb, stride_tn,
    heads_kv, group, num_tiles, num_splits, least_tiles, seq_q, capacity, num_rows,
    scale_log2, left, cap_in, cap_out,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    PAGED: tl.constexpr, PAGE_SIZE: tl.constexpr, HAS_LEFT: tl.constexpr, SOFTCAP: tl.constexpr,
    NEGATE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out and lse of one tile of rows over one split of a sequence's keys.

    Row ``r`` of a KV head is query ``r // group`` of the group's head ``r % group``, so that a tile
    holds neighbouring queries, which see nearly the same keys. ``stride_kb`` and ``stride_vb`` lead
    to the next sequence, or PAGED, to the next page. ``num_rows = batch · heads_q · seq_q``.
    """
    program = tl.program_id(0)
    # Neighbours in the grid read what lies side by side: tiles of rows the same keys, then heads of
    # one page, or splits of one sequence.
    tile = program % num_tiles
    batch = program // num_tiles // heads_kv // num_splits
    if PAGED:
        head = (program // num_tiles) % heads_kv
        split = (program // num_tiles // heads_kv) % num_splits
    else:
        split = (program // num_tiles) % num_splits
        head = (program // num_tiles // num_splits) % heads_kv

    num_keys = tl.load(cache_seqlens + batch)
    beyond = (num_keys < 0) | (num_keys > capacity)  # reading on would leave the cache
    num_keys = tl.where(beyond, 0, num_keys)

    first_row = tile * BLOCK_Q
    rows = first_row + tl.arange(0, BLOCK_Q)
    queries = rows // group
    members = rows % group
    inside = rows < seq_q * group
    columns = tl.arange(0, BLOCK_D)[None, :]
    held = inside[:, None] & (columns < HEAD_DIM)
    columns = columns.to(tl.int64)
    zero = tl.full((), 0, tl.int32)
    q_base = head_base(q, batch, head * group, zero, stride_qb, stride_qh, stride_qn)
    q_rows = members.to(tl.int64) * stride_qh + queries.to(tl.int64) * stride_qn
    q_i = tl.load(q_base + q_rows[:, None] + columns * stride_qd, mask=held, other=0.0)
    if NEGATE:
        q_i = -q_i

    owner = batch
    table_row = table
    if PAGED:
        owner = zero  # the page says where, not the sequence
        table_row = table + batch.to(tl.int64) * stride_tb
    k_head = head_base(k, owner, head, zero, stride_kb, stride_kh, stride_kn)
    v_head = head_base(v, owner, head, zero, stride_vb, stride_vh, stride_vn)
    k_offsets = tile_offsets(stride_kn, stride_kd, BLOCK_K, BLOCK_D, WIDE)
    v_offsets = tile_offsets(stride_vn, stride_vd, BLOCK_K, BLOCK_D, WIDE)

    shift = num_keys - seq_q  # query i stands at slot i + shift
    first_query = first_row // group
    last_query = (tl.minimum(first_row + BLOCK_Q, seq_q * group) - 1) // group
    begin, full_begin, full_end, end = visible_tiles(
        first_query, last_query, shift, num_keys, left, 0, BLOCK_K, HAS_LEFT, True
    )
    # Splits that have least_tiles to do take every step-th tile; the others have none.
    step = tl.minimum(num_splits, tl.cdiv(tl.maximum(end - begin, 1), least_tiles))
    begin = tl.where(split < step, begin + split, end)
    begin_full = begin + tl.cdiv(tl.maximum(full_begin - begin, 0), step) * step
    begin_last = begin + tl.cdiv(tl.maximum(full_end - begin, 0), step) * step

    o = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_Q,), tl.float32)
    if HAS_LEFT:
        o, m, l = attend_cache(
            o, m, l, q_i, k_head, v_head, k_offsets, v_offsets, table_row, stride_tn,
            stride_kb, stride_kn, stride_kd, stride_vb, stride_vn, stride_vd,
            begin, tl.minimum(full_begin, end), step, queries, shift, num_keys,
            scale_log2, left, cap_in, cap_out,
            HEAD_DIM, BLOCK_K, BLOCK_D, PAGED, PAGE_SIZE, HAS_LEFT, SOFTCAP, True,
        )  # fmt: skip
    o, m, l = attend_cache(
        o, m, l, q_i, k_head, v_head, k_offsets, v_offsets, table_row, stride_tn,
        stride_kb, stride_kn, stride_kd, stride_vb, stride_vn, stride_vd,
        begin_full, tl.minimum(full_end, end), step, queries, shift, num_keys,
        scale_log2, left, cap_in, cap_out,
        HEAD_DIM, BLOCK_K, BLOCK_D, PAGED, PAGE_SIZE, HAS_LEFT, SOFTCAP, False,
    )  # fmt: skip
    o, m, l = attend_cache(
        o, m, l, q_i, k_head, v_head, k_offsets, v_offsets, table_row, stride_tn,
        stride_kb, stride_kn, stride_kd, stride_vb, stride_vn, stride_vd,
        begin_last, end, step, queries, shift, num_keys,
        scale_log2, left, cap_in, cap_out,
        HEAD_DIM, BLOCK_K, BLOCK_D, PAGED, PAGE_SIZE, HAS_LEFT, SOFTCAP, True,
    )  # fmt: skip

    safe_l = tl.where(l == 0.0, 1.0, l)  # a row that sees no key here: 0 / 1, not 0 / 0
    o = o * (1.0 / safe_l)[:, None]
    lse_i = tl.where(l == 0.0, float("-inf"), (m + tl.log2(safe_l)) * LN2)
    if beyond:  # no answer exists, and waiting for the GPU to raise one would cost every call
        o = tl.full((BLOCK_Q, BLOCK_D), float("nan"), tl.float32)
        lse_i = tl.full((BLOCK_Q,), float("nan"), tl.float32)
    heads_q = heads_kv * group
    row_of = (batch * heads_q + head * group + members).to(tl.int64) * seq_q + queries
    tl.store(lse + split.to(tl.int64) * num_rows + row_of, lse_i, mask=inside)
    out_base = head_base(out, batch, head * group, zero, stride_ob, stride_oh, stride_on)
    out_rows = members.to(tl.int64) * stride_oh + queries.to(tl.int64) * stride_on
    address = out_base + split.to(tl.int64) * stride_os + out_rows[:, None] + columns * stride_od
    tl.store(address, o.to(out.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["num_splits", "heads", "seq_q", "num_rows"])
def merge_splits_kernel(
    parts, part_lses, out, lse,
    stride_ob, stride_oh, stride_on, stride_od, num_splits, heads, seq_q, num_rows,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """One row of out and lse from the parts ``(num_splits, num_rows, HEAD_DIM)`` of its splits.

    Each part weighs its share of the joint softmax sum, ``exp(lse_split - lse)``. A split that saw
    no key has lse -inf and weight 0, and what lies in its part is not even read.
    """
    row = tl.program_id(0)
    lses = part_lses + row
    splits = tl.arange(0, BLOCK_SPLITS)
    all_lses = tl.load(
        lses + splits.to(tl.int64) * num_rows, mask=splits < num_splits, other=float("-inf")
    )
    m = tl.max(all_lses, 0)
    pivot = tl.where(m == float("-inf"), 0.0, m)  # every split empty: -inf - (-inf) is NaN
    total = tl.sum(tl.exp2((all_lses - pivot) * LOG2E), 0)
    safe_total = tl.where(total == 0.0, 1.0, total)

    o = tl.zeros((BLOCK_D,), tl.float32)
    columns = tl.arange(0, BLOCK_D)
    for first in range(0, num_splits, CHUNK):
        chosen = first + tl.arange(0, CHUNK)
        rows = chosen.to(tl.int64) * num_rows
        some_lses = tl.load(lses + rows, mask=chosen < num_splits, other=float("-inf"))
        weights = tl.exp2((some_lses - pivot) * LOG2E) / safe_total
        held = (some_lses != float("-inf"))[:, None] & (columns < HEAD_DIM)[None, :]
        part = tl.load(
            parts + (rows + row)[:, None] * HEAD_DIM + columns[None, :], mask=held, other=0.0
        )
        o += tl.sum(weights[:, None] * part, 0)
    tl.store(lse + row, tl.where(total == 0.0, float("-inf"), pivot + tl.log2(safe_total) * LN2))

    query = row % seq_q
    head = row // seq_q % heads
    batch = row // seq_q // heads
    out_row = head_base(out, batch, head, query, stride_ob, stride_oh, stride_on)
    address = out_row + columns.to(tl.int64) * stride_od
    tl.store(address, o.to(out.dtype.element_ty), mask=columns < HEAD_DIM)

"""What the forward and the backward kernels share: finding their tile, its visible range, its data.

Both directions see attention as *rows* that look at *others*. In the forward pass and for dQ the
rows are queries and the others keys; for dK and dV the rows are keys and the others queries.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # the hardware's exponential is 2^x: e^x = 2^(x log2 e)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def locate_tile(
    program, num_programs, num_tiles, heads, section, cu_rows, cu_others, num_sequences,
    seq_rows, seq_others, BLOCK: tl.constexpr, VARLEN: tl.constexpr, REVERSED: tl.constexpr,
):  # fmt: skip
    """The tile of a program: (first row, head, batch, start and length of rows, of others).

    Programs start in the order of the grid. Those of one head are neighbours, so that they share
    its keys in the L2 cache. Under a causal mask the tiles differ in what they see, and what starts
    last should be what is soon done: the tiles of ``section`` heads are dealt out together, those
    that see the most first. These are the first tiles of keys and, REVERSED, the last of queries.

    A varlen batch is one long sequence: sequence ``b`` owns the tiles from
    ``cu_rows[b] // BLOCK + b``, which leaves room for its ragged last tile. So the grid is known
    without reading the offsets on the host, and a program finds its sequence by bisection. What
    lies behind the last offset is one more sequence, without anything to look at.
    """
    first_head = program // (num_tiles * section) * section
    together = tl.minimum(section, num_programs // num_tiles - first_head)
    place = program - first_head * num_tiles
    tile = place // together
    head = first_head + place % together
    batch = head // heads
    head = head % heads
    if REVERSED:
        tile = num_tiles - 1 - tile
    if VARLEN:
        low = tile * 0
        high = low + num_sequences
        while low < high:
            middle = (low + high + 1) // 2
            reached = tl.load(cu_rows + middle) // BLOCK + middle <= tile
            low = tl.where(reached, middle, low)
            high = tl.where(reached, high, middle - 1)
        following = tl.minimum(low + 1, num_sequences)
        start_row = tl.load(cu_rows + low)
        start_other = tl.load(cu_others + low)
        num_rows = tl.where(low < num_sequences, tl.load(cu_rows + following), seq_rows) - start_row
        num_others = tl.load(cu_others + following) - start_other
        tile = tile - (start_row // BLOCK + low)
    else:
        start_row = tile * 0
        start_other = start_row
        num_rows = start_row + seq_rows
        num_others = start_row + seq_others
    return tile * BLOCK, head, batch, start_row, num_rows, start_other, num_others


@triton.jit
def count_visits(program, num_programs, num_items, PAIRED: tl.constexpr):
    """How many of ``num_items`` tiles a program computes that computes several, PAIRED or not."""
    if PAIRED:
        visits = 2 * tl.cdiv(tl.cdiv(num_items, 2) - program, num_programs)
    else:
        visits = tl.cdiv(num_items - program, num_programs)
    return visits


@triton.jit
def item_of_visit(visit, program, num_programs, num_items, num_tiles, PAIRED: tl.constexpr):
    """The tile of a program's visit, by its place in the grid of one tile a program.

    Returns (item, there). PAIRED: under a causal mask a program takes the tiles of a head in pairs,
    one from the end, which sees the most keys, and one from the beginning. With as many queries as
    keys and an even number of tiles a head all pairs are equally much work. Of an odd number of
    tiles in all the last pair is half: its second visit is not ``there``.
    """
    if PAIRED:
        item = 2 * (program + visit // 2 * num_programs) + visit % 2
        there = item < num_items
        item = tl.minimum(item, num_items - 1)
        place = item % num_tiles
        item += tl.where(place % 2 == 0, num_tiles - 1 - place // 2, place // 2) - place
    else:
        item = program + visit * num_programs
        there = item < num_items
    return item, there


@triton.jit
def visible_tiles(
    first, last, shift, num_others, before, after,
    BLOCK: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr,
):  # fmt: skip
    """The tiles of others that rows ``first..last`` can see: (begin, full_begin, full_end, end).

    Row ``i`` sees the others from ``i + shift - before`` to ``i + shift + after``, both included.
    Tiles ``full_begin..full_end`` are seen whole by every row and need no mask.
    """
    low = first * 0
    full_low = low
    stop = low + num_others
    full_stop = stop
    if HAS_BEFORE:
        low = tl.maximum(low, first + shift - before)
        full_low = tl.maximum(full_low, last + shift - before)
    if HAS_AFTER:
        stop = tl.maximum(tl.minimum(stop, last + shift + after + 1), 0)
        full_stop = tl.maximum(tl.minimum(full_stop, first + shift + after + 1), 0)
    begin = low // BLOCK
    end = tl.maximum(tl.cdiv(stop, BLOCK), begin)
    full_begin = tl.minimum(tl.maximum(tl.cdiv(full_low, BLOCK), begin), end)
    full_end = tl.minimum(tl.maximum(full_stop // BLOCK, full_begin), end)
    return begin, full_begin, full_end, end


@triton.jit
def visible_pairs(
    rows, keys, shift, num_keys, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
):
    """True where a query may see a key; ``rows`` and ``keys`` broadcast against each other."""
    visible = keys < num_keys
    offset = keys - rows - shift  # 0 on the bottom-right diagonal
    if HAS_LEFT:
        visible = visible & (offset >= -left)
    if HAS_RIGHT:
        visible = visible & (offset <= right)
    return visible


@triton.jit
def head_base(tensor, batch, head, start, stride_b, stride_h, stride_n):
    """The address of one head of one sequence. int64: these products pass 2³¹ in real use."""
    return (
        tensor
        + batch.to(tl.int64) * stride_b
        + head.to(tl.int64) * stride_h
        + start.to(tl.int64) * stride_n
    )


@triton.jit
def tile_offsets(stride_n, stride_d, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    """Offsets inside one tile. They never change in a loop, and int32 holds them unless WIDE."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    if WIDE:
        rows = rows.to(tl.int64)
        columns = columns.to(tl.int64)
    return rows * stride_n + columns * stride_d  # (ROWS, BLOCK_D)


@triton.jit
def load_tile(
    base, offsets, first, num_rows, stride_n,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """``ROWS`` rows from ``first`` on. With RAGGED, rows past the end are read as 0; so are the
    columns past head_dim, which only fill the tile up to a power of two."""
    address = base + first.to(tl.int64) * stride_n + offsets
    inside = first + tl.arange(0, ROWS)[:, None] < num_rows
    columns = tl.arange(0, BLOCK_D)[None, :] < HEAD_DIM
    if RAGGED and HEAD_DIM < BLOCK_D:
        tile = tl.load(address, mask=inside & columns, other=0.0)
    elif RAGGED:
        tile = tl.load(address, mask=inside, other=0.0)
    elif HEAD_DIM < BLOCK_D:
        tile = tl.load(address, mask=columns, other=0.0)
    else:
        tile = tl.load(address)
    return tile


@triton.jit
def store_tile(
    base, tile, offsets, first, num_rows, stride_n,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Write the rows and columns of a tile that exist, in the dtype of the tensor."""
    address = base + first.to(tl.int64) * stride_n + offsets
    inside = first + tl.arange(0, ROWS)[:, None] < num_rows
    if HEAD_DIM < BLOCK_D:
        inside = inside & (tl.arange(0, BLOCK_D)[None, :] < HEAD_DIM)
    tl.store(address, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def power(x, NATURAL: tl.constexpr):
    """e^x, or 2^x where scores are in units of log 2.

    2^x is what the hardware has, and saves a product for each score. But log2 e is rounded, and lse
    with it: float32 inputs would feel it in P, so their scores stay as they are.
    """
    return tl.exp(x) if NATURAL else tl.exp2(x)


@triton.jit
def tanh(x):
    """tanh in float32, accurate near 0 and safe far from it.

    Near 0 an odd polynomial (S. Moshier's Cephes library, tanhf); 1 - 2 / (1 + e^2x) would lose
    its digits there. Far out e^2x may overflow to infinity, and the quotient is then 0.
    """
    z = x * x
    series = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z
              + 1.33314422036e-1) * z - 3.33332819422e-1  # fmt: skip
    far = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))
    return tl.where(z < 0.390625, x + x * z * series, far)  # |x| < 0.625

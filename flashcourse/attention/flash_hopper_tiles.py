"""What the Gluon kernels for Hopper share: the copy engine's tiles, and waiting for them.

Gluon is Triton one floor below: layouts, shared memory, copies and matrix products are written out,
and a product that was started is waited for where the program says so. ``flash_forward_hopper``
and ``flash_backward_*_hopper`` are the same algorithms as ``flash_forward`` and ``flash_backward``,
which stay the specification; they need Triton 3.6 and a GPU of compute capability 9.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flashcourse.attention import flash_tiles

LN2 = flash_tiles.LN2

# Arithmetic without layouts means the same in both languages.
count_visits = gluon.jit(flash_tiles.count_visits.fn)
item_of_visit = gluon.jit(flash_tiles.item_of_visit.fn)
locate_tile = gluon.jit(flash_tiles.locate_tile.fn)
visible_tiles = gluon.jit(flash_tiles.visible_tiles.fn)
visible_pairs = gluon.jit(flash_tiles.visible_pairs.fn)
head_base = gluon.jit(flash_tiles.head_base.fn)
tanh = gluon.jit(flash_tiles.tanh.fn)

# Triton 3.6 has the older names.
block_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

STAGES = gl.constexpr(2)  # tiles of each stream in shared memory


@gluon.jit
def fetch(descriptor, tiles, barriers, t, begin, end):
    """Start the copy of tile ``begin + t`` of a stream into its slot, if there is such a tile."""
    slot = t % STAGES
    there = begin + t < end
    first = (begin + t) * descriptor.block_type.shape[0]
    mbarrier.expect(barriers.index(slot), descriptor.block_type.nbytes, pred=there)
    copy_tile(descriptor, [first, 0], barriers.index(slot), tiles.index(slot), pred=there)


@gluon.jit
def await_tile(barriers, t, there):
    """Wait until tile number ``t`` is in its slot.

    The assembler moves the wait for a matrix product ahead of arithmetic that does not need it,
    which undoes the overlap; it does not move it across the branch that this compiles to.
    """
    mbarrier.wait(barriers.index(t % STAGES), (t // STAGES) & 1, pred=there)


@gluon.jit
def new_barriers(ARRIVALS: gl.constexpr = 1, SLOTS: gl.constexpr = STAGES):
    """One barrier for each slot of a stream of tiles."""
    barriers = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(barriers.index(slot), count=ARRIVALS)
    return barriers


@gluon.jit
def drop_barriers(barriers):
    for slot in gl.static_range(STAGES):
        mbarrier.invalidate(barriers.index(slot))


@gluon.jit
def load_rows(base, rows, columns, stride_n, stride_d, inside):
    """A tile through registers, as the copy engine may not read it; what is not inside is 0."""
    address = base + gl.expand_dims(rows * stride_n, 1) + gl.expand_dims(columns * stride_d, 0)
    return gl.load(address, mask=inside, other=0.0)


@gluon.jit
def store_rows(base, tile, rows, columns, stride_n, stride_d, inside, LAYOUT: gl.constexpr):
    """Write what is inside, in the dtype of the tensor, by threads that lie as in LAYOUT."""
    address = base + gl.expand_dims(rows * stride_n, 1) + gl.expand_dims(columns * stride_d, 0)
    gl.store(address, gl.convert_layout(tile.to(base.dtype.element_ty), LAYOUT), mask=inside)

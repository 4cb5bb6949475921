"""Right answers to lab 7 that are written in other ways than the solution."""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque

import torch
import triton
import triton.language as tl

# lab7.kv_bytes_per_token ------------------------------------------------------------------------


def bytes_by_product(layers, heads_kv, head_dim, itemsize):
    return math.prod((layers, heads_kv, head_dim, itemsize)) << 1


def bytes_of_tensors(layers, heads_kv, head_dim, itemsize):
    """Adds up the key and the value of every layer."""
    return sum(2 * heads_kv * head_dim * itemsize for _ in range(layers))


# lab7.block_allocator ---------------------------------------------------------------------------


class OutOfBlocks(Exception):
    """As the lab defines it; any exception of this name will do."""


class Sequence:
    """A handle that holds the table itself."""

    def __init__(self, blocks, tokens):
        self.blocks, self.tokens, self.alive = blocks, tokens, True


class SequenceObjects:
    """Handles are objects, the free blocks are a heap: the lowest is taken first."""

    def __init__(self, num_blocks, block_size):
        self.free_blocks, self.size = list(range(num_blocks)), block_size
        self.counts = Counter()

    @property
    def num_free(self):
        return len(self.free_blocks)

    def _new_block(self):
        block = heapq.heappop(self.free_blocks)
        self.counts[block] = 1
        return block

    def _drop(self, block):
        self.counts[block] -= 1
        if not self.counts[block]:
            heapq.heappush(self.free_blocks, block)

    def _check(self, seq):
        if not seq.alive:
            raise ValueError("this sequence has been freed")

    def allocate(self, num_tokens):
        needed = (num_tokens + self.size - 1) // self.size
        if needed > self.num_free:
            raise OutOfBlocks(needed)
        return Sequence([self._new_block() for _ in range(needed)], num_tokens)

    def append(self, seq):
        self._check(seq)
        room = len(seq.blocks) * self.size - seq.tokens
        shared = self.counts[seq.blocks[-1]] > 1
        if (not room or shared) and not self.free_blocks:
            raise OutOfBlocks
        seq.tokens += 1
        if not room:
            seq.blocks.append(self._new_block())
            return None
        if shared:
            old, seq.blocks[-1] = seq.blocks[-1], self._new_block()
            self._drop(old)
            return [old, seq.blocks[-1]]
        return None

    def fork(self, seq):
        self._check(seq)
        self.counts.update(seq.blocks)
        return Sequence(seq.blocks.copy(), seq.tokens)

    def free(self, seq):
        self._check(seq)
        seq.alive = False
        while seq.blocks:
            self._drop(seq.blocks.pop())

    def block_table(self, seq):
        self._check(seq)
        return tuple(seq.blocks)


class NoCounts:
    """Keeps no counts: who reads a block is looked up in all tables. The oldest free goes first."""

    def __init__(self, num_blocks, block_size):
        self.queue, self.size, self.held = deque(range(num_blocks)), block_size, {}
        self.num_free, self.names = num_blocks, 0  # a plain attribute

    def _readers(self, block):
        return sum(block in table for table, _ in self.held.values())

    def _pull(self, count):
        if self.num_free < count:
            raise OutOfBlocks
        self.num_free -= count
        return [self.queue.popleft() for _ in range(count)]

    def _name(self, table, tokens):
        self.names += 1
        self.held[f"sequence {self.names}"] = (table, tokens)
        return f"sequence {self.names}"

    def allocate(self, num_tokens):
        return self._name(self._pull(math.ceil(num_tokens / self.size)), num_tokens)

    def append(self, seq):
        table, tokens = self.held[seq]
        copy = None
        if tokens == len(table) * self.size:
            table = table + self._pull(1)
        elif self._readers(table[-1]) > 1:
            copy = (table[-1], *self._pull(1))
            table = [*table[:-1], copy[1]]
        self.held[seq] = (table, tokens + 1)
        return copy

    def fork(self, seq):
        return self._name(*self.held[seq])  # tables are replaced, never changed: one list will do

    def free(self, seq):
        table, _ = self.held.pop(seq)
        unread = [block for block in table if not self._readers(block)]
        self.queue.extend(unread)
        self.num_free += len(unread)

    def block_table(self, seq):
        return self.held[seq][0]


class Arrays:
    """Reference counts in a tensor; a free block is one that nobody counts. Lists of copies."""

    def __init__(self, num_blocks, block_size):
        self.refs, self.size = torch.zeros(num_blocks, dtype=torch.int64), block_size
        self.tables, self.lengths = {}, {}

    def num_free(self):
        return (self.refs == 0).sum()

    def _find(self, count):
        found = (self.refs == 0).nonzero()[:count, 0]
        if len(found) < count:
            raise OutOfBlocks
        return found

    def _start(self, table, length):
        seq = max(self.tables, default=0) + 1  # the handle of one that ended may come again
        self.refs[table] += 1
        self.tables[seq], self.lengths[seq] = table, length
        return seq

    def allocate(self, num_tokens):
        return self._start(self._find(-(-num_tokens // self.size)), num_tokens)

    def append(self, seq):
        table, copies = self.tables[seq], []
        if self.lengths[seq] % self.size == 0:
            new = self._find(1)
            self.tables[seq] = torch.cat([table, new])
            self.refs[new] += 1
        elif self.refs[table[-1]] > 1:
            (new,) = self._find(1)
            copies = [(int(table[-1]), int(new))]
            self.refs[table[-1]] -= 1
            self.refs[new] += 1
            self.tables[seq] = torch.cat([table[:-1], new[None]])
        self.lengths[seq] += 1
        return copies

    def fork(self, seq):
        return self._start(self.tables[seq].clone(), self.lengths[seq])

    def free(self, seq):
        self.refs[self.tables.pop(seq)] -= 1

    def block_table(self, seq):
        return self.tables[seq]


# lab7.paged_decode ------------------------------------------------------------------------------


@triton.jit
def _head_by_head(
    q, k, v, out, table, lengths, group, scale,
    sqb, sqh, sqd, skp, skn, skh, skd, svp, svn, svh, svd, sob, soh, sod, stb, stn,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program a query head, one page a step, products without tl.dot."""
    b, h = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    q_i = tl.load(q + b * sqb + h * sqh + d * sqd, mask=d < D, other=0.0).to(tl.float32) * scale
    length = tl.load(lengths + b)
    m = -1e30
    l = 0.0
    o = tl.zeros((BLOCK_D,), tl.float32)
    for j in range(0, tl.cdiv(length, PAGE)):
        page = tl.load(table + b * stb + j * stn).to(tl.int64)
        used = (n < PAGE) & (j * PAGE + n < length)
        mask = used[:, None] & (d[None, :] < D)
        k_at = k + page * skp + n[:, None] * skn + (h // group) * skh + d[None, :] * skd
        v_at = v + page * svp + n[:, None] * svn + (h // group) * svh + d[None, :] * svd
        s = tl.sum(tl.load(k_at, mask=mask, other=0.0).to(tl.float32) * q_i[None, :], 1)
        s = tl.where(used, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        p = tl.exp(s - m_new)
        old = tl.exp(m - m_new)
        l = l * old + tl.sum(p, 0)
        o = o * old + tl.sum(p[:, None] * tl.load(v_at, mask=mask, other=0.0).to(tl.float32), 0)
        m = m_new
    o = o / tl.maximum(l, 1e-30)
    tl.store(out + b * sob + h * soh + d * sod, o.to(out.dtype.element_ty), mask=d < D)


def _strides(q, k_pages, v_pages, out, table):
    q_and_out = [(t.stride(0), t.stride(1), t.stride(3)) for t in (q, out)]
    return *q_and_out[0], *k_pages.stride(), *v_pages.stride(), *q_and_out[1], *table.stride()


def decode_head_by_head(q, k_pages, v_pages, block_table, cache_seqlens):
    out = torch.zeros_like(q)
    page, d = k_pages.shape[1], q.shape[3]
    _head_by_head[q.shape[:2]](
        q, k_pages, v_pages, out, block_table, cache_seqlens,
        q.shape[1] // k_pages.shape[2], d**-0.5,
        *_strides(q, k_pages, v_pages, out, block_table),
        PAGE=page, BLOCK_N=triton.next_power_of_2(page), D=d, BLOCK_D=triton.next_power_of_2(d),
    )  # fmt: skip
    return out


@triton.jit
def _one_split(
    q, k, v, parts, sums, table, lengths, group, scale, splits,
    sqb, sqh, sqd, skp, skn, skh, skd, svp, svn, svh, svd, stb, stn,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Every splits-th tile of keys of a query head; base-2 exponentials, not normalised."""
    b, h, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, BLOCK_D)
    q_i = tl.load(q + b * sqb + h * sqh + d * sqd, mask=d < D, other=0.0).to(tl.float32)
    length = tl.load(lengths + b)
    m = float("-inf")
    l = 0.0
    o = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(split * BLOCK, length, splits * BLOCK):
        j = first + tl.arange(0, BLOCK)
        page = tl.load(table + b * stb + (j // PAGE) * stn, mask=j < length, other=0)
        page = page.to(tl.int64)[:, None]
        mask = (j[:, None] < length) & (d[None, :] < D)
        k_at = k + page * skp + (j % PAGE)[:, None] * skn + (h // group) * skh + d[None, :] * skd
        v_at = v + page * svp + (j % PAGE)[:, None] * svn + (h // group) * svh + d[None, :] * svd
        s = tl.sum(tl.load(k_at, mask=mask, other=0.0).to(tl.float32) * q_i[None, :], 1)
        s = tl.where(j < length, s * (scale * 1.4426950408889634), float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        p = tl.exp2(s - m_new)
        old = tl.exp2(m - m_new)
        l = l * old + tl.sum(p, 0)
        o = o * old + tl.sum(p[:, None] * tl.load(v_at, mask=mask, other=0.0).to(tl.float32), 0)
        m = m_new
    row = (b * tl.num_programs(1) + h) * splits + split
    tl.store(parts + row * D + d, o, mask=d < D)
    tl.store(sums + row * 2, m)
    tl.store(sums + row * 2 + 1, l)


@triton.jit
def _merge(
    parts, sums, out, splits, sob, soh, sod,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0), tl.program_id(1)
    d, i = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)
    row = (b * tl.num_programs(1) + h) * splits + i
    m = tl.load(sums + row * 2, mask=i < splits, other=float("-inf"))
    l = tl.load(sums + row * 2 + 1, mask=i < splits, other=0.0)
    highest = tl.max(m, 0)
    weight = tl.exp2(m - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weight * l, 0)
    mask = (i[:, None] < splits) & (d[None, :] < D)
    part = tl.load(parts + row[:, None] * D + d[None, :], mask=mask, other=0.0)
    o = tl.sum(weight[:, None] * part, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + b * sob + h * soh + d * sod, o.to(out.dtype.element_ty), mask=d < D)


def decode_in_splits(q, k_pages, v_pages, block_table, cache_seqlens):
    """Three programs a query head, and a second kernel that merges them."""
    batch, heads, _, d = q.shape
    splits, block_d = 3, triton.next_power_of_2(d)
    out = torch.empty_like(q)
    parts = q.new_empty(batch, heads, splits, d, dtype=torch.float32)
    sums = q.new_empty(batch, heads, splits, 2, dtype=torch.float32)
    strides = _strides(q, k_pages, v_pages, out, block_table)
    _one_split[(batch, heads, splits)](
        q, k_pages, v_pages, parts, sums, block_table, cache_seqlens,
        heads // k_pages.shape[2], d**-0.5, splits, *strides[:11], *strides[14:],
        PAGE=k_pages.shape[1], BLOCK=16, D=d, BLOCK_D=block_d,
    )  # fmt: skip
    _merge[(batch, heads)](
        parts, sums, out, splits, *strides[11:14], D=d, BLOCK_D=block_d, BLOCK_S=4
    )
    return out


RIGHT_ANSWERS = {
    "lab7.kv_bytes_per_token": [bytes_by_product, bytes_of_tensors],
    "lab7.block_allocator": [SequenceObjects, NoCounts, Arrays],
    "lab7.paged_decode": [decode_head_by_head, decode_in_splits],
}

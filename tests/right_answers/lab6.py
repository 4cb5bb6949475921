"""Right answers to lab 6 that are written in other ways than the solution."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from itertools import accumulate, pairwise

import numpy
import torch
import triton
import triton.language as tl

# lab6.pack --------------------------------------------------------------------------------------


def pack_in_a_loop(documents):
    """Grows Python lists, token by token."""
    ids, positions, labels, offsets = [], [], [], [0]
    for document in documents:
        for position, token in enumerate(document):
            ids.append(token)
            positions.append(position)
            labels.append(token if position else -100)
        offsets.append(len(ids))
    rows = {"input_ids": ids, "position_ids": positions, "labels": labels}
    return {
        **{name: torch.tensor([row]) for name, row in rows.items()},
        "cu_seqlens": torch.tensor(offsets, dtype=torch.int32),
        "max_seqlen": max(len(d) for d in documents),
    }


def pack_with_cat(documents):
    """Tensors joined with cat; labels cut out around the boundaries."""
    ids = torch.cat([torch.tensor(d) for d in documents]).unsqueeze(0)
    labels = ids.clone()
    offsets = torch.tensor(list(accumulate([0, *map(len, documents)])), dtype=torch.int32)
    labels[0, offsets[:-1].long()] = -100
    position_ids = torch.cat([torch.arange(len(d)) for d in documents]).unsqueeze(0)
    longest = int((offsets[1:] - offsets[:-1]).max())
    return {
        "max_seqlen": longest,
        "cu_seqlens": offsets,
        "labels": labels,
        "position_ids": position_ids,
        "input_ids": ids,
    }


def pack_in_an_ordered_dict(documents):
    """The longest is NumPy's."""
    lengths = numpy.array([len(d) for d in documents])
    return OrderedDict(pack_in_a_loop(documents), max_seqlen=lengths.max())


def pack_in_a_defaultdict(documents):
    """Every list begins by itself."""
    return defaultdict(list, pack_with_cat(documents))


# lab6.packed_mask -------------------------------------------------------------------------------


def mask_of_blocks(cu_seqlens):
    """Fills the blocks one by one."""
    bounds = cu_seqlens.tolist()
    mask = torch.zeros(bounds[-1], bounds[-1], dtype=torch.bool)
    for first, last in pairwise(bounds):
        mask[first:last, first:last] = torch.ones(last - first, last - first).tril().bool()
    return mask


def mask_with_searchsorted(cu_seqlens):
    i = torch.arange(int(cu_seqlens[-1]), dtype=torch.int32)
    document = torch.searchsorted(cu_seqlens, i, right=True)
    return document[:, None].eq(document).logical_and(i[:, None].ge(i))


def mask_by_start(cu_seqlens):
    """A key is seen from its own place on, and not from before the query's document."""
    total = int(cu_seqlens[-1])
    i = torch.arange(total)
    start = torch.zeros(total, dtype=torch.long)
    for first in cu_seqlens.tolist():
        start[first:] = first
    return (i <= i[:, None]) & (i >= start[:, None])


# lab6.flash_varlen ------------------------------------------------------------------------------


@triton.jit
def _attend_tile(
    q, k, v, out, first, last, row, head, group, scale,
    sqt, sqh, sqd, skt, skh, skd, svt, svh, svd, sot, soh, sod,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The queries row to row + BLOCK of the document [first, last)."""
    i = row + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    here = (i[:, None] < last) & (d[None, :] < D)
    q_i = tl.load(q + i[:, None] * sqt + head * sqh + d[None, :] * sqd, mask=here, other=0.0)
    m = tl.full((BLOCK,), -1e30, tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)
    o = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    kv = head // group
    for key in range(first, tl.minimum(row + BLOCK, last), BLOCK):
        j = key + tl.arange(0, BLOCK)
        there = (j[:, None] < last) & (d[None, :] < D)
        k_j = tl.load(k + j[:, None] * skt + kv * skh + d[None, :] * skd, mask=there, other=0.0)
        v_j = tl.load(v + j[:, None] * svt + kv * svh + d[None, :] * svd, mask=there, other=0.0)
        s = tl.dot(q_i, tl.trans(k_j), input_precision="ieee") * scale
        s = tl.where((j[None, :] <= i[:, None]) & (j[None, :] < last), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - m_new[:, None])
        old = tl.exp(m - m_new)
        l = l * old + tl.sum(p, 1)
        o = o * old[:, None] + tl.dot(p.to(v_j.dtype), v_j, input_precision="ieee")
        m = m_new
    o = o / l[:, None]
    tl.store(
        out + i[:, None] * sot + head * soh + d[None, :] * sod,
        o.to(out.dtype.element_ty),
        mask=here,
    )


@triton.jit
def _one_program_a_document(
    q, k, v, out, offsets, group, scale,
    sqt, sqh, sqd, skt, skh, skd, svt, svh, svd, sot, soh, sod,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.load(offsets + tl.program_id(0))
    last = tl.load(offsets + tl.program_id(0) + 1)
    for row in range(first, last, BLOCK):
        _attend_tile(
            q, k, v, out, first, last, row, tl.program_id(1), group, scale,
            sqt, sqh, sqd, skt, skh, skd, svt, svh, svd, sot, soh, sod,
            D, BLOCK_D, BLOCK,
        )  # fmt: skip


@triton.jit
def _one_program_a_tile(
    q, k, v, out, firsts, lasts, rows, group, scale,
    sqt, sqh, sqd, skt, skh, skd, svt, svh, svd, sot, soh, sod,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    _attend_tile(
        q, k, v, out, tl.load(firsts + tile), tl.load(lasts + tile), tl.load(rows + tile),
        tl.program_id(0), group, scale,
        sqt, sqh, sqd, skt, skh, skd, svt, svh, svd, sot, soh, sod,
        D, BLOCK_D, BLOCK,
    )  # fmt: skip


def _shared(q, k, v, out):
    strides = [stride for t in (q, k, v, out) for stride in t.stride()]
    d = q.shape[2]
    sizes = {"D": d, "BLOCK_D": max(16, triton.next_power_of_2(d)), "BLOCK": 32}
    return (q.shape[1] // k.shape[1], d**-0.5, *strides), sizes


def varlen_by_document(q, k, v, cu_seqlens, max_seqlen):
    """One program a document and head; max_seqlen is not needed."""
    out = torch.zeros_like(q)
    args, sizes = _shared(q, k, v, out)
    grid = (cu_seqlens.numel() - 1, q.shape[1])
    _one_program_a_document[grid](q, k, v, out, cu_seqlens, *args, **sizes)
    return out


def varlen_by_list(q, k, v, cu_seqlens, max_seqlen):
    """The tiles are listed on the CPU first."""
    bounds = cu_seqlens.tolist()
    tiles = [
        (first, last, row) for first, last in pairwise(bounds) for row in range(first, last, 32)
    ]
    listed = torch.tensor(tiles, dtype=torch.int32, device=q.device).T.contiguous()
    out = torch.empty_like(q)
    args, sizes = _shared(q, k, v, out)
    _one_program_a_tile[(q.shape[1], len(tiles))](q, k, v, out, *listed, *args, **sizes)
    return out


RIGHT_ANSWERS = {
    "lab6.pack": [
        pack_in_a_loop,
        pack_with_cat,
        pack_in_an_ordered_dict,
        pack_in_a_defaultdict,
    ],
    "lab6.packed_mask": [mask_of_blocks, mask_with_searchsorted, mask_by_start],
    "lab6.flash_varlen": [varlen_by_document, varlen_by_list],
}
